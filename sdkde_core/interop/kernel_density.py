"""scikit-learn's estimator ``KernelDensity``, on this library's densities."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from ..api import prepare
from ..archive import jsonable, plain, write
from ..arrays import Array, refuse_masked, refuse_misread
from ..bandwidth.matrix import Bandwidth
from ..bandwidth.rules import BandwidthLike
from ..coordinates import OfColumns, listed
from ..estimator.prepared import Prepared
from ..estimator.request import ALL_METHODS, NEGATIVE, TAILS, Method, Negative, Support
from ..protocol import PRECISIONS, Kernel, Precision

try:
    from sklearn import neighbors
    from sklearn.base import _fit_context
    from sklearn.utils import check_random_state
    from sklearn.utils._param_validation import HasMethods, StrOptions
    from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
except ImportError as error:
    how = f"pip install 'sdkde-core[sklearn]' ({error})"
    raise ImportError(f"sdkde_core.KernelDensity needs scikit-learn, 1.6 or newer: {how}") from error


class KernelDensity(neighbors.KernelDensity):
    """scikit-learn's ``KernelDensity``, with bandwidths chosen from the data, debiasing, and backends.

    Its parameters, defaults and results are those of :class:`sklearn.neighbors.KernelDensity`.

    Parameters
    ----------
    bandwidth : float, str, (d,) or (d, d) array_like, or Bandwidth
        ``"scott"`` and ``"silverman"`` are scikit-learn's formulas, n^(−1/(d+4)) and (n (d+2)/4)^(−1/(d+4)), which do
        not look at the data's scale. Any other string is a rule of :func:`sdkde_core.estimate`, such as ``"auto"``,
        chosen from the data. One number per dimension is in the data's units, a matrix H in squared units.
    kernel : {"gaussian", "tophat", "epanechnikov", "exponential", "linear", "cosine"}
        Kernels other than the Gaussian need ``method="kde"``.
    rtol : float
        It decides ``precision="auto"``: ``"float64"`` (log densities to about 1e-10) below 1e-5, ``"high"`` below
        5e-4, then ``"fast"``, see :data:`sdkde_core.protocol.TOLERANCES`.
    metric, metric_params
        Only those that mean the Euclidean distance.
    algorithm, atol, breadth_first, leaf_size
        These change nothing: there is no tree.
    method : {"kde", "sdkde", "laplace", "stacked"}
        ``"sdkde"`` moves the samples once, in :meth:`fit`. ``"laplace"`` is signed: see ``negative``.
    step, score_bandwidth, adaptive, tails, coordinates, support, backend, device, backend_options
        As for :func:`sdkde_core.estimate`.
    negative : {"keep", "clip", "renormalise"}
        For values of ``"laplace"`` below zero log densities are NaN; −inf; or −inf, with other densities divided by
        their integral.
    precision : {"auto", "fast", "high", "float64"}
        ``"auto"`` goes by ``rtol``, whatever the environment says.

    Attributes
    ----------
    bandwidth_ : float, (d,) or (d, d) array
        The bandwidth given or chosen: a float where it is one number for all dimensions.
    density_ : Prepared
        The fitted density, in place of scikit-learn's ``tree_``.
    n_features_in_, feature_names_in_
        scikit-learn's.

    Examples
    --------
    >>> import numpy as np, sdkde_core
    >>> x = np.random.default_rng(0).normal(size=(500, 2))
    >>> model = sdkde_core.KernelDensity(method="sdkde", bandwidth="auto").fit(x)
    >>> model.score_samples([[0.0, 0.0]]).shape
    (1,)
    """

    _parameter_constraints: ClassVar[dict[str, Any]] = {
        **neighbors.KernelDensity._parameter_constraints,
        "bandwidth": [neighbors.KernelDensity._parameter_constraints["bandwidth"][0], str, "array-like", Bandwidth],
        "method": [StrOptions(set(ALL_METHODS))],
        "step": [None, Real, StrOptions({"moments"})],
        "score_bandwidth": [None, Real],
        "adaptive": [None, Real],
        "tails": [None, Real, StrOptions(set(TAILS))],
        "coordinates": [None, str, list, tuple, dict, HasMethods(["forward", "inverse", "log_jacobian"])],
        "support": [None, list, tuple, dict],
        "negative": [StrOptions(set(NEGATIVE))],
        "precision": [StrOptions({"auto", *PRECISIONS})],
        "backend": [str],
        "device": [None, str, list, tuple],
        "backend_options": [None, Mapping],
    }

    def __init__(
        self,
        *,
        bandwidth: BandwidthLike = 1.0,
        algorithm: str = "auto",
        kernel: Kernel = "gaussian",
        metric: str = "euclidean",
        atol: float = 0,
        rtol: float = 0,
        breadth_first: bool = True,
        leaf_size: int = 40,
        metric_params: dict[str, Any] | None = None,
        method: Method = "kde",
        step: float | Literal["moments"] | None = None,
        score_bandwidth: float | None = None,
        adaptive: float | None = None,
        tails: float | Literal["guard", "plain"] | None = None,
        coordinates: OfColumns | None = None,
        support: Support | None = None,
        negative: Negative = "keep",
        precision: Literal["auto", Precision] = "auto",
        backend: str = "auto",
        device: str | Sequence[str] | None = None,
        backend_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(bandwidth=bandwidth, kernel=kernel, metric=metric, metric_params=metric_params, rtol=rtol)
        self.algorithm, self.atol, self.breadth_first, self.leaf_size = algorithm, atol, breadth_first, leaf_size
        self.method, self.step, self.score_bandwidth = method, step, score_bandwidth
        self.adaptive, self.tails, self.coordinates, self.support = adaptive, tails, coordinates, support
        self.negative, self.precision = negative, precision
        self.backend, self.device, self.backend_options = backend, device, backend_options

    @_fit_context(prefer_skip_nested_validation=True)
    def fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> KernelDensity:
        """Fit the density to samples X (n_samples, n_features), and return the estimator; ``y`` is ignored.

        Samples are dense, and finite unless scikit-learn's ``assume_finite`` is set. ``sample_weight`` (n_samples,) is
        not negative.
        """
        params = {"p": 2, **(self.metric_params or {})}
        if self.metric not in ("euclidean", "l2", "minkowski", "p") or params != {"p": 2}:
            given = f" with metric_params={self.metric_params}" if self.metric_params else ""
            why = "kernels are functions of the Euclidean distance here"
            scaled = "with numbers per dimension or a matrix as bandwidth for a scaled or Mahalanobis distance"
            instead = f"pass metric='euclidean', {scaled}, or take sklearn.neighbors.KernelDensity"
            raise ValueError(f"invalid metric {self.metric!r}{given}: {why}; {instead}")
        refuse_misread("X", X)
        refuse_masked("sample_weight", sample_weight)
        X = validate_data(self, X, order="C", dtype=np.float64)
        if sample_weight is not None:
            sample_weight = _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
        # The cheapest precision whose log densities keep ``rtol``.
        kept = "fast" if self.rtol >= 5e-4 else "high" if self.rtol >= 1e-5 else "float64"
        h, (n, d) = self.bandwidth, X.shape
        if isinstance(h, str):  # scikit-learn has two formulas of its own
            h = {"scott": n ** (-1 / (d + 4)), "silverman": (n * (d + 2) / 4) ** (-1 / (d + 4))}.get(h, h)
        own = "method", "step", "score_bandwidth", "adaptive", "tails", "kernel", "negative", "backend", "device"
        options: dict[str, Any] = {name: getattr(self, name) for name in (*own, "backend_options")}
        options |= {"bandwidth": float(h) if isinstance(h, Real) else h, "weights": sample_weight}
        options |= {"precision": kept if self.precision == "auto" else self.precision}
        options |= {"coordinates": self._by_column("coordinates"), "support": self._by_column("support")}
        # scikit-learn has checked that X is finite, or was told not to.
        self.density_: Prepared = prepare(X, check_finite=False, **options)
        self.bandwidth_ = _plain(self.density_.bandwidth)
        return self

    def score_samples(self, X: Any) -> Array:
        """Return log densities (n_samples,); where laplace is negative NaN, with a RuntimeWarning, or −inf."""
        check_is_fitted(self)
        refuse_misread("X", X)
        X = validate_data(self, X, order="C", dtype=np.float64, reset=False)
        return self.density_.estimate(X, log=True)

    def score(self, X: Any, y: Any = None, sample_weight: Any = None) -> float:
        """Return Σ w_i log p̂(x_i); ``sample_weight`` (n_samples,) is not negative, and 1 by default."""
        logs = self.score_samples(X)
        if sample_weight is None:
            return np.sum(logs)
        refuse_masked("sample_weight", sample_weight)
        w = _check_sample_weight(sample_weight, logs, dtype=np.float64, ensure_non_negative=True)
        return np.sum(w[w > 0] * logs[w > 0])  # a sample of no weight may have no density

    def sample(self, n_samples: int = 1, random_state: Any = None) -> Array:
        """Return (n_samples, n_features) random samples from the density.

        NotImplementedError where the kernel is neither Gaussian nor tophat, as with scikit-learn: ``density_.sample``
        draws from all. ValueError for ``method="laplace"``, which is signed.
        """
        check_is_fitted(self)
        kind = self.density_.kernel
        if kind not in ("gaussian", "tophat"):
            raise NotImplementedError(f"kernel={kind!r} is not sampled here, as by scikit-learn; call density_.sample")
        return self.density_.sample(n_samples, check_random_state(random_state))

    def _by_column(self, name: str) -> Any:
        """A parameter, a dict by columns turned into a list, as only the estimator knows their names."""
        value, names = getattr(self, name), tuple(getattr(self, "feature_names_in_", ()))
        return listed(value, self.n_features_in_, names, name) if isinstance(value, dict) else value

    def save(self, path: Path | str) -> None:
        """Write the fitted estimator to one file, which :func:`sdkde_core.load` reads; see :meth:`Prepared.save`.

        The parameter ``bandwidth`` is saved as ``bandwidth_`` if it is an array or a :class:`Bandwidth`.
        """
        check_is_fitted(self)
        content, arrays = self.density_.to_saved()
        parameters = self.get_params(deep=False)
        if not isinstance(self.bandwidth, str | Real):
            parameters["bandwidth"] = np.asarray(self.bandwidth_).tolist()
        parameters |= {name: self._by_column(name) for name in ("coordinates", "support")}
        parameters = {name: jsonable(value) for name, value in parameters.items()}
        own: dict[str, Any] = {"parameters": plain("KernelDensity", parameters), "density": content}
        if hasattr(self, "feature_names_in_"):
            own["feature_names"] = list(self.feature_names_in_)
        write(path, "KernelDensity", own, arrays)

    @classmethod
    def from_saved(cls, content: Mapping[str, Any], arrays: Mapping[str, Any], name: str) -> KernelDensity:
        """Return the saved estimator, for :func:`sdkde_core.load`; ValueError where the content cannot be right."""
        made = cls(**content["parameters"])
        made.density_ = Prepared.from_saved(content["density"], arrays, name)
        made._validate_params()
        made.bandwidth_, made.n_features_in_ = _plain(made.density_.bandwidth), made.density_.n_dimensions
        if made.density_.method != made.method:
            raise ValueError("its density and its parameters do not fit each other")
        if names := content.get("feature_names", []):
            if len(names) != made.n_features_in_ or not all(isinstance(name, str) for name in names):
                raise ValueError("its feature_names cannot be right")
            made.feature_names_in_ = np.array(names, dtype=object)
        return made


# scikit-learn asks for the signature in every fit, and making it takes a tenth of a fit.
KernelDensity.__init__.__signature__ = inspect.signature(KernelDensity.__init__)  # type: ignore[attr-defined]


def _plain(bandwidth: Bandwidth) -> Any:
    """A float where all h_j are equal, else (d,) in data units, or the matrix H."""
    h = np.asarray(bandwidth)
    return float(h[0]) if h.ndim == 1 and (h == h[0]).all() else h
