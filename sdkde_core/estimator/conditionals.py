"""Conditional densities at many values at once: their means, quantiles and densities, row by row.

Given rows v_i each kernel j has the share r_ij ∝ w_j N(v_i; x_j, H) of the dimensions given, and keeps its place in the
others but for the origin, which moves with v_i. So a mean is a sum over kernels, and a distribution function too, whose
root is the quantile. These sums are of other numbers than a backend has. They are NumPy's, in threads of the host.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ..arrays import Array, numbers, public, quiet
from ..choice.hardware import cpu_threads
from ..engine.threads import map_threads
from ..messages import brief
from .density import normal_distribution, widths
from .mapped import leaves, unwrapped
from .mixture import check_positive, indices, split
from .plan import FARTHEST

if TYPE_CHECKING:
    from .prepared import Prepared


class Conditionals:
    """The densities of the other dimensions, one for every row of values given: of ``Prepared.conditional``.

    Attributes
    ----------
    density : Prepared
        Of all dimensions.
    given : (m, k) array
        The values, in the order of the mapping.

    Examples
    --------
    >>> import numpy as np, sdkde_core
    >>> rng = np.random.default_rng(0)
    >>> x = rng.normal(size=2000)
    >>> joint = sdkde_core.prepare(np.stack([x, 2.0 * x + 0.1 * rng.normal(size=2000)], axis=1))
    >>> joint.conditional({0: np.array([-1.0, 1.0])}).quantile(0.5).round(1).tolist()
    [-2.0, 2.0]
    """

    def __init__(self, density: Prepared, given: Mapping[Any, Any]) -> None:
        fitted = unwrapped(density._fitted)
        check_positive(fitted, "has no conditional density")
        self.density, self._first = density, indices("given", fitted, list(given))
        self._others = [j for j in range(density.n_dimensions) if j not in self._first]
        if not self._others:
            raise ValueError(f"given has all {density.n_dimensions} dimensions; leave out those the densities are of")
        columns = [numbers(f"given[{name!r}]", value) for name, value in given.items()]
        try:
            self.given = np.stack(np.broadcast_arrays(*columns), axis=1)
        except ValueError:
            shapes = ", ".join(str(column.shape) for column in columns)
            raise ValueError(f"given has values of shapes {shapes}; pass numbers, and (m,) arrays of one m") from None
        if self.given.ndim != 2 or not np.isfinite(self.given).all():
            raise ValueError(f"given is {brief(dict(given))}; pass finite values, in arrays of shape (m,)")
        maps = None if fitted.coordinates is None else fitted.coordinates.kept(self._first)
        outside = [] if maps is None else ~np.isfinite(maps.forward(self.given)).all(axis=1)
        if np.any(outside):
            row = int(np.argmax(outside))
            raise ValueError(f"given has {self.given[row].tolist()} in row {row}, where the density is 0; leave it out")

    def __len__(self) -> int:
        return len(self.given)

    def __repr__(self) -> str:
        return f"Conditionals({len(self)} × {len(self._others)} of {self.density!r})"

    def __getitem__(self, row: int) -> Prepared:
        return self.density.conditional(dict(zip(self._first, self.given[row].tolist())))

    @public
    def mean(self) -> Array:
        """Return the means (m,) where one dimension is left, the regression curve; (m, d − k) where more are.

        ValueError in other coordinates, where medians have a closed form: ``quantile(0.5)``.
        """

        def mixed(parts: list[_Kernels]) -> Array:
            logs = np.stack([part.log for part in parts])  # (e, b)
            return np.einsum("eb,ebl->bl", np.exp(logs - np.logaddexp.reduce(logs)), [part.mean() for part in parts])

        found = self._blocks(mixed, len(self._others))
        return found[:, 0] if len(self._others) == 1 else found

    @public
    def quantile(self, q: Any) -> Array:
        """Return the quantiles of the one dimension that is left: (m,) for a number, (m, k) for k of them.

        Needs SciPy. ValueError where more are left: take ``density.marginal`` of one and those given first.
        """
        values = numbers("q", q)
        if not ((values > 0) & (values < 1)).all() or values.ndim > 1:
            raise ValueError(f"q is {brief(q)}; pass probabilities between 0 and 1")
        maps = unwrapped(self.density._fitted).coordinates
        if len(self._others) > 1 or (maps is not None and maps.circular[self._others].any()):
            instead = "begin with density.marginal([...]) of those given and one other"
            raise ValueError(f"quantiles are of one dimension, and of none that goes round; {instead}")
        levels = values.ravel()
        found = self._blocks(lambda parts: np.stack([_quantile(parts, q) for q in levels], axis=1), len(levels))
        return found.reshape(len(self), *values.shape)

    @public
    def logpdf(self, y: Any) -> Any:
        """Return the log density of row i at ``y``'s row i (m,): of (m, d − k) values, or (m,) where one is left."""
        rows = numbers("y", y)
        rows = rows[:, None] if rows.ndim == 1 and len(self._others) == 1 else rows
        if rows.shape != (len(self), len(self._others)):
            raise ValueError(f"y has shape {rows.shape}; pass a row for each of the {len(self)} that are given")
        points = np.empty((len(self), self.density.n_dimensions))
        points[:, self._first], points[:, self._others] = self.given, rows
        held = self.density.marginal(self._first).estimate(self.given, log=True)
        return self.density.estimate(points, log=True) - held

    def pdf(self, y: Any) -> Any:
        """Return the density of row i at ``y``'s row i (m,); see :meth:`logpdf`."""
        return np.exp(self.logpdf(y))

    def _blocks(self, compute: Callable[[list[_Kernels]], Array], width: int) -> Array:
        """Apply ``compute`` to the parts' kernels by blocks of rows; return (m, width)."""
        fitted = self.density._fitted.current
        parts = [(part.log_share, part.fitted.current) for part in leaves(fitted)] or [(0.0, fitted)]
        size = max(1, (1 << 21) // max(part.problem.n for _, part in parts))

        @quiet
        def block(start: int) -> Array:
            rows = self.given[start : start + size]
            return compute([_Kernels(part, log, self._first, self._others, rows) for log, part in parts])

        return np.concatenate([np.empty((0, width)), *map_threads(block, range(0, len(self), size), cpu_threads())])


class _Kernels:
    """The kernels of one part for some rows (b, k) of values given, ``log`` (b,): the log of the part's density there,
    with its share, and ``shares`` (b, n) of its kernels, which sum to 1.
    """

    def __init__(self, fitted: Any, log_share: float, first: list[int], others: list[int], x: Array) -> None:
        maps, inner = fitted.coordinates, fitted if fitted.coordinates is None else fitted.first.current
        near, points, held, kept, slope = split(inner, first)
        _, log_weights, self.scales, centre = inner.on_host
        value = held.whiten(x if maps is None else maps.kept(first).forward(x), centre[first])  # (b, k)
        if not (abs(value) < FARTHEST).all():
            raise ValueError("given has values too far from the samples: squares of distances overflow")
        logs = log_weights - len(first) * np.log(self.scales)
        logs = logs - 0.5 * sum(((near[:, j] - value[:, j, None]) / self.scales) ** 2 for j in range(len(first)))
        top = logs.max(axis=1, keepdims=True)
        self.shares = np.exp(logs - top)
        total = self.shares.sum(axis=1, keepdims=True)
        self.shares /= total
        self.log = log_share + (top + np.log(total))[:, 0] + held.log_constant
        self.places, self.moved = centre[others] + kept.stretch(points), value @ slope.T  # (n, l), (b, l)
        self.width = widths(kept)[0][0] * self.scales  # of a single one
        self.maps: Any = None if maps is None else maps.kept(others)
        self.low, self.high = -math.inf, math.inf
        if maps is not None:
            if (ends := maps.kept(others).ends) is not None:
                self.low, self.high = ends[:, 0]
            self.log = self.log + maps.kept(first).log_slopes(x).sum(axis=1) - fitted.log_mass
        if self.low > -math.inf or self.high < math.inf:  # kernels count by what they have between the ends
            sides = ((end - self.places[:, 0]) / self.width for end in (self.low, self.high))
            self.below_low, above = map(normal_distribution(), sides)
            self.inside = np.maximum(above - self.below_low, 0.0)
            self.shares = self.shares * self.inside
            total = self.shares.sum(axis=1, keepdims=True)
            self.shares /= total
            self.log = self.log + np.log(total[:, 0])

    def mean(self) -> Array:
        if self.maps is not None:
            instead = "take quantile(0.5), or the mean() of each row's density, conditionals[i]"
            where = f"in coordinates or with supports ({self.maps})"
            raise ValueError(f"{where} conditional means have no closed form; {instead}")
        return self.moved + self.shares @ self.places

    def quantile(self, q: float) -> Array:
        """The quantile of each row (b,), from that of the kernels' places on."""
        reach, moved = 40.0 * self.width.max(), self.moved[:, 0]
        ends = self.places.min() - reach + moved, self.places.max() + reach + moved
        low, high = (np.clip(end, self.low, self.high) for end in ends)
        order = np.argsort(self.places[:, 0])
        at = np.count_nonzero(np.cumsum(self.shares[:, order], axis=1) < q, axis=1)
        start = np.clip(self.places[order[np.minimum(at, len(order) - 1)], 0] + moved, low, high)
        z = root(self.below, q, low, high, start)
        return z if self.maps is None else self.maps.inverse(z[:, None])[:, 0]

    def reached(self, x: Array, rows: Array) -> tuple[Array, Array]:
        """The distribution function of some rows at x, (r,), and the density."""
        if self.maps is None:
            return self.below(x, rows)
        below, density = self.below(self.maps.forward(x[:, None])[:, 0], rows)
        return below, density * np.exp(self.maps.log_slopes(x[:, None])[:, 0])

    def below(self, z: Array, rows: Array) -> tuple[Array, Array]:
        t = ((z - self.moved[rows, 0])[:, None] - self.places[:, 0]) / self.width
        found, width, shares = normal_distribution()(t), self.width, self.shares[rows]
        if self.low > -math.inf or self.high < math.inf:
            inside = np.where(self.inside > 0.0, self.inside, 1.0)
            found, width = np.clip((found - self.below_low) / inside, 0.0, 1.0), width * inside
        density = np.exp(-0.5 * t * t) / (width * math.sqrt(2.0 * math.pi))
        return np.einsum("bn,bn->b", shares, found), np.einsum("bn,bn->b", shares, density)


def _quantile(parts: list[_Kernels], q: float) -> Array:
    """The quantile of each row (b,): of several parts between theirs."""
    each = np.stack([part.quantile(q) for part in parts])
    if len(parts) == 1:
        return each[0]

    def reached(x: Array, rows: Array) -> tuple[Array, Array]:
        logs = np.stack([part.log[rows] for part in parts])
        shares, found = np.exp(logs - np.logaddexp.reduce(logs)), [part.reached(x, rows) for part in parts]
        below, density = (shares * np.stack(terms) for terms in zip(*found))
        return below.sum(axis=0), density.sum(axis=0)

    low, high = each.min(axis=0), each.max(axis=0)
    return root(reached, q, low, high, 0.5 * low + 0.5 * high)


def root(function: Any, q: Any, low: Array, high: Array, x: Array) -> Array:
    """Where distribution functions of rows (b,) are q, a number or (b,): by Newton's steps from x, else by halves.

    ``low`` and ``high`` are bounds. ``function``: of x (r,) and rows (r,) to the values and the densities.
    """
    rows, x, q = np.arange(len(x)), x.copy(), np.broadcast_to(q, x.shape)
    for _ in range(200):
        below, density = function(x[rows], rows)
        at, error = x[rows], below - q[rows]
        low[rows], high[rows] = np.where(error < 0.0, at, low[rows]), np.where(error < 0.0, high[rows], at)
        tail, share = (np.where(q[rows] < 0.5, x, 1.0 - x) for x in (below, q[rows]))  # whose logs are nearly parabolas
        tried = at - np.where(q[rows] < 0.5, 1.0, -1.0) * tail * np.log(tail / share) / density
        between = (tried > low[rows]) & (tried < high[rows])
        x[rows] = np.where(between, tried, 0.5 * low[rows] + 0.5 * high[rows])
        done = (abs(error) <= 1e-12 * np.minimum(q, 1.0 - q)[rows]) | (x[rows] == at)
        x[rows[done]] = at[done]
        rows = rows[~done]
        if not rows.size:
            break
    return x
