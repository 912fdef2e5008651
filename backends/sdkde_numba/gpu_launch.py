"""Host side of the CUDA kernels: packing, compiled code, grids, and the results of all parts joined."""

from __future__ import annotations

import functools
import math
import threading
import warnings
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from numba import cuda

from sdkde_core.plugin import current_stream, exponents, grids
from sdkde_core.protocol import Partial, Problem, Reduction
from sdkde_core.tuning import Query, Tuned, tuned

from .bounds import LN2
from .gpu_bounds import anchored
from .gpu_kernels import ABSENT, SIMULATED, Shape, reduction, signature
from .gpu_space import SPACE, LaunchConfig, added_up, default, depth_of, fits, fitted
from .kept import keep


class Packed(NamedTuple):
    numbers: torch.Tensor  # (padded · width,)
    n: int
    padded: int
    terms: torch.Tensor | None = None  # (padded,), of columns that have t_j


def card_of(device: torch.device) -> tuple[str, str]:
    """Return a device's name, as :func:`sdkde_core.tuning.card_name` has it, and its architecture, such as "sm_90"."""
    card = grids.Card.of(device)
    return card.name, f"sm_{card.capability}" if device.type == "cuda" else "simulated"


def configuration(
    problem: Problem, arithmetic: str, device: torch.device
) -> tuple[LaunchConfig, tuple[Query, Tuned] | None]:
    """Return the launch parameters, and how they are known where they were tuned."""
    kind, d = problem.reduction.value, problem.d
    query = Query("numba-cuda", f"{kind}_{arithmetic}", SPACE.config_version, d, *card_of(device))
    asked = replace(problem, dtype="float32" if problem.precision == "fast" else "float64")
    found = tuned(query, asked, lambda x: fits(LaunchConfig.of(x), kind, d, arithmetic))
    config = fitted(LaunchConfig.of(found.config) if found else default(kind, d, arithmetic), problem.precision)
    if SIMULATED:  # what the simulator is done with in time: each thread is one of the operating system
        threads = max(8, depth_of(d, config.depth)[1])
        config = config._replace(rows=min(config.rows, 2), threads=threads, columns=min(config.columns, 32))
    return config, (query, found) if found else None


def shape_of(problem: Problem, arithmetic: str, config: LaunchConfig) -> Shape:
    depth, group = depth_of(problem.d, config.depth)
    expanded = arithmetic == "expanded"
    launched = config.rows, config.threads, config.columns, config.registers
    flags = "weights" in problem.requires or expanded, anchored(problem) and not expanded
    return Shape(depth, group, *launched, problem.reduction.value, arithmetic, *flags)


def _scale(arithmetic: str) -> float:
    """What coordinates are multiplied by before they are rounded, see :mod:`sdkde_numba.gpu_kernels`."""
    return 1.0 if arithmetic == "float64" else math.sqrt((1.0 if arithmetic == "expanded" else 0.5) / LN2)


