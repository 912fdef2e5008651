"""The plan of an estimate: the data whitened, the passes as problems, and the backend chosen for all of them.

The points stay where they are, and their extent is the one number that is read back from a device before the result:
whether all of them are finite shows in it, and it bounds every pass.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from array_api_compat import array_namespace, is_torch_array
from array_api_compat import device as device_of

from ..arrays import (
    Argument,
    Data,
    Query,
    check_query,
    convert,
    decided,
    detached,
    ingest,
    look,
    quiet,
    rounded,
    to_host,
)
from ..bandwidth.matrix import Bandwidth
from ..bandwidth.rules import resolve
from ..choice import select
from ..choice.hardware import cpu_threads
from ..choice.judge import ask, calls_of
from ..engine.outliers import count, limit_of, outlier_share, radii
from ..engine.threads import map_threads
from ..protocol import TOLERANCES, BackendInfo, Columns, Problem, Reduction, with_fields
from .request import Request
from .resolution import CLEAR, REACH, clearest_centre

__all__ = [
    "FARTHEST",
    "Measured",
    "Plan",
    "centre_of",
    "located",
    "measure",
    "moved_extent",
    "plan",
    "plan_data",
    "read",
    "read_extent",
]

#: Rows that the centre is taken from, up to twice as many: enough for a median that outliers do not move, few enough
#: to cost nothing.
CENTRE_ROWS = 256

#: On the host: coordinates whitened at a time, which stay in a core's cache, and from how many on threads do it.
WHITENED, SHARED = 1 << 15, 1 << 18

#: Bandwidths: up to there squares of distances stay finite.
FARTHEST = 1e149


@dataclass(frozen=True, eq=False)
class Plan:
    """An estimate ready to run.

    Parameters
    ----------
    request : Request
    data : Data
        Validated, where they are; tensors that require grad are the user's own, in float64.
    bandwidth : Bandwidth
    centre : (d,) array
        What whitening subtracts, in data units, where the data are.
    columns : Columns
        The samples, whitened, where the backend works.
    query : (m, d) array or None
        Likewise; None: the samples.
    problems : tuple of Problem
        The passes.
    choice : Choice
    looked : bool
        More of the data decided on the plan than what was noted of them, see :func:`sdkde_core.arrays.look`.
    shares : tuple
        Passes, by number, and limits of which it was asked what share of the pairs is beyond.
    located : int
        How many decisions were noted before whitened points and their extent were known.
    """

    request: Request
    data: Data
    bandwidth: Bandwidth
    centre: Any
    columns: Columns
    query: Any
    problems: tuple[Problem, ...]
    choice: select.Choice
    looked: bool
    shares: tuple[tuple[int, float], ...]
    located: int = 0

    @property
    def alike(self) -> Hashable:
        """What this plan and another have in common if what they run differs in nothing but the points.

        That is all but the extent, of which a backend may tell how much it makes of it.
        """
        return self.choice.name, self.choice.device, self.shares, _but_for_the_extent(self.choice.info, self.problems)

    def again(self, measured: Measured) -> Plan:
        """Return the plan of other points, of which the same was decided: looked at in the same order."""
        for asked in self.shares:
            _share(self.request, measured, *asked)
        return replace(self, columns=Columns(measured.train, measured.log_weights), query=measured.query)


@functools.lru_cache(maxsize=256)  # every call asks, and most have asked the same before
def _but_for_the_extent(info: BackendInfo, problems: tuple[Problem, ...]) -> Hashable:
    """Passes, with what their backend makes of the extent in its place, or with it where that is not known."""

    def variant(problem: Problem) -> Hashable:
        limit = min(limit_of(info, p) for p in (problem, with_fields(problem, same=False)))
        if info.variant is None or problem.extent > limit:
            return problem.extent
        found, failure = ask(info.variant, problem)
        return problem.extent if failure or ask(hash, found)[1] else found

    return tuple((with_fields(problem, extent=0.0), variant(problem)) for problem in problems)


class Measured(NamedTuple):
    """Whitened points and what decides how to sum them; nothing of it has been read back from a device."""

    points: Any  # (n + m, d): the training points, then the query's, if any
    distances: Any  # (n + m,) from the origin
    largest: Any  # of the distances, ()
    log_weights: Any  # (n,)
    centre: Any  # (d,)
    queried: bool  # there is a query, if only one without rows

    @property
    def n(self) -> int:
        return int(self.log_weights.shape[0])

    @property
    def train(self) -> Any:
        return self.points[: self.n, :]

    @property
    def query(self) -> Any:
        return self.points[self.n :, :] if self.queried else None


def read(request: Request, train: Any, query: Any = None) -> tuple[Data, Bandwidth]:
    """Validate the arrays, and find the bandwidth."""
    device = request.device if isinstance(request.device, str) else None
    if device != "cpu" and request.ranks:
        device = None  # they are to agree on every bit of the bandwidth, whatever memory each has
    data = ingest(train, query, request.weights, check_finite=request.check_finite, device=device)
    bandwidth, method, kernel = request.bandwidth, request.method, request.kernel
    try:
        return data, resolve(bandwidth, data.train, data.log_weights, method=method, kernel=kernel)
    except (TypeError, ValueError):
        data.check_finite()  # says what is wrong better
        raise


def plan(
    request: Request,
    train: Any,
    query: Any = None,
    *,
    explained: bool = False,
    replays: bool = False,
    expected: Argument | None = None,
) -> Plan:
    """Read the data, whiten them and choose the backend.

    Parameters
    ----------
    request : Request
    train, query : array_like
    explained : bool
        With every candidate's reason and price.
    replays : bool
        Such calls are replayed, where the backend can and the data are near enough.
    expected : Argument, optional
        A query that is to come later, of which only the shape, the dtype and the names are looked at; None: one of as
        many rows as samples.

    Raises
    ------
    TypeError, ValueError
        The data or the bandwidth cannot be right, or a tensor requires grad: :func:`autograd.plan` takes these.
    BackendUnavailable
        See :func:`sdkde_core.choice.select.choose`.
    """
    data, bandwidth = read(request, train, query)
    if expected is not None:
        check_query(expected, data.n, data.d, data.names)
        data = replace(data, dtype=max(data.dtype, expected.dtype))  # "float64" > "float32"
    rows = None if expected is None else expected.shape[0]
    return plan_data(request, data, bandwidth, explained=explained, replays=replays, expected=rows)


def plan_data(
    request: Request,
    data: Data,
    bandwidth: Bandwidth,
    *,
    explained: bool,
    replays: bool = False,
    grad: bool = False,
    expected: int | None = None,
) -> Plan:
    """Whiten data that have been read and choose the backend; ``grad``: one with the feature ``"grad"``."""
    xp = array_namespace(data.train)
    measured, extent, recentred = located(data, bandwidth)
    noted = decided()
    points, rows, log_weights = measured.train, measured.query, measured.log_weights
    if any(step.moves for step in request.passes):
        extent = moved_extent(extent)
    m = expected if rows is None else data.m
    weighted = data.log_weights is not None
    requires = frozenset(["weights"] * weighted + ["grad"] * grad)
    device = data.device
    asked = m, data.n, data.d, extent, requires, data.dtype, device
    problems = request.problems(*asked)

    shares: dict[tuple[int, float], float] = {}

    def share(step: int, limit: float) -> float:
        if (step, limit) not in shares:
            shares[step, limit] = _share(request, measured, step, limit)
        return shares[step, limit]

    far = recentred or problems[0].extent > REACH[problems[0].precision]  # where all data are looked at for rounding
    choice = select.choose(
        problems,
        backend=request.backend,
        device=request.device,
        data_device=device,
        options=request.backend_options,
        share=share,
        calls=calls_of(request.calls, data.came_from),
        replays=replays and not far,
        explained=explained,
        without=request.without,
    )
    looked = far or bool(request.without)
    library, place = choice.info.arrays, choice.device
    if xp.__name__ != f"array_api_compat.{library}" or device != place:
        points, log_weights = convert(points, library, place), convert(log_weights, library, place)
        rows = None if rows is None else convert(rows, library, place)
    problems, columns = choice.posed(problems), Columns(points, log_weights)
    asked_for = tuple(shares)
    return Plan(request, data, bandwidth, measured.centre, columns, rows, problems, choice, looked, asked_for, noted)


def measure(data: Data, bandwidth: Bandwidth, centre: Any = None) -> Measured:
    """Whiten the data and measure their extent; by default from their median."""
    xp, n = array_namespace(data.train), data.n
    centre = centre_of(data.train, bandwidth) if centre is None else centre
    parts = [data.train] if data.query is None else [data.train, data.query]
    large = sum(part.shape[0] for part in parts) * data.train.shape[1] >= SHARED
    if (
        large
        and isinstance(centre, np.ndarray)
        and isinstance(bandwidth.factor, np.ndarray)
        and bandwidth.factor.ndim == 1
    ):
        points, distances = _by_threads(parts, bandwidth, centre)
    else:
        points = bandwidth.whiten(parts[0] if len(parts) == 1 else xp.concat(parts), centre)  # half the kernels
        distances = radii(points)
    largest, log_weights = xp.max(distances), data.log_weights
    if log_weights is None:
        log_weights = xp.full((n,), -math.log(n), dtype=xp.float64, device=device_of(data.train))
    return Measured(points, distances, largest, log_weights, centre, data.query is not None)


def _by_threads(parts: list[np.ndarray], bandwidth: Bandwidth, centre: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Whitened points (n + m, d) and their distances from the origin, on the host, with no copy of them between.

    A division and a dot product of every row alone: how rows are cut, and by how many threads, changes no bit.
    """
    ends = np.cumsum([0, *map(len, parts)])
    points, distances = np.empty((ends[-1], len(centre))), np.empty(ends[-1])
    height = max(1, WHITENED // len(centre))
    pieces = [(k, i) for k, part in enumerate(parts) for i in range(0, len(part), height)]

    @quiet
    def whiten(piece: tuple[int, int]) -> None:
        k, i = piece
        some = parts[k][i : i + height]
        there = slice(ends[k] + i, ends[k] + i + len(some))
        points[there] = bandwidth.whiten(some, centre)
        distances[there] = radii(points[there])

    map_threads(whiten, pieces, cpu_threads())
    return points, distances


def located(data: Data, bandwidth: Bandwidth) -> tuple[Measured, float, bool]:
    """Whiten the data and read their extent; and whether the centre was moved, for which all of them were looked at."""
    measured = measure(data, bandwidth)

    def far_out(*centre: float) -> bool:
        return bool((abs(np.array(centre)) > CLEAR * _scale(bandwidth)).any())

    bound = look(_bound, measured.largest)
    blurred = not bound <= CLEAR and not bandwidth.narrow and look(far_out, measured.centre)
    extent = _checked(bound, measured.distances, data, bandwidth)
    if blurred and extent > CLEAR:
        centre = _clearer(data, bandwidth, measured.centre)
        if centre is not None:
            measured = measure(data, bandwidth, centre)
            extent = read_extent(measured.largest, measured.distances, data, bandwidth)
        return measured, extent, True
    return measured, extent, False


def _share(request: Request, measured: Measured, step: int, limit: float) -> float:
    """The share of a pass's pairs that have a point beyond ``limit``."""
    columns = rows = measured.distances[: measured.n]
    if measured.queried and request.passes[step].rows != "train":
        rows = measured.distances[measured.n :]
    return outlier_share(rows, columns, limit)


def read_extent(largest: Any, distances: Any, points: Data | Query, bandwidth: Bandwidth) -> float:
    """Return the extent, rounded up, having waited for the device.

    Parameters
    ----------
    largest : () array
        Of the distances.
    distances : (k,) array
        From the origin, in bandwidths.
    points : Data or Query
        What is that far; looked at where it is too far, or not finite.
    bandwidth : Bandwidth
        For the message.

    Raises
    ------
    ValueError
        A point is not finite, or so far that distances overflow.
    """
    return _checked(look(_bound, largest), distances, points, bandwidth)


def _bound(largest: float) -> float:
    """The extent, rounded up where it is neither too far nor NaN."""
    return rounded(largest) if largest < 0.9 * FARTHEST else largest


def _checked(extent: float, distances: Any, points: Data | Query, bandwidth: Bandwidth) -> float:
    """The extent, of numbers that may be taken; see :func:`read_extent`."""
    if not math.isfinite(extent):
        points.check_finite()
    if math.isnan(extent):  # NaN is allowed: the extent is that of the others
        xp = array_namespace(distances)
        distances = xp.where(xp.isnan(distances), xp.zeros_like(distances), distances)
        extent = _bound(float(xp.max(distances)))
    if extent > FARTHEST:
        raise ValueError(_too_far(distances, points, bandwidth))
    return extent


def _too_far(distances: Any, points: Data | Query, bandwidth: Bandwidth) -> str:
    """Say which row lies where squares of distances overflow, or that most do."""
    xp = array_namespace(distances)
    if 2.0 * float(count(distances > FARTHEST)) > distances.shape[0]:
        return f"bandwidth ({bandwidth}) is too small for the data: distances beyond 1e149 bandwidths overflow"
    name, row, values = points.row(int(xp.argmax(distances)))
    column = int(np.argmax(abs(values)))
    which = f"row {row} of {name}, {values[column]:.3g} in column {column},"
    if math.isinf(values[column]):
        return f"{which} is not finite; drop or fill it"
    return (
        f"{which} is too far from the median of train: distances beyond 1e149 bandwidths ({bandwidth}) overflow; "
        "drop the row, rescale its column, or pass a larger bandwidth"
    )


def centre_of(points: Any, bandwidth: Bandwidth) -> Any:
    """A centre (d,), float64, that a few outliers do not move: the lower median of evenly spaced rows, per column.

    Where columns are nearly dependent it may lie far from all points, in bandwidths: then it is the row closest to the
    whitened rows' median.
    """
    xp = array_namespace(points)
    rows = points[:: max(1, points.shape[0] // CENTRE_ROWS), :]
    centre = _median(rows)
    if bandwidth.narrow:
        whitened = bandwidth.whiten(rows, centre)
        distances = radii(whitened - _median(whitened))
        distances = xp.where(xp.isnan(distances), xp.full_like(distances, math.inf), distances)
        centre = xp.take(rows, xp.reshape(xp.argmin(distances), (1,)), axis=0)[0, :]
    return xp.astype(centre, xp.float64, copy=False)


def _clearer(data: Data, bandwidth: Bandwidth, centre: Any) -> Any:
    """A centre that keeps more digits of the points, where there is one; see :func:`clearest_centre`."""
    h, here = _scale(bandwidth), to_host(centre)
    best = clearest_centre(to_host(data.train), None if data.query is None else to_host(data.query), h, here)
    if np.array_equal(best, here):
        return None
    return array_namespace(centre).asarray(best, device=device_of(centre)) if centre is not here else best


def _scale(bandwidth: Bandwidth) -> np.ndarray:
    """sqrt(diag H), (d,), data units, on the host."""
    factor = to_host(detached(bandwidth.factor))
    return factor if factor.ndim == 1 else np.sqrt((factor**2).sum(axis=1))


def _median(rows: Any) -> Any:
    xp = array_namespace(rows)
    if is_torch_array(rows) and not xp.are_deterministic_algorithms_enabled():
        return xp.nanmedian(rows, dim=0).values  # one kernel for five; only its indices, unused, may vary
    return xp.sort(rows, axis=0, stable=False)[(rows.shape[0] - 1) // 2, :]  # stable takes eight times as long


def moved_extent(extent: float) -> float:
    """A bound on the extent once samples have moved halfway to means of samples, which lie among the samples.

    They do up to rounding and the tolerance of the shift; so nothing needs to be measured again.
    """
    return (1.0 + 1e-6) * extent + TOLERANCES["fast"][Reduction.MEAN].absolute
