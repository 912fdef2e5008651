"""Outliers: points beyond the extent up to which a backend's fast formula keeps its precision, summed apart."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ..arrays import array_namespace, look
from ..protocol import BackendInfo, Columns, Problem

#: Largest share of the pairs that is summed apart. Above it, a backend that supports the full extent gets all pairs,
#: and another is no candidate.
SPLIT_SHARE = 0.5

CLEAR = 1e4  # bandwidths from the centre within which rounding does not matter at any precision


def limit_of(info: BackendInfo, problem: Problem) -> float:
    """Return the extent beyond which points are outliers for a backend; inf with ``"grad"`` and ``"kernel"``."""
    return math.inf if {"grad", "kernel"} & problem.requires else info.extent_limit(problem)


def within_limit(info: BackendInfo, problem: Problem, share: float) -> Problem:
    """Return the problem, its extent cut to the limit if outliers are summed apart; ``share``: of pairs with one."""
    limit = limit_of(info, problem)
    apart = problem.extent > limit and (share <= SPLIT_SHARE or not info.supports(problem).ok)
    return replace(problem, extent=limit) if apart else problem


def radii(points: Any) -> Any:
    """Return the distance of every point from the origin, (n,)."""
    if isinstance(points, np.ndarray):
        return np.sqrt(np.vecdot(points, points))  # without temporaries of the points' size
    return array_namespace(points).linalg.vector_norm(points, axis=-1)  # one kernel


def outlier_share(row_radii: Any, column_radii: Any, limit: float) -> float:
    """Return the share of the pairs in which either point lies beyond ``limit``, for a backend's price: rounded."""
    m, n = row_radii.shape[0], column_radii.shape[0]

    def decide(far_rows: float, far_columns: float) -> float:
        share = pair_share(far_rows, m, far_columns, n)
        steps = 8.0 if share > 2.0**-10 else 1.0  # to a power of 2^⅛, and below a thousandth to one of two
        return 2.0 ** (round(steps * math.log2(share)) / steps) if share else 0.0

    if row_radii is column_radii:
        return look(lambda far: decide(far, far), count(column_radii > limit))
    return look(decide, count(row_radii > limit), count(column_radii > limit))


def pair_share(far_rows: float, m: int, far_columns: float, n: int) -> float:
    return 1.0 - (1.0 - far_rows / max(m, 1)) * (1.0 - far_columns / max(n, 1))


class Outliers(NamedTuple):
    mask: Any  # (n,), where the points are; None: no column can be one. A point with a NaN is none
    n: int
    negligible: bool  # they add nothing that float64 shows to rows within the limit, which have other columns


def find_outliers(problem: Problem, columns: Columns, limit: float) -> Outliers:
    if problem.extent <= limit:
        return Outliers(None, 0, True)
    xp, distances = array_namespace(columns.points), radii(columns.points)
    mask = distances > limit
    numbers = [count(mask), xp.min(xp.where(mask, distances, xp.full_like(distances, math.inf)))]
    if "weights" in problem.requires:
        numbers += [xp.max(columns.log_weights), xp.min(columns.log_weights)]

    def decide(n: float, closest: float, most: float = 0.0, least: float = 0.0) -> tuple[int, bool]:
        # A row within the limit has every other column within twice that, and no outlier within closest − limit.
        # Terms that are 2000 nats below a row's largest add nothing: exp(−746) is 0 in float64, however many there are
        # and whatever distance they are multiplied by.
        gap = 0.5 * ((closest - limit) ** 2 - (2.0 * limit) ** 2)
        return int(n), gap - (most - least) > 2000.0

    return Outliers(mask, *look(decide, *numbers))


def count(mask: Any) -> Any:
    """Return how many entries of a mask are true, (), where the mask is."""
    xp = array_namespace(mask)
    return xp.sum(xp.astype(mask, xp.float64))
