"""Columns that end somewhere, or go round: maps that flatten a density at its ends, and images of the samples there.

A sample near an end has an image, its reflection, with the sample's weight, and an estimate of all of them has no slope
at the end. So a column is first mapped to z = T(x), in which the density has hardly any: with t the distance from the
end, T′ = exp(−b t exp(−t² / 2w²)), b the rate at which the density falls there. That is of a local log-linear fit: of
the exponential density on [0, w] with the samples' mean (Loader, "Local likelihood density estimation", Annals of
Statistics 24, 1996), w = 1.5 σ₁ n^(−1/9). Mapping before reflecting is due to Marron and Ruppert, "Transformations to
reduce boundary bias in kernel density estimation", JRSS B 56 (1994). Where a density rises so fast from its end that
it may begin at 0 there are no images: kernels that reach beyond it are cut off.

On a circle the images are the samples one period further, or some.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..arrays import Array
from ..messages import brief
from .maps import Table, quartiles


class End(NamedTuple):
    """An end of a column, in data units: where, and b and w of the map there; b is NaN where it has no images."""

    at: float
    rate: float
    width: float

    @classmethod
    def fit(cls, at: float, distances: Array, weights: Array, width: float) -> End:
        """From the samples' distances (n,) from it, and their weights."""
        near, least, steepest = (distances < width) & (weights > 0.0), 0.0, math.nan
        if len(values := np.unique(distances[near])) < 5:  # rounding leaves no slope
            return cls(at, 0.0, width)
        if weights[distances == 0.0].sum() > 4.0 / len(values) * weights[near].sum():  # an atom, no part of a slope
            near, least, steepest = near & (distances > 0.0), 0.5 * values[1], -0.8 / width
        mean = (float(weights[near] @ distances[near] / weights[near].sum()) - least) / width
        low, high = -20.0, 20.0  # of b w, between which the mean of exp(−b t) on [0, w] falls
        for _ in range(60):
            rate = 0.5 * (low + high)
            over = (0.5 - rate / 12.0 if abs(rate) < 1e-4 else 1.0 / rate - 1.0 / math.expm1(rate)) > mean
            low, high = (rate, high) if over else (low, rate)
        return cls(at, steepest if low < -0.8 else low / width, width)


class Edges(NamedTuple):
    """T of a column with an end below, above, or both."""

    low: End | None
    high: End | None
    table: Table  # in data units

    @property
    def name(self) -> str:
        low, high = (("∞" if end is None else f"{end.at:g}") for end in (self.low, self.high))
        return f"support ({'−' * (self.low is None)}{low}, {high})"

    @classmethod
    def from_saved(cls, ends: list[Any]) -> Edges:
        """Return what :meth:`to_saved` described; ValueError where that cannot be right."""
        found: list[End | None] = []
        for end in ends:
            match end:
                case None:
                    found.append(None)
                case [float(at), None | float() as rate, float(width)] if math.isfinite(at) and 0.0 < width < math.inf:
                    rate = math.nan if rate is None else min(max(rate, -20.0 / width), 20.0 / width)
                    found.append(End(at, rate, width))
        if len(found) != 2 or found == [None, None] or (found[0] and found[1] and not found[0].at < found[1].at):
            raise ValueError("its support cannot be right")
        return cls.of(*found)

    @classmethod
    def of(cls, low: End | None, high: End | None) -> Edges:
        both = [(end, sign) for end, sign in ((low, 1.0), (high, -1.0)) if end is not None]
        half = 0.5 * high.at - 0.5 * low.at if low and high else math.inf
        at = np.unique([end.at + sign * min(8.0 * end.width, half) * np.arange(401) / 400 for end, sign in both])
        table = Table.of(at, *_bends(low, high, at))
        return cls(low, high, table._replace(values=table.values + at[0]))

    @property
    def outer(self) -> tuple[float, float]:
        """Where x ends; infinite where it does not."""
        return (self.low.at if self.low else -math.inf), (self.high.at if self.high else math.inf)

    @property
    def ends(self) -> tuple[float, float]:
        """Where z ends; infinite where it does not."""
        values = self.table.values if self.bent else self.table.at
        return (values[0] if self.low else -math.inf), (values[-1] if self.high else math.inf)

    @property
    def bent(self) -> bool:
        """Whether T(x) is not x."""
        return bool(self.table.logs.any())

    def forward(self, x: Array) -> Array:
        z, (least, most) = self.table.placed(x)[0] if self.bent else x, self.outer
        return np.where(x < least, -math.inf, np.where(x > most, math.inf, z))

    def inverse(self, z: Array) -> Array:
        return np.clip(self.table.inverse(z) if self.bent else z, *self.outer)

    def log_jacobian(self, x: Array) -> Array:
        return _bends(self.low, self.high, x)[0]

    def slope(self, x: Array) -> Array:
        return _bends(self.low, self.high, x)[1]


def _bends(low: End | None, high: End | None, x: Array) -> tuple[Array, Array]:
    """log T′ at x (k,) and its derivative, 0 beyond eight widths; for points the formula is faster than the table."""
    logs, turns = np.zeros((2, len(x)))
    for end, sign in ((low, 1.0), (high, -1.0)):
        if end is not None and abs(end.rate) > 0.0:
            t = np.clip(sign * (x - end.at) / end.width, 0.0, 8.0)
            falls = np.where(t < 7.99, end.rate * np.exp(-0.5 * t * t), 0.0)
            logs -= end.width * t * falls
            turns -= sign * (1.0 - t * t) * falls
    return logs, turns


