"""What a backend must do, check by check; needs no test framework.

A check is a function ``check(target, parameter)`` that returns, raises :class:`AssertionError`, or raises
:class:`NotDeclared` where the backend declares that it does not take the problem. :data:`CHECKS` has them all with the
parameters that suit a backend's declarations; names and parameters are stable within a protocol major.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np

from sdkde_core.arrays import convert, detached, device_name, to_host
from sdkde_core.engine.columns import reduce_pass
from sdkde_core.engine.merge import each, merge
from sdkde_core.engine.outliers import within_limit
from sdkde_core.protocol import (
    FEATURES,
    PRECISIONS,
    PROTOCOL,
    TOLERANCES,
    Backend,
    BackendInfo,
    Columns,
    Partial,
    Problem,
    Reduction,
    Support,
)

from . import derivatives, problems
from .problems import Case, Truth, errors

__all__ = ["CHECKS", "PROFILES", "Check", "NotDeclared", "Profile", "Target", "cases", "failures"]


class NotDeclared(Exception):
    """The backend declares that it does not take this problem: nothing to check."""


class Profile(NamedTuple):
    """How much is checked: dimensions and extents (in bandwidths)."""

    dimensions: tuple[int, ...]
    extents: tuple[float, ...]


PROFILES: Mapping[str, Profile] = {
    "quick": Profile((1, 3, 17, 784), (10.0, 100.0, 1e4)),
    "full": Profile((1, 2, 3, 5, 7, 16, 17, 33, 64, 128, 384, 784), (10.0, 30.0, 100.0, 1e3, 1e4)),
}

#: Features that a check of this suite proves; a backend that declares another cannot be believed.
PROVEN = frozenset({"weights", "exclude_self", "values", "multi_scale", "grad"})

#: What an error of a derivative may be relative to the largest one, in tolerances of a log sum: like that it is a sum
#: of terms with the errors of their φ_ij, if of several with different signs.
OF_DERIVATIVES = 10.0


@dataclass(frozen=True)
class Target:
    """A backend on a device, under test."""

    info: BackendInfo
    backend: Backend
    device: str

    def problem(self, case: Case, reduction: Reduction, precision: str, **options: Any) -> Problem:
        """Describe a reduction of a case on this device; :class:`NotDeclared` where the backend declines it.

        What lies beyond the extent at which the backend's formula holds does not count: the core splits that off.
        """
        problem = case.problem(reduction, precision, device=self.device, **options)
        lacking = problem.requires - self.info.features
        if lacking:
            raise NotDeclared(f"lacks {', '.join(sorted(lacking))}")
        support = self.info.supports(within_limit(self.info, problem, 1.0))
        if not support.ok:
            raise NotDeclared(support.reason)
        return problem

    def whole_problem(self, case: Case, reduction: Reduction, precision: str, **options: Any) -> Problem:
        """As :meth:`problem`, for a check that asks the backend itself: nothing is split off."""
        problem = self.problem(case, reduction, precision, **options)
        support = self.info.supports(problem)
        if not support.ok:
            raise NotDeclared(support.reason)
        return problem

    def give(self, x: Any) -> Any:
        """Return an array as the backend takes it."""
        return None if x is None else convert(x, self.info.arrays, self.device)

    def answer(self, problem: Problem, case: Case, values: Any = None) -> Partial:
        """The backend's answer by way of the core: columns without weight dropped, far points split off."""
        columns = Columns(self.give(case.points), self.give(case.log_weights), self.give(values))
        queries = None if problem.same else self.give(case.queries)
        return each(reduce_pass(self.backend, self.info, problem, columns, queries), to_host)

    def prepare(self, problem: Problem, case: Case) -> Any:
        """The backend's state for a case whose weights are all positive."""
        return self.backend.prepare(problem, Columns(self.give(case.points), self.give(case.log_weights)))

    def reduce(self, problem: Problem, queries: Any, state: Any, own_offset: int = 0) -> Partial:
        """The backend's own answer, on the host."""
        return each(self.backend.reduce(problem, self.give(queries), state, own_offset), to_host)


