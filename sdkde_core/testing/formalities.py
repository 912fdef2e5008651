"""Checks of what a backend declares, and of the form of its answers."""

from __future__ import annotations

import contextlib
import itertools
import math
import sys
from dataclasses import replace
from typing import Any

import numpy as np

from sdkde_core.arrays import device_name, to_host
from sdkde_core.choice import registry
from sdkde_core.plugin import each
from sdkde_core.protocol import FEATURES, Columns, Partial, Problem, Reduction, Support, Work

from .target import NotDeclared, Target, make, same_bits


def declaration(target: Target, parameter: str) -> None:
    """The BackendInfo is one that the core and this suite can believe."""
    info = target.info
    status, reason, _ = registry.status_of(info.name, info)
    assert status == "ok", reason
    unknown = sorted(info.features - set(FEATURES))
    assert not unknown, f"features {unknown} are none of the protocol's {sorted(FEATURES)}"
    assert "grad" not in info.features or info.arrays == "torch", f"grad is a feature of tensors, not of {info.arrays}"


def answers_something(target: Target, parameter: str) -> None:
    """It has the protocol's methods, runs here, and answers at every precision that it declares.

    Where this fails, the other checks prove nothing.
    """
    for name in ("probe", "prepare", "reduce"):
        assert callable(getattr(target.backend, name, None)), f"{type(target.backend).__name__} has no method {name!r}"
    support = target.backend.probe(target.device)
    assert isinstance(support, Support), f"probe returned {support!r}, not a Support"
    assert support.ok, f"cannot run on {target.device} here: {support.reason}"
    case = make("mixture", 50, 20, 3, 5.0)
    for precision in target.info.precisions:
        problem = case.problem(Reduction.LOG_SUM, precision, device=target.device)
        support = target.info.supports(problem)
        assert isinstance(support, Support), f"supports returned {support!r}, not a Support"
        assert support.ok, f"declares precision {precision} but declines {problem}: {support.reason}"
        partial = target.backend.reduce(problem, target.give(case.queries), target.prepare(problem, case), 0)
        assert isinstance(partial, Partial), f"reduce returned {partial!r}, not a Partial"


def reasons(target: Target, parameter: str) -> None:
    """``supports`` answers for any problem, with a reason; limits, prices and compiling times are numbers.

    What a backend takes near the origin it takes up to its ``extent_limit``: points beyond the core sums apart.
    """
    info, sizes = target.info, ((1, 1, 0.0), (10**9, 1024, 10.0), (1000, 3, 1e30))
    for (n, d, extent), reduction, precision in itertools.product(sizes, Reduction, info.precisions):
        problem = Problem(reduction, n, n, d, precision=precision, device=target.device, extent=extent)
        support = info.supports(problem)
        assert isinstance(support, Support), f"supports returned {support!r}, not a Support"
        assert support.reason, f"no reason for {problem}"
        limit = info.extent_limit(problem)
        assert limit > 0, f"extent_limit is {limit} for {problem}"
        near, most = (info.supports(replace(problem, extent=x)) for x in (0.0, min(limit, 1e149)))
        assert most.ok or not near.ok, f"declines what is within its extent_limit, {limit:g}: {most.reason}"
        seconds = info.compile_seconds(problem)
        assert 0 <= seconds < math.inf, f"compile_seconds is {seconds} for {problem}"
        if info.work is not None and support.ok:
            work = info.work(problem, None)
            assert isinstance(work, Work), f"work returned {work!r}, not a Work"
            said = [x for x in (*vars(work).values(), *work.matrix_flops.values()) if isinstance(x, int | float)]
            assert all(0 <= x < math.inf for x in said), f"work returned {work!r} for {problem}"


def options(target: Target, parameter: str) -> None:
    """An option that the backend does not have is refused, not ignored."""
    with contextlib.suppress(TypeError, ValueError):
        target.info.load({"no_such_option": 1})
        raise AssertionError("takes the option no_such_option in silence")


def result_format(target: Target, precision: str, reduction: str) -> None:
    """Results are float64, of the library and on the device of the points, with the fields of the reduction.

    They are no views of what was handed in, which stays as it was. An axis of length one stays, whichever it is.
    """
    answered = False
    for n, m, d in ((31, 7, 3), (31, 7, 1), (31, 1, 3), (1, 1, 1)):
        with contextlib.suppress(NotDeclared):
            case = make("mixture", n, m, d, 5.0)
            problem = target.problem(case, reduction, precision, whole=True)
            answered = True
            originals = {name: getattr(case, name) for name in ("points", "log_weights", "queries")}
            given = {name: target.give(x.copy()) for name, x in originals.items()}
            state = target.backend.prepare(problem, Columns(given["points"], given["log_weights"]))
            got = target.backend.reduce(problem, given["queries"], state)
            has_format(problem, got, given["points"])
            each(got, lambda x: x.__setitem__(..., math.nan))  # write into it, as its owner may
            for name, original in originals.items():
                assert np.array_equal(to_host(given[name]), original), f"{name} were changed"
    if not answered:
        raise NotDeclared("takes none of these problems whole")


def has_format(problem: Problem, got: Partial, like: Any) -> None:
    """Assert that an answer has the problem's fields and shapes, in arrays like ``like``."""
    shape = (problem.m,)
    mean, laplace = problem.reduction is Reduction.MEAN, problem.reduction is Reduction.LAPLACE
    expected = {"log_sum": shape, "shift": (*shape, problem.d) if mean else None}
    expected["sign"] = expected["log_magnitude"] = shape if laplace else None
    asked = f"{problem.reduction}, m={problem.m} d={problem.d}"
    for name, wanted in expected.items():
        x = getattr(got, name)
        assert (x is None) == (wanted is None), f"{asked}: {name} is {'missing' if x is None else 'not asked for'}"
        if x is None:
            continue
        assert type(x) is type(like), f"{asked}: {name} is a {type(x).__name__}, not {type(like).__name__}"
        assert "float64" in str(x.dtype), f"{asked}: {name} is {x.dtype}, not float64"
        assert device_name(x) == device_name(like), f"{asked}: {name} is on {device_name(x)}"
        assert tuple(x.shape) == wanted, f"{asked}: {name} has shape {tuple(x.shape)}, not {wanted}"


def repeat(target: Target, precision: str, reduction: str, n: int = 1025, m: int = 515) -> None:
    """The same call gives the same bits again, of 20,000 columns too, in whatever order its threads come to run.

    The interpreter changes threads as often as it can: results that are joined as they come do so in several orders.
    """
    case, before = make("mixture", n, min(m, 515), 3, 10.0), sys.getswitchinterval()
    problem = target.problem(case, reduction, precision, same=m == n, whole=True)
    queries, state = None if m == n else case.queries, target.prepare(problem, case)
    first = target.reduce(problem, queries, state)
    sys.setswitchinterval(1e-6)
    try:
        for k in range(5 if m < 100 else 2):
            again = target.reduce(problem, queries, state if k % 2 else target.prepare(problem, case))
            same_bits(first, again, "differs from one call to the next")
    finally:
        sys.setswitchinterval(before)
