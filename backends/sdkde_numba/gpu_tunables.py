"""What the autotuner needs of the CUDA target: its kernels, what they may be launched with, what that should cost."""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Mapping
from typing import Any

from sdkde_core.protocol import Problem, Reduction
from sdkde_core.tuning import GPU, Compiled, Config

from . import gpu_space as space
from .gpu_bounds import arithmetic

__all__ = ["SPACE", "CudaSpace"]


class CudaSpace:
    """See :class:`sdkde_core.tuning.Space`."""

    config_version = space.CONFIG_VERSION

    def kernels(self, problem: Problem) -> tuple[str, ...]:
        return (f"{problem.reduction.value}_{arithmetic(problem)}",)

    def dimension(self, kernel: str, problem: Problem) -> int:
        return problem.d

    def parameters(self, kernel: str) -> Mapping[str, tuple[Any, ...]]:
        return space.SPACE

    def default(self, kernel: str, problem: Problem, architecture: str) -> Config:
        return space.default(problem.reduction.value, problem.d, arithmetic(problem))._asdict()

    def limit(self, kernel: str, config: Config, problem: Problem, architecture: str) -> str | None:
        try:
            given = _launched(config, problem)
        except ValueError as error:
            return str(error)
        if space.fits(given, problem.reduction.value, problem.d, arithmetic(problem)):
            return None
        return "exceeds the shared memory of a block, or a thread's registers"

    def seconds(self, kernel: str, config: Config, problem: Problem, card: GPU) -> float:
        return predicted(_launched(config, problem), problem, card)

    def compile(self, kernel: str, config: Config, problem: Problem, architecture: str) -> Compiled:
        return compile_kernel(_launched(config, problem), problem, architecture)

    def code(self, kernel: str, config: Config, problem: Problem) -> Hashable:
        from .gpu_launch import shape_of

        return shape_of(problem, arithmetic(problem), _launched(config, problem))

    def too_much(self, compiled: Compiled, architecture: str) -> str | None:
        if compiled.shared > space.SHARED:
            return f"takes {compiled.shared} bytes of shared memory, a block has {space.SHARED}"
        # What the loop over columns does not touch may spill, stores and loads: MEAN's default in 32 dimensions, as
        # measured on an H200, spills 1116 bytes of a thread on an RTX A6000.
        return f"spills {compiled.spills} bytes" if compiled.spills > 1200 else None


def _launched(config: Config, problem: Problem) -> space.LaunchConfig:
    return space.fitted(space.LaunchConfig.of(config), problem.precision)


SPACE = CudaSpace()


def predicted(config: space.LaunchConfig, problem: Problem, card: GPU) -> float:
    """Seconds of a kernel on a card: a rough figure, for ranking.

    A column costs a block its instructions, for every row of a thread, and vectors from shared memory, once; blocks
    that share a multiprocessor hide the latencies of each other, as far as registers let several in.
    """
    from .gpu_launch import part_size  # PyTorch comes with it

    kind, mean = arithmetic(problem), problem.reduction is Reduction.MEAN
    depth, group = space.depth_of(problem.d, config.depth)
    words = 2 if kind in ("doubled", "float64") else 1
    distance = {"expanded": 1, "single": 2, "doubled": 4, "float64": 2}[kind]
    instructions = config.rows * ((distance + mean) * depth + (5 if mean else 7) + 2 * math.log2(group)) + 8
    rate = card.scalar / 64  # warp instructions per clock and multiprocessor
    if kind == "float64":
        instructions, rate = instructions + 30 * config.rows, card.matrix.get("float64", 4) / 128
    issue = instructions / rate
    loads = words * depth * 4 / 16 * 2.0  # two cycles a vector
    exps = config.rows * 32 / card.exps * (0 if kind == "float64" else 1)
    held = words * depth * (2 * config.rows + 1 if mean else config.rows) + 4 * config.rows + 30
    held += 16 * config.rows * (group > 1)  # exponents of several columns wait for each other's exchange
    registers = min(255, held, config.registers or 255)
    warps = config.threads // 32
    resident = max(1, min(65536 // (registers * config.threads), 2048 // config.threads))
    spilled = max(1.0, held / (config.registers or 255)) ** 2
    chains = min(1.0, resident * warps * min(config.rows, 4) / (6 * rate))  # dependent instructions take some cycles
    cycles = max(issue / chains, loads, exps) * warps * spilled
    height = config.threads // group * config.rows
    slots = card.sms * resident
    padded = -(-problem.n // config.columns) * config.columns
    part = part_size(problem.m, padded, height, config.columns, slots, 64)
    blocks = math.ceil(problem.m / height) * math.ceil(padded / part)
    tiles = math.ceil(part / config.columns)
    waves = blocks / slots
    rounds = 1.0 if waves <= 1 else float(math.ceil(waves)) if waves < 4 else waves + 0.5
    copy = 40.0 + config.columns * depth * group * words * 4 / 64  # of a tile, and two barriers
    shared = resident * min(1.0, waves) if waves <= 1 else resident
    return rounds * max(1.0, shared) * tiles * (config.columns * cycles + copy) / (card.clock_ghz * 1e9) + 4e-6


def compile_kernel(config: space.LaunchConfig, problem: Problem, architecture: str) -> Compiled:
    """Compile a kernel as a problem launches it, for any architecture that the toolkit here knows.

    For the card that is here the compiled code is kept, so that whoever measures it need not compile it again.

    Raises
    ------
    Exception
        Whatever the compiler raises.
    """
    import torch
    from numba import cuda

    from .gpu_kernels import signature
    from .gpu_launch import Card, compiled, shape_of

    shape, device = shape_of(problem, arithmetic(problem), config), torch.device(problem.device)
    if not torch.cuda.is_available() or Card.of(device).architecture != architecture:
        return resources(ptx(shape, architecture), architecture, config.registers)
    kernel, types = compiled(shape, device)[0], signature(shape)
    taken = (kernel.get_regs_per_thread, kernel.get_shared_mem_per_block, kernel.get_local_mem_per_thread)
    with cuda.gpus[device.index or 0]:
        return Compiled(*(ask(types) for ask in taken))


def ptx(shape: Any, architecture: str) -> str:
    """Return the PTX of a kernel; RuntimeError in a process whose Numba simulates kernels."""
    from numba import cuda

    from .gpu_kernels import SIMULATED, reduction, signature

    if SIMULATED:
        raise RuntimeError("NUMBA_ENABLE_CUDASIM replaces the compiler; unset it to compile")
    capability = divmod(int(architecture.removeprefix("sm_")), 10)
    text: str = cuda.compile_ptx(reduction(shape), signature(shape).args, cc=capability)[0]
    return text


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
    stores, loads, shared = (
        sum(map(int, re.findall(rf"(\d+) bytes {what}", report)[:1]))
        for what in ("spill stores", "spill loads", "smem")
    )
    used = re.findall(r"[Uu]sed (\d+) registers", report)
    # The linker's count has the KiB that the system keeps of a block's shared memory.
    return Compiled(int(used[-1]), max(0, shared - 1024), stores + loads)
