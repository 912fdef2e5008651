"""Host side of the kernels: buffers, packing, grids, and which kernels make a reduction."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple, TypeAlias

import torch
import triton

from sdkde_core.plugin import grids
from sdkde_core.protocol import Partial, Problem, Reduction

from . import blocked, bounds, finish, kernels
from .bounds import MOST_DIRECT, Form, in_blocks, merges, mirrors, packed_dimensions, scales, steps_at_most, stores
from .compiled import Launch, bits, card, compiled, configuration
from .direct import direct_kernel, transpose_kernel
from .space import COLUMN_PADDING, LEAF, LISTED, Config, block_k

#: How log sums become densities: the added constant, whether the log is wanted, the dtype. None: return a Partial.
End: TypeAlias = tuple[float, bool, torch.dtype] | None

#: Rows and columns with padding, then without it.
Sizes: TypeAlias = tuple[int, int, int, int]

#: Parts of the columns at most: the second dimension of a grid.
MOST_PARTS = (1 << 16) - 1

#: Bytes of partial results that may exist at once; more rows come in slabs.
PARTIAL_BYTES = 1 << 30

_transposing = functools.lru_cache(1024)(functools.partial(Launch, transpose_kernel))
_finishing_log_sum = functools.lru_cache(1024)(functools.partial(Launch, finish.finish_log_sum_kernel))
_finishing_mean = functools.lru_cache(1024)(functools.partial(Launch, finish.finish_mean_kernel))


class Packed(NamedTuple):
    """Points packed as rows, or as columns and rows; see :mod:`sdkde_triton.kernels` for the buffer's layout.

    ``raised``: the bits by which the rows raise all exponents, to centre the log weights at 0.
    """

    buffer: torch.Tensor
    points: int
    padded: int
    pieces: int
    raised: float = 0.0


def pack(
    problem: Problem, points: torch.Tensor, step: float, log_weights: torch.Tensor, pieces: int, *,
    columns: bool = False, log_sums: torch.Tensor | None = None, rounded: bool = False, beyond: int = 0,
    raised: float = 0.0,
) -> Packed:  # fmt: skip
    """Pack float64 points (n, d) as rows, or as columns of the first product and as its rows.

    ``step`` is g (:func:`sdkde_triton.bounds.grid_step`), ``log_weights`` are the columns'. Rows are shifted by
    ``log_sums`` (n,), if given. MEAN's rows are scaled to half precision's range if they are shifted or need no shift.
    ``rounded``, for MEAN that stores φ at "fast": columns are followed by copies in two rounded pieces. ``beyond``: the
    least number of padding columns. ``raised``: as of :class:`Packed`.
    """
    (n, d), varies = points.shape, "weights" in problem.requires
    padded = -(-(n + beyond) // COLUMN_PADDING) * COLUMN_PADDING if columns else n
    flags = columns, varies, log_sums is not None, log_sums is not None or scales(problem), rounded
    run, halves = _packing(n, padded, d, step, pieces, raised, *flags)
    buffer = torch.empty(halves, dtype=torch.float16, device=points.device)
    run(points, log_weights, log_weights if log_sums is None else log_sums, buffer)
    return Packed(buffer, n, padded, pieces, raised)


@functools.lru_cache(maxsize=1024)
def _packing(n: int, padded: int, d: int, step: float, pieces: int, raised: float, *flags: bool) -> tuple[Launch, int]:
    columns, vary, shifted, scaled, rounded = flags
    width, each = packed_dimensions(d), 48 if columns else 32
    span, halves = triton.next_power_of_2(width), padded * (pieces * width + each + 2 * width * rounded)
    block = max(2, 2048 // span)
    raised += float(kernels.SCALE_BITS.value) if scaled and pieces == 2 else 0.0
    parameters = width, span, pieces, block, columns, merges(d), vary, shifted, rounded, in_blocks(d)
    return Launch(kernels.pack_kernel, (-(-padded // block), 1), (n, padded, d, step, raised), parameters), halves


def transpose(points: torch.Tensor, arithmetic: str, padding: int = 1) -> torch.Tensor:
    """Return v = √(log2 e) u as the direct kernel reads it; padding columns lie far away.

    (d, n) in ``"float32"`` or ``"float64"``; ``"doubled"`` is (2 d, n): float32 coordinates, then what rounding lost.
    """
    (n, d), doubled = points.shape, arithmetic == "doubled"
    shape = (1 + doubled) * d, -(-n // padding) * padding
    single = arithmetic != "float64"
    v = torch.empty(shape, dtype=torch.float32 if single else torch.float64, device=points.device)
    _transposing((-(-shape[1] // 512), d), (n, shape[1], d), (single, doubled, 512))(points, v)
    return v


def kernel_of(
    name: str, problem: Problem, config: Config, capability: int, pieces: int, form: int, arithmetic: str, both: bool
) -> tuple[Any, tuple[Any, ...]]:
    """Return a kernel by its name in :mod:`sdkde_triton.space`, and its compile-time parameters, in order.

    ``_listed`` follows the name of those over lists. ``both``: stored φ serves rows and columns.
    """
    d, width, merged, exact = problem.d, packed_dimensions(problem.d), merges(problem.d), bounds.exact(problem)
    laplace, mean = problem.reduction is Reduction.LAPLACE, problem.reduction is Reduction.MEAN
    varies = "weights" in problem.requires
    weighted = varies and laplace  # others' are in the columns
    packed, tile = (width, pieces, form), (config.block_m, config.block_n, config.num_stages)
    if name.startswith("direct"):
        held, by_own = min(d, MOST_DIRECT + 1), name == "direct_mean"
        return direct_kernel, (held, arithmetic == "doubled", laplace, mean, varies, by_own, *tile[:2])
    listed = name.endswith("_listed")
    columns = listed, LISTED if listed else config.block_n, LEAF, *tile
    if name.startswith("log_sum"):
        return kernels.log_sum_kernel, (*packed, merged, laplace, weighted, *columns)
    if name.startswith("mean"):
        return kernels.mean_kernel, (*packed, merged, d < width, exact, *columns)
    if name == "weighted_sum":
        return blocked.weighted_sum_kernel, (width, exact, both, *tile, block_k(0, pieces, capability))
    stores, depth = name == "stored", block_k(width, pieces, capability)
    return blocked.blocked_kernel, (*packed, laplace, stores, both, exact, weighted, *tile, depth)


def _partial(
    name: str, problem: Problem, sizes: Sizes, given: Any, most: int, pieces: int, form: int, arithmetic: str = ""
) -> tuple[torch.Tensor, int]:
    """Return a kernel's partial results, and the number of splits of the columns; see :func:`_splits`."""
    on, columns = given[0].device, problem.d if arithmetic else packed_dimensions(problem.d)
    config = configuration(name, problem, columns, card(on), pieces)
    run, size, parts, dtype = _splits(name, problem, sizes, most, pieces, form, arithmetic, config, on)
    out = torch.empty(size, dtype=dtype, device=on)
    run(*given, out)
    return out, parts


