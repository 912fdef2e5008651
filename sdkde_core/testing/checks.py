"""What a backend must do, check by check; needs no test framework.

A check is a function ``check(target, parameter)`` that returns, raises :class:`AssertionError`, or raises
:class:`NotDeclared` where the backend declares that it does not take the problem. :data:`CHECKS` has them all with the
parameters that suit a backend's declarations; names and parameters are stable within a protocol major.

==================================================  ==================================================================
:mod:`~sdkde_core.testing.formalities`              what is declared, the form of results
:mod:`~sdkde_core.testing.accuracy`                 tolerances by kind of data, extent, dimension and size
:mod:`~sdkde_core.testing.calls`                    one call after another, several at once, whose memory is whose
:mod:`~sdkde_core.testing.surroundings`             what a call leaves as it was, and numbers of threads
:mod:`~sdkde_core.testing.costs`                    memory, what a call leaves behind, the price
:mod:`~sdkde_core.testing.broken_off`               calls that are interrupted, and those of a forked child
:mod:`~sdkde_core.testing.featured`                 ``exclude_self``, ``grad``
:mod:`~sdkde_core.testing.other_kernels`            ``kernel``
:mod:`~sdkde_core.testing.ranges`                   ``range``, ``pairs``
:mod:`~sdkde_core.testing.drawn`                    random problems
==================================================  ==================================================================
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from sdkde_core.protocol import BackendInfo, Reduction

from . import (
    accuracy,
    broken_off,
    calls,
    costs,
    drawn,
    featured,
    formalities,
    other_kernels,
    ranges,
    surroundings,
)
from .target import NotDeclared, Profile, Target

__all__ = ["CHECKS", "FIRST", "PROFILES", "Check", "NotDeclared", "Profile", "Target", "cases", "failures"]

_QUICK = Profile(
    dimensions=(1, 3, 17, 784),
    extents=(10.0, 100.0, 1e4),
    draws=40,
    drawn_dimensions=(1, 2, 3, 4, 5, 6, 7, 8, 16, 17, 32, 33, 64),
)

PROFILES: Mapping[str, Profile] = {
    "quick": _QUICK,
    "full": Profile(
        dimensions=(1, 2, 3, 5, 7, 16, 17, 33, 64, 128, 384, 784),
        extents=(10.0, 30.0, 100.0, 1e3, 1e4),
        draws=120,
        pairs=1_500_000,
        includes=_QUICK,
        drawn_dimensions=(*range(1, 18), 24, 31, 32, 33, 48, 63, 64, 65, 128),
    ),
}

#: Dimensions of the check ``wide``.
WIDE = (100, 257, 1024)

#: The check without which the others prove nothing.
FIRST = "answers_something"


def _tolerance(info: BackendInfo, profile: Profile) -> Iterator[str]:
    kinds = ["mixture", "tails", "clusters", "outlier", "duplicates"]
    if "weights" in info.features:
        kinds += ["weights", "zero_tile", "muted_outlier", "light"]
    for precision in info.precisions:
        for d in profile.dimensions:
            for kind in kinds:
                spread = profile.extents if kind in ("mixture", "tails") else (1e5,) if kind == "clusters" else (10.0,)
                for extent in spread:
                    for reduction in Reduction:
                        yield f"{precision}-{reduction}-{kind}-d{d}-e{extent:g}"


def _each(info: BackendInfo, profile: Profile) -> Iterator[str]:
    """Every precision and reduction."""
    for precision in info.precisions:
        for reduction in Reduction:
            yield f"{precision}-{reduction}"


def _featured(feature: str) -> Callable[[BackendInfo, Profile], Iterator[str]]:
    def parameters(info: BackendInfo, profile: Profile) -> Iterator[str]:
        if feature in info.features:
            yield from _each(info, profile)

    return parameters


def _sizes(info: BackendInfo, profile: Profile) -> Iterator[str]:
    """Every size within the profile's, at the last precision declared."""
    for n, m in accuracy.SIZES:
        if n * m <= profile.pairs:
            for precision in info.precisions[-1:]:
                for reduction in Reduction:
                    yield f"{precision}-{reduction}-n{n}-m{m}"


