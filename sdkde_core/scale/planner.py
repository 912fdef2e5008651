"""The planner: an estimate cut into blocks of rows and shards of columns, whoever computes them, in whatever order.

Everything that depends on all points is found once and frozen: the bandwidth, the centre, the extent, the weights' sum,
the backend. Then every block of rows sums over the shards 0, 1, 2 … in order. Shards follow from (n, d) alone, and a
backend is told how many rows there are altogether. So the bits of a row depend neither on who computes it nor on the
rows beside it, for backends with the feature ``"range"``; for others they do not as long as blocks are the same.
Rows that are columns of the shard themselves are asked for as such, of a backend with ``"range"``: it may sum them by a
faster formula. Blocks of pairs are not dealt out (docs/architecture.md says why).

Each shard is ordered by itself, where a backend orders columns to leave out pairs that do not matter.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..arrays import convert, rounded, to_host
from ..bandwidth.matrix import Bandwidth
from ..bandwidth.rules import FULL_RULES, by_rule, check_rule, check_spread
from ..choice import registry, select
from ..choice.hardware import gpu_name
from ..engine.columns import Whole
from ..engine.dealing import shares
from ..engine.merge import concatenate, each, merge
from ..engine.outliers import limit_of, radii
from ..engine.spread import Reducer, pack_on
from ..estimator.density import density
from ..estimator.kernels import log_constant
from ..estimator.plan import FARTHEST, centre_of, moved_extent
from ..estimator.request import Request
from ..estimator.resolution import CLEAR, REACH, clearest_centre
from ..protocol import QUANTUM, Columns, Partial, Problem, Reduction
from .survey import Counting, Moments, MomentsOf, Question, Reach, Summary, log_of, numbers

__all__ = ["Frozen", "Shape", "cut", "freeze", "rows_of_a_block", "width_of_a_shard"]

Array = NDArray[Any]

#: Numbers in a shard, and in a block of rows, at most: 32 MiB of float64.
NUMBERS = 1 << 22

#: What a block's rows are worth at most, in pairs times (d + 16): on a CPU some minutes of two cores, on a GPU a
#: fraction of a second. And how many rows a GPU gets at least, so that it does not wait for a disk.
CPU_WORK, GPU_WORK, GPU_ROWS = 1 << 41, 1 << 48, 1 << 16


def cut(length: int, width: int) -> list[tuple[int, int]]:
    """Return the consecutive parts of so many rows or columns: (start, stop)."""
    return [(start, min(start + width, length)) for start in range(0, length, width)]


def width_of_a_shard(n: int, d: int) -> int:
    """Return how many of n columns in d dimensions are a shard: a multiple of 1024."""
    return min(max(QUANTUM, NUMBERS // d // QUANTUM * QUANTUM), -(-n // QUANTUM) * QUANTUM)


def rows_of_a_block(m: int, n: int, d: int, device: str) -> int:
    """Return how many of m rows are a block, over n columns: a multiple of 1024, by the kind of device alone."""
    on_host = device.partition(":")[0] == "cpu"
    worth = (CPU_WORK if on_host else GPU_WORK) // (n * (d + 16))
    rows = min(max(worth, QUANTUM if on_host else GPU_ROWS), NUMBERS // d, m) // QUANTUM * QUANTUM
    return max(QUANTUM, rows)


@dataclass(frozen=True)
class Shape:
    """What is known of the data without reading them.

    Parameters
    ----------
    n, d : int
    m : int or None
        Query rows; None: the samples.
    dtype : {"float32", "float64"}
        Of the result: the wider one of samples and queries.
    weighted : bool
    """

    n: int
    d: int
    m: int | None = None
    dtype: str = "float64"
    weighted: bool = False


@dataclass(frozen=True, eq=False)
class Frozen:
    """An estimate of which everything is decided; made by :func:`freeze`. Immutable, pickles.

    Parameters
    ----------
    request : Request
        Without the user's arrays.
    shape : Shape
    bandwidth : Bandwidth
    centre : (d,) array
        What whitening subtracts, data units.
    log_total : float or None
        Of all weights; None: all are equal.
    backend, device : str
    devices : tuple of str
        Those that share the rows of a block, where the user named several.
    problems : tuple of Problem
        The passes, with the m, n and extent of the whole.
    far : tuple of int
        By pass, how many of all its rows are outliers.
    width, rows : int
        Columns of a shard, rows of a block.
    digest : str
        The fingerprint of samples, weights and queries.
    """

    request: Request
    shape: Shape
    bandwidth: Bandwidth
    centre: Array
    log_total: float | None
    backend: str
    device: str
    devices: tuple[str, ...]
    problems: tuple[Problem, ...]
    far: tuple[int, ...]
    width: int
    rows: int
    digest: str

    @property
    def shards(self) -> list[tuple[int, int]]:
        """The shards of the columns, (start, stop), in the order of the sums."""
        return cut(self.shape.n, self.width)

    def blocks(self, step: int) -> list[tuple[int, int]]:
        """Return the blocks of a pass's rows, (start, stop)."""
        return cut(self.problems[step].m, self.rows)

    def whitened(self, points: Any) -> Array:
        """Return rows of the data (k, d), in bandwidths from the centre, float64."""
        return self.bandwidth.whiten(numbers(points), self.centre)

    def unwhitened(self, points: Array) -> Array:
        """Return whitened points (k, d) in data units, in the result's dtype."""
        return (self.bandwidth.stretch(points) + self.centre).astype(self.shape.dtype, copy=False)

    def log_weights(self, count: int, weights: Any = None) -> Array:
        """Return the log weights (count,) of some samples, of which all sum to 1."""
        if self.log_total is None:
            return np.full(count, -math.log(self.shape.n))
        return np.minimum(log_of(weights) - self.log_total, 0.0)

    def columns(self, points: Any, weights: Any = None) -> Columns:
        """Return a shard of the first pass's columns.

        Parameters
        ----------
        points : (k, d) array
            Of the data.
        weights : (k,) array, optional
            As the user has them.
        """
        return Columns(self.whitened(points), self.log_weights(len(points), weights))

    def moved_columns(self, points: Array, weights: Any = None) -> Columns:
        """Return a shard of the columns that have moved: ``points`` (k, d) as :meth:`moved` has returned them."""
        return Columns(points, self.log_weights(len(points), weights))

    @functools.cached_property
    def _choice(self) -> select.Choice:
        """The backend in this process."""
        where = {"device": self.devices or self.device, "options": self.request.backend_options}
        return select.choose(self.problems, backend=self.backend, **where)  # type: ignore[arg-type]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if not name.startswith("_")}

    def packed(self, step: int, columns: Columns) -> Reducer | None:
        """Return a shard's columns ready for any number of blocks of rows; None where none has weight."""
        if not (columns.log_weights > -math.inf).any():
            return None
        choice = self._choice
        library, place = choice.info.arrays, choice.device
        there = Columns(convert(columns.points, library, place), convert(columns.log_weights, library, place))
        problem = replace(self.problems[step], n=columns.points.shape[0], same=False, device=place)
        return pack_on(self.devices, choice.backend, choice.info, problem, there)

    def partial(
        self, step: int, columns: Columns | Reducer | None, rows: Array, at: tuple[int, tuple[int, int]] | None = None
    ) -> Partial:
        """Return what some rows of a pass are over one shard, as NumPy arrays.

        Parameters
        ----------
        step : int
            The pass's number.
        columns : Columns, or what :meth:`packed` has returned
        rows : (k, d) array
            Whitened: of the samples where the pass moves them, else of the queries.
        at : (int, (int, int)), optional
            Where rows and columns are samples alike: the number of the first row, and the shard's (start, stop).

        Raises
        ------
        sdkde_core.BackendUnavailable
            The backend is not here.
        """
        if isinstance(columns, Columns):
            columns = self.packed(step, columns)
        if columns is None:
            return self.nothing(step, len(rows))
        first, last, offset = self._own(at, len(rows))
        parts = [functools.partial(self._queries, step, columns, rows[:first])] if first else []
        if first < last:
            ends = [(first + offset, last + offset)]
            if at is not None and ends == [(0, n := at[1][1] - at[1][0])]:
                ends = shares(n, 2)  # all columns as rows may have other bits than some of them
            parts += [functools.partial(self._columns, step, columns, some) for some in ends]
        if last < len(rows) or not len(rows):
            parts += [functools.partial(self._queries, step, columns, rows[last:])]
        with np.errstate(all="ignore"):
            return concatenate([each(part()[0], to_host) for part in parts])

    def _own(self, at: tuple[int, tuple[int, int]] | None, count: int) -> tuple[int, int, int]:
        """Which of so many rows are asked for as columns of the shard, first and last, and their place there."""
        if at is None or "range" not in self._choice.info.features:
            return 0, 0, 0
        row, (start, stop) = at
        first, last, offset = max(0, start - row), min(count, stop - row), row - start
        return (first, last, offset) if first < last else (0, 0, 0)

    def _columns(self, step: int, columns: Reducer, some: tuple[int, int]) -> tuple[Partial, int]:
        """Sum with some of the columns as rows."""
        return columns.reduce(some=some, extent=self.problems[step].extent)

    def _queries(self, step: int, columns: Reducer, rows: Array) -> tuple[Partial, int]:
        """Sum with rows that are queries to the shard."""
        choice, problem = self._choice, self.problems[step]
        there = convert(rows, choice.info.arrays, choice.device)
        known = {"distances": radii(there), "extent": problem.extent, "whole": Whole(problem.m, self.far[step])}
        return columns.reduce(there, **known)

    def nothing(self, step: int, count: int) -> Partial:
        """Return what so many rows are over no columns."""
        problem, least = self.problems[step], np.full(count, -math.inf)
        if problem.reduction is Reduction.MEAN:
            return Partial(least, np.zeros((count, problem.d)))
        laplace = problem.reduction is Reduction.LAPLACE
        return Partial(least, None, *((np.zeros(count), least) if laplace else ()))

    def fold(self, left: Partial | None, right: Partial) -> Partial:
        """Return the sums over the shards so far, ``left``, and the next one."""
        with np.errstate(all="ignore"):
            return right if left is None else merge([left, right])

    def moved(self, rows: Array, sums: Partial) -> Array:
        """Return whitened samples (k, d), moved by half their shift over all shards."""
        return rows + 0.5 * sums.shift

    def density(self, sums: Partial, log: bool) -> Array:
        """Return the density (k,), or its log, of sums over all shards."""
        clip, constant = self.request.negative != "keep", log_constant(self.request.kernel, self.bandwidth)
        with np.errstate(all="ignore"):
            return density(sums, constant, log, clip).astype(self.shape.dtype)

    @property
    def _cards(self) -> tuple[str, ...]:
        """The GPUs that work."""
        return tuple(place for place in self.devices or (self.device,) if place.startswith("cuda"))

    def identity(self) -> dict[str, Any]:
        """Return what the bits of the result follow from, of what JSON has."""
        from .. import __version__

        record, named = registry.find(self.backend), hashlib.blake2b(digest_size=16)
        for name, array in sorted(self.bandwidth.arrays().items()):
            named.update(name.encode() + array.tobytes())
        named.update(self.centre.tobytes())
        last = self.problems[-1]
        return {
            "samples, weights and queries": self.digest,
            "shapes": [self.shape.n, self.shape.d, -1 if self.shape.m is None else self.shape.m],
            "dtype": self.shape.dtype,
            "method": self.request.method,
            "kernel": self.request.kernel,
            "negative": self.request.negative,
            "bandwidth": named.hexdigest(),
            "precision": last.precision,
            "extent": [last.extent, *self.far],
            "backend": [self.backend, record.version if record else "", repr(self.request.backend_options or {})],
            "version": __version__,
            "device": [self.device.partition(":")[0], *sorted({gpu_name(place) or "" for place in self._cards})],
            "shards": self.width,
            "rows": self.rows,
        }


