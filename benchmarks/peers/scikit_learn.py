"""scikit-learn's KernelDensity, exact and by its tree, and SciPy's gaussian_kde: on the host."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from ..subjects import Call, Subject, Task


def tree(task: Task, rtol: float) -> Call:
    from sklearn.neighbors import KernelDensity

    def whole(x: Any, y: Any, h: float) -> Any:
        return KernelDensity(bandwidth=h, rtol=rtol, atol=0).fit(x).score_samples(y)

    return Call(whole, "log")


def scipy(task: Task) -> Call:
    from scipy.stats import gaussian_kde

    class Isotropic(gaussian_kde):  # type: ignore[misc]
        """One bandwidth for all dimensions, which SciPy's own class, a multiple of the covariance, has in one only."""

        def _compute_covariance(self) -> None:
            h, eye = self.covariance_factor(), np.eye(self.d)
            self.covariance, self.cho_cov = h**2 * eye, h * eye
            self.log_det = 2 * self.d * np.log(h * np.sqrt(2 * np.pi))

    def whole(x: Any, y: Any, h: float) -> Any:
        return Isotropic(x.T, bw_method=h).logpdf(y.T)

    return Call(whole, "log")


HOST = {"methods": ("kde",), "devices": ("cpu",), "most": {"cpu": 3e8}, "dtype": "float64", "compiles": False}
SUBJECTS = [
    Subject(
        f"scikit-learn{f', rtol {rtol:g}' if rtol else ''}",
        functools.partial(tree, rtol=rtol),
        ("sklearn",),
        "pip install scikit-learn",
        **HOST,
    )
    for rtol in (0.0, 1e-4, 1e-2, 1e-1)
] + [Subject("SciPy", scipy, ("scipy",), "pip install scipy", **HOST)]
