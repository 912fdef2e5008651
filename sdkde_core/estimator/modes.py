"""The modes of a fitted density, by mean shift.

Source: Comaniciu and Meer, "Mean shift: a robust approach toward feature space analysis" (2002). A row moves by the
shift that MEAN gives, to the mean of the samples under its kernel weights, which never lowers a density of normal
kernels.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from array_api_compat import array_namespace, device
from numpy.typing import NDArray

from ..arrays import to_host
from ..protocol import Reduction
from .fitted import Fitted
from .mixture import check_positive

__all__ = ["modes"]

Array = NDArray[np.float64]

#: Samples that mean shift starts from, at most.
STARTS = 512

#: Bandwidths: the last step, and the distance within which two ends are one mode.
STEP, SAME = 1e-7, 1e-2

#: Steps, at most.
STEPS = 5000


def modes(fitted: Fitted, starts: Array | None = None) -> Array:
    """Return the local maxima that mean shift finds (k, d), highest first, in data units, float64.

    Parameters
    ----------
    fitted : Fitted
    starts : (m, d) array, optional
        In bandwidths from the centre. Default: up to 512 samples, drawn by a fixed seed.
    """
    check_positive(fitted, "mean shift may lower it")
    points, log_weights, centre = fitted.on_host
    if starts is None:
        carried = np.flatnonzero(log_weights > -math.inf)
        if len(carried) > STARTS:
            carried = np.sort(np.random.default_rng(0).choice(carried, STARTS, replace=False))
        starts = points[carried]
    rows, going = starts.copy(), np.arange(len(starts))
    for _ in range(STEPS):
        shift = to_host(fitted.reduce(_there(fitted, rows[going]), Reduction.MEAN, extent=_reach(rows)).shift)
        rows[going] += shift
        going = going[np.sqrt(np.vecdot(shift, shift)) > STEP]
        if not going.size:
            break
    heights = to_host(fitted.reduce(_there(fitted, rows), Reduction.LOG_SUM, extent=_reach(rows)).log_sum)
    found: list[Array] = []
    for i in np.argsort(-heights, kind="stable"):
        if all(np.linalg.vector_norm(rows[i] - other) > SAME for other in found):
            found.append(rows[i])
    return centre + fitted.bandwidth.stretch(np.array(found))


def _there(fitted: Fitted, rows: Array) -> Any:
    """Rows where the columns are."""
    points = fitted.columns.points
    return rows if isinstance(points, np.ndarray) else array_namespace(points).asarray(rows, device=device(points))


def _reach(rows: Array) -> float:
    return float(np.sqrt(np.vecdot(rows, rows).max()))