def freeze(request: Request, shape: Shape) -> Generator[Question, Any, Frozen]:
    """Decide everything about an estimate, asking questions of all points.

    A generator: each question that it yields is to be put to the blocks of what it is about, and the answers, merged
    from the first to the last, are to be sent in. Blocks are ``cut(n, width_of_a_shard(n, d))``, of the queries
    likewise. It returns what was decided. :func:`sdkde_core.scale.run.answered` does it for sources here.

    Parameters
    ----------
    request : Request
        Without weights.
    shape : Shape

    Raises
    ------
    TypeError, ValueError
        As :func:`sdkde_core.estimate`; or the request is one that needs all samples together.
    sdkde_core.BackendUnavailable
        No backend can do it.
    """
    n, d = shape.n, shape.d
    _check(request)
    asked = Moments(n, d, request.bandwidth in FULL_RULES if _named(request) else False, request.check_finite)
    asked = replace(asked, weighted=shape.weighted)
    found: MomentsOf = yield asked
    if shape.weighted and found.log_total == -math.inf:
        raise ValueError("weights are all zero; pass at least one positive weight")
    log_total = None if found.equal else found.log_total
    bandwidth = yield from _bandwidth(request, asked, found, log_total)
    with np.errstate(all="ignore"):
        centre = centre_of(asked.centre_rows(found), bandwidth)
        scale = np.sqrt(np.diagonal(bandwidth.matrix))
        if (abs(centre) > CLEAR * scale).any():
            centre = clearest_centre(found.rows, None, scale, centre)
    largest, digests = 0.0, [found.digest]
    for about in ("train", "query") if shape.m else ("train",):
        far, _, digest = yield Reach(about, bandwidth, centre, checked=request.check_finite)
        largest, digests = max(largest, far), [*digests, digest]
    precision = request.precision_for(shape.dtype)
    extent = _checked(largest, bandwidth, precision)
    if any(step.moves for step in request.passes):
        extent = moved_extent(extent)
    requires = frozenset(() if log_total is None else ("weights",))
    width = width_of_a_shard(n, d)
    asked_of = shape.m, n, d, extent, requires, shape.dtype, "cpu"
    problems = tuple(replace(p, same=False) for p in request.problems(*asked_of))  # rows and columns are cut apart
    choice = select.choose(
        problems, backend=request.backend, device=request.device, options=request.backend_options, calls=request.calls
    )
    problems = tuple(replace(p, device=choice.device) for p in problems)
    far_rows = yield from _far(request, shape, problems, choice, (bandwidth, centre))
    m = max(p.m for p in problems)  # blocks are the same in all passes
    return Frozen(
        replace(request, weights=None, bandwidth="silverman"),  # the bandwidth is what these say
        shape,
        bandwidth,
        centre,
        log_total,
        choice.name,
        choice.device,
        choice.devices,
        problems,
        far_rows,
        width,
        rows_of_a_block(m, n, d, choice.device),
        " ".join(f"{digest:032x}" for digest in digests),
    )