@functools.lru_cache(maxsize=64)
def make(kind: str, n: int, m: int, d: int, extent: float) -> Case:
    """A case; the arrays are read-only, since checks share them."""
    case = problems.make(kind, n, m, d, extent)
    for array in (case.points, case.queries, case.log_weights):
        array.flags.writeable = False
    return case


@functools.lru_cache(maxsize=128)
def _truth(kind: str, n: int, m: int, d: int, extent: float, same: bool, exclude_self: bool) -> Truth:
    return problems.truth(make(kind, n, m, d, extent), same=same, exclude_self=exclude_self)


def within(problem: Problem, got: Partial, want: Truth) -> None:
    """Assert that every row is within the precision's tolerance."""
    assert got.log_sum.shape[0] == problem.m, f"{got.log_sum.shape[0]} rows for {problem.m} queries"
    error = errors(problem, got, want)
    if error.size and not error.max() <= 1.0:
        row = int(np.argmax(error))
        count = int((~(error <= 1.0)).sum())
        raise AssertionError(
            f"{problem.reduction} at {problem.precision}: {count} of {error.size} rows beyond the tolerance, worst "
            f"row {row}, by {error[row]:.3g} times (log sum {want.log_sum[row]:.6g})"
        )


# --- parameters -----------------------------------------------------------------------------------------------------

#: Sizes that divide nothing; fewer in many dimensions, where the reference is slow.
SIZES, SMALL = (211, 67), (103, 41)


def _size(kind: str, d: int) -> tuple[int, int]:
    if kind == "zero_tile":
        return (2611, 19) if d < 64 else (1301, 5)
    return SIZES if d < 200 else SMALL


def _tolerance_parameters(info: BackendInfo, profile: Profile) -> Iterator[str]:
    kinds = ["mixture", "tails", "clusters", "outlier", "duplicates"]
    if "weights" in info.features:
        kinds += ["weights", "zero_tile", "muted_outlier"]
    for precision in info.precisions:
        for d in profile.dimensions:
            for kind in kinds:
                spread = profile.extents if kind in ("mixture", "tails") else (1e5,) if kind == "clusters" else (10.0,)
                for extent in spread:
                    for reduction in Reduction:
                        yield f"{precision}-{reduction}-{kind}-d{d}-e{extent:g}"


def _levels(info: BackendInfo, profile: Profile) -> Iterator[str]:
    for precision in info.precisions:
        for reduction in Reduction:
            yield f"{precision}-{reduction}"


def _featured(feature: str) -> Callable[[BackendInfo, Profile], Iterator[str]]:
    def parameters(info: BackendInfo, profile: Profile) -> Iterator[str]:
        if feature in info.features:
            for parameter in _levels(info, profile):
                if feature != "values" or not parameter.endswith(Reduction.LAPLACE):
                    yield parameter

    return parameters


def _sized(info: BackendInfo, profile: Profile) -> Iterator[str]:
    for n, m in ((1, 1), (1, 5), (2, 1), (3, 129), (129, 1), (257, 255), (1025, 33)):
        for precision in info.precisions[-1:]:
            for reduction in Reduction:
                yield f"{precision}-{reduction}-n{n}-m{m}"


def _deterministic(info: BackendInfo, profile: Profile) -> Iterator[str]:
    if info.deterministic:
        yield from _levels(info, profile)


def _once(info: BackendInfo, profile: Profile) -> Iterator[str]:
    yield "backend"


def _parse(parameter: str) -> tuple[str, Reduction]:
    precision, reduction, *_ = parameter.split("-")
    return precision, Reduction(reduction)


# --- checks ---------------------------------------------------------------------------------------------------------


