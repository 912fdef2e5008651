"""Launch parameters of the CUDA kernels: values, limits, defaults, and what the autotuner needs beside them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from sdkde_core.protocol import Problem, Reduction
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
        """A rough figure, for ranking: instructions, vectors from shared memory, and latencies that blocks hide."""
        given = fitted(LaunchConfig.of(config), problem.precision)
        kind, mean = arithmetic_of(problem), problem.reduction is Reduction.MEAN
        depth, group = depth_of(problem.d, given.depth)
        words = 2 if kind in ("doubled", "float64") else 1
        distance = {"expanded": 1, "single": 2, "doubled": 4, "float64": 2}[kind]
        instructions = given.rows * ((distance + mean) * depth + (5 if mean else 7) + 2 * math.log2(group)) + 8
        rate = card.scalar / 64  # warp instructions per clock and multiprocessor
        exps = given.rows * 32 / card.exps
        if kind == "float64":
            instructions, rate, exps = instructions + 30 * given.rows, card.matrix.get("float64", 4) / 128, 0.0
        loads = words * depth * 4 / 16 * 2.0  # two cycles a vector
        held = words * depth * (2 * given.rows + 1 if mean else given.rows) + 4 * given.rows + 30
        held += 16 * given.rows * (group > 1)  # exponents of several columns wait for each other's exchange
        most, warps = given.registers or 255, given.threads // 32
        resident = max(1, min(65536 // (min(held, most) * given.threads), 2048 // given.threads))
        chains = min(1.0, resident * warps * min(given.rows, 4) / (6 * rate))  # dependent instructions take some cycles
        cycles = max(instructions / rate / chains, loads, exps) * warps * max(1.0, held / most) ** 2
        copy = 40.0 + given.columns * depth * group * words * 4 / 64  # of a tile, and two barriers
        tiles = math.ceil(problem.m / (given.threads // group * given.rows)) * math.ceil(problem.n / given.columns)
        return max(1.0, tiles / card.sms) * (given.columns * cycles + copy) / (card.clock_ghz * 1e9) + 4e-6

    def compile(self, kernel: str, config: Config, problem: Problem, architecture: str) -> Compiled:
        """The code that is compiled for the card here is kept: whoever measures it need not compile it again."""
        import torch
        from numba import cuda

        from .gpu_kernels import signature
        from .gpu_launch import card_of, compiled

        shape, device = self.code(kernel, config, problem), torch.device(problem.device)
        if not torch.cuda.is_available() or card_of(device)[1] != architecture:
            return resources(ptx(shape, architecture), architecture, shape.registers)
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


def ptx(shape: Any, architecture: str) -> str:
    """Return the PTX of a kernel; RuntimeError in a process whose Numba simulates kernels."""
    from numba import cuda

    from .gpu_kernels import SIMULATED, reduction, signature

    if SIMULATED:
        raise RuntimeError("NUMBA_ENABLE_CUDASIM replaces the compiler; unset it to compile")
    capability = divmod(int(architecture.removeprefix("sm_")), 10)
    return str(cuda.compile_ptx(reduction(shape), signature(shape).args, cc=capability)[0])


def resources(text: str, architecture: str, registers: int = 0) -> Compiled:
    """Assemble PTX, and return what the assembler says that it takes."""
    from cuda.bindings import nvjitlink

    options = [f"-arch={architecture}", "-verbose", *([f"-maxrregcount={registers}"] if registers else [])]
    code = text.encode()
    linker = nvjitlink.create(len(options), options)
    try:
        nvjitlink.add_data(linker, nvjitlink.InputType.PTX, code, len(code), "kernel")
        nvjitlink.complete(linker)
        log = bytearray(nvjitlink.get_info_log_size(linker))
        nvjitlink.get_info_log(linker, log)
    finally:
        nvjitlink.destroy(linker)
    report = log.decode()
    counts = (re.findall(rf"(\d+) bytes {what}", report)[:1] for what in ("spill stores", "spill loads", "smem"))
    stores, loads, shared = (sum(map(int, found)) for found in counts)
    used = re.findall(r"[Uu]sed (\d+) registers", report)
    # The linker's count has the KiB that the system keeps of a block's shared memory.
    return Compiled(int(used[-1]), max(0, shared - 1024), stores + loads)
