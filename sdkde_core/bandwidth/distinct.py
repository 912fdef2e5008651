"""Distinct samples, and the criteria over them: on the host, or by a GPU's kernels, many bandwidths at once."""

from __future__ import annotations

import functools
import logging
import math
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
from .device_line import DeviceLine
from .line import STEP
from .normal import reference
from .pairs import Left, Pairs
from .sample import SEED, Sample, drawn, most_of, spread_of

GAP = 20.0  # spreads: longer stretches of a column without samples are shortened to that, for the digits of float32
TIES = 0.01  # the share of a column's samples that equal the next one in order, above which ties are spread

_logger, _lists = logging.getLogger("sdkde"), Lists(False)


class Distinct:
    """Distinct samples u (n, d) in spreads, in random order, their weights, and the columns' units.

    The weights (n,) are positive and sum to 1. Units are of rounded columns, else 0. One column is sorted instead, and
    ``index`` has a random order. ``steps``: the bandwidths to evaluate on all samples, if known.
    """

    steps: Any = None

    def __init__(self, u: Any, weights: Array, units: Array, index: NDArray[np.intp] | None = None) -> None:
        self.u, self.weights, self.units, self.index = u, weights, units, index

    def shares(self, most: int) -> Array:
        """The weights of the first ``most`` samples, made to sum to 1, on the host."""
        some = self.weights[:most]
        return some if most == len(self.weights) else some / some.sum()

    def shaped(self, mixed: bool) -> tuple[Array | None, str]:
        """Find the bandwidth's shape, and go on with samples in its units: :func:`.shapes.find_shape`."""
        (n, d), share = self.u.shape, float(self.weights @ self.weights)
        if not (most := shapes.most_of(n, d)):
            return None, ""
        centred = self.u - self.weights @ self.u
        covariance = product((centred * self.weights[:, None]).T, centred)
        shape, why = shapes.find_shape(shapes.Fits(self.u[:most], self.shares(most), covariance), share, mixed=mixed)
        if shape is not None:
            self.u = product(self.u, np.linalg.inv(np.linalg.cholesky(shape)).T)
        return shape, why

    def left_out(self, most: int, method: str) -> Callable[[Sequence[float]], list[Left]]:
        """A function that evaluates bandwidths on the first ``most`` samples."""
        return Pairs(self.u[:most], self.shares(most), method).at


