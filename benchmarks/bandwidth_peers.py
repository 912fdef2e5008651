"""Other libraries' choices of a bandwidth for KDE."""

from __future__ import annotations

import contextlib
import math
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["peers", "plug_in"]

GRID_SEARCH = 2000, 3  # samples and draws at most for scikit-learn's: 15 s a draw with 2000, minutes beyond

Array = NDArray[Any]


def peers(samples: Array, index: int) -> dict[str, tuple[Any, float]]:
    """Other libraries' bandwidths for KDE, by those that are installed, and the seconds that each takes.

    A number or a matrix, as :meth:`Bandwidth.of` takes them. scikit-learn's is one number for all columns: the best of
    25 by five folds. R's is by its formula.
    """
    n, d = samples.shape

    def scipy() -> Any:
        from scipy.stats import gaussian_kde

        return gaussian_kde(samples.T).covariance

    def sklearn() -> Any:
        from sklearn.model_selection import GridSearchCV
        from sklearn.neighbors import KernelDensity

        grid = {"bandwidth": samples.std(0).mean() * np.geomspace(0.03, 2, 25)}
        return GridSearchCV(KernelDensity(), grid, cv=5).fit(samples).best_params_["bandwidth"]

    def kdepy() -> Any:
        from KDEpy.bw_selection import improved_sheather_jones

        return improved_sheather_jones(samples)

    def ks_hpi() -> Any:
        return plug_in(samples)

    found: dict[str, tuple[Any, float]] = {}
    asked = {
        "scipy": n > d,
        "sklearn": n <= GRID_SEARCH[0] and index < GRID_SEARCH[1],
        "kdepy": d == 1,
        "ks_hpi": d == 1,
    }
    for call in (scipy, sklearn, kdepy, ks_hpi):
        if not asked[call.__name__]:
            continue
        start = time.perf_counter()
        with contextlib.suppress(ImportError, ValueError, np.linalg.LinAlgError):  # not installed, not for these data
            found[call.__name__] = call(), time.perf_counter() - start
    return found


def plug_in(samples: Array, bins: int = 4096) -> float:
    """The two-stage direct plug-in of R's ``ks::hpi`` and ``KernSmooth::dpik``, for (n, 1) samples; binned as theirs.

    Wand and Jones, "Kernel Smoothing" (1995), section 3.6: ψ₈ by the normal scale; ψ₆ and ψ₄ by kernel estimates.
    """
    x, n = samples[:, 0], len(samples)
    sigma = min(x.std(), np.subtract(*np.quantile(x, (0.75, 0.25))) / 1.349)
    counts, edges = np.histogram(x, bins)
    pairs = np.fft.irfft(np.abs(np.fft.rfft(counts, 2 * bins)) ** 2)[:bins]  # by distance in bins
    distance = np.arange(bins) * (edges[1] - edges[0])

    def psi(order: int, g: float) -> float:
        """ψ of an order: the mean over all pairs of that derivative of N(0, g²)."""
        t = distance / g
        hermite = np.polynomial.hermite_e.hermeval(t, [0] * order + [1])
        terms = pairs * hermite * np.exp(-0.5 * t**2)
        return float(2 * terms.sum() - terms[0]) / (n**2 * math.sqrt(2 * math.pi) * g ** (order + 1))

    psi_8 = 105 / (32 * math.sqrt(math.pi) * sigma**9)
    psi_6 = psi(6, (30 / (math.sqrt(2 * math.pi) * psi_8 * n)) ** (1 / 9))
    psi_4 = psi(4, (-6 / (math.sqrt(2 * math.pi) * psi_6 * n)) ** (1 / 7))
    return (1 / (2 * math.sqrt(math.pi) * psi_4 * n)) ** (1 / 5)
