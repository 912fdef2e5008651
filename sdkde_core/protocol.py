"""The contract between the core and a backend.

Whitening turns every bandwidth into one problem: sums of φ_ij = exp(−½‖u_i − u_j‖²) over columns j (the
training points) with weights w_j that sum to 1. A backend answers three reductions of it, in the log domain,
for every query row i; with ℓ_i = log Σ_j w_j φ_ij:

==============  =========================================================================================
``LOG_SUM``     ℓ_i
``MEAN``        ℓ_i and the shift Σ_j w_j φ_ij (u_j − u_i) / Σ_j w_j φ_ij, in bandwidths
``LAPLACE``     sign and log magnitude of L_i = Σ_j w_j φ_ij (1 + d/2 − ½ r²_ij), and log M_i, M_i being the
                same sum with plus signs throughout (the scale that L_i's error is measured against)
==============  =========================================================================================

With the feature ``"kernel"`` φ_ij = K(r_ij), r_ij = ‖u_i − u_j‖, in ``LOG_SUM`` only; see :data:`KERNELS`.

A backend is an entry point of group ``sdkde.backends`` whose value is a :class:`BackendInfo`, and an object
with the two methods of :class:`Backend`. Everything here is public and versioned by :data:`PROTOCOL`.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, NamedTuple, TypeVar, get_args
from typing import Protocol as TypingProtocol

from .messages import did_you_mean

__all__ = ["ARRAYS", "FEATURES", "KERNELS", "PRECISIONS", "PROTOCOL", "TOLERANCES", "Backend"]
__all__ += ["BackendInfo", "BackendUnavailable", "Columns", "CriteriaBackend", "DeviceOutOfMemory", "LineBackend"]
__all__ += ["MovesBackend", "PairsBackend", "Partial", "Problem", "Reduction", "Support", "Tolerance", "Whitened"]
__all__ += ["Work"]

T = TypeVar("T")

#: (major, minor). A plugin of another major, or of a newer minor, is refused. A new minor only adds names to FEATURES,
#: or to KERNELS, or fields with defaults, so a plugin of an older minor works.
PROTOCOL = (1, 0)

Precision = Literal["fast", "high", "float64"]

#: Precisions, least precise first.
PRECISIONS: tuple[str, ...] = get_args(Precision)

#: Array libraries that the core hands to a backend.
ARRAYS = ("numpy", "torch")

#: What a backend may have besides plain sums; it is only asked for what its ``features`` list. ``Problem.requires``
#: carries those that the answer depends on: all but range, pairs, line, moves, criteria and told.
#: With ``"pairs"`` in it ``supports`` is asked whether each φ is computed once for both of its points; with
#: ``"groups"``, whether several groups are summed at once.
FEATURES: Mapping[str, str] = {
    "weights": "the columns' log weights differ from one another (without it they are all equal)",
    "grad": "results attached to autograd: derivatives by queries, points and Columns.weights",
    "kernel": "φ_ij = K(r_ij), K the kernel that Problem.kernel names, another than the Gaussian; LOG_SUM only",
    "order": "order: in which order of points neighbours stand together, once for all passes",
    "range": "the rows are some of the points: Problem.same with m < n, from the point own_offset on",
    "pairs": "reduce_pairs: what two ranges of the points are to each other, each φ computed once; MEAN only",
    "line": "whiten, moved and density: what comes before and after the sums, by its own kernels; on CUDA devices",
    "moves": "displaced, in_unit, joined, joined_shifts: what lies between any backend's sums; on CUDA devices",
    "criteria": "ordered, shaped, left_out, narrowed, terms, line_…: what left-out samples say; on CUDA devices",
    "told": "map_threads(…, told=True) over the rows: progress then needs no batches of rows",
    "groups": "prepare_groups and reduce_groups: several groups of columns at once, each with rows of its own",
}

Kernel = Literal["gaussian", "tophat", "epanechnikov", "exponential", "linear", "cosine"]

#: Names of kernels, as scikit-learn has them, and K(r), r in bandwidths. All are 1 at 0; ``"gaussian"`` and
#: ``"exponential"`` are positive everywhere, the others have bounded support: they are 0 from r = 1 on. Names may be
#: added. A backend's ``supports`` declines those that it does not know: one that raises is set aside for all kernels.
#:
#: At the edge of a bounded support log K changes by any amount within the rounding of r. So what is asked for is the
#: sum for distances that are nearly the true ones: with the :class:`Tolerance` (a, b) of LOG_SUM,
#: log Σ_j w_j K((1 + b) r_ij) − a ≤ ℓ_i ≤ log Σ_j w_j K((1 − b) r_ij) + a. Away from the edge that is the tolerance of
#: the Gaussian. A column within b of the edge may count or not; a row that reaches no column has ℓ_i = −inf.
KERNELS: Mapping[Kernel, str] = {
    "gaussian": "exp(−½ r²)",
    "tophat": "1",
    "epanechnikov": "1 − r²",
    "exponential": "exp(−r)",
    "linear": "1 − r",
    "cosine": "cos(π r / 2)",
}


class Reduction(StrEnum):
    """What is summed; see the module's docstring."""

    LOG_SUM = "log_sum"
    MEAN = "mean"
    LAPLACE = "laplace"


