"""Check of what the planner makes of a backend: blocks of rows over shards of columns, whoever computes them."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np

from sdkde_core.choice.select import Choice
from sdkde_core.engine.merge import concatenate
from sdkde_core.protocol import QUANTUM, BackendInfo, Columns, Partial, Reduction

from . import reference
from .accuracy import about_tiles
from .problems import Array, Case
from .ranges import MANY
from .target import Profile, Target, weighted, within

__all__ = ["planned", "planned_parameters"]

#: Two shards, the second one a single column; three blocks, of which the last one has rows of both.
WIDTH, N, M = 2 * QUANTUM, 2 * QUANTUM + 1, QUANTUM + 1

#: Rows that are compared with the truth: ends of blocks, and some between.
PICKED = (0, 1, QUANTUM // 2, QUANTUM - 1, QUANTUM)


def planned_parameters(info: BackendInfo, profile: Profile) -> Iterator[str]:
    """Both methods at the last precision, in full at every one. Not where a backend is slow."""
    if profile.pairs >= MANY:
        for precision in info.precisions if profile.includes is not None else info.precisions[-1:]:
            for method in ("sdkde", "laplace"):
                yield f"{precision}-{method}"


@functools.lru_cache(maxsize=2)
def _case(has_weights: bool) -> Case:
    case = about_tiles(N, M, 3, 10.0)
    return weighted(case) if has_weights else case


def planned(target: Target, parameter: str) -> None:
    """Every pass of an estimate, cut by the planner, is within the tolerance; other cuts and orders have its bits."""
    for has_weights in (False, True) if "weights" in target.info.features else (False,):
        _planned(target, parameter, _case(has_weights))


def _planned(target: Target, parameter: str, case: Case) -> None:
    precision, method = parameter.split("-")
    plan = _Plan(target, case, precision, method)
    columns, rows = [case.points[a:b] for a, b in plan.frozen.shards], case.points
    if method == "sdkde":
        first = plan.checked(0, columns, rows, alike=True)
        moved = plan.frozen.moved(rows, first)
        columns = [moved[a:b] for a, b in plan.frozen.shards]
        plan.checked(1, columns, case.queries)
    else:
        plan.checked(0, columns, rows, alike=True)


class _Plan:
    """An estimate in units of its bandwidth, frozen without asking anything."""

    def __init__(self, target: Target, case: Case, precision: str, method: str) -> None:
        # Here, as whoever imports a check of a backend's needs nothing of them.
        from sdkde_core.bandwidth.matrix import Bandwidth
        from sdkde_core.estimator.request import Goal, Request
        from sdkde_core.scale import Frozen, Shape

        reductions = [Reduction.MEAN, Reduction.LOG_SUM] if method == "sdkde" else [Reduction.LAPLACE]
        posed = [target.whole_problem(case, r, precision) for r in reductions]
        posed = [replace(p, m=N if k == 0 else M) for k, p in enumerate(posed)]  # what moves, moves towards the others
        request, shape = Request(Goal.DENSITY, method=method, bandwidth=1.0), Shape(N, 3, None, "float64", True)
        placed = Bandwidth.of(1.0, 3), np.zeros(3), 0.0, target.info.name, target.device, ()
        self.frozen = Frozen(request, shape, *placed, tuple(posed), (0,) * len(posed), WIDTH, QUANTUM, "")
        self.frozen.__dict__["_choice"] = Choice(target.info, target.device, target.backend, (), "under test", 1)
        self._target, self._log_weights = target, case.log_weights

    def checked(self, step: int, points: Sequence[Array], rows: Array, alike: bool = False) -> Partial:
        """Return a pass's sums, after asking for them in several ways; ``alike``: the rows are the points."""
        shards = [Columns(x, self._log_weights[a:b]) for x, (a, b) in zip(points, self.frozen.shards, strict=True)]
        problem, blocks = self.frozen.problems[step], self.frozen.blocks(step)
        anew = [self._sums(step, shards, rows, block, alike) for block in blocks]
        packed = [self.frozen.packed(step, shard) for shard in shards]
        once = [self._sums(step, packed, rows, block, alike) for block in reversed(blocks)][::-1]
        found = {"the last block first, each shard packed once": concatenate(once)}
        if "range" in self._target.info.features:
            found["all rows in one block"] = self._sums(step, packed, rows, (0, len(rows)), alike)
        got, every = concatenate(anew), np.concatenate(points)
        picked = np.array(sorted({*PICKED, *(k for k in (WIDTH - 1, WIDTH) if k < len(rows))}))
        truth = reference.near_sums(rows[picked], every, self._log_weights)
        within(replace(problem, same=alike), got, truth, "the planner's blocks and shards", rows=picked)
        for how, other in found.items():
            within(replace(problem, same=alike), other, truth, f"the planner's, {how}", rows=picked)
            for field in fields(Partial):
                a, b = getattr(got, field.name), getattr(other, field.name)
                assert a is None or np.array_equal(a, b), f"{field.name} has other bits with {how}"
        return got

    def _sums(self, step: int, shards: Sequence[Any], rows: Array, block: tuple[int, int], alike: bool) -> Partial:
        sums = None
        for columns, shard in zip(shards, self.frozen.shards, strict=True):
            at = (block[0], shard) if alike else None
            sums = self.frozen.fold(sums, self.frozen.partial(step, columns, rows[slice(*block)], at))
        assert sums is not None
        return sums
