"""Samples as the rules look at them: their spread, quartiles and covariance, weighted, without overflow."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from array_api_compat import device, is_torch_array
from numpy.typing import NDArray

from ..arrays import Array, array_namespace, device_name, to_host
from ..choice import registry
from .matrix import like


class Kernels(NamedTuple):
    """What :class:`~sdkde_core.protocol.CriteriaBackend` has, for a device."""

    left_out: Callable[..., tuple[Array, Array, Array]]
    climb: Callable[..., tuple[Array, Array, Array]]


class Sample:
    """What the rules look at: samples (n, d) in units of their own spread, so that no square overflows.

    Weights (n,) are positive and sum to 1, None: all equal; ``n_eff`` is how many samples they are worth. ``note`` is
    what a rule adds to its name. ``common``, ``mixed`` and ``steps`` are those of :func:`.rules.resolve`; ``moves``:
    the step and the score's bandwidth that were chosen.
    """

    note = ""
    selection: Any = None
    common = steps = False
    mixed = True
    moves: tuple[Any, Any] = None, None

    def __init__(self, x: Any, weights: Any, n_eff: float, method: str = "sdkde") -> None:
        self.weights, self.n_eff, self.d, self.method = weights, n_eff, int(x.shape[1]), method
        xp, self.n, self.given, self.x = array_namespace(x), int(x.shape[0]), x, x - x[:1, :]
        self.ends = to_host(xp.stack((xp.min(x, axis=0), xp.max(x, axis=0), x[0, :])))  # of all columns, and a row
        self.unit = np.maximum(self.ends[1] - self.ends[2], self.ends[2] - self.ends[0])  # (d,) data units
        self.x /= like(self.unit, x)  # in place: to get memory takes as long
        self.x -= xp.mean(self.x, axis=0) if weights is None else weights @ self.x

    @functools.cached_property
    def kernels(self) -> Kernels | None:
        """Those of a backend with the feature ``"criteria"``, if there is one for the samples' device."""
        device = device_name(self.x)
        backend = registry.having("criteria", device) if device.startswith("cuda") else None
        return backend and Kernels(*(functools.partial(f, device=device) for f in (backend.left_out, backend.climb)))

    def thinned(self, most: int, rng: np.random.Generator) -> tuple[Array, Array | None]:
        """At most so many samples (k, d), in ``unit``, on the host, and weights: how often each was drawn, or None."""
        xp, x, n = array_namespace(self.x), self.x, self.n
        counts = None if self.weights is None else to_host(self.weights)
        if n <= most:
            return to_host(x), counts
        if counts is None:
            chosen = drawn(n, most, rng)
        else:
            order = rng.permutation(n)
            reached = np.cumsum(counts[order])
            places = np.searchsorted(reached / reached[-1], (np.arange(most) + 0.5) / most)
            chosen, counts = np.unique(order[np.minimum(places, n - 1)], return_counts=True)
        return to_host(xp.take(x, xp.asarray(chosen, device=device(x)), axis=0)), counts

    def covariance(self) -> Array:
        """Covariance, (d, d), normalised as SciPy does: 1 − Σw², which is (n − 1)/n without weights."""
        xp = array_namespace(self.x)
        if self.weights is None:
            product = to_host(self.x.T @ self.x) / (self.x.shape[0] - 1)
        else:
            product = to_host((self.x * self.weights[:, None]).T @ self.x) / (1.0 - float(xp.sum(self.weights**2)))
        return (product + product.T) / 2 * self.unit[:, None] * self.unit

    def spread(self) -> Array:
        """σ₁ = min(std, IQR/1.34) per column, (d,); std where the IQR is 0."""
        std, low, high = self.measured()
        std, iqr = self.unit * std, self.unit * (high - low) / 1.34
        return np.where(iqr > 1e-12 * std, np.minimum(std, iqr), std)  # equal quartiles, but for rounding of weights

    def measured(self) -> Any:
        """Of ``self.x`` the standard deviation per column, ddof 0, and quartiles, three of (d,), read at once.

        Quartiles are of type 7, and the weighted form of Akinshin, "Weighted quantile estimators" (2023): a mean of the
        order statistics under the uniform distribution on an interval of width 1/n_eff.
        """
        xp, x, n = array_namespace(self.x), self.x, self.n
        if self.weights is None:
            host = isinstance(x, np.ndarray)
            std = np.sqrt(np.einsum("ij,ij->j", x, x) / n) if host else xp.linalg.vector_norm(x, axis=0) / math.sqrt(n)
            places = np.array([0.25, 0.75]) * (n - 1)
            std, low, high = _around(x, [int(place) for place in places], std)
            return std, *(low + (places % 1.0)[:, None] * (high - low))
        order = xp.argsort(x, axis=0, stable=True)  # (n, d)
        weights = xp.reshape(xp.take(self.weights, xp.reshape(order, (-1,))), order.shape)
        reached, ordered = xp.cumulative_sum(weights, axis=0), xp.take_along_axis(x, order, axis=0)
        result = [xp.sqrt(self.weights @ x**2)]
        for p in (0.25, 0.75):
            share = xp.clip(reached * self.n_eff - p * (self.n_eff - 1), 0.0, 1.0)
            share = xp.concat([share[:1, :], share[1:, :] - share[:-1, :]], axis=0)
            result.append(xp.sum(share * ordered, axis=0))
        return to_host(xp.stack(result))


def _around(x: Any, ranks: list[int], first: Any) -> tuple[Array, Array, Array]:
    """Read ``first`` (d,), and of all columns of x (n, d) the values of these ranks (k, d), and the next ones.

    On a CUDA device PyTorch sorts long columns one after the other. So all are sorted at once, as integers that begin
    with the column's number in place of the last bits.
    """
    xp, n, d = array_namespace(x), int(x.shape[0]), int(x.shape[1])
    if d == 1 or n <= 4096 or n * d > 1 << 26 or not is_torch_array(x) or not x.is_cuda:
        ordered = xp.sort(x, axis=0)
        found = to_host(xp.stack([first, *(ordered[k + more, :] for k in ranks for more in (0, 1))]))
        return found[0], found[1::2], found[2::2]
    room, most = (d - 1).bit_length(), (1 << 63) - 1
    bits = x.T.contiguous().view(xp.int64)
    keys = bits ^ ((bits >> 63) & most)  # ordered as the numbers are
    column = xp.arange(1 - (1 << room), 1 << room, 2, device=x.device)[:d, None] << (63 - room)
    ordered = ((keys >> room) + column).reshape(-1).sort().values.view(d, n)
    taken = [ordered[:, k : k + 2] - column for k in ranks]
    bits = to_host(xp.concat([*taken, first.view(xp.int64)[:, None]], axis=1)).T
    keys = bits[:-1] << room
    values = (keys ^ ((keys >> 63) & most)).view(np.float64)
    return bits[-1].view(np.float64), values[::2], values[1::2]


def drawn(n: int, most: int, rng: np.random.Generator) -> NDArray[np.intp]:
    """Return ``most`` of the numbers below n, ascending, drawn without replacement."""
    return np.sort(rng.choice(n, most, replace=False, shuffle=False))
