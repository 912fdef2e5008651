"""What a backend must do, check by check; needs no test framework.

A check returns, raises :class:`AssertionError`, or raises :class:`NotDeclared` where the backend declares that it does
not take the problem. :data:`CHECKS` has them all with the parameters that suit a backend's declarations; names and
parameters are stable within a protocol major.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from sdkde_core.protocol import KERNELS, BackendInfo, Reduction

from . import accuracy, calls, featured, formalities, surroundings
from .target import NotDeclared, Profile, Target

__all__ = ["CHECKS", "FIRST", "PROFILES", "Check", "NotDeclared", "Profile", "Target", "cases", "failures"]

Parameters = Callable[[BackendInfo, Profile], Iterable[str]]

PROFILES: dict[str, Profile] = {
    "quick": Profile(
        dimensions=(1, 3, 17, 784), extents=(10.0, 100.0, 1e4), drawn_dimensions=(*range(1, 9), 16, 17, 32, 33, 64)
    )
}
PROFILES["full"] = Profile(
    dimensions=(1, 2, 3, 5, 7, 16, 17, 33, 64, 128, 384, 784),
    extents=(10.0, 30.0, 100.0, 1e3, 1e4),
    draws=135,
    pairs=1_500_000,
    includes=PROFILES["quick"],
    drawn_dimensions=(*range(1, 18), 24, 31, 32, 33, 48, 63, 64, 65, 128),
)

#: The check without which the others prove nothing.
FIRST = "answers_something"


def _these(*parameters: str) -> Parameters:
    return lambda info, profile: parameters


def _each(
    ends: Callable[[Profile], Iterable[str]] = lambda profile: ("",),
    *,
    of: slice = slice(None),
    reductions: Sequence[str] = tuple(Reduction),
    feature: str | None = None,
) -> Parameters:
    """Every precision that is declared, or some of them, with every reduction and what follows from the profile."""

    def parameters(info: BackendInfo, profile: Profile) -> Iterable[str]:
        if feature is None or feature in info.features:
            for parts in itertools.product(info.precisions[of], reductions, tuple(ends(profile))):
                yield "-".join(filter(None, parts))

    return parameters


def _tolerance(info: BackendInfo, profile: Profile) -> Iterable[str]:
    kinds = ["mixture", "tails", "clusters", "outlier", "duplicates"]
    if "weights" in info.features:
        kinds += ["weights", "zero_tile", "muted_outlier", "light"]
    ends = [
        f"{kind}-d{d}-e{extent:g}"
        for d, kind in itertools.product(profile.dimensions, kinds)
        for extent in (profile.extents if kind in ("mixture", "tails") else (1e5,) if kind == "clusters" else (10.0,))
    ]
    if max(profile.dimensions) >= 784:  # others between and beyond: nothing compiles for each
        ends += [f"mixture-d{d}-e10" for d in (100, 257, 1024)]
    return _each(lambda profile: ends)(info, profile)


def _distances(dimensions: int, distances: Iterable[float], rows: int, most: int) -> Parameters:
    """Some of the dimensions at each distance, with as many columns as the profile's pairs allow."""
    return _each(
        lambda p: [f"d{d}-e{e:g}-n{min(most, p.pairs // rows)}" for d in p.dimensions[:dimensions] for e in distances]
    )


def _repeat(info: BackendInfo, profile: Profile) -> Iterable[str]:
    """Few rows and many columns too, where a backend is not slow; in full all points as rows, once."""
    yield from _each(lambda profile: ("", *["n20000-m20"] * profile.is_fast))(info, profile)
    if profile.includes is not None and profile.is_fast:
        yield f"{info.precisions[0]}-{Reduction.MEAN}-n20000-m20000"


def _memory(info: BackendInfo, profile: Profile) -> Iterable[str]:
    """Sums in the first dimension; in another, sums for which the differences of all pairs may come to be."""
    first, *_, other = profile.dimensions[:1] + profile.dimensions[:3]
    for reduction in Reduction if profile.is_fast else ():
        yield f"{info.precisions[0]}-{reduction}-d{first if reduction is Reduction.LOG_SUM else other}"


class Check(NamedTuple):
    """A check and the parameters that suit a backend's declarations."""

    function: Callable[..., None]
    parameters: Parameters = _each()

    def run(self, target: Target, parameter: str) -> None:
        """Check with what a parameter such as ``"high-mean-d3-e1e+12"`` says: words, and the numbers after a letter."""
        values: list[Any] = []
        for word in parameter.split("-"):
            number = re.fullmatch(r"[a-z]?(\d[\d.e+]*)", word)
            kind = float if word.startswith("e") else int
            values.append(kind(number[1]) if number else word)
        self.function(target, *values)


CHECKS: Mapping[str, Check] = {
    check.function.__name__: check
    for check in (
        Check(formalities.declaration, _these("backend")),
        Check(formalities.answers_something, _these("backend")),
        Check(formalities.reasons, _these("backend")),
        Check(formalities.options, _these("backend")),
        Check(formalities.result_format),
        Check(formalities.repeat, _repeat),
        Check(
            accuracy.sizes,
            _each(lambda p: [f"n{n}-m{m}" for n, m in accuracy.SIZES if n * m <= p.pairs], of=slice(-1, None)),
        ),
        Check(accuracy.limits, _each(lambda profile: [f"d{d}" for d in profile.dimensions[:3]])),
        # From where float32 ends to what stands for missing values; nothing of what matters depends on d.
        Check(accuracy.far_below, _distances(2, (1e9, 1e12, 1e20, 1e100), rows=13, most=1100)),
        Check(accuracy.heap, _distances(3, (7, 350), rows=12, most=120_000)),
        Check(accuracy.not_a_number),
        Check(accuracy.tolerance, _tolerance),
        Check(calls.state_reuse),
        Check(calls.results_are_the_callers),
        Check(calls.new_contents, _each(of=slice(1))),
        Check(calls.many_alive, _each(of=slice(1), reductions=("mean",))),
        Check(calls.threads),
        Check(surroundings.surroundings, _these(*Reduction)),
        Check(surroundings.thread_counts, _these(*Reduction)),
        Check(surroundings.memory, _memory),
        Check(surroundings.leaks, lambda info, profile: ["backend"] * profile.is_fast),
        Check(surroundings.price, lambda info, profile: [f"d{d}" for d in profile.dimensions[:2] * profile.is_fast]),
        Check(calls.interrupts, _these("backend")),
        Check(calls.forked_child, _these("backend")),
        Check(featured.kernel, _each(reductions=tuple(KERNELS)[1:], feature="kernel")),
        Check(featured.grad, _each(feature="grad")),
        Check(featured.row_range, _each(lambda p: ["", "long"][: 1 + p.is_fast], feature="range")),
        Check(
            featured.pairs, _each(lambda p: ["", "long"][: 1 + bool(p.includes)], reductions=("mean",), feature="pairs")
        ),
        Check(accuracy.drawn, accuracy.drawn_parameters),
    )
}


def cases(info: BackendInfo, profile: Profile) -> Iterator[tuple[str, str]]:
    """Every (check, parameter) for a backend's declarations."""
    return ((name, parameter) for name, check in CHECKS.items() for parameter in check.parameters(info, profile))


def failures(target: Target, profile: Profile, only: Sequence[str] = (), most: int | None = None) -> dict[str, str]:
    """Run the checks; return what failed and why: ``{"check[param]": message}``; where :data:`FIRST` fails, that alone.

    ``only``: names of checks, in the order in which to run them; by default all. ``most``: failures of a check at
    which to stop it.
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
