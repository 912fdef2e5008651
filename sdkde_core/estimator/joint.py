"""Parts of a list, group by group, at all rows at once: one product whitens by all of their bandwidths.

Of a part with one sample, a normal density, that gives the log. Of a group with more it gives a bound. All samples are
within R bandwidths of the centre, so log p̂(y) is at most c − ½ max(0, ‖L⁻¹(y − centre)‖ − R)², where exp(c) is what a
kernel has at its middle: rows at which other parts are far larger need no sums over these samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from array_api_compat import device

from ..arrays import Array, array_namespace, look, to_host
from ..engine.merge import concatenate
from ..engine.outliers import radii
from ..engine.products import product
from ..protocol import Partial


class Joint(NamedTuple):
    """Parts by their numbers in the list, and for each of their k groups what whitens: u = L⁻¹(y − centre) − offset."""

    which: list[int]
    centre: Array  # (d,) of the first
    constants: Array  # (k,) logs of the shares, and of the kernels at their middles
    extents: Array  # (k,) R bandwidths
    maps: Array  # (d, d k): L⁻ᵀ, the parts side by side for every coordinate of u
    offsets: Array  # (d, k), bandwidths
    norms: Array  # (k,) of L⁻¹: a point's rounding in data units is at most so many times as large in bandwidths

    @classmethod
    def of(cls, parts: Sequence[Any], which: list[int]) -> Joint | None:
        """The groups of parts ``which``, with a middle of their own where they have one sample; None for no part."""
        rows, centre = list[Any](), None
        for part, group in ((parts[k], group) for k in which for group in parts[k].fitted.groups):
            fitted, lone = part.fitted, group.n == len(part.fitted.groups) == 1
            d, own = fitted.problem.d, to_host(fitted.centre)
            centre = own if centre is None else centre
            inverse = fitted.bandwidth.whiten(np.eye(d), np.zeros(d)) / group.scale  # L⁻ᵀ
            points = group.columns.points / group.scale
            middle = to_host(points)[0] if lone else np.zeros(d)
            constant = part.log_share + fitted.log_constant + group.log_share - d * np.log(group.scale)
            extent = 0.0 if lone else look(float, radii(points).max())
            rows.append((constant, extent, inverse, (own - centre) @ inverse + middle, np.linalg.norm(inverse)))
        if centre is None:
            return None
        constants, extents, inverses, offsets, norms = map(np.array, zip(*rows))
        maps = np.ascontiguousarray(inverses.transpose(1, 2, 0)).reshape(len(centre), -1)
        return cls(which, centre, constants, extents, maps, offsets.T.copy(), norms)

    def normals(self, y: Any, scored: bool) -> Partial:
        """The log (m,) and the score (m, d) of parts that have one sample each, float64, where y (m, d) is."""
        xp, there, parts = array_namespace(y), self.at(y), list[Partial]()
        for _, u in there.blocks(y):
            logs = there.constants - 0.5 * xp.einsum("mdk,mdk->mk", u, u)
            parts.append(there.joined(logs, -u if scored else None))
        return concatenate(parts)

    def joined(self, logs: Any, shifts: Any) -> Partial:
        """The log (m,) of all parts' sum, by their own (m, k), and its score by their shifts (m, d, k) or None."""
        xp = array_namespace(logs)
        top = xp.clip(xp.max(logs, axis=-1, keepdims=True), min=-1e300)
        shares = xp.exp(xp.clip(logs - top, min=-80.0))  # which adds nothing: subnormal numbers are slow
        total, score = xp.sum(shares, axis=-1, keepdims=True), None
        if shifts is not None:  # Σ_k r_k L_k⁻ᵀ (shift of k)
            pulled = xp.reshape((shares / total)[:, None, :] * shifts, (shifts.shape[0], -1))
            score = _product(pulled, self.maps.T)
        return Partial((xp.log(total) + top)[:, 0], score)

    def bounds(self, y: Array) -> Array:
        """What the parts' logs are at most at points y (m, d) on the host, (m, k)."""
        found = []
        for away, u in self.blocks(y):
            rounding = 1e-12 * radii(away)[:, None] * self.norms
            gaps = np.sqrt(np.einsum("mdk,mdk->mk", u, u)) - self.extents - rounding
            found.append(self.constants - 0.5 * np.square(np.maximum(gaps, 0.0)))
        return np.concatenate(found)

    def blocks(self, y: Any, numbers: int | None = None) -> Iterator[tuple[Any, Any]]:
        """Blocks of rows, u of so many ``numbers`` at most: y less the centre (b, d), and u (b, d, k)."""
        xp, (d, k) = array_namespace(y), self.offsets.shape
        size = max(1, (numbers or 1 << (15 if isinstance(y, np.ndarray) else 22)) // (d * k))  # which stay in cache
        for start in range(0, y.shape[0], size):
            away = xp.astype(y[start : start + size, :], xp.float64, copy=False) - self.centre
            yield away, xp.reshape(_product(away, self.maps), (-1, d, k)) - self.offsets

    def at(self, y: Any) -> Joint:
        """The same where y is."""
        if isinstance(y, np.ndarray):
            return self
        xp, place = array_namespace(y), device(y)
        return Joint(self.which, *(xp.asarray(array, device=place) for array in self[1:]))


def _product(a: Any, b: Any) -> Any:
    """On the host on this thread: other threads of BLAS would start for a millisecond's work."""
    return product(a, b) if isinstance(a, np.ndarray) else a @ b
