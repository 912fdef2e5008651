"""Parts of a list that are summed by one call of a backend that has the feature "groups"."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..arrays import array_namespace, look, quiet, rounded
from ..choice import select
from ..engine.failures import OutOfReach, call
from ..engine.merge import concatenate
from ..protocol import TOLERANCES, BackendUnavailable, Partial, Reduction, with_fields
from .joint import Joint


class Together:
    """The parts ``which`` of a list, where a backend has them on a device."""

    def __init__(self, parts: Sequence[Any], which: list[int]) -> None:
        joint, first = Joint.of(parts, which), parts[which[0]].fitted
        assert joint is not None  # there are parts
        self.choice: Any = None
        self.which, self._joint, self.on_host = which, joint, first.choice.device == "cpu"
        self._groups = [group.scaled for k in which for group in parts[k].fitted.groups]
        n, requires = sum(g.points.shape[0] for g in self._groups), frozenset(["weights", "groups"])
        self._problem = with_fields(
            first.problem, reduction=Reduction.LOG_SUM, n=n, same=False, device=first.choice.device, requires=requires,
            extent=float(joint.extents.max()),
        )  # fmt: skip

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

    @functools.cached_property
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
        shifts = xp.permute_dims(found.shift, (1, 2, 0)) if scored else None
        sums = joint.joined(found.log_sum.T + constants, shifts)
        if most is not None and not look(float, xp.max(most - xp.logaddexp(known, sums.log_sum))) <= -35.0:
            raise OutOfReach(self.choice.info, problem.device, "rows are too far from groups that add to them")
        return sums


def _exact(fitted: Any) -> bool:
    """Whether columns are NumPy's, and a product with L⁻ᵀ loses no more roundings than the precision allows."""
    eye, most = np.eye(fitted.problem.d), 1e12 * TOLERANCES[fitted.problem.precision][Reduction.LOG_SUM].absolute
    lost = abs(fitted.bandwidth.stretch(eye)) @ abs(fitted.bandwidth.whiten(eye, 0.0 * eye[0]))
    return fitted.choice.info.arrays == "numpy" and bool(lost.sum(axis=0).max() < most)