def pack(points: torch.Tensor, arithmetic: str, width: int, log_weights: Any = None, tile: int = 0) -> Packed:
    """Pack float64 points (n, d) to ``width`` coordinates, padded with zeros, in float32 or float64.

    Columns are padded to a multiple of ``tile``: the added ones lie far away, or have no weight.
    """
    n, d = points.shape
    padded = -(-n // tile) * tile if tile else n
    double, doubled, expanded = (arithmetic == kind for kind in ("float64", "doubled", "expanded"))
    dtype = torch.float64 if double else torch.float32
    numbers = points.new_zeros((padded, 2 * width if doubled else width), dtype=dtype)
    scaled = points if double else points * _scale(arithmetic)
    numbers[:n, :d] = scaled
    if doubled:
        numbers[:n, width : width + d] = scaled - numbers[:n, :d]
    if not expanded:
        numbers[n:, 0] = 1e150 if double else 1e18  # far from each other and from any exponent, as ABSENT
    if not tile or (log_weights is None and not expanded):
        return Packed(numbers.view(-1), n, padded)
    terms = points.new_full((padded,), ABSENT[double], dtype=dtype)
    t = torch.zeros_like(points[:, 0]) if log_weights is None else log_weights / LN2
    terms[:n] = t - _half_squares(numbers[:n]) if expanded else t
    return Packed(numbers.view(-1), n, padded, terms)


def _half_squares(numbers: torch.Tensor) -> torch.Tensor:
    """½‖v‖² of coordinates as the kernel has them, float64."""
    return 0.5 * _added(numbers.double().square().T)


def _added(x: torch.Tensor) -> torch.Tensor:
    """Add up along the first axis, in an order that follows from its length alone.

    PyTorch's own order follows from the other axes too: a row's bits would depend on how many come with it.
    """
    while len(x) > 1:
        half, odd = len(x) // 2, x[len(x) // 2 * 2 :]
        x = x[:half] + x[half : 2 * half]
        if len(odd):
            x[0] += odd[0]
    return x[0]


def most_rows(problem: Problem) -> int:
    """Return how many rows to take at a time: their partial results may take 256 MiB."""
    return max(1024, (1 << 25) // (problem.d + 18))


def reduce(
    problem: Problem, rows: Packed, columns: Packed, log_weight: torch.Tensor, arithmetic: str, config: LaunchConfig
) -> Partial:
    """Sum some or all rows of a problem over columns; ``log_weight`` is added to log sums."""
    shape, expanded = shape_of(problem, arithmetic, config), arithmetic == "expanded"
    (kernel, slots), m = compiled(shape, rows.numbers.device), rows.n
    height = config.threads // shape.group * config.rows  # rows of a block
    # The number of parts follows from the problem and the card, not from the rows of this call.
    slab = min(problem.n if problem.same else problem.m, most_rows(problem))
    limit = max(1, min(64, (1 << 25) // (shape.results * slab)))
    blocks, tiles = -(-problem.m // height), -(-columns.padded // config.columns)
    most = min(tiles, limit, max(1, 8 * slots // blocks))
    parts, length = grids.parts(blocks, tiles, slots, most, begins=1)
    results = torch.zeros(parts, shape.results, m, dtype=torch.float64, device=rows.numbers.device)
    chunk = added_up("float64" if arithmetic == "float64" else problem.precision)
    terms = columns.numbers if columns.terms is None else columns.terms
    arguments = (rows.numbers, columns.numbers, terms, results.view(-1))
    counts = (m, columns.padded, length * config.columns, chunk)
    _launch(kernel, (-(-m // height), parts), config.threads, arguments, counts)
    base = -_half_squares(rows.numbers.view(-1, shape.width)[:m]) if expanded else 0.0
    # The parts are added up in order, in float64.
    top, sums = results[:, 0].amax(0), results[:, 1:]  # (m,), (parts, results − 1, m)
    if expanded and problem.reduction is Reduction.LAPLACE:  # exponents below the parts' largest
        sums = torch.stack([sums[:, 0], sums[:, 1] + results[:, 0] * sums[:, 0]], 1)
    if parts > 1 and not shape.anchored:
        sums = sums * torch.exp2(results[:, 0] - top)[:, None]
    added = _added(sums)  # (results − 1, m)
    total, log_scale = added[0], (top + base) * LN2 + log_weight
    if problem.reduction is Reduction.LAPLACE:
        exponent = (added[1] + base * total) * LN2  # −½r² = ln 2 · log2 φ
        return exponents.laplace(problem.d, total, exponent, log_scale)
    mean = problem.reduction is Reduction.MEAN
    shift = (added[1 : 1 + problem.d] / (total * _scale(arithmetic))).T.contiguous() if mean else None
    return Partial(total.log() + log_scale, shift=shift)


_lock = threading.RLock()
_stream = functools.lru_cache(cuda.external_stream)


@functools.cache
def compiled(shape: Shape, device: torch.device) -> tuple[Any, int]:
    """Return a kernel, from Numba's cache on disk or compiled, and how many of its blocks the card holds."""
    function = reduction(shape)
    if SIMULATED:
        return cuda.jit(function), 1
    options: dict[str, Any] = {"max_registers": shape.registers} if shape.registers else {}
    types = signature(shape)
    with _lock, cuda.gpus[device.index]:
        kernel = cuda.jit(**options)(function)
        keep(kernel)
        kernel.compile(types)
        kernel._specialized = True  # as of a kernel that is made with its types: calls do not look at their arguments'
        kernel.disable_compile()
        registers, shared = kernel.get_regs_per_thread(types), kernel.get_shared_mem_per_block(types)
    card = grids.Card.of(device)
    return kernel, card.multiprocessors * card.resident(shape.threads, registers, shared)


def _launch(kernel: Any, grid: tuple[int, int], threads: int, arguments: Any, counts: tuple[int, ...]) -> None:
    device = arguments[0].device
    if SIMULATED:
        with _lock:  # the simulator replaces parts of modules while it runs
            kernel[grid, threads](*(x.numpy() for x in arguments), *counts)
        return
    handle = current_stream(device.index)
    with cuda.gpus[device.index]:
        arrays = [cuda.as_cuda_array(x, sync=False) for x in arguments]
        _configured(kernel, grid, threads, _stream(handle))(*arrays, *counts)


@functools.lru_cache(maxsize=1024)
def _configured(kernel: Any, grid: tuple[int, int], threads: int, stream: Any) -> Any:
    """A kernel with its grid; Numba advises on grids that are as large as the problem is."""
    with _lock, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return kernel[grid, threads, stream]
