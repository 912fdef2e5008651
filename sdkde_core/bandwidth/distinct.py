"""Samples as a choice of bandwidth asks them: on the host, or on a GPU, whose kernels answer much at once."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..arrays import Array, quiet
from ..engine.devices import on_device
from ..engine.failures import raise_interrupt
from ..engine.launches import Lists
from ..engine.products import product
from . import shapes
from .matrix import like
from .pairs import Left, Pairs
from .sample import SEED, Sample, drawn, most_of, spread_of

GAP = 20.0  # spreads: longer stretches of a column without samples are shortened to that, for the digits of float32
TIES = 0.01  # of a column's samples: where no more are equal to the next one in order, nothing is done about it

_logger, _lists = logging.getLogger("sdkde"), Lists(False)


class Distinct:
    """Distinct samples u (n, d) in spreads, in an order to cut them short in, their weights, and the columns' units.

    The weights (n,) are positive and sum to 1. Units are of rounded columns, else 0. ``index``, of one column: the
    samples are in order, and this is another one.
    """

    def __init__(self, u: Any, weights: Array, units: Array, index: NDArray[np.intp] | None = None) -> None:
        self.u, self.weights, self.units, self.index = u, weights, units, index

    def shares(self, most: int) -> Array:
        """The weights of :meth:`part`, which sum to 1, on the host."""
        some = self.weights[:most]
        return some if most == len(self.weights) else some / some.sum()

    def part(self, most: int) -> tuple[Any, Any]:
        """The first so many samples, and their weights."""
        return self.u[:most], self.shares(most)

    def fits(self, most: int) -> shapes.Fits:
        """What a shape is found by, of the first so many."""
        centred = self.u - self.weights @ self.u
        return shapes.Fits(*self.part(most), product((centred * self.weights[:, None]).T, centred))

    def turn(self, matrix: Array) -> None:
        """Multiply the samples by a matrix (d, d)."""
        self.u = product(self.u, matrix)

    def left_out(self, most: int, method: str) -> Callable[[Sequence[float]], list[Left]]:
        """A function that returns what bandwidths say of the first so many samples."""
        return Pairs(*self.part(most), method).at


class OnCard(Distinct):
    """The same on a CUDA device, by a backend's kernels: the fits are launched when this is made, and read at once.

    ``host``: distinct samples that were prepared on the host. Without it the device prepares them, and ``good`` says
    whether that was enough; rounded and equal samples, and columns with gaps, need more. The samples' ends and
    quartiles, which the host looks at as well, are read together with the fits.
    """

    good = True

    def __init__(self, sample: Sample, rule: str, host: Distinct | None = None) -> None:
        assert sample.kernels is not None
        self._kernels, d, torch = sample.kernels, sample.d, sys.modules["torch"]
        n = min(sample.n, most_of(d)) if host is None else len(host.weights)
        most = shapes.most_of(n, d) if rule == "auto" and not sample.common else 0
        if host is None:
            super().__init__(None, np.full(n, 1.0 / n), np.zeros(d))
            self.u, self._there, *numbers = self._prepared(sample, most)
        else:
            super().__init__(None, host.weights, host.units)
            self.u, self._there = (torch.from_numpy(x).to(sample.given.device) for x in (host.u, host.weights))
            numbers = self._begun(sample, most, self.u, self._there)
        if not numbers:
            return
        read = torch.cat([x.view(-1) for x in numbers]).cpu().numpy()
        if host is None:
            self.good = self._measured(sample, *np.split(read[: 11 * d].reshape(11, d), [3, 6]))
        if most and self.good:
            found = self._kernels.fitted(read[-numbers[-1].numel() :], most, d)
            self._fits = shapes.FoundFits(self.shares(most), *found)

    def _begun(self, sample: Sample, most: int, u: Any, weights: Any) -> list[Any]:
        """The fits to the first so many samples, launched, or none."""
        if not most:
            return []
        share, d, mixed = float(self.weights @ self.weights), sample.d, sample.mixed
        steps = shapes.scale_of(self.shares(most), d), shapes.SCALE_LENGTHS, shapes.LENGTHS, shapes.LEAST
        full = mixed and shapes.enough(most, d)
        return [self._kernels.fits(u, weights, most, mixed, *steps, d * (d - 1) * share, full)]

    def _prepared(self, sample: Sample, most: int) -> tuple[Any, ...]:
        """Samples in spreads, their weights, what their columns are like, and the fits, by one list of launches."""
        x, n = sample.given.T.contiguous(), len(self.weights)

        def launch() -> tuple[Any, bool]:
            made = self._kernels.ordered(x, *_drawn(sample.n, n, x.device), sample.common)
            return (*made, *self._begun(sample, most, *made[:2])), True

        key = self._kernels.fits, x.device, x.shape, most, sample.common, sample.mixed
        with on_device(x):
            return _lists.serve(key, (x,), launch, lambda read: True)

    def _measured(self, sample: Sample, measured: Array, ends: Array, columns: Array) -> bool:
        """Tell the sample its ends and quartiles; return whether the device has prepared all that there is to do."""
        if not (measured[0].min() > 1e-140 and measured[0].max() < 1e140):  # else squares of the data are none
            return False
        sample.ends, (low, high, near, ties, twice) = ends, columns
        measured[1:] -= ends[2]
        sample.measured = measured / sample.unit
        scale = sample.unit * spread_of(sample.measured)
        if sample.common:
            scale = np.exp(np.log(scale).mean())
        good = (near > 0.0) & (high - low <= GAP * scale) & (ties <= TIES * len(self.weights))
        return bool(good.all() and not twice.any())

    def part(self, most: int) -> tuple[Any, Any]:
        some = self._there[:most]
        return self.u[:most], some if most == len(self.weights) else some / float(self.weights[:most].sum())

    def fits(self, most: int) -> shapes.Fits:
        return self._fits

    def turn(self, matrix: Array) -> None:
        self.u = self.u @ like(matrix, self.u)

    def left_out(self, most: int, method: str) -> Callable[[Sequence[float]], list[Left]]:
        part = self.part(most)
        return lambda bandwidths: list(map(Left, *self._kernels.left_out(*part, bandwidths, method)))


@functools.lru_cache(16)
def _drawn(n: int, most: int, place: Any) -> tuple[Any, Any]:
    """On a device: which of n samples are looked at, and the places of these, in order of the first column."""
    rng, torch = np.random.default_rng(SEED), sys.modules["torch"]
    taken = drawn(n, most, rng) if n > most else np.arange(n)
    # Copies from the host are there before another stream can use them.
    return tuple(torch.from_numpy(x).to(place) for x in (taken, np.argsort(rng.permutation(most))))


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
