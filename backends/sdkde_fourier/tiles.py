"""Direct sums on a device, for the rows that the Fourier series leaves: float64, over the tiles of columns that matter.

Columns and rows are sorted along a space-filling curve (in one dimension by their coordinate) and cut into tiles. For
every tile of rows, a few tiles of columns bound each row's largest term from below: those with the largest promise, the
term of a tile's heaviest column at the tile's greatest distance. Tiles whose terms are all smaller than that bound by a
factor of tolerance / n are left out.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from sdkde_core.plugin import concatenate, each, safe_log
from sdkde_core.protocol import Partial, Problem, Reduction

from .around import nats

__all__ = ["Tiles"]

#: Rows and columns of a tile, the bits of the curve's key and the tiles that all rows are compared with first. At a
#: time: pairs that are summed, pairs of tiles that are compared, and tiles of rows.
ROWS, COLUMNS, BITS, LEADERS = 32, 256, 30, 2
PAIRS, JUDGED, TOGETHER = 1 << 22, 1 << 22, 1 << 9


class _Tiled(NamedTuple):
    """Points in tiles, and the box of each."""

    points: Tensor  # (tiles, k, d)
    order: Tensor  # (tiles, k): which point; −1 where the last tile is filled up
    low: Tensor  # (tiles, d)
    high: Tensor


class Tiles:
    """The columns, in tiles.

    Parameters
    ----------
    points : (n, d) tensor
    log_weights : (n,) tensor
    indices : (n,) tensor, optional
        The columns' indices among all columns, where these are some of them.
    """

    def __init__(self, points: Tensor, log_weights: Tensor, indices: Tensor | None = None) -> None:
        self.n = len(points)
        self.columns = _tiled(points, COLUMNS)
        there, which = self.columns.order >= 0, self.columns.order.clamp(min=0)
        self.log_weights = torch.where(there, log_weights[which], -math.inf)  # (tiles, COLUMNS)
        self.indices = torch.where(there, which if indices is None else indices[which], -1)
        # The two heaviest of each tile: one of them is not the row's own.
        self.heaviest = self.log_weights.topk(2, dim=1).values  # (tiles, 2)

    def buffers(self) -> list[Tensor]:
        """The tensors that are kept."""
        return [*self.columns, self.log_weights, self.indices, self.heaviest]

    def reduce(
        self,
        problem: Problem,
        queries: Tensor,
        own: Tensor | None,
        least: float = -math.inf,
    ) -> Partial:
        """Answer for some rows.

        Parameters
        ----------
        problem : Problem
        queries : (b, d) tensor
        own : (b,) tensor, optional
            The column that a row leaves out; any number that is no column's leaves out none.
        least : float
            Log of an absolute error that is allowed: terms may be left out that sum to less.
        """
        rows = _tiled(queries, ROWS)
        sums, places = [], []
        step = max(1, min(TOGETHER, JUDGED // len(self.columns.low)))
        for start in range(0, len(rows.low), step):
            some = _Tiled(*(x[start : start + step] for x in rows))
            lists, counts = self._lists(problem, some, own, least)
            order = torch.argsort(counts, descending=True, stable=True)
            numbers = counts[order].tolist()
            first = 0
            while first < len(numbers):
                # Tiles of rows with lists of like length side by side: those that straddle a gap have long ones.
                most = max(1, PAIRS // (ROWS * COLUMNS * max(1, min(numbers[first], 8))))
                many = sum(2 * k >= numbers[first] for k in numbers[first : first + most])
                which = order[first : first + many]
                sums.append(self._sum(problem, some, which, own, lists[which, : numbers[first]]))
                places.append(some.order[which].flatten())
                first += many
        place = torch.cat(places)
        there = place >= 0
        back = torch.argsort(place[there])
        return each(concatenate(sums), lambda x: x[there][back])

    def _lists(self, problem: Problem, rows: _Tiled, own: Tensor | None, least: float) -> tuple[Tensor, Tensor]:
        """Return the tiles of columns for each tile of rows, those that matter first, (r, tiles); how many do, (r,)."""
        mine = self.columns
        low, high = rows.low[:, None], rows.high[:, None]  # (r, 1, d)
        farthest = torch.maximum(mine.high - low, high - mine.low).square().sum(-1)  # (r, tiles)
        promise = self.heaviest[:, 0 if own is None else 1] - 0.5 * farthest
        leaders = torch.argsort(promise, dim=1, descending=True, stable=True)[:, :LEADERS]  # topk has no order of ties
        floor = self._terms(rows.points, None if own is None else own[rows.order.clamp(min=0)], leaders)[1]
        floor = floor.amax(-1).amin(1, keepdim=True)
        nearest = torch.maximum(mine.low - high, low - mine.high).clamp(min=0.0).square().sum(-1)
        # Terms are multiplied by r, or 1 + r².
        below = nats(problem, self.n) + (2.0 + farthest.amin(1, keepdim=True).sqrt()).log()
        term = self.heaviest[:, 0] - 0.5 * nearest
        # Where a row is NaN so is its tile's floor, and all tiles are needed: the others of the tile have them all.
        needed = ~(term < floor - below - 1e-12 * floor.abs()) & ~(term <= least - math.log(self.n))
        return torch.argsort(needed.byte(), dim=1, descending=True, stable=True), needed.sum(1)

    def _terms(self, queries: Tensor, own: Tensor | None, tiles: Tensor) -> tuple[list[Tensor], Tensor, Tensor]:
        """Differences by dimension, log terms, exponents of rows (r, ROWS, d) over tiles (r, w): (r, ROWS, w · k)."""
        columns, log_weights = self.columns.points[tiles].flatten(1, 2), self.log_weights[tiles].flatten(1)
        delta = [columns[:, None, :, a] - queries[:, :, None, a] for a in range(queries.shape[2])]
        exponent = sum(x.square() for x in delta) * -0.5
        term = exponent + log_weights[:, None]
        if own is not None:
            term.masked_fill_(self.indices[tiles].flatten(1)[:, None] == own[:, :, None], -math.inf)
        return delta, term, exponent

    def _sum(self, problem: Problem, rows: _Tiled, which: Tensor, own: Tensor | None, lists: Tensor) -> Partial:
        """Sum tiles of rows over their lists, some tiles at a time, about a running maximum."""
        queries, d = rows.points[which], problem.d  # (r, ROWS, d)
        mine = None if own is None else own[rows.order[which].clamp(min=0)]
        laplace, mean = (problem.reduction is r for r in (Reduction.LAPLACE, Reduction.MEAN))
        top = queries.new_full(queries.shape[:2], -1e300)
        sums = queries.new_zeros(1 + (d if mean else 2 if laplace else 0), *queries.shape[:2])
        width = max(1, PAIRS // (len(which) * ROWS * COLUMNS))
        for start in range(0, lists.shape[1], width):
            delta, term, exponent = self._terms(queries, mine, lists[:, start : start + width])
            higher = torch.maximum(top, term.amax(-1))
            phi = (term - higher[..., None]).exp()
            sums *= (top - higher).exp()
            sums[0] += phi.sum(-1)
            factors = delta if mean else [1.0 + 0.5 * d + exponent, 1.0 + 0.5 * d - exponent] if laplace else []
            for whole, factor in zip(sums[1:], factors):
                whole += (phi * factor).sum(-1)
            top = higher
        total, *others = sums.flatten(1)
        top = top.flatten()
        if laplace:
            log_plus, log_magnitude = (safe_log(x) + top for x in (others[1], others[0].abs()))
            return Partial(log_plus, sign=others[0].sign(), log_magnitude=log_magnitude)
        empty = total == 0  # NaN, in the data, is not
        shift = torch.stack(others, 1) / torch.where(empty, 1.0, total)[:, None] if mean else None
        return Partial(safe_log(total) + top, shift=shift)


def _tiled(points: Tensor, size: int) -> _Tiled:
    """Cut points into tiles along the curve; the last is filled up with the last point."""
    n, d = points.shape
    order = torch.argsort(points[:, 0] if d == 1 else _key(points), stable=True)
    fill = -n % size
    inside = torch.cat([order, order[-1:].expand(fill)]).view(-1, size)
    tiles = points[inside]
    marked = torch.cat([order, order.new_full((fill,), -1)]).view(-1, size)
    return _Tiled(tiles, marked, tiles.amin(1), tiles.amax(1))


def _key(points: Tensor) -> Tensor:
    """Morton codes: the coordinates' bits in turn."""
    d = points.shape[1]
    bits = BITS // d
    low, high = points.amin(0), points.amax(0)
    cell = ((points - low) / (high - low).clamp(min=1e-300) * (2**bits - 1)).long()
    key = torch.zeros_like(cell[:, 0])
    for bit in range(bits):
        for a in range(d):
            key |= ((cell[:, a] >> bit) & 1) << (bit * d + a)
    return key
