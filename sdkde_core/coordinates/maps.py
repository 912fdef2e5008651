"""Monotone maps of one column, z = T(x), each with its inverse, log T′ and the derivative of that.

A density q of z is the density q(T(x)) T′(x) of x. ``forward`` is −inf below the values that T takes, and inf above.
Values x, z and results are (k,), float64, on the host. Maps of one kind are also one map of several columns (k, g), see
:func:`joined`, wherever its numbers are; these have no ``inverse``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
from array_api_compat import device

from ..arrays import Array, array_namespace
from ..bandwidth.isj import improved_sheather_jones
from ..bandwidth.rounding import spread_within, units_of


class Formula(NamedTuple):
    """T(x), its inverse, log T′ and the derivative of that, by two numbers; all but the inverse get its library."""

    forward: Callable[..., Array]
    inverse: Callable[..., Array]
    log_jacobian: Callable[..., Array]
    slope: Callable[..., Array]


FORMULAS = {
    "identity": Formula(  # (x − a) / b; a is 0 and b is 1 but in a stack, where columns have units of their own
        lambda xp, x, a, b: (x - a) / b,
        lambda z, a, b: a + b * z,
        lambda xp, x, a, b: -xp.log(b + 0.0 * x),
        lambda xp, x, a, b: 0.0 * x,
    ),
    "log": Formula(  # b log(b (x − a)): from a on, or with b = −1 up to a
        lambda xp, x, a, b: xp.where(b * (x - a) <= 0.0, -b * math.inf, b * xp.log(b * (x - a))),
        lambda z, a, b: _within(a + b * np.exp(b * z), z, a if b > 0 else -math.inf, math.inf if b > 0 else a),
        lambda xp, x, a, b: -xp.log(b * (x - a)),
        lambda xp, x, a, b: -1.0 / (x - a),
    ),
    "logit": Formula(  # between a and b
        lambda xp, x, a, b: xp.where(x <= a, -math.inf, xp.where(x >= b, math.inf, xp.log((x - a) / (b - x)))),
        lambda z, a, b: _within(a + (b - a) * np.exp(np.minimum(z, 0.0)) / (1.0 + np.exp(-abs(z))), z, a, b),
        lambda xp, x, a, b: xp.log(b - a + 0.0 * x) - xp.log(x - a) - xp.log(b - x),
        lambda xp, x, a, b: 1.0 / (b - x) - 1.0 / (x - a),
    ),
    "asinh": Formula(  # of (x − a) / b: linear near a, a logarithm of either sign far from it
        lambda xp, x, a, b: xp.asinh((x - a) / b),
        lambda z, a, b: a + b * np.sinh(z),
        lambda xp, x, a, b: -xp.log(xp.hypot(b + 0.0 * x, x - a)),
        lambda xp, x, a, b: ((a - x) / b) / (1.0 + ((x - a) / b) ** 2) / b,
    ),
}


class Closed(NamedTuple):
    """A map that is a formula, of that name; a and b are (g,) of several columns."""

    name: str
    a: Any = 0.0
    b: Any = 1.0

    @classmethod
    def fit(cls, name: str, x: Array, weights: Array) -> Closed:
        """Of samples (n,): asinh, and the identity ``"standard"``, have their median, and IQR / 1.34 or deviation."""
        if name not in ("asinh", "standard"):
            return cls(name)
        size = float(np.ptp(x)) or 1.0  # squares of data in far units overflow
        (low, centre, high), std = quartiles((x - x[0]) / size, weights)
        centre, scale = float(x[0]) + size * centre, size * ((high - low) / 1.34 or std)
        return cls(name.replace("standard", "identity"), centre, scale if 0.0 < scale < math.inf else 1.0)

    def forward(self, x: Array) -> Array:
        return FORMULAS[self.name].forward(array_namespace(x), x, self.a, self.b)

    def inverse(self, z: Array) -> Array:
        return FORMULAS[self.name].inverse(z, self.a, self.b)

    def log_jacobian(self, x: Array) -> Array:
        return FORMULAS[self.name].log_jacobian(array_namespace(x), x, self.a, self.b)

    def placed(self, x: Array) -> tuple[Array, Array]:
        return self.forward(x), self.log_jacobian(x)

    def slope(self, x: Array) -> Array:
        return FORMULAS[self.name].slope(array_namespace(x), x, self.a, self.b)


class NormalScores(NamedTuple):
    """T(x) = Φ⁻¹(F(u)), u the asinh of x, and F a distribution function of u that was estimated from samples.

    Its density is .97 of a kernel estimate, .02 of one four times as wide, and .01 of a normal density: T stays steep.
    """

    asinh: Closed
    table: Table  # T of u

    @property
    def name(self) -> str:
        return "normal-scores"

    @classmethod
    def fit(cls, x: Array, weights: Array) -> NormalScores:
        """Of samples (n,) with weights that sum to 1; equal ones are spread within their column's unit."""
        if len(np.unique(x)) < len(x) and (units := units_of(np.sort(x)[:, None])).any():
            x = spread_within(x[:, None], units, weights)[:, 0]
        asinh = Closed.fit("asinh", x, weights)
        u, n_eff = asinh.forward(x), 1.0 / float(weights @ weights)
        mean = float(weights @ u)
        std = math.sqrt(weights @ (u - mean) ** 2)
        span = float(np.ptp(u))
        h = (improved_sheather_jones(u, weights, n_eff) if span else None) or 0.9 * std * n_eff**-0.2
        h, broad = max(h, span / 1000.0) or 1.0, max(1.5 * std, span / 8.0) or 1.0
        low, width, bins = float(u.min()) - 6.0 * h, 0.25 * h, math.ceil(4.0 * span / h) + 50
        at = low + width * np.arange(bins)
        place = (u - low) / width
        left = np.minimum(place.astype(np.intp), bins - 2)
        mass = np.bincount(left, weights * (left + 1 - place), bins)
        mass += np.bincount(left + 1, weights * (place - left), bins)
        normal, away = NormalDist(), (at - mean) / broad
        (close, *cut), (wide, *lost) = _smoothed(mass, 4.0), _smoothed(mass, 16.0)
        density = (0.97 * close + 0.02 * wide) / width
        density += 0.01 / broad / math.sqrt(2.0 * math.pi) * np.exp(-0.5 * away**2)
        steps = 0.5 * width * (density[1:] + density[:-1])
        ends = [0.005 * math.erfc(t / math.sqrt(2.0)) for t in (-away[0], away[-1])]
        ends = [end + 0.97 * a + 0.02 * b for end, a, b in zip(ends, cut, lost)]
        below = np.cumsum(np.append(ends[0], steps))
        above = np.cumsum(np.append(ends[1], steps[::-1]))[::-1]
        total = below[-1] + ends[1]
        half = [normal.inv_cdf(float(p)) for p in np.minimum(below, above) / total]
        values = np.where(below < above, half, np.negative(half))
        logs = np.log(density / total) + 0.5 * values**2 + 0.5 * math.log(2.0 * math.pi)
        logs[[0, -1]] = np.maximum(logs[[0, -1]], -math.log(h))  # beyond the table no kernel is wider than h
        turns = np.gradient(logs, width)
        turns[[0, -1]] = 0.0
        table, middle = Table.of(at, logs, turns), int(np.argmin(abs(values)))
        return cls(asinh, table._replace(values=table.values - table.values[middle] + values[middle]))

    def forward(self, x: Array) -> Array:
        return self.placed(x)[0]

    def inverse(self, z: Array) -> Array:
        return self.asinh.inverse(self.table.inverse(z))

    def log_jacobian(self, x: Array) -> Array:
        return self.placed(x)[1]

    def placed(self, x: Array) -> tuple[Array, Array]:
        """z and log T′, by the same cells."""
        z, log_slope = self.table.placed(self.asinh.forward(x))
        return z, log_slope + self.asinh.log_jacobian(x)

    def slope(self, x: Array) -> Array:
        turn = self.table.turn(self.asinh.forward(x))
        return turn * array_namespace(x).exp(self.asinh.log_jacobian(x)) + self.asinh.slope(x)


