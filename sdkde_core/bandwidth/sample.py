"""Samples for the bandwidth rules: their spread, quartiles and covariance, weighted, without overflow."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from array_api_compat import device, is_torch_array
from numpy.typing import NDArray

from ..arrays import Array, array_namespace, device_name, quiet, to_host
from ..choice import registry
from ..engine.forks import cached_property
from .matrix import like

SEED = 20261122  # of the draw of samples
MANY = 100.0  # samples from which one column takes the step "moments", and improved Sheather-Jones


class Sample:
    """Samples (n, d) for the rules, in units of their own spread, so that no square overflows.

    Weights (n,) are positive and sum to 1, None: all equal; ``n_eff`` is their effective number. A rule adds ``note``
    to its name. ``common``, ``mixed`` and ``steps`` are those of :func:`.rules.resolve`.
    """

    note = ""
    selection: Any = None
    on_card: Any = None  # the criteria from a GPU's kernels
    common = steps = False
    mixed = True

    def __init__(self, x: Any, weights: Any, n_eff: float, method: str = "sdkde") -> None:
        self.weights, self.n_eff, self.d, self.method = weights, n_eff, int(x.shape[1]), method
        self.n, self.given = int(x.shape[0]), x

    @cached_property
    @quiet
    def x(self) -> Any:
        """The samples about their mean, in ``unit``, on their device."""
        x = self.given - self.given[:1, :]
        x /= like(self.unit, x)  # in place: allocating takes as long
        x -= array_namespace(x).mean(x, axis=0) if self.weights is None else self.weights @ x
        return x

    @cached_property
    def ends(self) -> Array:
        """The ends of all columns, and a row, (3, d), data units."""
        xp, x = array_namespace(self.given), self.given
        return to_host(xp.stack([xp.min(x, axis=0), xp.max(x, axis=0), x[0, :]]))

    @cached_property
    @quiet
    def unit(self) -> Array:
        """The unit of ``x``, (d,), data units."""
        return np.maximum(self.ends[1] - self.ends[2], self.ends[2] - self.ends[0])

    @cached_property
    def kernels(self) -> Any:
        """A backend with the feature ``"criteria"``, if there is one for the samples' device: a CriteriaBackend."""
        return registry.having("criteria", device_name(self.given)) if on_gpu(self.given) else None

    @cached_property
    def moves(self) -> tuple[Any, Any]:
        """The step and the score's bandwidth that ``"auto"`` sets; None where it may not."""
        if self.steps and self.method == "sdkde" and (self.d > 1 or self.n_eff >= MANY):
            return "moments", None if self.d == 2 else 1.4 if self.d <= 5 else 2.0
        return None, None

    def thinned(self, most: int, rng: np.random.Generator) -> tuple[Array, Array | None]:
        """At most ``most`` samples (k, d), in ``unit``, on the host; and their weights or draws' counts, or None."""
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
        return self.unit * spread_of(self.measured)

    @cached_property
    def measured(self) -> Array:
        """Of ``self.x`` the standard deviation per column, ddof 0, and quartiles, (3, d), on the host."""
        return to_host(self._measured())

    def _measured(self) -> Any:
        """The same on the device of ``x``.

        Quartiles are of type 7, and the weighted form of Akinshin, "Weighted quantile estimators" (2023): a mean of the
        order statistics under the uniform distribution on an interval of width 1/n_eff.
        """
        xp, x, n = array_namespace(self.x), self.x, self.n
        if self.weights is None:
            host = isinstance(x, np.ndarray)
            std = np.sqrt(np.einsum("ij,ij->j", x, x) / n) if host else xp.linalg.vector_norm(x, axis=0) / math.sqrt(n)
            shares, ordered = about_quartiles(x)
            return xp.stack(
                [std, *(two[0, :] + share * (two[1, :] - two[0, :]) for share, two in zip(shares, ordered))]
            )
        order = xp.argsort(x, axis=0, stable=True)  # (n, d)
        weights = xp.reshape(xp.take(self.weights, xp.reshape(order, (-1,))), order.shape)
        reached, ordered = xp.cumulative_sum(weights, axis=0), xp.take_along_axis(x, order, axis=0)
        result = [xp.sqrt(self.weights @ x**2)]
        for p in (0.25, 0.75):
            share = xp.clip(reached * self.n_eff - p * (self.n_eff - 1), 0.0, 1.0)
            share = xp.concat([share[:1, :], share[1:, :] - share[:-1, :]], axis=0)
            result.append(xp.sum(share * ordered, axis=0))
        return xp.stack(result)


def on_gpu(x: Any) -> bool:
    """Whether an array is PyTorch's, on a CUDA device."""
    return is_torch_array(x) and device_name(x).startswith("cuda")


def spread_of(measured: Any) -> Any:
    """σ₁ from standard deviations and quartiles (3, d), of any library."""
    xp, (std, low, high) = array_namespace(measured), measured
    iqr = (high - low) / 1.34
    return xp.where(iqr > 1e-12 * std, xp.minimum(std, iqr), std)  # equal quartiles, but for rounding of weights


def about_quartiles(x: Any) -> tuple[list[float], Any]:
    """How far each quartile of x (n, d) is between two order statistics; and these two of every column, (2, d) each.

    On a CUDA device PyTorch sorts long columns one after the other. So all are sorted at once, as integers that begin
    with the column's number and lack the last bits.
    """
    xp, n, d = array_namespace(x), int(x.shape[0]), int(x.shape[1])
    places = [0.25 * (n - 1), 0.75 * (n - 1)]
    shares, ranks = [place % 1.0 for place in places], [int(place) for place in places]
    if d == 1 or n <= 4096 or n * d > 1 << 26 or not is_torch_array(x) or not x.is_cuda:
        ordered = xp.sort(x, axis=0)
        return shares, [ordered[k : k + 2, :] for k in ranks]
    room, most = (d - 1).bit_length(), (1 << 63) - 1
    bits = x.T.contiguous().view(xp.int64)
    keys = bits ^ ((bits >> 63) & most)  # ordered as the numbers are
    column = xp.arange(1 - (1 << room), 1 << room, 2, device=x.device)[:d, None] << (63 - room)
    ordered = ((keys >> room) + column).reshape(-1).sort().values.view(d, n)
    keys = (xp.stack([ordered[:, k : k + 2] - column for k in ranks]) << room).mT.contiguous()
    return shares, (keys ^ ((keys >> 63) & most)).view(xp.float64)


def most_of(d: int) -> int:
    """The most samples in d dimensions that the criteria are summed over."""
    return 1 << 18 if d == 1 else min(1500, math.isqrt(1500**2 * 16 // max(d, 16)))


def drawn(n: int, most: int, rng: np.random.Generator) -> NDArray[np.intp]:
    """Return ``most`` of the numbers below n, ascending, drawn without replacement."""
    return np.sort(rng.choice(n, most, replace=False, shuffle=False))
