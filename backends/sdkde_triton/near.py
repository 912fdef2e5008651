"""Tiles of pairs that cannot matter are left out: points in order, lists, and the kernels that take them.

:mod:`sdkde_core.nearby` says which tiles, with a bound for every row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from sdkde_core.nearby import Index, index, lists, order, share
from sdkde_core.plugin import concatenate, each, to_host
from sdkde_core.protocol import Columns, Partial, Problem, Reduction, Sample

from . import launch, listed
from .bounds import SHORT, merges, packed_dimensions, shifts_rows
from .compiled import launch as run
from .grid import PARTIAL_BYTES, Processor
from .launch import Packed, Weights
from .space import default
from .tunables import LISTED

__all__ = ["HEIGHT", "SIZE", "Near", "forecast", "order_columns", "pays", "reduce", "takes"]

#: Columns and rows of a tile, and points that stand together in their order.
SIZE, HEIGHT, LEAF = LISTED, 64, 8

#: Rows whose lists are begun together, in tiles; and pairs of tiles that are looked at once, some 60 bytes each.
GROUP, LOOKED = 8, 1 << 25

#: Tiles of columns that one program takes at most.
LONGEST = 128

#: Dimensions from which it can pay, and up to which a packed operand is as narrow as any.
LEAST, MOST = 2, 16

#: Pairs from which it is looked how many of them matter, which takes 15 ms: on an H200 less than 5 % of the sums over
#: that many. And the share up to which the others are left out.
LOOK, PAYS = 6e11, 0.6

#: Columns by which it is judged how many pairs matter.
SAMPLE = 1 << 12


class Near(NamedTuple):
    """Columns in order.

    Parameters
    ----------
    columns : Index
    points : (n, d) tensor
    weights : Weights
    """

    columns: Index
    points: torch.Tensor
    weights: Weights


def takes(problem: Problem) -> bool:
    """Whether the kernels here take a problem that is computed from packed operands."""
    return problem.precision == "fast" and LEAST <= problem.d <= MOST


def order_columns(problem: Problem, columns: Columns) -> Near | None:
    """Return the columns in order; None where a coordinate or weight is not finite."""
    points, log_weights = columns.points, columns.log_weights
    if not bool(torch.isfinite(points).all() & torch.isfinite(log_weights).all()):
        return None
    found = index(points, log_weights, SIZE, LEAF if problem.same else SIZE)
    vary = "weights" in problem.requires
    return Near(found, points[found.order], Weights(log_weights[found.order], vary))


def pays(problem: Problem, columns: Columns) -> bool:
    """Whether to leave tiles out: where sums over all pairs take long, and few of them matter."""
    return problem.pairs >= LOOK and forecast(problem, columns) <= PAYS


def forecast(problem: Problem, columns: Columns) -> float:
    """Return about what share of the pairs matters, from some of the columns."""
    step = -(-columns.points.shape[0] // SAMPLE)
    points, log_weights = (np.asarray(to_host(x[step // 2 :: step])) for x in (columns.points, columns.log_weights))
    if not (np.isfinite(points).all() and np.isfinite(log_weights).all()):
        return 1.0
    sample = Sample(points, points, log_weights, points.min(axis=0), points.max(axis=0))
    with np.errstate(all="ignore"):
        return share(problem, sample, SIZE, HEIGHT)


def reduce(
    problem: Problem, points: torch.Tensor | None, near: Near, columns: Packed, step: float, form: int
) -> Partial | None:
    """Reduce rows over the columns that can matter to them, at "fast".

    Parameters
    ----------
    problem : Problem
    points : (m, d) float64 tensor
        None: all columns, in their order as they came.
    near : Near
    columns : Packed
        ``near.points``.
    step : float
        See :func:`sdkde_triton.bounds.grid_step`.
    form : int
        See :func:`sdkde_triton.bounds.form`.

    Returns
    -------
    Partial
        In the order of the rows as they came; None where a coordinate is not finite.
    """
    if points is None:
        where, rows = near.columns.order, near.points
    elif bool(torch.isfinite(points).all()):
        where = order(points, LEAF)
        rows = points[where]
    else:
        return None
    m, tiles = rows.shape[0], near.columns.fine.log_weight.shape[0]
    together = GROUP * HEIGHT
    at_once = together * max(1, LOOKED // (GROUP * tiles))
    found = []
    for first in range(0, m, at_once):
        found.append(_some(problem, rows[first : first + at_once], first, near, columns, step, form))
    back = torch.empty_like(where)
    back[where] = torch.arange(m, device=where.device)
    return each(concatenate(found), lambda x: x[back])


def _some(
    problem: Problem, rows: torch.Tensor, top: int, near: Near, columns: Packed, step: float, form: int
) -> Partial:
    """Reduce rows from ``top`` on: their lists, then as many at a time as memory for partial results suffices for."""
    wanted = lists(problem, near.columns, rows, HEIGHT, GROUP * HEIGHT)
    ends, listed_tiles = wanted.ends.to(torch.int32), wanted.tiles.to(torch.int32)
    parts = max(1, -(-int((ends[1:] - ends[:-1]).max()) // LONGEST))
    per_row = 4 * (packed_dimensions(problem.d) + 1)
    most = HEIGHT * max(1, PARTIAL_BYTES // (per_row * parts * HEIGHT))
    found = []
    for first in range(0, rows.shape[0], most):
        own = top + first if "exclude_self" in problem.requires else None
        over = _Lists(listed_tiles, ends, first // HEIGHT, parts)
        found.append(_sums(problem, rows[first : first + most], near.weights, columns, over, step, form, own))
    return concatenate(found)


class _Lists(NamedTuple):
    """What tiles of rows take: those from the ``first`` on, in that many parts."""

    tiles: torch.Tensor  # int32
    ends: torch.Tensor  # int32
    first: int
    parts: int


def _sums(
    problem: Problem,
    points: torch.Tensor,
    weights: Weights,
    columns: Packed,
    over: _Lists,
    step: float,
    form: int,
    own: int | None,
) -> Partial:
    mean, shifted = problem.reduction is Reduction.MEAN, shifts_rows(problem)
    rows = launch.pack_rows(points, step, weights, columns.pieces, scaled=mean and not shifted)
    if not mean:
        return _log_sum(problem, rows, weights, columns, over, form, own, problem.reduction is Reduction.LAPLACE)
    log_sums = None
    if shifted:  # as in sdkde_triton.backend
        log_sums = _log_sum(problem, rows, weights, columns, over, SHORT, own, False).log_sum
        rows = launch.pack_rows(points, step, weights, columns.pieces, scaled=True, log_sums=log_sums)
    width = packed_dimensions(problem.d)
    summed = problem.d < width
    flags = (width, rows.pieces, form, merges(problem.d), summed, own is not None)
    per_row = width if summed else width + 1
    out = _launched("mean", listed.mean_listed_kernel, problem, rows, columns, over, (), flags, per_row, own)
    return launch.finish_mean(problem, out, rows, weights, log_sums, over.parts, summed)


def _log_sum(
    problem: Problem,
    rows: Packed,
    weights: Weights,
    columns: Packed,
    over: _Lists,
    form: int,
    own: int | None,
    laplace: bool,
) -> Partial:
    width = packed_dimensions(problem.d)
    flags = (width, rows.pieces, form, merges(problem.d), laplace, weights.vary, own is not None)
    kernel, per_row = listed.log_sum_listed_kernel, 3 if laplace else 2
    out = _launched("log_sum", kernel, problem, rows, columns, over, (weights.log,), flags, per_row, own)
    return launch.finish_log_sum(problem, out, weights, rows.count, over.parts, laplace)


def _launched(
    name: str,
    kernel: Any,
    problem: Problem,
    rows: Packed,
    columns: Packed,
    over: _Lists,
    more: tuple[Any, ...],
    flags: tuple[Any, ...],
    per_row: int,
    own: int | None,
) -> torch.Tensor:
    """Partial results of a kernel, (parts, m, per_row) in some order."""
    processor = Processor.of(rows.buffer.device)
    width = packed_dimensions(problem.d)
    config = default(name, width, processor.capability, merges(problem.d), rows.pieces)
    assert config.block_m == HEIGHT and SIZE % config.block_n == 0
    out = torch.empty(over.parts * rows.count * per_row, dtype=torch.float32, device=rows.buffer.device)
    sizes = (rows.padded, columns.padded, rows.count, columns.count, problem.d, own or 0, over.first, LONGEST)
    before = (rows.buffer, columns.buffer, *more, over.tiles, over.ends, out, *sizes)
    last = (SIZE, config.block_m, config.block_n, config.num_stages)
    run(kernel, (-(-rows.count // HEIGHT), over.parts), before, (*flags, *last), config)
    return out
