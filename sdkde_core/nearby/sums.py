"""Direct sums in float64 over the tiles of columns that :func:`lists` names, for arrays of any library.

Scattered rows of NumPy's, far out or between clusters, are each summed over the columns that they need (:class:`Tree`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from array_api_compat import device, is_numpy_array, to_device

from ..arrays import Array, array_namespace
from ..engine.exact import reduce_exact
from ..engine.forks import cached_property
from ..engine.merge import concatenate, each, put, safe_log
from ..protocol import TOLERANCES, Columns, Partial, Problem, Reduction
from .lists import COARSE, FINE, SLACK, added, lists, members
from .tiles import TOGETHER, Index, Tiles, by_tile, index, levels, order

FARTHEST = 1e150  # coordinates from which squares overflow
#: Columns by tiles, (tiles + 1, size): coordinates, and log weights, −inf where there is none. The last tile is empty.
_Tiles: TypeAlias = tuple[list[Any], Any]


@dataclass(eq=False)
class Neighbours:
    """Columns for sums that leave out those too far from each row; ``order`` (n,): the columns' order, if known."""

    columns: Columns
    order: Any = None
    _made: dict[int, tuple[Index, _Tiles]] = field(default_factory=dict, init=False)  # by size

    def __post_init__(self) -> None:
        points, xp = self.columns.points, array_namespace(self.columns.points)
        self._finite = bool(xp.all(xp.abs(points) < FARTHEST))

    def reduce(self, problem: Problem, rows: Any, least: float = -math.inf, spread: Any = map) -> Partial:
        """Answer for some rows, (m, d).

        Rows with a coordinate that is no number, or whose squares overflow, are summed over all columns. A row's sum
        may be taken to be at least exp(``least``): what is left out is small beside that. ``spread(task, parts)``
        returns the task's results for several parts, as ``map`` does.
        """
        xp = array_namespace(rows)
        far = ~(xp.max(xp.abs(rows), axis=1) < FARTHEST)
        if self._finite and bool(xp.any(far)):
            near = xp.where(far[:, None], self.columns.points[:1, :], rows)
            found = self.reduce(problem, near, least, spread)
            return put(found, far, reduce_exact(problem, rows[far, :], self.columns))
        if self._finite and 32 * rows.shape[0] < self.columns.points.shape[0]:
            near = self._near(xp, problem, rows, least)
            if is_numpy_array(rows) and rows.shape[0] >= 12:  # for fewer, see _parts
                return (near or self).scattered(problem, rows, least, spread)
            if near is not None:
                return near.reduce(problem, rows, least, spread)
        elif self._finite and is_numpy_array(rows) and 12 <= rows.shape[0] <= self.columns.points.shape[0]:
            few = self._tree.log_weight - math.log(self.columns.points.shape[0] / 20.0)  # neighbours, shared by none
            found = self.scattered(problem, rows, least, spread, few)
            (rest,) = np.nonzero(found.log_sum == -math.inf)
            return put(found, rest, self._listed(problem, rows[rest], least, spread)) if len(rest) else found
        return self._listed(problem, rows, least, spread)

    def _listed(self, problem: Problem, rows: Any, least: float, spread: Any) -> Partial:
        xp = array_namespace(rows)
        parts = list(self._parts(xp, problem, rows, least))
        found = concatenate(list(spread(lambda part: _sum(xp, problem, rows, *part), parts)))
        place = xp.concat([xp.reshape(which, (-1,)) for which, *_ in parts])
        # The last tile is filled up with its last row, whose results are the same each time.
        back = xp.argsort(place, stable=True)
        first = xp.concat([xp.ones_like(place[:1], dtype=xp.bool), place[back][1:] != place[back][:-1]])
        return each(found, lambda x: x[back[first], ...])

    def scattered(self, problem: Problem, rows: Any, least: float, spread: Any, most: float = math.inf) -> Partial:
        """As :meth:`reduce`, see :class:`Tree`, for finite rows and columns of NumPy's; log sums above ``most``: −∞."""
        many = max(16, (1 << 22) // self._tree.levels[-1].log_weight.size)
        blocks = [rows[k : k + many] for k in range(0, rows.shape[0], many)]
        return concatenate(list(spread(lambda x: _partial(problem, *self._tree.sums(problem, x, least, most)), blocks)))

    @cached_property
    def _tree(self) -> Tree:
        return Tree(self.columns.points, self.columns.log_weights, *self._indexed(32))

    def _indexed(self, size: int) -> tuple[Index, _Tiles]:
        if size not in self._made:
            found = index(self.columns.points, self.columns.log_weights, size, where=self.order)
            self._made[size] = found, self._tiled(found.order, size)
        return self._made[size]

    def _near(self, xp: Any, problem: Problem, rows: Any, least: float) -> Neighbours | None:
        """The columns near few rows, found faster than all columns are put in order; None where they are many.

        A row's largest term in a sample of the columns bounds its sum exp(ℓ₀) from below. Columns farther away than R
        add W f(R) exp(−½ R²) at most (see the package): that is to be 0.01 τ exp(ℓ₀). A grid's cells are marked that
        are within R of a row in every dimension; the columns in marked cells are kept.
        """
        points, log_weights, (m, d) = self.columns.points, self.columns.log_weights, rows.shape
        n = points.shape[0]
        step = max(1, n // min(max(1 << 10, (1 << 18) // m), 1 << 13))
        sample = points[::step, :]
        square = sum((rows[:, a, None] - sample[None, :, a]) ** 2 for a in range(d))
        floor = xp.max(log_weights[None, ::step] - 0.5 * square, axis=1)
        most = max(0.0, math.log(n) + float(xp.max(log_weights)))  # log W is no more
        allowed = COARSE * TOLERANCES[problem.precision][problem.reduction].absolute
        nats = most - math.log(allowed) - xp.maximum(floor, xp.full_like(floor, least))
        radius = xp.sqrt(2.0 * (nats + xp.log(2.0 + nats)))  # f(R) is less than 2 + nats, which are 12 and more
        radius = xp.minimum(radius, xp.full_like(radius, 10.0 * FARTHEST))
        # The grid is three times as wide as the middle of the columns; its outer cells have no end.
        middle = np.sort(np.asarray(to_device(sample[:: -(-sample.shape[0] // 1024), :], "cpu")), axis=0)
        skip, cells, ends, grid = len(middle) // 32, round(2.0 ** (14.0 / d)), [], []
        for a in range(d):
            first, last = middle[skip, a], middle[-1 - skip, a]
            scale = float(cells / (3.0 * (last - first))) if last > first else 0.0
            grid.append((float(2.0 * first - last), scale, cells))
            low, high = (_cells(rows[:, a] + far, *grid[a]) for far in (-radius, radius))
            ends.append([np.asarray(to_device(x, "cpu")) for x in (low, high + 1)])
        marked = xp.asarray(_marked(ends, cells), device=device(rows))

        def kept(points: Any) -> Any:
            cell: Any = 0
            for a in range(d):
                cell = cell * cells + _cells(points[:, a], *grid[a])
            return marked[cell]

        if is_numpy_array(rows) and 8.0 * kept(sample).mean() > 1.0:  # a device asks for all in the time of a look
            return None
        (which,) = xp.nonzero(kept(points))
        if 4 * which.shape[0] > n:
            return None
        which = which if which.shape[0] else xp.arange(1, device=device(rows))  # adds nothing either
        return Neighbours(Columns(points[which, :], log_weights[which]))

    def _tiled(self, where: Any, size: int) -> _Tiles:
        xp, points = array_namespace(where), self.columns.points
        places = by_tile(where, size)
        places = xp.concat([places, places[-1:, :]])
        log_weights = xp.reshape(self.columns.log_weights[places], (-1,))
        log_weights[where.shape[0] :] = -math.inf
        return [points[:, a][places] for a in range(points.shape[1])], xp.reshape(log_weights, places.shape)

    def _parts(self, xp: Any, problem: Problem, rows: Any, least: float) -> Iterator[tuple[Any, Any, _Tiles]]:
        """Which rows are summed together, (b, height), and over which tiles of which columns, (b, k)."""
        m, n, on = rows.shape[0], self.columns.points.shape[0], device(rows)
        # Columns and rows of a tile. Few rows are isolated ones, which have few neighbours in common.
        many, isolated = ((32, 8), (128, 2)) if is_numpy_array(rows) else ((256, 32), (256, 8))
        few = 12  # for fewer rows all columns are summed: to put these in order takes longer
        if not self._finite or m < few:
            columns = self._tiled(xp.arange(n, device=on), isolated[0])
            every = xp.arange(columns[1].shape[0] - 1, device=on)
            for start in range(0, m, few):
                yield xp.arange(start, min(m, start + few), device=on)[None, :], every[None, :], columns
            return
        size, height = many if 32 * m >= n else isolated
        found, columns = self._indexed(size)
        where, none = order(rows, max(height, 8)), columns[1].shape[0] - 1
        group = 32 * height  # rows that are first looked at together
        step = max(1, (1 << 17) // none) * group  # lists take 200 bytes a pair of tiles
        for start in range(0, m, step):
            here = where[start : start + step]
            listed = lists(problem, found, rows[here, :], height, group, least)
            tiles = xp.concat([listed.tiles, xp.full_like(where[:1], none)])
            by, begins, counts = by_tile(here, height), listed.ends[:-1], listed.ends[1:] - listed.ends[:-1]
            longest = xp.argsort(-counts, stable=True)  # lists of like length are summed side by side
            numbers, first = np.asarray(to_device(counts[longest], "cpu")), 0
            while first < len(numbers):
                most = max(1, _pairs(rows) // (height * size * max(1, min(int(numbers[first]), 8))))
                together = int(np.sum(2 * numbers[first : first + most] >= numbers[first]))
                which = longest[first : first + together]
                k = xp.arange(int(numbers[first]), device=on)[None, :]
                at = xp.where(k < counts[which][:, None], begins[which][:, None] + k, tiles.shape[0] - 1)
                yield by[which, :], tiles[at], columns
                first += together


def _cells(x: Any, start: float, scale: float, cells: int) -> Any:
    """Which of the cells of a dimension coordinates are in; the outer ones have no end."""
    xp = array_namespace(x)
    place, (least, most) = (x - start) * scale, (xp.full_like(x[:1], end) for end in (0.0, cells - 1.0))
    return xp.astype(xp.minimum(xp.maximum(place, least), most), xp.int64)


def _marked(ends: list[list[Array]], cells: int) -> Array:
    """Which cells of a grid are in some box, (cells^d,); per dimension, ``ends`` are the boxes' first and last + 1."""
    boxes = np.zeros((cells + 1,) * len(ends), np.int64)  # how many: sums of what changes from cell to cell
    for corner in np.ndindex((2,) * len(ends)):
        np.add.at(boxes, tuple(both[k] for both, k in zip(ends, corner)), (-1) ** sum(corner))
    for a in range(len(ends)):
        np.cumsum(boxes, axis=a, out=boxes)
    return (boxes[(slice(cells),) * len(ends)] > 0).reshape(-1)


def _pairs(rows: Any) -> int:
    """Pairs that are summed at a time: on a CPU they stay in its cache."""
    return 1 << (15 if is_numpy_array(rows) else 22)


def _sum(xp: Any, problem: Problem, rows: Any, which: Any, tiles: Any, columns: _Tiles) -> Partial:
    """Sum some rows, (b, h), over lists of tiles, (b, k), some tiles at a time, about a running maximum."""
    rows, (points, log_weights) = rows[which, :], columns
    (b, h, d), mean, laplace = rows.shape, *(problem.reduction is r for r in (Reduction.MEAN, Reduction.LAPLACE))
    top = xp.full_like(rows[:, :, 0], -1e300)
    sums = [xp.zeros_like(top) for _ in range(1 + (d if mean else 2 if laplace else 0))]
    width = max(1, _pairs(rows) // (b * h * log_weights.shape[1]))
    for start in range(0, tiles.shape[1], width):
        some = tiles[:, start : start + width]
        delta = [xp.reshape(x[some, :], (b, 1, -1)) - rows[:, :, a, None] for a, x in enumerate(points)]
        exponent = delta[0] * delta[0]
        for x in delta[1:]:
            exponent += x * x
        exponent *= -0.5
        term = exponent + xp.reshape(log_weights[some, :], (b, 1, -1))
        higher = xp.maximum(top, xp.max(term, axis=2))
        term -= higher[:, :, None]
        phi, fall = xp.exp(term), xp.exp(top - higher)
        factors = delta if mean else [1.0 + 0.5 * d + exponent, 1.0 + 0.5 * d - exponent] if laplace else []
        more = [xp.sum(phi, axis=2), *(xp.sum(phi * x, axis=2) for x in factors)]
        sums, top = [x * fall + y for x, y in zip(sums, more)], higher
    return _partial(problem, xp.reshape(top, (-1,)), [xp.reshape(x, (-1,)) for x in sums])


def _partial(problem: Problem, top: Any, sums: list[Any]) -> Partial:
    """The result of sums over exp(top): of φ, and of φ (u_j − u) for MEAN, or of LAPLACE's L and M."""
    xp, (total, *others) = array_namespace(top), sums
    if problem.reduction is Reduction.LAPLACE:
        log_magnitude = safe_log(xp.abs(others[0])) + top
        return Partial(safe_log(others[1]) + top, sign=xp.sign(others[0]), log_magnitude=log_magnitude)
    if problem.reduction is not Reduction.MEAN:
        return Partial(safe_log(total) + top)
    empty = total == 0.0  # a number that is none, in the data, is not
    scale = 1.0 / xp.where(empty, xp.ones_like(total), total)
    return Partial(safe_log(total) + top, shift=xp.stack([x * scale for x in others], axis=1))


class Tree:
    """Columns (n, d) in the order of an index, tile by tile: ``columns`` as :func:`_sum` takes them.

    Rows that have no neighbours share no list of tiles. So each goes down a tree of tiles by itself, of
    :data:`TOGETHER` branches: first towards a few tiles, whose columns bound its sum from below; then wherever a tile
    can add more than its part of the tolerance (see the package for what it adds at most). All rows go down together,
    as a list of pairs of a row and a tile.
    """

    def __init__(self, points: Array, log_weights: Array, found: Index, columns: tuple[list[Array], Array]) -> None:
        self.levels, self.columns, self.log_weight = levels(points, log_weights, found), columns, found.log_weight

    @np.errstate(all="ignore")  # sums of exponentials underflow by design
    def sums(self, problem: Problem, rows: Array, least: float, most: float) -> tuple[Array, list[Array]]:
        """Logs of rows' largest terms, and sums over these as in :func:`_sum`; for log sums up to ``most``."""
        floors = self._floors(rows)
        floors = np.where(floors > most, np.inf, np.maximum(floors, least))
        row, tile = self._pairs(problem, rows, floors)
        points, log_weights = self.columns
        mean, laplace = (problem.reduction is r for r in (Reduction.MEAN, Reduction.LAPLACE))
        top = np.full(len(rows), -1e300)
        sums = [np.zeros(len(rows)) for _ in range(1 + (problem.d if mean else 2 if laplace else 0))]
        step = max(1, (1 << 15) // log_weights.shape[1])  # pairs of points stay in the cache
        for start in range(0, len(row), step):
            r, t = row[start : start + step], tile[start : start + step]
            delta = [x[t] - rows[r, a, None] for a, x in enumerate(points)]
            exponent = -0.5 * sum(x * x for x in delta)
            term = exponent + log_weights[t]
            first = np.flatnonzero(np.diff(r, prepend=-1))  # where the pairs of each row begin
            which = r[first]
            before, top[which] = top[which], np.maximum(top[which], np.maximum.reduceat(term.max(axis=1), first))
            phi, fall = np.exp(term - top[r, None]), np.exp(before - top[which])
            half = 0.5 * problem.d
            factors = delta if mean else [1.0 + half + exponent, 1.0 + half - exponent] if laplace else []
            for whole, part in zip(sums, [phi, *(phi * x for x in factors)]):
                whole[which] = whole[which] * fall + np.add.reduceat(part.sum(axis=1), first)
        return top, sums

    def _floors(self, rows: Array) -> Array:
        """Lower bounds on the log sums of rows, (b,): the sums over the columns of the few nearest tiles."""
        (b, d), few, best = rows.shape, 4, np.arange(self.levels[0].log_weight.size)[None, :]
        for k, level in enumerate(self.levels):
            best, there = members(np, best, level) if k else (np.repeat(best, b, axis=0), True)
            near = sum(_gap(level, a, best, rows[:, a, None]) ** 2 for a in range(d))
            worth = np.where(there, level.log_weight[best] - 0.5 * near, -np.inf)
            if best.shape[1] > few:
                best = np.take_along_axis(best, np.argpartition(-worth, few, axis=1)[:, :few], axis=1)
        points, log_weights = self.columns
        best = np.sort(best, axis=1)
        repeated = np.pad(best[:, 1:] == best[:, :-1], ((0, 0), (1, 0)))
        terms = np.where(repeated[:, :, None], -np.inf, log_weights[best])
        terms -= 0.5 * sum((x[best] - rows[:, a, None, None]) ** 2 for a, x in enumerate(points))
        top: Array = np.maximum(terms.max(axis=(1, 2)), -1e300)
        return top + np.log(np.exp(terms - top[:, None, None]).sum(axis=(1, 2)))

    def _pairs(self, problem: Problem, rows: Array, floors: Array) -> tuple[Array, Array]:
        """Rows and tiles of columns that can matter to them, (p,) each, row by row."""
        b, tolerance = len(rows), TOLERANCES[problem.precision][problem.reduction].absolute
        row, tile = (x.ravel() for x in np.indices((b, self.levels[0].log_weight.size)))
        for k, level in enumerate(self.levels):
            if k:
                (tile,), (there,) = members(np, tile[None, :], level)
                row, tile = np.repeat(row, TOGETHER)[there], tile[there]
            near = sum((_gap(level, a, tile, rows[row, a]) ** 2 for a in range(rows.shape[1])), np.zeros(len(row)))
            logs = level.log_weight[tile][:, None]
            mass = added(np, problem, self.log_weight, logs, (1.0 - SLACK) * near[:, None], floors[row])[:, 0]
            share = FINE if k + 1 == len(self.levels) else COARSE / max(1, len(self.levels) - 1)
            kept = mass >= share * tolerance / np.bincount(row, minlength=b)[row]
            row, tile = row[kept], tile[kept]
        return row, tile


def _gap(level: Tiles, a: int, tiles: Array, x: Array) -> Array:
    """How far coordinates x are from tiles' boxes in dimension a."""
    return np.maximum(np.maximum(level.low[a][tiles] - x, x - level.high[a][tiles]), 0.0)