def declaration(target: Target, parameter: str) -> None:
    """The BackendInfo is one that the core and this suite can believe."""
    info = target.info
    assert info.precisions, "declares no precision"
    assert set(info.precisions) <= set(PRECISIONS), f"precisions {info.precisions}; there are {PRECISIONS}"
    assert info.devices, "declares no device"
    assert info.protocol[0] == PROTOCOL[0], f"protocol {info.protocol}, this suite is for {PROTOCOL[0]}.x"
    assert type(info.features) is frozenset, f"features is a {type(info.features).__name__}; pass a frozenset"
    unknown = sorted(info.features - set(FEATURES))
    assert not unknown, f"features {unknown} are none of the protocol's {sorted(FEATURES)}"
    reserved = sorted(info.features - PROVEN)
    assert not reserved, f"features {reserved} are reserved: nothing asks for them yet, and no check proves them"
    assert "grad" not in info.features or info.arrays == "torch", f"grad is a feature of tensors, not of {info.arrays}"
    assert info.startup_seconds >= 0


def answers_something(target: Target, parameter: str) -> None:
    """At every declared precision some reduction is supported: a run that executes nothing proves nothing."""
    support = target.backend.probe(target.device)
    assert isinstance(support, Support), f"probe returned {support!r}, not a Support"
    assert support.ok, f"cannot run on {target.device} here: {support.reason}"
    case = make("mixture", 50, 20, 3, 5.0)
    for precision in target.info.precisions:
        problem = case.problem(Reduction.LOG_SUM, precision, device=target.device)
        support = target.info.supports(problem)
        assert support.ok, f"declares precision {precision} but declines {problem}: {support.reason}"


def reasons(target: Target, parameter: str) -> None:
    """``supports`` answers for any problem, with a reason, and the formula's limit is a positive number."""
    for n, d, extent in ((1, 1, 0.0), (10**9, 1024, 10.0), (1000, 3, 1e30)):
        for reduction in Reduction:
            for precision in target.info.precisions:
                problem = Problem(reduction, n, n, d, precision=precision, device=target.device, extent=extent)
                support = target.info.supports(problem)
                assert isinstance(support, Support)
                assert support.reason, f"no reason for {problem}"
                assert target.info.extent_limit(problem) > 0


def tolerance(target: Target, parameter: str) -> None:
    """Every row is within the precision's tolerance, with separate queries and with the points themselves."""
    precision, reduction = _parse(parameter)
    kind, d, extent = parameter.split("-", 2)[2].split("-")
    n, m = _size(kind, int(d[1:]))
    arguments = (kind, n, m, int(d[1:]), float(extent[1:]))
    case = make(*arguments)
    for same in (False, True):
        if same and kind == "zero_tile":
            continue  # its 2611 rows would cost the reference minutes and show nothing new
        problem = target.problem(case, reduction, precision, same=same)
        within(problem, target.answer(problem, case), _truth(*arguments, same, False))


def sizes(target: Target, parameter: str) -> None:
    """Sizes that divide nothing, down to one point and one query."""
    precision, reduction = _parse(parameter)
    n, m = (int(p[1:]) for p in parameter.split("-")[2:])
    arguments = ("mixture", n, m, 3, 10.0)
    case = make(*arguments)
    for same in (False, True):
        problem = target.problem(case, reduction, precision, same=same)
        within(problem, target.answer(problem, case), _truth(*arguments, same, False))


def no_rows(target: Target, parameter: str) -> None:
    """An empty query gives empty results of the right shapes."""
    precision, reduction = _parse(parameter)
    case = make("mixture", 31, 0, 3, 10.0)
    problem = target.problem(case, reduction, precision)
    _has_shapes(problem, target.answer(problem, case))


