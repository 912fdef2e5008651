"""Leaves of columns that cannot matter are left out: points in order, lists, and the kernels that go through them.

Which can matter is bounded as in :mod:`sdkde_core.nearby`, but for one thing: what a row's sum is at least is summed,
over the leaves next to its tile, instead of bounded by Jensen's inequality. On a GPU that costs next to nothing, and
is much closer to the whole sum.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from sdkde_core.nearby import order
from sdkde_core.plugin import concatenate, each
from sdkde_core.protocol import TOLERANCES, Partial, Problem, Reduction

from . import choose, launch, listed
from .bounds import SHORT, merges, packed_dimensions, shifts_rows, steps_at_most
from .compiled import copy
from .compiled import launch as run
from .grid import MOST_PARTS, PARTIAL_BYTES, Processor
from .kernels import SCALE_BITS
from .launch import Packed, Weights
from .price import LEFT_OUT
from .space import HEIGHT, LEAF, LISTED, Config, default

#: Leaves next to a tile of rows over which a row's sum is bounded from below, and by how much, in nats, sums at "fast"
#: may exceed the truth, in whatever form: more than :data:`sdkde_core.protocol.TOLERANCES` has.
BESIDE, ABOVE = 128, 0.01

#: Leaves in lists that exist at once, and nodes that tiles of rows visit.
ENTRIES, VISITED = 1 << 26, 1 << 26

#: Columns that one program takes, in SIZEs, at least, and at most in MEAN, which sums what it rounds off; and programs
#: that there are to be for every multiprocessor.
SHORTEST, LONGEST, PROGRAMS = 64, 512, 64


class Near(NamedTuple):
    """Columns in order.

    Parameters
    ----------
    order : (n,) tensor of int
        Of the columns as they came.
    points : (n, d) tensor
    weights : Weights
    leaves, nodes : (2 d + 1, k) float32 tensors
        Boxes and log weights, see :mod:`sdkde_triton.choose`.
    log_weight : float
        Log of the weights' sum.
    """

    order: torch.Tensor
    points: torch.Tensor
    weights: Weights
    leaves: torch.Tensor
    nodes: torch.Tensor
    log_weight: float


class Lists(NamedTuple):
    """What tiles of rows from the ``first`` on take, in parts of ``length``."""

    leaves: torch.Tensor  # int32
    ends: torch.Tensor  # int32
    which: torch.Tensor  # int32, tiles, the longest list first
    first: int
    length: int
    parts: int


class _Rows(NamedTuple):
    """Tiles of rows, and what may be left out of their sums."""

    boxes: torch.Tensor  # (tiles, 2 d) float32
    limits: torch.Tensor  # (tiles,) float32, scores above are left out
    reaches: torch.Tensor  # (tiles,) float32
    counts: torch.Tensor  # (tiles,) int32, leaves that are not


def order_columns(points: torch.Tensor, weights: Weights) -> Near | None:
    """Return the columns in order; None where a coordinate or weight is not finite."""
    log_weights = weights.log
    if not bool(torch.isfinite(points).all() & torch.isfinite(log_weights).all()):
        return None
    where = order(points, LEAF)
    points, log_weights = points[where], log_weights[where]
    leaves = _boxes(points, log_weights, LEAF)
    nodes = _boxes(points, log_weights, LEAF * choose.WIDE.value)
    total = float(torch.logsumexp(log_weights, 0))
    return Near(where, points, Weights(log_weights, weights.vary), leaves, nodes, total)


def _tiles(x: torch.Tensor, size: int, fill: torch.Tensor) -> torch.Tensor:
    """(n, …) as (tiles, size, …), the last tile filled."""
    missing = -x.shape[0] % size
    if missing:
        x = torch.cat([x, fill.expand(missing, *x.shape[1:])])
    return x.reshape(-1, size, *x.shape[1:])


def _ends(points: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Boxes of some points at a time, fp32, rounded outwards, (tiles, d) each."""
    low, high = _tiles(points, size, points[-1:]).aminmax(dim=1)
    infinity = torch.tensor(math.inf, dtype=torch.float32, device=points.device)
    return torch.nextafter(low.float(), -infinity), torch.nextafter(high.float(), infinity)


