"""Prepared training sets: validated, whitened, moved and packed once, then any number of queries."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, overload

import numpy as np

from ..archive import write
from ..arrays import Argument, Array, Origin, check_names, check_query, numbers, public, to_host
from ..arrays.frames import Column, Frame, Kind, Plain, Same, T, labelled
from ..arrays.places import is_attached, is_followed
from ..bandwidth.matrix import Bandwidth
from ..messages import brief
from ..protocol import Kernel, Precision
from .batches import Advance, answered, check_out, densities, watched
from .climbing import clusters, modes
from .conditionals import Conditionals
from .fitted import Fitted, with_fallback
from .integrals import distribution, log_thresholds, moments, probability, quantiles
from .laplace import NegativeMass
from .mapped import Mapped, leaves, mapped, shares
from .mixture import Mixture, check_count, check_positive, components, conditional, draws, marginal
from .plan import plan
from .request import Goal, Method, Progress, Request
from .saved import from_saved, origin_of, to_saved
from .stacked import stacked


class Average(NamedTuple):
    """A mean over points, in nats, and its standard error."""

    mean: float
    standard_error: float


@dataclass(frozen=True, eq=False, repr=False)
class Prepared:
    """A training set made ready for queries by :func:`sdkde_core.prepare`.

    It is immutable, and safe to use from several threads. A pickle or copy has the moved samples: a process or host
    that loads it only packs them, for the same backend, or for the best one that it has.
    :meth:`save` writes the same to a file that is safe to load.

    Attributes
    ----------
    method : {"sdkde", "kde", "laplace", "stacked"}
    kernel : str
    n_train, n_dimensions : int
    bandwidth : Bandwidth
    precision : {"fast", "high", "float64"}
    backend, device : str
        What was chosen.
    """

    _fitted: Any  # Fitted, or of a stacked density Stacked
    _dtype: str
    _origin: Origin = field(default_factory=Origin)

    @property
    def method(self) -> Method:
        return self._fitted.request.method

    @property
    def kernel(self) -> Kernel:
        return self._fitted.request.kernel

    @property
    def n_train(self) -> int:
        return self._fitted.problem.n

    @property
    def n_dimensions(self) -> int:
        return self._fitted.problem.d

    @property
    def bandwidth(self) -> Bandwidth:
        return self._fitted.bandwidth

    @property
    def precision(self) -> Precision:
        return self._fitted.problem.precision

    @property
    def backend(self) -> str:
        return self._fitted.current.choice.name

    @property
    def device(self) -> str:
        return self._fitted.current.choice.where

    @overload
    def estimate(self, query: Plain, *, log: bool = False, out: Any = None, progress: Progress = False) -> Array: ...
    @overload
    def estimate(self, query: Kind, *, log: bool = False, progress: Progress = False) -> Kind: ...
    @overload
    def estimate(self, query: Frame[T], *, log: bool = False, progress: Progress = False) -> T: ...
    @overload
    def estimate(
        self, query: Any, *, log: bool = False, out: Array | None = None, progress: Progress = False
    ) -> Any: ...
    @public
    def estimate(self, query: Any, *, log: bool = False, out: Any = None, progress: Progress = False) -> Any:
        """Estimate the density at ``query``.

        The values are those of ``sdkde_core.estimate(train, query, ...)``, within the bounds of the precision.

        Parameters
        ----------
        query : (m, d) or (m,) array_like
            As for :func:`sdkde_core.estimate`, but required.
            A torch tensor that requires grad, or is within ``torch.func``, has derivatives (``docs/gradients.md``).
        log : bool
            Return log p̂. Laplace: NaN where p̂ < 0, with one RuntimeWarning, or −inf where that is clipped.
        out, progress
            As for :func:`sdkde_core.estimate`: with one of them the rows are cut into batches.

        Returns
        -------
        (m,) array
            ``out``, or an array of the kind and on the device of ``query``, with the wider dtype of query and training
            samples; for a data frame of pandas a Series with its index.

        Raises
        ------
        TypeError, ValueError
            A query that cannot be right.
        BackendUnavailable
            The backend that was named, or with ``"auto"`` any, cannot answer queries so far from the training samples.
        """
        if out is None and progress is False and is_followed(query):
            return self._followed("log" if log else "density", query)
        given = self._fitted.asked(query)
        check_out(out, given)
        with watched(progress, given) as advance:
            result = densities(self._fitted, given, log, out, advance)
        if out is not None or type(query) is np.ndarray:
            return result
        return labelled(query, result, "log_density" if log else "density")

    def pdf(self, query: Any) -> Any:
        """Return the density at ``query``, (m,), as :meth:`estimate` does; ``density(query)`` is the same."""
        return self.estimate(query)

    __call__ = pdf

    def logpdf(self, query: Any) -> Any:
        """Return the log density at ``query``, (m,), as :meth:`estimate` does with ``log=True``."""
        return self.estimate(query, log=True)

    @public
    def negative_mass(self) -> NegativeMass:
        """Return how much of the Laplace estimate is below zero: ∫ max(−p̂, 0), before ``negative`` changes that.

        The estimate integrates to 1, and its positive part to 1 + that mass. It is found by quadrature in one
        dimension; in more, and where samples lie scattered over a thousand bandwidths, by 8192 draws with a fixed seed.
        The first call computes it, and keeps it.

        Returns
        -------
        NegativeMass
            With ``mass`` and its ``standard_error``, 0 by quadrature.

        Raises
        ------
        ValueError
            The method is not ``"laplace"``: other estimates are never negative.
        """
        if self.method != "laplace":
            raise ValueError(f"method={self.method!r} is never negative; the negative mass is that of method='laplace'")
        return self._fitted.serve(lambda fitted: fitted.negative_mass)

    @overload
    def grad_log_density(self, query: Plain, *, progress: Progress = False) -> Array: ...
    @overload
    def grad_log_density(self, query: Column[T], *, progress: Progress = False) -> T: ...
    @overload
    def grad_log_density(self, query: Same, *, progress: Progress = False) -> Same: ...
    @overload
    def grad_log_density(self, query: Any, *, progress: Progress = False) -> Any: ...
    @public
    def grad_log_density(self, query: Any, *, progress: Progress = False) -> Any:
        """Return the score ∇log p̂ at ``query``, (m, d), per data unit; NaN where a Laplace estimate is negative.

        The first call packs the training samples for it, and keeps them. ``progress`` as for
        :func:`sdkde_core.estimate`. For kde and sdkde the score has derivatives by a query that requires grad.
        """
        self._gaussian("gradient")
        if progress is False and is_followed(query):
            return self._followed("score", query)
        given = self._fitted.asked(query)
        with watched(progress, given) as advance:
            result = answered(self._fitted, given, "score", advance=advance)
        return result if type(query) is np.ndarray else labelled(query, result, "grad_log_density")

    @public
    def sample(self, n: int = 1, random_state: Any = None) -> Any:
        """Draw from the density; exact, for every kernel, shape of bandwidth and weights. Not for ``method="laplace"``.

        Parameters
        ----------
        n : int
        random_state : None, int, numpy.random.Generator or numpy.random.RandomState
            One seed gives the same draws on one device; on a GPU others than on the host.

        Returns
        -------
        (n, d) array
            Of the kind, on the device and with the dtype of the training samples; of a data frame NumPy's.
        """
        return self._origin.restore(draws(self._fitted.current, check_count("n", n), random_state), self._dtype)

    @public
    def mixture(self) -> Mixture:
        """Return the density as a mixture of normals: means, weights and their covariance. Not for laplace."""
        fitted = self._gaussian("normal components")
        check_positive(fitted, "is no mixture of normals")
        return components(fitted)

    @public
    def mean(self) -> Any:
        """Return the mean (d,) of the density, NumPy's: exact, or in other coordinates by quadrature for each column.

        ValueError for a circular column, whose mean depends on the cut. In coordinates ``"log"`` the guard of the tails
        may reach so far that it makes up most of the mean: ``tails="plain"`` leaves the guard out.
        """
        return moments(self._fitted.current, both=False)[0]

    @public
    def cov(self) -> Any:
        """Return the covariance (d, d): the kernels' centres' plus the kernels' own, which is 0 for laplace; exact.

        In other coordinates it is found by quadrature in one dimension; ValueError in more, with a recipe.
        """
        return moments(self._fitted.current, both=True)[1]

    @public
    def entropy(self, *, n: int = 10_000, random_state: Any = 0) -> Average:
        """Estimate the entropy −∫ p̂ log p̂, in nats: the ``mean`` of −log p̂ over ``n`` draws, with ``standard_error``.

        Not for ``method="laplace"``. The same ``random_state``, see :meth:`sample`, gives the same draws.
        """
        return _average(-to_host(self.logpdf(self.sample(n, random_state))), "n draws")

    @public
    def hdr(self, mass: Any, *, log: bool = False, n: int = 10_000, random_state: Any = 0) -> Any:
        """Return the density at the border of the smallest region that holds ``mass`` of the probability.

        A point is in that highest-density region where ``density.pdf(y) >= density.hdr(mass)``. In one dimension this
        is by quadrature on cells of a 32nd of a kernel's width, up to 65,536. In more it is the quantile 1 − mass of
        the density at ``n`` draws (Hyndman, 1996): the mass has a standard error of √(mass (1 − mass) / n).

        Parameters
        ----------
        mass : float or array_like
            Between 0 and 1.
        log : bool
            Return logs, for :meth:`logpdf`, which hold in many dimensions too.
        n, random_state
            Of the draws, see :meth:`sample`.

        Returns
        -------
        float, or array of the shape of ``mass``
            Usable as levels of contours.
        """
        shares = numbers("mass", mass)
        if not ((shares > 0) & (shares < 1)).all():
            raise ValueError(f"mass is {brief(mass)}; pass probabilities between 0 and 1, such as 0.95")
        if check_count("n", n) < 2:
            raise ValueError(f"n is {n}; pass at least 2 draws")
        found = log_thresholds(self._fitted, shares, n, random_state)
        return (found if log else np.exp(found))[()]

    @public
    def marginal(self, dims: Any) -> Prepared:
        """Return the density of some of the dimensions, in closed form, prepared.

        Parameters
        ----------
        dims : int, str, or sequence of these
            Indices, in the order wanted; of a data frame names too.
        """
        return replace(self, _fitted=marginal(self._gaussian("marginals"), dims))

    @public
    def conditional(self, given: Mapping[Any, Any]) -> Any:
        """Return the density of the other dimensions where some have the values given, in closed form, prepared.

        It is again a mixture: the same components, of other weights. Not for ``method="laplace"``.

        Parameters
        ----------
        given : mapping of int or str to float, or to (m,) array_like
            Values in data units, by index, or by name for a data frame; such as ``{0: 1.5}``.

        Returns
        -------
        Prepared, or of arrays Conditionals
            Conditionals are m densities, whose ``mean()``, ``quantile(q)`` and ``pdf(y)`` have a row for each:
            regression curves.
        """
        fitted = self._gaussian("conditionals")
        if isinstance(given, Mapping) and any(map(is_attached, given.values())):
            raise TypeError("given has a tensor that requires grad, which is not followed; pass value.detach()")
        if isinstance(given, Mapping) and any(np.ndim(value) for value in given.values()):
            return Conditionals(self, given)
        return replace(self, _fitted=conditional(fitted, given))

    @public
    def probability(self, lower: Any, upper: Any) -> float:
        """Return the probability of the box between two corners.

        Needs SciPy. Exact to rounding where the bandwidth is one number per dimension. A full matrix takes quadrature
        in two dimensions, right to some 1e-10, and Genz's method over 32 to 16,384 points a kernel in more, to 1e-4.

        Parameters
        ----------
        lower, upper : float or (d,) array_like
            In data units; may be infinite. Dimensions without bounds are integrated out first.
        """
        return probability(self._gaussian("probabilities"), lower, upper)

    @public
    def cdf(self, x: Any) -> Any:
        """Return the distribution function at ``x``, in one dimension: (m,), or a number for a number. Needs SciPy.

        Right to rounding, relative to itself in the lower tail. Laplace's is not monotone.
        """
        below, given = distribution(self._gaussian("distribution function")), Argument.of("x", x)
        check_names(self._fitted.names, given.names, "x")
        values = given.at(Origin())
        if np.isnan(values).any():
            raise ValueError("x has NaN; drop or fill it")
        return _beside(given, below(values.ravel()).reshape(values.shape)[()])

    @public
    def quantile(self, q: Any) -> Any:
        """Return the quantiles, the inverse of :meth:`cdf`, in one dimension: (m,), or a number for a number."""
        values = numbers("q", q)
        if not ((values >= 0) & (values <= 1)).all():
            raise ValueError(f"q is {brief(q)}; pass probabilities from 0 to 1")
        return _beside(q, quantiles(self._gaussian("quantiles"), values.ravel()).reshape(values.shape)[()])

    @public
    def modes(self, starts: Any = None) -> Any:
        """Return the local maxima that mean shift reaches (k, d), highest first. Not for ``method="laplace"``.

        Parameters
        ----------
        starts : (m, d) array_like, optional
            Where mean shift starts. Default: up to 512 of the kernels' centres, by a fixed seed. A mode that no
            start climbs to is not found.
        """
        return modes(self._gaussian("modes"), None if starts is None else self._near("starts", starts))

    @public
    def labels(self, query: Any = None, *, return_modes: bool = False) -> Any:
        """Return the clusters of points: which mode each climbs to by mean shift. Not for ``method="laplace"``.

        In up to four dimensions the points of a cell of half a bandwidth (of an adaptive density's narrowest kernels)
        climb as one, along the density of samples joined in such cells: points within a quarter of a bandwidth of a
        border may have the label beyond it.

        Parameters
        ----------
        query : (m, d) array_like, optional
            Default: the training samples; for sdkde the moved ones.
        return_modes : bool
            Return the modes too, (k, d), highest first.

        Returns
        -------
        (m,) array of int
            Each point's mode, 0 the highest; −1 where the density is 0. A tensor for a tensor.
        """
        fitted = self._gaussian("modes")
        found, labels = clusters(fitted, self._places() if query is None else self._near("query", query))
        labels = labels if query is None else _beside(query, labels, "int64")
        return (labels, found) if return_modes else labels

    def _near(self, name: str, points: Any) -> Any:
        """Points (m, d) on the host to climb from."""
        rows = self._fitted.asked(points).at(Origin()).reshape(-1, self.n_dimensions)
        away = self.bandwidth.whiten(rows, to_host(self._fitted.centre))
        if not len(rows) or not (abs(away) < 1e140).all():  # squares of distances must stay finite
            raise ValueError(f"{name} is empty, not finite, or too far away; pass points within 1e140 bandwidths")
        return rows

    def _places(self) -> Any:
        """Where the samples are, (n, d), in their order."""
        first = self.parts[0][2]._fitted.current if self.parts else self._fitted.current
        if self._fitted.request.adaptive:
            raise ValueError("query is None, but an adaptive density has its samples in another order; pass them")
        inner = first if first.coordinates is None else first.first.current
        z = to_host(inner.centre) + inner.bandwidth.stretch(to_host(inner.columns.points)[: self.n_train])
        if first.coordinates is None:
            return z
        return first.coordinates.inverse(z if first.ends is None else first.coordinates.folded(z))

    @public
    def divergence(self, other: Prepared, samples: Any = None, *, n: int = 10_000, random_state: Any = 0) -> Average:
        """Return the mean of log p̂ − log q̂, q̂ the other density; it is positive where held-out samples favour p̂.

        Parameters
        ----------
        other : Prepared
            Of as many dimensions.
        samples : (m, d) array_like, optional
            Held-out samples. Default: ``n`` draws of this density; the result is then the Kullback–Leibler divergence
            from the other density to this one.
        n : int
        random_state : see :meth:`sample`

        Returns
        -------
        Average
            ``mean``, in nats, and ``standard_error``.
        """
        if not isinstance(other, Prepared) or other.n_dimensions != self.n_dimensions:
            raise TypeError(f"other is {brief(other)}; pass a prepared density of {self.n_dimensions} dimensions")
        points = self.sample(n, random_state) if samples is None else Argument.of("samples", samples)
        ours, theirs = (to_host(one.estimate(points, log=True)) for one in (self, other))
        return _average(ours - theirs, "samples")

    def plot(self, samples: Any = None, **options: Any) -> Any:
        """Draw the density with matplotlib: its curve, its contours in two dimensions, or all pairs in more.

        ``options`` and the result are those of ``sdkde_core.plots.curves``, ``contours`` or ``pairs``.
        """
        plots = importlib.import_module("sdkde_core.interop.plots")
        name = {1: "curves", 2: "contours"}.get(self.n_dimensions, "pairs")
        return getattr(plots, name)(self, samples, **options)

    @public
    def save(self, path: Path | str) -> None:
        """Write it to one file, which :func:`sdkde_core.load` reads here and elsewhere; an older one is replaced.

        The file has the samples, moved and whitened, and all that was decided from them. It is no pickle; its format is
        described in :mod:`sdkde_core.archive`. After an error or an interrupt an older file is as it was.

        Parameters
        ----------
        path : path
            In a folder that exists; by custom it ends in ``.sdkde``.

        Raises
        ------
        OSError
            It cannot be written; or a file is there that is not empty, and was not written by ``save``.
        TypeError
            ``backend_options`` has something else than booleans, numbers, strings, and lists and dicts of those.
        """
        write(path, "Prepared", *self.to_saved())

    def to_saved(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the content and the arrays of a file."""
        return to_saved(self._fitted, self._origin)

    @classmethod
    def from_saved(cls, content: Mapping[str, Any], arrays: Mapping[str, Any], name: str) -> Prepared:
        """Return the density that :meth:`to_saved` described; ValueError where the file ``name`` cannot be right."""
        fitted = from_saved(content, arrays, name)
        return cls(fitted, fitted.problem.dtype, origin_of(content))

    def _followed(self, what: str, query: Any) -> Any:
        """Return ``what`` at a tensor, with derivatives."""
        if is_attached(query):
            self._gaussian("derivatives")
        check_query(Argument("query", query, "", Origin()), self.n_train, self.n_dimensions)
        return follow(lambda: self, what, query.reshape(query.shape[0], self.n_dimensions))

    @public
    def _of_tensors(self, what: str, query: Any, vectors: Any = None) -> Any:
        """Answer ``what`` at tensors without derivatives, for :class:`.queried.Answer`."""
        given = self._fitted.asked(query)
        if what in ("density", "log"):
            return densities(self._fitted, given, what == "log")
        self._gaussian("derivatives")
        if what != "curvature":
            return answered(self._fitted, given, what if self.method == "laplace" else "score")
        if self.method == "laplace" or not self._fitted.groups:
            these = "laplace, of a stacked density and of one with coordinates or support"
            instead = "prepare with method='sdkde' or 'kde' alone"
            raise ValueError(f"the gradient of {these} has no derivatives of its own; {instead}")
        return self._fitted.serve(lambda fitted: fitted.curved(fitted.read(given), vectors)) if len(query) else vectors

    def _gaussian(self, what: str) -> Any:
        """The fitted density; ValueError unless its kernel is the Gaussian, the only one with ``what``."""
        if (kernel := self.kernel) != "gaussian":
            raise ValueError(f"{kernel=} has densities and draws, no {what}; prepare with kernel='gaussian'")
        return self._fitted.current

    @property
    def parts(self) -> tuple[tuple[str, float, Prepared], ...]:
        """The parts of a stacked density, whose weighted sum it is: of each the label, the share and the density."""
        return tuple((p.label, math.exp(p.log_share), replace(self, _fitted=p.fitted)) for p in leaves(self._fitted))

    def _repr_html_(self) -> str:
        """Show the settings, and small curves of up to six columns, in a notebook."""
        return importlib.import_module("sdkde_core.interop.plots").page(self)

    def __repr__(self) -> str:
        size, first = f"{self.n_train} × {self.n_dimensions}", self._fitted
        t = first.coordinates or (first.parts[0].fitted.coordinates if first.parts else None)
        where = "" if t is None else f", {t}" if t.ends is not None else f" in coordinates {t}"
        if parts := shares(self._fitted):
            listed = ", ".join(f"{100.0 * share:.0f} % {label}" for label, (share, _) in parts.items())
            return f"Prepared(stacked, {size}: {listed}{where}; {self.precision}, {self.backend} on {self.device})"
        how = self.method if self.kernel == "gaussian" else f"{self.method}, {self.kernel} kernel"
        how += f", adaptive {alpha:g}" if (alpha := self._fitted.request.adaptive) else ""
        h = self._fitted.request.annotated(self.bandwidth)
        return f"Prepared({how}, {size}, {h}{where}, {self.precision}, {self.backend} on {self.device})"


def _beside(given: Any, found: Any, dtype: str = "") -> Any:
    """Results on the host as tensors where a tensor was given, on its device."""
    query = Argument.of("query", given)
    there = query.origin.restore(np.asarray(found), dtype or query.dtype)
    return found if query.origin.xp is None else there.reshape(np.shape(found))


def _average(values: Any, name: str) -> Average:
    values = np.asarray(values, dtype=np.float64)
    if values.size < 2:
        raise ValueError(f"{name} has fewer than 2 points; pass more")
    return Average(float(values.mean()), float(values.std(ddof=1) / math.sqrt(values.size)))


def follow(density: Callable[[], Prepared], what: str, query: Any) -> Any:
    """Return a density's answer at a tensor; ``density()`` makes it where ``torch.func`` shows the numbers."""
    from .queried import Answer, refuse_twice_forward, torch  # which the tensor's owner has imported

    refuse_twice_forward()
    if query.ndim not in (1, 2):
        raise ValueError(f"query has shape {tuple(query.shape)}; pass (points, dimensions), or (points,) in one")
    recorded = torch.is_grad_enabled()

    def compute(*asked: Any) -> Any:
        with torch.set_grad_enabled(recorded):  # what requires grad is refused as ever
            found = density()
        return found._of_tensors(*asked)

    return Answer.apply(compute, what, query if query.ndim == 2 else query[:, None])


def fit(request: Request, train: Any, expected: Argument | None = None, advance: Advance | None = None) -> Prepared:
    """Fit a density; ``expected``: a query that comes later, as for :func:`.plan.plan`."""
    if request.goal is not Goal.DENSITY:
        request = replace(request, goal=Goal.DENSITY)
    if request.mapped:
        request, z, coordinates, n = mapped(request, train)
        inner = fit(request, z, expected, advance)
        return replace(inner, _fitted=Mapped(inner._fitted, coordinates, n))
    if request.method == "stacked":
        return Prepared(*with_fallback(request, lambda tried: stacked(tried, train)))

    def compute(request: Request) -> Prepared:
        ready = plan(request, train, expected=expected)  # which refuses tensors that require grad
        return Prepared(Fitted.of(ready, advance), ready.data.dtype, ready.data.origin)

    return with_fallback(request, compute)
