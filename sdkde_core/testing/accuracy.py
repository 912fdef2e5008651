"""Checks of the tolerances: kinds of data, dimensions, extents, sizes about tiles, far rows, heaps, NaN, at random.

Most checks have 211 columns and 67 rows, which divide nothing.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from sdkde_core.plugin import concatenate, each
from sdkde_core.protocol import BackendInfo, Partial, Problem, Reduction

from . import problems, reference
from .problems import Array, Case, Truth
from .target import NotDeclared, Profile, Target, make, weighted, within

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
    """A mixture whose queries lie close to columns, those at boundaries first: a column that is lost shows."""
    case = problems.make("mixture", n, m, d, extent, seed)
    rng = np.random.default_rng([seed, n, m, d])
    columns = np.array(boundaries(n)[::-1])
    nearest = np.concatenate([columns, rng.integers(0, n, max(0, m - len(columns)))])[:m]
    queries = case.points[nearest] + rng.normal(size=(m, d)) * 0.7 / np.sqrt(d)
    return replace(case, name="about tiles", queries=queries[rng.permutation(m)])


def tolerance(target: Target, precision: str, reduction: str, kind: str, d: int, extent: float) -> None:
    """Rows are within the precision's tolerance, with separate queries and with the points themselves."""
    n, m, most = (211, 67, 67) if d < 200 else (67, 29, 15)  # fewer where the oracle is slow
    if kind == "zero_tile":
        n, m = (2611, 19) if d < 64 else (1301, 5)
    case = make(kind, n, m, d, extent)
    for same in (False, True):
        rows, dtype = some(n if same else m, most // 3 if same else most), ("float64", "float32")[(d + same) % 2]
        target.check(case, reduction, precision, rows, same=same, dtype=dtype)


def sizes(target: Target, precision: str, reduction: str, n: int, m: int) -> None:
    """Sizes down to one point and one query, and up to thousands on and beside the edges of tiles."""
    case = about_tiles(n, m, 3, 10.0)
    for same in (False, True) if n <= 1025 else (False,):
        rows, dtype = some(n, 67) if same else None, ("float64", "float32")[(SIZES.index((n, m)) + same) % 2]
        target.check(case, reduction, precision, rows, same=same, dtype=dtype)
        if same and n > 1000 and "weights" in target.info.features:
            target.check(weighted(case), reduction, precision, rows, same=True)
    if n * m < 10:  # one row or one column may be what is left of more: its weight is not 1 then
        uneven = replace(case, log_weights=weighted(case).log_weights - 0.7)
        equal = replace(case, log_weights=np.full(n, -0.7 - math.log(n)))
        ways = [(equal, set[str]())] + [(uneven, {"weights"})] * ("weights" in target.info.features)
        for (asked, requires), same, dtype in itertools.product(ways, (False, True), ("float64", "float32")):
            target.check(asked, reduction, precision, same=same, dtype=dtype, requires=requires)


def limits(target: Target, precision: str, reduction: str, d: int) -> None:
    """Two clusters are right at every extent between those of ``tolerance``, and just within ``extent_limit``.

    A backend's formula may have its limit near any of these extents. All coordinates are as large as the extent, so
    what the formula loses there shows.
    """
    problem = Problem(Reduction(reduction), 67, 211, d, precision=precision, device=target.device)
    limit = float(target.info.extent_limit(problem))
    for extent in (14.0, 20.0, 28.0, 40.0, 56.0, 80.0, *([limit * (1.0 - 1e-9)] if 14.0 <= limit <= 1e5 else [])):
        with contextlib.suppress(NotDeclared):
            target.check(_two_clusters(d, extent), reduction, precision)


@functools.lru_cache(maxsize=32)
def _two_clusters(d: int, extent: float) -> Case:
    case, apart = make("mixture", 211, 67, d, 3.0), np.full(d, 1.0 / math.sqrt(d))
    points, queries = (
        x * (0.5, 2.0)[d == 1] + np.where(np.arange(len(x)) % 2, 1.0, -1.0)[:, None] * (extent - 4.0) * apart
        for x in (case.points, case.queries)
    )
    factor = extent / max(np.linalg.norm(x, axis=1).max() for x in (points, queries))
    return replace(case, name=f"two clusters within {extent:.6g}", points=points * factor, queries=queries * factor)


def far_below(target: Target, precision: str, reduction: str, d: int, distance: float, n: int) -> None:
    """Rows far from every point, among ordinary rows and alone, and a point that far from all others.

    Log sums end at −1e200. Exponents are so large that rounding moves one by more than the span of exp: what is
    exponentiated must be a difference of the very numbers of which the largest was taken.
    """
    case, few = problems.far(n, 13, d, distance, stray=False), problems.far(97, 13, d, distance, stray=True)
    stray = problems.far(n, 13, d, distance, stray=True)
    stray = weighted(stray) if "weights" in target.info.features else stray
    farthest = int(np.argmax(np.vecdot(case.queries, case.queries)))
    alone = replace(case, name="one far row", queries=case.queries[[farthest]])
    asked: list[tuple[Case, dict[str, bool]]] = [(case, {}), (alone, {}), (stray, {}), (few, {"same": True})]
    for case, options in asked:
        target.check(case, reduction, precision, **options)
        with contextlib.suppress(NotDeclared):  # without the core, which may sum them itself
            problem = target.problem(case, reduction, precision, whole=True, **options)
            about = f"{case.name}, without the core"
            within(problem, target.direct(problem, case), problems.truth(case, **options), about)


@functools.lru_cache(maxsize=16)
def _heap(n: int, d: int, out: float) -> tuple[Case, Truth]:
    """The first 12 of n points, about each of which all others, on one spot, weigh as much as itself; the truth.

    The spot is ``out`` bandwidths from the origin: sums of coordinates round more there.
    """
    rng, count = np.random.default_rng([n, d]), n - 12
    spot, away = rng.normal(size=d), rng.normal(size=(12, d))
    spot *= out / np.linalg.norm(spot)
    distances = math.sqrt(2.0 * math.log(count)) + 0.3 * rng.normal(size=12)
    rows = spot + away * (distances / np.linalg.norm(away, axis=1))[:, None]
    case = Case("a heap of duplicates", np.vstack([rows, np.tile(spot, (count, 1))]), rows, np.full(n, -math.log(n)))
    log_weights = np.append(case.log_weights[:12], math.log(count / n))  # the heap as one point
    return case, problems.truth(Case("", np.vstack([rows, spot[None]]), rows, log_weights))


def heap(target: Target, precision: str, reduction: str, d: int, out: float, n: int) -> None:
    """Rows beside tens of thousands of duplicates, whose terms and partial sums are all rounded alike.

    Rounding of ordinary data cancels, and a sum of 10⁵ numbers in float32 is right to six digits. Of equal numbers it
    is right to three.
    """
    case, truth = _heap(n, d, out)
    problem = target.problem(case, reduction, precision)
    within(problem, target.answer(problem, case), truth, case.name)
    if "range" in target.info.features:
        whole = target.problem(case, reduction, precision, same=True, whole=True)
        part = replace(whole, m=len(case.queries))
        got = target.reduce(part, None, target.prepare(whole, case))
        within(part, got, truth, f"{case.name}, rows that are points")


def not_a_number(target: Target, precision: str, reduction: str) -> None:
    """A row with a NaN is NaN and no other row; a point with a NaN makes every row NaN."""
    for kind, extent in (("mixture", 10.0), ("clusters", 1e4)):
        case = make(kind, 211, 11, 3, extent)
        problem = target.problem(case, reduction, precision)
        others, got = with_not_a_number(target, problem, case)
        within(problem, got, problems.truth(case, rows=others), f"{kind}, beside rows with a NaN", rows=others)


def with_not_a_number(target: Target, problem: Problem, case: Case) -> tuple[Any, Partial]:
    """Assert that rows with a NaN are NaN, and all rows where a point has one; return the other rows, and an answer."""
    lost, queries, points = np.isin(np.arange(11), [2, 6, 10]), case.queries.copy(), case.points.copy()
    queries[2] = queries[6, 1] = queries[10, 2] = points[len(points) // 2, 0] = np.nan
    got = target.answer(problem, replace(case, queries=queries))
    assert _all_nan(each(got, lambda x: x[lost])), f"{case.name}: rows with a NaN have a number"
    everywhere = target.answer(problem, replace(case, points=points))
    assert _all_nan(everywhere), f"{case.name}: where a point has a NaN rows have a number"
    return np.flatnonzero(~lost), got


def _all_nan(got: Partial) -> bool:
    logs = got.log_sum if got.log_magnitude is None else got.log_magnitude * got.sign
    return bool(np.isnan(logs).all() and (got.shift is None or np.isnan(got.shift).all()))


# --- random problems, each drawn from the seed that its name ends in -------------------------------------------------
# Each property is dealt like cards: a run of as many seeds as it has values gets each value once, in random order. So a
# few seeds meet every value, and pairs of values meet by chance.


class Drawn(NamedTuple):
    """A case and what is asked of it."""

    case: Case
    same: bool
    expected: int  # the m that ``prepare`` is told
    cut: int  # the row at which the second of two batches begins


def _deal(cards: Sequence[Any], seed: int, salt: int) -> Any:
    hand, place = divmod(seed, len(cards))
    return cards[np.random.default_rng([hand, salt, 73]).permutation(len(cards))[place]]


def _sizes(rng: np.random.Generator, shape: str, tile: int, pairs: int) -> tuple[int, int]:
    large, few = int(2 ** rng.uniform(9, 13.1)), int(rng.integers(1, 40))  # up to 8800
    large -= large % tile * int(rng.random() < 0.5)
    if shape == "many columns":
        return max(large, tile), few
    if shape == "many rows":
        return few, max(large // 2, tile)
    if shape in ("few", "any"):
        n, m = (int(2 ** rng.uniform(0, 3.3 if shape == "few" else 9)) for _ in range(2))
        return n, m
    most = min(max(1, math.isqrt(pairs) // tile), 6)
    beside = rng.choice((-1, 1), 2) * (shape == "beside tiles")
    n, m = tile * rng.integers(1, most + 1, 2) + beside
    return int(n), int(m)


def draw(seed: int, d: int, pairs: int, allowed: frozenset[str]) -> Drawn:
    """Draw a problem in d dimensions: at most ``pairs`` pairs, with weights where ``allowed`` has these."""
    rng = np.random.default_rng([seed, 20])
    shapes = ("many columns", "many rows", "on tiles", "on tiles", "beside tiles", "any", "few")
    n, m = _sizes(rng, _deal(shapes, seed, 3), _deal((16, 32, 64, 128, 256, 512), seed, 2), pairs)
    same = _deal((False, True, False), seed, 4)
    if same:
        most = math.isqrt(pairs)
        n = m = min(max(n, m), most - most % min(64, most))
    n, m = min(n, pairs), min(m, pairs)
    n, m = (n, max(1, min(m, pairs // n))) if n >= m else (max(1, min(n, pairs // m)), m)
    case = about_tiles(n, m, d, _deal((2.0, 5.0, 12.0), seed, 5), seed)
    if rng.random() < 0.25:  # duplicates
        points = case.points.copy()
        points[: n // 2] = points[n // 2 : n // 2 + n // 2]
        case = replace(case, name="duplicates", points=points)
    if rng.random() < 0.25:  # a row in the far tail
        queries = case.queries.copy()
        queries[rng.integers(0, m)] *= 4.0
        case = replace(case, name=f"{case.name}, one row in the tail", queries=queries)
    if "weights" in allowed and _deal((False, True), seed, 1) and n > 1:
        case = weighted(case, float(rng.choice((1.0, 8.0))))
    if rng.random() < 0.25:  # as of some of a pass's columns, whose weights sum to less than 1
        case = replace(case, name=f"{case.name}, half the columns", log_weights=case.log_weights - 0.7)
    cut = int(rng.choice([*(i for i in boundaries(m) if i), int(rng.integers(1, m + 1))]))
    return Drawn(case, same, int(rng.choice((0, 1, m, 4 * m))), cut)


@functools.lru_cache(maxsize=128)
def _answered(seed: int, d: int, pairs: int, allowed: frozenset[str]) -> tuple[Drawn, Any, Truth]:
    """Return a problem, the rows of it that are checked, and the truth about these."""
    asked = draw(seed, d, pairs, allowed)
    case, given = asked.case, asked.case.points if asked.same else asked.case.queries
    m, most = len(given), max(24, 1_000_000 // case.points.size)  # what the truth may cost
    others = np.random.default_rng([seed, 21]).integers(0, m, most)
    rows = np.arange(m) if m <= most else np.unique([*boundaries(m), *others])
    return asked, rows, reference.sums(given[rows], case.points, case.log_weights, plain=True)


def drawn_parameters(info: BackendInfo, profile: Profile) -> Iterator[str]:
    """Name the problems of a profile: seed, dimension, and rows times columns at most."""
    if profile.includes is not None:
        yield from drawn_parameters(info, profile.includes)
    dimensions = profile.drawn_dimensions or profile.dimensions
    for seed in range(profile.draws):
        yield f"{seed}-d{_deal(dimensions, seed, 0)}-p{profile.pairs}"


def drawn(target: Target, seed: int, d: int, pairs: int) -> None:
    """A random problem, which its name says, at every precision and in every reduction.

    The backend is asked itself where it takes the problem whole, and then also for the rows in two batches; otherwise
    it is asked by way of the core.
    """
    asked, rows, want = _answered(seed, d, pairs, target.info.features & {"weights"})
    answered = False
    for (k, precision), (r, reduction) in itertools.product(enumerate(target.info.precisions), enumerate(Reduction)):
        dtype = ("float64", "float32")[(k + r + seed) % 2]
        with contextlib.suppress(NotDeclared):
            problem = target.problem(asked.case, reduction, precision, same=asked.same, dtype=dtype)
            answered = True
            if target.info.supports(problem).ok:
                _ask(target, asked, problem, want, rows, as_range=seed % 2 == 1)
            else:
                within(problem, target.answer(problem, asked.case), want, asked.case.name, rows)
    if not answered:
        raise NotDeclared("takes the problem in no reduction and at no precision")


def _ask(target: Target, asked: Drawn, problem: Problem, want: Truth, rows: Any, as_range: bool) -> None:
    """Ask for all rows at once, then in two batches; ``as_range``: of the points, where the backend takes those."""
    case, given = asked.case, asked.case.points if asked.same else asked.case.queries
    state = target.prepare(replace(problem, m=asked.expected, same=False), case)
    within(problem, target.reduce(problem, None if asked.same else given, state), want, case.name, rows)
    own, parts = asked.same and as_range and "range" in target.info.features, []
    for start, stop in ((0, asked.cut), (asked.cut, problem.m)):
        part, batch = replace(problem, m=stop - start, same=own), None if own else given[start:stop]
        parts.append(target.reduce(part, batch, state, start))
    within(problem, concatenate(parts), want, f"{case.name}, in batches that meet at row {asked.cut}", rows)
