"""SciPy's class ``gaussian_kde``, on this library's densities. It needs SciPy for integrals over boxes only."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from numbers import Real
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ..api import estimate, prepare, select_bandwidth
from ..archive import jsonable, plain, write
from ..arrays import Argument, Array, Origin, array_namespace, numbers, public, to_host
from ..arrays.frames import Values
from ..bandwidth.matrix import Bandwidth
from ..bandwidth.rules import Rule, check_rule, resolve
from ..bandwidth.sample import Sample
from ..bandwidth.selection import CHOOSERS
from ..coordinates import OfColumns, fit, listed
from ..engine.forks import cached_property
from ..estimator.batches import densities
from ..estimator.integrals import corner
from ..estimator.mixture import check_count
from ..estimator.prepared import Prepared
from ..estimator.request import Goal, Method, Request, Support
from ..messages import brief
from ..protocol import Precision


class gaussian_kde:
    """SciPy's ``gaussian_kde``, with bandwidths chosen from the data, debiasing, and backends.

    Arguments, defaults, attributes and results are those of :class:`scipy.stats.gaussian_kde`; arguments after
    ``weights`` are additions. Subclasses may override ``covariance_factor``. The density is prepared at the first
    evaluation and kept until the bandwidth changes. ValueError for fewer samples than dimensions, or an invalid
    argument; numpy.linalg.LinAlgError where the covariance of the data is singular.

    Parameters
    ----------
    dataset : (d, n) or (n,) array_like
        Samples in columns; an array of any library that :func:`sdkde_core.prepare` takes.
    bw_method : str, float or callable, optional
        The factor of the bandwidth H = factor² · covariance of the data: a number, a function of this object that
        returns one, ``"scott"`` (the default) or ``"silverman"``, which are SciPy's formulas, or another rule of
        :func:`sdkde_core.estimate`, such as ``"auto"`` or ``"isj"``. Such a rule is for the data in units of their
        covariance; of one bandwidth per dimension the geometric mean is taken. Pass None for a stacked density, which
        chooses its own bandwidths.
    weights : (n,) array_like, optional
        Not negative; need not sum to 1.
    method : {"kde", "sdkde", "laplace", "stacked"}
        ``"sdkde"`` moves the samples to remove the leading bias. ``"laplace"`` is debiased too, but signed.
        ``"stacked"`` is a sum of sdkde and normal mixtures, in the dataset's coordinates unless others are named; it
        has several bandwidths, so ``factor``, ``covariance`` and their like raise AttributeError.
    coordinates, support : optional
        As for :func:`sdkde_core.estimate`; integrals of products are refused. The bandwidth and ``covariance`` are in
        these coordinates. With ``support`` the covariance has zeros between a column that ends and others, and
        ``"auto"``, ``"lscv"`` and ``"lcv"`` choose from samples with their images.
    step, score_bandwidth, precision, backend, device
        As for :func:`sdkde_core.estimate`.

    Attributes
    ----------
    dataset, d, n, weights, neff, factor, covariance, inv_cov, cho_cov
        SciPy's; ``covariance`` (d, d) is H, in squared data units.
    prepared : Prepared
        The density, with what SciPy's class lacks: gradient, quantiles, modes, conditionals.

    Examples
    --------
    >>> import numpy as np, sdkde_core
    >>> x = np.random.default_rng(0).normal(size=(2, 500))
    >>> kde = sdkde_core.gaussian_kde(x, "auto", method="sdkde")
    >>> kde([0.0, 0.0]).shape, kde.resample(7).shape
    ((1,), (2, 7))
    """

    # Of subclasses that do not call __init__.
    method: Method = "kde"
    _options: Mapping[str, Any] = {"precision": "float64", "backend": "auto", "device": None}
    _origin = Origin()
    _weights: Array | None = None
    _made: tuple[Any, Any, Prepared] | None = None
    _computed: Any = None, "auto"  # the covariance as it follows from the factor, which users may replace; a Bandwidth

    dataset: Any
    covariance: Array

    @public
    def __init__(
        self,
        dataset: Any,
        bw_method: Rule | float | Callable[[Any], Any] | None = None,
        weights: Values | None = None,
        *,
        method: Method = "kde",
        step: float | Literal["moments"] | None = None,
        score_bandwidth: float | None = None,
        coordinates: OfColumns | None = None,
        support: Support | None = None,
        precision: Literal["auto", Precision] = "float64",
        backend: str = "auto",
        device: str | Sequence[str] | None = None,
    ) -> None:
        moves = {"step": step, "score_bandwidth": score_bandwidth, "coordinates": coordinates, "support": None}
        self._options = {"precision": precision, "backend": backend, "device": device, **moves}
        Request.of(Goal.DENSITY, {"method": method, **self._options, "support": support})  # type: ignore[typeddict-item]  # or raises
        self.method = method
        columns = _columns("dataset", dataset)
        self.dataset, self._origin = columns.array, columns.origin
        self.d, self.n = self.dataset.shape
        if self.d * self.n < 2:
            raise ValueError("`dataset` input should have multiple elements.")
        if coordinates is not None:
            self._options = {**self._options, "coordinates": listed(coordinates, self.d)}
        supports = listed({} if support is None else support, self.d, what="support")
        if any(end is not None for ends in supports for end in ends):
            self._options = {**self._options, "support": supports}
        if weights is not None:
            self._weights = _normalised(weights, self.n)
        if self.d > self.n:
            many = f"Number of dimensions is greater than number of samples, {self.d} > {self.n}"
            instead = "Columns of `dataset` are points; consider transposing it."
            raise ValueError(f"{many}: the covariance is singular. {instead}")
        self.set_bandwidth(bw_method)

    @public
    def evaluate(self, points: Any) -> Any:
        """Return the density at ``points``, (m,) float64, of their kind and on their device.

        ``points`` are (d, m), (m,) in one dimension, or (d,) for one point. ValueError for points that have other
        dimensions than the dataset, or are not finite.
        """
        return self._evaluate(points, log=False)

    __call__ = evaluate

    def pdf(self, x: Any) -> Any:
        """Return the density: :meth:`evaluate`."""
        return self.evaluate(x)

    @public
    def logpdf(self, x: Any) -> Any:
        """Return the log density, right where the density underflows; NaN where a Laplace estimate is negative."""
        return self._evaluate(x, log=True)

    @public
    def integrate_gaussian(self, mean: Any, cov: Any) -> float:
        """Return the integral of the density times a normal density with that mean (d,) and covariance (d, d)."""
        mean, cov = np.atleast_1d(np.squeeze(numbers("mean", mean))), np.atleast_2d(numbers("cov", cov))
        if mean.shape != (self.d,):
            raise ValueError(f"mean does not have dimension {self.d}")
        if cov.shape != (self.d, self.d):
            raise ValueError(f"covariance does not have dimension {self.d}")
        result = 0.0
        for means, weights, kernel in self._kernels():
            total = _definite(kernel + cov, "cov and the covariance of the kernels do not add up to one.")
            u = total.whiten(means, mean)  # (n, d)
            terms = np.exp(total.log_constant - 0.5 * (u * u).sum(axis=1))
            if self.method == "laplace":  # whose kernel is N − ½ tr(H ∇∇ᵀ) N, which convolution leaves as it is
                h = total.whiten(total.whiten(kernel, np.zeros(self.d)).T, np.zeros(self.d))  # L⁻¹ H L⁻ᵀ
                terms *= 1 + 0.5 * (np.trace(h) - ((u @ h) * u).sum(axis=1))
            result += float(weights @ terms)
        return result

    def integrate_box_1d(self, low: float, high: float) -> float:
        """Return the integral of a one-dimensional density between two bounds."""
        if self.d != 1:
            raise ValueError("integrate_box_1d() only handles 1D pdfs")
        return self.integrate_box(low, high)

    @public
    def integrate_box(self, low_bounds: Any, high_bounds: Any, maxpts: Any = None, *, rng: Any = None) -> float:
        """Return the integral over a box, by :meth:`Prepared.probability`; needs SciPy.

        For laplace at most one dimension may have finite bounds. ``maxpts`` and ``rng`` change nothing.
        """
        low, high = corner("low_bounds", low_bounds, self.d), corner("high_bounds", high_bounds, self.d)
        sign = (-1) ** int((low > high).sum())  # as for any integral
        return sign * self.prepared.probability(np.minimum(low, high), np.maximum(low, high))

    @public
    def integrate_kde(self, other: Any) -> float:
        """Return the integral of the product with another gaussian_kde, of ours or SciPy's; not for laplace."""
        ours = isinstance(other, gaussian_kde)
        if not ours and not hasattr(other, "covariance"):
            raise TypeError(f"other is {brief(other)}; pass a gaussian_kde, this one or SciPy's")
        if other.d != self.d:
            raise ValueError("KDEs are not the same dimensionality")
        if "laplace" in (self.method, getattr(other, "method", "kde")):
            raise ValueError("integrate_kde is not for method='laplace', which is signed; pass 'sdkde' or 'kde'")
        how: Any = {**self._options, "method": "kde", "step": None, "score_bandwidth": None}
        total, theirs = 0.0, other._kernels() if ours else [(other.dataset.T, other.weights, other.covariance)]
        for (x, w, one), (y, v, two) in itertools.product(self._kernels(), theirs):
            how["bandwidth"] = _definite(one + two)
            total += w.sum() * float(v @ estimate(x, y, weights=w, **how))
        return total

    @public
    def resample(self, size: int | None = None, seed: Any = None) -> Any:
        """Return draws from the density, (d, size); for method="kde" a seed gives SciPy's draws.

        ``size`` is SciPy's by default, the whole part of neff as rounded there. ``seed``: an int, a Generator or
        RandomState of NumPy, or None for NumPy's global state.
        """
        if self.method == "laplace":
            raise ValueError("resample is not for method='laplace', which is signed; pass method='sdkde' or 'kde'")
        size = int(1.0 / (self.weights @ self.weights)) if size is None else check_count("size", size)
        if self._elsewhere:
            return self._origin.restore(to_host(self.prepared.sample(size, seed)).T, "float64")
        state: Any = np.random.mtrand._rand if seed is None else seed
        if not hasattr(state, "multivariate_normal"):
            state = np.random.RandomState(seed)
        if self.method == "stacked":
            return self._origin.restore(self.prepared.sample(size, state).T, "float64")
        ((means, weights, covariance),) = self._kernels()
        noise = state.multivariate_normal(np.zeros(self.d), covariance, size=size)
        chosen = state.choice(self.n, size=size, p=weights)
        return self._origin.restore((means[chosen] + noise).T, "float64")

    @public
    def marginal(self, dimensions: Any) -> gaussian_kde:
        """Return the density of some of the dimensions, in the order given; negative ones count from the end.

        With ``method="sdkde"`` or ``"stacked"`` it is the marginal of this density, until its bandwidth is changed.
        """
        dims = np.atleast_1d(to_host(Argument.of("dimensions", dimensions).array))
        if not np.issubdtype(dims.dtype, np.integer):
            what = "the indices of the marginal variables being retained"
            raise ValueError(f"Elements of `dimensions` must be integers - {what}.")
        kept = np.where(dims < 0, dims + self.d, dims)
        if len(np.unique(kept)) != len(kept):
            raise ValueError("All elements of `dimensions` must be unique.")
        invalid = (kept < 0) | (kept >= self.d)
        if invalid.any():
            wrong = str(dims[invalid]).replace("\n", "")
            raise ValueError(f"Dimensions {wrong} are invalid for a distribution in {self.d} dimensions.")
        dataset = array_namespace(self.dataset).stack([self.dataset[int(k), :] for k in kept])
        columns = {name: self._options.get(name) for name in ("coordinates", "support")}
        of_kept = {name: own and [own[int(k)] for k in kept] for name, own in columns.items()}
        options = {**self._options, **of_kept}
        result = gaussian_kde(dataset, vars(self).get("factor"), self._weights, method=self.method, **options)
        if self.method in ("sdkde", "stacked"):  # fitted anew in these dimensions, samples would move elsewhere
            result._made = result.dataset, result._computed[0], self.prepared.marginal([int(k) for k in kept])
        return result

    @public
    def save(self, path: Path | str) -> None:
        """Write it to one file, which :func:`sdkde_core.load` reads; as :meth:`Prepared.save`, which see.

        The loaded object has the same density, the factor as its ``bw_method``, and NumPy's arrays.
        """
        content, arrays = self.prepared.to_saved()
        factor = None if self.method == "stacked" else float(self.factor)
        options = plain("gaussian_kde", {name: jsonable(value) for name, value in self._options.items()})
        own = {"method": self.method, "options": options, "factor": factor, "density": content}
        given = {} if self._weights is None else {"weights": self._weights}
        if self.method != "stacked" and self.covariance is not self._computed[0]:  # the user's own
            given["covariance"] = self.covariance
        write(path, "gaussian_kde", own, arrays | given | {"dataset": self._samples.T})

    @classmethod
    def from_saved(cls, content: Mapping[str, Any], arrays: Mapping[str, Any], name: str) -> gaussian_kde:
        """Return the saved object, for :func:`sdkde_core.load`; ValueError where the content cannot be right."""
        given = arrays["dataset"], content["factor"], arrays.get("weights")
        made = cls(*given, method=content["method"], **content["options"])
        prepared = Prepared.from_saved(content["density"], arrays, name)
        if (prepared.n_train, prepared.n_dimensions, prepared.method) != (made.n, made.d, made.method):
            raise ValueError("its density and its dataset do not fit each other")
        if "covariance" in arrays:
            made.covariance = arrays["covariance"].reshape(made.d, made.d)
        made._made = made.dataset, vars(made).get("covariance"), prepared
        return made

    def scotts_factor(self) -> float:
        """Return neff^(−1/(d+4))."""
        return self.neff ** (-1 / (self.d + 4))

    def silverman_factor(self) -> float:
        """Return (neff (d+2)/4)^(−1/(d+4))."""
        return (self.neff * (self.d + 2) / 4) ** (-1 / (self.d + 4))

    #: The factor; a subclass may have its own, and :meth:`set_bandwidth` sets another.
    covariance_factor: Callable[..., Any] = scotts_factor

    @public
    def set_bandwidth(self, bw_method: Any = None) -> None:
        """Change the bandwidth; ``bw_method`` as for the class, None keeps ``covariance_factor``."""
        if self.method == "stacked":
            if bw_method is not None:
                raise ValueError(f"bw_method is {brief(bw_method)}; leave it out: a stack chooses its own bandwidths")
            return
        if isinstance(bw_method, str):
            formulas = {"scott": self.scotts_factor, "silverman": self.silverman_factor}
            self.covariance_factor = formulas.get(bw_method) or partial(float, self._factor_by(bw_method))
        elif isinstance(bw_method, Real):
            self.covariance_factor = partial(np.positive, +bw_method)  # pickles, and returns the number; +True is 1
        elif callable(bw_method):
            self.covariance_factor = partial(bw_method, self)
        elif bw_method is not None:
            instead = "'scott', 'silverman' or another rule, a number, or a callable"
            raise ValueError(f"bw_method is {brief(bw_method)}; pass {instead}")
        self._compute_covariance()

    @property
    def weights(self) -> Array:
        return np.full(self.n, 1 / self.n) if self._weights is None else self._weights

    @property
    def neff(self) -> float:
        return float(self.n) if self._weights is None else float(1 / (self._weights @ self._weights))

    @property
    def inv_cov(self) -> Array:
        return np.linalg.inv(self.covariance)

    def __getattr__(self, name: str) -> Any:
        text = f"{type(self).__name__!r} object has no attribute {name!r}"
        if self.method == "stacked" and name in ("factor", "covariance", "inv_cov", "cho_cov", "log_det"):
            text += ": a stacked density has kernels of several bandwidths; see those of prepared.parts"
        raise AttributeError(text, name=name, obj=self)

    @property
    def prepared(self) -> Prepared:
        made, covariance, (computed, bandwidth) = self._made, vars(self).get("covariance"), self._computed
        if made is None or made[0] is not self.dataset or made[1] is not covariance:
            if computed is not covariance:
                bandwidth = _definite(covariance)
            samples = self._samples if isinstance(self.dataset, np.ndarray) else self.dataset.T
            how: Any = {**self._options, "method": self.method, "weights": self._weights, "bandwidth": bandwidth}
            if self.method == "stacked":  # whose integrals are those of normals
                how["coordinates"] = how["coordinates"] or ("identity" if how["support"] is None else None)
            made = self._made = self.dataset, covariance, prepare(samples, **how)
        return made[2]

    @property
    def _samples(self) -> Array:
        """The dataset on the host, (n, d) float64."""
        return np.asarray(to_host(self.dataset), dtype=np.float64).T

    def _kernels(self) -> list[tuple[Array, Array, Array]]:
        """Means (k, d), weights (k,) and covariance (d, d) of kernels that have one covariance, on the host."""
        if self._elsewhere:
            raise ValueError("coordinates and support have no such integrals; leave them out, or average over draws")
        if self.method != "stacked":
            means = self.prepared.mixture().means if self.method == "sdkde" else self._samples
            return [(means, self.weights, self.covariance)]
        found = []
        for _, share, part in self.prepared.parts:
            means, weights, covariance, scales = part.mixture()
            for scale in np.unique(scales):  # a guard's kernels are wider
                here = scales == scale
                found.append((means[here], share * weights[here], covariance * scale**2))
        return found

    def _evaluate(self, points: Any, log: bool) -> Any:
        query = _columns("points", points)
        x = query.array.T if query.array.shape == (1, self.d) else query.array
        if x.shape[0] != self.d:
            raise ValueError(f"points have dimension {x.shape[0]}, dataset has dimension {self.d}; pass ({self.d}, m)")
        return densities(self.prepared._fitted, query._replace(array=x.T), log)

    def _compute_covariance(self) -> None:
        """Set what follows from ``covariance_factor``; SciPy's users call it."""
        factor = self.covariance_factor()
        if not 0 < abs(factor) < math.inf:
            raise ValueError(f"bw_method gives the factor {factor}; pass what gives a positive number")
        self.factor = factor
        self.covariance = self._data * factor**2
        self._computed = self.covariance, _definite(self.covariance)

    @property
    def _elsewhere(self) -> bool:
        return any(self._options.get(name) is not None for name in ("coordinates", "support"))

    @property
    def cho_cov(self) -> Array:
        root = _definite(self._data).factor
        return (root if root.ndim == 2 else root[:, None]) * float(self.factor)

    @property
    def log_det(self) -> Any:
        return 2 * np.log(np.diag(self.cho_cov) * math.sqrt(2 * math.pi)).sum()

    @cached_property
    def _mapped(self) -> Array:
        """The dataset (n, d) in the coordinates that the bandwidth is for."""
        x, own = self._samples, self._options
        return fit(own["coordinates"], x, self.weights, support=own["support"]).forward(x) if self._elsewhere else x

    @cached_property
    def _data(self) -> Array:
        """The covariance of the data, (d, d)."""
        covariance = Sample(self._mapped, self._weights, self.neff).covariance()
        covariance[np.isnan(covariance)] = 0.0  # 0/0 where a row is constant
        supports = self._options.get("support")
        if supports is not None:  # images of kernels that couple a column that ends would be turned
            ended = np.array([one != (None, None) for one in supports])
            covariance[(ended[:, None] | ended) & ~np.eye(self.d, dtype=bool)] = 0.0
        return covariance

    def _factor_by(self, rule: str) -> float:
        """The factor by a rule of :func:`.estimate`, for the data in units of their covariance."""
        try:
            check_rule(rule, self.method)
        except ValueError as error:
            raise ValueError(str(error).replace("bandwidth", "bw_method", 1)) from None
        if self._options.get("support") is not None and rule in CHOOSERS:
            how: Any = {name: self._options[name] for name in ("coordinates", "support")}
            how |= {"method": self.method, "rule": rule, "weights": self._weights}
            chosen = select_bandwidth(self._samples, base=self._data, **how)
            return math.exp((chosen.log_determinant - _definite(self._data).log_determinant) / self.d)
        x = self._mapped
        log_weights = None if self._weights is None else np.log(self._weights)
        whitened = _definite(self._data).whiten(x, x.mean(axis=0))
        chosen = resolve(rule, whitened, log_weights, method=self.method, common=True)
        return math.exp(chosen.log_determinant / self.d)


