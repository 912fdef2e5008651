"""Checks of what devices share out among them: ranges of the points as rows, and blocks of pairs of the points."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import fields, replace

import numpy as np

from sdkde_core.arrays import to_host
from sdkde_core.plugin import concatenate, each, merge
from sdkde_core.protocol import QUANTUM, BackendInfo, Partial, Problem, Reduction

from . import reference
from .accuracy import COLUMNS, about_tiles
from .problems import Case, Truth
from .target import MIXED, Profile, Target, take, weighted, within_each

__all__ = ["bits_parameters", "pairs", "pairs_parameters", "range_bits", "row_range"]

#: Ranges of the points: across the edges of tiles, both ends, one row.
RANGES = ((0, 40), (63, 66), (150, COLUMNS), (COLUMNS - 1, COLUMNS))

#: Points beyond a whole number of quanta; pairs of a profile from which on so many points are not too many.
BEYOND, MANY = 31, 400_000


def bits_parameters(info: BackendInfo, profile: Profile) -> Iterator[str]:
    """Every precision, in MEAN, which devices share out; in full every reduction. Not where a backend is slow."""
    if info.deterministic and "range" in info.features and profile.pairs >= MANY:
        for precision in info.precisions:
            for reduction in Reduction if profile.includes is not None else (Reduction.MEAN,):
                yield f"{precision}-{reduction}"


def pairs_parameters(info: BackendInfo, profile: Profile) -> Iterator[str]:
    """Every precision, in MEAN."""
    if "pairs" in info.features:
        for precision in info.precisions:
            yield f"{precision}-{Reduction.MEAN}"


def _mixes(info: BackendInfo) -> list[frozenset[str]]:
    """Features that go together: none, and all that the backend has; ``drawn`` asks for others."""
    return list(dict.fromkeys([frozenset[str](), info.features & MIXED]))


@functools.lru_cache(maxsize=32)
def _asked(n: int, features: frozenset[str], first: int = 0) -> tuple[Case, tuple[float, ...], list[Truth]]:
    """Return n points, the scales, and the truth about the points from the ``first`` on, at every scale."""
    case, scales = about_tiles(n, 1, 3, 10.0), (0.7, 1.6) if "multi_scale" in features else ()
    case = weighted(case) if "weights" in features else case
    own = np.arange(first, n) if "exclude_self" in features else False
    rows, log_weights = case.points[first:], case.log_weights
    return case, scales, [reference.near_sums(rows, case.points, log_weights, own, s) for s in scales or (1.0,)]


def _problem(
    target: Target, parameter: str, case: Case, features: frozenset[str], scales: tuple[float, ...]
) -> Problem:
    precision, reduction = parameter.split("-")
    options = {"same": True, "requires": features, "scales": scales}
    return target.whole_problem(case, Reduction(reduction), precision, **options)


def row_range(target: Target, parameter: str) -> None:
    """Some of the points as rows are within the tolerance, their own columns left out where that is asked."""
    for features in _mixes(target.info):
        case, scales, truths = _asked(COLUMNS, features)
        problem = _problem(target, parameter, case, features, scales)
        state = target.prepare(problem, case)
        for start, stop in RANGES:
            part = replace(problem, m=stop - start)
            got = target.reduce(part, None, state, start)
            about = f"{case.name}, the points from {start} to {stop}"
            within_each(part, got, [take(truth, slice(start, stop)) for truth in truths], about)


def range_bits(target: Target, parameter: str) -> None:
    """A row has the same bits in every range of whole quanta, and in one that ends with the points."""
    start, n = 2 * QUANTUM, 2 * QUANTUM + BEYOND
    features = target.info.features & {"exclude_self"}
    case, scales, truths = _asked(n, features, start)
    problem = _problem(target, parameter, case, features, scales)
    state = target.prepare(problem, case)
    few, more = (target.reduce(replace(problem, m=n - first), None, state, first) for first in (start, start - QUANTUM))
    within_each(replace(problem, m=BEYOND), few, truths, f"{case.name}, the points from {start} to {n}")
    for field in fields(Partial):
        a, b = getattr(few, field.name), getattr(more, field.name)
        assert a is None or np.array_equal(a, b[QUANTUM:]), f"{field.name} of the last rows differs in a longer range"


def pairs(target: Target, parameter: str) -> None:
    """The sums of all blocks of pairs merge to the whole, whichever side comes first; a block again is the same."""
    n = QUANTUM + BEYOND
    parts = [(0, QUANTUM), (QUANTUM, n)]
    for features in _mixes(target.info):
        case, scales, truths = _asked(n, features)
        problem = _problem(target, parameter, case, features, scales)
        state, found = target.prepare(problem, case), {}
        for i, j in ((0, 0), (1, 0) if features else (0, 1), (1, 1)):
            block = target.backend.reduce_pairs(problem, state, parts[i], parts[j])  # type: ignore[attr-defined]
            found[i, j], found[j, i] = (each(side, lambda x: np.array(to_host(x))) for side in block)
        got = concatenate([merge([found[i, j] for j in (0, 1)]) for i in (0, 1)])
        within_each(problem, got, truths, f"{case.name}, pairs in blocks that meet at {QUANTUM}")
        again = target.backend.reduce_pairs(problem, state, parts[1], parts[1])[1]  # type: ignore[attr-defined]
        same = np.array_equal(to_host(again.shift), found[1, 1].shift)
        assert same or not target.info.deterministic, "a block's other side, or the block again, has other bits"
