"""Running a plan: all its passes, or all but the last, which leaves fitted columns for any queries."""

from __future__ import annotations

import functools
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
from array_api_compat import device

from .. import arrays
from ..arrays import Argument, Data, Origin, check_query, convert, detached, look, quiet, rounded, to_host
from ..bandwidth.matrix import Bandwidth
from ..choice import registry, select
from ..engine.failures import BackendFailed, OutOfReach, call
from ..engine.forks import cached_property, new_lock
from ..engine.groups import Group, GroupedColumns
from ..engine.launches import Lists
from ..engine.merge import concatenate, empty, merge, take_columns, take_rows, undo
from ..engine.outliers import limit_of, radii
from ..engine.threads import telling
from ..messages import warn_once
from ..protocol import BackendUnavailable, Columns, Partial, Problem, Reduction, with_fields
from ..spreading.devices import Reducer, pack_on
from .batches import Advance, batch_rows
from .density import density, log_constant
from .laplace import NegativeMass, laplace_slope, negative_mass
from .moving import groups_of
from .plan import Plan, checked_extent
from .request import Request
from .resolution import REACH, check_resolution

R = TypeVar("R")
Groups = tuple[Group, ...]
Names = tuple[str, ...]


class Components(NamedTuple):
    """A density's kernels: their places in bandwidths from the centre, log weights and widths; and the centre (d,)."""

    points: Any  # (n, d)
    log_weights: Any  # (n,)
    scales: Any  # (n,) bandwidths
    centre: Any  # (d,) data units


# A pass that was run: the problem, seconds on the clock, and how many outliers were summed apart, by a slower formula.
Ran = tuple[Problem, float, int]
Report = Callable[[Ran], None] | None  # called after each pass


def run(plan: Plan, report: Report = None) -> Partial:
    """Run all passes of a plan, and return the result of the last."""
    last = plan.last
    if not last.m:
        return empty(last, plan.columns.points)
    check_resolution(last, plan.bandwidth, plan.columns, plan.query)
    plan = _in_order(plan)
    queries, order = None if last.same else plan.columns.points, plan.order  # before they moved
    last, groups = _groups(plan, report)
    if plan.query is not None:  # while the device works
        order = None if order is None else _order(plan, last, plan.query)
        queries = plan.query if order is None else take_rows(plan.query, order)
    return undo(_pass(plan, last, groups, queries, report, None), order)


def slope(plan: Plan) -> Any:
    """Run all passes of a plan for the gradient, and return it, per bandwidth."""
    if plan.last.reduction is not Reduction.LAPLACE:
        return run(plan).shift
    check_resolution(plan.last, plan.bandwidth, plan.columns, plan.query)
    return laplace_slope(plan.columns.points if plan.query is None else plan.query, plan.columns)


def _groups(plan: Plan, report: Report = None, advance: Advance | None = None) -> tuple[Problem, Groups]:
    """Run the pass over the samples themselves, if there is one; return the last pass and its groups."""
    sums = _scores(plan, report, advance) if plan.request.answering else None
    groups, last = groups_of(plan.columns, sums, plan.request, plan.order), plan.last
    if plan.request.adaptive:  # samples with wide kernels move farther than the plan's extent allows for
        farthest = max(look(float, radii(group.columns.points).max()) for group in groups)
        last = replace(last, extent=max(last.extent, rounded(farthest)))
    return last, groups


def scores(plan: Plan, advance: Advance | None) -> Partial:
    """The sums of the pass that moves the samples, in the samples' order and the score's bandwidth."""
    plan = _in_order(plan)
    return undo(_scores(plan, None, advance), plan.order)


def _scores(plan: Plan, report: Report, advance: Advance | None) -> Partial:
    problem, columns = plan.problems[0], plan.columns
    check_resolution(problem, plan.bandwidth, columns)
    c = plan.request.score_bandwidth
    columns = columns if c is None else replace(columns, points=columns.points / c)
    return _pass(plan, problem, (Group(columns),), None, report, advance)


def _in_order(plan: Plan) -> Plan:
    """A plan with its samples in the backend's order, if it has one.

    Not for ranks, which would all have to find the same order; nor beyond REACH, where an error names points by number.
    """
    columns, first = plan.columns, plan.problems[0]
    able = "order" in plan.choice.info.features and first.extent <= REACH[first.precision] and not plan.request.ranks
    order = _order(plan, first, columns.points, columns) if able else None
    return plan if order is None else plan._replace(columns=take_columns(columns, order, True), order=order)


