"""Estimates that come again, by CUDA graphs: where the way through meets :mod:`.graphs`.

Called by :func:`sdkde_core.estimate` and by prepared queries, and by nothing else.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..arrays import Argument, Decisions, decided, ingest, noting
from ..choice.judge import only_enqueues
from ..choice.registry import ask
from ..engine.outliers import limit_of
from ..protocol import BackendInfo, Columns, Problem, Reduction, with_fields
from .graphs import PAIRS, Replays, place_of, small_enough, takes_long
from .resolution import REACH

if TYPE_CHECKING:
    from .fitted import Fitted
    from .plan import Measured, Plan
    from .request import Request

_repeated = Replays()  # of estimates


def estimate(
    key: Any, request: Request, train: Any, query: Any, plan: Callable[[], Plan], finish: Callable[[Plan], Any]
) -> Any:
    """Return ``finish(plan())``, by a replay where that came often; ``key`` is that of :func:`.graphs.key_of`."""
    from .plan import located

    arrays = train, query, request.weights
    result = _repeated.play(key, *arrays)
    if result is not None:
        return result
    with noting(Decisions()) as noted:
        ready = plan()
        result = finish(ready)
    if not ready.looked and only_enqueues(ready.choice.info, ready.choice.device):

        def first(*buffers: Any) -> Measured:
            return located(ingest(*buffers, check_finite=request.check_finite), ready.bandwidth)[0]

        def second(measured: Measured) -> Any:
            return finish(_of_other_points(ready, measured))

        begun, then = noted.made[: ready.located], noted.made[ready.located :]
        long = takes_long(sum(p.n * p.m for p in ready.problems), train.shape[1])
        _repeated.record(key, arrays, begun, then, first, second, _alike(ready), long, len(ready.shares))
    return result


def _alike(plan: Plan) -> Hashable:
    """What this plan and another have in common if what they run differs in nothing but the points.

    That is all but the extent, of which a backend may tell how much it makes of it.
    """
    return plan.choice.name, plan.choice.device, plan.shares, _but_for_the_extent(plan.choice.info, plan.problems)


def _of_other_points(plan: Plan, measured: Measured) -> Plan:
    """Return the plan of other points, of which the same was decided: looked at in the same order."""
    from .plan import share_beyond

    for asked in plan.shares:
        share_beyond(plan.request, measured, *asked)
    return replace(plan, columns=Columns(measured.train, measured.log_weights), query=measured.query)


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


def answer(fitted: Fitted, query: Argument, what: str) -> Any:
    """Return what is wanted of all rows of a query, by a replay where it was asked for often."""
    key = None if fitted.replays is None else _key(fitted, query, what)
    if key is None or fitted.replays is None:
        return fitted.answer(fitted.read(query), what)
    result = fitted.replays.play(key, query.array)
    if result is not None:
        return result
    rows, noted, reduction = fitted.read(query), Decisions(), fitted.reduction_for(what)
    with noting(noted):
        points, known = fitted.placed(rows, reduction)
        placed = decided()
        result = fitted.restored(fitted.at(points, known, what), rows)

    def first(x: Any) -> tuple[Any, Any]:
        points, other = fitted.placed(fitted.read(query._replace(array=x)), reduction)
        return points, other["distances"]

    def second(placed: tuple[Any, Any]) -> Any:
        points, distances = placed
        return fitted.restored(fitted.at(points, known | {"distances": distances}, what), rows)

    # Columns are packed for their own extent: of queries within it the extent makes no difference.
    alike = "within" if known["extent"] <= fitted.problem.extent and _whole(fitted) else None
    long = takes_long(fitted.problem.n * query.shape[0], fitted.problem.d)
    fitted.replays.record(key, (query.array,), noted.made[:placed], noted.made[placed:], first, second, alike, long)
    return result


def _whole(fitted: Fitted) -> bool:
    """Whether no column is an outlier for the backend, and all lie where no data are looked at for rounding."""
    problem, info = fitted.problem, fitted.choice.info
    reductions = {problem.reduction, Reduction.MEAN}  # gradients sum MEAN
    limits = [limit_of(info, with_fields(problem, reduction=r, same=False)) for r in reductions]
    return problem.extent <= min(*limits, REACH[problem.precision])


def _key(fitted: Fitted, query: Argument, what: str) -> Any:
    """What calls that can be replayed for each other have in common; None where it cannot be replayed."""
    x = query.array
    looks = fitted.request.method == "laplace" and what == "score"  # which is the core's own
    if looks or query.origin != fitted.home:
        return None
    if not x.shape[0] or fitted.problem.n * x.shape[0] > PAIRS:
        return None
    place = place_of(x)
    if place is None or not small_enough(math.prod(x.shape), place[1]):
        return None
    return what, place