class Tolerance(NamedTuple):
    """Largest error allowed: ``absolute + relative · |log of the sum|``."""

    absolute: float
    relative: float

    def at(self, log_sum: Any) -> Any:
        """Return the allowance for rows whose log sum is ``log_sum`` (an array or a number)."""
        return self.absolute + self.relative * abs(log_sum)


#: ``TOLERANCES[precision][reduction]``, for every row. LOG_SUM: |Δℓ|; MEAN: ‖Δshift‖₂ in bandwidths (its ℓ by
#: LOG_SUM's row); LAPLACE: |ΔL| / M, relative to log M. The shift is a mean under the weights by which ℓ sums, and
#: partial results merge by ℓ in one float64: so it has ℓ's relative part, which counts far from every point only.
TOLERANCES: Mapping[str, Mapping[Reduction, Tolerance]] = {
    precision: {Reduction.LOG_SUM: log, Reduction.MEAN: shift, Reduction.LAPLACE: log}
    for precision, log, shift in (
        ("fast", Tolerance(5e-4, 1e-6), Tolerance(6e-5, 1e-13)),
        ("high", Tolerance(1e-5, 1e-6), Tolerance(9e-6, 1e-13)),
        ("float64", Tolerance(1e-10, 1e-13), Tolerance(9e-12, 1e-13)),
    )
}


class BackendUnavailable(RuntimeError):
    """A backend was asked for that is unknown, not installed, broken, or cannot answer the problem."""


class DeviceOutOfMemory(MemoryError):
    """Raised by ``Backend.reduce`` when the device's memory does not suffice: the core tries half the rows."""


@dataclass(frozen=True)
class Problem:
    """One pass over the data."""

    reduction: Reduction  #: what is summed
    m: int  #: query rows
    n: int  #: training columns
    d: int  #: dimensions
    dtype: str = "float64"  #: or "float32": the user's dtype; the whitened points are float64 either way
    precision: str = "high"  #: one of :data:`PRECISIONS`, the tolerances to keep; see :data:`TOLERANCES`
    device: str = "cpu"  #: where the pass runs, such as ``"cuda:0"``
    #: The query rows are the training points; ``reduce`` is given ``queries=None``. With m < n, for a backend with
    #: ``"range"``, they are m of them, from the point ``own_offset`` on.
    same: bool = False
    requires: frozenset[str] = frozenset()  #: names from :data:`FEATURES` that the answer depends on
    #: Largest distance of any row or column from the origin, in bandwidths. With ``"grad"`` or ``"kernel"`` there is no
    #: limit to it: nothing is taken off.
    extent: float = 0.0
    kernel: str = "gaussian"  #: one of :data:`KERNELS`; with ``"kernel"`` in requires unless Gaussian
    #: With ``"weights"``: the log of the largest weight over the least, rounded up to a whole number; ∞: not known.
    weight_span: float = math.inf
    distinct: float = 1.0  #: set by the core only: the expected share of distinct points among the columns

    def __post_init__(self) -> None:
        if type(self.reduction) is not Reduction:  # a plain string would equal but not be it
            object.__setattr__(self, "reduction", Reduction(self.reduction))
        if self.precision not in PRECISIONS:
            raise ValueError(f"precision is {self.precision!r}; pass one of {PRECISIONS}")
        if self.kernel not in KERNELS:
            raise ValueError(f"kernel is {self.kernel!r}; pass one of {tuple(KERNELS)}")
        if (self.kernel != "gaussian") != ("kernel" in self.requires):
            raise ValueError("a kernel other than 'gaussian' and requires={'kernel'} go together")
        if self.kernel != "gaussian" and self.reduction is not Reduction.LOG_SUM:
            raise ValueError(f"kernel={self.kernel!r} is for LOG_SUM; {self.reduction.name} is of kernel='gaussian'")

    @property
    def pairs(self) -> int:
        """Number of φ_ij in the pass."""
        return self.m * self.n


