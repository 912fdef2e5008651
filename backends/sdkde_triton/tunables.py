"""What the autotuner needs of this backend: its kernels, what they may be launched with, and what that should cost."""

from __future__ import annotations

import math
import os
import re
import subprocess
import tempfile
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sdkde_core.protocol import Problem, Reduction
from sdkde_core.tuning import GPU, Compiled, Config

from . import bounds, info, space
from .bounds import Form
from .space import LEAST_CAPABILITY

#: Raised when a launch parameter changes its meaning: configurations stored under another version are not used.
CONFIG_VERSION = 1


@dataclass(frozen=True)
class Launch:
    """A kernel as a problem launches it: a name of :mod:`sdkde_triton.space`, with ``_full`` for three pieces."""

    kernel: str
    columns: int
    pieces: int = 2
    form: int = Form.SHORT
    arithmetic: str = ""

    @property
    def base(self) -> str:
        return self.kernel.removesuffix("_full")


def launches(problem: Problem) -> tuple[Launch, ...]:
    """Return the kernels that can be tuned, by descending time; log weights are no large numbers."""
    extent, formula = problem.extent, bounds.formula(problem, problem.extent)
    mean, shifted = problem.reduction is Reduction.MEAN, bounds.shifts_rows(problem)
    if formula == "direct":
        kind = bounds.arithmetic(problem, extent)
        by_own = bounds.anchored(problem) and kind != "float64"
        return (Launch("direct_mean" if by_own else "direct", problem.d, arithmetic=kind),)
    form, width = bounds.form(problem, extent, bounds.grid_step(problem, extent)), bounds.packed_dimensions(problem.d)
    pieces, suffix = (3, "_full") if form == Form.FULL else (2, "")
    sums = []
    if not mean or shifted:
        wide = bounds.in_blocks(problem.d)
        plain = form if not shifted or wide else Form.SHORT
        sums = [Launch(("blocked" if wide else "log_sum") + suffix, width, pieces, plain)]
    if bounds.stores(problem, form):
        both = [Launch(name + suffix, width, pieces, form) for name in ("weighted_sum", "stored")]
        return (*both, *sums)
    return (Launch("mean" + suffix, width, pieces, form), *sums) if mean else tuple(sums)