def result_format(target: Target, parameter: str) -> None:
    """Results are float64, of the library and on the device of the points, with the fields of the reduction."""
    precision, reduction = _parse(parameter)
    case = make("mixture", 31, 7, 3, 10.0)
    problem = target.whole_problem(case, reduction, precision)
    points, log_weights, queries = (target.give(x) for x in (case.points, case.log_weights, case.queries))
    partial = target.backend.reduce(problem, queries, target.backend.prepare(problem, Columns(points, log_weights)))
    for field in fields(Partial):
        x = getattr(partial, field.name)
        if x is not None:
            assert type(x) is type(points), f"{field.name} is a {type(x).__name__}, not {type(points).__name__}"
            assert "float64" in str(x.dtype), f"{field.name} is {x.dtype}, not float64"
            assert device_name(x) == device_name(points), f"{field.name} is on {device_name(x)}"
    _has_shapes(problem, each(partial, to_host))


def _has_shapes(problem: Problem, got: Partial) -> None:
    m, d = problem.m, problem.d
    expected: dict[str, tuple[int, ...] | None] = dict.fromkeys(("shift", "sign", "log_magnitude", "values"))
    expected["log_sum"] = (m,)
    if problem.reduction is Reduction.MEAN:
        expected["shift"] = (m, d)
    if problem.reduction is Reduction.LAPLACE:
        expected["sign"] = expected["log_magnitude"] = (m,)
    for name, shape in expected.items():
        x = getattr(got, name)
        assert (x is None) == (shape is None), f"{name} is {'missing' if x is None else 'there but not asked for'}"
        assert x is None or x.shape == shape, f"{name} has shape {x.shape}, not {shape}"


def state_reuse(target: Target, parameter: str) -> None:
    """A prepared state serves many calls, each as if it were the first."""
    precision, reduction = _parse(parameter)
    arguments = ("mixture", *SIZES, 3, 10.0)
    case = make(*arguments)
    problem = target.whole_problem(case, reduction, precision)
    state = target.prepare(problem, case)
    truth = _truth(*arguments, False, False)
    for start, stop in ((0, 67), (0, 67), (60, 61), (5, 66), (0, 67)):
        part = replace(problem, m=stop - start)
        within(part, target.reduce(part, case.queries[start:stop], state), _rows(truth, start, stop))


def query_chunks(target: Target, parameter: str) -> None:
    """A row's answer does not depend on the rows beside it, however far those are."""
    precision, reduction = _parse(parameter)
    arguments = ("tails", *SIZES, 3, 100.0)
    case = make(*arguments)
    problem = target.whole_problem(case, reduction, precision)
    truth = _truth(*arguments, False, False)
    state = target.prepare(problem, case)
    for width in (67, 1, 13):
        for start in range(0, 67, width):
            stop = min(start + width, 67)
            part = replace(problem, m=stop - start)
            within(part, target.reduce(part, case.queries[start:stop], state), _rows(truth, start, stop))


def _rows(truth: Truth, start: int, stop: int) -> Truth:
    return Truth(*(x if x is None else x[start:stop] for x in truth))  # type: ignore[arg-type]


def column_chunks(target: Target, parameter: str) -> None:
    """Reductions over chunks of columns, merged by the core, equal one over all."""
    precision, reduction = _parse(parameter)
    kind = "weights" if "weights" in target.info.features else "mixture"
    arguments = (kind, *SIZES, 3, 10.0)
    case = make(*arguments)
    problem = target.whole_problem(case, reduction, precision)
    kept = np.flatnonzero(np.isfinite(case.log_weights))
    parts = []
    for columns in np.array_split(kept, [1, 60, 100]):
        part = replace(problem, n=len(columns))
        chunk = replace(case, points=case.points[columns], log_weights=case.log_weights[columns])
        parts.append(target.reduce(part, case.queries, target.prepare(part, chunk)))
    within(problem, merge(parts), _truth(*arguments, False, False))


def repeat(target: Target, parameter: str) -> None:
    """A backend that declares determinism gives the same bits again."""
    precision, reduction = _parse(parameter)
    case = make("mixture", 1025, 515, 5, 10.0)
    problem = target.problem(case, reduction, precision)
    first, again = target.answer(problem, case), target.answer(problem, case)
    for field in fields(Partial):
        a, b = getattr(first, field.name), getattr(again, field.name)
        assert a is None or np.array_equal(a, b), f"{field.name} differs from one call to the next"


