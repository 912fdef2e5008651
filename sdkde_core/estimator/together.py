"""Parts of a list that are one group each, on a GPU: summed by one call of a backend that has the feature "groups"."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

from ..arrays import array_namespace, look, rounded
from ..choice import registry
from ..engine.devices import memory_errors
from ..engine.failures import raise_interrupt
from ..engine.merge import concatenate
from ..protocol import Columns, Partial, Problem, Reduction, with_fields
from .joint import Joint


class Together:
    """The parts ``which`` of a list, where the backend of ``info`` has them on a device."""

    def __init__(self, parts: Sequence[Any], which: list[int], info: Any, backend: Any) -> None:
        first = parts[which[0]].fitted
        self.which, self._info, self._backend = which, info, backend
        joint = Joint.of(parts, which)
        assert joint is not None  # there are parts
        self._joint = joint
        groups = [parts[k].fitted.groups[0].scaled for k in which]
        self._groups = [Columns(g.points, g.log_weights) for g in groups]
        n, requires = sum(g.points.shape[0] for g in groups), frozenset(["weights", "groups"])
        self._problem = Problem(
            Reduction.LOG_SUM, 1, n, first.problem.d, first.problem.dtype, first.problem.precision,
            first.choice.device, requires=requires, extent=float(self._joint.extents.max()),
        )  # fmt: skip

    @classmethod
    def of(cls, parts: Sequence[Any], which: list[int]) -> Together | None:
        """The parts ``which`` that are near enough for a backend that is here; None for fewer than two."""
        device = parts[which[0]].fitted.choice.device if which else "cpu"
        for record in registry.records() if device.startswith("cuda") else ():
            if not record.ok or record.info is None or "groups" not in record.info.features:
                continue
            backend, support = registry.start(record.info, device)
            known = (parts[k].fitted for k in which)
            same = [
                k for k, fitted in zip(which, known) if fitted.choice.device == device and not fitted.choice.devices
            ]
            if support.ok and len(same) > 1:
                found = cls(parts, same, record.info, backend)
                if found.limit(Reduction.LOG_SUM) > 0.0:
                    return found
        return None

    def limit(self, reduction: Reduction) -> float:
        """How far from its group's centre a row may be, in bandwidths; 0 where the backend has no sums."""
        problem = with_fields(self._problem, reduction=reduction)
        if problem.precision not in self._info.precisions or not self._info.supports(problem).ok:
            return 0.0
        return float(self._info.extent_limit(problem))

    @functools.cached_property
    def _state(self) -> Any:
        return self._backend.prepare_groups(self._problem, self._groups)

    @functools.cached_property
    def _there(self) -> tuple[Any, Any, Any, Any, Any]:
        """Centre (d,), L⁻ᵀ (k, d, d), offsets (k, 1, d), constants and extents (k, 1), on the device."""
        joint, (d, k) = self._joint.at(self._groups[0].points), self._joint.offsets.shape
        xp = array_namespace(joint.maps)
        maps = xp.permute_dims(xp.reshape(joint.maps, (d, d, k)), (2, 0, 1)).contiguous()
        return joint.centre, maps, joint.offsets.T[:, None, :], joint.constants[:, None], joint.extents[:, None]

    def summed(self, y: Any, scored: bool) -> tuple[Partial, Any] | None:
        """The log (m,) and score (m, d) of these parts at y on their device, and what was left out at most, (m,) logs.

        Left out is a row that is farther from a group than the backend sums. None where it sums nothing.
        """
        size = max(1, (1 << 26) // max(1, math.prod(self._joint.offsets.shape)))  # 512 MB for every array
        parts, left = list[Partial](), list[Any]()
        for start in range(0, y.shape[0], size):
            found = self._block(y[start : start + size, :], scored)
            if found is None:
                return None
            parts.append(found[0])
            left.append(found[1])
        return concatenate(parts), left[0] if len(left) == 1 else array_namespace(y).concat(left)

    def _block(self, y: Any, scored: bool) -> tuple[Partial, Any] | None:
        reduction = Reduction.MEAN if scored else Reduction.LOG_SUM
        limit = self.limit(reduction)
        if not limit:
            return None
        centre, maps, offsets, constants, extents = self._there
        xp, below = array_namespace(y), -math.inf
        u = (xp.astype(y, xp.float64, copy=False) - centre) @ maps - offsets  # (k, m, d)
        r = xp.linalg.vector_norm(u, axis=-1)
        far = ~(r <= limit)  # of NaN too
        gaps = xp.clip(r - extents, min=0.0)
        most = xp.max(xp.where(far, constants - 0.5 * gaps * gaps, below), axis=0)
        u, r = xp.where(far[:, :, None], xp.zeros_like(u), u), xp.where(far, xp.zeros_like(r), r)
        extent = min(limit, max(rounded(look(float, xp.max(r))), self._problem.extent))
        problem = with_fields(self._problem, m=y.shape[0], reduction=reduction, extent=extent)
        try:
            with memory_errors():
                found = self._backend.reduce_groups(problem, u, self._state)
        except (Exception, SystemExit) as error:  # a backend may raise anything; the parts are then asked one by one
            raise_interrupt(error)
            return None
        logs = xp.where(far, below, found.log_sum + constants)
        top = xp.clip(xp.max(logs, axis=0), min=-1e300)
        shares = xp.exp(logs - top)
        total = xp.sum(shares, axis=0)
        score = None
        if scored:
            shares = xp.where(far, 0.0, shares / total)
            score = xp.sum((shares[:, :, None] * found.shift) @ maps.mT, axis=0)
        return Partial(xp.log(total) + top, score), most
