"""The modes of a fitted density, by mean shift.

Source: Comaniciu and Meer, "Mean shift: a robust approach toward feature space analysis" (2002). A row moves by the
shift that MEAN gives, to the mean of the samples under its kernel weights, which never lowers a density of normal
kernels.
"""

from __future__ import annotations

import math

import numpy as np
from array_api_compat import array_namespace, device
from numpy.typing import NDArray

from ..arrays import to_host
from ..protocol import Partial, Reduction
from .fitted import Fitted
from .mixture import check_positive

Array = NDArray[np.float64]


def modes(fitted: Fitted, starts: Array | None = None) -> Array:
    """Return the local maxima that mean shift finds (k, d), highest first, in data units, float64.

    ``starts``: (m, d), in bandwidths from the centre; by default up to 512 samples, drawn by a fixed seed.
    """
    check_positive(fitted, "mean shift may lower it")
    points, log_weights, centre = fitted.on_host
    if starts is None:
        carried = np.flatnonzero(log_weights > -math.inf)
        if len(carried) > 512:
            carried = np.sort(np.random.default_rng(0).choice(carried, 512, replace=False))
        starts = points[carried]
    rows, going = starts.copy(), np.arange(len(starts))
    for _ in range(5000):
        shift = to_host(_reduced(fitted, rows[going], rows, Reduction.MEAN).shift)
        rows[going] += shift
        going = going[np.sqrt(np.vecdot(shift, shift)) > 1e-7]
        if not going.size:
            break
    heights = to_host(_reduced(fitted, rows, rows, Reduction.LOG_SUM).log_sum)
    found: list[Array] = []
    for i in np.argsort(-heights, kind="stable"):
        if all(np.linalg.vector_norm(rows[i] - other) > 1e-2 for other in found):  # else it is the same mode
            found.append(rows[i])
    return centre + fitted.bandwidth.stretch(np.array(found))


def _reduced(fitted: Fitted, rows: Array, all_rows: Array, reduction: Reduction) -> Partial:
    """Reduce for some rows on the host; the extent is that of all."""
    points, extent = fitted.columns.points, float(np.sqrt(np.vecdot(all_rows, all_rows).max()))
    if not isinstance(points, np.ndarray):
        rows = array_namespace(points).asarray(rows, device=device(points))
    return fitted.reduce(rows, reduction, extent=extent)
