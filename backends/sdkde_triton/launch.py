"""Host side of the kernels: buffers, packing, and which kernels make a reduction."""

from __future__ import annotations

import struct
from typing import Any, NamedTuple, TypeAlias

import torch

from sdkde_core.protocol import Partial, Problem, Reduction

from . import blocked, finish, kernels
from .bounds import MOST_DIRECT, SQRT_LOG2E, in_blocks, merges, mirrors, packed_dimensions, steps_at_most, stores
from .compiled import configuration, copy, launch, reduce
from .direct import direct_kernel
from .grid import Processor, block_points
from .space import COLUMN_PADDING, block_k, tiles_per_sum

#: What becomes of a log sum: the constant that is added, whether the log is wanted, and the dtype. Of a shift: the
#: points (n, d) to which half of it is added. None: a :class:`Partial`.
End: TypeAlias = tuple[float, bool, torch.dtype] | torch.Tensor | None


class Packed(NamedTuple):
    """Points packed as rows, or as columns and rows; see :mod:`sdkde_triton.kernels` for the buffer's layout."""

    buffer: torch.Tensor
    points: int
    padded: int
    pieces: int


class Weights(NamedTuple):
    """The columns' log weights (n,), float64, and whether they vary."""

    log: torch.Tensor
    vary: bool