def _boxes(points: torch.Tensor, log_weights: torch.Tensor, size: int) -> torch.Tensor:
    low, high = _ends(points, size)
    nothing = torch.full((1,), -math.inf, dtype=log_weights.dtype, device=points.device)
    logs = torch.logsumexp(_tiles(log_weights, size, nothing), dim=1)
    return torch.cat([low.T, high.T, logs.float()[None]]).contiguous()


def reduce(
    problem: Problem,
    points: torch.Tensor | None,
    near: Near,
    columns: Packed,
    step: float,
    form: int,
    extent: float,
    most: float = 1.0,
) -> Partial | None:
    """Reduce rows over the columns that can matter to them.

    Parameters
    ----------
    problem : Problem
    points : (m, d) float64 tensor
        None: all columns, in their order as they came.
    near : Near
    columns : Packed
        In order, with a leaf of padding.
    step : float
        See :func:`sdkde_triton.bounds.grid_step`.
    form : int
        See :func:`sdkde_triton.bounds.form`.
    extent : float
        Of the columns, in bandwidths.
    most : float
        Share of the pairs.

    Returns
    -------
    Partial
        In the order of the rows as they came; None where a coordinate is not finite, or more than ``most`` is left.
    """
    if points is None:
        where, rows = near.order, near.points
    elif bool(torch.isfinite(points).all()):
        where = order(points, HEIGHT)
        rows = points[where]
    else:
        return None
    own = 0 if "exclude_self" in problem.requires else None
    packed = columns  # these themselves, where they are the rows
    if rows is not near.points:
        packed = launch.pack(rows, step, near.weights, columns.pieces, scaled=scaled(problem))
    tiles = _count(problem, rows, packed, near, columns, form, own)
    counts = (-(-tiles.counts.to(torch.int64) * LEAF // LISTED)).cpu()  # in SIZEs
    if float(counts.sum()) * LISTED > most * float(len(counts)) * float(columns.padded):  # the last tile may be free
        return None
    longest = LONGEST
    if problem.reduction is not Reduction.MEAN:
        block_n = _config("log_sum", problem, columns.pieces, rows.device).block_n
        longest = max(1, steps_at_most(problem, 0.0) * block_n // LISTED)
    ends, length = _plan(counts, rows.device, 4 * (packed_dimensions(problem.d) + 1), longest)
    found, first = [], 0
    for last in ends:
        over = _list(problem, near, columns, tiles, counts[first:last], first, length)
        some = rows[first * HEIGHT : last * HEIGHT]
        found.append(_sums(problem, some, packed, near, columns, over, step, form, own))
        first = last
    back = torch.empty_like(where)
    back[where] = torch.arange(rows.shape[0], device=where.device)
    return each(concatenate(found), lambda x: x[back])


def scaled(problem: Problem) -> bool:
    """Whether rows scale φ to half precision's range: those that are not shifted by their log sums."""
    return problem.reduction is Reduction.MEAN and not shifts_rows(problem)


def _count(
    problem: Problem, rows: torch.Tensor, packed: Packed, near: Near, columns: Packed, form: int, own: int | None
) -> _Rows:
    """Find out what may be left out of rows' sums, and how many leaves that leaves to be summed."""
    d, m, device = problem.d, rows.shape[0], rows.device
    boxes = torch.cat(_ends(rows, HEIGHT), dim=1)
    tiles, none = boxes.shape[0], columns.padded // LEAF - 1
    sizes = near.leaves.shape[1], near.nodes.shape[1]

    beside = torch.empty((tiles, BESIDE), dtype=torch.int32, device=device)
    for first, some, visited in _chunks(near, tiles):
        before = (boxes, near.leaves, near.nodes, visited, beside)
        copy(choose.near_kernel, some, (*before, *sizes, none, first), (d, BESIDE))
    length, which = BESIDE * LEAF // LISTED, torch.arange(tiles + 1, dtype=torch.int32, device=device)
    over = Lists(beside, which * length, which, 0, length, 1)
    short = SHORT if shifts_rows(problem) else form
    found = _log_sum(problem, packed, m, near.weights, columns, over, short, own, False).log_sum
    if scaled(problem) and columns.pieces == 2:
        found = found - SCALE_BITS.value * math.log(2.0)
    least = _tiles(found, HEIGHT, found[-1:]).amin(dim=1)
    least = least - ABOVE - TOLERANCES["fast"][Reduction.LOG_SUM].relative * least.abs()
    least = torch.where(torch.isfinite(least), least, -math.inf)  # a row without columns

    # 0.97: what bounds may be off by rounding. 1e30 stands for infinity: nothing may be left out.
    allowed = LEFT_OUT * 0.97 * TOLERANCES[problem.precision][problem.reduction].absolute
    lowest = (-math.log(allowed) - least).float().clamp(max=1e30)
    whole = max(near.log_weight, 0.0)  # of all columns, of which these may be some
    reaches = (2.0 * (whole - least).clamp(min=0.0)).sqrt().float().clamp(max=1e30)
    limits, counts = torch.empty_like(lowest), torch.empty(tiles, dtype=torch.int32, device=device)
    apart = (1.0 + 1e-6) * math.log(sizes[0]) / (choose.THRESHOLDS.value - 1)
    for first, some, visited in _chunks(near, tiles):
        arguments = (boxes, near.leaves, near.nodes, lowest, reaches, visited, limits, counts, *sizes, apart, first)
        copy(choose.choose_kernel, some, arguments, _flags(problem))
    return _Rows(boxes, limits, reaches, counts)


def _chunks(near: Near, tiles: int) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Tiles of rows to look at together: the first, how many, and room for the nodes that each visits."""
    nodes = near.nodes.shape[1]
    most = max(1, VISITED // nodes)
    visited = torch.empty(min(tiles, most) * nodes, dtype=torch.int32, device=near.points.device)
    for first in range(0, tiles, most):
        yield first, min(most, tiles - first), visited


def _flags(problem: Problem) -> tuple[int, bool, bool]:
    return problem.d, problem.reduction is Reduction.MEAN, problem.reduction is Reduction.LAPLACE


def _plan(counts: torch.Tensor, device: torch.device, per_row: int, most: int) -> tuple[list[int], int]:
    """Where batches of tiles end, and how many SIZEs a program takes, up to ``most``, by what each list has."""
    programs = PROGRAMS * Processor.of(device).multiprocessors
    length = min(max(-(-int(counts.sum()) // programs), SHORTEST), most)
    length = max(length, -(-int(counts.max()) // MOST_PARTS))
    until, ends, first = counts.cumsum(0), [], 0
    while first < len(counts):
        before = int(until[first - 1]) if first else 0
        last = int(torch.searchsorted(until, before + ENTRIES * LEAF // LISTED, right=True))
        longest = int(counts[first : max(first + 1, last)].max())
        together = PARTIAL_BYTES // (per_row * HEIGHT * max(1, -(-longest // length)))
        first = min(max(first + 1, min(last, first + together)), len(counts))
        ends.append(first)
    return ends, length


def _list(
    problem: Problem, near: Near, columns: Packed, tiles: _Rows, counts: torch.Tensor, first: int, length: int
) -> Lists:
    """The lists of some tiles of rows, from the ``first`` on, which have that many SIZEs."""
    device = near.points.device
    ends = torch.zeros(len(counts) + 1, dtype=torch.int32)
    ends[1:] = counts.cumsum(0)
    # The longest first, so that the last program ends early; neighbours together, as they read the same columns.
    lengths = counts.clamp(min=1).log2().floor()
    which = lengths.argsort(descending=True, stable=True).to(torch.int32).to(device)
    total, together = int(ends[-1]), LISTED // LEAF
    found = torch.empty(max(1, total * together), dtype=torch.int32, device=device)
    ends = ends.to(device)
    sizes = near.leaves.shape[1], near.nodes.shape[1], columns.padded // LEAF - 1
    for begin, some, visited in _chunks(near, len(counts)):
        before = (tiles.boxes, near.leaves, near.nodes, tiles.limits, tiles.reaches, ends, visited, found)
        copy(choose.list_kernel, some, (*before, *sizes, first + begin, first), (*_flags(problem), together))
    return Lists(found, ends, which, first, length, max(1, -(-int(counts.max()) // length)))


def _sums(
    problem: Problem,
    points: torch.Tensor,
    rows: Packed,
    near: Near,
    columns: Packed,
    over: Lists,
    step: float,
    form: int,
    own: int | None,
) -> Partial:
    """Reduce some tiles of rows, whose points are those from ``over.first`` tiles on."""
    top = over.first * HEIGHT
    m = points.shape[0]
    if problem.reduction is not Reduction.MEAN:
        laplace = problem.reduction is Reduction.LAPLACE
        return _log_sum(problem, rows, m, near.weights, columns, over, form, own, laplace)
    log_sums = None
    if shifts_rows(problem):  # as in sdkde_triton.backend
        log_sums = _log_sum(problem, rows, m, near.weights, columns, over, SHORT, own, False).log_sum
        rows = launch.pack(points, step, near.weights, columns.pieces, scaled=True, log_sums=log_sums)
        own, over, top = None if own is None else own + top, over._replace(first=0), 0
    return _mean(problem, rows, top, m, near.weights, columns, over, form, own, log_sums)


def _log_sum(
    problem: Problem,
    rows: Packed,
    m: int,
    weights: Weights,
    columns: Packed,
    over: Lists,
    form: int,
    own: int | None,
    laplace: bool,
) -> Partial:
    """LOG_SUM or LAPLACE of m rows, those of the lists' tiles; see :func:`sdkde_triton.launch.log_sum`."""
    width, kernel = packed_dimensions(problem.d), listed.log_sum_listed_kernel
    flags = (width, rows.pieces, form, merges(problem.d), laplace, weights.vary, own is not None)
    out = _launched("log_sum", kernel, problem, rows, m, columns, over, (weights.log,), flags, 2 + laplace, own)
    return launch.finish_log_sum(problem, out, weights, m, over.parts, laplace)


def _mean(
    problem: Problem,
    rows: Packed,
    top: int,
    m: int,
    weights: Weights,
    columns: Packed,
    over: Lists,
    form: int,
    own: int | None,
    log_sums: torch.Tensor | None,
) -> Partial:
    """MEAN of m rows from ``top`` on; see :func:`sdkde_triton.launch.mean`."""
    width = packed_dimensions(problem.d)
    summed = problem.d < width
    flags = (width, rows.pieces, form, merges(problem.d), summed, own is not None, problem.precision == "high")
    kernel, per_row = listed.mean_listed_kernel, width + (not summed)
    out = _launched("mean", kernel, problem, rows, m, columns, over, (), flags, per_row, own)
    here = Packed(rows.buffer[top * width :], m, rows.padded, rows.pieces)
    return launch.finish_mean(problem, out, here, weights, log_sums, over.parts, summed)


def _launched(
    name: str,
    kernel: Any,
    problem: Problem,
    rows: Packed,
    m: int,
    columns: Packed,
    over: Lists,
    more: tuple[Any, ...],
    flags: tuple[Any, ...],
    per_row: int,
    own: int | None,
) -> torch.Tensor:
    """Partial results of a kernel, (parts, m, per_row) in some order."""
    config = _config(name, problem, rows.pieces, rows.buffer.device)
    out = torch.empty(over.parts * m * per_row, dtype=torch.float32, device=rows.buffer.device)
    sizes = (rows.padded, columns.padded, m, columns.count, problem.d, own or 0, over.first * HEIGHT, over.length)
    before = (rows.buffer, columns.buffer, *more, over.leaves, over.which, over.ends, out, *sizes)
    last = (LISTED, LEAF, config.block_m, config.block_n, config.num_stages)
    run(kernel, (-(-m // HEIGHT), over.parts), before, (*flags, *last), config)
    return out


def _config(name: str, problem: Problem, pieces: int, device: torch.device) -> Config:
    capability, width = Processor.of(device).capability, packed_dimensions(problem.d)
    return default(name, width, capability, merges(problem.d), pieces)