def with_fields(frozen: T, **fields: Any) -> T:
    """Return a dataclass with some fields replaced and not checked again: in a tenth of the time of ``replace``."""
    new = object.__new__(type(frozen))
    new.__dict__.update(frozen.__dict__, **fields)
    return new


class Support(NamedTuple):
    """Whether a backend takes a problem, and why; the reason is never empty."""

    ok: bool
    reason: str


@dataclass(frozen=True)
class Work:
    """The operations of a backend's formulation of a problem; the cost model turns them into time."""

    #: Floating-point operations in matrix products, by dtype (``"float64"``, ``"tf32"``, ``"float16"`` …).
    matrix_flops: Mapping[str, float] = field(default_factory=dict)
    scalar_flops: float = 0.0  #: other single-precision operations but exponentials; in double precision one is two
    exps: float = 0.0  #: single-precision exponentials; a double-precision one counts as the number that it costs
    bytes: float = 0.0  #: traffic with main memory, in bytes
    transfer_bytes: float = 0.0  #: traffic between host and device, in bytes
    launches: int = 1  #: kernel launches, or their like
    parallel: bool = True  #: whether it uses every thread of a CPU, or one


@dataclass(frozen=True)
class Partial:
    """The result of a reduction over some of the columns; :func:`sdkde_core.plugin.merge` joins several.

    Arrays are float64, in the array library and on the device that the points came in. m is the number of query
    rows. A row that no column reaches, by a kernel of bounded support, has log sum −inf.
    """

    log_sum: Any  #: (m,) ℓ; for LAPLACE log M
    shift: Any = None  #: (m, d) of MEAN only, in bandwidths
    sign: Any = None  #: (m,) of LAPLACE only: −1, 0 or 1
    log_magnitude: Any = None  #: (m,) of LAPLACE only: log |L|


@dataclass(frozen=True)
class Columns:
    """The training points of a pass; arrays of the kind that ``BackendInfo.arrays`` names, on ``problem.device``.

    They are float64. Where that device has none they are on the host, and so are queries and results: the backend packs
    what it needs there.
    """

    points: Any  #: (n, d) whitened and shifted, so that the origin lies among the points; in C order
    log_weights: Any  #: (n,) finite and at most 0; without ``"weights"`` in ``problem.requires`` all are equal
    weights: Any = None  #: (n,) with ``"grad"`` and ``"weights"``: exp(log_weights), zeros included
    ordered: bool = field(default=False, kw_only=True)  #: points and rows stand in the order of the backend
    log_range: tuple[float, float] | None = field(default=None, kw_only=True)  #: bounds of log_weights, where known


