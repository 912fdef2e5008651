"""The maps of all columns of a data set, from what the user asks for."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..arrays import Array
from ..messages import brief, did_you_mean
from .maps import KINDS, Asinh, Identity, Log, Logit, NormalScores

_METHODS = ("forward", "inverse", "log_jacobian")  # what a user's own map has

_NAMES = {kind: name for name, kind in KINDS.items()}


class Coordinates(NamedTuple):
    """z = T(x), a map for each column; ``names`` of the columns, or empty. Points are (k, d), float64, on the host."""

    maps: tuple[Any, ...]
    names: tuple[str, ...] = ()

    def forward(self, x: Array) -> Array:
        """z (k, d): −inf or inf in columns where x is below or above what the map takes; infinite x stays."""
        columns = (one.forward(np.where(np.isinf(x[:, j]), math.nan, x[:, j])) for j, one in enumerate(self.maps))
        return np.where(np.isinf(x), x, np.stack(list(columns), axis=1))

    def inverse(self, z: Array) -> Array:
        return np.stack([one.inverse(z[:, j]) for j, one in enumerate(self.maps)], axis=1)

    def log_jacobian(self, x: Array) -> Array:
        """Σ_j log T_j′(x_j), (k,)."""
        return sum((one.log_jacobian(x[:, j]) for j, one in enumerate(self.maps)), np.zeros(len(x)))

    def log_slopes(self, x: Array) -> Array:
        """log T_j′(x_j), (k, d)."""
        return np.stack([one.log_jacobian(x[:, j]) for j, one in enumerate(self.maps)], axis=1)

    def slope(self, x: Array) -> Array:
        """The gradient of :meth:`log_jacobian`, (k, d); by differences for a user's map that has no ``slope``."""
        return np.stack([_slope(one, x[:, j]) for j, one in enumerate(self.maps)], axis=1)

    def kept(self, dims: Sequence[int]) -> Coordinates:
        """The maps of some of the columns, in that order."""
        return Coordinates(tuple(self.maps[k] for k in dims), tuple(self.names[k] for k in dims) if self.names else ())

    def to_saved(self) -> tuple[list[Any], dict[str, Array]]:
        """What a file has of them, see :mod:`sdkde_core.estimator.saved`; TypeError for a map of the user's."""
        listed, arrays = list[Any](), dict[str, Array]()
        for j, one in enumerate(self.maps):
            if type(one) not in _NAMES:
                raise TypeError(f"coordinates: {brief(one)} is a map of yours, which no file holds; pickle the density")
            numbers = tuple(one) if not isinstance(one, NormalScores) else tuple(one.asinh)
            listed.append([_NAMES[type(one)], list(numbers)])
            if isinstance(one, NormalScores):
                arrays |= {f"map {j}.{k}": x for k, x in enumerate(one[1:])}
        return listed, arrays

    @classmethod
    def from_saved(cls, listed: Any, arrays: Mapping[str, Array], d: int, names: tuple[str, ...]) -> Coordinates:
        """Return what :meth:`to_saved` described; ValueError where that cannot be right."""
        maps = []
        for j, one in enumerate(listed if isinstance(listed, list) else ()):
            match one:
                case ["identity" | "log", []]:
                    maps.append(KINDS[one[0]]())
                case ["logit" | "asinh", [float(a), float(b)]] if a < b if one[0] == "logit" else b > 0.0:
                    maps.append(KINDS[one[0]](a, b))
                case ["normal-scores", [float(a), float(b)]] if b > 0.0:
                    at, values, *_ = knots = [arrays.get(f"map {j}.{k}", np.empty(0)) for k in range(4)]
                    shaped = all(x.dtype == float and x.shape == at.shape and x.ndim == 1 for x in knots)
                    rises = len(at) > 1 and all((np.diff(x) > 0).all() for x in (at, values))
                    if shaped and rises and all(np.isfinite(x).all() for x in knots):
                        maps.append(NormalScores(Asinh(a, b), *knots))
        if not isinstance(listed, list) or not len(maps) == len(listed) == d:
            raise ValueError("its coordinates cannot be right")
        return cls(tuple(maps), names)

    def __str__(self) -> str:
        labels = [_NAMES.get(type(one), type(one).__name__) for one in self.maps]
        if len(set(labels)) == 1:
            return labels[0]
        names = self.names or [f"column {j}" for j in range(len(labels))]
        return ", ".join(f"{label} of {name}" for name, label in zip(names, labels) if label != "identity")


