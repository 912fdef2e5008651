"""The density by a bandwidth at samples that are left out: exact leave-one-out sums over all pairs of samples.

Everything is per sample i, as if it were not there. φ_ij = exp(−r²_ij / 2h²), and weights sum to 1:

* kde: p̂₋ᵢ(x_i) ∝ Σ_{j≠i} w_j φ_ij / (1 − w_i).
* laplace: the same with the factor 1 + d/2 − r²_ij / 2h².
* sdkde: without i the samples j move elsewhere, by ½ (S_j/D_j − ρ a) / (1 − ρ) (docs/mathematics.md has D and S) with
  a = u_i − u_j and ρ = w_i φ_ij / D_j. With t = ½ / (1 − ρ) and p = t + ½ the squared distance from u_i is then
  p (p r² − 2 t a·S_j/D_j) + t² ‖S_j/D_j‖²: a product of matrices and an exponential for each pair beyond the moves'.

∫p̂² is a KDE of the (moved) samples at √2 h; for laplace each term has the factor
1 + d/2 − q/2 + (q² − 2(d+2) q + d(d+2))/16, q = r²/2h².

Elementwise arithmetic is float32, which is enough for criteria. Distances are formed in float64. A row's exponentials
are relative to its nearest sample's, so that not all underflow.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..arrays import Array
from ..choice.hardware import cpu_threads
from ..engine.products import product
from ..engine.threads import map_threads
from .normal import roughness

BLOCK = 1 << 16  # pairs of a block where samples are few: its float32 arrays stay in a core's cache


class Left(NamedTuple):
    """The criteria's terms for one bandwidth, without (2π)^(−d/2)."""

    log_density: NDArray[np.float64]  # (n,) log |p̂₋ᵢ(x_i)|
    sign: Any  # of it: (n,) for laplace, else 1
    log_square: Any  # log ∫p̂²


