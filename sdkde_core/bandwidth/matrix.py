"""A bandwidth: a matrix H = L Lᵀ in squared data units, and the linear maps that it stands for.

It is given as a number h (H = h² I), one h_j per dimension (H = diag h_j²), or H itself. ``whiten`` maps x to
L⁻¹(x − centre), in which every bandwidth is the unit one.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from array_api_compat import device

from ..arrays import Argument, Array, array_namespace, c_order, detached, is_attached, quiet, to_host
from ..engine.forks import cached_property
from ..engine.products import product
from .precise import Inverse, inverse_of, shifted_product


@dataclass(frozen=True, eq=False)
class Bandwidth:
    """A bandwidth for d dimensions; immutable. Make one with :meth:`of`.

    ``np.asarray`` gives the numbers that ``bandwidth=`` takes: h (d,), data units, or the matrix H (d, d). A product
    with a number c is the bandwidth c times as wide: c h, or c² H.

    Parameters
    ----------
    d : int
    factor : (d,) or (d, d) float64 array
        The diagonal of L, or the lower Cholesky factor L of H; data units. NumPy's, and then a read-only copy, or a
        tensor attached to autograd.
    rule : str
        A rule's name, or ``"given"``.
    selection : Selection or None
        How it was chosen, if it was chosen from the data.
    step, score_bandwidth, tails
        The options of :func:`sdkde_core.estimate` that it was chosen for; they hold where the user names none.
    """

    d: int
    factor: Any
    rule: str = "given"
    selection: Any = field(default=None, repr=False)
    step: float | str | None = None
    score_bandwidth: float | None = None
    tails: float | None = None
    _matrix: Any = field(default=None, repr=False)  # H, where it was given
    _known: Inverse | None = field(default=None, repr=False)  # the inverse of that H's factor

    def __post_init__(self) -> None:
        for name in ("factor", "_matrix"):
            if isinstance(array := getattr(self, name), np.ndarray):
                array = np.array(array, dtype=np.float64)
                array.flags.writeable = False
                object.__setattr__(self, name, array)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return np.array(self.matrix if self.factor.ndim == 2 else to_host(detached(self.factor)), dtype=dtype)

    __array_ufunc__ = None  # so that a product with a number of NumPy's is the one below

    def __mul__(self, times: Any) -> Bandwidth:
        if not isinstance(times, (int, float, np.number)) or isinstance(times, bool):
            return NotImplemented
        if not 0.0 < times < math.inf:
            raise ValueError(f"a bandwidth times {times} is none; pass a positive finite number")
        step = self.step if self.step is None else "moments"  # a number suits rounded values at this width only
        return replace(self.scaled(float(times)), rule=f"{self.rule} × {float(times):.4g}", step=step)

    __rmul__ = __mul__

    def __setstate__(self, state: dict[str, Any]) -> None:  # pickled arrays come back writable
        self.__dict__.update(state)
        self.__post_init__()

    @classmethod
    def of(cls, value: Any, d: int, rule: str = "given") -> Bandwidth:
        """Make a bandwidth from a number, d numbers or a (d, d) matrix H.

        TypeError for what is not real numbers. ValueError for another shape, a value that is not finite and positive,
        or a matrix that is not symmetric positive definite: the message names the directions.
        """
        if type(value) is float and rule == "given":
            return _of_number(value, d)
        if isinstance(value, Bandwidth):
            if value.d != d:
                raise ValueError(f"bandwidth is for {value.d} dimensions, but train has {d}")
            return value
        return cls._of(value, d, rule)

    @classmethod
    @quiet
    def _of(cls, value: Any, d: int, rule: str) -> Bandwidth:
        h = np.asarray(value) if isinstance(value, float | None) else to_host(Argument.of("bandwidth", value).array)
        if h.dtype in (bool, object):
            raise TypeError(f"bandwidth is {value!r}; pass a rule's name, numbers or a (d, d) matrix H")
        h = h.astype(np.float64)  # extended precision may overflow, which is found below
        if h.ndim == 2:
            if h.shape != (d, d):
                raise ValueError(f"bandwidth has shape {h.shape}, but train has {d} dimensions: pass shape ({d}, {d})")
            factor, inverse = _factored(h)
            return cls(d, factor, rule, _matrix=h, _known=inverse)
        if h.shape not in ((), (1,), (d,)):
            instead = f"pass one number, {d} numbers, or a ({d}, {d}) matrix H in squared units"
            raise ValueError(f"bandwidth has shape {h.shape}, but train has {d} dimensions: {instead}")
        good = (h > 0) & (h < math.inf)
        if not good.all():
            bad = int(np.flatnonzero(~good)[0])
            where = "" if h.ndim == 0 else f" at index {bad}"
            raise ValueError(f"bandwidth is {h.flat[bad]}{where}; pass positive finite numbers in the data's units")
        return cls(d, np.full(d, h, dtype=np.float64), rule)

    def arrays(self) -> dict[str, Array]:
        """Return the arrays for :meth:`from_arrays`, on the host; not for a bandwidth of tensors."""
        return {"factor": self.factor} if self._matrix is None else {"matrix": self._matrix}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Array], rule: str, selection: Any = None) -> Bandwidth:
        """Make a bandwidth from the arrays of :meth:`arrays`; ValueError where these cannot be right."""
        given = arrays.get("matrix", arrays.get("factor", np.zeros(0)))
        d, full = len(given) if given.ndim in (1, 2) else 0, given.ndim == 2
        right = d > 0 and given.dtype == float and np.isfinite(given).all() and given.shape in ((d,), (d, d))
        if right and "matrix" in arrays:
            return replace(cls.of(given, d, rule), selection=selection)
        if not right or (np.diagonal(given) if full else given).min() <= 0.0 or (full and np.triu(given, 1).any()):
            raise ValueError("its bandwidth cannot be right")
        return cls(d, given, rule, selection)

    @property
    @quiet
    def matrix(self) -> Array:
        """H, (d, d), in squared data units: as it was given, if it was."""
        if self._matrix is not None:
            return self._matrix
        factor = to_host(detached(self.factor))
        return np.diag(factor**2) if factor.ndim == 1 else factor @ factor.T

    @cached_property
    def log_determinant(self) -> Any:
        """log det L = ½ log det H, a float; a () tensor where the factor is one."""
        if isinstance(self.factor, np.ndarray):
            return float(np.log(self.factor if self.factor.ndim == 1 else self.factor.diagonal()).sum())
        xp = array_namespace(self.factor)
        return xp.sum(xp.log(self.factor if self.factor.ndim == 1 else xp.linalg.diagonal(self.factor)))

    @property
    def log_constant(self) -> Any:
        """Log of the Gaussian kernel's normalising constant, −½ d log 2π − log det L."""
        return -0.5 * self.d * math.log(2 * math.pi) - self.log_determinant

    def scaled(self, scale: float) -> Bandwidth:
        """Return this bandwidth with L multiplied by ``scale``."""
        return Bandwidth(self.d, self.factor * scale, self.rule, None, self.step, self.score_bandwidth, self.tails)

    def whitener(self, x: Any) -> Any:
        """The ``scale`` of :class:`~sdkde_core.protocol.LineBackend`, on x's device."""
        factor = like(self.factor if self.factor.ndim == 1 else self._inverse.whole, x)
        return 1.0 / factor if isinstance(factor, float) else factor

    def whiten(self, x: Any, centre: Any) -> Any:
        """Return L⁻¹(x − centre): (n, d) in bandwidths, float64, C order, in x's library; ``centre`` is float64."""
        return self.whitening(centre)(x)

    def whitening(self, centre: Any) -> Callable[[Any], Any]:
        """Return :meth:`whiten` with that centre, for points on the centre's device: nothing else is sent there."""
        if self.factor.ndim == 1:
            return functools.partial(_divided, like(self.factor, centre), centre)
        inverse = self._inverse
        if inverse.low is None:
            matrix = like(inverse.whole.T, centre)
            return lambda x: _times(x - centre, matrix)
        cut = [like(array, centre) for array in inverse.cut()]
        return lambda x: shifted_product(x, centre, *cut)

    @cached_property
    def narrow(self) -> bool:
        """Whether the density of one kernel is so narrow in some direction that columns are nearly dependent."""
        return self.factor.ndim == 2 and self._inverse.low is not None

    @quiet
    def stretch(self, u: Any) -> Any:
        """Return L u for every row: a whitened displacement in data units."""
        return u * like(self.factor, u) if self.factor.ndim == 1 else u @ like(self.factor.T, u)

    @quiet
    def pull_back(self, u: Any) -> Any:
        """Return L⁻ᵀ u for every row: a gradient with respect to whitened points, per data unit."""
        return u / like(self.factor, u) if self.factor.ndim == 1 else _times(u, like(self._inverse.whole, u))

    @quiet
    def pushed(self, gradient: Any) -> Any:
        """Return Lᵀ g for every row: a gradient per data unit as a displacement by H g, in bandwidths."""
        factor = like(self.factor, gradient)
        return gradient * factor if self.factor.ndim == 1 else gradient @ factor

    @cached_property
    def _inverse(self) -> Inverse:
        if self._known is not None:
            return self._known
        if isinstance(self.factor, np.ndarray):
            return inverse_of(self.factor)
        linalg = array_namespace(self.factor).linalg
        scale = linalg.vector_norm(self.factor, axis=1)  # brings columns in units far apart together
        return Inverse(scale, linalg.inv(self.factor / scale[:, None]))

    def __str__(self) -> str:
        step = self.step if self.step is None or isinstance(self.step, str) else f"{self.step:.4g}"
        moves = "" if step is None else f", step {step}"
        moves += "" if self.score_bandwidth is None else f", score at {self.score_bandwidth} bandwidths"
        moves += f", {100.0 * self.tails:.2g} % of the weight a guard of the tails" if self.tails else ""
        if self.factor.ndim == 2:
            return f"{self.rule}: full matrix, sqrt(diag H) {_span(np.sqrt(np.diagonal(self.matrix)))}{moves}"
        return f"{self.rule}: h {_span(to_host(detached(self.factor)))}{moves}"