def _columns(name: str, value: Any) -> Argument:
    argument = Argument.of(name, value)
    x, xp = argument.array, array_namespace(argument.array)
    if x.ndim > 2:
        raise ValueError(f"{name} has shape {argument.shape}; pass (dimensions, points), or (points,) in one dimension")
    if not xp.all(xp.isfinite(x)):
        raise ValueError(f"{name} has values that are not finite; drop or fill them")
    return argument if x.ndim == 2 else argument._replace(array=xp.reshape(x, (1, -1)))


def _normalised(weights: Any, n: int) -> Array:
    w = np.atleast_1d(to_host(Argument.of("weights", weights).array)).astype(np.float64)
    if w.ndim != 1:
        raise ValueError("`weights` input should be one-dimensional.")
    if len(w) != n:
        raise ValueError(f"`weights` input should be of length n: it has {len(w)}, dataset has {n} columns")
    if not ((w >= 0) & (w < math.inf)).all() or not w.any():
        raise ValueError("weights has values that are negative or not finite, or none above zero; pass weights ≥ 0")
    w = w / w.max()  # so that the sum does not overflow
    return w / w.sum()


def _definite(covariance: Any, otherwise: str = "") -> Bandwidth:
    """Return the bandwidth H, in one dimension as a number; LinAlgError where H is not positive definite."""
    try:
        return Bandwidth.of(covariance if len(covariance) > 1 else math.sqrt(covariance[0, 0]), len(covariance))
    except ValueError as error:
        lower = "a lower-dimensional subspace of the space in which it is expressed, so that its covariance is singular"
        instead = "Consider principal component analysis, and gaussian_kde of what that gives."
        raise np.linalg.LinAlgError(otherwise or f"The data appears to lie in {lower}. {instead}") from error
