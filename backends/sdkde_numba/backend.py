"""The Numba backend's implementation of the protocol: tiles of columns, blocks of rows over a pool of threads."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numba import config
from numpy.typing import NDArray

from sdkde_core.plugin import check_threads, checkpoint, claim_memory, concatenate, cpu_threads, empty, map_threads
from sdkde_core.protocol import Columns, Partial, Problem, Reduction, Support

from .bounds import Form, choose
from .compiled import kernel
from .cpu_kernels import ABSENT, CODES, FLOOR, MULTIPLE, ROWS
from .info import TASK

Array = NDArray[Any]

#: Columns of a tile, and bytes that its columns may take in cache.
WIDTH, TILE = 512, 1 << 18

#: Columns of a task, at least, and how many to aim for where rows are few.
CHUNK, TASKS = 1 << 14, 64

#: Most work of a call of the kernel, some 20 ms: an interrupt waits for its end.
CALL = 1 << 29

#: Numbers that a task packs.
PACK = 1 << 20

#: Row offset at which no row has a column.
NO_COLUMN = -(1 << 62)

LN2 = math.log(2.0)


@dataclass(frozen=True)
class _State:
    form: Form
    points: Array  # (n, d) float64, as they came
    columns: Array  # (tiles, c, width): coordinates, and −½‖u‖² for products
    log_weights: Array  # (tiles, width), log2 w − uniform
    uniform: float  # nats
    nan: float  # 0, or NaN where any coordinate is NaN: then every result is


class _Sums(NamedTuple):
    """What the kernel adds up, for every row and scale; see :func:`~sdkde_numba.cpu_kernels.reduce_tiles`."""

    tops: Array  # (scales, m), log2
    sums: Array  # (scales, m, d), or (scales, m, 0) but for MEAN
    moments: Array  # (scales, 2, m)


class NumbaBackend:
    """Compiled loops on tiles in cache.

    Parameters
    ----------
    threads : int, optional
        Default: ``SDKDE_NUM_THREADS``, else the cores that the process may use. They end with the call; Numba's own
        threads are not used. Results do not depend on how many there are.
    """

    def __init__(self, threads: int | None = None) -> None:
        self.threads = check_threads(threads)

    def probe(self, device: str) -> Support:
        """Numba compiles for any CPU that it installs on."""
        if config.DISABLE_JIT:
            return Support(False, "NUMBA_DISABLE_JIT is set, and the kernels are vector instructions")
        return Support(device == "cpu", "Numba compiles for the CPU")

    def prepare(self, problem: Problem, columns: Columns) -> _State:
        """Choose the form from the error bounds, pack the columns, and compile what is not compiled yet."""
        points, log_weights = columns.points, columns.log_weights
        weighted = "weights" in problem.requires
        form = choose(problem, float(np.max(-log_weights)) if weighted else 0.0)
        kernel(form.dtype, problem.kernel)
        n = len(points)
        parts = [points] if form.direct else [points, -0.5 * np.vecdot(points, points)[:, None]]
        many = sum(part.shape[1] for part in parts)
        width = _width(n, many, np.dtype(form.dtype).itemsize)
        packed = np.empty((-(-n // width), many, width), form.dtype)
        weights = np.full((len(packed), width), ABSENT[form.dtype == "float64"], form.dtype)
        weights.reshape(-1)[:n] = log_weights / LN2 if weighted else 0.0
        step = max(1, PACK // (many * width))  # tiles of a task
        with claim_memory("packing", tasks=self.threads or cpu_threads()) as threads:
            map_threads(
                lambda first: _pack(parts, first, packed[first : first + step]), range(0, len(packed), step), threads
            )
        uniform = 0.0 if weighted else float(log_weights[0])
        nan = 0.0 if math.isfinite(float(np.sum(points))) or not np.isnan(points).any() else math.nan
        return _State(form, points, packed, weights, uniform, nan)

    def reduce(self, problem: Problem, queries: Array | None, state: _State, own_offset: int = 0) -> Partial:
        """Reduce block by block; the pool of threads ends with the call."""
        rows = state.points if queries is None else queries
        m, threads = len(rows), self.threads or cpu_threads()
        if m == 0:
            return empty(problem, rows)
        tiles, many, width = state.columns.shape
        # Where rows are few, columns are shared out too, and joined in order: that must not depend on the threads.
        # Blocks of rows may, since a row's sums do not depend on the rows beside it.
        chunk = -(-max(CHUNK, tiles * width * -(-m // ROWS) // TASKS) // width)
        least = TASK // (min(chunk, tiles) * width * (many + 16))
        most = CALL // (width * (many + 16 * max(1, len(problem.scales))))
        height = ROWS * -(-max(1, least, min(most, -(-m // (4 * threads)))) // ROWS)

        def task(where: tuple[int, int]) -> _Sums:
            first, start = where
            return _reduce(problem, state, rows[first : first + height], own_offset + first, start, start + chunk)

        tasks = [(first, start) for first in range(0, m, height) for start in range(0, tiles, chunk)]
        with np.errstate(all="ignore"):
            with claim_memory("a sum over tiles", tasks=threads) as together:
                parts = map_threads(task, tasks, together)
            chunks = -(-tiles // chunk)
            blocks = [_join(parts[i : i + chunks]) for i in range(0, len(parts), chunks)]
            starts = range(0, m, height)
            return concatenate([_result(problem, state, rows[i : i + height], b) for i, b in zip(starts, blocks)])


def _width(n: int, many: int, itemsize: int) -> int:
    """Columns of a tile: what the cache holds, no more than there are, whole blocks of registers."""
    most = max(MULTIPLE, min(WIDTH, TILE // (many * itemsize)) // MULTIPLE * MULTIPLE)
    return min(most, -(-n // MULTIPLE) * MULTIPLE)


def _pack(parts: list[Array], first: int, tiles: Array) -> None:
    """Write columns, one behind the other, to tiles from the ``first`` on, (tiles, c, width); pad with zeros."""
    width, start = tiles.shape[2], 0
    for part in parts:
        for t, tile in enumerate(tiles[:, start : start + part.shape[1]], first):
            block = part[t * width : (t + 1) * width]
            tile[:, : len(block)] = block.T
            tile[:, len(block) :] = 0.0
        start += part.shape[1]


def _reduce(problem: Problem, state: _State, queries: Array, own_offset: int, start: int, stop: int) -> _Sums:
    """Run the kernel on a block of rows and some tiles."""
    real = np.dtype(state.form.dtype)
    b, d = queries.shape
    tiles, many, _ = state.columns.shape
    height, scales = -(-b // ROWS) * ROWS, np.array(problem.scales or (1.0,))
    mean = problem.reduction is Reduction.MEAN
    rows = np.zeros((height, many), real)
    rows[:b, :d] = queries
    rows[:, d:] = 1.0  # times −½‖u_j‖²
    tops = np.full((len(scales), height), FLOOR[real.itemsize == 8])
    sums = np.zeros((len(scales), height, d if mean else 0))
    moments = np.zeros((len(scales), 2, height))
    step = max(1, CALL // (height * state.columns.shape[2] * (many + 16 * len(scales))))
    for first in range(start, min(stop, tiles), step):  # the sums go on from one call to the next
        checkpoint()
        over = state.columns, state.log_weights, first, min(first + step, stop, tiles), rows
        own = own_offset if "exclude_self" in problem.requires else NO_COLUMN
        if problem.kernel in CODES:
            kernel("float64", problem.kernel)(*over, CODES[problem.kernel], 1.0 / scales**2, own, tops, moments)
            continue
        kernel(state.form.dtype)(
            *(*over, state.form.direct, 1.0 / scales**2, own),
            *(problem.reduction is Reduction.LAPLACE, tops, sums, moments),
        )
    return _Sums(tops[:, :b], sums[:, :b], moments[:, :, :b])


def _join(parts: list[_Sums]) -> _Sums:
    """The sums of a block of rows over all tiles."""
    if len(parts) == 1:
        return parts[0]
    tops = np.max([part.tops for part in parts], axis=0)
    shares = [np.exp2(part.tops - tops) for part in parts]
    return _Sums(
        tops,
        sum(part.sums * share[:, :, None] for part, share in zip(parts, shares)),
        sum(part.moments * share[:, None] for part, share in zip(parts, shares)),
    )


def _result(problem: Problem, state: _State, queries: Array, sums: _Sums) -> Partial:
    """The log-domain results of a block of rows at every scale."""
    d = problem.d
    total, moment = sums.moments[:, 0], sums.moments[:, 1]  # (scales, b)
    # Of the coordinates as rounded for the kernel. A row with a NaN among them is NaN, whatever the kernel gave.
    rounded = queries.astype(state.form.dtype, copy=False).astype(np.float64, copy=False)
    base = -0.5 * np.vecdot(rounded, rounded) + state.nan  # (b,)
    base = np.where(np.isnan(base), base, 0.0) if state.form.direct else base
    sharpness = 1.0 / np.array(problem.scales or (1.0,))[:, None] ** 2
    scale = LN2 * sums.tops + sharpness * base + state.uniform

    def arranged(x: Array) -> Array:
        """(scales, b, …) as the protocol has it."""
        return np.ascontiguousarray(np.moveaxis(x, 0, 1)) if problem.scales else np.ascontiguousarray(x[0])

    if problem.reduction is Reduction.LAPLACE:
        half = (1.0 + 0.5 * d) * total
        exponent = sharpness * (-0.5 * moment if state.form.direct else moment + base * total)  # Σ φ (−½ r²)
        signed = half + exponent
        magnitude = np.log(np.abs(signed)) + scale
        return Partial(
            arranged(np.log(half - exponent) + scale),
            sign=arranged(np.sign(signed)),
            log_magnitude=arranged(magnitude),
        )
    safe = np.where(total > 0, total, 1.0)[:, :, None]
    missing = np.where(np.isnan(base), base, 0.0)[None, :, None]
    return Partial(
        arranged(np.log(total) + scale),
        shift=arranged(sums.sums / safe + missing) if problem.reduction is Reduction.MEAN else None,
    )
