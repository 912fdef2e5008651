"""Checks of what devices share out among them: ranges of the points as rows, and blocks of pairs of the points."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import cast

import numpy as np

from sdkde_core.arrays import to_host
from sdkde_core.plugin import concatenate, each, merge
from sdkde_core.protocol import BackendInfo, PairsBackend, Problem, Reduction

from . import reference
from .accuracy import COLUMNS, about_tiles, boundaries, some
from .costs import MANY
from .problems import Case, Truth
from .target import MIXED, Profile, Target, take, weighted, within

__all__ = ["pairs", "pairs_parameters", "range_parameters", "row_range"]


def range_parameters(info: BackendInfo, profile: Profile) -> Iterator[str]:
    """Every precision and reduction, and a long range. That not where a backend is slow."""
    if "range" in info.features:
        for precision, reduction in itertools.product(info.precisions, Reduction):
            yield f"{precision}-{reduction}"
        if profile.pairs >= MANY:
            for reduction in Reduction:
                yield f"{info.precisions[-1]}-{reduction}-long"


def pairs_parameters(info: BackendInfo, profile: Profile) -> Iterator[str]:
    """Every precision, in MEAN: blocks of 2048 rows and of one; in full also two of 3072."""
    if "pairs" in info.features:
        for precision in info.precisions:
            yield f"{precision}-{Reduction.MEAN}"
            if profile is not None and profile.includes is not None:
                yield f"{precision}-{Reduction.MEAN}-long"


def _mixes(info: BackendInfo) -> list[frozenset[str]]:
    """Features that go together: none, and all that the backend has; ``drawn`` asks for others."""
    return list(dict.fromkeys([frozenset[str](), info.features & MIXED]))


@functools.lru_cache(maxsize=32)
def _asked(n: int, features: frozenset[str], rows: tuple[int, ...], strays: bool = False) -> tuple[Case, Truth]:
    """Return n points, and the truth about the points ``rows``.

    ``strays``: the first point, the last, and some between are 57 bandwidths from all others. Their own terms left out,
    or their weights 1e-390 of the others', what is left has a log sum near −1650, which no float64 holds the sum of.
    """
    case = about_tiles(n, 1, 3, 10.0)
    case = weighted(case) if "weights" in features else case
    if strays:
        points, log_weights, far = 0.3 * case.points, case.log_weights.copy(), [0, 64, n // 2, n - 1]
        points[far] = 57.0 * np.eye(4, 3) - 57.0 * (np.arange(4) == 3)[:, None] * np.eye(4, 3)[0]
        if "weights" in features:
            log_weights[far] = -900.0
        case = replace(case, name="some points far from all", points=points, log_weights=log_weights)
    own, picked = np.array(rows) if "exclude_self" in features else False, case.points[list(rows)]
    return case, reference.near_sums(picked, case.points, case.log_weights, own)


def _picked(start: int, stop: int) -> tuple[int, ...]:
    """The points of a range that are compared with the truth: those about boundaries, and others."""
    return tuple(sorted({*(start + i for i in boundaries(stop - start)), *(start + some(stop - start, 60)).tolist()}))


def _problem(target: Target, parameter: str, case: Case, features: frozenset[str]) -> Problem:
    precision, reduction = parameter.split("-")[:2]
    return target.whole_problem(case, Reduction(reduction), precision, same=True, requires=features)


def row_range(target: Target, parameter: str) -> None:
    """Some of the points as rows are within the tolerance, their own columns left out where that is asked."""
    n, asked = COLUMNS, [(0, 40), (20, 60), (63, 66), (150, COLUMNS), (COLUMNS - 1, COLUMNS)]
    if parameter.endswith("long"):
        n, asked = 3077, [(1024, 3074)]
    for features, strays in itertools.product(_mixes(target.info), (False, True)):
        every = tuple(sorted({i for start, stop in asked for i in _picked(start, stop)}))
        case, truth = _asked(n, features, every, strays)
        problem = _problem(target, parameter, case, features)
        state = target.prepare(problem, case)
        for start, stop in asked:
            part = replace(problem, m=stop - start)
            got = target.reduce(part, None, state, start)
            here = [k for k, i in enumerate(every) if start <= i < stop]
            rows = np.array([every[k] - start for k in here])
            about = f"{case.name}, the points from {start} to {stop}"
            within(part, got, take(truth, here), about, rows)


def pairs(target: Target, parameter: str) -> None:
    """The sums of all blocks of pairs merge to the whole, whichever side comes first; a block again is the same.

    Some points are far from all others.
    """
    cut = 3072 if parameter.endswith("long") else 2048
    backend, n = cast(PairsBackend, target.backend), 2 * cut if parameter.endswith("long") else cut + 1
    parts, rows = [(0, cut), (cut, n)], _picked(0, n)
    for features, strays in itertools.product(_mixes(target.info), (False, True)):
        if strays and not features:
            continue  # a point's own term is its largest, and blocks of others may count for nothing
        case, truth = _asked(n, features, rows, strays)
        problem = _problem(target, parameter, case, features)
        state, found = target.prepare(problem, case), {}
        for i, j in ((0, 0), (1, 0) if features else (0, 1), (1, 1)):
            block = backend.reduce_pairs(problem, state, parts[i], parts[j])
            found[i, j], found[j, i] = (each(side, lambda x: np.array(to_host(x))) for side in block)
        got = concatenate([merge([found[i, j] for j in (0, 1)]) for i in (0, 1)])
        within(problem, got, truth, f"{case.name}, pairs in blocks that meet at {cut}", np.array(rows))
        again = backend.reduce_pairs(problem, state, parts[1], parts[1])[1]
        same = np.array_equal(to_host(again.shift), found[1, 1].shift)
        assert same, "a block's other side, or the block again, has other bits"