class Table(NamedTuple):
    """T by its log derivative, a cubic between knots: T is the integral, by Gauss and Legendre's rule.

    So T is monotone and smooth whatever the knots have. Beyond the last knot it is a straight line.
    """

    at: Array  # (k,) knots u
    values: Array  # (k,) T there
    logs: Array  # (k,) log dT/du
    turns: Array  # (k,) its derivative
    ends: Any = (0, -1)  # the first and the last knot; (g,) each of several tables, one after the other

    @classmethod
    def of(cls, at: Array, logs: Array, turns: Array) -> Table:
        """The table that has 0 at the first knot."""
        made, cells = cls(at, np.zeros(len(at)), logs, turns), np.arange(len(at) - 1)
        return made._replace(values=np.append(0.0, np.cumsum(_integral(made._cubic(cells), np.ones(len(cells))))))

    def placed(self, u: Array) -> tuple[Array, Array]:
        """T and log dT/du."""
        xp, (cell, t, beyond) = array_namespace(u), self._cell(u)
        cubic, (low, high) = self._cubic(cell), (xp.exp(self.logs[end]) for end in self.ends)
        z = self.values[cell] + _integral(cubic, t) + beyond * xp.where(beyond > 0.0, high, low)
        return z, _polynomial(cubic, t)

    def inverse(self, z: Array) -> Array:
        cell = np.clip(np.searchsorted(self.values, z) - 1, 0, len(self.at) - 2)
        cubic, wanted = self._cubic(cell), z - self.values[cell]
        t = np.clip(wanted / (self.values[cell + 1] - self.values[cell]), 0.0, 1.0)
        for _ in range(40):  # Newton's steps within the cell
            step = (_integral(cubic, t) - wanted) * np.exp(-_polynomial(cubic, t)) / cubic[0]
            before, t = t, np.clip(t - step, 0.0, 1.0)
            if (abs(t - before) <= 1e-14).all():
                break
        u = self.at[cell] + cubic[0] * t
        for end, beyond in ((-1, z >= self.values[-1]), (0, z <= self.values[0])):
            u = np.where(beyond, self.at[end] + (z - self.values[end]) * math.exp(-self.logs[end]), u)
        return u

    def turn(self, u: Array) -> Array:
        """The derivative of log dT/du."""
        cell, t, beyond = self._cell(u)
        width, _, b, c, d = self._cubic(cell)
        return array_namespace(u).where(beyond == 0.0, b + t * (2.0 * c + 3.0 * t * d), 0.0) / width

    def _cell(self, u: Array) -> tuple[Array, Array, Array]:
        """The cell of each u, how much of it lies before u, and how far u is from all knots: 0 between the ends."""
        xp, at, (first, last) = array_namespace(u), self.at, (end % len(self.at) for end in self.ends)
        inside = xp.clip(u, at[first], at[last])
        with np.errstate(invalid="ignore"):  # NaN is in no cell
            cell = xp.astype((inside - at[first]) * ((last - first) / (at[last] - at[first])), xp.int64)
        cell = first + xp.clip(cell, 0, last - first - 1)
        if u.ndim == 1 and not ((at[cell] <= inside) & (inside <= at[cell + 1])).all():
            cell = np.clip(np.searchsorted(at, inside, side="right") - 1, 0, last - 1)  # knots of an end are not even
        return cell, (inside - at[cell]) / (at[cell + 1] - at[cell]), u - inside

    def _cubic(self, cell: Array) -> tuple[Array, ...]:
        """The widths of cells, and the coefficients of log dT/du by the part of a cell before u."""
        start, (width, rise) = self.logs[cell], (ends[cell + 1] - ends[cell] for ends in (self.at, self.logs))
        left, right = width * self.turns[cell], width * self.turns[cell + 1]
        return width, start, left, 3.0 * rise - 2.0 * left - right, left + right - 2.0 * rise


