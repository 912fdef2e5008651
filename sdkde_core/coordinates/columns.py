"""The maps of all columns of a data set, from what the user asks for."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, get_args

import numpy as np

from ..arrays import Array, array_namespace
from ..engine.forks import cached_property
from ..engine.launches import PerStream
from ..messages import brief, did_you_mean
from .maps import FORMULAS, Closed, NormalScores, Table, joined, sent
from .support import Circle, Edges, fit_ends, is_support, refuse

Name = Literal["identity", "log", "logit", "asinh", "normal-scores"]
NAMES: tuple[str, ...] = get_args(Name)
_METHODS = ("forward", "inverse", "log_jacobian")  # what a user's own map has


# A user's own map of one column, see docs/coordinates.md.
class Map(Protocol):
    def forward(self, x: Any, /) -> Any: ...
    def inverse(self, z: Any, /) -> Any: ...
    def log_jacobian(self, x: Any, /) -> Any: ...


OfColumns: TypeAlias = Name | Map | Sequence[Name | Map | None] | Mapping[Any, Name | Map | None]


class _Coordinates(NamedTuple):
    maps: tuple[Any, ...]
    names: tuple[str, ...] = ()


class Coordinates(_Coordinates):
    """z = T(x), a map for each column; ``names`` of the columns, or empty. Points are (k, d), float64, on the host."""

    def __reduce__(self) -> Any:
        return Coordinates, (self.maps, self.names)  # not what a GPU has

    @property
    def anywhere(self) -> bool:
        """Whether points may be PyTorch's too."""
        return all(isinstance(one, Closed | NormalScores) for one in self.maps)

    @cached_property
    def _kinds(self) -> list[tuple[Any, Any]]:
        """Columns whose maps are of one kind, and a map of all these; another map is of one column j."""
        kinds: dict[Any, list[int]] = {}
        for j, one in enumerate(self.maps):
            kinds.setdefault(one.name if isinstance(one, Closed | NormalScores) else j, []).append(j)
        if len(kinds) == 1 and self.anywhere:
            return [(slice(None), joined(self.maps))]
        joint = {name: joined([self.maps[j] for j in k]) for name, k in kinds.items() if isinstance(name, str)}
        return [(np.array(k), joint[name]) if name in joint else (name, self.maps[name]) for name, k in kinds.items()]

    @cached_property
    def _there(self) -> PerStream:
        return PerStream()

    def _at(self, x: Any) -> Any:
        if isinstance(x, np.ndarray):
            return self._kinds if len(x) else ()  # users' maps need not take none
        return self._there.get(x.device, lambda: sent(self._kinds, x), x)

    def placed(self, x: Any) -> tuple[Any, Any]:
        """Return :meth:`forward` and :meth:`log_slopes`; the latter is NaN where a user's map does not take x."""
        xp = array_namespace(x)
        infinite, z, logs = xp.isinf(x), xp.empty_like(x), xp.full_like(x, math.nan)
        finite = xp.where(infinite, math.nan, x)
        for columns, one in self._at(x):
            if not isinstance(columns, int):
                z[:, columns], logs[:, columns] = one.placed(finite[:, columns])
                continue
            z[:, columns] = one.forward(finite[:, columns])
            if (taken := np.isfinite(z[:, columns])).any():
                logs[taken, columns] = one.log_jacobian(x[taken, columns])
        return xp.where(infinite, x, z), xp.where(infinite, -math.inf, logs)

    def forward(self, x: Array) -> Array:
        """z (k, d): −inf or inf in columns where x is below or above what the map takes; infinite x stays."""
        return self.placed(x)[0]

    def inverse(self, z: Array) -> Array:
        return np.stack([one.inverse(z[:, j]) for j, one in enumerate(self.maps)], axis=1)

    def log_slopes(self, x: Array) -> Array:
        """log T_j′(x_j), (k, d), whose sum over columns is the log Jacobian."""
        return self.placed(x)[1]

    def turns(self, x: Any) -> Any:
        """The derivatives of :meth:`log_slopes`, (k, d); by differences for a user's map that has no ``slope``."""
        found = array_namespace(x).empty_like(x)
        for columns, one in self._at(x):
            found[:, columns] = getattr(one, "slope", partial(_slope, one))(x[:, columns])
        return found

    @property
    def ends(self) -> Array | None:
        """Between what z lies, (2, d), infinite where a column has no support; None where none has."""
        ended = [one.ends if isinstance(one, Edges | Circle) else (-math.inf, math.inf) for one in self.maps]
        return np.array(ended).T if np.isfinite(ended).any() else None

    @property
    def circular(self) -> Array:
        """Which columns go round, (d,)."""
        return np.array([isinstance(one, Circle) for one in self.maps])

    def arcs(self, low: Array, high: Array) -> tuple[Array, Array]:
        """Corners of a box (d,); of circles that go all round it are infinite."""
        whole = [isinstance(one, Circle) and b - a >= one.period for one, a, b in zip(self.maps, low, high)]
        return np.where(whole, -math.inf, low), np.where(whole, math.inf, high)

    def within(self, x: Array) -> Array:
        """Points x (k, d). Those beyond an end are moved to it."""
        outer = [one.outer if isinstance(one, Edges) else (-math.inf, math.inf) for one in self.maps]
        return np.clip(x, *np.array(outer).T)

    def folded(self, z: Array) -> Array:
        """Points z (k, d) that have moved beyond an end, reflected or taken round, so that none is outside."""
        z = z.copy()
        for j, one in enumerate(self.maps):
            if isinstance(one, Circle):
                z[:, j] = np.mod(z[:, j], one.period)
            elif isinstance(one, Edges):
                low, high = one.ends
                column = np.where(z[:, j] < low, 2.0 * low - z[:, j], z[:, j])
                z[:, j] = np.clip(np.where(column > high, 2.0 * high - column, column), low, high)
        return z

    def shortest(self, away: Array) -> Array:
        """Differences (d,), of circles the way round that is shorter."""
        pairs = zip(self.maps, away)
        return np.array([math.remainder(v, one.period) if isinstance(one, Circle) else v for one, v in pairs])

    def kept(self, dims: Sequence[int]) -> Coordinates:
        """The maps of some of the columns, in that order."""
        return Coordinates(tuple(self.maps[k] for k in dims), tuple(self.names[k] for k in dims) if self.names else ())

    def to_saved(self) -> tuple[list[Any], dict[str, Array]]:
        """What a file has of them, see :mod:`sdkde_core.estimator.saved`; TypeError for a map of the user's."""
        listed, arrays = list[Any](), dict[str, Array]()
        for j, one in enumerate(self.maps):
            if not isinstance(one, Closed | NormalScores | Edges | Circle):
                raise TypeError(f"coordinates: {brief(one)} is a map of yours, which no file holds; pickle the density")
            match one:
                case Circle():
                    listed.append(["circle", *one])
                case Edges():  # of each end where, b (None where there are no images) and w
                    sides = [end and [end.at, None if math.isnan(end.rate) else end.rate, end.width] for end in one[:2]]
                    listed.append(["ends", *sides])
                case NormalScores(asinh, table):
                    listed.append([one.name, *asinh[1:]])
                    arrays[f"map {j}"] = np.stack(table[:4])
                case _:
                    listed.append(list(one))
        return listed, arrays

    @classmethod
    def from_saved(cls, listed: Any, arrays: Mapping[str, Array], d: int, names: tuple[str, ...]) -> Coordinates:
        """Return what :meth:`to_saved` described; ValueError where that cannot be right."""
        maps = list[Any]()
        for j, one in enumerate(listed if isinstance(listed, list) else ()):
            match one:
                case [str(name), float(a), float(b)] if {"logit": b > a, "log": abs(b) == 1.0}.get(
                    name, name in FORMULAS and b > 0.0
                ):
                    maps.append(Closed(name, a, b))
                case ["circle", float(a), float(b)] if 0.0 <= b < a < math.inf:
                    maps.append(Circle(a, b))
                case ["ends", *ends]:
                    maps.append(Edges.from_saved(ends))
                case ["normal-scores", float(a), float(b)] if b > 0.0:
                    knots = arrays.get(f"map {j}", np.empty(0))
                    right = knots.dtype == float and knots.ndim == 2 and len(knots) == 4 and knots.shape[1] > 1
                    right = right and np.isfinite(knots).all() and knots[0, 0] < knots[0, -1]
                    right = right and bool((np.diff(knots[1]) >= 0.0).all())  # in far gaps it rises by less than 1e-16
                    if right and np.allclose(np.diff(knots[0]), np.diff(knots[0]).mean(), rtol=1e-3, atol=0.0):
                        maps.append(NormalScores(Closed("asinh", a, b), Table(*knots)))
        if len(maps) != d:
            raise ValueError("its coordinates cannot be right")
        return cls(tuple(maps), names)

    def __str__(self) -> str:
        labels = [getattr(one, "name", type(one).__name__) for one in self.maps]
        if len(set(labels)) == 1:
            return labels[0]
        names = self.names or [f"column {j}" for j in range(len(labels))]
        return ", ".join(f"{label} of {name}" for name, label in zip(names, labels) if label != "identity")


