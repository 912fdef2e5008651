"""Launch parameters of the CUDA kernels: values, limits, defaults, and what the autotuner needs beside them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from sdkde_core.protocol import Problem
from sdkde_core.tuning import GPU, Compiled, Config, checked

from .gpu_bounds import DEPTH, most_depth
from .gpu_bounds import arithmetic as arithmetic_of

#: Values that are worth trying.
VALUES: Mapping[str, tuple[int, ...]] = {
    "depth": (4, 8, 16),
    "rows": (1, 2, 4, 8),
    "threads": (64, 128, 256),
    "columns": (4, 8, 16, 32, 64, 128, 256),
    "registers": (0, 128, 168),
}

#: Shared memory that a block can have without asking, on every card.
SHARED = 48 << 10


class LaunchConfig(NamedTuple):
    depth: int  # a row's coordinates in one thread, at most: where there are more, neighbouring threads share a row
    rows: int  # of a thread
    threads: int  # of a block
    columns: int  # in shared memory at a time
    registers: int  # of a thread, at most; 0: the compiler's choice

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> LaunchConfig:
        """Return the configuration that a mapping describes; ValueError as of :func:`sdkde_core.tuning.checked`."""
        return checked(cls, values, VALUES)


def depth_of(d: int, most: int) -> tuple[int, int]:
    """Return the coordinates in one thread, ``most`` or whole pairs, and the threads that share a row, 32 at most."""
    if d <= most:
        return d, 1
    group = min(32, 1 << (-(-d // most) - 1).bit_length())
    return 2 * -(-d // (2 * group)), group


def added_up(precision: str) -> int:
    """Return how many columns are added up at a time, in float32 but for "float64"."""
    # Beside a heap of duplicates every addition rounds alike, by 2⁻²⁵ of the sum at most: 1e-5 of it after 512.
    return {"fast": 512, "high": 64, "float64": 4096}[precision]


def fitted(config: LaunchConfig, precision: str) -> LaunchConfig:
    """Return the configuration that is launched: with no more columns in shared memory than are added up."""
    return config._replace(columns=min(config.columns, added_up(precision)))


def _shared_bytes(config: LaunchConfig, d: int, arithmetic: str) -> int:
    """Shared memory of a block, with a number a column besides its coordinates."""
    depth, group = depth_of(d, config.depth)
    numbers = depth * group * (2 if arithmetic == "doubled" else 1) + 1
    return config.columns * numbers * (8 if arithmetic == "float64" else 4)


def fits(config: LaunchConfig, reduction: str, d: int, arithmetic: str) -> bool:
    """Whether a configuration fits the shared memory of every card, and its coordinates a thread's registers."""
    depth, _ = depth_of(d, config.depth)
    if depth > most_depth(d) or _shared_bytes(config, d, arithmetic) > SHARED:
        return False
    words = {"doubled": 2, "float64": 2}.get(arithmetic, 1)
    held = (2 * depth + 4 if reduction == "mean" else depth + 4) * words * config.rows
    return held <= (config.registers or 255) - 24


def default(reduction: str, d: int, arithmetic: str) -> LaunchConfig:
    """Return the default configuration, as measured on an H200: 16 coordinates in a thread, few threads to a row."""
    mean, wide = reduction == "mean", arithmetic in ("doubled", "float64")
    held, _ = depth_of(d, DEPTH)
    if held <= 4:
        rows = 4 if mean or wide else 8
    else:
        rows = 2 if wide or not mean or held > DEPTH else 4
    config = LaunchConfig(DEPTH, rows, 256, 128, 0)
    while _shared_bytes(config, d, arithmetic) > SHARED // 2 and config.columns > VALUES["columns"][0]:
        config = config._replace(columns=config.columns // 2)
    if wide and mean and held > 4:
        return config._replace(rows=1, threads=128, registers=168 if held <= DEPTH else 0)
    return config._replace(threads=128) if arithmetic == "doubled" and held > 4 else config


class CudaSpace:
    """See :class:`sdkde_core.tuning.Space`."""

    config_version = 1

    def kernels(self, problem: Problem) -> tuple[str, ...]:
        return (f"{problem.reduction.value}_{arithmetic_of(problem)}",)

    def dimension(self, kernel: str, problem: Problem) -> int:
        return problem.d

    def parameters(self, kernel: str) -> Mapping[str, tuple[Any, ...]]:
        return VALUES

    def default(self, kernel: str, problem: Problem, architecture: str) -> Config:
        return default(problem.reduction.value, problem.d, arithmetic_of(problem))._asdict()

    def limit(self, kernel: str, config: Config, problem: Problem, architecture: str) -> str | None:
        try:
            given = fitted(LaunchConfig.of(config), problem.precision)
        except ValueError as error:
            return str(error)
        fit = fits(given, problem.reduction.value, problem.d, arithmetic_of(problem))
        return None if fit else "exceeds the shared memory of a block, or a thread's registers"

    def seconds(self, kernel: str, config: Config, problem: Problem, card: GPU) -> float:
        return 0.0  # not known

    def compile(self, kernel: str, config: Config, problem: Problem, architecture: str) -> Compiled:
        """Code for the card here, which is kept, to be measured: for no other one, as :meth:`seconds` are not known."""
        import torch
        from numba import cuda

        from .gpu_kernels import signature
        from .gpu_launch import compiled

        shape, device = self.code(kernel, config, problem), torch.device(problem.device)
        made, types = compiled(shape, device)[0], signature(shape)
        taken = (made.get_regs_per_thread, made.get_shared_mem_per_block, made.get_local_mem_per_thread)
        with cuda.gpus[device.index or 0]:
            return Compiled(*(ask(types) for ask in taken))

    def code(self, kernel: str, config: Config, problem: Problem) -> Any:
        from .gpu_launch import shape_of

        return shape_of(problem, arithmetic_of(problem), fitted(LaunchConfig.of(config), problem.precision))

    def too_much(self, compiled: Compiled, architecture: str) -> str | None:
        if compiled.shared > SHARED:
            return f"takes {compiled.shared} bytes of shared memory, a block has {SHARED}"
        # What the loop over columns does not touch may spill, stores and loads: MEAN's default in 32 dimensions, as
        # measured on an H200, spills 1116 bytes of a thread on an RTX A6000.
        return f"spills {compiled.spills} bytes" if compiled.spills > 1200 else None


SPACE = CudaSpace()
