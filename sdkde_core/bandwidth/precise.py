"""Whitening by a matrix, as if nothing but its result were rounded.

Numbers are cut into a top, on a grid common to a row (or a column) that is so coarse that sums of products of two tops
are whole numbers of at most 53 bits, and a rest, some 2⁻²⁰ of it. A product of tops is exact, in any order of summation
and on any device; only products with a rest are rounded, and these are small (Ozaki, Ogita, Oishi and Rump, "Error-free
transformations of matrix multiplication", 2012). So nothing here needs more than float64.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ..arrays import Array, array_namespace
from ..engine.products import times


class Inverse(NamedTuple):
    """The inverse of a factor L = diag(scale) K."""

    scale: Any  # (d,)
    high: Any  # (d, d) K⁻¹, lower triangular
    low: Any = None  # (d, d) what `high` has lost to rounding; with it `scale` is of powers of two

    @property
    def whole(self) -> Any:
        """L⁻¹, (d, d), rounded."""
        return self.high / self.scale

    def cut(self) -> tuple[Array, Array, Array, Array]:
        """Return what :func:`shifted_product` takes."""
        matrix = self.high.T
        coarse = _top(matrix, 0)
        return 1.0 / self.scale, coarse, (matrix - coarse) + self.low.T, matrix


def inverse_of(factor: Array, matrix: Array | None = None) -> Inverse:
    """Return the inverse of the Cholesky factor of a matrix, right to its last digits for any condition number.

    Let R be the matrix in units of its diagonal's roots, and P the inverse of its factor in float64. Then
    P R Pᵀ = I + E, with E of cond(R) roundings. It is formed to 1e-29 cond(R), so its Cholesky factor C is right to a
    few roundings, and C⁻¹ P is K⁻¹. A second step finds E of √cond(R) roundings only, and C⁻¹ P is kept in two parts.

    ``factor`` is L within rounding; ``matrix`` is L Lᵀ by default. LinAlgError where that is not positive definite.
    """
    scale = np.ldexp(1.0, np.frexp(abs(factor).max(axis=1))[1])  # powers of two: division is exact
    given = factor / scale[:, None]
    high = np.tril(np.linalg.inv(given))
    amplified = abs(high) @ abs(given)
    condition = float(np.sqrt(amplified.sum(axis=0).max() * amplified.sum(axis=1).max()))  # ≥ the 2-norm
    if condition <= 16.0:  # plain float64 does: it loses so many roundings of the farthest point's coordinates
        return Inverse(scale, high)
    if matrix is not None:
        r = matrix / scale[:, None] / scale
        symmetric = (r + r.T) / 2
        rest = ((r - symmetric) + (r.T - symmetric)) / 2

    def remaining(p: Array) -> Array:
        """C of P R Pᵀ = C Cᵀ, which is P K where the matrix is given by its factor K."""
        if matrix is None:
            return np.add(*_product(p, given))
        first, low = _product(symmetric, p.T)
        near_one, lost = _product(p, first)
        near_one += lost + p @ (low + rest @ p.T)
        return np.linalg.cholesky((near_one + near_one.T) / 2)

    low = high
    for _ in range(1 if condition <= 1e4 else 2):
        change = (np.tril(np.linalg.inv(remaining(high))) - np.eye(len(high))) @ high
        high, before = high + change, high
        low = (before - high) + change
    return Inverse(scale, high, low)


def shifted_product(x: Any, centre: Any, unit: Any, coarse: Any, fine: Any, matrix: Any) -> Any:
    """Return ((x − centre) · unit) @ L⁻ᵀ, (n, d), to half a unit of the last place of a point's largest coordinate.

    ``unit`` (d,) has powers of two; K⁻ᵀ is coarse + fine, and ``matrix`` where it is rounded.
    """
    xp, (n, d) = array_namespace(x), x.shape
    # Numbers in a block of rows: on the host it stays in cache; some ten blocks are needed at a time.
    height = max(1, (1 << 15 if isinstance(x, np.ndarray) else 1 << 22) // d)
    if n > height:
        rest = (centre, unit, coarse, fine, matrix)
        blocks = [x[i : min(n, i + height), :] for i in range(0, n, height)]
        return xp.concat([shifted_product(block, *rest) for block in blocks])
    x = xp.astype(x, xp.float64, copy=False)
    shifted = x - centre
    back = shifted - x
    lost = (x - (shifted - back)) - (centre + back)
    shifted = shifted * unit
    top = _top(shifted, 1)
    return times(top, coarse) + (times(top, fine) + times((shifted - top) + lost * unit, matrix))


def _top(x: Any, axis: int) -> Any:
    """The top of every row (``axis=1``) or column: so few bits that sums of products of two take at most 53."""
    xp = array_namespace(x)
    bits = (51 - (x.shape[axis] - 1).bit_length()) // 2
    large = xp.max(xp.abs(x), axis=axis, keepdims=True) * 2.0 ** (53 - bits)
    return (x + large) - large


def _product(a: Array, b: Array) -> tuple[Array, Array]:
    """a b as high + low, to some 2⁻⁹⁰ |a| |b|."""
    a1, b1 = _top(a, 1), _top(b, 0)
    a2, b2 = _top(a - a1, 1), _top(b - b1, 0)
    rest = a2 @ b2 + (((a - a1) - a2) @ b + (a1 + a2) @ ((b - b1) - b2))
    high, low = a1 @ b1, np.zeros((len(a), b.shape[1]))
    for term in (a1 @ b2, a2 @ b1, rest):
        total = high + term
        back = total - high
        low += (high - (total - back)) + (term - back)
        high = total
    return high, low
