"""Samples of a plan's passes, for prices that depend on more of the data than their extent."""

from __future__ import annotations

import math
from typing import Any

from array_api_compat import array_namespace
from array_api_compat import device as device_of

from ..arrays import to_host
from ..engine.rows import take_rows
from ..nearby import places
from ..protocol import Sample

#: Rows, and columns, of a sample, at most.
SIZE = 1 << 13


class Sampler:
    """Takes the sample of a pass when a backend first asks for it; ``taken`` is None until then."""

    def __init__(self, points: Any, rows: Any, log_weights: Any) -> None:
        self._arrays: Any = points, rows, log_weights
        self.taken: Sample | None = None

    def __call__(self) -> Sample:
        arrays = self._arrays
        if self.taken is None:
            points, rows, log_weights = arrays
            which = _places(points)
            columns, weights = (to_host(take_rows(x, which)) for x in (points, log_weights))
            mine = columns if rows is points else to_host(take_rows(rows, _places(rows)))
            carries = weights > -math.inf
            xp = array_namespace(points)
            ends = [[end(points[:, a]) for a in range(points.shape[1])] for end in (xp.min, xp.max)]
            low, high = to_host(xp.stack([xp.stack(x) for x in ends]))
            self.taken = Sample(mine, columns[carries], weights[carries], low, high)
            self._arrays = None  # backends remember problems that they have priced, and with them what is here
        return self.taken


def _places(points: Any) -> Any:
    """Indices of up to :data:`SIZE` points: one of each of as many stretches of equal length."""
    return array_namespace(points).asarray(places(points.shape[0], SIZE), device=device_of(points))
