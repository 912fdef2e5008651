"""How the samples of SD-KDE move: a multiple, the step, of H times the score that is estimated at them.

In units of the bandwidth H times the score is the mean-shift vector s_i of sample i. If the score is estimated at c
times the bandwidth, a backend returns the shift in that unit, and s_i is that divided by c. With covariances over the
weighted samples, an estimate by samples that moved τ s has a total variance of

    tr Cov(u) + 2τ tr Cov(u, s) + τ² tr Cov(s) + d

where d is that of the kernel. The step ``"moments"`` is the smallest τ for which that is the samples' own, tr Cov(u):
a root of τ² tr Cov(s) + 2τ tr Cov(u, s) + d. Where there is none it is the τ of the least variance.
"""

from __future__ import annotations

from typing import Any

from array_api_compat import is_torch_array

from ..arrays import array_namespace
from ..protocol import Columns
from .request import MOST, Request


def displaced(columns: Columns, shift: Any, request: Request) -> Any:
    """How far the samples move (n, d), in bandwidths; ``shift``: as the first pass has returned it."""
    c = request.score_bandwidth or 1.0
    shift = shift if c == 1.0 else shift / c
    return (moments(columns, shift, c) if request.step == "moments" else request.step or 0.5) * shift


def moved(columns: Columns, shift: Any, request: Request) -> Any:
    """The samples (n, d) where they have moved to, in bandwidths."""
    if request.step != "moments" and request.score_bandwidth is None:
        step = request.step or 0.5  # PyTorch adds a multiple in one kernel
        return columns.points.add(shift, alpha=step) if is_torch_array(shift) else columns.points + step * shift
    return columns.points + displaced(columns, shift, request)


def moments(columns: Columns, s: Any, c: float = 1.0) -> Any:
    """The step that keeps the total variance, a () array: at most 1.2 c², and at least ½ where c is 1."""
    xp, weights = array_namespace(s), columns.weights
    weights = (xp.exp(columns.log_weights) if weights is None else weights)[:, None]
    weights = weights / xp.sum(weights)
    away = columns.points - xp.sum(weights * columns.points, axis=0)
    s = s - xp.sum(weights * s, axis=0)
    towards, squares = xp.clip(-xp.sum(weights * away * s), min=0.0), xp.sum(weights * s * s)
    rest = xp.clip(towards * towards - squares * s.shape[1], min=0.0)
    # The root as d / (A + sqrt(A² − B d)), where no digits cancel; A / B where there is none. 1e-300: where no sample
    # moves, every step is the same.
    above = xp.clip(towards * towards / xp.clip(squares, min=1e-300), max=float(s.shape[1]))
    root = above / xp.clip(towards + xp.sqrt(rest), min=1e-300)
    return xp.clip(root, min=0.5 if c == 1.0 else 0.0, max=MOST * c * c)
