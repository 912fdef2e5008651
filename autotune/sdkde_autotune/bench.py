"""One problem on a card: its data, its float64 reference, and the time of a backend's reduction by configuration."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from sdkde_core.choice import registry
from sdkde_core.engine.merge import each
from sdkde_core.protocol import TOLERANCES, Columns, Problem, Reduction
from sdkde_core.tuning import Config, using

from .runner import Task

__all__ = ["Bench"]

#: Number of rows that are compared with the reference, evenly spaced.
CHECKED = 512

#: Bytes overwritten between timings to empty the cache: more than any card's cache holds.
FLUSHED = 256 << 20


class Bench:
    """Random data for a problem, and the backend's prepared state."""

    def __init__(self, task: Task, device: str) -> None:
        self.task, self.device = task, torch.device(device)
        torch.cuda.set_device(self.device)
        # A state's buffers belong to the stream of its first use, and a CUDA graph may wait for no other stream.
        torch.cuda.set_stream(torch.cuda.Stream(self.device))
        given = task.problem
        points, queries = _data(given, self.device)
        extent = float(max(x.norm(dim=1).max() for x in (points, queries)))
        self.problem = replace(given, device=device, extent=extent)
        log_weights = torch.full((given.n,), -math.log(given.n), dtype=torch.float64, device=self.device)
        if "weights" in given.requires:
            log_weights = torch.log_softmax(torch.rand_like(log_weights), 0)
        self.columns, self.queries = Columns(points, log_weights), None if given.same else queries
        record = registry.find(task.query.backend)
        assert record is not None and record.info is not None
        self.backend = record.info.load()
        self.state = self.backend.prepare(self.problem, self.columns)
        rows = points if given.same else queries
        self.some = torch.linspace(0, len(rows) - 1, min(CHECKED, len(rows)), device=self.device).long()
        self.want = _reference(self.problem, self.columns, rows, self.some)
        self.scratch = torch.empty(FLUSHED, dtype=torch.uint8, device=self.device)
        self.graphs: dict[Any, Any] = {}

    def check(self, config: Config) -> float:
        """Return the worst row's error over its tolerance; the output's memory was filled with NaN before."""
        poison = torch.full((FLUSHED // 8,), math.nan, dtype=torch.float64, device=self.device)
        del poison  # the reduction's next allocation reuses this memory
        got = each(self._reduce(config), lambda x: x[self.some])
        tolerance, want = TOLERANCES[self.problem.precision], self.want

        def over(error: Any, reduction: Reduction) -> float:
            ratio = error / tolerance[reduction].at(want["log"])
            return float(torch.where(ratio.isnan(), torch.inf, ratio).max())

        if self.problem.reduction is Reduction.LAPLACE:
            signed = got.sign * torch.exp(got.log_magnitude - want["log"])
            return max(
                over((got.log_sum - want["log"]).abs(), Reduction.LAPLACE),
                over((signed - want["signed"]).abs(), Reduction.LAPLACE),
            )
        worst = over((got.log_sum - want["log"]).abs(), Reduction.LOG_SUM)
        if got.shift is not None:
            worst = max(worst, over((got.shift - want["shift"]).norm(dim=1), Reduction.MEAN))
        return worst

    def time(self, config: Config) -> float:
        """Return the milliseconds of one reduction by CUDA events: a CUDA graph, replayed with empty caches."""
        graph = self._graph(config)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.scratch.zero_()
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end))

    def memory(self, error: Exception) -> bool:
        """Whether an error says that memory ran out."""
        return isinstance(error, torch.cuda.OutOfMemoryError | MemoryError)

    def lost(self, error: Exception) -> bool:
        """Whether the CUDA context is unusable after an error."""
        try:
            torch.cuda.synchronize(self.device)
        except Exception:
            return True
        return False

    def _reduce(self, config: Config) -> Any:
        with using({self.task.query.kernel: config}):
            return self.backend.reduce(self.problem, self.queries, self.state)

    def _graph(self, config: Config) -> Any:
        key = self.task.query.kernel, tuple(sorted(config.items()))
        if key not in self.graphs:
            if len(self.graphs) > 8:
                self.graphs.clear()
            for _ in range(2):
                self._reduce(config)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
                self._reduce(config)
            graph.replay()  # the first replay is slower
            self.graphs[key] = graph
        return self.graphs[key]


def _data(problem: Problem, device: torch.device) -> tuple[Any, Any]:
    """Draw points and queries from a mixture of normals, scaled to the problem's extent."""
    generator = torch.Generator(device).manual_seed(problem.n * 31 + problem.m * 7 + problem.d)

    def draw(count: int, centres: Any) -> Any:
        options: dict[str, Any] = {"dtype": torch.float64, "device": device, "generator": generator}
        which = torch.randint(0, len(centres), (count,), device=device, generator=generator)
        return centres[which] + torch.randn(count, problem.d, **options)

    centres = 2.0 * torch.randn(8, problem.d, dtype=torch.float64, device=device, generator=generator)
    points, queries = draw(problem.n, centres), draw(problem.m, centres)
    scale = problem.extent / max(float(x.norm(dim=1).max()) for x in (points, queries)) if problem.extent else 1.0
    return points * scale, queries * scale


def _reference(problem: Problem, columns: Columns, rows: Any, some: Any) -> dict[str, Any]:
    """Sum direct differences in float64, for the rows ``some``."""
    points, found = columns.points, []
    height = max(1, (1 << 28) // (8 * len(points) * problem.d))
    for which in some.split(height):
        apart = points[None] - rows[which][:, None]
        exponent = -0.5 * apart.square().sum(2)
        terms = exponent + columns.log_weights
        if "exclude_self" in problem.requires:
            terms[torch.arange(len(which), device=which.device), which] = -math.inf
        log = torch.logsumexp(terms, 1)
        share = torch.exp(terms - log[:, None])
        if problem.reduction is Reduction.MEAN:
            found.append((log, torch.einsum("rn,rnd->rd", share, apart)))
            continue
        half = 1.0 + 0.5 * problem.d
        plus, signed = (share * (half - exponent)).sum(1), (share * (half + exponent)).sum(1)
        laplace = problem.reduction is Reduction.LAPLACE
        found.append((log + plus.log() if laplace else log, signed / plus))
    log, other = (torch.cat(parts) for parts in zip(*found))
    return {"log": log, "shift" if problem.reduction is Reduction.MEAN else "signed": other}
