"""Checks of the tolerances: kinds of data, dimensions and extents, sizes about tiles, rows far off, heaps, NaN."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import replace

import numpy as np

from sdkde_core.plugin import each
from sdkde_core.protocol import TOLERANCES, Partial, Problem, Reduction

from . import problems, reference
from .problems import Array, Case, Truth
from .target import MIXED, NotDeclared, Target, make, take, weighted, within

__all__ = [
    "BETWEEN",
    "DISTANCES",
    "HEAPS_AWAY",
    "HEAP_ROWS",
    "SIZES",
    "about_tiles",
    "boundaries",
    "far_below",
    "heap",
    "limits",
    "not_a_number",
    "sizes",
    "some",
    "tolerance",
    "wide",
]

DTYPES = ("float64", "float32")

#: Rows and columns of most checks: sizes that divide nothing.
COLUMNS, ROWS = 211, 67

#: n and m of the check ``sizes``: one, two, and what lies on and beside the edges of tiles.
SIZES = (
    *((1, 1), (1, 5), (2, 1), (3, 129), (129, 1), (257, 255), (1025, 33), (64, 64), (128, 65), (65, 128), (256, 192)),
    *((512, 31), (1024, 16), (33, 512), (9, 1025), (9, 2049), (8, 4160), (2112, 9), (4097, 9), (8256, 7)),
    *((5, 66_001), (66_001, 5)),
)


def some(m: int, k: int) -> Array:
    """Indices of k of m rows, evenly spread, with the first and the last."""
    return np.unique(np.linspace(0, m - 1, min(k, m)).round().astype(int))


def boundaries(n: int) -> list[int]:
    """Indices below n about which a tile may end: powers of two and what precedes them, the first and the last."""
    near = {2**k + j for k in range(18) for j in (-1, 0)} | {0, n - 1}
    return sorted(i for i in near if 0 <= i < n)


@functools.lru_cache(maxsize=64)
def about_tiles(n: int, m: int, d: int, extent: float, seed: int = 0) -> Case:
    """A mixture whose queries lie close to columns, those at boundaries first: a column that is left out shows."""
    case = problems.make("mixture", n, m, d, extent, seed)
    rng = np.random.default_rng([seed, n, m, d])
    columns = np.array(boundaries(n)[::-1])
    nearest = np.concatenate([columns, rng.integers(0, n, max(0, m - len(columns)))])[:m]
    queries = case.points[nearest] + rng.normal(size=(m, d)) * 0.7 / np.sqrt(d)
    return replace(case, name="about tiles", queries=queries[rng.permutation(m)])


@functools.lru_cache(maxsize=512)
def _truth(kind: str, n: int, m: int, d: int, extent: float, same: bool, k: int) -> tuple[Array, Truth]:
    """Return k rows, and the truth about them."""
    rows = some(n if same else m, k)
    return rows, problems.truth(make(kind, n, m, d, extent), same=same, rows=rows)


def tolerance(target: Target, parameter: str) -> None:
    """Rows are within the precision's tolerance, with separate queries and with the points themselves."""
    precision, reduction, kind, dimension, reach = parameter.split("-", 4)
    d, extent = int(dimension[1:]), float(reach[1:])
    n, m = (COLUMNS, ROWS) if d < 200 else (67, 29)  # fewer in many dimensions, where the oracle is slow
    if kind == "zero_tile":
        n, m = (2611, 19) if d < 64 else (1301, 5)
    case = make(kind, n, m, d, extent)
    most = ROWS if d < 200 else 15
    for same in (False, True):
        rows, want = _truth(kind, n, m, d, extent, same, most // 3 if same else most)
        dtype = ("float64", "float32")[(d + same) % 2]
        problem = target.problem(case, Reduction(reduction), precision, same=same, dtype=dtype)
        within(problem, target.answer(problem, case), want, f"{kind} within {extent:g}", rows=rows)


def sizes(target: Target, parameter: str) -> None:
    """Sizes down to one point and one query, and up to thousands on and beside the edges of tiles."""
    precision, reduction, *numbers = parameter.split("-")
    n, m = (int(p[1:]) for p in numbers)
    case = about_tiles(n, m, 3, 10.0)
    for same in (False, True):
        if same and n > 300:
            continue
        rows = case.points if same else case.queries
        want = reference.near_sums(rows, case.points, case.log_weights)
        dtype = ("float64", "float32")[(SIZES.index((n, m)) + same) % 2]
        problem = target.problem(case, Reduction(reduction), precision, same=same, dtype=dtype)
        within(problem, target.answer(problem, case), want, case.name)
    if n * m < 10:
        _features_of_few(target, Reduction(reduction), precision, case)


def _features_of_few(target: Target, reduction: Reduction, precision: str, case: Case) -> None:
    """Features mixed with one row or one column, which may be what is left of more: its weight is not 1 then."""
    mixed = sorted(target.info.features & MIXED)
    case = replace(weighted(case), log_weights=weighted(case).log_weights - 0.7)
    equal = replace(case, log_weights=np.full(len(case.points), -0.7 - math.log(len(case.points))))
    for k, same in itertools.product(range(2 ** len(mixed)), (False, True)):
        features = {name for i, name in enumerate(mixed) if k >> i & 1}
        asked, excluding = case if "weights" in features else equal, "exclude_self" in features
        dtype = DTYPES[(k + same) % 2]
        problem = target.problem(asked, reduction, precision, same=same, dtype=dtype, requires=features)
        rows = asked.points if same else asked.queries
        want = reference.near_sums(rows, asked.points, asked.log_weights, excluding)
        within(problem, target.answer(problem, asked), want, asked.name)


#: Extents between those of the check ``tolerance``, beside which each formula of a backend may have its limit.
BETWEEN = (14.0, 20.0, 28.0, 40.0, 56.0, 80.0)


def limits(target: Target, parameter: str) -> None:
    """Two clusters are right at every extent between those of ``tolerance``, and just within ``extent_limit``.

    All coordinates are as large as the extent, so what a formula loses there shows.
    """
    precision, name, dimension = parameter.split("-")
    d, reduction = int(dimension[1:]), Reduction(name)
    apart = np.full(d, 1.0 / math.sqrt(d))
    limit = float(
        target.info.extent_limit(Problem(reduction, ROWS, COLUMNS, d, precision=precision, device=target.device))
    )
    for extent in (*BETWEEN, *([limit * (1.0 - 1e-9)] if 14.0 <= limit <= 1e5 else [])):
        case = make("mixture", COLUMNS, ROWS, d, 3.0)
        points, queries = (
            x * (0.5, 2.0)[d == 1] + np.where(np.arange(len(x)) % 2, 1.0, -1.0)[:, None] * (extent - 4.0) * apart
            for x in (case.points, case.queries)
        )
        factor = extent / max(np.linalg.norm(x, axis=1).max() for x in (points, queries))
        case = replace(case, name=f"two clusters within {extent:.6g}", points=points * factor, queries=queries * factor)
        try:
            problem = target.problem(case, reduction, precision)
        except NotDeclared:
            continue
        truth = reference.near_sums(case.queries, case.points, case.log_weights)
        within(problem, target.answer(problem, case), truth, case.name)


def wide(target: Target, parameter: str) -> None:
    """Many dimensions, up to the 1024 that the core takes."""
    precision, name, dimension = parameter.split("-")
    case = make("mixture", 37, 11, int(dimension[1:]), 10.0)
    for same in (False, True):
        rows = case.points if same else case.queries
        problem = target.problem(case, Reduction(name), precision, same=same)
        within(
            problem, target.answer(problem, case), reference.near_sums(rows, case.points, case.log_weights), case.name
        )


#: Bandwidths from every point at which rows are checked: from where float32 ends to what stands for missing values.
DISTANCES = (1e9, 1e12, 1e20, 1e100)

#: What a shift may err by, relative to itself, besides its absolute tolerance. Its other part, relative to ℓ, exceeds
#: the distance from some 1e13 bandwidths on, where 0 would pass.
FAR_SHIFT = 1e-6


@functools.lru_cache(maxsize=64)
def _far(n: int, d: int, distance: float, stray: bool) -> Case:
    case = problems.far(n, 13, d, distance, stray=stray)
    for array in (case.points, case.queries, case.log_weights):
        array.flags.writeable = False
    return case


def far_below(target: Target, parameter: str) -> None:
    """Rows far from every point, among ordinary rows and alone, and a point that far from all others.

    Log sums end at −1e200. Exponents are so large that rounding moves one by more than the span of exp: what is
    exponentiated must be a difference of the very numbers of which the largest was taken.
    """
    precision, name, *numbers = parameter.split("-")
    d, distance, n = int(numbers[0][1:]), float(numbers[1][1:]), int(numbers[2][1:])
    case, stray, few = _far(n, d, distance, False), _far(n, d, distance, True), _far(97, d, distance, True)
    stray = weighted(stray) if "weights" in target.info.features else stray
    farthest = int(np.argmax(np.vecdot(case.queries, case.queries)))
    alone = replace(case, name="one far row", queries=case.queries[farthest : farthest + 1])
    asked: list[tuple[Case, dict[str, bool]]] = [(case, {}), (alone, {}), (stray, {}), (few, {"same": True})]
    if "exclude_self" in target.info.features:
        asked.append((few, {"same": True, "exclude_self": True}))
    for case, options in asked:
        truth = problems.truth(case, **options)
        problem = target.problem(case, Reduction(name), precision, **options)
        _within(problem, target.answer(problem, case), truth, case.name)
        try:  # without the core, which may sum them itself
            problem = target.whole_problem(case, Reduction(name), precision, **options)
        except NotDeclared:
            continue
        queries = None if problem.same else case.queries
        got = target.reduce(problem, queries, target.prepare(problem, case))
        _within(problem, got, truth, f"{case.name}, without the core")


def _within(problem: Problem, got: Partial, want: Truth, about: str) -> None:
    """Assert the tolerances, and that shifts are right relative to themselves."""
    within(problem, got, want, about)
    if got.shift is None:
        return
    off, size = (np.hypot.reduce(x, axis=1) for x in (got.shift - want.shift, want.shift))
    allowed = TOLERANCES[problem.precision][Reduction.MEAN].absolute + FAR_SHIFT * size
    worst = int(np.argmax(off / allowed))
    assert (off <= allowed).all(), (
        f"{about} within {problem.extent:.0e}: shift {got.shift[worst]}, should be {want.shift[worst]}: "
        f"off by more than {FAR_SHIFT} of itself"
    )


#: Rows of the check ``heap``, and bandwidths from the origin to its duplicates: sums of coordinates round more there.
HEAP_ROWS, HEAPS_AWAY = 12, (7.0, 350.0)


@functools.lru_cache(maxsize=16)
def _heap(n: int, d: int, out: float) -> tuple[Case, Truth]:
    """The first rows of n points, about each of which all others, on one spot, weigh as much as itself; the truth."""
    rng = np.random.default_rng([n, d])
    spot, away = rng.normal(size=d), rng.normal(size=(HEAP_ROWS, d))
    spot *= out / np.linalg.norm(spot)
    count = n - HEAP_ROWS
    distances = math.sqrt(2.0 * math.log(count)) + 0.3 * rng.normal(size=HEAP_ROWS)
    rows = spot + away * (distances / np.linalg.norm(away, axis=1))[:, None]
    case = Case("a heap of duplicates", np.vstack([rows, np.tile(spot, (count, 1))]), rows, np.full(n, -math.log(n)))
    log_weights = np.append(case.log_weights[:HEAP_ROWS], math.log(count / n))  # the heap as one point
    return case, problems.truth(Case("", np.vstack([rows, spot[None]]), rows, log_weights))


def heap(target: Target, parameter: str) -> None:
    """Rows beside tens of thousands of duplicates, each of whose terms is rounded alike, as is every sum so far.

    Rounding of ordinary data cancels, and a sum of 10⁵ numbers in float32 is right to six digits. Of equal numbers it
    is right to three.
    """
    precision, name, *numbers = parameter.split("-")
    d, out, n = (int(p[1:]) for p in numbers)
    case, truth = _heap(n, d, float(out))
    problem = target.problem(case, Reduction(name), precision)
    within(problem, target.answer(problem, case), truth, case.name)
    if "range" in target.info.features:
        whole = target.whole_problem(case, Reduction(name), precision, same=True)
        part = replace(whole, m=HEAP_ROWS)
        got = target.reduce(part, None, target.prepare(whole, case))
        within(part, got, truth, f"{case.name}, rows that are points")


def not_a_number(target: Target, parameter: str) -> None:
    """A row with a NaN is NaN and no other row; a point with a NaN makes every row NaN."""
    precision, name = parameter.split("-")
    reduction = Reduction(name)
    lost, others = [2, 6, 10], [0, 1, 3, 4, 5, 7, 8, 9]
    for kind, extent in (("mixture", 10.0), ("clusters", 1e4)):
        case = make(kind, COLUMNS, 11, 3, extent)
        queries, points = case.queries.copy(), case.points.copy()
        queries[2] = queries[6, 1] = queries[10, 2] = points[COLUMNS // 2, 0] = np.nan
        problem, truth = target.problem(case, reduction, precision), problems.truth(case)
        got = target.answer(problem, replace(case, queries=queries))
        assert _all_nan(each(got, lambda x: x[lost])), f"{kind}: rows with a NaN have a number"
        within(problem, got, take(truth, others), f"{kind}, beside rows with a NaN", rows=others)
        got = target.answer(problem, replace(case, points=points))
        assert _all_nan(got), f"{kind}: where a point has a NaN rows have a number"


def _all_nan(got: Partial) -> bool:
    logs = got.log_sum if got.log_magnitude is None else got.log_magnitude * got.sign
    return bool(np.isnan(logs).all() and (got.shift is None or np.isnan(got.shift).all()))