def _slope(one: Any, x: Array) -> Array:
    if hasattr(one, "slope"):
        return one.slope(x)
    step = 1e-5 * (abs(x) if np.ptp(x) == 0.0 else np.minimum(abs(x) + 1e-3 * np.ptp(x), np.ptp(x)))
    step = np.where(step > 0.0, step, 1e-5)
    return (one.log_jacobian(x + step) - one.log_jacobian(x - step)) / (2.0 * step)


def check(value: Any) -> None:
    """Raise TypeError or ValueError for what cannot be coordinates, as far as that needs no data."""
    if isinstance(value, str):
        if value not in KINDS:
            hint = did_you_mean(value, KINDS)
            raise ValueError(f"coordinates is {value!r}; pass one of {', '.join(map(repr, KINDS))}, or a map{hint}")
    elif isinstance(value, Mapping):
        for one in value.values():
            check(one)
    elif isinstance(value, Sequence) and not _is_map(value):
        for one in value:
            check(one)
    elif value is not None and not _is_map(value):
        raise TypeError(
            f"coordinates is {brief(value)}; pass a name, an object with {', '.join(_METHODS)}, a sequence with one "
            "of these for every column, or a dict by column"
        )


def fit(value: Any, x: Array, weights: Array, names: tuple[str, ...] = ()) -> Coordinates:
    """Return what the user asks for, for samples x (n, d) with weights (n,) that sum to 1.

    ValueError where a column has values that its map does not take.
    """
    maps = []
    for j, one in enumerate(_listed(value, x.shape[1], names)):
        column, what = x[:, j], f"column {j}" + (f" ({names[j]!r})" if names else "")
        if one == "log":
            _refuse(column <= 0.0, column, what, "'log' takes values above 0", "'asinh', or shift the column")
        elif one == "logit":
            wrong = (column <= 0.0) | (column >= 1.0)
            _refuse(
                wrong, column, what, "'logit' takes values between 0 and 1", "the column in that unit, without 0 and 1"
            )
        maps.append(_fitted(one, column, weights) if isinstance(one, str) else _own(one, column, what))
    return Coordinates(tuple(maps), names)


def _fitted(name: str, column: Array, weights: Array) -> Any:
    known = np.isfinite(column)
    if name in ("asinh", "normal-scores"):
        heard = weights[known] / weights[known].sum()
        return (Asinh if name == "asinh" else NormalScores).fit(column[known][heard > 0.0], heard[heard > 0.0])
    return {"log": Log, "logit": Logit}.get(name, Identity)()


def _own(one: Any, column: Array, what: str) -> Any:
    """A user's map, if it is monotone at the samples, and its inverse takes them back."""
    column = np.sort(column[np.isfinite(column)])
    z = np.asarray(one.forward(column))
    fits = z.shape == column.shape and np.isfinite(z).all() and (np.diff(z)[np.diff(column) > 0.0] > 0.0).all()
    fits = fits and np.isfinite(one.log_jacobian(column)).all()
    if not fits or not np.allclose(one.inverse(z), column, rtol=1e-6, atol=1e-6 * float(np.ptp(column))):
        raise ValueError(
            f"coordinates: {brief(one)} is no map of {what}: its forward must take (k,) values to finite ones that "
            "increase with them, inverse take them back, and log_jacobian, log of forward's derivative, be finite"
        )
    return one


def _listed(value: Any, d: int, names: tuple[str, ...]) -> list[Any]:
    """What is asked for each column."""
    if isinstance(value, Mapping):
        listed: list[Any] = ["identity"] * d
        for key, one in value.items():
            known = ", ".join(map(repr, names)) or f"numbers below {d}"
            if key in names:
                listed[names.index(key)] = one
            elif isinstance(key, int) and not isinstance(key, bool) and -d <= key < d:
                listed[key] = one
            else:
                raise ValueError(f"coordinates has column {key!r}; train has {d}: pass some of {known}")
        return ["identity" if one is None else one for one in listed]
    if isinstance(value, str) or _is_map(value):
        return [value] * d
    if len(value) != d:
        raise ValueError(f"coordinates has {len(value)} maps, but train has {d} columns; pass one for each, or a dict")
    return ["identity" if one is None else one for one in value]


def _is_map(value: Any) -> bool:
    return all(callable(getattr(value, name, None)) for name in _METHODS)


def _refuse(wrong: Array, column: Array, what: str, takes: str, instead: str) -> None:
    if wrong.any():
        rows = np.flatnonzero(wrong)
        listed = ", ".join(map(str, rows[:3])) + (" …" if len(rows) > 3 else "")
        raise ValueError(
            f"coordinates: {takes}, but {what} has {column[rows[0]]:.6g} in row {rows[0]}, {len(rows)} such in rows "
            f"{listed}; pass {instead}"
        )
