"""Products that OpenBLAS computes on the calling thread alone.

It has one number of threads for the whole process, but shares out large products only: they come to it in small pieces.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from typing import Any

import numpy as np

from ..arrays import Array

#: What OpenBLAS leaves on one thread: products of m · n · k up to 262,144 (on Arm's newer cores below 125,000), of a
#: matrix and a vector below 9216 elements, of two vectors up to 10,000 (its interface/gemm.c, gemv.c, kernel/*/dot.c).
PIECE = 120_000 if platform.machine().lower() in ("aarch64", "arm64") else 260_000


def product(a: Array, b: Array, out: Array | None = None, *, terms: int | None = None) -> Array:
    """Return the product of a (m, k) and b (k, n), of one dtype; ``out`` is (m, n) with rows in one piece.

    ``terms``: how many BLAS adds up at most, where equal terms all round alike; longer sums are made of these.
    """
    (m, k), n, matrix = a.shape, b.shape[1], 8192
    out = np.empty((m, n), a.dtype) if out is None else out
    terms = k if terms is None else terms
    if k <= terms and k * m * n <= PIECE and (min(m, n) > 1 or k * max(m, n) <= matrix):  # one piece
        np.matmul(a, b, out=out)
        return out
    # Of 64 rows, and of sums of 80 terms: of several that were tried, the fastest with OpenBLAS.
    depth = -(-k // -(-k // min(terms, max(80, matrix // n))))
    height = min(64, matrix // depth)
    width = min(matrix, PIECE // height) // depth
    rest = np.empty((m, n), a.dtype) if depth < k else out
    for start in range(0, k, depth):
        into, over = rest if start else out, slice(start, start + depth)
        for i, upper in _blocks(a[:, over], height):
            for j, right in _blocks(b[over].T, width):
                (p, h, _), (q, w, _) = upper.shape, right.shape
                part = into[i : i + p * h, j : j + q * w].reshape(p, h, q, w).swapaxes(1, 2)  # a view
                np.matmul(upper[:, None], right.mT[None], out=part)
        if start:
            np.add(out, rest, out=out)
    return out


def times(a: Any, b: Any) -> Any:
    """Return a @ b, of NumPy's arrays on this thread: steps are short, and threads of BLAS take long to wake."""
    return product(a, b) if isinstance(a, np.ndarray) else a @ b


def _blocks(x: Array, size: int) -> Iterator[tuple[int, Array]]:
    """Views of x, (b, k): its blocks of ``size`` rows as (blocks, size, k), then what is left; each with its start."""
    whole = len(x) // size * size
    if whole:
        yield 0, x[:whole].reshape(-1, size, x.shape[1])
    if whole < len(x):
        yield whole, x[None, whole:]


def dots(a: Array, b: Array) -> Array:
    """Return Σ_j a_ij b_ij, (m,), of arrays (m, n); b may be (n,)."""
    total, length = np.vecdot(a[:, :8192], b[..., :8192]), 8192
    for start in range(length, a.shape[1], length):
        total += np.vecdot(a[:, start : start + length], b[..., start : start + length])
    return total