class TritonSpace:
    """See :class:`sdkde_core.tuning.Space`."""

    config_version = CONFIG_VERSION

    def kernels(self, problem: Problem) -> tuple[str, ...]:
        return tuple(launch.kernel for launch in launches(problem))

    def dimension(self, kernel: str, problem: Problem) -> int:
        launch = _find(kernel, problem)
        return dimension(launch.base, launch.columns, problem.d)

    def parameters(self, kernel: str) -> Mapping[str, tuple[Any, ...]]:
        if kernel.startswith("direct"):  # nothing is loaded far ahead
            return {**space.SPACE, "block_n": (4, 8, 16, 32, 64), "num_stages": (1,)}
        return {**space.SPACE, "block_m": (64, 128, 256), "block_n": (16, 32, 64, 128, 256)}

    def default(self, kernel: str, problem: Problem, architecture: str) -> Config:
        launch = _find(kernel, problem)
        merged = bounds.merges(problem.d)
        return space.default(launch.base, launch.columns, capability(architecture), merged, launch.pieces)._asdict()

    def limit(self, kernel: str, config: Config, problem: Problem, architecture: str) -> str | None:
        try:
            given = space.Config.of(config)
        except ValueError as error:
            return str(error)
        if capability(architecture) < LEAST_CAPABILITY:
            return f"needs compute capability 8.0, {architecture} has less"
        launch = _find(kernel, problem)
        if space.fits(launch.base, given, launch.columns, capability(architecture), launch.pieces):
            return None
        return f"exceeds the shared memory or the registers of {architecture}, or has too few columns"

    def seconds(self, kernel: str, config: Config, problem: Problem, card: GPU) -> float:
        """Seconds of a kernel on a card, from what its multiprocessors do in a step: a rough figure, only for ranking.

        Products, exponentials with the other arithmetic, and loads from the cache (48 bytes a cycle) overlap as far as
        several programs share a multiprocessor; a step loses 300 cycles to barriers: fitted by eye to an H200.
        """
        launch, given = _find(kernel, problem), space.Config.of(config)
        pairs, threads = given.block_m * given.block_n, 32 * given.num_warps
        work, each = info.work(problem), pairs / problem.pairs
        units = [each * (work.exps / card.exps + work.scalar_flops / card.scalar)]
        accumulators = pairs * (1.5 if launch.base in ("log_sum", "direct", "direct_mean") else 2.0)
        if not launch.base.startswith("direct"):
            rate = card.matrix["float16"] * 0.6 * min(1.0, given.block_n / 64, threads / 128)
            units.append(each * sum(work.matrix_flops.values()) / rate)
            points = given.block_n + given.block_m * (launch.base in space.BLOCKED)
            units.append(points * 2.0 * launch.pieces * launch.columns / 48.0)
        if launch.base == "mean":
            accumulators += 2.0 * given.block_m * launch.columns
        registers = 40.0 + accumulators / threads
        architecture = capability(card.architecture)
        shared = space.shared_bytes(launch.base, given, launch.columns, launch.pieces, architecture)
        most = min(65536 // int(min(255.0, registers) * threads), space.shared_limit(architecture) // shared)
        resident = max(1, min(most, 2048 // threads))
        hidden = 1.0 - 1.0 / (resident * (1 if given.num_stages == 1 else 1.5))
        step = max(units) + (1.0 - hidden) * (sum(units) - max(units)) + 300.0 / resident
        step *= max(1.0, registers / 255.0) ** 2  # what spills
        across = problem.n / given.block_n
        if launch.base == "weighted_sum":  # a tile of rows and dimensions, over all columns
            across = math.ceil(launch.columns / given.block_n) * problem.n / launch.columns
        steps = math.ceil(problem.m / given.block_m) * across
        # Few programs leave multiprocessors idle; a program ends about half a wave after the others.
        return (max(steps / card.sms, across / 64) + 2.0 * resident) * step / (card.clock_ghz * 1e9)

    def compile(self, kernel: str, config: Config, problem: Problem, architecture: str) -> Compiled:
        given = space.Config.of(config)
        compiled = compiled_kernel(_find(kernel, problem), given, problem, capability(architecture))
        registers, spills = usage(compiled.asm["cubin"])
        return Compiled(registers, int(compiled.metadata.shared), spills)

    def code(self, kernel: str, config: Config, problem: Problem) -> Hashable:
        features = "weights" in problem.requires, bounds.mirrors(problem)
        given = space.Config.of(config), problem.reduction, problem.precision, problem.d, *features
        return _find(kernel, problem), *given

    def too_much(self, compiled: Compiled, architecture: str) -> str | None:
        limit = space.shared_limit(capability(architecture))
        if compiled.shared > limit:
            return f"takes {compiled.shared} bytes of shared memory, {architecture} has {limit}"
        return f"spills {compiled.spills} bytes" if compiled.spills > SPILLS else None


SPACE = TritonSpace()

#: Bytes of a thread that may spill: so few are not touched in the loop over columns.
SPILLS = 16


def dimension(kernel: str, columns: int, d: int) -> int:
    """Return the dimension by which configurations are known: D, or what stands for a kernel's variants below it."""
    if kernel.startswith("direct"):
        return d if d <= bounds.MOST_DIRECT else bounds.packed_dimensions(d)
    # With the constants in the free columns of hi the products are fewer: 12 stands for the dimensions that have them.
    return 12 if bounds.merges(d) and kernel.startswith(("mean", "log_sum")) else columns


def capability(architecture: str) -> int:
    """Ten times the compute capability: 90 of ``"sm_90"``."""
    return int(architecture.removeprefix("sm_"))


def _find(kernel: str, problem: Problem) -> Launch:
    found = {launch.kernel: launch for launch in launches(problem)}
    if kernel not in found:
        raise ValueError(f"the problem does not run {kernel}, but {', '.join(found)}")
    return found[kernel]


def compiled_kernel(launch: Launch, config: space.Config, problem: Problem, capability: int) -> Any:
    """Return what Triton's compiler makes of a kernel as a problem launches it; raises what the compiler raises."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise RuntimeError("TRITON_INTERPRET=1 replaces the compiler; unset it to compile")
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from .launch import kernel_of

    how = config, capability, launch.pieces, launch.form, launch.arithmetic, bounds.mirrors(problem)
    kernel, flags = kernel_of(launch.base, problem, *how)
    constants = dict(zip(kernel.arg_names[-len(flags) :], flags, strict=True))
    real = {"float64": "*fp64", "float32": "*fp32", "doubled": "*fp32"}.get(launch.arithmetic)
    types = dict.fromkeys(("rows", "columns", "phi"), real or "*fp16")
    types |= dict.fromkeys(("leaves", "which", "ends"), "*i32") | dict.fromkeys(("log_weights", "sums"), "*fp64")
    types["out"] = {"stored": "*fp16", "weighted_sum": "*fp64"}.get(launch.base, real or "*fp32")
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, t in enumerate(signature.values()) if t.startswith("*")}
    source = ASTSource(kernel, signature=signature, constexprs=constants, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=config.options)


def usage(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread, and bytes that spill, as the assembler reports them."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [str(tool), "--dump-resource-usage", str(path)]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", report)}
    return found["REG"], found["STACK"] + found["LOCAL"]