def inputs_untouched(target: Target, parameter: str) -> None:
    """Points, weights and queries are as they were."""
    precision, reduction = _parse(parameter)
    case = make("mixture", 65, 33, 3, 10.0)
    problem = target.whole_problem(case, reduction, precision)
    originals = (case.points, case.log_weights, case.queries)
    given = [target.give(x.copy()) for x in originals]
    target.backend.reduce(problem, given[2], target.backend.prepare(problem, Columns(given[0], given[1])))
    for name, x, original in zip(("points", "log_weights", "queries"), given, originals):
        assert np.array_equal(to_host(x), original), f"{name} were changed"


def exclude_self(target: Target, parameter: str) -> None:
    """Row i leaves out column i: with the points as rows, with other rows, and when that leaves nothing."""
    precision, reduction = _parse(parameter)
    for kind in ("mixture", "duplicates", "outlier", "clusters"):
        for same in (True, False):
            arguments = (kind, *SIZES, 3, 1e5 if kind == "clusters" else 10.0)
            case = make(*arguments)
            problem = target.problem(case, reduction, precision, same=same, exclude_self=True)
            within(problem, target.answer(problem, case), _truth(*arguments, same, True))
    arguments = ("mixture", *SIZES, 3, 10.0)
    case = make(*arguments)
    problem = target.whole_problem(case, reduction, precision, same=True, exclude_self=True)
    truth = _truth(*arguments, True, True)
    state = target.prepare(problem, case)
    for start, stop in ((0, 130), (130, 211)):  # the points in batches
        part = replace(problem, m=stop - start, same=False)
        got = target.reduce(part, case.points[start:stop], state, own_offset=start)
        within(part, got, _rows(truth, start, stop))
    parts = []
    for start, stop in ((0, 100), (100, 211)):  # the columns in shards
        part = replace(problem, n=stop - start, same=False)
        shard = replace(case, points=case.points[start:stop], log_weights=case.log_weights[start:stop])
        parts.append(target.reduce(part, case.points, target.prepare(part, shard), own_offset=-start))
    within(problem, merge(parts), truth)
    case = make("mixture", 1, 1, 3, 10.0)
    problem = target.problem(case, reduction, precision, same=True, exclude_self=True)
    got = target.answer(problem, case)
    assert got.log_sum[0] == -np.inf, f"an empty sum has log −inf, not {got.log_sum[0]}"
    if reduction is Reduction.MEAN:
        assert not got.shift.any(), "an empty sum shifts nothing"
    if reduction is Reduction.LAPLACE:
        assert got.sign[0] == 0


def values(target: Target, parameter: str) -> None:
    """Weighted means of given values, within the shift's tolerance times their size."""
    precision, reduction = _parse(parameter)
    case = make("mixture", *SIZES, 3, 10.0)
    given = np.random.default_rng(0).normal(size=(SIZES[0], 2))
    problem = target.problem(case, reduction, precision, requires={"values"}, n_values=2)
    got = target.answer(problem, case, given)
    want = problems.truth(case, values=given)
    within(problem, got, want)
    assert want.values is not None
    allowed = {"fast": 1e-3, "high": 2e-5, "float64": 2e-10}[precision] * np.abs(given).max()
    off = np.abs(got.values - want.values).max()
    assert off <= allowed, f"values off by {off:.3g}, allowed {allowed:.3g}"