class Backend(TypingProtocol):
    """The methods of a backend's implementation. Both phases must leave their inputs untouched and be thread-safe.

    The same input, options, thread count and device give the same bits.

    NumPy's arrays are handed out read-only. After any error but :class:`DeviceOutOfMemory` ``"auto"`` does without the
    backend for the rest of the process; where the user has named it, they get :class:`BackendUnavailable`.

    Memory is the backend's: it cuts the work so that its temporaries fit, in a way that follows from the problem and
    the device, never from what is free, since the bits depend on it. Where they do not fit all the same it raises
    :class:`DeviceOutOfMemory`, and the core tries with half the rows.
    """

    def probe(self, device: str) -> Support:
        """Say whether ``device`` can be used here and now. May import and look at the hardware."""

    def prepare(self, problem: Problem, columns: Columns) -> Any:
        """Pack the training points once; the state serves any number of ``reduce`` calls, from several threads.

        Later problems have the same columns, reduction, precision and features, other rows (``m``, ``same``), and an
        extent of at most ``problem.extent``: ``problem.m`` says how many rows are expected, not how many will come. The
        caller leaves the arrays unchanged as long as the state lives. They may be some of a pass's columns: then their
        weights sum to less than 1.
        """

    def reduce(self, problem: Problem, queries: Any, state: Any, own_offset: int = 0) -> Partial:
        """Reduce over all columns for every row.

        The result is the caller's: it shares no memory with the state, nor with the results of other calls.

        Parameters
        ----------
        queries : (m, d) float64 array in C order, or None
            None: the points themselves, with ``problem.same``.
        state
            What ``prepare`` returned.
        own_offset : int
            With ``problem.same`` row i *is* column i + own_offset: it is 0, and with ``"range"`` from 0 to n − m. For
            other rows it means nothing.

        Raises
        ------
        DeviceOutOfMemory
            With fewer rows it might do.
        """


class PairsBackend(Backend, TypingProtocol):
    """A backend with the feature ``"pairs"``: φ_ij = φ_ji is computed once for the rows on both sides of a block.

    Several devices that deal out the blocks I ≤ J among them compute each pair once. Where a backend does not do so,
    its ``supports`` declines the problem with ``"pairs"`` in ``requires``: then rows are dealt out.
    """

    def reduce_pairs(
        self, problem: Problem, state: Any, rows: tuple[int, int], columns: tuple[int, int]
    ) -> tuple[Partial, Partial]:
        """Reduce two ranges of the points: return ``rows`` over ``columns``, and ``columns`` over ``rows``.

        Merged over all blocks with a row, the results are ``reduce``'s for that row, within the tolerance. The same
        block gives the same bits. The results are the caller's, as those of ``reduce``. On a GPU it launches and does
        not wait, as ``reduce`` of such a backend does not: one thread calls them for several devices in turn.

        Parameters
        ----------
        problem : Problem
            The whole pass: MEAN, ``same``, m = n, with any feature that ``reduce`` takes with those.
        rows, columns : (start, stop)
            Not empty, equal or disjoint; each begins at a multiple of 1024 and ends at one or at n. If they are equal,
            so are the results.

        Raises
        ------
        DeviceOutOfMemory
            With smaller blocks it might do.
        """


class Whitened(NamedTuple):
    """Points in bandwidths from a centre."""

    points: tuple[Any, ...]  # (k, d) float64 each, in C order
    # Waits for the largest distance from the centre, and returns it; inf where a number is not finite. It is called
    # before anything else is whitened. While a CUDA graph is captured it returns a tensor on the device. With weights
    # the log of the largest weight over the least is its second number, inf where a weight is not positive.
    extent: Callable[[], Any]
    log_weights: Any = None  # (n,) float64, whose exponentials sum to 1; with weights


class LineBackend(Backend, TypingProtocol):
    """A backend with the feature ``"line"``: an estimate of tensors on a CUDA device takes it a few launches."""

    def whiten(self, given: tuple[Any, ...], scale: Any, centre: Any = None, weights: Any = None) -> Whitened | None:
        """Return L⁻¹(x − centre) for every row x, in float64; None where another way is to be taken.

        Parameters
        ----------
        given : tuple of (k, d) tensors
            One or two, float32 or float64 alike, in C order, on the current CUDA device.
        scale : float, (d,) or (d, d) float64 tensor
            1/h, of every column; L's diagonal; or L⁻¹.
        centre : (d,) float64 tensor, optional
            None: per column the lower median of every k-th row of the first, k = max(1, n // 256), NaN left out.
        weights : (n,) tensor, optional
            Of the first, float32 or float64, as the user gave them. Not while a CUDA graph is captured.
        """

    def moved(self, points: Any, shift: Any) -> Any:
        """Return points + shift / 2, (n, d) float64."""

    def density(self, problem: Problem, queries: Any, state: Any, constant: float, log: bool, dtype: Any) -> Any:
        """Return exp(ℓ + constant), or ℓ + constant for ``log``, (m,) of a dtype of PyTorch's, float32 or float64.

        ℓ as :meth:`reduce` has it, of LOG_SUM. Of LAPLACE it is log |L|, the density has L's sign, and the log of a
        negative one is NaN. None where another way is to be taken.
        """