def _far(info: BackendInfo, profile: Profile) -> Iterator[str]:
    """Distances, in few dimensions: nothing of what matters there depends on d."""
    n = min(1100, profile.pairs // 13)
    for precision, d, distance in itertools.product(info.precisions, profile.dimensions[:2], accuracy.DISTANCES):
        for reduction in Reduction:
            yield f"{precision}-{reduction}-d{d}-e{distance:g}-n{n}"


def _heap(info: BackendInfo, profile: Profile) -> Iterator[str]:
    """As many duplicates as the profile's pairs allow, in three dimensions at most of those that it has."""
    n = min(120_000, profile.pairs // accuracy.HEAP_ROWS)
    dimensions = profile.dimensions[:3]
    for precision, reduction, d, out in itertools.product(info.precisions, Reduction, dimensions, accuracy.HEAPS_AWAY):
        yield f"{precision}-{reduction}-d{d}-e{out:g}-n{n}"


def _repeat_many(info: BackendInfo, profile: Profile) -> Iterator[str]:
    """Few rows in MEAN; in full in every reduction, and all points as rows, once. Not where a backend is slow."""
    if profile.pairs >= costs.MANY:
        for precision in info.precisions:
            for reduction in Reduction if profile.includes is not None else (Reduction.MEAN,):
                yield f"{precision}-{reduction}-n20000-m20"
        if profile.includes is not None:
            yield f"{info.precisions[0]}-{Reduction.MEAN}-n20000-m20000"


def _limits(info: BackendInfo, profile: Profile) -> Iterator[str]:
    """The profile's dimensions, three at most."""
    for parameter in _each(info, profile):
        for d in profile.dimensions[:3]:
            yield f"{parameter}-d{d}"


def _wide(info: BackendInfo, profile: Profile) -> Iterator[str]:
    """Dimensions between those of the profile and beyond, where it has hundreds: nothing compiles for each."""
    if max(profile.dimensions) >= 784:
        for parameter in _each(info, profile):
            for d in WIDE:
                yield f"{parameter}-d{d}"


def _first(info: BackendInfo, profile: Profile) -> Iterator[str]:
    """The first precision declared, in every reduction."""
    for reduction in Reduction:
        yield f"{info.precisions[0]}-{reduction}"


def _mean(info: BackendInfo, profile: Profile) -> Iterator[str]:
    """The first precision declared, in MEAN, which has most fields."""
    yield f"{info.precisions[0]}-{Reduction.MEAN}"


def _reductions(info: BackendInfo, profile: Profile) -> Iterator[str]:
    yield from Reduction


def _once(info: BackendInfo, profile: Profile) -> Iterator[str]:
    yield "backend"


class Check(NamedTuple):
    """A check and the parameters that suit a backend's declarations."""

    run: Callable[[Target, str], None]
    parameters: Callable[[BackendInfo, Profile], Iterator[str]]


CHECKS: Mapping[str, Check] = {
    check.run.__name__: check
    for check in (
        Check(formalities.declaration, _once),
        Check(formalities.answers_something, _once),
        Check(formalities.reasons, _once),
        Check(formalities.options, _once),
        Check(formalities.result_format, _each),
        Check(formalities.inputs_untouched, _each),
        Check(formalities.repeat, _each),
        Check(formalities.repeat_many, _repeat_many),
        Check(accuracy.sizes, _sizes),
        Check(accuracy.limits, _limits),
        Check(accuracy.wide, _wide),
        Check(accuracy.far_below, _far),
        Check(accuracy.heap, _heap),
        Check(accuracy.not_a_number, _each),
        Check(accuracy.tolerance, _tolerance),
        Check(calls.no_rows, _each),
        Check(calls.state_reuse, _each),
        Check(calls.expected_rows, _each),
        Check(calls.query_chunks, _each),
        Check(calls.column_chunks, _each),
        Check(calls.results_are_the_callers, _each),
        Check(calls.new_contents, _first),
        Check(calls.many_alive, _mean),
        Check(calls.threads, _each),
        Check(surroundings.surroundings, _reductions),
        Check(surroundings.thread_counts, _reductions),
        Check(costs.memory, costs.memory_parameters),
        Check(costs.leaks, costs.once_where_fast),
        Check(costs.price, costs.price_parameters),
        Check(broken_off.interrupts, _once),
        Check(broken_off.forked_child, _once),
        Check(featured.exclude_self, _featured("exclude_self")),
        Check(featured.grad, _featured("grad")),
        Check(other_kernels.kernel, other_kernels.parameters),
        Check(ranges.row_range, ranges.range_parameters),
        Check(ranges.pairs, ranges.pairs_parameters),
        Check(drawn.drawn, drawn.parameters),
    )
}


def cases(info: BackendInfo, profile: Profile) -> Iterator[tuple[str, str]]:
    """Every (check, parameter) for a backend's declarations."""
    for name, check in CHECKS.items():
        for parameter in check.parameters(info, profile):
            yield name, parameter


def failures(target: Target, profile: Profile, only: Sequence[str] = (), most: int | None = None) -> dict[str, str]:
    """Run the checks; return what failed and why: ``{"check[param]": message}``.

    Where :data:`FIRST` fails, that is all.

    Parameters
    ----------
    target : Target
    profile : Profile
    only : sequence of str
        Names of checks, in the order in which to run them; all by default.
    most : int, optional
        Stop after so many failures of a check.
    """
    found: dict[str, str] = {}
    for name in only or sorted(CHECKS, key=lambda name: name != FIRST):
        failed = 0
        for parameter in CHECKS[name].parameters(target.info, profile):
            if failed == most:
                break
            try:
                CHECKS[name].run(target, parameter)
            except NotDeclared:  # the check is of something that the backend does not claim
                pass
            except Exception as error:  # an error of the backend's is a failure like any other
                found[f"{name}[{parameter}]"] = f"{type(error).__name__}: {error}"
                failed += 1
        if failed and name == FIRST:
            break
    return found
