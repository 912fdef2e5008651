"""An estimate as a list of groups: columns whose kernels have one width, and their part of the whole.

With points u in bandwidths, weights w that sum to 1 in a group, kernels c bandwidths wide and parts π that sum to 1,

    ℓ_i = log Σ_g π_g c_g^−d Σ_j∈g w_j φ(‖u_i − u_j‖ / c_g)

A group is summed in its own unit, u / c, where the shift is c times its part of ∇ℓ_i: so :func:`.merge` joins groups.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from array_api_compat import device

from ..arrays import array_namespace, look, to_host
from ..protocol import Columns, Partial, Problem, with_fields
from .merge import merge, safe_log, take_columns, take_rows
from .outliers import count

#: Where in its step a place lies. At ½ it could fall between two points, as for 8,192 equal weights: rounding decides.
MIDDLE = 0.5 - 1e-6


class Group(NamedTuple):
    """Columns in bandwidths, with weights that sum to 1, how wide their kernels are, and log of their part π."""

    columns: Columns
    scale: float = 1.0
    log_share: float = 0.0

    @property
    def n(self) -> int:
        return int(self.columns.points.shape[0])

    def problem(self, problem: Problem) -> Problem:
        """The group's part of a problem; its rows are its columns only where kernels are one bandwidth wide."""
        same = problem.same and self.scale == 1.0
        return with_fields(problem, n=self.n, extent=problem.extent / self.scale, same=same)

    def raised(self, sums: Partial, d: int) -> Partial:
        """Return sums over the columns, in the group's unit, as its part of the whole."""
        by, magnitude = self.raise_by(d), sums.log_magnitude
        shift = None if sums.shift is None else sums.shift / self.scale
        return Partial(sums.log_sum + by, shift, sums.sign, None if magnitude is None else magnitude + by)

    def raise_by(self, d: int) -> float:
        return self.log_share - d * math.log(self.scale)

    def at(self, move: Callable[[Any], Any]) -> Group:
        """The group with its arrays brought elsewhere."""
        return self._replace(columns=Columns(move(self.columns.points), move(self.columns.log_weights)))

    @property
    def scaled(self) -> Columns:
        columns = self.columns
        return columns if self.scale == 1.0 else replace(columns, points=columns.points / self.scale)

    def unit(self, x: Any) -> Any:
        """Points or distances, given in bandwidths, in the group's unit."""
        return x if x is None or self.scale == 1.0 else x / self.scale


def guard(columns: Columns, share: float, scale: float, most: int, widest: float) -> Group:
    """Return a guard of the columns' tails: some of them with kernels that are ``scale`` bandwidths wide.

    At most ``most`` columns are taken, evenly spaced by their number or by their weights: they cost little beside the
    other groups. Fewer columns are farther apart: their kernels are wider by that factor, up to ``widest`` bandwidths:
    benchmarks/notes/tails.md.
    """
    points, logs, (carried, d) = columns.points, columns.log_weights, columns.points.shape
    if carried > most:
        xp, carried = array_namespace(points), look(int, count(logs > -math.inf))
        if carried <= most:
            columns = take_columns(columns, xp.nonzero(logs > -math.inf)[0])
        else:
            equal = xp.full_like(logs[:most], 1.0 / most)  # constants, without derivatives by the weights
            some = take_rows(points, places(logs, most))
            columns = Columns(some, xp.log(equal), None if columns.weights is None else equal)
    return Group(columns, min(widest, guard_scale(carried, d, scale, most)), math.log(share))


def guard_scale(n: int, d: int, scale: float, most: int) -> float:
    """How wide the kernels of a guard of n samples with weight are, in bandwidths."""
    return min(16.0, scale * max(1.0, n / most) ** (1.0 / d))


def places(logs: Any, most: int) -> Any:
    """Indices of ``most`` points, evenly spaced by their weights, whose logs are given."""
    xp = array_namespace(logs)
    reached = xp.cumulative_sum(xp.exp(logs))
    at = (xp.arange(most, dtype=xp.float64, device=device(logs)) + MIDDLE) / most * reached[-1]
    return xp.clip(xp.searchsorted(reached, at), max=logs.shape[0] - 1)


def adapted(columns: Columns, logs: Any, exponent: float) -> tuple[Any, tuple[int, ...]]:
    """Return which power of √2 each kernel's width is, in bandwidths (n,), and the powers there are.

    The width is (p / g)^−exponent to the nearest power from 2^−3 to 2^3, with log p of the samples in ``logs`` (n,) and
    g their geometric mean.
    """
    xp, weights = array_namespace(logs), columns.weights
    weights = xp.exp(columns.log_weights) if weights is None else weights
    middle = xp.sum(weights * xp.where(weights > 0, logs, xp.zeros_like(logs))) / xp.sum(weights)
    powers = xp.clip(xp.round((-2.0 * exponent / math.log(2.0)) * (logs - middle)), -6, 6)
    powers = xp.where(xp.isnan(powers), xp.zeros_like(powers), powers)  # NaN of unchecked data
    return powers, tuple(map(int, np.unique(to_host(powers))))


def by_width(columns: Columns, powers: Any, some: Sequence[int]) -> tuple[Group, ...]:
    """Return the groups of columns whose kernels are these powers of √2 wide, in bandwidths (n,)."""
    xp, found = array_namespace(powers), list[Group]()
    for power in some:
        which = xp.nonzero(powers == power)[0]
        points, logs = take_rows(columns.points, which), take_rows(columns.log_weights, which)
        share = look(float, safe_log(xp.sum(xp.exp(logs))))
        if share > -math.inf:
            found.append(Group(Columns(points, logs - share, ordered=columns.ordered), 2.0 ** (0.5 * power), share))
    return tuple(found)


class GroupedColumns:
    """The groups of one reduction, each packed; used as :class:`.PackedColumns`."""

    def __init__(self, groups: Sequence[Group], pack: Callable[[Problem, Columns], Any], problem: Problem) -> None:
        self._groups, self._d = tuple(groups), problem.d
        self.packed = [pack(group.problem(problem), group.scaled) for group in groups]

    def each(
        self, queries: Any = None, some: tuple[int, int] | None = None, distances: Any = None, extent: Any = None
    ) -> Iterator[tuple[Partial, int]]:
        """Yield every group's part of the sums, and how many points were summed apart."""
        for group, packed in zip(self._groups, self.packed):
            rows, known = queries, {"distances": group.unit(distances), "extent": group.unit(extent)}
            if queries is None and group.scale != 1.0:  # else rows are the samples, which the first group is
                rows = self._groups[0].columns.points[slice(*(some or (None,))), :]
            sums, apart = packed.reduce(group.unit(rows), some=some, **known)
            yield group.raised(sums, self._d), apart

    def reduce(self, queries: Any = None, **known: Any) -> tuple[Partial, int]:
        partials, apart = zip(*self.each(queries, **known))
        return merge(partials), max(apart)