@functools.lru_cache(maxsize=1024)
def _splits(
    name: str, problem: Problem, sizes: Sizes, most: int, pieces: int, form: int, kind: str, config: Config, on: Any
) -> tuple[Launch, int, int, torch.dtype]:
    """Return a launch over all splits of the columns, the size of its results, the number of splits, and the dtype.

    A program takes blocks of columns, at most ``most`` of them unless the grid would be too large. The number of splits
    follows from the problem's rows, not from the rows of a slab: so the bits are the same in every slab.
    """
    (_, padded, m, n), d, processor = sizes, problem.d, card(on)
    kernel, flags = kernel_of(name, problem, config, processor.capability, pieces, form, kind, False)
    whole = not kind and name != "blocked"  # a kernel that goes through lists, or through all columns
    numbers = (m, n, d, padded) if kind else (*sizes, d, 0) if whole else (*sizes, 0, 0)
    laplace, mean = problem.reduction is Reduction.LAPLACE, problem.reduction is Reduction.MEAN
    per_row = max(packed_dimensions(d), d + 1) if name == "mean" else 2 + (d if mean else laplace)
    operand = {"": torch.float16, "float64": torch.float64}.get(kind, torch.float32)
    dtype = torch.float64 if kind == "float64" else torch.float32
    before = *(operand, operand), *[torch.float64] * (name != "mean"), *[operand] * (3 * whole)
    code = compiled(kernel, (*before, dtype, *numbers, n), flags, config) if on.type == "cuda" else None
    used = (code.n_regs or 128, code.metadata.shared) if code else (128, 0)  # without it a guess
    slots = processor.multiprocessors * processor.resident(32 * config.num_warps, *used)
    bytes_per_row, columns = per_row * dtype.itemsize, most * config.block_n
    limit = most_parts(slab_rows(problem.m, n, bytes_per_row, columns), bytes_per_row)
    parts, length = splits(problem.m, n, config.block_m, config.block_n, slots, limit, columns)
    run = Launch(kernel, (-(-m // config.block_m), parts), (*numbers, length), flags, config)
    return run, parts * m * per_row, parts, dtype


def log_sum(
    problem: Problem, rows: Packed, columns: Packed, log_weights: torch.Tensor, form: int, end: End = None
) -> Any:
    """LOG_SUM or LAPLACE on Tensor Cores, by a form of the exponents; the rows may be some of the problem's m."""
    name = "blocked" if in_blocks(problem.d) else "log_sum"
    sizes = rows.padded, columns.padded, rows.points, columns.points
    given = rows.buffer, columns.buffer, log_weights, *[rows.buffer] * (3 * (name == "log_sum"))  # no lists
    out, parts = _partial(name, problem, sizes, given, steps_at_most(problem, 0.0), rows.pieces, form)
    return finish_log_sum(problem, out, log_weights, rows.points, parts, end)


def finish_log_sum(
    problem: Problem, partial: torch.Tensor, log_weights: torch.Tensor, m: int, parts: int, end: End = None
) -> Any:
    """Merge the partial results of LOG_SUM, or of LAPLACE, for m rows; with ``end`` the density."""
    laplace, varies = problem.reduction is Reduction.LAPLACE, "weights" in problem.requires
    constant, log, dtype = end or (0.0, False, torch.float64)
    result = torch.empty((3, m) if laplace and end is None else m, dtype=dtype, device=partial.device)
    ending = 0 if end is None else 1 if log else 2
    flags = laplace, varies, ending, dtype is torch.float32, 128
    run = _finishing_log_sum((-(-m // 128), 1), (m, parts, problem.d), flags)
    run(partial, log_weights, result, last=(bits(constant),))
    if end is not None:
        return result
    return Partial(result[0], None, result[1], result[2]) if laplace else Partial(result)


def mean(
    problem: Problem, rows: Packed, columns: Packed, log_weights: torch.Tensor, form: int, extent: float,
    log_sums: torch.Tensor | None = None,
) -> Partial:  # fmt: skip
    """MEAN on Tensor Cores of columns within ``extent``, of rows shifted by ``log_sums`` (m,), if any; as log_sum."""
    if stores(problem, form, card(rows.buffer.device).capability):
        out = _stored_mean(problem, rows, columns, form, extent)
        return finish_mean(problem, out, rows, log_weights, log_sums, 1)
    sizes = rows.padded, columns.padded, rows.points, columns.points
    given, most = (rows.buffer, columns.buffer, *[rows.buffer] * 3), steps_at_most(problem, extent)
    out, parts = _partial("mean", problem, sizes, given, most, rows.pieces, form)
    summed = problem.d < packed_dimensions(problem.d)
    return finish_mean(problem, out, rows, log_weights, log_sums, parts, summed)


def _stored_mean(problem: Problem, rows: Packed, columns: Packed, form: int, extent: float) -> torch.Tensor:
    """Return Σ φ (m,) and Σ φ v (m, D), float64, in one array; φ of blocks of rows and columns goes through memory."""
    width, m, device = packed_dimensions(problem.d), rows.points, rows.buffer.device
    processor, exact, pieces = card(device), problem.precision == "high", rows.pieces
    config, shape = (configuration(name, problem, width, processor, pieces) for name in ("stored", "weighted_sum"))
    both = mirrors(problem) and m == columns.points
    across = -(-width // shape.block_n)
    most = block_points(shape.block_m, across * (1 + both), processor.multiprocessors)
    if extent > 25.0:  # one launch sums fewer columns in fp32, see steps_at_most
        most = most // 4 // COLUMN_PADDING * COLUMN_PADDING
    wide, tall = (min(most, -(-x // COLUMN_PADDING) * COLUMN_PADDING) for x in (columns.points, m))
    phi = torch.empty((3 if exact else 2) * tall * wide, dtype=torch.float16, device=device)
    tiles = tall * (wide // config.block_n) + wide * (tall // config.block_m)
    totals = torch.empty(tiles, dtype=torch.float64, device=device)
    sums = torch.zeros(m * (1 + width), dtype=torch.float64, device=device)
    how = processor.capability, pieces, form, "", both
    kernel, flags = kernel_of("stored", problem, config, *how)
    sum_kernel, sum_flags = kernel_of("weighted_sum", problem, shape, *how)
    # What is summed: the three pieces, or v rounded to two, which follow the columns' constants.
    values = columns.buffer if exact else columns.buffer[columns.padded * (pieces * width + 48) :]
    for top in range(0, m, tall):
        height = min(tall, -(-(m - top) // COLUMN_PADDING) * COLUMN_PADDING)
        for first in range(top if both else 0, columns.points, wide):
            here = min(wide, columns.padded - first)
            mirrored = both and first > top
            before = (rows.buffer, columns.buffer, totals, phi, rows.padded, columns.padded)
            after = (m, columns.points, top, first, here)
            grid = height // config.block_m, here // config.block_n
            Launch(kernel, grid, (), flags, config)(*before, *after)
            sizes = (columns.padded, m, columns.points, top, first, height, here, config.block_m, config.block_n)
            given = phi, values, totals, sums, *sizes
            grid = -(-max(height, here * mirrored) // shape.block_m), across * (1 + mirrored)
            Launch(sum_kernel, grid, (), sum_flags, shape)(*given)
    return sums


def finish_mean(
    problem: Problem, partial: torch.Tensor, rows: Packed | torch.Tensor, log_weights: torch.Tensor,
    log_sums: torch.Tensor | None, parts: int, summed: bool = False,
) -> Partial:  # fmt: skip
    """Merge the partial results of MEAN for rows, packed or from :func:`transpose`."""
    d, direct = problem.d, isinstance(rows, torch.Tensor)
    buffer, m, padded, pieces, raised = (rows, rows.shape[1], 0, 0, 0.0) if isinstance(rows, torch.Tensor) else rows
    shift = torch.empty((m, d), dtype=torch.float64, device=buffer.device)
    result = torch.empty(m, dtype=torch.float64, device=buffer.device)
    width = packed_dimensions(d)
    span = triton.next_power_of_2(width)
    block = max(1, 512 // span)
    how = direct, summed, log_sums is not None, "weights" in problem.requires
    run = _finishing_mean((-(-m // block), 1), (padded, m, parts, d, raised), (width, span, pieces, *how, block))
    run(partial, buffer, log_weights, result if log_sums is None else log_sums, result, shift)
    return Partial(result, shift)


def direct(
    problem: Problem, arithmetic: str, rows: torch.Tensor, columns: torch.Tensor, log_weights: Any, end: End = None
) -> Any:
    """Any reduction by direct differences of points from :func:`transpose`, the columns padded; see :func:`log_sum`."""
    m, mean, most = rows.shape[1], problem.reduction is Reduction.MEAN, steps_at_most(problem, 0.0, packed=False)
    by_own = bounds.anchored(problem) and arithmetic != "float64"
    name, sizes = "direct_mean" if by_own else "direct", (m, columns.shape[1], m, log_weights.shape[0])
    given = rows, columns, log_weights
    out, parts = _partial(name, problem, sizes, given, most, 2, Form.SHORT, arithmetic)
    if mean:
        return finish_mean(problem, out, rows, log_weights, None, parts)
    return finish_log_sum(problem, out, log_weights, m, parts, end)


def splits(rows: int, n: int, block_m: int, step: int, slots: int, limit: int, columns: int) -> tuple[int, int]:
    """Return in how many parts the columns are split, as a rule ``limit`` at most, and the columns of each.

    A program has ``block_m`` rows, takes ``step`` columns at a time and ``columns`` at most; a card holds ``slots``.
    """
    blocks, steps = -(-rows // block_m), -(-n // step)
    fewest = min(-(-n // columns), MOST_PARTS)
    most = max(fewest, min(steps, limit, -(-8 * slots // blocks)))
    parts, length = grids.parts(blocks, steps, slots, most, begins=2, fewest=fewest)
    return parts, length * step


def block_points(block_m: int, across: int, multiprocessors: int) -> int:
    """Return how many rows and columns of φ are stored at a time: some 4096, 64 MiB or 96.

    Their sums, of ``block_m`` rows and one of ``across`` parts of the dimensions a program, are to fill whole waves.
    """

    def filled(points: int) -> float:
        programs = points // block_m * across
        return programs / (multiprocessors * math.ceil(programs / multiprocessors))

    return max(range(3072, 6144, COLUMN_PADDING), key=lambda points: (round(filled(points), 1), -abs(points - 4096)))


def most_parts(rows: int, bytes_per_row: int) -> int:
    """Return the number of parts that the columns may be split into, by their results' memory."""
    return max(1, min(64, PARTIAL_BYTES // (rows * bytes_per_row)))


def slab_rows(rows: int, n: int, bytes_per_row: int, columns: int) -> int:
    """Return the rows of a slab, for :data:`PARTIAL_BYTES`, so that the last slab is not a small one."""
    fewest = min(-(-n // columns), MOST_PARTS)
    most = max(128, PARTIAL_BYTES // (bytes_per_row * fewest))  # fewer rows have enough parts to fill a card
    count, unit = -(-rows // most), 1024 if most >= 4096 else 128
    return min(rows, -(-rows // (count * unit)) * unit, max(most // unit, 1) * unit)
