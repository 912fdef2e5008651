"""The public face: estimate, prepare, debias, grad_log_density, select_bandwidth, explain, backends, warm_up, …"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any, Unpack, overload

import numpy as np

from .arrays import Argument, Array, Origin, check_names, detached, is_attached, is_dask, is_traced, public, to_host
from .arrays.frames import Column, Frame, Kind, Plain, Rows, Same, T, Values, labelled
from .bandwidth.matrix import Bandwidth
from .bandwidth.rules import BandwidthLike, Rule, check_rule, resolve
from .choice import registry, select
from .coordinates import OfColumns
from .estimator import autograd, straight, warming
from .estimator.batches import answered, check_out, densities, watched
from .estimator.density import density, log_constant, undefined, warn_of_negative
from .estimator.explanation import Explanation, explained
from .estimator.fitted import Fitted, run, scores, slope, with_fallback
from .estimator.mapped import mapped, score_in
from .estimator.moving import displaced
from .estimator.plan import Plan, plan, read
from .estimator.prepared import Prepared, fit, follow
from .estimator.request import Asked, Goal, Options, Progress, Request, Score, Single, Support, Watched, takes_options
from .protocol import Partial

__all__ = ["backends", "debias", "estimate", "explain", "grad_log_density", "prepare", "select_bandwidth", "warm_up"]


# A result has the kind of the query, else of train. Two different kinds and Dask arrays get the last overload: Any.
@overload
def estimate(train: Plain, query: Plain | None = None, *, out: Any = None, **options: Unpack[Asked]) -> Array: ...
@overload
def estimate(train: Kind, query: None = None, **options: Unpack[Asked]) -> Kind: ...
@overload
def estimate(train: Rows, query: Kind, **options: Unpack[Asked]) -> Kind: ...
@overload
def estimate(train: Frame[T], query: Frame[T] | None = None, **options: Unpack[Asked]) -> T: ...
@overload
def estimate(train: Any, query: Any = None, *, out: Any = None, **options: Unpack[Asked]) -> Any: ...
@public
@takes_options
def estimate(
    train: Any,
    query: Any = None,
    *,
    log: bool = False,
    out: Array | None = None,
    progress: Progress = False,
    **options: Unpack[Options],
) -> Any:
    r"""Estimate the density of ``train`` at ``query``.

    Parameters
    ----------
    train : (n, d) or (n,) array_like
        Samples, in any units. One-dimensional: n samples in one dimension. NumPy, lists, data frames, and arrays of any
        library with the array API or DLPack (torch, CuPy, JAX), on any device; for Dask and for autograd see Notes.
    query : (m, d) or (m,) array_like, optional
        Where to evaluate; may be empty. Default: at the training points, each sample's own kernel included
        (resubstitution). Columns are those of ``train`` by their places; of two data frames they must have one order.
    method : {"sdkde", "kde", "laplace", "stacked"}
        ``"kde"`` is Σ_j w_j N(y; x_j, H); ``"sdkde"`` the same on samples moved by ½ H ∇log p̂(x_j), which removes the
        leading bias; ``"laplace"`` multiplies each kernel by 1 + d/2 − ½ r²_j: debiased too, but signed. ``"stacked"``
        is a sum of sdkde and normal mixtures, whose weights maximise the likelihood of left-out samples. It needs all
        samples in memory, and has derivatives by the query only.
    step : None, float or "moments"
        The multiple of H ∇log p̂ by which samples move (sdkde). ``"moments"``: the multiple, from ½ to 1.2, that gives
        the estimate the samples' total variance, in bandwidths (``docs/mathematics.md``). None: ½, as in the paper;
        if ``bandwidth="auto"``, ``"moments"``. In one dimension ``"auto"`` takes ½ for fewer than 100 samples, and for
        coarsely rounded samples a number that also removes the variance that rounding added.
    score_bandwidth : None or float
        The score's bandwidth (sdkde), as a multiple c of the bandwidth. For another c than 1 ``"moments"`` is a step
        from 0 to 1.2 c². None: 1, as in the paper; with ``bandwidth="auto"`` and ``step=None`` 1.4 in one dimension
        (for 100 samples or more) and in three to five, 2 in more.
    adaptive : None or float
        The exponent α of kernel widths λ_i = (p̂(x_i) / g)^−α, in bandwidths: wide where samples are rare
        (Abramson's α is ½). p̂ is a KDE, at the score's bandwidth, g its geometric mean over the samples. Widths are
        powers of √2 from ⅛ to 8. For sdkde a sample moves by λ_i² ``step`` (None: ½ − α). Not for laplace or autograd.
    tails : None, "guard", "plain" or float
        The share of the weight (``"guard"``: 0.02) in a second group of kernels, four times as wide, at the samples;
        at most 4,096 samples have one, which is wider if there are more. For sdkde and kde. None: 0 (``"plain"``); with
        ``bandwidth="auto"`` and sdkde 0.02, and less for more than 100 samples.
    bandwidth : str, float, (d,) or (d, d) array_like, or Bandwidth
        A number h or one h_j per dimension, in the data's units; a matrix H in squared units (a covariance); or a rule.
        ``"auto"`` chooses from the data for the method, per dimension or a matrix, see :func:`select_bandwidth`;
        ``"lscv"`` and ``"lcv"`` by the minimum of cross-validation, per dimension. Formulas: ``"normal-reference"``
        (the method's own), ``"silverman"``, ``"sdkde"`` and, for kde, ``"isj"`` (improved Sheather–Jones), all per
        dimension; ``"silverman-iso"``; ``"scott"`` and ``"silverman-full"`` (a multiple of the covariance, as in
        SciPy). ``docs/bandwidths.md`` compares them.
    coordinates : None, str, sequence, dict or object
        Monotone maps z = T(x) of columns: p̂(x) is the density estimated in z, times Π T′(x). ``"identity"``,
        ``"log"`` (values above 0), ``"logit"`` (between 0 and 1), ``"asinh"`` (about the median, by the IQR) or
        ``"normal-scores"`` (Φ⁻¹ of the column's estimated distribution function) for all columns; one for each, or
        a dict by number or by name for some; or an object with ``forward``, ``inverse`` and ``log_jacobian``, see
        ``docs/coordinates.md``. The bandwidth is in z. Where T is not defined the density is 0, and its gradient NaN.
        Derivatives are by the query only, and all samples must fit in memory. None: ``"identity"``; with
        ``method="stacked"`` the maps that left-out samples favour.
    support : sequence or dict, optional
        The ends of each column: None, ``(low, high)`` with None for an open end, or ``("circular", period)``; a dict
        by number or by name for some. The density is 0 outside, integrates to 1 between the ends, and does not sag
        there: samples near an end have images, after a map that flattens the density there; see ``docs/support.md``.
        Kernels couple no column that ends. What refuses ``coordinates`` refuses ``support``.
    kernel : {"gaussian", "tophat", "epanechnikov", "exponential", "linear", "cosine"}
        Scikit-learn's, of r_j, the distance in bandwidths: exp(−½ r²), 1, 1 − r², exp(−r), 1 − r, cos(π r / 2); all but
        the Gaussian and the exponential are 0 from r = 1 on, and log p̂ is −inf where no sample is within reach. Kernels
        other than the Gaussian need ``method="kde"``, a bandwidth in numbers, and a backend with the feature
        ``"kernel"``. They have no derivatives.
    weights : (n,) array_like, optional
        Not negative; need not sum to 1.
    negative : {"keep", "clip", "renormalise"}
        What becomes of the values of ``"laplace"`` below zero. ``"clip"``: zero. ``"renormalise"``: zero, and the
        others are divided by their integral, 1 + :meth:`Prepared.negative_mass`; not for autograd.
    log : bool
        Return log p̂, right where p̂ itself underflows. Laplace: NaN where p̂ < 0, with one RuntimeWarning, or −inf where
        that is clipped.
    out : (m,) array, optional
        A NumPy array of floats that takes the result, and is returned. It and ``query`` may be memory-mapped: queries
        are read and results written by batches of rows, so that neither is whole in memory.
    progress : bool or callable
        True shows a bar (tqdm's: ``pip install 'sdkde-core[progress]'``); a function is called with the number of rows
        done and of all rows. Every pass then runs in batches of rows.
    precision : {"auto", "fast", "high", "float64"}
        Errors of log p̂ of at most about 5e-4, 1e-5 or 1e-10 for every row (see
        :data:`sdkde_core.protocol.TOLERANCES`). ``"auto"``: the environment variable ``SDKDE_PRECISION``, else high for
        float64 input and fast for narrower. Points beyond 1e10, 1e9 or 1.5e4 bandwidths from the samples' median are
        refused (up to 1e9 float64 warns) where float64 does not hold how near they are to each other.
    backend : str
        A backend's name, or ``"auto"``: the environment variable ``SDKDE_BACKEND``, else the best by predicted time
        (:func:`explain` says which and why). For host data that includes a tenth of start-up, until :func:`warm_up`.
    device : {None, "cpu", "cuda", "cuda:0", …, "cuda:all"} or sequence of str
        Where to compute. None: the data's device, or a GPU for host data where that is faster, the copy included. If
        it is a GPU, host data of more than 2¹⁸ numbers are copied there before they are validated. Of several GPUs, as
        in ``["cuda:0", "cuda:1"]``, each takes some of the rows; the same list gives the same bits, and another
        number of GPUs may give others, within the precision's bounds.
    check_finite : bool
        Refuse NaN and inf; False skips the check.
    backend_options : mapping, optional
        Options of the named backend; NumPy's is ``threads``.

    Returns
    -------
    (m,) array
        In 1 / (units of x₁ · … · units of x_d); an array of the kind and on the device of ``query`` (else
        ``train``), with the wider dtype of the two, at least float32. Lists, integers and booleans count as float64.
        Of Dask arrays a Dask array, in the chunks of ``query`` (else ``train``). Of data frames of pandas a Series with
        the index, of xarray a DataArray with the coordinates; of others NumPy's (``docs/data-frames.md``).

    Raises
    ------
    TypeError, ValueError
        Input that cannot be right; the message names the argument and what to pass instead.
    BackendUnavailable
        The backend is unknown, not installed, or cannot do this.
    ImportError
        ``progress=True`` without tqdm.

    Notes
    -----
    With ``out`` or ``progress`` results agree with those of a call without them, within the precision's bounds.

    Where ``train``, ``query`` or ``weights`` is a Dask array the result, and that of :func:`debias`, is a lazy one
    (``docs/scaling-out.md``): invalid values raise when it is computed, and laplace's NaN with ``log=True`` come
    without a warning. ``bandwidth="isj"``, ``adaptive``, ``negative="renormalise"``, ``out`` and ``progress`` are
    refused.

    Where ``train``, ``query``, ``weights`` or ``bandwidth`` is a torch tensor that requires grad, the result is
    attached to autograd: first derivatives, by backends with the feature ``"grad"`` only, and not within
    ``torch.no_grad()``. The query (else ``train``) must be a tensor then, as the result is. A bandwidth that a rule has
    chosen is a constant to autograd; the derivative by a matrix H is that by its symmetric part. :func:`debias` and
    :func:`grad_log_density` differentiate too, and a prepared density by its query; ``out`` and ``progress`` refuse
    what requires grad. ``torch.func`` and forward mode may follow the query alone, and the samples are prepared then.

    Source: Epstein, Dwaraknath and Winnicki, "Flash-SD-KDE: Accelerating SD-KDE with Tensor Cores".

    Examples
    --------
    >>> import numpy as np, sdkde_core
    >>> x = np.random.default_rng(0).normal(size=(500, 2))
    >>> sdkde_core.estimate(x, [[0.0, 0.0]]).shape
    (1,)
    """
    request = Request.of(Goal.DENSITY, options, "query", "log", "out", "progress")
    if "dask.array" in sys.modules and any(map(is_dask, (train, query, request.weights))):
        from .scale import lazy

        return lazy(request, train, query, log, out, progress)
    return _evaluated(request, train, query, log, out, progress)


def _evaluated(request: Request, train: Any, query: Any, log: bool, out: Any, progress: Any) -> Any:
    """Return the density, its log or (for the goal GRADIENT) the score, with the query's labels."""
    given, score = train if query is None else query, request.goal is Goal.GRADIENT
    if out is not None or progress is not False:
        result = _by_batches(request, train, query, log, out, progress)
    elif "torch" in sys.modules and is_traced(query):
        return follow(cache(lambda: fit(request, train)), "score" if score else "log" if log else "density", query)
    elif request.apart or _by_query_alone(request, train, query):
        prepared = fit(request, train)
        return prepared.grad_log_density(given) if score else prepared.estimate(given, log=log)
    else:
        result = with_fallback(request, lambda tried: _computed(tried, train, query, log))
        warn_of_negative(undefined(request, result, log), result.shape[0], request.check_finite)
    if out is not None or type(given) is np.ndarray:
        return result
    return labelled(given, result, "grad_log_density" if score else "log_density" if log else "density")


def _by_query_alone(request: Request, train: Any, query: Any) -> bool:
    """Whether derivatives are by the query only: then samples are moved by any backend, at the same precision."""
    plain = request.passes[0].moves and request.backend == "auto" and not request.adaptive
    if not (plain and is_attached(query) and getattr(train, "dtype", None) == query.dtype):
        return False
    return not any(map(is_attached, (train, request.weights, request.bandwidth)))


def _by_batches(request: Request, train: Any, query: Any, log: bool, out: Any, progress: Any) -> Any:
    """The density or the score by batches of rows, for ``out`` or ``progress``."""
    x = Argument.of("train", train)
    given = x if query is None else Argument.of("query", query)
    check_out(out, given)
    with watched(progress, x if request.passes[0].moves else None, given) as advance:
        fitted = fit(request, train, given, advance)._fitted
        if request.goal is Goal.GRADIENT:
            return answered(fitted, given, "score", advance=advance)
        return densities(fitted, given, log, out, advance)


def _computed(request: Request, train: Any, query: Any, log: bool) -> Any:
    """Compute the density, its log or the score of all rows at once, attached to autograd where an input is."""
    if "torch" in sys.modules:  # else nothing is on a device or requires grad
        found, request = straight.estimate(request, train, query, log)
        if found is not None:
            return found
    ready = autograd.plan(request, train, query)
    if request.goal is Goal.GRADIENT:
        values = ready.bandwidth.pull_back(Origin.of(ready.data.train).restore(slope(ready), "float64"))
    else:
        renormalised = request.negative == "renormalise"
        constant = Fitted.of(ready).log_constant if renormalised else log_constant(request.kernel, ready.bandwidth)
        values = density(run(ready), constant, log, clip=request.negative != "keep")
    result = ready.data.origin.restore(values, ready.data.dtype)
    return result if result.shape[0] else autograd.tie(result, train, query, request.weights, request.bandwidth)


@public
@takes_options
def prepare(train: Any, *, progress: Progress = False, **options: Unpack[Options]) -> Prepared:
    """Do once what :func:`estimate` does with ``train`` in every call: validate, whiten, move (sdkde) and pack it.

    Parameters as for :func:`estimate`; ``progress`` follows the pass that moves the samples (sdkde). The bandwidth, the
    backend (the best for as many queries as samples) and the precision (with ``"auto"`` by the dtype of ``train``) are
    decided here, for all queries. The density has derivatives by its queries only: samples, weights and bandwidths that
    require grad are refused, except within ``torch.no_grad()``.

    Returns
    -------
    Prepared
        Its ``estimate(query, log=False)`` gives what ``estimate(train, query, ...)`` does, for any number of queries at
        a time, from any number of threads. It holds copies: ``train`` may change afterwards.

    Examples
    --------
    >>> import numpy as np, sdkde_core
    >>> x = np.random.default_rng(0).normal(size=(500, 2))
    >>> prepared = sdkde_core.prepare(x)
    >>> prepared.estimate([[0.0, 0.0]]).shape, prepared.estimate(x[:7]).shape
    ((1,), (7,))
    """
    request = Request.of(Goal.DENSITY, options, "progress")
    moves = request.passes[0].moves and request.method != "stacked"  # a stack is not fitted by rows
    with watched(progress, Argument.of("train", train) if progress is not False and moves else None) as advance:
        return fit(request, train, advance=advance)


@overload
def debias(train: Plain, *, score: Score = None, **options: Unpack[Watched]) -> Array: ...
@overload
def debias(train: Column[T], *, score: Score = None, **options: Unpack[Watched]) -> T: ...
@overload
def debias(train: Same, *, score: Score = None, **options: Unpack[Watched]) -> Same: ...
@overload
def debias(train: Any, *, score: Score = None, **options: Unpack[Watched]) -> Any: ...
@public
@takes_options
def debias(train: Any, *, score: Score = None, progress: Progress = False, **options: Unpack[Options]) -> Any:
    """Return the samples moved by ``step`` times H ∇log p̂(x_j): the samples whose KDE is the SD-KDE.

    With a bandwidth in numbers ``step`` is ½: half a mean-shift step. Other parameters as for :func:`estimate`. The KDE
    of the moved samples must have the bandwidth that moved them.

    Parameters
    ----------
    train : (n, d) or (n,) array_like
    score : callable or (n, d) array_like, optional
        ∇log p at the samples, per data unit, from elsewhere: a network, a diffusion model, or the truth. A callable
        gets ``train``. Default: the score of the KDE.

    Returns
    -------
    (n, d) array
        In the units of ``train``, of its kind, on its device; (n, 1) for one-dimensional input; of a Dask array lazy.
        For pandas a DataFrame with the index and the columns, for xarray a DataArray with the coordinates.

    Examples
    --------
    >>> import sdkde_core
    >>> sdkde_core.debias([[-1.0], [1.0]], bandwidth=1.0).round(2).tolist()  # towards each other
    [[-0.88], [0.88]]
    """
    request = Request.of(Goal.DEBIASED, options, "score", "progress")
    if request.mapped:
        request, z, coordinates, n = mapped(request, train)
        if score is not None:
            if coordinates.ends is not None:
                raise ValueError("score= has no support yet; pass one of them, or debias without the ends")
            score = partial(score_in, score, coordinates, train)
        there = to_host(debias(z._replace(dtype="float64"), score=score, progress=progress, **request.options()))[:n]
        return labelled(train, z.origin.restore(coordinates.inverse(coordinates.folded(there)), z.dtype))
    if score is not None:
        return labelled(train, _debiased_by(score, request, train))
    if is_dask(train) or is_dask(request.weights):
        from .scale import lazy

        return lazy(request, train, query=None, log=False, out=None, progress=progress)

    def compute(request: Request) -> Any:
        ready = autograd.plan(request, train)
        return _moved(ready, ready.request, scores(ready, advance))

    with watched(progress, None if progress is False else Argument.of("train", detached(train))) as advance:
        result = with_fallback(request, compute)
    return result if type(train) is np.ndarray else labelled(train, result)


def _debiased_by(score: Any, request: Request, train: Any) -> Any:
    if request.score_bandwidth is not None or request.adaptive:
        raise ValueError("score_bandwidth and adaptive are for the KDE's own score; leave them out beside score")
    ready = plan(request, train)
    given, (n, d) = Argument.of("score", score(train) if callable(score) else score), ready.data.train.shape
    if given.shape != (n, d) and not (d == 1 and given.shape == (n,)):
        raise ValueError(f"score has shape {given.shape}; pass one gradient for each sample: shape {(n, d)}")
    check_names(ready.data.names, given.names, "score")
    slope = given.at(Origin.of(ready.columns.points))
    if request.check_finite and not np.isfinite(to_host(slope)).all():
        raise ValueError("score has values that are not finite; mend it, or pass check_finite=False")
    shift = ready.bandwidth.pushed(slope[:, None] if slope.ndim == 1 else slope)
    return _moved(ready, replace(ready.request, score_bandwidth=None), Partial(shift[:, 0], shift))


def _moved(ready: Plan, request: Request, sums: Partial) -> Any:
    away = displaced(ready.columns, sums, request)
    away = ready.bandwidth.stretch(Origin.of(ready.data.train).restore(away, "float64"))
    return ready.data.origin.restore(ready.data.train + away, ready.data.dtype)


@overload
def grad_log_density(train: Plain, query: Plain | None = None, **options: Unpack[Watched]) -> Array: ...
@overload
def grad_log_density(train: Column[T], query: Column[T] | None = None, **options: Unpack[Watched]) -> T: ...
@overload
def grad_log_density(train: Same, query: None = None, **options: Unpack[Watched]) -> Same: ...
@overload
def grad_log_density(train: Rows, query: Same, **options: Unpack[Watched]) -> Same: ...
@overload
def grad_log_density(train: Any, query: Any = None, **options: Unpack[Watched]) -> Any: ...
@public
@takes_options
def grad_log_density(train: Any, query: Any = None, *, progress: Progress = False, **options: Unpack[Options]) -> Any:
    """Return the score ∇log p̂ at ``query`` (default: at the training points) of the density that ``method`` estimates.

    Parameters as for :func:`estimate`. With ``method="laplace"`` it is NaN where p̂ < 0, takes some ten times as long as
    the density, and is not attached to autograd.

    Returns
    -------
    (m, d) array
        Per data unit; of the kind and on the device of ``query`` (else ``train``), for data frames and labelled arrays
        as for :func:`debias`. Attached to autograd where something requires grad, so that a loss of the score can be
        minimised.

    Examples
    --------
    >>> import sdkde_core
    >>> sdkde_core.grad_log_density([0.0], [[-1.0], [1.0]], method="kde", bandwidth=1.0).tolist()  # towards 0
    [[1.0], [-1.0]]
    """
    return _evaluated(Request.of(Goal.GRADIENT, options, "query", "progress"), train, query, False, None, progress)


@public
def select_bandwidth(
    train: Any,
    *,
    method: Single = "sdkde",
    rule: Rule = "auto",
    weights: Values | None = None,
    base: BandwidthLike | None = None,
    coordinates: OfColumns | None = None,
    support: Support | None = None,
) -> Bandwidth:
    """Choose a bandwidth from the data, for a method, as ``bandwidth="auto"`` does; it keeps criteria and reason.

    A bandwidth is judged by the density that it gives to left-out samples. In one column these are all samples, up to
    262,144, by sums on a grid; otherwise up to 1,500, drawn by a fixed seed, by exact sums. A bandwidth chosen from
    fewer than n samples is scaled to n by the method's rate. Values of a rounded column are spread within their unit
    for the choice, and the bandwidth is at least half a unit.

    Parameters
    ----------
    train : (n, d) or (n,) array_like
        As for :func:`estimate`. With Triton the criteria of several columns of a GPU are summed there.
    method : {"sdkde", "kde", "laplace"}
        The estimator that the bandwidth is for.
    rule : {"auto", "lscv", "lcv"}
        ``"lscv"``: the minimum of least squares, an estimate of the integrated squared error. ``"lcv"``: the maximum of
        the likelihood; not for laplace, which is signed. ``"auto"`` is less noisy. In one column it chooses a pilot by
        a criterion that neither peaks nor far samples dominate, then minimises the error expected if the pilot's
        estimate were true (for sdkde with 100 to 2,000 samples improved Sheather-Jones counts too). In several columns
        it chooses a shape, a full matrix where that makes left-out samples clearly likelier, then the upper end of the
        bandwidths that least squares does not tell apart. It is never wider than is best for normal samples; few
        samples give the usual bandwidth. For sdkde ``"auto"`` expects and sets ``step="moments"``, except with ``base``
        or fewer than 100 samples in one column. Other rules of :func:`estimate` give their own bandwidth.
    weights : (n,) array_like, optional
    base : str, float, (d,) or (d, d) array_like, or Bandwidth, optional
        The shape of the bandwidth; a multiple of it is chosen. ``"scott"`` is the shape of the covariance.
        Default: in proportion to each column's spread, min(std, IQR/1.34), unless ``"auto"`` finds another.
    coordinates, support : optional
        As for :func:`estimate`; the bandwidth is for columns in these coordinates, and for samples with their images.

    Returns
    -------
    Bandwidth
        To be passed on as ``bandwidth``. Its ``selection`` has the curves of the criteria, the shape and the
        reason; :func:`sdkde_core.plots.selection` draws the curves.

    Raises
    ------
    TypeError, ValueError
        As :func:`estimate`.

    Examples
    --------
    >>> import numpy as np, sdkde_core
    >>> x = np.random.default_rng(0).normal(size=(500, 2))
    >>> h = sdkde_core.select_bandwidth(x)
    >>> h.selection.reason  # doctest: +SKIP
    '1.1 of the normal reference, the upper end of what least squares allows, each of 500 samples left out in turn'
    >>> sdkde_core.estimate(x, bandwidth=h).shape
    (500,)
    """
    check_rule(rule, method)
    if method == "stacked":
        raise ValueError("a stacked density has several bandwidths; pass method='sdkde' for that of its first part")
    given: dict[str, Any] = {"weights": weights, "coordinates": coordinates, "support": support}
    request = Request(Goal.DENSITY, method, 1.0 if base is None else base, **given)
    if request.mapped:
        request, train, _, _ = mapped(request, train, choosing=True)
    data, shape = read(request, train)
    data.check_finite()
    if base is None:
        return resolve(rule, data.train, data.log_weights, method=method, mixed=request.mixed)
    whitened = shape.whiten(data.train, data.train[:1, :])
    chosen = resolve(rule, whitened, data.log_weights, method=method, common=True)
    if chosen.selection is None:
        raise ValueError(f"rule is {rule!r}, which has its own shape; leave base out, or pass 'auto', 'lscv' or 'lcv'")
    return replace(shape.scaled(float(chosen.factor[0])), rule=f"{rule} × {shape.rule}", selection=chosen.selection)


@public
@takes_options
def explain(
    train_or_shape: Any, query_or_shape: Any = None, *, measure: bool = False, **options: Unpack[Options]
) -> Explanation:
    """Say what :func:`estimate` would do: its passes, every backend with reason and price, and the choice.

    Parameters
    ----------
    train_or_shape, query_or_shape : array_like, or tuple of int
        The data, or their shape alone: ``(n, d)`` or ``(n,)``. From a shape, the extent is that of normal data under
        Silverman's rule, the dtype float64.
    measure : bool
        Also run the passes, and report their times, and how much of a Laplace estimate is below zero. Needs the data.

    Other parameters as for :func:`estimate`.

    Returns
    -------
    Explanation
        ``str()`` for people, ``to_dict()`` for programs.
    """
    return explained(Request.of(Goal.DENSITY, options, "measure"), train_or_shape, query_or_shape, measure=measure)


@public
def backends() -> tuple[registry.Record, ...]:
    """Return a record of every backend plugin: name, status, reason, distribution, and what it declares.

    Imports none of their dependencies and never raises; a broken plugin is listed with its cause.
    """
    return registry.records()


@public
def warm_up(device: str | Sequence[str] | None = None) -> dict[str, dict[str, float]]:
    """Start every backend on a device and compile its common kernels: ``backend="auto"`` then counts neither.

    Without this ``"auto"`` adds a tenth of a backend's start-up to the price of every call, as a process seldom makes
    one call only, whatever it has run before (but for PyTorch's use of a GPU). A process with many calls begins with
    this one. From then on ``"auto"`` takes the backend that is fastest once started, also for data on the host.

    Each backend estimates a few normal samples: by every method, of float32 and float64, in 1, 2, 3 and 16 dimensions.
    A backend that compiles for more than five seconds a pass, as KeOps does, is started only: its compiling counts as
    before. Others keep compiled kernels on disk; before that, and on a GPU, warming up takes a minute or two.

    Parameters
    ----------
    device : {None, "cpu", "cuda", "cuda:0", …, "cuda:all"} or sequence of str
        None: the CPU, and a GPU if one is here.

    Returns
    -------
    dict
        By device, then by backend: the seconds that it took. A backend that does not work there is left out, and one
        that fails is set aside with a warning, as under ``"auto"``. ``SDKDE_BACKEND`` restricts it to one backend.

    Raises
    ------
    ValueError
        No installed backend has such a device.
    BackendUnavailable
        None works on the device; the message has each one's reason.

    Examples
    --------
    >>> sdkde_core.warm_up("cpu")  # doctest: +SKIP
    {'cpu': {'numba': 0.71, 'numpy': 0.09, 'torch': 1.93}}
    """
    return warming.warm_up(select.parse_device(device))
