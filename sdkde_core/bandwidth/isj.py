"""Improved Sheather–Jones: a plug-in bandwidth of one column for ``"kde"``, without a normal reference.

Z. I. Botev, J. F. Grotowski and D. P. Kroese, "Kernel density estimation via diffusion", Annals of Statistics 38
(2010), sections 4 and 5. The best h² = t of a KDE needs ‖p″‖², an estimate of which needs a bandwidth that needs ‖p‴‖²,
and so on: t = ξ γ⁽⁵⁾(t) closes that circle. On a grid of unit length ‖p⁽ˢ⁾‖² at bandwidth √t is a sum over the cosine
transform of the histogram.
"""

from __future__ import annotations

import math

import numpy as np

from ..arrays import Array


def improved_sheather_jones(x: Array, weights: Array | None, n_eff: float) -> float | None:
    """Return the bandwidth of one column, in its units; None where the equation has no solution that a grid resolves.

    Two things are done to the samples x (n,) that the paper does not do. Empty stretches of many bandwidths are
    shortened, so that neither outliers nor groups far apart cost resolution. Values that occur more than once, as in
    rounded data and counts, are spread evenly, halfway to the nearer neighbour on both sides, and h is at least half
    the width of that where most samples are of that kind: below, an estimate shows the rounding.
    """
    mass: Array
    if weights is None:
        values, counts = np.unique(x, return_counts=True)
        mass = counts / len(x)
    else:
        values, inverse, counts = np.unique(x, return_inverse=True, return_counts=True)
        mass = np.bincount(inverse, weights, len(values))
    gaps = np.diff(values)
    cell = np.where(counts > 1, np.minimum(np.append(gaps, gaps[-1]), np.insert(gaps, 0, gaps[0])), 0.0)
    order = np.argsort(cell)
    least = 0.5 * float(cell[order][_reached(mass[order], 0.5)])
    low, high = values[_reached(mass, 0.25)], values[::-1][_reached(mass[::-1], 0.25)]
    # Stretches without samples are shortened to three interquartile ranges, and while h is not resolved to 128 bins.
    gaps, bins = np.minimum(gaps, 3 * (high - low) or math.inf), 1 << 11
    for _ in range(12):  # grids; scales may be too many powers of ten apart
        at, cell = np.append(0.0, np.cumsum(gaps)), np.minimum(cell, gaps.max())
        # Half of the span is added on either side, as in the paper: the cosine transform mirrors what is beyond.
        length = 2.0 * at[-1] + float(cell.max())
        t = _fixed_point(_cosine_power(at + 0.5 * (length - at[-1]), mass, cell, length, bins), n_eff)
        if t is None:
            return None
        h, width = math.sqrt(t) * length, length / bins
        if h >= 8 * width:  # linear binning widens h by 1/(12·8²), 0.1 %
            return float(max(h, least))
        gaps = np.minimum(gaps, 128 * width)
        if gaps.sum() > 0.5 * at[-1]:
            bins *= 4
            if bins > 1 << 15:
                break
    return None


def _reached(mass: Array, share: float) -> int:
    """Index of the value at which so much of the weight is reached, however that is rounded."""
    return int(np.searchsorted(np.cumsum(mass), share - 1e-9))


def _cosine_power(at: Array, mass: Array, cell: Array, length: float, bins: int) -> Array:
    """Return a_k², k = 1 … bins − 1, of p = 1 + Σ_k a_k cos(π k x) on a unit interval, to which ``at`` is scaled.

    Binning is linear; of repeated values, which are spread, their distribution function at the bins' edges is taken.
    """
    lone, histogram = cell == 0, np.zeros(bins)
    place = at[lone] * (bins / length) - 0.5
    low = np.floor(place).astype(np.int64)
    for shift, share in ((0, low + 1.0 - place), (1, place - low)):
        histogram += np.bincount(low + shift, mass[lone] * share, bins)
    if not lone.all():
        middle, half, share = at[~lone], cell[~lone] / 2, mass[~lone]
        ends = np.stack([middle - half, middle + half], axis=1).ravel()
        reached = np.cumsum(np.stack([np.zeros_like(share), share], axis=1).ravel())
        edges = np.linspace(0.0, length, bins + 1)
        histogram += np.diff(np.interp(edges, np.maximum.accumulate(ends), reached))
    k = np.arange(1, bins)
    spectrum = np.fft.rfft(np.concatenate([histogram, histogram[::-1]]))[1:bins]
    return (spectrum * np.exp(-0.5j * np.pi * k / bins)).real ** 2


def _fixed_point(power: Array, n: float) -> float | None:
    """Return the least solution of t = ξ γ⁽⁵⁾(t), or the least t that the grid holds if larger; None without one."""
    stages = 7  # derivatives that are estimated: ‖p⁽⁷⁾‖² at h itself, then ‖p⁽⁶⁾‖² … ‖p″‖², as in the paper
    k2 = np.arange(1.0, len(power) + 1) ** 2 * math.pi**2
    terms = [k2**s * power for s in range(stages + 1)]  # (π k)²ˢ a_k²

    def off(log_t: float) -> float:
        """Log t less log ξ γ⁽⁵⁾(t): which h² is best if ‖p⁽⁷⁾‖² is that at bandwidth √t."""
        t = math.exp(log_t)
        for s in range(stages, 1, -1):
            some = slice(k2.searchsorted(700.0 / t))  # the exponential of the others underflows
            norm = 0.5 * float((np.exp(-t * k2[some]) * terms[s][some]).sum())  # ‖p⁽ˢ⁾‖²; BLAS would start threads
            if norm == 0.0:
                return -math.inf
            if s > 2:  # the bandwidth for ‖p⁽ˢ⁻¹⁾‖²
                odd = math.prod(range(1, 2 * s - 2, 2)) * (1 + 0.5 ** (s - 0.5)) / 3
                t = (2 * odd / (math.sqrt(2 * math.pi) * n * norm)) ** (2 / (2 * s + 1))
        return log_t + 0.4 * math.log(2 * n * math.sqrt(math.pi) * norm)

    high = 2.0 * math.log(2.0 / (len(power) + 1))  # h of two bins; to a third of the length
    over = off(high)
    if over >= 0:
        return math.exp(high)
    while over < 0:
        if high > math.log(0.1) or math.isinf(over):
            return None
        low, below, high = high, over, high + 0.7
        over = off(high)
    for _ in range(60):  # false position, by Illinois: an end that stays counts half
        middle = low - below * (high - low) / (over - below)
        value = off(middle)
        if value < 0:
            low, below, over = middle, value, over / 2
        else:
            high, over, below = middle, value, below / 2
        if abs(value) < 1e-10:
            break
    return math.exp(middle)
