"""Parts of a list, group by group, at all rows at once: one product whitens by all of their bandwidths.

Of a part with one sample, a normal density, that gives the log. Of a group with more it gives a bound. All samples are
within R bandwidths of the centre, so log p̂(y) is at most c − ½ max(0, ‖L⁻¹(y − centre)‖ − R)², where exp(c) is what a
kernel has at its middle: rows at which other parts are far larger need no sums over these samples.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from array_api_compat import device

from ..arrays import Array, array_namespace, look, quiet, rounded, to_host
from ..choice import select
from ..engine.failures import OutOfReach, call
from ..engine.forks import cached_property
from ..engine.merge import concatenate
from ..engine.outliers import radii
from ..engine.products import times
from ..protocol import TOLERANCES, BackendUnavailable, Partial, Reduction, with_fields


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
            score = times(pulled, self.maps.T)
        return Partial((xp.log(total) + top)[:, 0], score)

    def bounds(self, y: Array) -> Array:
        """Upper bounds (m, k) on the parts' logs at points y (m, d) on the host."""
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
            yield away, xp.reshape(times(away, self.maps), (-1, d, k)) - self.offsets

    def at(self, y: Any) -> Joint:
        """The same where y is."""
        if isinstance(y, np.ndarray):
            return self
        xp, place = array_namespace(y), device(y)
        return Joint(self.which, *(xp.asarray(array, device=place) for array in self[1:]))


class Together:
    """The parts ``which`` of a list, summed by one call of a backend that has the feature "groups"."""

    def __init__(self, parts: Sequence[Any], which: list[int]) -> None:
        joint, first = Joint.of(parts, which), parts[which[0]].fitted
        assert joint is not None  # there are parts
        self.choice: Any = None
        self.which, self._joint, self.on_host = which, joint, first.choice.device == "cpu"
        self._groups = [group.scaled for k in which for group in parts[k].fitted.groups]
        n, requires = sum(g.points.shape[0] for g in self._groups), frozenset(["weights", "groups"])
        more = {"device": first.choice.device, "requires": requires, "extent": float(joint.extents.max())}
        self._problem = with_fields(first.problem, reduction=Reduction.LOG_SUM, n=n, same=False, **more)

    @classmethod
    @quiet
    def of(cls, parts: Sequence[Any]) -> Together | None:
        """The parts with many samples that a backend sums at once; None where none does.

        On a GPU these are parts of one group but the first. On the host they are all but those for which a product with
        L⁻ᵀ is not exact enough.
        """
        many = [k for k, part in enumerate(parts) if part.fitted.groups and part.fitted.groups[0].n > 1]
        single = [k for k in many if k and len(parts[k].fitted.groups) == 1]
        device = parts[(single or many or [0])[0]].fitted.choice.device
        host = device == "cpu"
        known = ((k, parts[k].fitted) for k in (many if host else single))
        which = [k for k, f in known if f.choice.device == device and not f.choice.devices and (not host or _exact(f))]
        if not which or len(which if not host else parts) < 2:
            return None
        found, request = cls(parts, which), parts[which[0]].fitted.request
        problem, how = found._problem, {"calls": 100, "without": request.without}
        if host:  # where the one that is best for any sum over so many is to have the feature
            problem = with_fields(problem, requires=frozenset(["weights"]))
            how |= {"backend": request.backend, "options": request.backend_options}
        try:
            found.choice = select.choose([problem], device=device, **how)
        except BackendUnavailable:
            return None
        able = "groups" in found.choice.info.features and (not host or found.choice.info.arrays == "numpy")
        return found if able and found.limit(Reduction.LOG_SUM) > 0.0 else None

    def limit(self, reduction: Reduction) -> float:
        """How far from its group's centre a row may be, in bandwidths; 0 where the backend has no sums."""
        problem = with_fields(self._problem, reduction=reduction)
        if problem.precision not in self.choice.info.precisions or not self.choice.info.supports(problem).ok:
            return 0.0
        return float(self.choice.info.extent_limit(problem))

    @cached_property
    def _state(self) -> Any:
        return call(self.choice.info, self._problem, self.choice.backend.prepare_groups, self._groups, inputs=[])

    def summed(self, y: Any, scored: bool, known: Any) -> Partial | None:
        """The log (m,) and score (m, d) of these parts at y on their device, beside the log ``known`` (m,) of others.

        None where the backend fails, or a row to which they may add is farther from a group than the backend sums.
        """
        joint, parts, start = self._joint.at(self._groups[0].points), list[Partial](), 0
        try:
            for _, u in joint.blocks(y, 1 << (20 if self.on_host else 26)):  # 8 or 512 MB for every array
                parts.append(self._block(joint, u, scored, known[start : start + len(u)]))
                start += len(u)
        except (MemoryError, BackendUnavailable):
            return None
        return concatenate(parts)

    def _block(self, joint: Joint, u: Any, scored: bool, known: Any) -> Partial:
        xp, reduction, below = array_namespace(u), Reduction.MEAN if scored else Reduction.LOG_SUM, -math.inf
        limit, constants, (m, _, k) = self.limit(reduction), joint.constants, u.shape
        r, most = xp.sqrt(xp.einsum("mdk,mdk->mk", u, u)), None
        largest = look(float, xp.max(r))
        if not largest <= limit:  # or NaN
            far, gaps = ~(r <= limit), xp.clip(r - joint.extents, min=0.0)
            most = xp.max(xp.where(far, constants - 0.5 * gaps * gaps, below), axis=1)
            u, r = xp.where(far[:, None, :], xp.zeros_like(u), u), xp.where(far, xp.zeros_like(r), r)
            constants, largest = xp.where(far, below, constants), look(float, xp.max(r))
        extent = min(limit, max(rounded(largest), self._problem.extent))
        problem = with_fields(self._problem, m=m, reduction=reduction, extent=extent)
        given = xp.permute_dims(u, (2, 0, 1)), self._state, xp.broadcast_to(constants, (m, k)).T, known
        found = call(self.choice.info, problem, self.choice.backend.reduce_groups, *given, inputs=[])
        sums = joint.joined(found.log_sum.T + constants, xp.permute_dims(found.shift, (1, 2, 0)) if scored else None)
        if most is not None and not look(float, xp.max(most - xp.logaddexp(known, sums.log_sum))) <= -35.0:
            raise OutOfReach(self.choice.info, problem.device, "rows are too far from groups that add to them")
        return sums


def _exact(fitted: Any) -> bool:
    """Whether columns are NumPy's, and a product with L⁻ᵀ loses no more roundings than the precision allows."""
    eye, most = np.eye(fitted.problem.d), 1e12 * TOLERANCES[fitted.problem.precision][Reduction.LOG_SUM].absolute
    lost = abs(fitted.bandwidth.stretch(eye)) @ abs(fitted.bandwidth.whiten(eye, 0.0 * eye[0]))
    return fitted.choice.info.arrays == "numpy" and bool(lost.sum(axis=0).max() < most)
