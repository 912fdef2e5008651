"""Samples as a choice of bandwidth asks them: on the host, or on a GPU, whose kernels answer much at once."""

from __future__ import annotations

import functools
import importlib
import logging
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from array_api_compat import device
from numpy.typing import NDArray

from ..arrays import Array, array_namespace, quiet, to_host
from ..engine.failures import raise_interrupt
from ..engine.products import product
from . import shapes
from .matrix import like
from .pairs import Left, Pairs
from .rounding import finest
from .sample import SEED, Sample, drawn, most_of, spread_of

GAP = 20.0  # spreads: longer stretches of a column without samples are shortened to that, for the digits of float32
TIES = 0.01  # of a column's samples: where no more are equal to the next one in order, nothing is done about it

_logger = logging.getLogger("sdkde")


class Distinct:
    """Distinct samples u (n, d) in spreads, their weights, an order to cut them short in, and the columns' units.

    The weights (n,) are positive and sum to 1. Units are of rounded columns, else 0.
    """

    def __init__(self, u: Any, weights: Array, index: NDArray[np.intp], units: Array) -> None:
        self.u, self.weights, self.index, self.units = u, weights, index, units

    def shares(self, most: int) -> Array:
        """The weights of :meth:`part`, which sum to 1, on the host."""
        if most == len(self.weights):
            return self.weights
        some = self.weights[self.index[:most]]
        return some / some.sum()

    def part(self, most: int) -> tuple[Any, Any]:
        """The first so many samples in the order, and their weights; all of them as they are."""
        return (self.u if most == len(self.weights) else self.u[self.index[:most]]), self.shares(most)

    def fits(self, most: int) -> shapes.Fits:
        """What a shape is found by, of the first so many."""
        centred = self.u - self.weights @ self.u
        return shapes.Fits(*self.part(most), product((centred * self.weights[:, None]).T, centred))

    def turn(self, matrix: Array) -> None:
        """Multiply the samples by a matrix (d, d)."""
        self.u = product(self.u, matrix)

    def left_out(self, counts: Sequence[int], bandwidths: Sequence[Sequence[float]], method: str) -> list[Any]:
        """Of the first so many, for each of ``counts``: pairs to ask, or a Left for each bandwidth."""
        return [Pairs(*self.part(most), method) for most in counts]


