"""The Numba backend's implementation of the protocol: tiles of columns, blocks of rows over a pool of threads."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import config

from sdkde_core.nearby import lists, order
from sdkde_core.plugin import check_threads, concatenate, cpu_threads, each, empty, exponents, map_threads, merge, put
from sdkde_core.protocol import Columns, Partial, Problem, Reduction, Support

from .bounds import LEAF, LN2, TILE, Array, Form, choose, double_limit, takes_leaves
from .compiled import call
from .cpu_kernels import ABSENT, ROWS, reduce_tiles
from .info import pays
from .near import Near, aligned, order_columns, prepare_groups, sum_groups, sum_leaves
from .tunables import configuration, width_of


@dataclass(frozen=True)
class _State:
    form: Form
    points: Array  # (n, d) float64, as they came
    columns: Array  # (tiles, c, width): coordinates, and −½‖u‖² for products
    log_weights: Array  # (tiles, width), log2 w − uniform
    uniform: float  # nats
    nan: float  # 0, or NaN where any coordinate is NaN, which makes every result NaN
    near: Near | None  # None: no tile is left out
    threads: int | None  # as tuned


class NumbaBackend:
    """Compiled loops on tiles in cache.

    Parameters
    ----------
    threads : int, optional
        Default: ``SDKDE_NUM_THREADS``, else the cores that the process may use. They end with the call; Numba's own
        threads are not used. Results do not depend on how many there are.
    skip : bool, optional
        Leave out tiles of pairs that cannot matter. Default: where this is faster, by a sample of the columns.
    """

    def __init__(self, threads: int | None = None, skip: bool | None = None) -> None:
        if skip not in (None, True, False):
            raise TypeError(f"skip is {skip!r}; pass True, False, or None where what is faster is to be taken")
        self.threads, self.skip = check_threads(threads), skip

    def probe(self, device: str) -> Support:
        if config.DISABLE_JIT:
            return Support(False, "NUMBA_DISABLE_JIT is set, and the kernels are vector instructions")
        return Support(device == "cpu", "Numba compiles for the CPU")

    def prepare(self, problem: Problem, columns: Columns) -> _State:
        points, log_weights = columns.points, columns.log_weights
        weighted = "weights" in problem.requires
        form = choose(problem, float(np.max(-log_weights)) if weighted else 0.0)
        near = None  # the columns in order, where it pays to leave tiles out
        may_skip = self.skip is not False and problem.kernel == "gaussian" and bool(np.isfinite(points).all())
        if may_skip and (self.skip or pays(problem, columns)):
            near = order_columns(columns, problem.reduction is Reduction.MEAN, self.threads or cpu_threads())
        (n, d), in_order, uniform = points.shape, points, 0.0 if weighted else float(log_weights[0])
        if near is not None:
            if takes_leaves(problem):
                form = Form("float64", problem.extent > double_limit(problem))
            in_order, log_weights = points[near.columns.order], log_weights[near.columns.order]
            uniform = LN2 * near.peak
        many, tuned = d + (not form.direct), configuration(problem)
        width = TILE if near else width_of(n, d, form, tuned.get("width"))
        packed = aligned((-(-n // width), many, width), form.dtype)
        weights = np.full((len(packed), width), ABSENT[form.dtype == "float64"], form.dtype)
        weights.reshape(-1)[:n] = (log_weights - uniform) / LN2 if weighted else 0.0
        step = max(1, (1 << 20) // (many * width))  # tiles of a task
        starts = range(0, len(packed), step)
        map_threads(lambda t: _pack(in_order, t, packed[t : t + step]), starts, self.threads or cpu_threads())
        nan = math.nan if np.isnan(points).any() else 0.0
        return _State(form, points, packed, weights, uniform, nan, near, tuned.get("threads"))

    def reduce(self, problem: Problem, queries: Array | None, state: _State, own_offset: int = 0) -> Partial:
        rows = state.points if queries is None else queries
        if len(rows) == 0:
            return empty(problem, rows)
        if state.near is None or not np.isfinite(rows).all():
            return self._over_all(problem, state, rows)
        return self._over_some(problem, state, rows, state.near.columns.order if queries is None else None)

    def prepare_groups(self, problem: Problem, groups: Sequence[Columns]) -> tuple[Array, ...]:
        return prepare_groups(groups)

    def reduce_groups(self, problem: Problem, queries: Array, state: Any, constants: Array, known: Array) -> Partial:
        return sum_groups(problem, queries, state, constants, known, self.threads or cpu_threads())

    def _over_all(self, problem: Problem, state: _State, rows: Array) -> Partial:
        m, threads = len(rows), self.threads or state.threads or cpu_threads()
        tiles, many, width = state.columns.shape
        # Where rows are few, columns are shared out too, in chunks joined in order. Chunks must not depend on the
        # number of threads. Blocks of rows may, since a row's sums do not depend on the rows beside it.
        chunk = -(-max(1 << 14, tiles * width * -(-m // ROWS) // 64) // width)  # for 64 tasks
        least = (1 << 25) // (min(chunk, tiles) * width * (many + 16))
        most = _of_a_call(width * (many + 16))
        height = ROWS * -(-max(1, least, min(most, -(-m // (4 * threads)))) // ROWS)

        def task(where: tuple[int, int]) -> Partial:
            first, start = where
            return _reduce(problem, state, rows[first : first + height], np.arange(start, min(start + chunk, tiles)))

        tasks = [(first, start) for first in range(0, m, height) for start in range(0, tiles, chunk)]
        parts = map_threads(task, tasks, threads, told=True)
        chunks = -(-tiles // chunk)
        return concatenate([merge(parts[i : i + chunks]) for i in range(0, len(parts), chunks)])

    def _over_some(self, problem: Problem, state: _State, rows: Array, places: Array | None) -> Partial:
        """Leave out tiles that cannot matter to a tile of rows; ``places``: the rows' order, if it is known."""
        assert state.near is not None
        threads = self.threads or state.threads or cpu_threads()
        if places is None:
            (places,) = map_threads(lambda x: order(x, LEAF), [rows], 1, apart=True)

        # Tiles of rows in a task: at most 4096 rows, and 2¹⁹ pairs of tiles, 64 bytes each. The aim is 16 tasks: each
        # runs Python for 2 ms, when no other thread can.
        tiles = max(1, min(4096 // TILE, (1 << 19) // len(state.columns), len(rows) // (16 * TILE)))
        group = TILE * tiles

        # Rows with few columns near share no lists: in three dimensions it pays to sum them one by one.
        apart = takes_leaves(problem) and problem.d == 3 and not problem.same and 2048 * len(rows) >= problem.n

        def task(first: int) -> Partial:
            return _some(problem, state, rows[places[first : first + group]], apart)

        found = concatenate(map_threads(task, range(0, len(rows), group), threads, told=True))
        back = np.argsort(places)
        found = each(found, lambda x: x[back])
        alone = np.flatnonzero(apart & (found.log_sum == -math.inf))
        if len(alone):
            spread = functools.partial(map_threads, threads=threads)
            put(found, alone, state.near.neighbours.scattered(problem, rows[alone], -math.inf, spread))
        return found


def _pack(points: Array, first: int, tiles: Array) -> None:
    """Write points, and −½‖u‖² if there is room, to tiles from the ``first`` on, (tiles, c, width); pad with zeros."""
    d, width = points.shape[1], tiles.shape[2]
    for t, tile in enumerate(tiles, first):
        block = points[t * width : (t + 1) * width]
        tile[:d, : len(block)] = block.T
        tile[d:, : len(block)] = -0.5 * np.vecdot(block, block)
        tile[:, len(block) :] = 0.0


@np.errstate(all="ignore")
def _some(problem: Problem, state: _State, rows: Array, apart: bool) -> Partial:
    """Sum neighbouring rows over the columns that can matter: by leaves, then by tiles where leaves are too inexact.

    ``apart``: of the latter rows those with low sums get −∞ instead, and are left to the caller.
    """
    assert state.near is not None
    found = lists(problem, state.near.columns, rows, TILE, 512)
    parts, inexact, where = list[Partial](), np.arange(len(rows)), np.arange(len(rows))
    if takes_leaves(problem):
        some, inexact = sum_leaves(problem, state.near, state.columns, state.log_weights, rows, found)
        if apart:
            low = some.log_sum[inexact] < LN2 * (state.near.peak + 10.0)  # over some thousand columns at most
            some.log_sum[inexact[low]] = -math.inf
            inexact = inexact[~low]
        parts.append(some)
        where[inexact] = len(rows) + np.arange(len(inexact))
    for b in np.unique(inexact // TILE):
        here, tiles = inexact[inexact // TILE == b], found.tiles[found.ends[b] : found.ends[b + 1]]
        parts.append(_reduce(problem, state, rows[here], tiles, float(found.cuts[b])))
    return each(concatenate(parts), lambda x: x[where])


@np.errstate(all="ignore")
def _reduce(problem: Problem, state: _State, queries: Array, tiles: Array, cut: float | None = None) -> Partial:
    """Sum over some tiles for a block of rows (b, d); tiles whose terms all have logs up to ``cut`` may be left out."""
    kernels = ("exponential", "tophat", "epanechnikov", "linear", "cosine")
    code = None if problem.kernel == "gaussian" else kernels.index(problem.kernel)
    laplace, mean = (problem.reduction is r for r in (Reduction.LAPLACE, Reduction.MEAN))
    real, direct = np.dtype(state.form.dtype), state.form.direct
    (b, d), (many, width) = queries.shape, state.columns.shape[1:]
    height = -(-b // ROWS) * ROWS
    rows = np.zeros((height, many), real)
    rows[:b, :d] = queries
    rows[:, d:] = 1.0  # times −½‖u_j‖²
    # Products leave −½‖u_i‖² out of exponents, u_i rounded as the kernel has it. A row with a NaN coordinate is NaN,
    # whatever the kernel gives.
    rounded = rows[:b, :d].astype(np.float64, copy=False)
    base = -0.5 * np.vecdot(rounded, rounded) + state.nan
    base = np.where(np.isnan(base), base, 0.0) if direct else base
    cuts = np.full(height, 1e300)  # padding needs no tile, rows need all, or those above the cut
    cuts[:b] = -1e300 if cut is None else (cut - (base + state.uniform)) / LN2
    tops = np.full(height, -1e28 if real.itemsize == 4 else -1e290)
    sums, moments = np.zeros((height, d if mean else 0)), np.zeros((2, height))
    room = *aligned((3, ROWS, width), real), np.empty(ROWS, real)  # for the numbers of ROWS rows and a tile
    columns, step = (state.columns, state.log_weights), _of_a_call(height * width * (many + 16))
    shifts = sums if real.itemsize == 8 and code is None else None  # MEAN is always summed in float64
    for first in range(0, len(tiles), step):  # the sums go on from one call to the next
        over = tiles[first : first + step]
        call(
            *(reduce_tiles, (real, code is None), *columns, over, rows, direct, laplace, code, cuts),
            *(tops, shifts, moments, *room),
        )
    total, moment = moments[:, :b]
    scale = LN2 * tops[:b] + (base + state.uniform)  # log of total's unit
    if laplace:
        exponent = -0.5 * moment if direct else moment + base * total  # Σ φ (−½ r²)
        return exponents.laplace(d, total, exponent, scale)
    shift = sums[:b] / total[:, None] + np.where(np.isnan(base), base, 0.0)[:, None] if mean else None
    return Partial(np.log(total) + scale, shift=shift)


def _of_a_call(work: int) -> int:
    """The number of items, of so much ``work`` each, in a call of the kernel: 20 ms, as interrupts wait for its end."""
    return max(1, (1 << 29) // work)
