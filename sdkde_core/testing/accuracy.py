"""Checks of the tolerances: kinds of data, dimensions and extents, sizes about tiles, and rows far below."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np

from sdkde_core.protocol import Reduction

from . import problems, reference
from .problems import Array, Case, Truth
from .target import NotDeclared, Target, make, within

__all__ = ["SIZES", "about_tiles", "boundaries", "far_below", "sizes", "some", "tolerance"]

#: Rows and columns of most checks: sizes that divide nothing.
COLUMNS, ROWS = 211, 67

#: n and m of the check ``sizes``: one, two, and what lies on and beside the edges of tiles.
SIZES = (
    *((1, 1), (1, 5), (2, 1), (3, 129), (129, 1), (257, 255), (1025, 33), (64, 64), (128, 65), (65, 128), (256, 192)),
    *((512, 31), (1024, 16), (33, 512), (9, 1025), (9, 2049), (8, 4160), (2112, 9), (4097, 9), (8256, 7)),
)


def some(m: int, k: int) -> Array:
    """Indices of k of m rows, evenly spread, with the first and the last."""
    return np.unique(np.linspace(0, m - 1, min(k, m)).round().astype(int))


def boundaries(n: int) -> list[int]:
    """Indices below n about which a tile may end: powers of two and what precedes them, the first and the last."""
    near = {2**k + j for k in range(14) for j in (-1, 0)} | {0, n - 1}
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


def far_below(target: Target, parameter: str) -> None:
    """Rows so far from every point that a log sum is below −1e15, where float32 and clipped logs end."""
    precision, reduction = parameter.split("-")
    case = make("tails", 65, 9, 3, 1e9)
    problem = target.problem(case, Reduction(reduction), precision)
    within(problem, target.answer(problem, case), problems.truth(case), "tails within 1e9")
    try:  # without the core, which may sum them itself
        problem = target.whole_problem(case, Reduction(reduction), precision)
    except NotDeclared:
        return
    within(problem, target.reduce(problem, case.queries, target.prepare(problem, case)), problems.truth(case), "tails")
