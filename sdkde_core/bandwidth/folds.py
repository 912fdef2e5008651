"""What a bandwidth would do to samples that it has not seen, by K folds: the plain way, beside :mod:`.pairs`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from array_api_compat import array_namespace

from ..arrays import to_host
from .pairs import Left

__all__ = ["Folds"]


class Folds:
    """A sample in K parts, each judged by the others; parameters as for :class:`Pairs`."""

    def __init__(self, u: Any, weights: Any, method: str, folds: int) -> None:
        self.xp, self.u, self.w, self.method = array_namespace(u), u, weights, method
        self.n, self.d = (int(k) for k in u.shape)
        where = {} if isinstance(u, np.ndarray) else {"device": u.device}
        parts = np.array_split(np.random.default_rng(folds).permutation(self.n), folds)
        everyone = np.arange(self.n)
        self.order = np.concatenate(parts)
        self.parts = [
            tuple(self.xp.asarray(rows, **where) for rows in (held, np.setdiff1d(everyone, held))) for held in parts
        ]

    def at(self, bandwidths: Sequence[float]) -> list[Left]:
        """Return the criteria's terms for bandwidths in units of the spread."""
        return [self._left(h) for h in bandwidths]

    def _left(self, h: float) -> Left:
        xp, c, logs, signs, squares = self.xp, 0.5 / h**2, [], [], []
        for held, others in self.parts:
            rows, x = xp.take(self.u, held, axis=0), xp.take(self.u, others, axis=0)
            w = xp.take(self.w, others)
            share = xp.sum(w)
            w, z = w / share, x
            if self.method == "sdkde":
                near = xp.exp(-c * _squares(xp, x, x)) * w[None, :]
                z = 0.5 * (x + (near @ x) / xp.sum(near, axis=1)[:, None])
            q = c * _squares(xp, rows, z)
            least = xp.min(q, axis=1)
            terms, both = xp.exp(least[:, None] - q), c * _squares(xp, z, z)
            square = xp.exp(-0.5 * both)
            if self.method == "laplace":
                d = self.d
                terms = terms * (1.0 + d / 2 - q)
                square = square * (1.0 + d / 2 - 0.5 * both + (both * (both - 2.0 * (d + 2)) + d * (d + 2)) / 16)
            sums = terms @ w
            logs.append(to_host(xp.log(xp.abs(sums)) - least))
            signs.append(to_host(xp.sign(sums)))
            squares.append(float(w @ (square @ w)) * (1.0 - float(share)))
        back, dimension = np.argsort(self.order), self.d * math.log(h)
        log_square = math.log(max(sum(squares), 1e-300)) - dimension - 0.5 * self.d * math.log(2.0)
        return Left(np.concatenate(logs)[back] - dimension, np.concatenate(signs)[back], log_square)


def _squares(xp: Any, a: Any, b: Any) -> Any:
    """Squared distances (len(a), len(b))."""
    norms = xp.sum(a * a, axis=1)[:, None] + xp.sum(b * b, axis=1)[None, :]
    return xp.clip(norms - 2.0 * (a @ b.T), min=0.0)
