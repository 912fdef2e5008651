"""A reduction at one bandwidth or several, which not every backend takes at a time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from ..protocol import Backend, BackendInfo, Columns, Partial, Problem, with_fields
from .columns import PackedColumns
from .merge import stack

__all__ = ["PROVIDED", "ScaleByScale", "pack", "per_scale", "reduce_pass"]

#: Features that the core has for every backend: it reduces scale by scale.
PROVIDED = frozenset({"multi_scale"})


def reduce_pass(
    backend: Backend, info: BackendInfo, problem: Problem, columns: Columns, queries: Any = None, own_offset: int = 0
) -> Partial:
    """Run one reduction through a backend as the core does it.

    Parameters
    ----------
    backend, info : Backend, BackendInfo
    problem : Problem
        Its extent bounds rows and columns.
    columns : Columns
        As the protocol has them, but log weights may be −inf.
    queries : (m, d) float64 array, optional
        None: the points, or ``problem.m`` of them from ``own_offset`` on.
    own_offset : int
        With ``"exclude_self"``: row i leaves out column i + own_offset.
    """
    some = (own_offset, own_offset + problem.m) if queries is None else None
    with np.errstate(all="ignore"):  # the public functions see to it themselves
        return pack(backend, info, problem, columns).reduce(queries, own_offset=own_offset, some=some)[0]


def pack(
    backend: Backend, info: BackendInfo, problem: Problem, columns: Columns, shared: bool = False
) -> PackedColumns | ScaleByScale:
    """Return the columns ready for rows; with several scales, for a backend that takes one at a time too."""
    several = problem.scales and "multi_scale" not in info.features
    return (ScaleByScale if several else PackedColumns)(backend, info, problem, columns, shared)


def per_scale(info: BackendInfo, problem: Problem) -> tuple[Problem, ...]:
    """Return the problems that a backend is asked: one per scale where it does not take several at a time."""
    if not problem.scales or "multi_scale" in info.features:
        return (problem,)
    return tuple(_at(problem, scale) for scale in problem.scales)


def _at(problem: Problem, scale: float) -> Problem:
    """Return the problem in bandwidths of one scale; a sample is in those of scale 1."""
    features = problem.requires - {"multi_scale"}
    return with_fields(problem, requires=features, scales=(), extent=problem.extent / scale, sample=None)


class ScaleByScale:
    """The columns at several scales, for a backend that takes one at a time."""

    def __init__(
        self, backend: Backend, info: BackendInfo, problem: Problem, columns: Columns, shared: bool = False
    ) -> None:
        self._scales = problem.scales
        self._each = [
            PackedColumns(backend, info, _at(problem, s), replace(columns, points=columns.points / s), shared)
            for s in problem.scales
        ]

    def reduce(
        self,
        queries: Any = None,
        *,
        own_offset: int = 0,
        some: tuple[int, int] | None = None,
        distances: Any = None,
        extent: float | None = None,
    ) -> tuple[Partial, int]:
        """As :meth:`PackedColumns.reduce`, with an axis for the scales; outliers are those of the hardest scale."""
        answers, apart = [], 0
        for scale, columns in zip(self._scales, self._each):
            got, far = columns.reduce(
                None if queries is None else queries / scale,
                own_offset=own_offset,
                some=some,
                distances=None if distances is None else distances / scale,
                extent=None if extent is None else extent / scale,
            )
            answers.append(got if got.shift is None else replace(got, shift=got.shift * scale))
            apart = max(apart, far)
        return stack(answers), apart