def _divided(h: Any, centre: Any, x: Any) -> Any:
    """(x − centre) / h in C order, where x may have another; in place but for autograd."""
    here = isinstance(x, np.ndarray)  # then without a copy
    scaled = np.subtract(x, centre, dtype=np.float64, order="C") if here else c_order(x - centre)
    if is_attached(scaled) or is_attached(h):
        return scaled / h
    scaled /= h
    return scaled


def _times(x: Any, matrix: Any) -> Any:
    """x @ matrix; on the host few points stay on this thread, as waking BLAS's threads would take longer."""
    few = isinstance(x, np.ndarray) and x.ndim == 2 and x.dtype == matrix.dtype and x.size * len(matrix) < 1 << 22
    return product(x, matrix) if few else x @ matrix


def _span(h: Array) -> str:
    low, high = float(h.min()), float(h.max())
    return f"{low:.4g}" if low == high else f"{low:.4g} … {high:.4g}"


@functools.lru_cache(maxsize=64)
def _of_number(h: float, d: int) -> Bandwidth:
    """The bandwidth of a number: every call of a loop has the same one."""
    return Bandwidth._of(h, d, "given")


def like(factor: Any, x: Any) -> Any:
    """Return ``factor`` on x's device; one float where all entries are equal, as a float need not be sent."""
    if not isinstance(factor, np.ndarray):
        return factor  # a tensor, and there already
    if factor.ndim == 1 and (factor == factor[0]).all():
        return float(factor[0])
    if isinstance(x, np.ndarray):
        return factor
    return array_namespace(x).asarray(np.array(factor, order="C"), device=device(x))  # PyTorch refuses read-only memory