def _slope(one: Any, x: Array) -> Array:
    step = 1e-5 * (np.minimum(abs(x), np.ptp(x) or math.inf) + 1e-3 * (np.ptp(x) or 1.0))
    return (one.log_jacobian(x + step) - one.log_jacobian(x - step)) / (2.0 * step)


def check(value: Any) -> None:
    """Raise TypeError or ValueError for what cannot be coordinates, as far as that needs no data."""
    if isinstance(value, str):
        if value not in NAMES:
            hint = did_you_mean(value, NAMES)
            raise ValueError(f"coordinates is {value!r}; pass one of {', '.join(map(repr, NAMES))}, or a map{hint}")
    elif isinstance(value, Mapping | Sequence) and not _is_map(value):
        for one in value.values() if isinstance(value, Mapping) else value:
            check(one)
    elif value is not None and not _is_map(value):
        own = f"an object with {', '.join(_METHODS)}"
        instead = f"a name, {own}, a sequence with one of these for every column, or a dict by column"
        raise TypeError(f"coordinates is {brief(value)}; pass {instead}")


def fit(value: Any, x: Array, weights: Array, names: tuple[str, ...] = (), support: Any = None) -> Coordinates:
    """The maps for samples x (n, d) with weights (n,) that sum to 1; ValueError for what a map does not take."""
    maps, d = list[Any](), x.shape[1]
    asked = listed("identity" if value is None else value, d, names)
    supports = listed({} if support is None else support, d, names, "support")
    for j, (one, (low, high)) in enumerate(zip(asked, supports)):
        column, what = x[:, j], f"column {j}" + (f" ({names[j]!r})" if names else "")
        if (low, high) != (None, None):
            if one != "identity":
                raise ValueError(f"{what} has coordinates {one!r} and a support; pass one of them")
            maps.append(Circle.fit(high, column) if low == "circular" else fit_ends(low, high, column, weights, what))
            continue
        if one in ("log", "logit"):
            takes, instead, most = "above 0", "'asinh', or shift the column", math.inf
            if one == "logit":
                takes, instead, most = "between 0 and 1", "the column in that unit, without 0 and 1", 1.0
            has = f"coordinates: {one!r} takes values {takes}, but {what} has"
            refuse((column <= 0.0) | (column >= most), column, has, "outside", instead)
        maps.append(_fitted(one, column, weights) if isinstance(one, str) else _own(one, column, what))
    return Coordinates(tuple(maps), names)