def _named(request: Request) -> bool:
    return isinstance(request.bandwidth, str)


def _check(request: Request) -> None:
    """Refuse what needs all samples together."""
    if request.negative == "renormalise":
        raise ValueError("negative='renormalise' needs all samples in memory; pass 'clip' or 'keep'")
    if _named(request):
        check_rule(request.bandwidth, request.method, request.kernel)
        if request.bandwidth == "isj":
            raise ValueError("bandwidth='isj' needs all samples in memory; pass 'auto', another rule, or numbers")


def _bandwidth(
    request: Request, asked: Moments, found: MomentsOf, log_total: float | None
) -> Generator[Question, Any, Bandwidth]:
    rule = request.bandwidth
    if not isinstance(rule, str):
        return Bandwidth.of(rule, asked.d)
    n_eff = float(asked.n) if log_total is None else math.exp(2.0 * found.log_total - found.log_squares)
    if not (np.isfinite(found.low) & np.isfinite(found.high)).all():
        raise ValueError(f"bandwidth={rule!r} is chosen from train, which has values that are not finite; drop them")
    check_spread(rule, found.carrying, n_eff, found.low, found.high)
    quartiles = None
    if rule not in FULL_RULES:
        counting = Counting.first(asked.sample(found)[0], found.low, found.high, n_eff, log_total)
        answer = yield counting
        while not counting.listed:
            counting = counting.next(answer)
            answer = yield counting
        quartiles = counting.quartiles(answer)
    with np.errstate(all="ignore"):
        return by_rule(rule, Summary(asked, found, n_eff, request.method, quartiles), found.low, found.high)


