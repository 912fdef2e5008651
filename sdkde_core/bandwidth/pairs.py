"""What a bandwidth would do to samples that it has not seen: exact leave-one-out sums over all pairs of a sample.

Everything is per sample i, as if it were not there. φ_ij = exp(−r²_ij / 2h²), and weights sum to 1:

* kde: p̂₋ᵢ(x_i) ∝ Σ_{j≠i} w_j φ_ij / (1 − w_i).
* laplace: the same with the factor 1 + d/2 − r²_ij / 2h².
* sdkde: without i the samples j move elsewhere, which has a closed form. With D_j = Σ_k w_k φ_jk,
  S_j = Σ_k w_k φ_jk (u_k − u_j), a = u_i − u_j and ρ = w_i φ_ij / D_j, sample j moves by ½ (S_j/D_j − ρ a) / (1 − ρ).
  So its squared distance from u_i becomes

      r² − (a·S_j/D_j − ρ r²) / (1 − ρ) + ¼ (‖S_j/D_j‖² − 2ρ a·S_j/D_j + ρ² r²) / (1 − ρ)²

  which costs one product of matrices and one exponential for each pair beyond those of the moves themselves.

∫p̂² is a KDE of the (moved) samples at √2 h; for laplace each term has the factor
1 + d/2 − q/2 + (q² − 2(d+2) q + d(d+2))/16, q = r²/2h².

Elementwise arithmetic is float32: criteria need six digits, and NumPy's float64 exponentials take four times as long.
Distances are formed in float64. A row's exponentials are relative to its nearest sample's, so that not all underflow.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from array_api_compat import array_namespace
from numpy.typing import NDArray

from ..arrays import to_host
from ..choice.hardware import cpu_threads
from ..engine.products import on_this_thread, product
from ..engine.threads import map_threads

__all__ = ["Left", "Pairs"]

#: Rows of a block on a CPU: with 2,000 columns its arrays of float32 stay in a core's cache.
ROWS = 64

#: A squared distance of a sample from itself that leaves it out, and does not overflow.
NEVER = 1e30


class Left(NamedTuple):
    """What one bandwidth gives, without the constant of the kernel of unit bandwidth, (2π)^(−d/2)."""

    log_density: NDArray[np.float64]  # (n,) log |p̂₋ᵢ(x_i)|
    sign: NDArray[np.float64] | float  # (n,) of it, for laplace
    log_square: float  # log ∫p̂²


class Pairs:
    """All pairs of a sample, ready for any bandwidth.

    Parameters
    ----------
    u : (n, d) float64 array
        Distinct samples, at most a few thousand, in units of their spread, near the origin; of any library.
    weights : (n,) float64 array
        Positive, summing to 1.
    method : {"kde", "sdkde", "laplace"}
    """

    def __init__(self, u: Any, weights: Any, method: str) -> None:
        self.xp = xp = array_namespace(u)
        self.u, self.w, self.method = u, weights, method
        self.n, self.d = (int(k) for k in u.shape)
        on_host = isinstance(u, np.ndarray)
        rows = ROWS if on_host else self.n
        self.blocks = [slice(i, min(i + rows, self.n)) for i in range(0, self.n, rows)]
        self.threads = cpu_threads() if on_host and self.n > 4 * ROWS else 1
        self.w32, self.u32 = xp.astype(weights, xp.float32), xp.astype(u, xp.float32)
        self.weighted = xp.concat([self.w32[:, None], self.w32[:, None] * self.u32], axis=1)  # (n, 1 + d)
        self._product: Any = product if on_host else xp.matmul
        self.squares = self._gather(lambda rows: self._distances(self.u, rows, itself=NEVER))  # (n, n)
        self.nearest = xp.min(self.squares, axis=1)

    def at(self, h: float) -> Left:
        """Return the criteria's terms for the bandwidth h, in units of the spread."""
        xp, c = self.xp, 0.5 / h**2
        near = self.nearest
        closeness = self._gather(lambda rows: xp.exp((near[rows, None] - self.squares[rows, :]) * c))
        log_scale, log_left = -c * xp.astype(near, xp.float64), xp.log1p(-self.w)
        z, sign = self.u, None
        if self.method == "laplace":
            signed = self._gather(lambda rows: self._laplace(closeness[rows, :], self.squares[rows, :], c))
            sign, log = xp.sign(signed), xp.log(xp.abs(signed)) + log_scale
        else:
            sums = xp.astype(self._gather(lambda rows: self._product(closeness[rows, :], self.weighted)), xp.float64)
            log = xp.log(sums[:, 0]) + log_scale
        if self.method == "sdkde":
            scale = xp.exp(log_scale)
            total = self.w + scale * sums[:, 0]  # D
            pull = scale[:, None] * (sums[:, 1:] - sums[:, :1] * self.u) / total[:, None]  # S/D
            z = self.u + 0.5 * pull
            log = self._gather(self._moved_without(closeness, scale, total, pull, c))
        square = xp.sum(self._gather(lambda rows: self._square(z, rows, c)))
        dimension = self.d * math.log(h)
        log = log - log_left - dimension
        log_square = math.log(max(float(square), 1e-300)) - dimension - 0.5 * self.d * math.log(2.0)
        return Left(to_host(log), 1.0 if sign is None else to_host(sign), log_square)

    def _gather(self, task: Callable[[slice], Any]) -> Any:
        """Return a task's results for all blocks of rows, one below the other."""
        if len(self.blocks) == 1:
            return task(self.blocks[0])

        def alone(rows: slice) -> Any:
            with np.errstate(all="ignore"), on_this_thread():
                return task(rows)

        return self.xp.concat(map_threads(alone, self.blocks, self.threads), axis=0)

    def _distances(self, z: Any, rows: slice, itself: float) -> Any:
        """Squared distances of some rows from all, float32; ``itself`` from themselves."""
        xp = self.xp
        if self.d == 1:
            squares = (z[rows, :] - z[:, 0][None, :]) ** 2
        else:
            norms = xp.sum(z * z, axis=1)
            squares = xp.clip(norms[rows, None] + norms[None, :] - 2.0 * self._product(z[rows, :], z.T), min=0.0)
        squares = xp.astype(squares, xp.float32)
        index = xp.arange(self.n, device=None if isinstance(z, np.ndarray) else z.device)
        return xp.where(index[rows, None] == index[None, :], xp.full_like(squares, itself), squares)

    def _laplace(self, closeness: Any, squares: Any, c: float) -> Any:
        factor = (1.0 + 0.5 * self.d) - squares * c
        return self.xp.astype((closeness * factor) @ self.w32, self.xp.float64)

    def _moved_without(self, closeness: Any, scale: Any, total: Any, pull: Any, c: float) -> Callable[[slice], Any]:
        """A task that sums over samples which moved as they would without the row's own."""
        xp = self.xp
        half = xp.astype(pull, xp.float32)
        along = xp.astype(xp.sum(self.u * pull, axis=1), xp.float32)
        length = xp.astype(xp.sum(pull * pull, axis=1), xp.float32)
        own = xp.astype(scale * self.w, xp.float32)
        inverse = xp.astype(1.0 / total, xp.float32)
        least = xp.astype(self.w / total, xp.float32)  # of 1 − ρ, as sample j itself stays: the rest is rounding

        def task(rows: slice) -> Any:
            squares = self.squares[rows, :]
            share = closeness[rows, :] * own[rows, None] * inverse  # ρ
            across = self._product(self.u32[rows, :], half.T) - along  # a·S/D
            pulled = share * squares
            grown = 1.0 / xp.maximum(1.0 - share, least)
            moved = length - share * (2.0 * across - pulled)
            far = xp.clip(squares - grown * (across - pulled - 0.25 * moved * grown), min=0.0)
            near = xp.min(far, axis=1)
            sums = xp.exp((near[:, None] - far) * c) @ self.w32
            return xp.log(xp.astype(sums, xp.float64)) - c * xp.astype(near, xp.float64)

        return task

    def _square(self, z: Any, rows: slice, c: float) -> Any:
        """Each row's part of ∫p̂², relative to the constant of the kernel at √2 h: (rows,)."""
        xp, d = self.xp, self.d
        if z is self.u:
            q = (
                xp.where(self.squares[rows, :] >= NEVER, xp.zeros_like(self.squares[rows, :]), self.squares[rows, :])
                * c
            )
        else:
            q = self._distances(z, rows, itself=0.0) * c
        terms = xp.exp(-0.5 * q)
        if self.method == "laplace":
            terms = terms * (1.0 + d / 2 - 0.5 * q + (q * (q - 2.0 * (d + 2)) + d * (d + 2)) / 16)
        return self.w[rows] * xp.astype(terms @ self.w32, xp.float64)
