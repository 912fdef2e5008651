"""How the samples of SD-KDE move: a multiple, the step, of H times the score that is estimated at them.

In units of the bandwidth H times the score is the mean-shift vector s_i of sample i. If the score is estimated at c
times the bandwidth, a backend returns the shift in that unit, and s_i is that divided by c. With covariances over the
weighted samples, an estimate by samples that moved τ s has a total variance of

    tr Cov(u) + 2τ tr Cov(u, s) + τ² tr Cov(s) + d

where d is that of the kernel. The step ``"moments"`` is the smallest τ for which that is the samples' own, tr Cov(u):
a root of τ² tr Cov(s) + 2τ tr Cov(u, s) + d. Where there is none it is the τ of the least variance.

With kernels λ_i H^½ wide, λ_i = (p̂(x_i) / g)^−α, the leading bias is that of a step of (½ − α) λ_i² H times the score.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

from ..arrays import array_namespace
from ..engine.groups import Group, adapted, by_width, guard
from ..engine.merge import take_columns
from ..protocol import Columns, Partial
from .request import GUARD, MOST, Request


def groups_of(columns: Columns, sums: Partial | None, request: Request, order: Any) -> tuple[Group, ...]:
    """The groups of the estimate; ``sums``: of the first pass, if there was one; ``order``: of :class:`.Plan`."""
    widths = None
    if sums is not None:
        points = columns.points if sums.shift is None else columns.points + displaced(columns, sums, request)
        widths = adapted(columns, sums.log_sum, request.adaptive) if request.adaptive else None
        columns = replace(columns, points=points)  # still in order, as neighbours move alike
    groups = (Group(columns),) if widths is None else by_width(columns, *widths)
    if not (share := request.guard):
        return groups
    rest = (g._replace(log_share=g.log_share + math.log1p(-share)) for g in groups)
    if order is not None:  # back to the samples' order, as a guard takes every k-th of them
        columns = take_columns(columns, array_namespace(order).argsort(order), False)
    # In logs a kernel of 16 bandwidths reaches millions of times as far as the samples: means would follow it.
    return *rest, guard(columns, share, *GUARD, 16.0 if request.coordinates is None else GUARD[0])


def displaced(columns: Columns, sums: Partial, request: Request) -> Any:
    """How far the samples move (n, d), in bandwidths; ``sums``: of the first pass."""
    c, shift = request.score_bandwidth or 1.0, sums.shift
    shift = shift if c == 1.0 else shift / c
    if request.adaptive:
        step = 0.5 - request.adaptive if request.step is None else request.step
        return step * 2.0 ** adapted(columns, sums.log_sum, request.adaptive)[0][:, None] * shift
    return (moments(products(columns, shift), c) if request.step == "moments" else request.step or 0.5) * shift


class Products(NamedTuple):
    """Sums over some of the samples that determine the step "moments"; covariances are about these samples' means."""

    total: Any  # () Σw
    u: Any  # (d,) mean
    s: Any  # (d,) mean
    towards: Any  # () −tr Cov(u, s)
    squares: Any  # () tr Cov(s)


def products(columns: Columns, s: Any) -> Products:
    """The products of samples whose shifts are s (k, d), in bandwidths."""
    xp, weights = array_namespace(s), columns.weights
    weights = (xp.exp(columns.log_weights) if weights is None else weights)[:, None]
    total = xp.sum(weights)
    weights = weights / xp.clip(total, min=1e-300)  # no sample of a block may have weight
    u, mean = xp.sum(weights * columns.points, axis=0), xp.sum(weights * s, axis=0)
    away, s = columns.points - u, s - mean
    return Products(total, u, mean, -xp.sum(weights * away * s), xp.sum(weights * s * s))


def joined(left: Products, right: Products) -> Products:
    total, u, s = left.total + right.total, right.u - left.u, right.s - left.s
    a, b = left.total / max(total, 1e-300), right.total / max(total, 1e-300)
    towards, squares = (a * x + b * y for x, y in zip(left[3:], right[3:]))
    return Products(total, left.u + b * u, left.s + b * s, towards - a * b * (u @ s), squares + a * b * (s @ s))


def moments(found: Products, c: float = 1.0) -> Any:
    """The step that keeps the total variance, a () array."""
    xp, d, squares = array_namespace(found.s), found.s.shape[0], found.squares
    least, most = limits(c)
    # The root as d / (A + sqrt(A² − B d)), where no digits cancel; A / B where there is none. Where hardly a sample
    # moves, every step is the same; ones in place of unused values keep derivatives finite.
    moves = (found.towards > 1e-100) & (squares > 1e-200)
    towards, squares = (xp.where(moves, x, xp.ones_like(x)) for x in (found.towards, squares))
    rest = towards * towards - squares * d
    real = rest > 0.0
    root = d / (towards + xp.sqrt(xp.where(real, rest, xp.ones_like(rest))))
    root = xp.where(real, root, towards / squares)
    return xp.where(moves, xp.clip(root, min=least, max=most), xp.full_like(root, least))


def limits(c: float) -> tuple[float, float]:
    """The least and the largest step "moments": at most 1.2 c², and at least ½ where c is 1."""
    return 0.5 if c == 1.0 else 0.0, MOST * c * c
