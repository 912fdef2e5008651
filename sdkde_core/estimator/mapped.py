"""A density in other coordinates: p̂(x) = q̂(T(x)) Π_j T_j′(x_j), q̂ a fitted density, or a list of some, of z = T(x).

Whatever chooses, sums and draws does so in z. Points are mapped on the host, in float64. Where a query is outside what
T takes the density is 0, and its gradient NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Self, TypeVar

import numpy as np

from ..arrays import Argument, Array, Origin, array_namespace, ingest, quiet, to_host
from ..coordinates import Coordinates, fit
from ..protocol import Problem
from . import straight
from .request import Request

R = TypeVar("R")


class Composed:
    """A density that is made of others, which go on with another backend by themselves; immutable, pickles.

    Where one number describes a density, as its bandwidth, it is that of ``first``.
    """

    groups = ()
    parts: tuple[Any, ...] = ()
    coordinates: Any = None
    ends: Any = None  # of bounded.Bounded

    def __init__(self, first: Any, request: Request, problem: Problem) -> None:
        self.first, self.request, self.problem = first, request, problem
        self.bandwidth, self.names, self.home, self.centre = first.bandwidth, first.names, first.home, first.centre

    @property
    def choice(self) -> Any:
        """The first one's backend."""
        return self.first.current.choice

    @property
    def current(self) -> Self:
        return self

    @property
    def has_second(self) -> bool:
        """Whether some calls have gone to another backend."""
        return self.first.has_second

    def asked(self, query: Any) -> Argument:
        """Recognise the user's query and validate its shape."""
        return self.first.asked(query)

    def read(self, query: Argument) -> Argument:
        """A query as :meth:`answer` takes it: others read it themselves."""
        return query

    def serve(self, compute: Callable[[Self], R]) -> R:
        """Return ``compute(self)``."""
        return compute(self)


class Mapped(Composed):
    """A density ``first`` of z, as one of x. What describes its kernels, such as the bandwidth, is of z."""

    def __init__(self, first: Any, coordinates: Coordinates) -> None:
        super().__init__(first, first.request, first.problem)
        self.coordinates = coordinates

    @property
    def negative_mass(self) -> Any:
        """Of the Laplace estimate: the same in all coordinates."""
        return self.first.serve(lambda first: first.negative_mass)

    @quiet
    def answer(self, query: Argument, what: str) -> Any:
        """Return the ``"density"`` (m,), its ``"log"``, or the ``"score"`` (m, d), as :meth:`.Fitted.answer` does."""
        x, z, outside = located(self.coordinates, query, to_host(self.centre))
        asked = query._replace(array=z, dtype="float64", origin=Origin())
        slopes = self.coordinates.log_slopes(x)
        if what == "score":
            found = of_part(self.first, asked, what) * np.exp(slopes) + self.coordinates.turns(x)
        elif what == "density" and self.request.method == "laplace":
            found = of_part(self.first, asked, what) * np.exp(slopes.sum(axis=1))
        else:
            log = of_part(self.first, asked, "log") + slopes.sum(axis=1)
            found = np.exp(log) if what == "density" else log
        found[outside] = {"score": np.nan, "log": -np.inf, "density": 0.0}[what]
        return query.origin.restore(found, max(query.dtype, self.problem.dtype))

    def into(self, points: Array) -> Array:
        """Corners of boxes in z, of shape (d,) or for one column (k,); infinite where T does not reach."""
        return self.coordinates.forward(points.reshape(-1, self.problem.d)).reshape(points.shape)

    def out_of(self, z: Any) -> Array:
        """Points z (k, d) in data units."""
        return self.coordinates.inverse(to_host(z))


def leaves(fitted: Any) -> list[Any]:
    """The parts of a density that is a list, with their shares of the whole; empty for one that is none."""
    if fitted.coordinates is not None:
        return [p._replace(fitted=Mapped(p.fitted, fitted.coordinates)) for p in leaves(fitted.first)]
    found = []
    for part in fitted.parts:
        below = leaves(part.fitted)
        found += [p._replace(log_share=p.log_share + part.log_share) for p in below] if below else [part]
    return found


def shares(fitted: Any) -> dict[str, tuple[float, float | None]]:
    """The share of each label, and its mean log density of left-out samples; largest first."""
    found: dict[str, tuple[float, float | None]] = {}
    for part in leaves(fitted):
        share = found.get(part.label, (0.0, None))[0] + math.exp(part.log_share)
        found[part.label] = share, part.left_out
    return dict(sorted(found.items(), key=lambda item: -item[1][0]))


def located(coordinates: Coordinates, query: Argument, inside: Array) -> tuple[Array, Array, Array]:
    """Points (m, d) on the host, the same in z, and which are outside of what T takes, (m,): these are moved.

    To where z is ``inside``, (d,).
    """
    x = np.array(query.at(Origin()), order="C").reshape(-1, len(coordinates.maps))
    z = coordinates.forward(x)
    outside = (np.isfinite(x) & ~np.isfinite(z)).any(axis=1)
    if outside.any():
        z[outside], x[outside] = inside, coordinates.inverse(inside[None, :])
    return x, z, outside


def of_part(fitted: Any, query: Argument, what: str) -> Any:
    """What a density answers, float64, where the query is."""
    found = straight.answer(fitted.current, query, what)
    if found is None:
        found = fitted.serve(lambda here: here.answer(here.read(query), what))
    return array_namespace(found).astype(found, array_namespace(found).float64)


def mapped(request: Request, train: Any) -> tuple[Request, Argument, Coordinates]:
    """Fit the coordinates that a request names; return it without, the samples in z, and the coordinates."""
    data = ingest(train, None, request.weights, check_finite=request.check_finite, device="cpu")
    data.check_finite()
    weights = np.full(len(data.train), 1.0 / len(data.train))
    weights = weights if data.log_weights is None else np.exp(to_host(data.log_weights))
    coordinates = fit(request.coordinates, data.train, weights, data.names, request.support)
    z = Argument("train", coordinates.forward(data.train), data.dtype, data.origin, data.names)
    return replace(request, coordinates="identity", support=None), z, coordinates


def score_in(score: Any, coordinates: Coordinates, train: Any, z: Argument) -> Any:
    """A score from elsewhere, of samples in other coordinates."""
    x = coordinates.inverse(z.at(Origin()))
    slope = Argument.of("score", score(train) if callable(score) else score).at(Origin())
    return (slope.reshape(x.shape) - coordinates.turns(x)) / np.exp(coordinates.log_slopes(x))