class Pairs:
    """All pairs of a sample, ready for any bandwidth.

    u (n, d): distinct samples, in units of their spread, near the origin. The weights (n,) are positive and sum to 1.
    """

    def __init__(self, u: Array, weights: Array, method: str) -> None:
        self.u, self.w, self.method = u, weights, method
        self.n, self.d = u.shape
        # Threads that do short operations wait for the interpreter: at most four, with large blocks, always the same.
        block = 4 * BLOCK if self.n**2 >= 16 * BLOCK else BLOCK
        self.threads, rows = min(cpu_threads(), 4) if block > BLOCK else 1, max(1, min(block // self.n, self.n))
        self._pool: ThreadPoolExecutor | None = None
        self.blocks = [slice(i, min(i + rows, self.n)) for i in range(0, self.n, rows)]
        self.w32, u32 = weights.astype(np.float32), u.astype(np.float32)
        summed = [self.w32[:, None], self.w32[:, None] * u32]  # (n, 1) and (n, d), which only moves need
        self.weighted = np.concatenate(summed, axis=1) if method == "sdkde" else summed[0]
        self.with_ones = np.concatenate([u32, np.ones_like(u32[:, :1])], axis=1)
        # A nearest sample with a smaller φ, relative to the least weight, adds nothing to sums of float32.
        self._alone = 1e-9 * weights.min()
        self.squares = self._gather(self._squares(self.u))  # (n, n), of a sample itself 1e30
        np.maximum(self.squares, 0.0, out=self.squares)  # by rounding some are less
        np.fill_diagonal(self.squares, 1e30)
        self.nearest = self.squares.min(axis=1)
        self._closer = self.nearest[:, None] - self.squares  # (n, n), at most 0

    def at(self, bandwidths: Sequence[float]) -> list[Left]:
        """Return the criteria's terms for bandwidths in units of the spread.

        Many at a time where samples are few: there the overhead of operations counts.
        """
        if len(self.blocks) > 1:  # to start threads for each sum takes as long as a sum over 300 samples
            pool = ThreadPoolExecutor(self.threads, thread_name_prefix="sdkde") if self.threads > 1 else nullcontext()
            with pool as self._pool:
                found = [self._left(h) for h in bandwidths]
            self._pool = None
            return found
        some, result = max(1, BLOCK // self.n**2), []
        for i in range(0, len(bandwidths), some):
            together = self._left(np.array(bandwidths[i : i + some]))
            signs = np.broadcast_to(together.sign, together.log_density.shape)
            result += [Left(*parts) for parts in zip(together.log_density, signs, together.log_square)]
        return result

    def _left(self, h: Any) -> Left:
        """The terms for one bandwidth, a float, or for k of them, (k,): then each has an axis k before."""
        near, c = self.nearest, 0.5 / h**2
        wide: Any = c  # as a factor of (rows, n), float32
        if not isinstance(h, float):
            c = c[:, None]
            wide = c.astype(np.float32)[:, :, None]
        closeness: dict[int, Any] = {}  # of each block of rows, by its first
        sums = self._gather(functools.partial(self._close, closeness, wide))
        log_scale = -c * near.astype(np.float64)
        z, sign = self.u, 1.0
        if self.method == "laplace":
            sign, log = np.sign(sums), np.log(np.abs(sums)) + log_scale
        else:
            sums = sums.astype(np.float64)
            log = np.log(sums[..., 0]) + log_scale
        if self.method == "sdkde":
            scale = np.exp(log_scale)
            scale = np.where(scale < self._alone, 0.0, scale)
            total = self.w + scale * sums[..., 0]  # D
            pull = (scale / total)[..., None] * (sums[..., 1:] - sums[..., :1] * self.u)  # S/D
            z = self.u + 0.5 * pull
            log = self._gather(self._moved_without(closeness, scale, total, pull, wide, c))
        square = self._gather(self._square(z, wide)).sum(axis=-1)
        dimension = self.d * np.log(h)
        log = log - np.log1p(-self.w) - (dimension if isinstance(h, float) else dimension[:, None])
        return Left(log, sign, np.log(np.maximum(square, 1e-300)) - dimension - 0.5 * self.d * math.log(2.0))

    def _gather(self, task: Callable[[slice], Any]) -> Any:
        """Return a task's results for all blocks of rows, one below the other."""
        if len(self.blocks) == 1:
            return task(self.blocks[0])
        return np.concatenate(map_threads(task, self.blocks, self.threads, pool=self._pool), axis=0)

    def _weigh(self, terms: Array, weights: Any = None) -> Array:
        """The weighted sum of each row, float64; by all samples' weights unless others are given."""
        weights = self.w32 if weights is None else weights
        return _product(terms, weights[:, None])[..., 0].astype(np.float64)

    def _squares(self, z: Array) -> Callable[..., Array]:
        """A function that returns squared distances of a block of rows, from all or from some, float32."""
        norms = (z * z).sum(axis=-1, keepdims=True)
        ones = np.ones_like(norms)
        left, right = np.concatenate([-2.0 * z, norms, ones], axis=-1), _turned([z, ones, norms])

        def task(rows: slice, columns: slice = slice(None)) -> Array:
            return _product(left[..., rows, :], right[..., :, columns]).astype(np.float32)

        return task

    def _close(self, closeness: dict[int, Any], c: Any, rows: slice) -> Any:
        """Sum over samples that stay where they are: weights, and weighted samples where the method moves them."""
        exponents = _bounded(self._closer[rows, :] * c)
        if self.method == "laplace":
            least = (1.0 + 0.5 * self.d) - self.nearest[rows, None] * c
            return self._weigh((exponents + least) * np.exp(exponents))
        terms = closeness[rows.start] = np.exp(exponents, out=exponents)
        return _product(terms, self.weighted)

    def _moved_without(
        self, closeness: dict[int, Any], scale: Any, total: Any, pull: Any, wide: Any, c: Any
    ) -> Callable[[slice], Any]:
        """A task that sums over samples which moved as they would without the row's own."""
        twice = 2.0 * pull
        along = _turned([twice.astype(np.float32), -(self.u * twice).sum(axis=-1, keepdims=True).astype(np.float32)])

        def of_columns(x: Array) -> Array:
            return x.astype(np.float32)[..., None, :]

        length = of_columns((pull * pull).sum(axis=-1))
        own, everyone = (-scale * self.w).astype(np.float32), of_columns(total)
        half, least = 0.5 * everyone, self.w32  # of D without the row's, as sample j itself stays: the rest is rounding

        def task(rows: slice) -> Array:
            rest = closeness.pop(rows.start)  # reused in place below: a new array costs as much as an operation
            rest *= own[..., rows, None]
            rest += everyone
            t = np.divide(half, np.maximum(rest, least, out=rest), out=rest)
            across = _product(self.with_ones[rows, :], along)  # 2 a·S/D
            across *= t
            p = t + 0.5
            far = self.squares[rows, :] * p
            far -= across
            far *= p
            t *= t
            t *= length
            far += t
            near = far.min(axis=-1)
            if near.min() < 0.0:  # by rounding: a lot where the row outweighs another a million times
                near = np.maximum(far, 0.0, out=far).min(axis=-1)
            far -= near[..., None]
            far *= -wide
            return np.log(self._weigh(np.exp(_bounded(far), out=far))) - c * near.astype(np.float64)

        return task

    def _square(self, z: Any, c: Any) -> Callable[[slice], Any]:
        """A task that returns each row's part of ∫p̂², relative to the constant of the kernel at √2 h: (rows,).

        Of two samples in different blocks the first has the part of both.
        """
        d, squares, own = self.d, self._squares(z), 0.0
        if z is self.u:  # its squares are known, except of a sample and itself
            squares, own = (lambda rows, columns: self.squares[rows, columns]), roughness(self.method, d)

        def task(rows: slice) -> Any:
            q = _bounded(squares(rows, slice(rows.start, self.n)) * (-0.5 * c))
            if self.method != "laplace":
                terms = np.exp(q, out=q)
            else:
                terms, q = np.exp(q), -2.0 * q
                terms *= 1.0 + d / 2 - 0.5 * q + (q * (q - 2.0 * (d + 2)) + d * (d + 2)) / 16
            weights = np.concatenate([self.w32[rows], 2.0 * self.w32[rows.stop :]])
            return self.w[rows] * (self._weigh(terms, weights) + own * self.w[rows])

        return task


def _product(a: Array, b: Array) -> Array:
    return product(a, b) if a.ndim == b.ndim == 2 else np.matmul(a, b)


def _turned(parts: list[Array]) -> Array:
    """Parts of columns as the right factor of products: one whose rows are in one piece takes half as long."""
    return np.ascontiguousarray(np.concatenate(parts, axis=-1).mT)


def _bounded(exponents: Array) -> Array:
    """Clip to −50 … 0, in place: less adds nothing to sums of float32, and subnormal numbers take long."""
    return exponents.clip(-50.0, 0.0, out=exponents)  # on one side NumPy takes three times as long
