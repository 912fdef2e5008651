"""Fitted columns: what is left of a plan once all passes but the last have run, ready for any rows of the last."""

from __future__ import annotations

import functools
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
from array_api_compat import array_namespace, is_torch_array
from array_api_compat import device as device_of

from ..arrays import Argument, Origin, Query, check_query, convert, detached, quiet, rounded, to_host
from ..bandwidth.matrix import Bandwidth
from ..choice import select
from ..choice.judge import only_enqueues
from ..engine.failures import BackendFailed, OutOfReach
from ..engine.forks import new_lock
from ..engine.merge import concatenate, empty
from ..engine.outliers import limit_of, radii
from ..engine.spread import Reducer, pack_on
from ..protocol import BackendUnavailable, Columns, Partial, Problem, Reduction, with_fields
from .batches import Advance, batch_rows
from .fallback import set_aside, without
from .graphs import Replays
from .kernels import log_constant
from .negative import NegativeMass, negative_mass
from .plan import Plan, read_extent
from .request import Request
from .resolution import REACH, check_resolution
from .slope import laplace_slope

__all__ = ["Fitted", "PassReport", "loaded", "run", "shifted", "slope"]

R = TypeVar("R")


@dataclass(frozen=True)
class PassReport:
    """What a pass was, and the time it took on the clock."""

    problem: Problem
    seconds: float
    far_points: int  # outliers, summed apart by a slower formula


def run(plan: Plan, report: Callable[[PassReport], None] | None = None) -> Partial:
    """Run all passes of a plan, and return the result of the last; ``report`` is told of each."""
    last = plan.problems[-1]
    if not last.m:
        return empty(last, plan.columns.points)
    check_resolution(last, plan.bandwidth, plan.columns, plan.query)
    return Fitted.of(plan, report=report).reduce(None if last.same else plan.query, report=report)


def slope(plan: Plan) -> Any:
    """Run all passes of a plan whose goal is the gradient, and return it, per bandwidth."""
    last = plan.problems[-1]
    if not last.m:
        return plan.columns.points[:0, :]
    check_resolution(last, plan.bandwidth, plan.columns, plan.query)
    return Fitted.of(plan).slope(None if last.same else plan.query)


