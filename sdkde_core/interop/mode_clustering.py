"""A clusterer with scikit-learn's conventions: each point belongs to the mode of the density that it climbs to."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real
from typing import Any, ClassVar

import numpy as np

from ..api import prepare
from ..arrays import Array, refuse_masked, refuse_misread
from ..bandwidth.matrix import Bandwidth
from ..estimator.prepared import Prepared
from ..protocol import PRECISIONS

try:
    from sklearn.base import BaseEstimator, ClusterMixin, _fit_context
    from sklearn.utils._param_validation import StrOptions
    from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
except ImportError as error:
    how = f"pip install 'sdkde-core[sklearn]' ({error})"
    raise ImportError(f"sdkde_core.ModeClustering needs scikit-learn, 1.6 or newer: {how}") from error


class ModeClustering(ClusterMixin, BaseEstimator):
    """Clusters by the modes of a density estimate: mean shift, of the Gaussian kernel, for many points.

    There is a cluster for each mode. Points climb as for :meth:`Prepared.labels`.

    Parameters
    ----------
    bandwidth : float, str, (d,) or (d, d) array_like, or Bandwidth
        As for :func:`sdkde_core.estimate`. The best bandwidth for the density, ``"auto"``, may have small modes where a
        few samples lie apart; a wider one, such as ``1.5 * select_bandwidth(X)``, has fewer.
    method : {"sdkde", "kde", "stacked"}
    precision, backend, device
        As for :func:`sdkde_core.estimate`.

    Attributes
    ----------
    labels_ : (n_samples,) array of int
    cluster_centers_ : (n_clusters, n_features) array
        The modes, highest first.
    density_ : Prepared
    n_features_in_, feature_names_in_
        scikit-learn's.

    Examples
    --------
    >>> import numpy as np, sdkde_core
    >>> x = np.random.default_rng(0).normal(size=(500, 2)) + 5 * (np.arange(500) % 2)[:, None]
    >>> model = sdkde_core.ModeClustering(bandwidth=1.0).fit(x)
    >>> len(model.cluster_centers_)
    2
    """

    _parameter_constraints: ClassVar[dict[str, Any]] = {
        "bandwidth": [Real, str, "array-like", Bandwidth],
        "method": [StrOptions({"kde", "sdkde", "stacked"})],
        "precision": [StrOptions({"auto", *PRECISIONS})],
        "backend": [str],
        "device": [None, str, list, tuple],
    }

    def __init__(
        self,
        *,
        bandwidth: Any = "auto",
        method: str = "sdkde",
        precision: str = "auto",
        backend: str = "auto",
        device: str | Sequence[str] | None = None,
    ) -> None:
        self.bandwidth, self.method, self.precision = bandwidth, method, precision
        self.backend, self.device = backend, device

    @_fit_context(prefer_skip_nested_validation=True)
    def fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> ModeClustering:
        """Find the clusters of samples X (n_samples, n_features), and return the estimator; ``y`` is ignored."""
        X = self._points(X, reset=True)
        if sample_weight is not None:
            refuse_masked("sample_weight", sample_weight)
            sample_weight = _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
        self.density_: Prepared = prepare(X, weights=sample_weight, **self.get_params(deep=False))
        self.labels_, self.cluster_centers_ = self.density_.labels(X, return_modes=True)
        return self

    def predict(self, X: Any) -> Array:
        """Return labels (n_samples,) of the clusters whose modes points climb to, or are nearest to the one they do."""
        check_is_fitted(self)
        labels, modes = self.density_.labels(self._points(X), return_modes=True)
        middle = np.zeros(self.n_features_in_)
        found, centres = (self.density_.bandwidth.whiten(x, middle) for x in (modes, self.cluster_centers_))
        nearest = [int(np.argmin(np.square(centres - one).sum(axis=1))) for one in found]
        return np.array([*nearest, -1], dtype=np.intp)[labels]

    def _points(self, X: Any, reset: bool = False) -> Array:
        refuse_misread("X", X)
        return validate_data(self, X, order="C", dtype=np.float64, reset=reset)
