"""A density in other coordinates: p̂(x) = q̂(T(x)) Π_j T_j′(x_j), q̂ a fitted density, or a list of some, of z = T(x).

Whatever chooses, sums and draws does so in z. Points are mapped on the host, in float64. Where a query is outside what
T takes the density is 0, and its gradient NaN.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from ..arrays import Argument, Array, Origin, array_namespace, grad_enabled, ingest, is_attached, quiet, to_host
from ..coordinates import Coordinates, fit
from . import straight
from .request import Request


class Mapped:
    """A density ``inner`` of z, as one of x; immutable, pickles. What describes its kernels, such as H, is of z."""

    groups = ()
    parts: tuple[Any, ...] = ()

    def __init__(self, inner: Any, coordinates: Coordinates) -> None:
        self.inner, self.coordinates = inner, coordinates
        self.request, self.problem, self.bandwidth = inner.request, inner.problem, inner.bandwidth
        self.names, self.home, self.centre = inner.names, inner.home, inner.centre

    @property
    def choice(self) -> Any:
        return self.inner.current.choice

    @property
    def current(self) -> Mapped:
        return self

    @property
    def has_second(self) -> bool:
        """Whether some calls have gone to another backend."""
        return self.inner.has_second

    @property
    def negative_mass(self) -> Any:
        """Of the Laplace estimate: the same in all coordinates."""
        return self.inner.serve(lambda inner: inner.negative_mass)

    def asked(self, query: Any) -> Argument:
        """Recognise the user's query and validate its shape."""
        return self.inner.asked(query)

    def read(self, query: Argument) -> Argument:
        """A query as :meth:`answer` takes it."""
        return query

    def serve(self, compute: Any) -> Any:
        """Return ``compute(self)``: the inner density goes on with another backend by itself."""
        return compute(self)

    @quiet
    def answer(self, query: Argument, what: str) -> Any:
        """Return the ``"density"`` (m,), its ``"log"``, or the ``"score"`` (m, d), as :meth:`.Fitted.answer` does."""
        x, z, outside = self._inside(query)
        signed = what == "density" and self.request.method == "laplace"
        asked = query._replace(array=z, dtype="float64", origin=Origin())
        found = of_part(self.inner, asked, "log" if what == "density" and not signed else what)
        if what == "score":
            found = found * np.exp(self.coordinates.log_slopes(x)) + self.coordinates.slope(x)
            found[outside] = np.nan
        else:
            change = self.coordinates.log_jacobian(x)
            found = found * np.exp(change) if signed else found + change
            found[outside] = 0.0 if signed else -np.inf
            found = np.exp(found) if what == "density" and not signed else found
        return query.origin.restore(found, max(query.dtype, self.problem.dtype))

    def local(self, query: Argument) -> tuple[Array, Array, Array, float]:
        """As :func:`.stacked.local`, of inner kernels as wide as T makes them there."""
        from .stacked import local

        x, z, outside = self._inside(query)
        log, score, unit, narrowest = local(self.inner, query._replace(array=z))
        slopes = np.exp(self.coordinates.log_slopes(x))
        log = np.where(outside, -np.inf, log + np.log(slopes).sum(axis=1))
        score = score * slopes + self.coordinates.slope(x)
        return log, score, unit * slopes[:, :, None] * slopes[:, None, :], narrowest

    def _inside(self, query: Argument) -> tuple[Array, Array, Array]:
        """As :func:`located`; rows that are outside are the centre."""
        x, z, outside = located(self.coordinates, query)
        if outside.any():
            inside = to_host(self.centre)[None, :]
            z[outside], x[outside] = inside, self.coordinates.inverse(inside)
        return x, z, outside

    def box(self, corner: Array) -> Array:
        """A corner (d,) of a box, or rows of one column (k,), in z; infinite where T does not reach."""
        d = self.problem.d
        return self.coordinates.forward(corner.reshape(-1, d)).reshape(corner.shape)

    def given(self, dims: list[int], values: Array) -> dict[int, float]:
        """The values of some columns, in z; ValueError for one outside what T takes."""
        z = self.coordinates.kept(dims).forward(values[None, :])[0]
        if not np.isfinite(z).all():
            j = int(np.argmin(np.isfinite(z)))
            raise ValueError(
                f"given has {values[j]} for dimension {dims[j]}, outside of the coordinates {self.coordinates}, where "
                "the density is 0; pass a value within"
            )
        return dict(zip(dims, z.tolist()))

    def x_of(self, z: Any) -> Array:
        """Points z (k, d) in data units."""
        return self.coordinates.inverse(to_host(z))


def leaves(fitted: Any) -> list[Any]:
    """The parts of a density that is a list, with their shares of the whole; empty for one that is none."""
    if fitted.coordinates is not None:
        return [p._replace(fitted=Mapped(p.fitted, fitted.coordinates)) for p in leaves(fitted.inner)]
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


def located(coordinates: Coordinates, query: Argument) -> tuple[Array, Array, Array]:
    """Points (m, d) on the host, float64; what they are in z; and which are outside of what T takes, (m,)."""
    x = np.array(query.at(Origin()), order="C")
    x = x.reshape(-1, len(coordinates.maps))
    z = coordinates.forward(x)
    return x, z, (np.isfinite(x) & ~np.isfinite(z)).any(axis=1)


def of_part(fitted: Any, query: Argument, what: str) -> Any:
    """What a density answers, float64, where the query is."""
    found = straight.answer(fitted.current, query, what)
    if found is None:
        found = fitted.serve(lambda here: here.answer(here.read(query), what))
    return array_namespace(found).astype(found, array_namespace(found).float64)


def mapped(request: Request, train: Any) -> tuple[Request, Argument, Coordinates]:
    """Fit the coordinates that a request names; return it without, the samples in z, and the coordinates."""
    for name, x in (("train", train), ("weights", request.weights), ("bandwidth", request.bandwidth)):
        if is_attached(x) and grad_enabled():
            raise ValueError(
                f"{name} requires grad, and coordinates= does not differentiate yet; pass {name}.detach(), or leave "
                "coordinates out"
            )
    data = ingest(train, None, request.weights, check_finite=request.check_finite, device="cpu")
    data.check_finite()
    weights = np.full(len(data.train), 1.0 / len(data.train))
    weights = weights if data.log_weights is None else np.exp(to_host(data.log_weights))
    coordinates = fit(request.coordinates, data.train, weights, data.names)
    z = Argument("train", coordinates.forward(data.train), data.dtype, data.origin, data.names)
    return replace(request, coordinates="identity"), z, coordinates


def score_in(score: Any, coordinates: Coordinates, train: Any, z: Argument) -> Any:
    """A score from elsewhere, of samples in other coordinates."""
    x = coordinates.inverse(z.at(Origin()))
    slope = Argument.of("score", score(train) if callable(score) else score).at(Origin())
    return (slope.reshape(x.shape) - coordinates.slope(x)) / np.exp(coordinates.log_slopes(x))