def _factored(h: Array) -> tuple[Array, Inverse]:
    """The factor of H and its inverse; ValueError where H has none."""
    if not np.isfinite(h).all():
        raise ValueError("bandwidth has values that are not finite")
    diagonal = np.diagonal(h)
    if not (diagonal > 0).all():
        k = int(np.flatnonzero(~(diagonal > 0))[0])
        raise ValueError(f"bandwidth is not positive definite: H[{k}, {k}] = {diagonal[k]}; pass a covariance matrix")
    # Judged as a correlation matrix, so that columns in different units look neither singular nor lopsided.
    scale = np.sqrt(diagonal)
    correlation = h / scale[:, None] / scale
    asymmetry = abs(correlation - correlation.T)
    if asymmetry.max() > 1e-8:
        i, j = divmod(int(np.argmax(asymmetry)), len(h))
        raise ValueError(f"bandwidth is not symmetric: H[{i}, {j}] = {h[i, j]}, H[{j}, {i}] = {h[j, i]}; symmetrise it")
    correlation = (correlation + correlation.T) / 2
    found = None
    with contextlib.suppress(np.linalg.LinAlgError):  # beyond rounding it has no spread in some direction
        factor = np.linalg.cholesky(correlation) * scale[:, None]
        found = inverse_of(factor, h)
        if found.low is None:  # far from that
            return factor, found
    values, vectors = np.linalg.eigh(correlation)
    flat = values <= len(h) * np.finfo(float).eps * values[-1]
    if found is not None and not flat.any():
        return np.tril(np.linalg.inv(found.high)) * found.scale[:, None], found
    order = [int(j) for j in np.argsort(-abs(vectors[:, 0]))[:4] if abs(vectors[j, 0]) > 1e-3]
    flattest = " ".join(f"{vectors[j, 0]:+.3f}·x{j}" for j in order)
    which = f"{max(1, int(flat.sum()))} of {len(h)} directions have no spread, the flattest {flattest}"
    instead = "drop dependent columns, or pass one number or one per dimension"
    raise ValueError(f"bandwidth is not positive definite: {which} (columns in units of sqrt(H[j, j])); {instead}")