def _fitted(name: str, column: Array, weights: Array) -> Any:
    heard = np.isfinite(column) & (weights > 0.0)
    given = column[heard], weights[heard] / weights[heard].sum()
    return NormalScores.fit(*given) if name == "normal-scores" else Closed.fit(name, *given)


def _own(one: Any, column: Array, what: str) -> Any:
    """A user's map, if it is monotone at the samples, and its inverse takes them back."""
    if isinstance(one, Closed):  # one of a stack's
        return one
    column = np.sort(column[np.isfinite(column)])
    z = np.asarray(one.forward(column))
    fits = z.shape == column.shape and np.isfinite(z).all() and (np.diff(z)[np.diff(column) > 0.0] > 0.0).all()
    fits = fits and np.isfinite(logs := z + np.asarray(one.log_jacobian(column))).all() and logs.shape == z.shape
    if not fits or not np.allclose(one.inverse(z), column, rtol=1e-6, atol=1e-6 * float(np.ptp(column))):
        takes = "its forward must take (k,) values to finite ones that increase with them, inverse take them back"
        has = "and log_jacobian, log of forward's derivative, be finite"
        raise ValueError(f"coordinates: {brief(one)} is no map of {what}: {takes}, {has}")
    return one


def listed(value: Any, d: int, names: tuple[str, ...] = (), what: str = "coordinates") -> list[Any]:
    """List ``coordinates=`` or ``support=`` column by column."""
    nothing: Any = "identity" if what == "coordinates" else (None, None)
    if isinstance(value, Mapping):
        found: list[Any] = [nothing] * d
        for key, one in value.items():
            known = ", ".join(map(repr, names)) or "without names"
            if key in names:
                found[names.index(key)] = one
            elif isinstance(key, int | np.integer) and not isinstance(key, bool) and -d <= key < d:
                found[int(key)] = one
            else:
                raise ValueError(f"{what} has column {key!r}; train's are {known}: pass those, or numbers below {d}")
        return [nothing if one is None else one for one in found]
    if isinstance(value, str) or _is_map(value):
        return [value] * d
    if what == "support" and is_support(value) and (d == 1 or any(one is not None for one in value)):
        value = [value]
    if len(value) != d:
        raise ValueError(f"{what} is for {len(value)} columns, but train has {d}; pass one for each, or a dict")
    return [nothing if one is None else one for one in value]


