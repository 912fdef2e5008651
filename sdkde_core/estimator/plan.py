"""The plan of an estimate: the data whitened, the passes as problems, and the backend chosen for all of them.

Before the result one number is read back from a device: the points' extent. It bounds every pass, and shows whether all
points are finite.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from array_api_compat import device as device_of
from array_api_compat import is_torch_array

from ..arrays import Argument, Data, array_namespace, check_query, convert, ingest, look, rounded, to_host
from ..arrays.frames import check_labels
from ..bandwidth.matrix import Bandwidth
from ..bandwidth.rules import resolve
from ..choice import select
from ..engine.outliers import CLEAR, count, limit_of, outlier_share, radii
from ..engine.repeats import distinct_share
from ..protocol import BackendUnavailable, Columns, Problem, with_fields
from .density import widths
from .request import Request
from .resolution import clearest_centre

FARTHEST = 1e149  # bandwidths: up to there squares of distances stay finite


class Plan(NamedTuple):
    request: Request
    data: Data  # validated, on their device; tensors that require grad are the user's own, in float64
    bandwidth: Bandwidth
    centre: Any  # (d,) subtracted by whitening, in data units, on the data's device
    columns: Columns  # the samples, whitened, where the backend works
    query: Any  # (m, d) likewise; None: the samples
    problems: tuple[Problem, ...]  # the passes
    choice: select.Choice
    order: Any = None  # (n,) the sample that each column is; None: as they came

    @property
    def last(self) -> Problem:
        return self.problems[self.request.answering]


def read(request: Request, train: Any, query: Any = None) -> tuple[Data, Bandwidth]:
    """Validate the arrays, and find the bandwidth."""
    device = request.device if isinstance(request.device, str) else None
    if device != "cpu" and request.ranks:
        device = None  # ranks must agree on every bit of the bandwidth, whatever memory each GPU has free
    data = ingest(train, query, request.weights, check_finite=request.check_finite, device=device)
    check_labels("bandwidth", request.bandwidth, data.names)
    how: dict[str, Any] = {name: getattr(request, name) for name in ("method", "kernel", "steps", "mixed")}
    try:
        return data, resolve(request.bandwidth, data.train, data.log_weights, **how)
    except (TypeError, ValueError):
        data.check_finite()  # a better message
        raise


def plan(
    request: Request, train: Any, query: Any = None, *, grad: Sequence[str] = (), explained: bool = False,
    expected: Argument | None = None,
) -> Plan:  # fmt: skip
    """Read the data, whiten them and choose the backend.

    Tensors that require grad are refused: :func:`.autograd.plan` takes them, and passes them on detached, with their
    names in ``grad``. ``expected`` is a query that comes later: only its shape, dtype and names are looked at.
    """
    data, bandwidth = read(request, train, query)
    request = request.moving(bandwidth)
    (n, d), m = data.train.shape, None if data.query is None else data.query.shape[0]
    if expected is not None:
        check_query(expected, n, d, data.names)
        data, m = data._replace(dtype=max(data.dtype, expected.dtype)), expected.shape[0]  # "float64" > "float32"
    points, queries, distances, centre, extent = located(data, bandwidth)
    weighted = data.log_weights is not None or "weights" in grad  # equal ones have different derivatives
    requires = frozenset(["weights"] * weighted + ["grad"] * bool(grad))
    problems = request.problems(m, n, d, extent, requires, data.dtype, data.device)
    if data.log_weights is not None:
        problems = tuple(with_fields(p, weight_span=data.weight_span) for p in problems)
    if data.device == "cpu" and not (request.ranks or grad) and (unequal := distinct_share(points)) < 1.0:
        problems = tuple(with_fields(p, distinct=float(f"{unequal:.2g}")) for p in problems)

    def share(step: int, limit: float) -> float:
        columns = rows = distances[:n]
        if data.query is not None and request.passes[step].rows != "train":
            rows = distances[n:]
        return outlier_share(rows, columns, limit * request.passes[step].scale)

    how: dict[str, Any] = {"data_device": data.device, "came_from": data.came_from, "calls": request.calls}
    how |= {"options": request.backend_options, "explained": explained, "without": request.without}
    choice = None if data.came_from == "cpu" else choose_near(request, problems, **how)
    choice = choice or select.choose(problems, backend=request.backend, device=request.device, share=share, **how)
    library, place, logs = choice.info.arrays, choice.device, data.log_weights
    if logs is None:
        logs = array_namespace(distances).full_like(distances[:n], -math.log(n))
    columns = Columns(convert(points, library, place), convert(logs, library, place))
    rows = None if queries is None else convert(queries, library, place)
    return Plan(request, data, bandwidth, centre, columns, rows, select.at(problems, place), choice)


def choose_near(request: Request, problems: Sequence[Problem], long: bool = False, **how: Any) -> select.Choice | None:
    """Return the best backend if all points are within its limits, so that none are summed apart; else None.

    Data on a device prefer such a backend, as summing outliers apart takes many launches. In an estimate of 20 ms or
    more launches do not matter, and another backend may be many times as fast: then None, unless ``long``.
    """
    try:
        choice = select.choose(problems, backend=request.backend, device=request.device, **how)
    except BackendUnavailable:
        return None
    near = all(p.extent <= limit_of(choice.info, p) for p in select.at(problems, choice.device))
    brief = any(c.name == choice.name and (c.seconds or 0.0) < 0.02 for c in choice.candidates)
    return choice if near and (long or brief) else None


def whitened(data: Data, bandwidth: Bandwidth, centre: Any) -> tuple[Any, Any, Any]:
    """Samples and query, or None, in bandwidths from a centre, and their distances from it (n + m,)."""
    train, query, n = data.train, data.query, data.train.shape[0]
    if query is None or isinstance(query, np.ndarray):  # NumPy's need no joint copy
        points, rows = (None if x is None else bandwidth.whiten(x, centre) for x in (train, query))
        return points, rows, radii(points) if rows is None else np.concatenate((radii(points), radii(rows)))
    both = bandwidth.whiten(array_namespace(train).concat([train, query]), centre)  # half as many kernels
    return both[:n, :], both[n:, :], radii(both)


def located(data: Data, bandwidth: Bandwidth) -> tuple[Any, Any, Any, Any, float]:
    """Whiten the data about their median, or a clearer centre; return points, rows, distances, centre and extent."""
    centre = centre_of(data.train, bandwidth)
    points, rows, distances = whitened(data, bandwidth, centre)
    extent = checked_extent(distances, data, bandwidth)
    if extent <= CLEAR or bandwidth.narrow:  # the former nearly always
        return points, rows, distances, centre, extent
    here, (h, _) = to_host(centre), widths(bandwidth)
    if (abs(here) > CLEAR * h).any():
        best = clearest_centre(to_host(data.train), None if data.query is None else to_host(data.query), h, here)
        if not np.array_equal(best, here):
            centre = array_namespace(centre).asarray(best, device=device_of(centre))
            points, rows, distances = whitened(data, bandwidth, centre)
            extent = checked_extent(distances, data, bandwidth)
    return points, rows, distances, centre, extent


def checked_extent(distances: Any, points: Data, bandwidth: Bandwidth) -> float:
    """The extent of distances (k,), rounded up; ValueError where one overflows or (unless allowed) is not finite."""
    xp = array_namespace(distances)
    extent = look(rounded, xp.max(distances))  # the one number that is waited for
    if extent < FARTHEST:
        return extent
    if not math.isfinite(extent):
        points.check_finite()
    # Finite points whitened by a matrix may give ∞ − ∞, which is NaN.
    instead = xp.full_like(distances, math.inf if points.unchecked else 0.0)
    distances = xp.where(xp.isnan(distances), instead, distances)
    largest = float(xp.max(distances))
    if largest <= FARTHEST:
        return rounded(largest)
    name, row, values = points.row(int(xp.argmax(distances)))
    column = int(np.argmax(abs(values)))
    which = f"row {row} of {name}, {values[column]:.3g} in column {column},"
    if math.isinf(values[column]):
        raise ValueError(f"{which} is not finite; drop or fill it")
    if 2.0 * float(count(distances > FARTHEST)) > distances.shape[0]:
        overflow = f"distances beyond 1e149 bandwidths overflow, the largest that of row {row} of {name}"
        raise ValueError(f"bandwidth ({bandwidth}) is too small for the data: {overflow}")
    overflow = f"distances beyond 1e149 bandwidths ({bandwidth}) overflow"
    instead = "drop the row, rescale its column, or pass a larger bandwidth"
    raise ValueError(f"{which} is too far from the median of train: {overflow}; {instead}")


def centre_of(points: Any, bandwidth: Bandwidth | None = None) -> Any:
    """A centre (d,), float64, that a few outliers do not move: the lower median of 256 to 511 rows, per column.

    Where columns are nearly dependent the median may lie many bandwidths from all points: then the centre is the row
    closest to the whitened rows' median.
    """
    xp = array_namespace(points)
    rows = points[:: max(1, points.shape[0] // 256), :]
    if is_torch_array(rows) and not xp.are_deterministic_algorithms_enabled():
        centre = xp.nanmedian(rows, dim=0).values  # one kernel for five; only its indices, unused, may vary
    else:
        centre = xp.sort(rows, axis=0, stable=False)[(rows.shape[0] - 1) // 2, :]  # stable takes eight times as long
    if bandwidth is not None and bandwidth.narrow:
        whitened = bandwidth.whiten(rows, centre)
        distances = radii(whitened - centre_of(whitened))
        distances = xp.where(xp.isnan(distances), xp.full_like(distances, math.inf), distances)
        centre = xp.take(rows, xp.reshape(xp.argmin(distances), (1,)), axis=0)[0, :]
    return xp.astype(centre, xp.float64, copy=False)