class Fitted:
    """The columns of a plan's last pass where its backend has them; immutable, pickles, safe to use from many threads.

    Made by :meth:`of`. Pickled, it takes the columns to the host; where it is loaded, the same backend has them if it
    is there, else the best one that is, unless the request names one.

    Attributes
    ----------
    request : Request
        Of a shared one without the user's arrays.
    bandwidth : Bandwidth
    problem : Problem
        The last pass over the samples themselves; its extent bounds the columns.
    choice : Choice
    home : Origin
        Where queries are brought.
    replays : Replays or None
        Of calls that come again; None where there can be none.
    """

    def __init__(
        self,
        request: Request,
        bandwidth: Bandwidth,
        problem: Problem,
        choice: select.Choice,
        centre: Any,
        columns: Columns,
        rows: Any = None,
        shared: bool = False,
        names: tuple[str, ...] = (),
    ) -> None:
        self.request, self.bandwidth, self.problem, self.choice = request, bandwidth, problem, choice
        self._centre, self._columns, self._rows, self._shared, self._names = centre, columns, rows, shared, names
        self._packed: dict[Reduction, Reducer] = {}
        self._lock = new_lock() if shared else threading.Lock()  # one thread's, which has it in a forked child too
        self._successor: Fitted | None = None
        self._second: Fitted | None = None
        self.home, self._whiten = Origin(), None
        alone = shared and not (request.ranks or choice.devices)
        self.replays = Replays() if alone and only_enqueues(choice.info, choice.device) else None
        if shared:
            if not isinstance(centre, np.ndarray):
                self.home = Origin(array_namespace(centre), device_of(centre), on_host=False)
            self._whiten = bandwidth.whitening(centre)
            self._packed_for(problem.reduction)

    @classmethod
    def of(
        cls,
        plan: Plan,
        *,
        report: Callable[[PassReport], None] | None = None,
        advance: Advance | None = None,
        shared: bool = False,
    ) -> Fitted:
        """Run all passes of a plan but the last.

        Parameters
        ----------
        plan : Plan
        report : callable, optional
            Told of each pass.
        advance : callable, optional
            Told of every k samples that were moved.
        shared : bool
            It is to serve many calls: then it is packed now.
        """
        columns, choice = plan.columns, plan.choice
        for problem in plan.problems[:-1]:  # each moves the samples, by half a mean-shift step in float64
            shift = shifted(plan, problem, columns, report, advance)
            columns = Columns(_half_way(columns.points, shift), columns.log_weights, columns.weights)
        # Resubstitution is at the samples as they were.
        rows = plan.columns.points if len(plan.problems) > 1 and not shared else None
        request, centre = plan.request, plan.centre
        if shared:  # the arrays of the request are the user's, and the columns and the bandwidth have what they say
            request = replace(request, weights=None, bandwidth="silverman")
            centre = convert(centre, choice.info.arrays, choice.device)
        return cls(request, plan.bandwidth, plan.problems[-1], choice, centre, columns, rows, shared, plan.data.names)

    @property
    def current(self) -> Fitted:
        """The columns where they are now: with another backend, if this one has failed; of a shared one only."""
        return self if self._successor is None else self._successor.current

    def serve(self, compute: Callable[[Fitted], R]) -> R:
        """Return ``compute(fitted)``; where the backend fails, of the same columns with the next best one.

        Where the rows lie farther than it reaches, another answers this call only: what other calls get does not depend
        on it.

        Raises
        ------
        BackendUnavailable
            The backend that the user named failed, or none is left.
        """
        here = self.current
        while True:
            try:
                return compute(here)
            except OutOfReach as stopped:
                here = here._instead(stopped)
            except BackendFailed as failure:
                set_aside(self.request, failure)
                if failure.spoiled:
                    raise
                with here._lock:
                    if here._successor is None:
                        here._successor = loaded(*here.state("auto"))
                here = here.current

    def _instead(self, stopped: OutOfReach) -> Fitted:
        """The same columns with the next best backend, for calls that this one does not answer; made once."""
        if select.named_backend(self.request.backend) != "auto":
            raise stopped
        with self._lock:
            if self._second is None:
                self._second = loaded(without(self.request, stopped), *self.state("auto")[1:])
            return self._second.current

    @functools.cached_property
    def whole(self) -> bool:
        """Whether no column is an outlier for the backend, and all lie where no data are looked at for rounding."""
        problem, info = self.problem, self.choice.info
        reductions = {problem.reduction, Reduction.MEAN}  # the other is that of gradients
        limits = [limit_of(info, with_fields(problem, reduction=r, same=False)) for r in reductions]
        return problem.extent <= min(*limits, REACH[problem.precision])

    @property
    def has_second(self) -> bool:
        """Whether some calls have gone to another backend."""
        return self.current._second is not None

    @functools.cached_property
    def negative_mass(self) -> NegativeMass:
        """Of the Laplace estimate."""
        return negative_mass(self._columns, self.reduce)

    @property
    def log_constant(self) -> Any:
        """What the log sums of the last pass are raised by."""
        constant = log_constant(self.request.kernel, self.bandwidth)
        renormalised = self.request.negative == "renormalise"
        return constant - math.log1p(self.negative_mass.mass) if renormalised else constant

    def asked(self, query: Any) -> Argument:
        """Recognise the user's query and validate its shape."""
        given = Argument.of("query", query)
        check_query(given, self.problem.n, self.problem.d, self._names)
        return given

    def read(self, query: Argument) -> Query:
        """Bring a query, or some of its rows, to where the columns are."""
        return Query.of(query, self.home, self.request.check_finite)

    def reduce(
        self, queries: Any = None, reduction: Reduction | None = None, *, report: Any = None, **known: Any
    ) -> Partial:
        """Reduce for every row, m ≥ 1.

        Parameters
        ----------
        queries : (m, d) array, optional
            Whitened, where the columns are. None: the samples, as they were before they moved.
        reduction : Reduction, optional
            Another than the last pass's.
        report : callable, optional
        **known
            ``distances`` and ``extent`` of the queries, as for :meth:`PackedColumns.reduce`.
        """
        reduction = reduction or self.problem.reduction
        queries = self._rows if queries is None else queries
        columns, problem = self._packed_for(reduction), self.problem
        if report is not None:
            m = problem.n if queries is None else queries.shape[0]
            problem = replace(problem, reduction=reduction, m=m)
        return _pass(problem, columns, queries, report, **known)

    def placed(self, query: Query, reduction: Reduction) -> tuple[Any, dict[str, Any]]:
        """Return a query, whitened, and what is known of it, for :meth:`reduce` or :meth:`slope`; of a shared one only.

        The reduction that it is for decides how far rows may be.
        """
        assert self._whiten is not None  # as made with shared
        points = self._whiten(query.points)
        distances = radii(points)
        largest = array_namespace(distances).max(distances)
        extent = read_extent(largest, distances, query, self.bandwidth)  # the one number that is waited for
        if min(extent, self.problem.extent) > REACH[self.problem.precision]:
            problem = replace(self.problem, reduction=reduction)
            check_resolution(problem, self.bandwidth, self._columns, points, query.first)
        return points, {"distances": distances, "extent": extent}

    def slope(self, queries: Any = None, **known: Any) -> Any:
        """Return ∇ log p̂ for every row, m ≥ 1, (m, d), per bandwidth; arguments as for :meth:`reduce`."""
        if self.problem.reduction is not Reduction.LAPLACE:
            return self.reduce(queries, Reduction.MEAN, **known).shift
        queries = self._rows if queries is None else queries
        return laplace_slope(self._columns.points if queries is None else queries, self._columns)

    @property
    def points(self) -> Any:
        """The columns (n, d), whitened, where they are."""
        return self._columns.points

    @property
    def log_weights(self) -> Any:
        """Of the columns (n,)."""
        return self._columns.log_weights

    @property
    def centre(self) -> Any:
        """What is subtracted before whitening (d,), in data units, where the columns are."""
        return self._centre

    @property
    def names(self) -> tuple[str, ...]:
        """Of the columns of the data; empty where they have none."""
        return self._names

    @property
    def on_host(self) -> tuple[Any, Any, Any]:
        """The columns' points (n, d), in bandwidths, their log weights (n,), and the centre (d,), in data units."""
        return to_host(self._columns.points), to_host(self._columns.log_weights), to_host(self._centre)

    def derived(
        self, bandwidth: Bandwidth, centre: Any, points: Any, log_weights: Any, names: tuple[str, ...]
    ) -> Fitted:
        """Return other columns, for the same request, shared.

        Parameters
        ----------
        bandwidth : Bandwidth
        centre : (d,) array
            In data units.
        points : (n, d) array
            In bandwidths from the centre, on the host, as all of these.
        log_weights : (n,) array
        names : tuple of str
            Of the columns of the data.
        """
        weighted = bool((log_weights != log_weights[0]).any())
        n, d = points.shape
        requires = self.problem.requires - {"weights"} | ({"weights"} if weighted else set())
        extent = rounded(float(radii(points).max()))
        asked = replace(self.problem, n=n, m=n, d=d, requires=requires, extent=extent)
        return loaded(self.request, bandwidth, asked, "auto", centre, Columns(points, log_weights), names)

    def _packed_for(self, reduction: Reduction) -> Reducer:
        with self._lock:
            if reduction not in self._packed:
                problem = self.problem
                if reduction is not problem.reduction:
                    problem = replace(problem, reduction=reduction)
                where, choice = self.request.ranks or self.choice.devices, self.choice
                packed = pack_on(where, choice.backend, choice.info, problem, self._columns, self._shared)
                self._packed[reduction] = packed
            return self._packed[reduction]

    def __reduce__(self) -> Any:
        return loaded, self.current.state(self.current.choice.name)

    def state(self, backend: str) -> tuple[Any, ...]:
        """What :func:`loaded` makes the same columns from, on the host, for a backend of that name if it is there."""
        columns = Columns(to_host(self._columns.points), to_host(self._columns.log_weights))
        return self.request, self.bandwidth, self.problem, backend, to_host(self._centre), columns, self._names