def pack(
    points: torch.Tensor,
    step: float,
    weights: Weights,
    pieces: int,
    *,
    columns: bool = False,
    log_sums: torch.Tensor | None = None,
    scaled: bool = False,
    rounded: bool = False,
    beyond: int = 0,
) -> Packed:
    """Pack float64 points (n, d) as rows, or as columns of the first product and as its rows.

    ``step`` is g (:func:`sdkde_triton.bounds.grid_step`), ``weights`` are the columns'. Rows are shifted by
    ``log_sums`` (n,), and ``scaled`` for MEAN, to half precision's range. ``rounded``, for MEAN that stores φ at
    "fast": columns are followed by themselves in two pieces that are rounded as such. ``beyond``: columns of padding at
    least.
    """
    n, d = points.shape
    padded = -(-(n + beyond) // COLUMN_PADDING) * COLUMN_PADDING if columns else n
    width, span = packed_dimensions(d), _power_of_two(packed_dimensions(d))
    halves = padded * (pieces * width + (48 if columns else 32) + 2 * width * rounded)
    buffer = torch.empty(halves, dtype=torch.float16, device=points.device)
    block = max(2, 2048 // span)
    shifts = weights.log if log_sums is None else log_sums
    arguments = (points, weights.log, shifts, buffer, n, padded, d, step)
    flags = (width, span, pieces, block, columns, merges(d), weights.vary, log_sums is not None, scaled)
    copy(kernels.pack_kernel, -(-padded // block), arguments, (*flags, rounded, in_blocks(d)))
    return Packed(buffer, n, padded, pieces)


def bits(x: float) -> int:
    """Return a number's bits, as Triton passes floats in 32; of 0 those of −0, as small integers go in 32 too."""
    found: int = struct.unpack("q", struct.pack("d", x or -0.0))[0]
    return found


def transpose(points: torch.Tensor, arithmetic: str, padding: int = 1) -> torch.Tensor:
    """Return v = √(log2 e) u as the direct kernel reads it; padding columns lie far away.

    (d, n) in ``"float32"`` or ``"float64"``; ``"doubled"`` is (2 d, n), what fp32 leaves of every coordinate last.
    """
    n, d = points.shape
    dtype = torch.float64 if arithmetic == "float64" else torch.float32
    shape = (2 if arithmetic == "doubled" else 1) * d, -(-n // padding) * padding
    v = torch.zeros(shape, dtype=dtype, device=points.device)
    scaled = points.T * SQRT_LOG2E
    v[:d, :n] = scaled
    if arithmetic == "doubled":
        v[d:, :n] = scaled - v[:d, :n]
    v[:d, n:] = 1e152 if dtype == torch.float64 else 1e17
    return v


def log_sum(
    problem: Problem, rows: Packed, columns: Packed, weights: Weights, form: int, own: int | None, end: End = None
) -> Any:
    """LOG_SUM or LAPLACE on Tensor Cores, by a form of the exponents; row i leaves out column i + ``own``.

    The problem's m is of all rows, of which these may be some.
    """
    width, m, n = packed_dimensions(problem.d), rows.points, columns.points
    laplace, exclude = problem.reduction is Reduction.LAPLACE, own is not None
    per_row, processor = 3 if laplace else 2, Processor.of(rows.buffer.device)
    before, sizes = (rows.buffer, columns.buffer, weights.log), (rows.padded, columns.padded, m, n)
    kernel: Any = kernels.log_sum_kernel
    name, after, last = "log_sum", [*sizes, problem.d, own or 0], list[int]()
    flags: list[int] = [merges(problem.d), laplace, weights.vary, exclude]
    if in_blocks(problem.d):
        kernel, name, after = blocked.blocked_kernel, "blocked", [*sizes, own or 0, 0, 0]
        flags = [laplace, False, False, problem.precision == "high", weights.vary, exclude]
        last = [block_k(width, rows.pieces, processor.capability)]
    config = configuration(name, problem, width, processor, rows.pieces)
    flags = [width, rows.pieces, form, *flags]
    most = steps_at_most(problem, 0.0)
    out, parts = reduce(kernel, config, config.block_n, problem.m, m, n, per_row, before, after, flags, most, last)
    return finish_log_sum(problem, out, weights, m, parts, laplace, end)


def finish_log_sum(
    problem: Problem, partial: torch.Tensor, weights: Weights, m: int, parts: int, laplace: bool, end: End = None
) -> Any:
    """Merge the partial results of LOG_SUM, or of LAPLACE, for m rows; with ``end``, of LOG_SUM, the density."""
    constant, log, dtype = end if isinstance(end, tuple) else (0.0, False, torch.float64)
    result = torch.empty((3, m) if laplace else m, dtype=dtype, device=partial.device)
    arguments = (partial, weights.log, result, m, parts, problem.d, bits(constant))
    flags = laplace, weights.vary, 0 if end is None else 1 if log else 2, dtype == torch.float32, 128
    copy(finish.finish_log_sum_kernel, -(-m // 128), arguments, flags)
    if end is not None:
        return result
    return Partial(result[0], None, result[1], result[2]) if laplace else Partial(result)


def mean(
    problem: Problem,
    rows: Packed,
    columns: Packed,
    weights: Weights,
    form: int,
    extent: float,
    log_sums: torch.Tensor | None = None,
    own: int | None = None,
    end: End = None,
) -> Any:
    """MEAN on Tensor Cores of columns within ``extent`` bandwidths of the origin; see :func:`log_sum`.

    ``log_sums`` (m,) are what the rows were shifted by, if they were.
    """
    width, m, n = packed_dimensions(problem.d), rows.points, columns.points
    processor = Processor.of(rows.buffer.device)
    if stores(problem, form, processor.capability):
        out = _stored_mean(problem, rows, columns, form, extent, own)
        return finish_mean(problem, out, rows, weights, log_sums, 1, end=end)
    config = configuration("mean", problem, width, processor, rows.pieces)
    before, after = (rows.buffer, columns.buffer), (rows.padded, columns.padded, m, n, problem.d, own or 0)
    summed = problem.d < width
    tiles = tiles_per_sum(width, form, merges(problem.d), processor.capability) if config.block_n <= 128 else 1
    exact = problem.precision == "high"
    flags = (width, rows.pieces, form, merges(problem.d), summed, own is not None, exact, tiles)
    per_row, step = width if summed else width + 1, tiles * config.block_n
    most = steps_at_most(problem, extent)
    out, parts = reduce(kernels.mean_kernel, config, step, problem.m, m, n, per_row, before, after, flags, most)
    return finish_mean(problem, out, rows, weights, log_sums, parts, summed, end)


def _stored_mean(
    problem: Problem, rows: Packed, columns: Packed, form: int, extent: float, own: int | None
) -> torch.Tensor:
    """Return Σ φ (m,) and Σ φ v (m, D), float64, in one array; φ goes through memory.

    Rows and columns come in blocks. Where the rows are the columns, those of two blocks serve both.
    """
    width, m, device = packed_dimensions(problem.d), rows.points, rows.buffer.device
    processor, exact, pieces = Processor.of(device), problem.precision == "high", rows.pieces
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
    tile = (config.block_m, config.block_n, config.num_stages, block_k(width, pieces, processor.capability))
    flags = (width, pieces, form, False, True, both, exact, False, own is not None, *tile)
    tile = (shape.block_m, shape.block_n, shape.num_stages, block_k(0, pieces, processor.capability))
    # What is summed: the three pieces, or v rounded to two, which follow the columns' constants.
    values = columns.buffer if exact else columns.buffer[columns.padded * (pieces * width + 48) :]
    for top in range(0, m, tall):
        height = min(tall, -(-(m - top) // COLUMN_PADDING) * COLUMN_PADDING)
        for first in range(top if both else 0, columns.points, wide):
            here = min(wide, columns.padded - first)
            mirrored = both and first > top
            before = (rows.buffer, columns.buffer, totals, phi, rows.padded, columns.padded)
            after = (m, columns.points, own or 0, top, first, here)
            grid = height // config.block_m, here // config.block_n
            launch(blocked.blocked_kernel, grid, (*before, *after), flags, config)
            sizes = (columns.padded, m, columns.points, top, first, height, here, config.block_m, config.block_n)
            given = phi, values, totals, sums, *sizes
            grid = -(-max(height, here * mirrored) // shape.block_m), across * (1 + mirrored)
            launch(blocked.weighted_sum_kernel, grid, given, (width, exact, both, *tile), shape)
    return sums


def finish_mean(
    problem: Problem,
    partial: torch.Tensor,
    rows: Packed | torch.Tensor,
    weights: Weights,
    log_sums: torch.Tensor | None,
    parts: int,
    summed: bool = False,
    end: End = None,
) -> Any:
    """Merge the partial results of MEAN for those rows, packed or as :func:`transpose` returns them.

    With ``end`` the moved points.
    """
    d, width, direct = problem.d, packed_dimensions(problem.d), isinstance(rows, torch.Tensor)
    buffer, m, padded, pieces = (rows, rows.shape[1], 0, 0) if isinstance(rows, torch.Tensor) else rows
    shift = torch.empty((m, d), dtype=torch.float64, device=buffer.device)
    result = torch.empty(m, dtype=torch.float64, device=buffer.device)
    span = _power_of_two(width)
    block = max(1, 512 // span)
    given = result if log_sums is None else log_sums
    points = end if isinstance(end, torch.Tensor) else shift
    arguments = (partial, buffer, weights.log, given, result, shift, points, padded, m, parts, d)
    flags = (width, span, pieces, direct, summed, log_sums is not None, weights.vary, end is not None, block)
    copy(finish.finish_mean_kernel, -(-m // block), arguments, flags)
    return Partial(result, shift) if end is None else shift


def direct(
    problem: Problem, rows: torch.Tensor, columns: torch.Tensor, weights: Weights, own: int | None, end: End = None
) -> Any:
    """Any reduction by direct differences of points from :func:`transpose`, the columns padded; see :func:`log_sum`."""
    d, m, n = problem.d, rows.shape[1], weights.log.shape[0]
    laplace, mean = problem.reduction is Reduction.LAPLACE, problem.reduction is Reduction.MEAN
    exclude, doubled = own is not None, rows.shape[0] > d
    anchored = mean and problem.same and not weights.vary and not exclude and rows.dtype is torch.float32
    name = "direct_mean" if anchored else "direct"
    config = configuration(name, problem, d, Processor.of(rows.device))
    before, after = (rows, columns, weights.log), (m, n, d, own or 0, columns.shape[1])
    flags = (min(d, MOST_DIRECT + 1), doubled, laplace, mean, weights.vary, exclude, anchored)
    per_row = 2 + (d if mean else laplace)
    most = steps_at_most(problem, 0.0, packed=False)
    out, parts = reduce(direct_kernel, config, config.block_n, problem.m, m, n, per_row, before, after, flags, most)
    if mean:
        return finish_mean(problem, out, rows, weights, None, parts, end=end)
    return finish_log_sum(problem, out, weights, m, parts, laplace, end)


def _power_of_two(x: int) -> int:
    return 1 << (x - 1).bit_length()
