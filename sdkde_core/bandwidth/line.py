"""Criteria of one column over all samples, summed on grids by Fourier transforms.

Samples are shared between the two bins around them, linearly, six bins to a bandwidth. That widens them by a variance
which the kernels' is reduced by. Empty stretches are shortened to ten bandwidths, so that no outlier costs bins. A
Gaussian sum of all bins is then a product of spectra, and so are ∫p̂² and Σ w_i p̂(x_i).

* :meth:`Line.left_out` leaves out an eighth of the samples in turn. Least squares, ∫p̂² − 2 Σ w_i p̂(x_i), is ruled by
  peaks and the likelihood by far samples. Between them, for any β > 0, is the density power divergence

      ∫p̂^(1+β) − (1 + 1/β) Σ w_i p̂(x_i)^β

  of Basu, Harris, Hjort and Jones, "Robust and efficient estimation by minimising a density power divergence",
  Biometrika 85 (1998). At β = ¼ the best bandwidth is less noisy than by least squares or by the likelihood.
* :meth:`Looks.refined` has the least error if an estimate, the pilot, were the density: its bias by the method, and
  the variance to leading order. That is the smoothed bootstrap of Taylor, "Bootstrap choice of the smoothing parameter
  in kernel density estimation", Biometrika 76 (1989), without a draw.

Both are of the step that the estimate takes: half, or "moments".
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..arrays import Array
from ..engine.products import dots
from .normal import roughness

#: The bandwidths that are looked at are multiples e^(STEP k) of the best one for normal samples: k from −31 to 0, for
#: "lscv" and "lcv" to 5. A first search takes every third. For how many normal samples: :mod:`.selection`.
STEP = 0.15

BINS = 6  # to a bandwidth
RULES = "auto", "lscv", "lcv"  # in the order of LeftOut's criteria
FOLDS = 8  # parts of the samples that are left out in turn; fewer where there are fewer samples


class _Grid(NamedTuple):
    """Bins on a circle, one wide."""

    edges: Array  # (bins,) where they begin, in the samples' units, before empty stretches were shortened
    at: NDArray[np.intp]  # (bins,) the first sample at or after each edge
    width: float  # of a bin, in the samples' units
    frequencies: Array  # angular, to a bin
    bins: int
    h: float  # the bandwidth that the grid was made for, in bins


class LeftOut(NamedTuple):
    """Criteria by each fold of samples that are left out (folds,), to be averaged by the folds' weights."""

    power: Array  # with β = ¼
    least_squares: Array
    likelihood: Array  # densities count as at least some 1e-15 of the highest; NaN for laplace


