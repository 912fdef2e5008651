"""Random problems, each drawn from the seed that its name ends in: sizes, dimensions, features, offsets.

Each property is dealt like cards: a run of as many seeds as it has values gets each value once, in random order. So a
few seeds meet every value, and pairs of values meet by chance.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sdkde_core.plugin import concatenate
from sdkde_core.protocol import BackendInfo, Problem, Reduction

from .accuracy import about_tiles, boundaries
from .problems import Case, Truth, true_sums
from .target import MIXED, NotDeclared, Profile, Target, weighted, within


@dataclass(frozen=True)
class Drawn:
    """A case and what is asked of it."""

    case: Case
    same: bool
    features: frozenset[str]
    own_offset: int
    expected: int  # the m that ``prepare`` is told
    cut: int  # the row at which the second of two batches begins


def _deal(cards: Sequence[Any], seed: int, salt: int) -> Any:
    hand, place = divmod(seed, len(cards))
    return cards[np.random.default_rng([hand, salt, 73]).permutation(len(cards))[place]]


def _sizes(rng: np.random.Generator, shape: str, tile: int, pairs: int) -> tuple[int, int]:
    """Draw n and m."""
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
    """Draw a problem in d dimensions of at most ``pairs`` pairs, with features of those that are allowed."""
    rng = np.random.default_rng([seed, 20])
    mixes = [frozenset(f) for k in range(3) for f in itertools.combinations(sorted(MIXED), k)]
    features = _deal(mixes, seed, 1) & allowed
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
    if "weights" in features and n > 1:
        case = weighted(case, float(rng.choice((1.0, 8.0))))
    else:
        features -= {"weights"}
    if rng.random() < 0.25:  # as of some of a pass's columns, whose weights sum to less than 1
        case = replace(case, name=f"{case.name}, half the columns", log_weights=case.log_weights - 0.7)
    own_offset = 0
    if "exclude_self" in features and not same:
        inside, beyond, below = (int(rng.integers(1, most + 1)) for most in (n, 2 * n, m))
        own_offset = _deal((0, inside, -below, -m, n, n + beyond), seed, 6)
    cut = int(rng.choice([*(i for i in boundaries(m) if i), int(rng.integers(1, m + 1))]))
    return Drawn(case, same, features, own_offset, int(rng.choice((0, 1, m, 4 * m))), cut)


@functools.lru_cache(maxsize=128)
def _answered(seed: int, d: int, pairs: int, allowed: frozenset[str]) -> tuple[Drawn, Any, Truth]:
    """Return a problem, the rows of it that are checked, and the truth about these."""
    asked = draw(seed, d, pairs, allowed)
    case, given = asked.case, asked.case.points if asked.same else asked.case.queries
    m, most = len(given), max(24, 1_000_000 // case.points.size)  # what the truth may cost
    others = np.random.default_rng([seed, 21]).integers(0, m, most)
    rows = np.arange(m) if m <= most else np.unique([*boundaries(m), *others])
    own = rows + asked.own_offset if "exclude_self" in asked.features else False
    return asked, rows, true_sums(given[rows], case, own)


def parameters(info: BackendInfo, profile: Profile) -> Iterator[str]:
    """Name the problems of a profile: seed, dimension, and rows times columns at most."""
    if profile.includes is not None:
        yield from parameters(info, profile.includes)
    dimensions = profile.drawn_dimensions or profile.dimensions
    for seed in range(profile.draws):
        yield f"{seed}-d{_deal(dimensions, seed, 0)}-p{profile.pairs}"


def drawn(target: Target, parameter: str) -> None:
    """A random problem, which its name says, at every precision and in every reduction.

    The backend is asked itself where it takes the problem whole, and then also for the rows in two batches; otherwise
    it is asked by way of the core.
    """
    seed, d, pairs = (int(x.lstrip("dp")) for x in parameter.split("-"))
    asked, rows, want = _answered(seed, d, pairs, target.info.features & MIXED)
    answered = False
    for (k, precision), (r, reduction) in itertools.product(enumerate(target.info.precisions), enumerate(Reduction)):
        dtype = ("float64", "float32")[(k + r + seed) % 2]
        with contextlib.suppress(NotDeclared):
            options: dict[str, Any] = {"same": asked.same, "requires": asked.features, "dtype": dtype}
            problem = target.problem(asked.case, reduction, precision, **options)
            answered = True
            if target.info.supports(problem).ok:
                _ask(target, asked, problem, want, rows, as_range=seed % 2 == 1)
            else:
                within(problem, target.answer(problem, asked.case, asked.own_offset), want, asked.case.name, rows)
    if not answered:
        raise NotDeclared("takes the problem in no reduction and at no precision")


def _ask(target: Target, asked: Drawn, problem: Problem, want: Truth, rows: Any, as_range: bool) -> None:
    """Ask for all rows at once, then in two batches; ``as_range``: of the points, where the backend takes those."""
    case, given = asked.case, asked.case.points if asked.same else asked.case.queries
    state = target.prepare(replace(problem, m=asked.expected, same=False), case)
    got = target.reduce(problem, None if asked.same else given, state, asked.own_offset)
    about = f"{case.name}, own_offset {asked.own_offset}" if "exclude_self" in asked.features else case.name
    within(problem, got, want, about, rows)
    own, parts = asked.same and as_range and "range" in target.info.features, []
    for start, stop in ((0, asked.cut), (asked.cut, problem.m)):
        part, batch = replace(problem, m=stop - start, same=own), None if own else given[start:stop]
        parts.append(target.reduce(part, batch, state, asked.own_offset + start))
    within(problem, concatenate(parts), want, f"{about}, in batches that meet at row {asked.cut}", rows)