def _is_map(value: Any) -> bool:
    return all(callable(getattr(value, name, None)) for name in _METHODS)


def candidates(x: Array, weights: Array) -> list[list[str]]:
    """Coordinates that a stack tries for samples x (n, d): lists of a name for each column.

    In one column these are the formulas that take the samples. In several each column has normal scores, or the best of
    its formulas where these gain less than .1 nats per sample more, or is standardised; all together must gain as much.
    """
    best, gained = list[str](), 0.0
    for column in x.T:
        formulas = ["asinh", *["log"] * bool(column.min() > 0.0)]
        formulas += ["logit"] * bool(column.min() > 0.0 and column.max() < 1.0)
        if x.shape[1] == 1:
            return [[name] for name in formulas]
        gains = {name: _gain(_fitted(name, column, weights), column, weights) for name in formulas}
        gains = {name: gain for name, gain in gains.items() if gain > 0.02} | {"standard": 0.0}
        name = max(gains, key=lambda name: gains[name])
        scores = _gain(_fitted("normal-scores", column, weights), column, weights)
        best.append("normal-scores" if scores > gains[name] + 0.1 else name)
        gained += max(scores, gains[name])
    return [best] if gained > 0.1 and set(best) != {"standard"} else []


def without_ends(x: Array, weights: Array, supports: Sequence[Any]) -> tuple[Array, list[list[Any]]]:
    """Logs and logits of the columns that end, for a stack of samples x (n, d), others as :func:`candidates` has them.

    With them samples, those that were spread beyond an end reflected; none where one is on an end, or for a circle.
    """
    maps, free, x = list[Any](), np.array([one == (None, None) for one in supports]), x.copy()
    others = candidates(x[:, free], weights) if np.count_nonzero(free) > 1 else []
    names = iter(others[0] if others else ["standard"] * len(free))
    for j, (low, high) in enumerate(supports):
        if low == "circular":
            return x, []
        if low is not None:
            x[:, j] = np.where(x[:, j] < low, 2.0 * low - x[:, j], x[:, j])
        if high is not None:
            x[:, j] = np.where(x[:, j] > high, 2.0 * high - x[:, j], x[:, j])
        if low is not None and high is not None:
            maps.append(Closed("logit", low, high))
        else:
            maps.append(next(names) if free[j] else Closed("log", *((high, -1.0) if low is None else (low, 1.0))))
    return x, [maps] * all(free[j] or np.isfinite(one.forward(x[:, j])).all() for j, one in enumerate(maps))


def _gain(one: Any, x: Array, weights: Array) -> float:
    """By how much a normal density of z is more likely than one of x, in nats per sample."""
    logs = []
    for value in (x, one.forward(x)):
        size = abs(value - value[0]).max()  # squares of data in far units overflow
        value = (value - value[0]) / size
        logs.append(np.log(size) + 0.5 * np.log(weights @ np.square(value - weights @ value)))
    return float(logs[0] - logs[1] + weights @ one.log_jacobian(x))