class MovesBackend(Backend, TypingProtocol):
    """A backend with the feature ``"moves"``: what lies between any backend's sums, of float64 tensors in C order."""

    def displaced(self, points: Any, shift: Any, log_weights: Any, c: float, least: float, most: float) -> Any:
        """Return points + τ s (n, d), s = shift / c; τ is the step ``"moments"``, from ``least`` to ``most``.

        That is the smallest root of τ² tr Cov(s) + 2 τ tr Cov(u, s) + d, u the points, else the τ of its least value;
        ``least`` where nothing moves. c: of the score's bandwidth. Log weights (n,) may be None, for equal ones.
        """

    def in_unit(self, points: Any, unit: float, some: int = 0, log_weights: Any = None) -> Any:
        """Return points / unit: all, or ``some`` at the places of :mod:`.engine.groups`; None: of equal weights."""

    def joined(self, logs: tuple[Any, Any], constants: tuple[float, float], log: bool, dtype: Any) -> Any:
        """Return Σ_k exp(logs_k + constants_k) (m,), or for ``log`` the log of it, of a dtype of PyTorch's."""

    def joined_shifts(self, logs: Any, constants: Any, shifts: tuple[Any, Any], units: tuple[float, float]) -> Any:
        """Return the mean of shifts_k / units_k (m, d), weighted by exp(logs_k + constants_k)."""


class OrderBackend(Backend, TypingProtocol):
    """A backend with the feature ``"order"``: all passes of an estimate have neighbours together, on all devices."""

    def order(self, problem: Problem, points: Any, columns: Columns | None = None) -> Any:
        """Return an order of the points (n,), integers; None where it does not gain by one.

        With ``columns`` the points are the columns'; some may lie beyond the extent, and log weights may be −inf.
        Without, they are query rows. The problem's m is the number of rows on one device. Coordinates may be NaN.
        """


class GroupsBackend(Backend, TypingProtocol):
    """A backend with the feature ``"groups"``: one call for a density that is a list of many small ones."""

    def prepare_groups(self, problem: Problem, groups: Sequence[Columns]) -> Any:
        """Pack k groups of columns, each in bandwidths of its own; ``problem`` has all columns as n, and weights."""

    def reduce_groups(self, problem: Problem, queries: Any, state: Any, constants: Any, known: Any) -> Partial:
        """Return what :meth:`reduce` has of every group, for its own rows: log sums (k, m), and shifts (k, m, d).

        ``queries``: (k, m, d) float64. The extent bounds all rows and columns. LOG_SUM and MEAN. The caller forms
        log(exp(known_i) + Σ_k exp(ℓ_ki + constants_ki)), ``known`` (m,) and ``constants`` (k, m), which may be −inf:
        terms that add less to it than the tolerance may be left out, so ℓ_ki may be −inf.
        """