def _order(plan: Plan, problem: Problem, points: Any, columns: Columns | None = None) -> Any:
    """The backend's order of the samples or, without ``columns``, of other rows; None: as they are."""
    choice, backend, parts = plan.choice, cast(Any, plan.choice.backend), max(1, len(plan.choice.devices))
    extent = min(problem.extent, limit_of(choice.info, problem))  # points beyond are summed apart
    problem = with_fields(problem, m=-(-problem.m // parts), extent=extent)
    order = call(choice.info, problem, backend.order, points, columns, inputs=[points])
    if order is None or parts == 1:
        return order
    # Devices get blocks of neighbours in turn, as the blocks of a dense region take longest.
    xp = arrays.array_namespace(order)
    return order[xp.argsort(xp.arange(order.shape[0], device=device(order)) // 4096 % parts, stable=True)]


def _pass(plan: Plan, problem: Problem, groups: Groups, rows: Any, report: Report, advance: Advance | None) -> Partial:
    """Pack the columns and reduce all rows; the samples themselves by batches where somebody watches."""
    packed: Any = _pack(plan.request, plan.choice, problem, groups)
    if advance is None:
        if report is None:
            return packed.reduce(rows)[0]
        several = isinstance(packed, GroupedColumns)
        parts, done = list[Partial](), packed.each(rows) if several else map(packed.reduce, (rows,))
        start, far, guards = time.perf_counter(), 0, several and plan.request.guard > 0.0
        for k, (sums, outliers) in enumerate(done):
            parts.append(sums)
            far = max(far, outliers)
            if k >= len(groups) - 1 - guards:  # the guard is a pass of its own
                to_host(detached(sums.log_sum[:1]))  # waits for the device
                one = groups[k].problem(problem) if k > len(groups) - 1 - guards else problem
                report((one, time.perf_counter() - start, far))
                start, far = time.perf_counter(), 0
        return merge(parts)
    if "told" in plan.choice.info.features:
        with telling(problem.n, advance):
            return packed.reduce(rows)[0]
    batches, size = list[Partial](), batch_rows(problem.n, problem, plan.choice.info)
    for first in range(0, problem.n, size):
        stop = min(first + size, problem.n)
        batches.append(packed.reduce(None, some=(first, stop))[0])
        to_host(detached(batches[-1].log_sum[:1]))  # waits for the device
        advance(stop - first)
    return concatenate(batches)


def _pack(request: Request, choice: select.Choice, problem: Problem, groups: Groups, shared: bool = False) -> Reducer:
    """Make groups ready for rows, on several devices or ranks where the request or the choice names them."""
    where, how = request.ranks or choice.devices, (choice.backend, choice.info)
    if len(groups) == 1 and groups[0].scale == 1.0:
        return pack_on(where, *how, problem, groups[0].columns, shared)
    return GroupedColumns(groups, functools.partial(pack_on, where, *how, shared=shared), problem)


class Fitted:
    """The columns of a plan's last pass, packed by its backend; immutable, pickles, safe to use from many threads.

    ``problem`` is the last pass as planned; its extent bounds the columns. ``centre`` (d,) is what whitening subtracts.
    It and the columns are on the device ``home``, where queries are brought.
    """

    parts: tuple[Any, ...] = ()  # set by stacked.Stacked, a list of densities
    coordinates = None  # set by mapped.Mapped, a density in other coordinates

    def __init__(
        self, request: Request, bandwidth: Bandwidth, problem: Problem, choice: select.Choice, centre: Any,
        groups: Groups, names: Names = (),
    ) -> None:  # fmt: skip
        self.request, self.bandwidth, self.problem, self.choice = request, bandwidth, problem, choice
        self.centre, self.groups, self.names = centre, groups, names
        self._packed: dict[Reduction, Reducer] = {}
        self._lock, self.lists = new_lock(), Lists(False)
        self._successor: Fitted | None = None
        self.second: Fitted | None = None  # by a backend that reaches farther, for far queries
        self.home = Origin.of(centre)
        self._whiten = bandwidth.whitening(centre)
        self._packed_for(problem.reduction)

    @classmethod
    def of(cls, plan: Plan, advance: Advance | None = None) -> Fitted:
        """Run all passes of a plan but the last, and pack the columns."""
        (last, groups), choice = _groups(plan, advance=advance), plan.choice
        centre = convert(plan.centre, choice.info.arrays, choice.device)
        return cls(plan.request.settled, plan.bandwidth, last, choice, centre, groups, plan.data.names)

    @property
    def current(self) -> Fitted:
        """This, or the same columns with another backend if this one's has failed."""
        return self if self._successor is None else self._successor.current

    def serve(self, compute: Callable[[Fitted], R]) -> R:
        """Return ``compute(fitted)``; where the backend fails, ``fitted`` has the same columns with the next best one.

        Where rows lie farther than the backend reaches, another one answers this call. BackendUnavailable where the
        user named the backend, or none is left.
        """
        here = self.current
        while True:
            try:
                return compute(here)
            except OutOfReach as stopped:
                if select.named_backend(here.request.backend) != "auto":
                    raise
                with here._lock:
                    if here.second is None:
                        given_up = here.request.without | {(stopped.backend, stopped.device): str(stopped)}
                        here.second = loaded(replace(here.request, without=given_up), *here.state("auto")[1:])
                here = here.second.current
            except BackendFailed as failure:
                set_aside(self.request, failure)
                if failure.spoiled:
                    raise
                with here._lock:
                    if here._successor is None:
                        here._successor = loaded(*here.state("auto"))
                here = here.current

    @cached_property
    def negative_mass(self) -> NegativeMass:
        return negative_mass(self.columns, self.reduce)

    @property
    def columns(self) -> Columns:
        """The first group's columns: all samples, unless the estimate is adaptive."""
        return self.groups[0].columns

    @property
    def log_constant(self) -> Any:
        """The constant that turns log sums of the last pass into log densities."""
        constant = log_constant(self.request.kernel, self.bandwidth)
        return constant - math.log1p(self.negative_mass.mass) if self.request.negative == "renormalise" else constant

    def asked(self, query: Any) -> Argument:
        """Recognise the user's query and validate its shape."""
        given = Argument.of("query", query)
        check_query(given, self.problem.n, self.problem.d, self.names)
        return given

    def read(self, query: Argument) -> Data:
        """Bring a query, or some of its rows, to the columns' device; its extent will show NaN and inf."""
        points = query.at(self.home)
        points = points[:, None] if points.ndim == 1 else points
        known: dict[str, Any] = {"unchecked": self.request.check_finite, "names": self.names, "first": query.first}
        return Data(points, None, None, query.dtype, query.origin, name="query", **known)

    def reduce(self, queries: Any, reduction: Reduction | None = None, **known: Any) -> Partial:
        """Reduce whitened queries (m, d), m ≥ 1; ``known``: as for :meth:`.PackedColumns.reduce`."""
        return self._packed_for(reduction or self.problem.reduction).reduce(queries, **known)[0]

    def widths(self, query: Argument) -> Any:
        """The mean of 1 / c² (m,) of the kernels at a query, which are c bandwidths wide, on the host."""
        packed: Any = self._packed_for(Reduction.LOG_SUM)
        logs = [to_host(sums.log_sum) for sums, _ in packed.each(self._whiten(self.read(query).train))]
        counted = np.exp(np.stack(logs) - np.logaddexp.reduce(logs, axis=0))
        return sum(share / g.scale**2 for share, g in zip(counted, self.groups))

    def reduction_for(self, what: str) -> Reduction:
        return Reduction.MEAN if what == "score" else self.problem.reduction

    def answer(self, query: Data, what: str) -> Any:
        """Return the ``"density"`` (m,), its ``"log"``, or the ``"score"`` (m, d); ``"both"``: log and score, float64.

        ``"slope"`` is the score of a Laplace estimate, also where the estimate is negative.
        """
        dtype = max(query.dtype, self.problem.dtype)  # "float64" > "float32"
        if not query.train.shape[0]:
            return query.origin.restore(np.empty((0, self.problem.d) if what in ("score", "slope") else 0), dtype)
        points = self._whiten(query.train)
        distances = radii(points)
        extent = checked_extent(distances, query, self.bandwidth)
        if min(extent, self.problem.extent) > REACH[self.problem.precision]:
            problem = replace(self.problem, reduction=self.reduction_for(what))
            check_resolution(problem, self.bandwidth, self.columns, points, query.first)
        known: dict[str, Any] = {"distances": distances, "extent": extent}
        if what not in ("score", "slope", "both"):
            clip = self.request.negative != "keep"
            result = density(self.reduce(points, **known), self.log_constant, what == "log", clip)
        elif self.problem.reduction is Reduction.LAPLACE:
            result = self.bandwidth.pull_back(laplace_slope(points, self.columns, what == "slope"))
        else:
            sums = self.reduce(points, Reduction.MEAN, **known)
            result = self.bandwidth.pull_back(sums.shift)
            if what == "both":  # on the columns' device
                return sums.log_sum + self.log_constant, result
        return query.origin.restore(result, dtype)

    def curved(self, query: Data, vectors: Any) -> Any:
        """Return ∇²log p̂ at a query times a vector for each row, tensors (m, d), by a backend that differentiates."""
        points, torch = self._whiten(query.train), sys.modules["torch"]
        distances = radii(points)
        extent = checked_extent(distances, query, self.bandwidth)
        with torch.enable_grad():
            rows = convert(points, "torch", self._twin.choice.device).requires_grad_()
            score = self.bandwidth.pull_back(self._twin.reduce(rows, Reduction.MEAN, extent=extent).shift)
            (found,) = torch.autograd.grad(score, rows, vectors.to(score))
        return query.origin.restore(self.bandwidth.pull_back(found), max(query.dtype, self.problem.dtype))

    @cached_property
    def _twin(self) -> Fitted:
        """The same columns with a backend that differentiates the score."""
        request, bandwidth, problem, _, *rest = self.state("auto")
        problem = replace(problem, reduction=Reduction.MEAN, requires=problem.requires | {"grad"})
        return loaded(request, bandwidth, problem, "auto", *rest)

    @property
    def components(self) -> Components:
        groups, xp = self.groups, arrays.array_namespace(self.columns.points)
        each = [(c.points, c.log_weights + share, xp.full_like(c.log_weights, scale)) for c, scale, share in groups]
        points, logs, scales = (x[0] if len(x) == 1 else xp.concat(x, axis=0) for x in zip(*each))
        return Components(points, logs, scales, self.centre)

    @property
    def on_host(self) -> Components:
        return Components(*map(to_host, self.components))

    def derived(self, bandwidth: Bandwidth, centre: Any, points: Any, log_weights: Any, dims: Sequence[int]) -> Fitted:
        """Return the density in dimensions ``dims`` of these components on the host; groups keep their sizes."""
        groups, start, names = list[Group](), 0, tuple(self.names[j] for j in dims) if self.names else ()
        for group in self.groups:
            here, start = slice(start, start + group.n), start + group.n
            logs, total = log_weights[here], 0.0
            if len(self.groups) > 1:
                top = float(logs.max())
                if top == -math.inf:  # none of the group has weight there
                    continue
                rest = math.log(np.exp(logs - top).sum())
                logs, total = logs - top - rest, top + rest  # in this order: where top is large, rest keeps its digits
            groups.append(Group(Columns(np.ascontiguousarray(points[here]), logs), group.scale, total))
        n, d = self.problem.n, points.shape[1]
        weighted = any(bool((g.columns.log_weights != g.columns.log_weights[0]).any()) for g in groups)
        requires = self.problem.requires - {"weights"} | ({"weights"} if weighted else set())
        asked = replace(self.problem, n=n, m=n, d=d, requires=requires, extent=rounded(float(radii(points).max())))
        return loaded(self.request, bandwidth, asked, "auto", centre, tuple(groups), names)

    @cached_property
    def scale(self) -> Any:
        return self.bandwidth.whitener(self.columns.points)

    def whole(self, reduction: Reduction) -> list[Any]:
        """Each group's columns as their backend has them for that reduction, see :attr:`.PackedColumns.whole`."""
        packed: Any = self._packed_for(reduction)  # on one device
        return [one.whole for one in getattr(packed, "packed", (packed,))]

    def _packed_for(self, reduction: Reduction) -> Reducer:
        with self._lock:
            if reduction not in self._packed:
                problem = with_fields(self.problem, reduction=reduction)
                self._packed[reduction] = _pack(self.request, self.choice, problem, self.groups, shared=True)
            return self._packed[reduction]

    def __reduce__(self) -> Any:
        return loaded, self.current.state(self.current.choice.name)

    def state(self, backend: str) -> tuple[Any, ...]:
        """The arguments of :func:`loaded` for the same columns, on the host."""
        groups = tuple(group.at(to_host) for group in self.groups)
        return self.request, self.bandwidth, self.problem, backend, to_host(self.centre), groups, self.names


@quiet
def loaded(
    request: Request, bandwidth: Bandwidth, problem: Problem, backend: str, centre: Any, groups: Groups, names: Names
) -> Fitted:
    """Make fitted columns from pickled or saved state: with that backend or, under "auto", the best one here."""
    own = backend if request.backend == "auto" else request.backend
    where: dict[str, Any] = {"device": request.device, "options": request.backend_options}
    where |= {"calls": request.calls, "without": request.without}
    try:
        choice = select.choose([problem], backend=own, **where)
    except BackendUnavailable:
        if request.backend != "auto":
            raise
        choice = select.choose([problem], **where)
    (problem,) = select.at([problem], choice.device)
    library, place = choice.info.arrays, choice.device
    there = tuple(group.at(lambda x: convert(x, library, place)) for group in groups)
    return Fitted(request, bandwidth, problem, choice, convert(centre, library, place), there, names)


def with_fallback(request: Request, compute: Callable[[Request], R]) -> R:
    """Return ``compute(request)``, which plans and runs; planned anew where the backend that was chosen fails."""
    while True:
        try:
            return compute(request)
        except BackendFailed as failure:
            set_aside(request, failure)


def set_aside(request: Request, failure: BackendFailed) -> None:
    """Let ``"auto"`` take the backend that failed no more in this process, and say so; raise where it was named."""
    # Other ranks have not failed, and do not plan anew.
    if select.named_backend(request.backend) != "auto" or request.ranks is not None:
        raise failure
    registry.aside[failure.backend, failure.device] = f"set aside: {failure}"
    warn_once(f"{failure}. Until this process ends, backend='auto' does without it.")