class OnCard(Distinct):
    """The same on a CUDA device, by a backend's kernels: the fits are launched when this is made, and read at once.

    ``host``: distinct samples that were prepared on the host. Without it the device prepares them, and ``good`` says
    whether that was enough; rounded and equal samples, and columns with gaps, need more. The samples' ends and
    quartiles, which the host looks at as well, are read together with the fits.
    """

    good = True

    def __init__(self, sample: Sample, rule: str, host: Distinct | None = None) -> None:
        assert sample.kernels is not None
        self._kernels, d, parts = sample.kernels, sample.d, list[Any]()
        xp = array_namespace(sample.x)
        if host is None:
            measured = sample.measured_there()
            u, good, weights, index = self._prepared(sample, spread_of(measured))
            super().__init__(u, weights, index, np.zeros(d))
            parts = [xp.stack(sample.there), measured, xp.astype(good, xp.float64)]
        else:
            super().__init__(like(host.u, sample.x), host.weights, host.index, host.units)
            self._weights, self._order = (xp.asarray(a, device=device(sample.x)) for a in (host.weights, host.index))
        n = len(self.weights)
        most = shapes.most_of(n, d) if rule == "auto" and not sample.common else 0
        if most:
            centred, share = self.u - self._weights @ self.u, float(self.weights @ self.weights)
            covariance = (centred * self._weights[:, None]).T @ centred
            scale, full = shapes.scale_of(self.shares(most), d), sample.mixed and shapes.enough(most, d)
            asked = scale, shapes.SCALE_LENGTHS, shapes.LENGTHS, shapes.LEAST, d * (d - 1) * share, full
            fits = self._kernels.fits(*self.part(most), covariance if sample.mixed else None, *asked)
            parts += [covariance, *fits]
        if not parts:
            return
        read = to_host(xp.concat([xp.reshape(part, (-1,)) for part in parts]))
        ends = np.cumsum([0, *(math.prod(part.shape) for part in parts)]).tolist()
        found = [read[i:j].reshape(part.shape) for i, j, part in zip(ends, ends[1:], parts)]
        if host is None:
            sample.ends, sample.measured, good, *found = found
            self.good = bool(good)
        if most:
            self._fits = shapes.FoundFits(self.shares(most), *found)

    def _prepared(self, sample: Sample, scale: Any) -> tuple[Any, Any, Array, NDArray[np.intp]]:
        """Samples as :func:`.selection.distinct` makes them, whether they are the same, their weights, and the order.

        They are not the same where rows are equal, or where a column is rounded or has gaps.
        """
        xp, n = array_namespace(sample.x), min(sample.n, most_of(sample.d))
        taken, self._order, self._weights, index = _drawn(sample.n, n, device(sample.x))
        x = sample.x if taken is None else sample.x[taken]
        if sample.common:
            scale = xp.exp(xp.mean(xp.log(sample.unit_there * scale))) / sample.unit_there
        ordered = xp.sort(x, axis=0)
        gaps, ranges = ordered[1:] - ordered[:-1], ordered[-1] - ordered[0]
        near = (gaps > 1e-12 * ranges) & (gaps <= finest(ranges, n))
        good = xp.any(near, axis=0) & (ranges <= GAP * scale) & (xp.sum(gaps == 0.0, axis=0) <= TIES * n)
        u = (x - 0.5 * (ordered[(n - 1) // 2] + ordered[n // 2])) / scale
        first = xp.argsort(u[:, 1], stable=True)
        u = u[first[xp.argsort(u[first, 0], stable=True)]]
        equal = u[1:, :2] == u[:-1, :2]  # rows that are equal stand together, unless three share the first value
        twice = xp.all(equal, axis=1)[1:] | (equal[1:, 0] & equal[:-1, 0])
        return u, xp.all(good) & ~xp.any(twice) & ~xp.all(equal[0]), np.full(n, 1.0 / n), index

    def part(self, most: int) -> tuple[Any, Any]:
        if most == len(self.weights):
            return self.u, self._weights
        weights = self._weights[self._order[:most]]
        return self.u[self._order[:most]], weights / weights.sum()

    def fits(self, most: int) -> shapes.Fits:
        return self._fits

    def turn(self, matrix: Array) -> None:
        self.u = self.u @ like(matrix, self.u)

    def left_out(self, counts: Sequence[int], bandwidths: Sequence[Sequence[float]], method: str) -> list[Any]:
        found = self._kernels.left_out([self.part(most) for most in counts], bandwidths, method)
        return [list(map(Left, *each)) for each in found]


@functools.lru_cache(16)
def _drawn(n: int, most: int, place: Any) -> tuple[Any, Any, Any, NDArray[np.intp]]:
    """Of n samples those that are looked at, None for all; an order; and equal weights; the order on the host, too."""
    rng, xp = np.random.default_rng(SEED), importlib.import_module("array_api_compat.torch")
    taken, index = drawn(n, most, rng) if n > most else None, rng.permutation(most)
    # Copies from the host are there before another stream can use them.
    arrays = None if taken is None else xp.asarray(taken, device=place), xp.asarray(index, device=place)
    return *arrays, xp.asarray(np.full(most, 1.0 / most), device=place), index


@quiet
def look(sample: Sample, rule: str) -> None:
    """Ask the kernels for a sample's device, if there are any, what can be asked at once."""
    if sample.d > 1 and sample.weights is None and sample.n >= 5 and sample.kernels is not None:
        try:
            found = OnCard(sample, rule)
        except Exception as error:  # a backend may raise anything
            failed(sample, error)
        else:
            sample.on_card = found if found.good else None


def failed(sample: Sample, error: Exception) -> None:
    """Go on without the backend's kernels, which ended with an error."""
    raise_interrupt(error)
    _logger.debug("the criteria's kernels ended with %s: %s", type(error).__name__, error)
    sample.kernels = sample.on_card = None