class CriteriaBackend(Backend, TypingProtocol):
    """A backend with the feature ``"criteria"``: a bandwidth is chosen from samples on a CUDA device in a few launches.

    Samples (n, d) and their weights (n,), which are positive and sum to 1, are PyTorch's on the device, float64, rows
    in one piece. φ_ij is exp(−r²_ij / 2h²). Six digits of every result are enough.
    """

    def ordered(self, x: Any, taken: Any, places: Any, common: bool) -> tuple[Any, Any, Any]:
        """Return n samples in spreads, their equal weights, and statistics of their columns, (11, d), or more rows.

        These are new tensors on the device, float64, contiguous; the host must not wait for them. Launches may be kept,
        and launched again for another x: none may depend on its values.

        The samples are those at the places ``taken`` (n,) of columns x (d, m), less each column's median, over the
        spread of the whole column. The spread is the standard deviation, or the interquartile range over 1.34 where
        that is less, but more than 10⁻¹² of the deviation; for ``common`` the columns' geometric mean. In order of the
        first column, and of the second where the first is equal, the k-th sample becomes row ``places_k``.

        The third result has for each whole column the standard deviation; the quartiles, as NumPy has them; the least,
        the largest and the first value. For the n samples it has each column's least and largest value; the number of
        values whose next larger one is between 10⁻¹² and 1 / (100 n + 1000) of the column's range away; the number of
        values equal to an earlier one; and the number of samples equal to an earlier one in the first two columns.
        """

    def shaped(
        self, u: Any, weights: Any, n: int, mixed: bool, scale: float, first: Sequence[float], lengths: Sequence[int],
        least: float, chance: float, full: bool,
    ) -> tuple[Any, Any]:  # fmt: skip
        """Find a bandwidth's shape, and return samples in its units (m, d), and what it is (2 + d²,).

        These are new tensors, and launches may be kept, as with :meth:`ordered`. The second one has 0 where there is
        no shape, 1 for a scale per column, 2 for the samples' correlation, 3 for a matrix; the median log of the factor
        by which a left-out sample is likelier; and W, row by row: a row of the first tensor is W u_i. Any W serves
        whose (WᵀW)⁻¹ is the shape; without a shape it is the identity.

        The shape is that of :func:`sdkde_core.bandwidth.shapes.find_shape` for the first n samples, at most 512, in at
        most 64 dimensions, and the covariance of all. Kernels begin with one ``scale``. EM's steps to one scale are
        lengthened by ``first``, later ones by ``lengths``; ``least`` is its ``LEAST``. The correlation is tried where
        −½ log of its determinant is above ``chance``, a matrix only if ``full``, both only if ``mixed``.
        """

    def left_out(self, u: Any, weights: Any, bandwidths: Sequence[float], method: str, looked: Any = None) -> Any:
        """Return left-out densities of some thousand samples by k bandwidths, as a new tensor for :meth:`terms`.

        They may be anything for bandwidths where ``looked``, :meth:`narrowed`'s result, is not above 0. As with
        :meth:`ordered` launches may be kept, and the host is not to wait.
        """

    def narrowed(
        self, values: Any, weights: Any, d: int, first: Sequence[float], bandwidths: Sequence[float], top: int,
        times: float, criteria: tuple[bool, bool], method: str,
    ) -> Any:  # fmt: skip
        """Return a new tensor (k,), float64, above 0 where ``bandwidths``, ascending, may be the best for all samples.

        ``values`` are what :meth:`left_out` has returned of some of the samples, with these ``weights``; in all there
        are ``times`` as many. It was asked for the bandwidths ``first``, at most 16. They stand for every third of
        ``bandwidths``, from the ``top``-th down, and for the narrowest. ``criteria`` says which losses of a sample
        count: of least squares, ∫p̂² − 2 p̂₋ᵢ, and of the likelihood, −log p̂₋ᵢ.

        One of ``first`` is plausible if ``times`` · 2 z² < 6 for a loss that counts. Here z is the standard score of
        the weighted mean of the losses, less the losses of the bandwidth where that mean is least. The six widest are
        compared, and three more until none of the three narrowest is plausible. The result is above 0 from three places
        below the narrowest plausible one to three above the widest, and beyond the ``top``-th too where it is so there.
        As with :meth:`ordered` launches may be kept, and the host is not to wait.
        """

    def terms(self, values: Any, n: int, d: int, bandwidths: Sequence[float], method: str) -> tuple[Any, Any, Any]:
        """Return the criteria's terms for k bandwidths and n samples, from :meth:`left_out`'s numbers, on the host.

        They are log |p̂₋ᵢ(u_i)| (k, n); its sign (k, n), or ones (k,); and log ∫p̂² (k,), all NumPy's, without
        (2π)^(−d/2). For ``"kde"`` p̂₋ᵢ(u_i) = Σ_{j≠i} w_j φ_ij / (1 − w_i) h^−d, for ``"laplace"`` the same with the
        factor 1 + d/2 − r²_ij / 2h²; for ``"sdkde"`` of the others, moved by half their shift, as if u_i were not
        there. ∫p̂² is of all samples: a KDE of the (moved) samples at √2 h, for ``"laplace"`` with the factor
        1 + d/2 − q/2 + (q² − 2(d+2) q + d(d+2))/16, q = r²/2h².
        """

    def line_search(
        self, every: Any, std: Any, index: Any, bandwidths: tuple[float, float], steps: range, top: int, splits: int,
        criterion: int, method: str, score: float | None, some: Any = None,
    ) -> Any:  # fmt: skip
        """Return all numbers for :class:`sdkde_core.bandwidth.line.Looks` on one column, float64, one after another.

        ``every`` has all samples in order, ``std`` their standard deviation, ``some`` (n,) the samples to evaluate, if
        these are not all. There are ``splits`` folds to leave out, at most 8, and equal samples share one: the i-th of
        k distinct values is in the fold of the i-th number below k in the permutation ``index`` (n,), modulo
        ``splits``. A step k has the bandwidth h e^(g (k − steps[0])), for ``bandwidths`` h, in spreads, and g.
        ``criterion``: 0 power, 1 least squares, 2 likelihood. ``score``: the score's bandwidth, in bandwidths, for the
        step "moments", or None for a step of ½.

        * The middle step of the five that follow, and the pilots': three numbers, arbitrary where there are none.
        * Nine numbers: the lowest and the highest sample, the standard deviation, the lower quartile, and how far the
          upper one is above it; how many gaps between neighbours are too small for rounded values
          (:func:`sdkde_core.bandwidth.rounding.units_of`), and how many are below 1e-15 of the range, but not 0; how
          many distinct values there are, and Σ over samples of how many have the same value. Samples by fold, eight.
        * What :meth:`sdkde_core.bandwidth.line.Line.sums` says at ``steps``, up to 15, each three below the one before,
          and the step of the moves: (splits, k, 6).
        * The same at five steps about the best of these, ascending: (splits, 5, 6).
        * For the criterion 0 sums of the estimate by ``"sdkde"`` at the pilot, which is the step nearest the minimum
          there, by :func:`sdkde_core.bandwidth.line.descend`, from −31 to ``top``: (10, 6). In the first row what is
          left out are the samples; others are of estimates of the pilot, which is left out too, at nine steps about it.
        * The same for another pilot, the step of the least expected error by these, unless the method is ``"laplace"``.
        * The samples that are looked at, in order, if there are at most 2,048.

        NaN: not known. Launches may be kept.
        """


