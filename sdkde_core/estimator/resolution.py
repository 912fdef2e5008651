"""Points so far from the centre that float64 does not resolve the distances between them.

Coordinates in bandwidths are rounded: at ρ bandwidths from the centre by up to ερ, ε = 2⁻⁵². So ½ r² of two points
there is wrong by up to 2 ε ρ r, by about a fifth of that as a rule. Against a tolerance of a + ½ b r² that does no harm
where r ≥ 4 ε ρ / b, nor at any r where ε ρ ≤ √(a b / 2). Nor where coordinates are equal, as fill values are.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..arrays import Array, array_namespace, detached, to_host
from ..bandwidth.matrix import Bandwidth
from ..engine.outliers import CLEAR, radii
from ..messages import warn_once
from ..protocol import PRECISIONS, TOLERANCES, Columns, Problem, Reduction

#: Bandwidths from the centre within which nothing is refused: for the first two precisions √(a b / 2) / ε or less. At
#: ``"float64"`` that is 1e4, by the worst rounding. Twice as far some rows begin to miss the tolerances of log sums:
#: those some 45 bandwidths from their nearest sample. A shift midway between two samples, r bandwidths from each, moves
#: by up to ε ρ r², which passes its tolerance from ρ = 3e3 on.
REACH = {"fast": 1e10, "high": 1e9, "float64": 1.5e4}


def clearest_centre(train: Any, query: Any, h: Array, centre: Array) -> Array:
    """Return the centre from which the fewest points that are near each other lose digits that matter.

    The median may be a fill value for missing ones. So in each column it competes with the medians of ever smaller
    values, which float64 holds with more digits. Points are on the host; h is sqrt(diag H), (d,).
    """
    best = centre.copy()
    for k in np.flatnonzero(abs(centre) > CLEAR * h):
        x, candidates = train[:, k], [float(centre[k])]
        while len(smaller := x[abs(x) < abs(candidates[-1]) / 1024]):  # not NaN
            candidates.append(float(np.sort(smaller)[(len(smaller) - 1) // 2]))
        if len(candidates) > 1:
            values = np.unique(x if query is None else np.concatenate([x, query[:, k]]))
            near = values[:-1][np.diff(values) < 64.0 * h[k]]  # others add nothing to each other, see _near_pair
            blurred = [int((abs(near - c) > CLEAR * h[k]).sum()) for c in candidates]
            best[k] = min(zip(blurred, map(abs, candidates), candidates))[2]
    return best


def check_resolution(
    problem: Problem, bandwidth: Bandwidth, columns: Columns, rows: Any = None, first: int = 0
) -> None:
    """Raise where a row and a column, both beyond the precision's reach, are too near each other for their rounding.

    At ``"float64"`` that is a warning, within the reach of ``"high"``: no other precision has more digits there.
    ``rows``: query points, None: the columns; ``first``: the first row's number in the whole query. With a full matrix
    each coordinate is a sum over all columns: a column with far values spoils all.
    """
    mixed, relative = bandwidth.factor.ndim == 2, TOLERANCES[problem.precision][problem.reduction].relative
    most = 4.0 / relative if problem.reduction is Reduction.MEAN else math.inf  # no shift is wrong by more than 2 r
    found, held = None, REACH[problem.precision]
    for reach in (REACH["high"], held) if problem.precision == "float64" else (held,):
        if found is None and problem.extent > reach:
            last = reach
            there, far_columns = _beyond(reach, columns.points, columns.log_weights)
            here, far_rows = _beyond(reach, columns.points if rows is None else rows)
            same = here if rows is None else np.full(len(here), -1)
            found = _near_pair(far_rows, far_columns, reach, (2.0**-50 / relative, most), mixed, (same, there))
    if found is None:
        return
    i, j, distance = found
    far = float(np.linalg.vector_norm(far_rows[i]))
    row = f"row {first + here[i]} of {'train' if rows is None else 'query'}"
    text = (
        f"precision={problem.precision!r} holds up to {held:.2g} bandwidths from the median of train, but {row} is "
        f"{far:.1e} away, and {distance:.2g} from row {there[j]} of train: rounding to float64 blurs that by "
        f"{far * 2.0**-52:.0e}; "
    )
    instead = "a larger bandwidth, or groups of points that are so far apart one by one"
    if problem.precision == "float64" and last == held:
        warn_once(f"{text}log densities there have fewer digits. For more pass {instead}", "float64 is blurred")
        return
    others = [p for p in PRECISIONS if REACH[p] > max(far, last)]
    hint = f"precision={others[-1]!r}, which holds up to {REACH[others[-1]]:.2g}, " if others else ""
    raise ValueError(f"{text}pass {hint}{instead}")


def _beyond(reach: float, points: Any, log_weights: Any = None) -> tuple[Array, Array]:
    """The indices of the points with weight beyond ``reach``, and the points, on the host."""
    points = detached(points)
    xp = array_namespace(points)
    beyond = radii(points) > reach
    indices = xp.nonzero(beyond if log_weights is None else beyond & (log_weights > -math.inf))[0]
    return to_host(indices), to_host(xp.take(points, indices, axis=0))


def _near_pair(
    rows: Array, columns: Array, reach: float, near: tuple[float, float], mixed: bool, points: tuple[Array, Array]
) -> tuple[int, int, float] | None:
    """Return indices and distance of a row and a column that are too near each other in a coordinate; or None.

    ``near``: too near is less than the first, times the distance from the centre, and less than the second, bandwidths.
    ``points``: the point that each row and column is; between a point and itself nothing is lost.
    """
    own = np.isin(*points)
    root = math.sqrt(rows.shape[1]) if mixed else 1.0
    for k in np.flatnonzero((abs(rows) * root > reach).any(axis=0)):  # many that are near may add up to a far point
        v = rows[:, k]
        order = np.argsort(columns[:, k], kind="stable")
        keys, width = columns[order, k], np.minimum(near[0] * root * abs(v), near[1])
        first, last = np.searchsorted(keys, v - width), np.searchsorted(keys, v + width, side="right")
        harmless = own if mixed else np.searchsorted(keys, v, side="right") - np.searchsorted(keys, v)
        for i in np.flatnonzero((abs(v) * root > reach) & (last - first > harmless)):
            others = order[first[i] : last[i]]
            distances = np.linalg.vector_norm(columns[others] - rows[i], axis=1)
            far = np.linalg.vector_norm(rows[i]) if mixed else abs(v[i])
            # A sample at √(r² + 64²) bandwidths adds nothing to a row that has one at r, whatever the weights.
            width_i = min(near[0] * far, near[1], math.hypot(distances.min(), 64.0) + 2.0**-48 * far)
            differ = points[1][others] != points[0][i] if mixed else columns[others, k] != v[i]
            found = np.flatnonzero(differ & (distances < width_i))
            if found.size:
                return int(i), int(others[found[0]]), float(distances[found[0]])
    return None
