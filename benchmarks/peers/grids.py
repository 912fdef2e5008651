"""Binned samples and an FFT on a grid, by linear interpolation at the queries: KDEpy and statsmodels.

Default grids, and of KDEpy one with about 2²⁰ points in all as well (2¹⁴ in one dimension), which costs it time.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from ..subjects import Call, Subject, Task

FINE = {1: 2**14, 2: (1024, 1024), 3: (101, 101, 101)}


def kdepy(task: Task, fine: bool) -> Call:
    from KDEpy import FFTKDE
    from scipy.interpolate import RegularGridInterpolator

    def whole(x: Any, y: Any, h: float) -> Any:
        grid, p = FFTKDE(bw=h).fit(x).evaluate(FINE[x.shape[1]] if fine else None)
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
    Subject(
        f"KDEpy FFTKDE{', fine grid' if fine else ''}",
        functools.partial(kdepy, fine=fine),
        ("KDEpy",),
        "pip install KDEpy",
        dimensions=(1, 2, 3),
        **HOST,
    )
    for fine in (False, True)
] + [
    Subject("statsmodels FFT", statsmodels, ("statsmodels",), "pip install statsmodels", dimensions=(1,), **HOST),
]
