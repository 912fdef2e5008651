"""The implementation of the protocol."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import torch

from sdkde_core.plugin import PerStream, empty, grids, in_slabs, reduce_exact
from sdkde_core.protocol import Columns, Partial, Problem, Reduction, Support, Whitened

from . import launch
from .bounds import grid_step, symmetric
from .compiled import check_driver, launching, nvrtc_version
from .launch import Range
from .plan import LONGEST


@dataclass(frozen=True, eq=False)
class _State:
    """The training points, and their packed forms, made when first needed."""

    problem: Problem  # as given to prepare: its extent is the largest
    points: torch.Tensor  # (n, d) float64
    log_weights: torch.Tensor  # (n,)
    step: float  # the grid of the leading pieces
    made: PerStream = field(default_factory=PerStream)

    def packed(self, symmetric: bool = False) -> launch.Packed:
        """The points packed as columns, for MEAN as rows too; or for MEAN's symmetric kernel, which has no weights."""
        log_weights = self.log_weights if "weights" in self.problem.requires else None
        make = functools.partial(launch.pack, self.points, self.step, self.problem, True, log_weights, symmetric)
        return self.made.get(symmetric, make, self.points)

    def log_sum(self, problem: Problem, rows: torch.Tensor, whole: int, end: launch.End = None) -> Any:
        """LOG_SUM or LAPLACE of some of the problem's ``whole`` rows."""
        return launch.log_sum(problem, rows, self.step, whole, self.packed(), self.log_weights, end)

    def dense_mean(self, rows: Range, columns: Range) -> Partial:
        return launch.dense_mean(self.packed(), self.points, self.log_weights, rows, columns)


class HopperBackend:
    """Kernels for GPUs of compute capability 9.0."""

    def probe(self, device: str) -> Support:
        found = grids.probe(device, [90], "the kernels are for 9.0 (H100, H200)")
        if not found.ok:
            return found
        try:
            check_driver()
        except Exception as error:  # whatever loading it raises
            said = str(error).partition("\n")[0]
            return Support(False, f"the kernels cannot be compiled or loaded: {said}")
        return Support(True, f"{found.reason}, NVRTC {nvrtc_version()}")

    def prepare(self, problem: Problem, columns: Columns) -> _State:
        """Keep the training points; they are packed when the first rows come."""
        if problem.reduction is Reduction.MEAN:  # as a rule LOG_SUM follows
            launch.load_for(problem.d, problem.precision, "weights" in problem.requires)
        return _State(problem, columns.points, columns.log_weights, grid_step(problem.extent, problem.precision))

    def reduce(self, problem: Problem, queries: Any, state: _State, own_offset: int = 0) -> Partial:
        rows = state.points[own_offset : own_offset + problem.m] if queries is None else queries
        n, m = state.points.shape[0], rows.shape[0]
        if m == 0:
            return empty(problem, rows)
        with launching(rows):
            if problem.reduction is not Reduction.MEAN:
                return in_slabs(lambda a, b: state.log_sum(problem, rows[a:b], m), m, _most_rows(state))
            if queries is not None:  # ``supports`` declines queries, but points of weight zero come as such
                return reduce_exact(problem, queries, Columns(state.points, state.log_weights))
            if symmetric(problem):
                return launch.symmetric_mean(state.packed(symmetric=True), problem.d, state.log_weights)
            return state.dense_mean((own_offset, own_offset + m), (0, n))

    def whiten(self, given: tuple[Any, ...], scale: Any, centre: Any = None, weights: Any = None) -> Whitened | None:
        """Whiten by a few launches; None for so many points that launches matter little."""
        if sum(x.shape[0] for x in given) > 1 << 19:
            return None
        with launching(given[0]):
            return launch.whiten(given, scale, centre, weights)

    def moved(self, points: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        with launching(points):
            return launch.moved(points, shift)

    def density(
        self, problem: Problem, queries: Any, state: _State, constant: float, log: bool, dtype: Any
    ) -> torch.Tensor | None:
        """Return the density of few rows in the user's dtype by the launches of LOG_SUM or LAPLACE."""
        points = state.points if queries is None else queries
        if points.shape[0] > _most_rows(state) or problem.reduction is Reduction.MEAN:
            return None
        with launching(points):
            return state.log_sum(problem, points, points.shape[0], (constant, log, dtype))

    def reduce_pairs(self, problem: Problem, state: _State, rows: Range, columns: Range) -> tuple[Partial, Partial]:
        with launching(state.points):
            if symmetric(problem):
                return launch.symmetric_pair(state.packed(symmetric=True), problem.d, state.log_weights, rows, columns)
            return state.dense_mean(rows, columns), state.dense_mean(columns, rows)


def _most_rows(state: _State) -> int:
    """The most rows at a time: each takes 200 bytes, 400 in 64 dimensions, and 12 for each partial sum."""
    parts = -(-state.points.shape[0] // (64 * LONGEST[state.problem.precision]))
    return min(1 << 21, max(1 << 14, (512 << 20) // (12 * parts)))