def _polynomial(cubic: tuple[Array, ...], t: Array) -> Array:
    _, a, b, c, d = cubic
    return a + t * (b + t * (c + t * d))


@functools.cache
def _nodes() -> tuple[list[float], ...]:
    """Five nodes and their shares: an eigenvalue problem, which takes longer than the sums."""
    return tuple(x.tolist() for x in np.polynomial.legendre.leggauss(5))


def _integral(cubic: tuple[Array, ...], t: Array) -> Array:
    """That of dT/du, from the first knot of a cell on."""
    exp = array_namespace(t).exp
    terms = (share * exp(_polynomial(cubic, 0.5 * (1.0 + node) * t)) for node, share in zip(*_nodes()))
    return 0.5 * t * cubic[0] * sum(terms)


def quartiles(x: Array, weights: Array) -> tuple[list[float], float]:
    """The quartiles of samples (n,) with weights that sum to 1, and their standard deviation."""
    std = math.sqrt(weights @ np.square(x - weights @ x))
    if (weights == weights[0]).all():  # the same, without sorting
        return np.quantile(x, [0.25, 0.5, 0.75], method="hazen").tolist(), std
    order = np.lexsort((weights, x))
    reached = np.cumsum(weights[order]) - 0.5 * weights[order]
    return np.interp([0.25, 0.5, 0.75], reached, x[order]).tolist(), std


def _within(x: Array, z: Array, low: float, high: float) -> Array:
    """Values x. Those of finite z are rounded to what lies between two ends."""
    return np.where(np.isfinite(z), np.clip(x, math.nextafter(low, math.inf), math.nextafter(high, -math.inf)), x)


def _smoothed(mass: Array, h: float) -> tuple[Array, float, float]:
    """Masses on a grid convolved with a normal density that is h steps wide; the masses before and beyond the grid."""
    reach = math.ceil(8.0 * h)
    kernel = np.exp(-0.5 * (np.arange(-reach, reach + 1) / h) ** 2)
    whole, stop = np.convolve(mass, kernel / kernel.sum()), reach + len(mass)
    return whole[reach:stop], whole[:reach].sum() + 0.5 * whole[reach], whole[stop:].sum() + 0.5 * whole[stop - 1]


def joined(maps: Sequence[Any]) -> Any:
    """Return formulas of one name, or normal scores, as one map of several columns (k, g)."""
    if isinstance(maps[0], Closed):
        return Closed(maps[0].name, *(np.array(numbers) for numbers in list(zip(*maps))[1:]))
    tables = [one.table for one in maps]
    stops = np.cumsum([len(one.at) for one in tables])
    ends = np.append(0, stops[:-1]), stops - 1
    at, values, logs, turns = map(np.concatenate, list(zip(*tables))[:4])
    return NormalScores(joined([one.asinh for one in maps]), Table(at, values, logs, turns, ends))


def sent(one: Any, like: Any) -> Any:
    """Return a map, or what a tuple has, where ``like`` is."""
    if isinstance(one, np.ndarray):
        return array_namespace(like).asarray(one, device=device(like))
    if not isinstance(one, tuple | list):
        return one
    parts = [sent(part, like) for part in one]
    return type(one)(*parts) if hasattr(one, "_fields") else type(one)(parts)
