"""Binned samples and an FFT on a grid, by linear interpolation at the queries: KDEpy and statsmodels, default grids."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..subjects import Call, Subject, Task


def kdepy(task: Task) -> Call:
    from KDEpy import FFTKDE
    from scipy.interpolate import RegularGridInterpolator

    def whole(x: Any, y: Any, h: float) -> Any:
        grid, p = FFTKDE(bw=h).fit(x).evaluate()
        if x.shape[1] == 1:
            return np.interp(y[:, 0], np.ravel(grid), p)
        axes = [np.unique(column) for column in grid.T]
        return RegularGridInterpolator(axes, p.reshape([len(a) for a in axes]), bounds_error=False)(y)

    return Call(whole, "density")


def statsmodels(task: Task) -> Call:
    from statsmodels.nonparametric.kde import KDEUnivariate

    def whole(x: Any, y: Any, h: float) -> Any:
        found = KDEUnivariate(x[:, 0])
        found.fit(bw=h, fft=True)
        return np.interp(y[:, 0], found.support, found.density)

    return Call(whole, "density")


HOST = {"methods": ("kde",), "devices": ("cpu",), "dtype": "float64", "compiles": False}
SUBJECTS = [
    Subject("KDEpy FFTKDE", kdepy, ("KDEpy",), "pip install KDEpy", dimensions=(1, 2, 3), **HOST),
    Subject("statsmodels FFT", statsmodels, ("statsmodels",), "pip install statsmodels", dimensions=(1,), **HOST),
]