def _checked(largest: float, bandwidth: Bandwidth, precision: str) -> float:
    """The extent, rounded up; ValueError where it is too large."""
    if not largest < 0.9 * FARTHEST:
        raise ValueError(
            f"a point of train or query is beyond 1e149 bandwidths ({bandwidth}) from the median of train, where "
            "distances overflow; drop it, rescale its column, or pass a larger bandwidth"
        )
    extent = rounded(largest)
    if extent > REACH[precision]:
        other = next((f"pass precision={p!r}, " for p in ("high", "fast") if extent <= REACH[p]), "")
        raise ValueError(
            f"a point of train or query is {extent:.1e} bandwidths ({bandwidth}) from the median of train, and "
            f"precision={precision!r} holds up to {REACH[precision]:.2g} where data are not all in memory; {other}"
            "drop it, or pass a larger bandwidth"
        )
    return extent


def _far(
    request: Request, shape: Shape, problems: tuple[Problem, ...], choice: select.Choice, whitening: tuple[Any, Any]
) -> Generator[Question, Any, tuple[int, ...]]:
    """How many of each pass's rows are beyond the backend's limit."""
    found = []
    for step, problem in zip(request.passes, problems):
        limit, far = limit_of(choice.info, replace(problem, n=width_of_a_shard(shape.n, shape.d))), 0
        if problem.extent > limit:
            about = "query" if step.rows == "query" and shape.m else "train"
            _, (far,), _ = yield Reach(about, *whitening, (limit,), False)
        found.append(far)
    return tuple(found)
