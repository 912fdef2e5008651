"""The box that the points are transformed in, and the modes of a Gaussian there."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from array_api_compat import is_numpy_array
from numpy.typing import NDArray

from sdkde_core.plugin import array_namespace
from sdkde_core.protocol import Problem, Reduction

from .bounds import around_a_cell, cutoff

Array = NDArray[Any]


@dataclass(frozen=True)
class Box:
    """A periodic box around most columns, in bandwidths; arrays are (d,)."""

    low: Array  # ends of the box that the columns are in
    high: Array
    margin: Array  # rows may lie that far outside
    period: Array
    highest: tuple[int, ...]  # the last mode, per dimension: there are 2 · highest + 1

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(2 * k + 1 for k in self.highest)

    def angles(self, points: Any) -> list[Any]:
        """Coordinates as angles, one contiguous array (k,) a dimension; within ±π for rows that may lie there."""
        centre, factor = (0.5 * (self.low + self.high)).tolist(), (2.0 * math.pi / self.period).tolist()
        return [(points[:, a] - centre[a]) * factor[a] for a in range(points.shape[1])]

    def holds(self, points: Any, within: Array) -> Any:
        """Which points are inside by at least ``within`` (d,), which may be negative; (k,) mask."""
        ends = zip((self.low + within).tolist(), (self.high - within).tolist())
        inside = [(points[:, a] >= low) & (points[:, a] <= high) for a, (low, high) in enumerate(ends)]
        return functools.reduce(operator.and_, inside)


def choose_box(
    problem: Problem, ends: tuple[Array, Array], sample: Array, epsilon: float, price: Callable[..., float]
) -> tuple[Box, float]:
    """Return the cheapest box and its price, of one around all points and some around most.

    Columns that it leaves out are summed directly, over the rows near them.

    ``ends`` are the least and greatest coordinates of the points, (d,) each, ``sample`` some of them. ``price`` is that
    of a shape in modes, the share of the rows that have columns outside the box in reach, how many those are on
    average, and how many columns are outside; inf where there are too many modes.
    """
    box = _box(problem, *ends, epsilon, True)
    best = box, price(box.shape, 0.0, 0.0, 0.0)
    n, reach = problem.n, cutoff(epsilon)
    ordered = np.sort(sample, axis=0)
    # Shares of the sample that are left out at either end of the box, per dimension.
    for trim in (1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03):
        skip = math.ceil(trim * len(sample))
        if 4 * skip > len(sample):
            break
        box = _box(problem, ordered[skip], ordered[-1 - skip], epsilon, False)
        if price(box.shape, 0.0, 0.0, 0.0) < best[1]:
            cost = price(box.shape, *_in_reach(box, sample, n, reach))
            best = (box, cost) if cost < best[1] else best
    return best


def _in_reach(box: Box, sample: Array, n: int, reach: float) -> tuple[float, float, float]:
    """Return the last three arguments of ``price``, see :func:`choose_box`, as estimated from a sample."""
    outside, near = (sample[~box.holds(sample, np.full(len(box.low), within))] for within in (0.0, reach))
    if not len(outside):
        return 0.0, 0.0, 0.0
    rows, columns = (x[:: -(-len(x) // k)] for x, k in zip((near, outside), (64, 512)))
    r2 = ((rows[:, None] - columns[None]) ** 2).sum(-1)
    many = n * len(outside) / len(sample)
    return len(near) / len(sample), float((r2 <= reach**2).mean()) * many, many


def _box(problem: Problem, low: Array, high: Array, epsilon: float, whole: bool) -> Box:
    """The box around an interval per dimension; ``whole``: it has all columns.

    Few rows lie outside of such a box, so its margin is small; but where the box is narrow a wide margin costs nothing.
    """
    cut, width = cutoff(epsilon), high - low
    margin = np.minimum(cut, 2.0 + 100.0 / np.maximum(width, 1.0)) if whole else np.full(problem.d, cut)
    period = np.maximum(width + margin + cut, width + 2.0 * margin)  # at both ends angles are within ±π
    return Box(low, high, margin, period, tuple(_highest(cut, p) for p in period))


def _highest(last: float, period: float) -> int:
    """The mode at the wave number ``last``, capped: it may be huge, or not a number."""
    mode = last * period / (2.0 * math.pi)
    return math.ceil(mode) if mode < 1e10 else 10**10


def density_bound(box: Box, points: Any, weights: Any) -> float:
    """Bound Σ_j w_j exp(−½‖y − u_j‖²) at every y, from the heaviest cell of a grid; for arrays of any library."""
    xp, (n, d), side = array_namespace(points), points.shape, 2.0  # bandwidths
    while math.prod(counts := [math.floor(w / side) + 1 for w in box.high - box.low]) > max(1 << 16, 4 * n):
        side *= 2.0
    index = xp.zeros_like(points[:, 0], dtype=xp.int64)
    for a, count in enumerate(counts):
        cell = xp.astype((points[:, a] - float(box.low[a])) / side, xp.int64)
        index = index * count + xp.minimum(cell, xp.full_like(cell, count - 1))
    if is_numpy_array(points):
        heaviest = float(np.bincount(index, weights).max())
    else:  # a device adds in any order: integers, which sum to 2⁵² at most, add up to the same
        cells = index.new_zeros(math.prod(counts)).index_add_(0, index, (weights * 2.0**52).ceil().long())
        heaviest = float(cells.max()) * 2.0**-52
    return min(float(xp.sum(weights)), heaviest * around_a_cell(side, d))


def fields(problem: Problem, box: Box, modes: Array, last: float) -> list[Array]:
    """Return the modes of what a reduction needs, two real fields in one: a + i b from modes A + i B.

    ``modes`` are Σ_j w_j exp(−i k·θ_j), in the box's shape; ``last`` is the last wave number that the kernel exp(−½ r²)
    needs, whose transform is Π_a √(2π) exp(−½ κ_a²). LOG_SUM: S. MEAN: S + i G_1, then G_2 + i G_3: G = Σ w φ (u_j − y)
    = ∇S has the modes i κ_a. LAPLACE: S + i L: Σ w φ (1 + d/2 − ½ r²) has those of S times 1 + ½ κ².
    """
    highest, d = [min(k, _highest(last, p)) for k, p in zip(box.highest, box.period)], len(box.highest)
    middle = tuple(slice(k - h, k + h + 1) for k, h in zip(box.highest, highest))
    waves, product = [], modes[middle].copy()
    for a in range(d):
        kappa = (2.0 * math.pi / box.period[a]) * np.arange(-highest[a], highest[a] + 1)
        waves.append(kappa.reshape([-1 if b == a else 1 for b in range(d)]))
        product *= (math.sqrt(2.0 * math.pi) / box.period[a]) * np.exp(-0.5 * waves[a] ** 2)
    if problem.reduction is Reduction.LAPLACE:
        product *= 1.0 + 1j * (1.0 + sum(0.5 * w**2 for w in waves))
    if problem.reduction is not Reduction.MEAN:
        return [product]
    found = [product * (1.0 - waves[0])]  # 1 + i · i κ
    if d > 1:
        product *= 1j * waves[1] - (waves[2] if d == 3 else 0.0)
        found.append(product)
    return found