def _half_way(points: Any, shift: Any) -> Any:
    """Points moved by half of their shift."""
    return points.add(shift, alpha=0.5) if is_torch_array(points) else points + 0.5 * shift  # one kernel for two


def _pass(
    problem: Problem,
    columns: Reducer,
    queries: Any,
    report: Callable[[PassReport], None] | None,
    **known: Any,
) -> Partial:
    """Reduce; with somebody who wants to know, wait for the result and tell the time."""
    start = time.perf_counter()
    result, outliers = columns.reduce(queries, **known)
    if report is not None:
        to_host(detached(result.log_sum[:1]))  # waits for the device
        report(PassReport(problem, time.perf_counter() - start, outliers))
    return result


def shifted(
    plan: Plan,
    problem: Problem,
    columns: Columns,
    report: Callable[[PassReport], None] | None = None,
    advance: Advance | None = None,
) -> Any:
    """Return the shift at the columns themselves (n, d): all at once, or by batches where somebody watches."""
    check_resolution(problem, plan.bandwidth, columns)
    where = plan.request.ranks or plan.choice.devices
    packed = pack_on(where, plan.choice.backend, plan.choice.info, problem, columns)
    if advance is None:
        return _pass(problem, packed, None, report).shift
    batches, size = [], batch_rows(problem.n, problem)
    for start in range(0, problem.n, size):
        stop = min(start + size, problem.n)
        batches.append(_pass(replace(problem, m=stop - start), packed, None, report, some=(start, stop)))
        to_host(detached(batches[-1].log_sum[:1]))  # waits for the device
        advance(stop - start)
    return concatenate(batches).shift


@quiet
def loaded(
    request: Request,
    bandwidth: Bandwidth,
    problem: Problem,
    backend: str,
    centre: Any,
    columns: Columns,
    names: tuple[str, ...],
) -> Fitted:
    """Make fitted columns from what was pickled or saved, with a backend that is here."""
    own = backend if request.backend == "auto" else request.backend
    where: dict[str, Any] = {"device": request.device, "options": request.backend_options}
    where |= {"calls": request.calls, "without": request.without}
    try:
        choice = select.choose([problem], backend=own, **where)
        (problem,) = choice.posed([problem]) if own == "auto" else select.at([problem], choice.device)
    except BackendUnavailable:
        if request.backend != "auto":
            raise
        choice = select.choose([problem], **where)
        (problem,) = choice.posed([problem])
    library, place = choice.info.arrays, choice.device
    there = Columns(convert(columns.points, library, place), convert(columns.log_weights, library, place))
    centre = convert(centre, library, place)
    return Fitted(request, bandwidth, problem, choice, centre, there, shared=True, names=names)