class OnCard(Distinct):
    """The same on a CUDA device, by a backend's kernels: launched when this is made, and read at once.

    They find the shape, the bandwidths to evaluate on all samples, and the criteria there. ``host``: distinct samples
    that were prepared on the host. Without it the device prepares them, and ``good`` says whether that was enough:
    rounded and equal samples, and columns with gaps, need more. The samples' ends and quartiles, which the host needs
    as well, are read too.
    """

    _shape: tuple[Array | None, str] = None, ""

    def __init__(self, sample: Sample, rule: str, mixed: bool, host: Distinct | None = None) -> None:
        assert sample.kernels is not None
        kernels, d, method, torch = sample.kernels, sample.d, sample.method, sys.modules["torch"]
        n, place = min(sample.n, most_of(d)) if host is None else len(host.weights), sample.given.device
        super().__init__(None, *(np.full(n, 1.0 / n), np.zeros(d)) if host is None else (host.weights, host.units))
        most = shapes.most_of(n, d) if rule == "auto" and not sample.common else 0
        few, steps = asked_first(n), steps_of(rule)
        every = steps_of("lscv")  # those of all rules
        first, then = (bandwidths_of(x, method, d, self.shares(k)) for x, k in ((thirds(steps), few), (every, n)))
        criteria = rule != "lcv", rule == "lcv" or (rule == "auto" and method != "laplace")

        def asked(u: Any, weights: Any, some: Any) -> tuple[Any, ...]:
            shape, looked = (), ()  # type: Any, Any
            if most:
                climbs = shapes.scale_of(self.shares(most), d), shapes.SCALE_LENGTHS, shapes.LENGTHS, shapes.LEAST
                chance = d * (d - 1) * float(self.weights @ self.weights)
                u, *shape = kernels.shaped(u, weights, most, mixed, *climbs, chance, shapes.enough(most, d))
            if few < n:
                said = kernels.left_out(u[:few], some, first, method)
                looked = (kernels.narrowed(said, some, d, first, then, len(steps), n / few, criteria, method),)
            return kernels.left_out(u, weights, then, method, *looked), *looked, *shape

        if host is None:
            x, (taken, places, some) = sample.given.T.contiguous(), _drawn(sample.n, n, place)

            def launch() -> tuple[Any, bool]:
                u, weights, columns = kernels.ordered(x, taken, places, sample.common)
                return (*asked(u, weights, some), columns), True

            key = kernels.shaped, place, x.shape, most, sample.common, mixed, rule, method
            with on_device(x):
                numbers = _lists.serve(key, (x,), launch, lambda read: True)
        else:
            given = host.u, host.weights, self.shares(few)
            numbers = asked(*(torch.from_numpy(a).to(place) for a in given))
        read = torch.cat([x.view(-1) for x in numbers]).cpu().numpy()
        parts = np.split(read, np.cumsum([x.numel() for x in numbers[:-1]]))
        self.good = host is not None or self._measured(sample, parts.pop()[: 11 * d].reshape(11, d))
        if self.good:
            said = map(Left, *kernels.terms(parts[0], n, d, then, method))
            looked = parts[1] > 0.0 if few < n else np.full(len(every), True)
            self._said = {h: one for h, one, there in zip(then, said, looked) if there}
            self.steps = steps[looked[: len(steps)]]
            if most and (which := int(parts[-1][0])):
                factor = np.linalg.inv(parts[-1][2:].reshape(d, d))
                self._shape = factor @ factor.T, shapes.said(which, parts[-1][1])

    def _measured(self, sample: Sample, found: Array) -> bool:
        """Set the sample's ends and quartiles; return whether the samples need no preparation by the host."""
        measured, ends, (low, high, near, ties, twice) = np.split(found, [3, 6])
        if not (measured[0].min() > 1e-140 and measured[0].max() < 1e140):  # else squares of the data leave float64
            return False
        sample.ends = ends
        measured[1:] -= ends[2]
        sample.measured = measured / sample.unit
        scale = sample.unit * spread_of(sample.measured)
        if sample.common:
            scale = np.exp(np.log(scale).mean())
        good = (near > 0.0) & (high - low <= GAP * scale) & (ties <= TIES * len(self.weights))
        return bool(good.all() and not twice.any())

    def shaped(self, mixed: bool) -> tuple[Array | None, str]:
        return self._shape

    def left_out(self, most: int, method: str) -> Callable[[Sequence[float]], list[Left]]:
        return lambda bandwidths: [self._said[h] for h in bandwidths]


def asked_first(n: int) -> int:
    """The number of samples in the first, coarse search of n: 500, or all; fewer may miss the best of few columns."""
    return 500 if n >= 750 else n


def steps_of(rule: str) -> NDArray[np.intp]:
    """The bandwidths that a rule evaluates, as steps of their logs."""
    return np.arange(-31, 1 if rule == "auto" else 6)


def thirds(steps: NDArray[np.intp]) -> NDArray[np.intp]:
    """Every third step, from the widest down, and the narrowest."""
    start = (len(steps) - 1) % 3
    return np.append(steps[: min(start, 1)], steps[start::3])  # np.union1d would import numpy.ma


def bandwidths_of(steps: NDArray[np.intp], method: str, d: int, weights: Array) -> list[float]:
    """The steps' bandwidths in spreads, for samples with these weights."""
    unit = reference(method, 1.0 / float(weights @ weights), d)
    return [unit * math.exp(STEP * step) for step in steps.tolist()]


@functools.lru_cache(16)
def _drawn(n: int, most: int, place: Any) -> tuple[Any, Any, Any]:
    """On a device: indices of ``most`` of n samples; their places in order; the weights of those evaluated first."""
    rng, torch = np.random.default_rng(SEED), sys.modules["torch"]
    taken = drawn(n, most, rng) if n > most else np.arange(n)
    # Copies from the host are there before another stream can use them.
    places, few = np.argsort(rng.permutation(most)), asked_first(most)
    return tuple(torch.from_numpy(x).to(place) for x in (taken, places, np.full(few, 1.0 / few)))


@quiet
def look(sample: Sample, rule: str) -> None:
    """Have the kernels for a sample's device, if there are any, sum the criteria at once."""
    if sample.weights is None and sample.n >= 5 and sample.kernels is not None:
        try:
            found: Any = OnCard(sample, rule, sample.mixed) if sample.d > 1 else DeviceLine(sample, rule)
        except Exception as error:  # a backend may raise anything
            failed(sample, error)
        else:
            sample.on_card = found if found.good else None


def failed(sample: Sample, error: Exception) -> None:
    """Go on without the backend's kernels, which ended with an error."""
    raise_interrupt(error)
    _logger.debug("the criteria's kernels ended with %s: %s", type(error).__name__, error)
    sample.kernels = sample.on_card = None
