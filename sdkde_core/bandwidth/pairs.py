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
from collections.abc import Callable, Sequence
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

#: Threads at most. More get into each other's way: between NumPy's short operations each waits for the interpreter.
THREADS = 4

#: Elements of an array on a device: of all pairs, for as many bandwidths at a time.
ELEMENTS = 1 << 26

#: A squared distance of a sample from itself that leaves it out, and does not overflow.
NEVER = 1e30


class Left(NamedTuple):
    """What one bandwidth gives, without the constant of the kernel of unit bandwidth, (2π)^(−d/2)."""

    log_density: NDArray[np.float64]  # (n,) log |p̂₋ᵢ(x_i)|
    sign: Any  # of it: (n,) for laplace, else 1
    log_square: Any  # log ∫p̂²


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
        self.on_host = isinstance(u, np.ndarray)
        rows = ROWS if self.on_host else self.n
        self.blocks = [slice(i, min(i + rows, self.n)) for i in range(0, self.n, rows)]
        self.threads = min(cpu_threads(), THREADS) if self.on_host and self.n > 4 * ROWS else 1
        self.w32, self.u32 = xp.astype(weights, xp.float32), xp.astype(u, xp.float32)
        self.weighted = xp.concat([self.w32[:, None], self.w32[:, None] * self.u32], axis=1)  # (n, 1 + d)
        self._product = product if self.on_host else self._in_float64
        index = xp.arange(self.n, **self._where)
        self._itself = index[:, None] == index[None, :]
        self.squares = self._gather(lambda rows: self._distances(self.u, rows, itself=NEVER))  # (n, n)
        self.nearest = xp.min(self.squares, axis=1)

    @property
    def _where(self) -> dict[str, Any]:
        return {} if self.on_host else {"device": self.u.device}

    def at(self, bandwidths: Sequence[float]) -> list[Left]:
        """Return the criteria's terms for bandwidths in units of the spread.

        On a device for many at a time, in arrays of one axis more: there launching takes longer than computing.
        """
        if self.on_host:
            return [self._left(h) for h in bandwidths]
        some, result = max(1, ELEMENTS // self.n**2), []
        for i in range(0, len(bandwidths), some):
            together = self._left(np.array(bandwidths[i : i + some]))
            signs = np.broadcast_to(together.sign, together.log_density.shape)
            result += [Left(*parts) for parts in zip(together.log_density, signs, together.log_square)]
        return result

    def _left(self, h: Any) -> Left:
        """The terms for one bandwidth, or for k of them, (k,): then each has an axis k before."""
        xp, near = self.xp, self.nearest
        c: Any = 0.5 / h**2
        wide: Any = c  # as a factor of (rows, n), float32
        if not self.on_host:
            c = xp.asarray(c, **self._where)[:, None]
            wide = xp.astype(c, xp.float32)[:, :, None]
        closeness = self._gather(lambda rows: xp.exp((near[rows, None] - self.squares[rows, :]) * wide))
        log_scale = -c * xp.astype(near, xp.float64)
        z, sign = self.u, None
        if self.method == "laplace":
            signed = self._gather(lambda rows: self._laplace(closeness[..., rows, :], self.squares[rows, :], wide))
            sign, log = xp.sign(signed), xp.log(xp.abs(signed)) + log_scale
        else:
            sums = self._gather(lambda rows: self._product(closeness[..., rows, :], self.weighted))
            sums = xp.astype(sums, xp.float64)
            log = xp.log(sums[..., 0]) + log_scale
        if self.method == "sdkde":
            scale = xp.exp(log_scale)
            total = self.w + scale * sums[..., 0]  # D
            pull = (scale / total)[..., None] * (sums[..., 1:] - sums[..., :1] * self.u)  # S/D
            z = self.u + 0.5 * pull
            log = self._gather(self._moved_without(closeness, scale, total, pull, wide, c))
        square = to_host(xp.sum(self._gather(lambda rows: self._square(z, rows, wide)), axis=-1))
        dimension = self.d * np.log(h)
        log = to_host(log - xp.log1p(-self.w)) - (dimension if self.on_host else dimension[:, None])
        log_square = np.log(np.maximum(square, 1e-300)) - dimension - 0.5 * self.d * math.log(2.0)
        return Left(log, 1.0 if sign is None else to_host(sign), log_square)

    def _gather(self, task: Callable[[slice], Any]) -> Any:
        """Return a task's results for all blocks of rows, one below the other."""
        if len(self.blocks) == 1:
            return task(self.blocks[0])

        def alone(rows: slice) -> Any:
            with np.errstate(all="ignore"), on_this_thread():
                return task(rows)

        return self.xp.concat(map_threads(alone, self.blocks, self.threads), axis=0)

    def _in_float64(self, a: Any, b: Any) -> Any:
        """A product on a device: one of float32 may be rounded to TF32 there, as PyTorch can be told to do."""
        xp = self.xp
        return xp.astype(xp.matmul(xp.astype(a, xp.float64), xp.astype(b, xp.float64)), a.dtype)

    def _weigh(self, terms: Any) -> Any:
        """The weighted sum of each row, float64."""
        if self.on_host:
            return self.xp.astype(product(terms, self.w32[:, None])[:, 0], self.xp.float64)
        return self.xp.sum(terms * self.w32, axis=-1, dtype=self.xp.float64)

    def _distances(self, z: Any, rows: slice, itself: float) -> Any:
        """Squared distances of some rows from all, float32; ``itself`` from themselves."""
        xp = self.xp
        if self.d == 1:
            squares = (z[..., rows, :] - z[..., 0][..., None, :]) ** 2
        else:
            norms = xp.sum(z * z, axis=-1)
            products = self._product(z[..., rows, :], z.mT)
            squares = xp.clip(norms[..., rows, None] + norms[..., None, :] - 2.0 * products, min=0.0)
        squares = xp.astype(squares, xp.float32)
        return xp.where(self._itself[rows, :], xp.full_like(squares, itself), squares)

    def _laplace(self, closeness: Any, squares: Any, c: Any) -> Any:
        return self._weigh(closeness * ((1.0 + 0.5 * self.d) - squares * c))

    def _moved_without(
        self, closeness: Any, scale: Any, total: Any, pull: Any, wide: Any, c: Any
    ) -> Callable[[slice], Any]:
        """A task that sums over samples which moved as they would without the row's own."""
        xp = self.xp
        half = xp.astype(pull, xp.float32)

        def of_columns(x: Any) -> Any:
            return xp.astype(x, xp.float32)[..., None, :]

        along, length = of_columns(xp.sum(self.u * pull, axis=-1)), of_columns(xp.sum(pull * pull, axis=-1))
        own, inverse = xp.astype(scale * self.w, xp.float32), of_columns(1.0 / total)
        least = of_columns(self.w / total)  # of 1 − ρ, as sample j itself stays: the rest is rounding

        def task(rows: slice) -> Any:
            squares = self.squares[rows, :]
            share = closeness[..., rows, :] * own[..., rows, None] * inverse  # ρ
            across = self._product(self.u32[rows, :], half.mT) - along  # a·S/D
            pulled = share * squares
            grown = 1.0 / xp.maximum(1.0 - share, least)
            moved = length - share * (2.0 * across - pulled)
            far = xp.clip(squares - grown * (across - pulled - 0.25 * moved * grown), min=0.0)
            near = xp.min(far, axis=-1)
            sums = self._weigh(xp.exp((near[..., None] - far) * wide))
            return xp.log(sums) - c * xp.astype(near, xp.float64)

        return task

    def _square(self, z: Any, rows: slice, c: Any) -> Any:
        """Each row's part of ∫p̂², relative to the constant of the kernel at √2 h: (rows,)."""
        xp, d = self.xp, self.d
        if z is self.u:
            squares = self.squares[rows, :]
            q = xp.where(self._itself[rows, :], xp.zeros_like(squares), squares) * c
        else:
            q = self._distances(z, rows, itself=0.0) * c
        terms = xp.exp(-0.5 * q)
        if self.method == "laplace":
            terms = terms * (1.0 + d / 2 - 0.5 * q + (q * (q - 2.0 * (d + 2)) + d * (d + 2)) / 16)
        return self.w[rows] * self._weigh(terms)
