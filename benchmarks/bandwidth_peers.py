"""Other libraries' choices of a bandwidth for KDE."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["peers"]

GRID_SEARCH = 2000, 3  # samples and draws at most for scikit-learn's: 15 s a draw with 2000, minutes beyond

Array = NDArray[Any]


def peers(samples: Array, index: int) -> dict[str, tuple[Any, float]]:
    """Other libraries' bandwidths for KDE, by those that are installed, and the seconds that each takes.

    A number or a matrix, as :meth:`Bandwidth.of` takes them. scikit-learn's is one number for all columns: the best of
    25 by five folds.
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

    found: dict[str, tuple[Any, float]] = {}
    asked = {"scipy": n > d, "sklearn": n <= GRID_SEARCH[0] and index < GRID_SEARCH[1], "kdepy": d == 1}
    for call in (scipy, sklearn, kdepy):
        if not asked[call.__name__]:
            continue
        start = time.perf_counter()
        with contextlib.suppress(ImportError, ValueError, np.linalg.LinAlgError):  # not installed, not for these data
            found[call.__name__] = call(), time.perf_counter() - start
    return found