@dataclass(frozen=True)
class BackendInfo:
    """All that the core knows of a backend without importing it: the entry point's value, in a light module.

    A field that is not of its type raises TypeError with its name.
    """

    name: str  #: the entry point's
    protocol: tuple[int, int]  #: :data:`PROTOCOL` as it was when the plugin was written; a literal, not the constant
    #: ``"package.module:factory"``; called with the user's ``backend_options`` it returns a :class:`Backend`.
    implementation: str
    devices: tuple[str, ...]  #: kinds of device, such as ``"cuda"``
    precisions: tuple[str, ...]  #: those of :data:`PRECISIONS` that it keeps
    features: frozenset[str] = frozenset()  #: those of :data:`FEATURES` that it has
    #: Modules that must be importable, such as ``"torch"`` or ``"cuda.core"``; looked up, never imported, by the core.
    requires_modules: tuple[str, ...] = ()
    install: str = ""  #: the command that brings them
    arrays: str = "numpy"  #: the array library that it takes and returns, one of :data:`ARRAYS`
    #: ``supports(problem) -> Support``: called when device, precision and features fit.
    supports: Callable[[Problem], Support] = lambda problem: Support(True, "takes any problem")
    #: ``extent_limit(problem) -> float``: the extent, in bandwidths, up to which its fast formula keeps the precision,
    #: from an error bound. If at most half of the pairs are beyond it, the core separates them: the backend gets them
    #: as problems of the full extent, if it supports these; else the core sums them. Up to it ``supports`` must not
    #: decline for the extent.
    extent_limit: Callable[[Problem], float] = lambda problem: math.inf
    #: ``work(problem, config) -> Work``; without it the core prices a plain matrix-product formulation.
    work: Callable[[Problem, Mapping[str, Any] | None], Work] | None = None
    #: Time from nothing imported to the first result of a tiny problem whose kernels were compiled before.
    startup_seconds: float = 0.0
    #: ``compile_seconds(problem) -> float``: the time of compiling for a problem of this kind where that is not done
    #: yet; it counts as start-up does. Leave out what a machine compiles once for all problems.
    compile_seconds: Callable[[Problem], float] = lambda problem: 0.0
    #: ``"package.module:name"`` of its tunables, a :class:`sdkde_core.tuning.Space`; nothing if empty.
    tuning: str = ""

    def __post_init__(self) -> None:
        def strings(value: Any, kind: type[tuple[Any, ...]] | type[frozenset[Any]]) -> bool:
            return isinstance(value, kind) and all(isinstance(x, str) for x in value)

        def check(wanted: str, *names: str, good: Callable[[Any], bool]) -> None:
            for name in names:
                if not good(value := getattr(self, name)):
                    hint = f", such as ({value!r},)" if isinstance(value, str) and "tuple of" in wanted else ""
                    raise TypeError(f"BackendInfo.{name} is {value!r}; pass {wanted}{hint}")

        check("a string", "name", "implementation", "install", "arrays", "tuning", good=lambda x: isinstance(x, str))
        check("a tuple of strings", "devices", "precisions", "requires_modules", good=lambda x: strings(x, tuple))
        check("a frozenset of strings", "features", good=lambda x: strings(x, frozenset))
        check("seconds, not negative", "startup_seconds", good=lambda x: type(x) in (int, float) and x >= 0)
        check(f"one of {', '.join(map(repr, ARRAYS))}", "arrays", good=lambda x: x in ARRAYS)
        check("(major, minor)", "protocol", good=lambda x: isinstance(x, tuple) and [*map(type, x)] == [int, int])
        check("a callable", "supports", "extent_limit", "compile_seconds", good=callable)
        check("a callable", "work", good=lambda x: x is None or callable(x))

    def missing_modules(self) -> tuple[str, ...]:
        """Return the required modules that cannot be found, without importing them."""
        return tuple(name for name in self.requires_modules if not _can_find(name))

    def load(self, options: Mapping[str, Any] | None = None) -> Backend:
        """Import the implementation and make a backend with the user's options.

        Raises
        ------
        TypeError
            The backend does not take one of the options.
        """
        module, _, name = self.implementation.partition(":")
        factory = getattr(importlib.import_module(module), name)
        parameters = inspect.signature(factory).parameters.values() if options else ()
        known = [p.name for p in parameters if p.kind is not p.VAR_KEYWORD]
        unknown = [name for name in options or () if name not in known]
        if unknown and len(known) == len(parameters):
            taken = f"pass some of {', '.join(known)}" if known else "there are none"
            raise TypeError(f"there is no option {unknown[0]!r}; {taken}{did_you_mean(unknown[0], known)}")
        backend = factory(**(options or {}))
        _call_functions_once()
        return backend


def _call_functions_once() -> None:
    """Call PyTorch's elementary functions on a CPU once, before several threads may call them at the same time.

    MKL looks for a function's kernel at its first call. If two threads make it at once, one may get a kernel with 3e-9
    or, in float32, 1e-4 relative error: https://github.com/pytorch/pytorch/issues/188792.
    """
    torch = sys.modules.get("torch")
    if torch is not None:
        for dtype in (torch.float32, torch.float64):
            x = torch.ones(1, dtype=dtype, device="cpu")
            for name in ("exp", "log", "log1p", "sqrt", "cos", "sin"):
                getattr(x, name)()


def _can_find(module: str) -> bool:
    """Whether a module is there; of a dotted name the parents are imported."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError, AttributeError):  # a half-imported module
        return False