class Line:
    """The samples of one column: sorted (n,), with weights that sum to 1; for a method.

    ``folds`` (n,): the parts that are left out together. ``score``: the score's bandwidth, in bandwidths, for the step
    "moments"; None: the step is ½.
    """

    def __init__(self, u: Array, weights: Array, folds: NDArray[np.intp], method: str, score: Any = None) -> None:
        self.u, self.weights, self.method, self.score = u, weights, method, score
        self.n, self.n_eff = len(u), 1.0 / float(dots(weights[None], weights)[0])
        self.gaps = np.diff(u)
        self.held: Array = np.bincount(folds, weights)
        order = np.argsort(folds.astype(np.int16), kind="stable")
        self._parts = (weights + 1j * (weights * u))[order]  # by folds; masses, and moments
        self._before = np.zeros(len(self.held) * len(u) + 1, np.int32)  # where a fold's next sample stands there
        np.cumsum(folds == np.arange(len(self.held))[:, None], out=self._before[1:])

    def _grid(self, h: float, finer: float = 1.0) -> _Grid:
        """A grid for bandwidths from h times ``finer`` down to h over that."""
        u, width, most, beside = self.u, h / (BINS * finer), 10.0 * finer * h, int(5 * BINS * finer**2)
        long = np.flatnonzero(self.gaps > most)
        less = np.concatenate([[0.0], np.cumsum(self.gaps[long] - most)])  # by which the stretches so far are shorter
        starts = (u[long + 1] - u[0] - less[1:]) / width
        least = int((u[-1] - u[0] - less[-1]) / width) + 3 + 2 * beside
        bins = min(odd << max(0, (-(-least // odd) - 1).bit_length()) for odd in (4, 6, 10))  # 2ᵏ, 3·2ᵏ or 5·2ᵏ
        # Shortened stretches end where bins begin. Bins begin a little earlier, so that rounding does not matter.
        index, early = np.arange(-beside, bins - beside), 1e-6
        edges = index * width + (u[0] + less[np.searchsorted(starts, index + (1.0 - early))] if long.size else u[0])
        at = np.searchsorted(u, edges - early * width)
        return _Grid(edges, at, width, np.arange(bins // 2 + 1) * (2.0 * np.pi / bins), bins, BINS * finer)

    def _binned(self, grid: _Grid) -> Array:
        """Each fold's mass in bins (folds, bins): a sample shares its weight between the two bins around it."""
        folds, n = len(self.held), len(self.u)
        begin = self._before[(grid.at + n * np.arange(folds)[:, None]).ravel()]
        some = np.flatnonzero(begin[:-1] < begin[1:])  # bins of a fold that have samples; the last ones have none
        sums = np.add.reduceat(self._parts, begin[some])
        mass = sums.real
        share = (sums.imag - grid.edges[some % grid.bins] * mass) / grid.width
        result = np.zeros(folds * grid.bins)
        result[some] = mass - share
        result[some + 1] += share
        return result.reshape(folds, grid.bins)

    def samples(self) -> tuple[Array, Array]:
        """The samples in order, and their weights."""
        return self.u, self.weights

    def moments(self, h: float, unit: float) -> float:
        """The step "moments" that gives the estimate the variance before values were rounded to multiples of ``unit``.

        Rounding adds unit² / 12 to the variance (Sheppard 1898), as if the kernels' were larger by that.
        """
        grid = self._grid(h)
        mass = self._binned(grid).sum(0)
        return float(self._estimate(grid, mass, np.fft.rfft(mass), grid.h, 1.0, d=1.0 + (unit / h) ** 2 / 12.0)[1])

    def _estimate(
        self, grid: _Grid, mass: Array, spectrum: Array, h: float, binned: float, method: str = "", d: float = 1.0
    ) -> tuple[Array, Any]:
        """The spectrum of the method's estimate from mass in bins (…, bins), whose ``spectrum`` is given; and the step.

        ``h``: the bandwidth, in bins. ``binned``: how often the mass has been shared between bins. ``d``: as for
        :func:`_moments`. The step (…,) is that by which mass moved.
        """
        method = method or self.method
        q = (h * grid.frequencies) ** 2
        kernel = np.exp(-0.5 * q * (1.0 - binned / (6.0 * h * h)))
        if method == "kde":
            return spectrum * kernel, 0.5
        if method == "laplace":
            return spectrum * (kernel * (1.0 + 0.5 * q)), 0.5
        c = self.score or 1.0
        near = spectrum * (kernel if c == 1.0 else np.exp(-0.5 * q * (c * c - binned / (6.0 * h * h))))
        density = np.fft.irfft(near, grid.bins)
        places = np.fft.irfft(near * (1j * grid.frequencies), grid.bins)  # the slope; in place: score, move, place
        # The mass of a bin counts in its own density: a smaller density is rounding.
        places /= np.maximum(density, np.maximum((0.3 / (c * h)) * mass, 1e-15))
        step: Any = 0.5
        if self.score is not None:
            places *= h
            np.clip(places, -8.0, 8.0, out=places)
            step = _moments(mass, places, h, self.score, d)
            places *= h * step[..., None]
        else:
            places *= 0.5 * h * h
            np.clip(places, -4.0 * h, 4.0 * h, out=places)
        places += np.arange(grid.bins)
        np.clip(places, 0.0, grid.bins - 1.5, out=places)  # the ends have no mass
        kernel = np.exp(-0.5 * q * (1.0 - (binned + 1.0) / (6.0 * h * h)))
        return np.fft.rfft(_shared(places, mass, grid.bins)) * kernel, step

    def left_out(self, looks: Looks, k: int) -> LeftOut:
        """The criteria at a step of the search."""
        return self.said(looks.width(k), *self.sums(looks.width(k)))

    def sums(self, h: float) -> tuple[Array, ...]:
        """The sums by fold from which :meth:`said` forms the criteria; densities p̂ are per bin."""
        grid, held = self._grid(h), self.held[:, None]
        out = self._binned(grid)
        seen, others = np.fft.rfft(out), np.maximum(1.0 - held, 1e-12)
        rest, spectrum = np.maximum(out.sum(0) - out, 0.0) / others, (seen.sum(0) - seen) / others
        spectrum = self._estimate(grid, rest, spectrum, grid.h, 1.0)[0]
        seen *= np.exp(grid.frequencies**2 / 12.0)  # as if these samples were not binned
        squares = _inner(spectrum, spectrum, grid.bins), _inner(seen, spectrum, grid.bins)
        density = np.maximum(np.fft.irfft(spectrum, grid.bins), 1e-15)
        root = np.sqrt(np.sqrt(density))
        return *squares, dots(density, root), dots(out, root), dots(out, np.log(density))

    def said(self, h: float, square: Array, cross: Array, power: Array, rooted: Array, logs: Array) -> LeftOut:
        """The criteria, from ∫p̂² and ∫p̂^(1+β) over bins, and sums over left-out samples of p̂, p̂^β and log p̂."""
        unit, held = BINS / h, self.held
        likelihood = math.nan * held if self.method == "laplace" else -logs / held - math.log(unit)
        return LeftOut(unit**0.25 * (power - 5.0 * rooted / held), unit * (square - 2.0 * cross / held), likelihood)

    def deviations(self, looks: Looks, pilot: int) -> Callable[[int], tuple[float, ...]]:
        """Return a function of a step: ∫ bias², ∫ mean² and the move of its estimate, if the pilot's were the density.

        Integrals are over bins, 2 · BINS of them to the pilot's bandwidth. ``pilot`` is a step.
        """
        grid = self._grid(looks.width(pilot), 2.0)
        mass = self._binned(grid).sum(0)
        density = self._estimate(grid, mass, np.fft.rfft(mass), grid.h, 1.0, "sdkde")[0]
        density = np.maximum(np.fft.irfft(density, grid.bins), 0.0)
        density /= density.sum()
        spectrum = np.fft.rfft(density)

        def at(k: int) -> tuple[float, ...]:
            mean, step = self._estimate(grid, density, spectrum, grid.h * math.exp(STEP * (k - pilot)), 0.0)
            bias = mean - spectrum
            return float(_inner(bias, bias, grid.bins)), float(_inner(mean, mean, grid.bins)), float(step)

        return at


class Looks:
    """The search for the minimum of the rule's criterion, over bandwidths unit · e^(STEP k) from k = ``last`` down."""

    def __init__(self, line: Line, rule: str, unit: float) -> None:
        criterion, last = RULES.index(rule), 0 if rule == "auto" else 5
        self.line, self.unit, self.last, self.known = line, unit, last, dict[int, LeftOut]()

        def at(k: int) -> Any:
            if k not in self.known:
                self.known[k] = line.left_out(self, k)
            return self.known[k][criterion]

        @functools.cache
        def loss(k: int) -> float:
            return float(line.held @ at(k))

        for k in range(last, -32, -3):
            at(k)
            best = min(self.known, key=loss)
            if best - k >= 9 and all(_errors(line, at(j), at(best)) > 3.0 for j in range(k, k + 9, 3)):
                break
        least = min(self.known, key=loss)
        self.errors = _errors(line, at(last), at(least))  # standard errors by which the widest is worse
        self.best = descend(loss, least, -31, last)

    def width(self, k: float) -> float:
        return self.unit * math.exp(STEP * k)

    def refined(self) -> float:
        """The step with the least expected error; its pilot is found likewise, from the search's best as pilot.

        The second time removes half of the noise of left-out samples. It would make Laplace estimates too wide: they
        get the mean of the search's best and the first result.
        """
        once = self._expected(self.best)
        return 0.5 * (self.best + once) if self.line.method == "laplace" else self._expected(once)

    def _expected(self, pilot: float) -> float:
        """The step with the least expected error near that of the pilot's bandwidth."""
        line, middle, unit = self.line, round(pilot), 2 * BINS / self.width(round(pilot))
        deviations = line.deviations(self, middle)

        def error(k: int) -> float:
            (bias, square, step), h = deviations(k), self.width(k) * unit
            variance = roughness(line.method, 1, step, line.score or 1.0) / (2.0 * math.sqrt(math.pi) * h)
            return (bias + (variance - square) / line.n_eff) * unit

        return descend(error, middle, middle - 4, min(middle + 4, self.last))


def _errors(line: Line, fold: Array, best: Array) -> float:
    """By how many standard errors, from its folds, a criterion is larger than the best."""
    differences = fold - best
    mean = float(line.held @ differences)
    variance = float(line.held @ (differences - mean) ** 2) / (len(fold) - 1)
    return mean / math.sqrt(variance) if variance > 0.0 else 0.0


def descend(loss: Callable[[int], float], k: int, first: int, last: int) -> float:
    """The step of a local minimum, by a parabola through its neighbours."""
    at, before = functools.cache(loss), first - 1
    while k != before:
        near = [j for j in (k - 1, k, k + 1) if first <= j <= last]
        before, k = k, min(near, key=at)
    return vertex(k, *map(at, near)) if len(near) == 3 else float(k)


def vertex(k: int, low: float, here: float, high: float) -> float:
    """Where the parabola through values at k − 1, k and k + 1 is least; k where it opens downwards."""
    curvature = low - 2.0 * here + high
    return float(k + 0.5 * (low - high) / curvature) if curvature > 0 else float(k)


def _moments(mass: Array, s: Array, h: float, c: float, d: float) -> Array:
    """The step "moments" of mass in bins (…, bins) with shifts s, in bandwidths of h bins: estimator/moving.py.

    ``d``: the kernels' variance, in h².
    """
    m, s, u = np.atleast_2d(mass), np.atleast_2d(s), np.arange(mass.shape[-1]) / h
    total, weighted = m.sum(-1), m * s
    shift = weighted.sum(-1) / total
    towards = (dots(m, u) * shift - dots(weighted, u)) / total
    squares = np.maximum(dots(weighted, s) / total - shift * shift, 1e-300)
    rest = towards * towards - squares * d
    root = np.where(rest > 0.0, d / (towards + np.sqrt(np.maximum(rest, 0.0))), towards / squares)
    step = np.clip(np.where(towards > 1e-100, root, 0.5), 0.5 if c == 1.0 else 0.0, 1.2 * c * c)
    return step.reshape(mass.shape[:-1])


def _shared(places: Array, mass: Array, bins: int) -> Array:
    """Mass at places (…, n) before the last bin, each shared between the two bins around it: (…, bins)."""
    low, shape = np.floor(places), places.shape[:-1]
    share, size = mass * (places - low), math.prod(shape) * bins
    index = (low.astype(np.intp) + np.arange(0, size, bins).reshape(*shape, 1)).ravel()
    total = np.bincount(index, (mass - share).ravel(), size) + np.bincount(index + 1, share.ravel(), size)
    return np.reshape(total, (*shape, bins))


def _inner(a: Array, b: Array, bins: int) -> Array:
    """Σ over bins, an even number, of the products of two functions with these spectra, (…,)."""
    products = a.real * b.real + a.imag * b.imag
    return (2.0 * products.sum(-1) - products[..., 0] - products[..., -1]) / bins