def multi_scale(target: Target, parameter: str) -> None:
    """Several bandwidths at once equal each on its own."""
    precision, reduction = _parse(parameter)
    scales = (0.5, 1.0, 2.5)
    for kind in ("mixture", "weights" if "weights" in target.info.features else "duplicates"):
        case = make(kind, *SIZES, 3, 10.0)
        problem = target.problem(case, reduction, precision, requires={"multi_scale"}, scales=scales)
        got = target.answer(problem, case)
        for s, scale in enumerate(scales):
            within(problem, each(got, lambda x, s=s: x[:, s]), problems.truth(case, scale=scale))  # type: ignore[misc]


def grad(target: Target, parameter: str) -> None:
    """Derivatives by queries, points and weights, of zero weights too, whichever of them require grad."""
    precision, reduction = _parse(parameter)
    allowed = OF_DERIVATIVES * TOLERANCES[precision][Reduction.LOG_SUM].absolute
    for kind in derivatives.KINDS:
        case = derivatives.make(kind)
        weighted = kind == "weights"
        if weighted and "weights" not in target.info.features:
            continue
        for same in (False, True):
            problem = target.problem(case, reduction, precision, same=same, requires={"grad"})
            truth = problems.truth(case, same=same)
            leaves = ["points"] + ["queries"] * (not same) + ["weights"] * weighted

            def reduce(columns: Columns, queries: Any, problem: Problem = problem) -> Partial:
                return reduce_pass(target.backend, target.info, problem, columns, queries)

            for of in derivatives.OF[reduction]:
                want = derivatives.closed_form(case, of, same)
                for chosen in dict.fromkeys([(*leaves,), *((name,) for name in leaves)]):
                    partial, got = derivatives.answered(reduce, target.give, problem, case, of, chosen)
                    within(problem, each(partial, lambda x: to_host(detached(x))), truth)
                    for name in chosen:
                        off = abs(got[name] - want[name]).max() / abs(want[name]).max()
                        assert off <= allowed, (
                            f"{kind}{', same' * same}: {of} by {name}, with grad of {', '.join(chosen)}: off by "
                            f"{off:.3g} of the largest derivative, allowed {allowed:.3g}"
                        )


def options(target: Target, parameter: str) -> None:
    """An option that the backend does not have is refused, not ignored."""
    try:
        target.info.load({"no_such_option_of_any_backend": 1})
    except (TypeError, ValueError):
        return
    raise AssertionError("takes the option no_such_option_of_any_backend in silence")


class Check(NamedTuple):
    """A check and the parameters that suit a backend's declarations."""

    run: Callable[[Target, str], None]
    parameters: Callable[[BackendInfo, Profile], Iterator[str]]


CHECKS: Mapping[str, Check] = {
    check.run.__name__: check
    for check in (
        Check(declaration, _once),
        Check(answers_something, _once),
        Check(reasons, _once),
        Check(options, _once),
        Check(result_format, _levels),
        Check(tolerance, _tolerance_parameters),
        Check(sizes, _sized),
        Check(no_rows, _levels),
        Check(state_reuse, _levels),
        Check(query_chunks, _levels),
        Check(column_chunks, _levels),
        Check(repeat, _deterministic),
        Check(inputs_untouched, _levels),
        Check(exclude_self, _featured("exclude_self")),
        Check(values, _featured("values")),
        Check(multi_scale, _featured("multi_scale")),
        Check(grad, _featured("grad")),
    )
}


def cases(info: BackendInfo, profile: Profile) -> Iterator[tuple[str, str]]:
    """Every (check, parameter) for a backend's declarations."""
    for name, check in CHECKS.items():
        for parameter in check.parameters(info, profile):
            yield name, parameter


def failures(target: Target, profile: Profile, only: Sequence[str] = ()) -> dict[str, str]:
    """Run the checks; return what failed and why: ``{"check[param]": message}``."""
    found = {}
    for name, parameter in cases(target.info, profile):
        if only and name not in only:
            continue
        try:
            CHECKS[name].run(target, parameter)
        except NotDeclared:
            pass
        except Exception as error:  # an error of the backend's is a failure like any other
            found[f"{name}[{parameter}]"] = f"{type(error).__name__}: {error}"
    return found