class Circle(NamedTuple):
    """Values round a circle: z is how far x is round from a start, where samples are rarest."""

    period: float
    start: float = 0.0

    @classmethod
    def fit(cls, period: float, x: Array) -> Circle:
        """The start is in the middle of the widest gap between samples (n,)."""
        ordered = np.sort(np.mod(x, period))
        gaps = np.diff(ordered, append=ordered[0] + period)
        k = np.argmax(gaps)
        return cls(period, float(np.mod(ordered[k] + 0.5 * gaps[k], period)))

    @property
    def name(self) -> str:
        return f"circle of {self.period:g}"

    @property
    def ends(self) -> tuple[float, float]:
        return 0.0, self.period

    def forward(self, x: Array) -> Array:
        return np.mod(x - self.start, self.period)

    def inverse(self, z: Array) -> Array:
        return np.mod(z + self.start, self.period)

    def log_jacobian(self, x: Array) -> Array:
        return np.zeros(len(x))


def is_support(value: Any) -> bool:
    """Whether a value is the support of one column."""
    pair = isinstance(value, Sequence) and not isinstance(value, str) and len(value) == 2
    return pair and all(one is None or isinstance(one, float | int | str | np.number) for one in value)


def check_support(value: Any) -> Any:
    """Return ``support=`` with numbers as floats; TypeError or ValueError for what cannot be one."""
    if value is None or is_support(value):
        return _checked(value)
    if isinstance(value, Mapping):
        return {key: _checked(one) for key, one in value.items()}
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise TypeError(f"support is {brief(value)}; {_PASS}")
    return [_checked(one) for one in value]


_PASS = (
    "pass for each column None, (low, high) with None for an open end, or ('circular', period): a sequence, or a dict "
    "by column"
)


def _checked(one: Any) -> tuple[Any, Any] | None:
    if one is None:
        return None
    if not is_support(one):
        raise TypeError(f"support has {brief(one)}; {_PASS}")
    low, high = one
    if isinstance(low, str):
        if low == "circular" and high is not None and 0.0 < high < math.inf:
            return low, float(high)
    elif not isinstance(high, str):
        below, above = (None if x is None or math.isinf(x) else float(x) for x in one)
        if below is None or above is None or below < above:
            return below, above
    raise ValueError(f"support has {brief(one)}; {_PASS}")


def fit_ends(low: float | None, high: float | None, column: Array, weights: Array, what: str) -> Edges:
    """The map of a column (n,) whose values lie between two ends. One end may be None."""
    outside = (column < (-math.inf if low is None else low)) | (column > (math.inf if high is None else high))
    refuse(outside, column, f"support: {what} has", f"outside of ({low}, {high})", "wider ends, or drop them")
    column, weights = column[weights > 0.0], weights[weights > 0.0]
    size = float(np.ptp(column)) or 1.0  # squares of data in far units overflow
    (first, _, third), std = quartiles((column - column[0]) / size, weights)
    spread = size * (min(std, (third - first) / 1.34) or std)
    width = 1.5 * spread * float(weights @ weights) ** (1.0 / 9.0) or size  # of equal samples any: no slope is fitted
    if low is not None and high is not None:
        width = min(width, 0.5 * (high - low))
    signs = ((low, 1.0), (high, -1.0))
    if not spread:
        return Edges.of(*(None if at is None else End(at, 0.0, width) for at, _ in signs))
    return Edges.of(*(None if at is None else End.fit(at, sign * (column - at), weights, width) for at, sign in signs))


def refuse(wrong: Array, column: Array, has: str, why: str, instead: str) -> None:
    """Raise ValueError that names the rows where a column is ``wrong``, (n,), if there are any."""
    if wrong.any():
        rows = np.flatnonzero(wrong)
        listed = ", ".join(map(str, rows[:3])) + (" …" if len(rows) > 3 else "")
        such = f"{len(rows)} such in rows {listed}"
        raise ValueError(f"{has} {column[rows[0]]:.6g} in row {rows[0]}, {why}, {such}; pass {instead}")


def images(z: Array, maps: Sequence[Any], reach: Array) -> tuple[Array, Array]:
    """Samples z (n, d), then their images within ``reach`` (d,) of an end: (k, d), and whose each is, (k,)."""
    which, total, most = np.arange(len(z)), len(z), 20 * len(z) + 1_000_000
    for j, one in enumerate(maps):
        if not isinstance(one, Edges | Circle):
            continue
        (low, high), column, more = one.ends, z[:, j], []
        for k in _turns(one, reach[j]):
            image = k[0] * column + k[1]
            near = (image > low - reach[j]) & (image < high + reach[j])
            if (total := total + int(np.count_nonzero(near))) > most:
                instead = "pass coordinates='logit' or 'log' for some of them instead, or a smaller bandwidth"
                raise ValueError(f"support of so many columns makes more than {most} images; {instead}")
            more.append((which[near], np.where(np.arange(z.shape[1]) == j, image[near, None], z[near])))
        which, z = np.concatenate([which, *(a for a, _ in more)]), np.concatenate([z, *(b for _, b in more)])
    return z, which


def _turns(one: Edges | Circle, reach: float) -> list[tuple[float, float]]:
    """The images of a value v as a v + b: (a, b) of each."""
    low, high = one.ends
    if isinstance(one, Circle):
        most = math.ceil(reach / one.period)
        return [(1.0, k * one.period) for k in range(-most, most + 1) if k]
    below, above = (end is not None and not math.isnan(end.rate) for end in (one.low, one.high))
    if below and above:
        length = high - low
        most = math.ceil(reach / (2.0 * length)) + 1
        shifted = [(1.0, 2.0 * k * length) for k in range(-most, most + 1) if k]
        return shifted + [(-1.0, 2.0 * low + 2.0 * k * length) for k in range(-most, most + 2)]
    return [(-1.0, 2.0 * low)] * below + [(-1.0, 2.0 * high)] * above
