"""One problem: its data, its float64 reference, and a backend's error and time by configuration."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from sdkde_core.choice import registry
from sdkde_core.engine.exact import reduce_exact
from sdkde_core.engine.merge import concatenate, each
from sdkde_core.plugin import reduce_pass
from sdkde_core.protocol import BackendInfo, Columns, Problem
from sdkde_core.testing.problems import Case, Truth, errors, make
from sdkde_core.tuning import Config, using

from .runner import Task

__all__ = ["Bench", "interpreted"]

#: Rows that are compared with the reference: stretches of so many, at so many places.
STRETCH, PLACES = 64, 8

#: Rows and columns of the problem on which an interpreted configuration is checked: neither is whole tiles.
SMALL = 70, 201

#: Bytes overwritten between timings to empty the cache: more than any card's cache holds.
FLUSHED = 256 << 20


class Bench:
    """Random data for a problem, and the backend's prepared state."""

    def __init__(self, task: Task, device: str) -> None:
        self.task, self.device = task, torch.device(device)
        torch.cuda.set_device(self.device)
        # A state's buffers belong to the stream of its first use, and a CUDA graph may wait for no other stream.
        torch.cuda.set_stream(torch.cuda.Stream(self.device))
        self.problem, case = _case(replace(task.problem, device=device))
        points, queries, log_weights = (
            torch.as_tensor(x, device=self.device) for x in (case.points, case.queries, case.log_weights)
        )
        self.columns, self.queries = Columns(points, log_weights), None if self.problem.same else queries
        self.backend = _info(task).load()
        self.state = self.backend.prepare(self.problem, self.columns)
        rows = points if self.problem.same else queries
        self.some = _stretches(len(rows))
        self.want = reference(self.problem, rows, self.columns, self.some)
        self.scratch = torch.empty(FLUSHED, dtype=torch.uint8, device=self.device)
        self.graphs: dict[Any, Any] = {}

    def check(self, config: Config) -> float:
        """Return the worst row's error over its tolerance; the output's memory was filled with NaN before."""
        poison = torch.full((FLUSHED // 8,), math.nan, dtype=torch.float64, device=self.device)
        del poison  # the reduction's next allocation reuses this memory
        got = self._reduce(config)
        some = concatenate([each(got, lambda x: x[part].cpu().numpy()) for part in self.some])  # noqa: B023
        return float(errors(self.problem, some, self.want).max())

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


def interpreted(task: Task, config: Config) -> float | None:
    """Return the worst row's error over its tolerance of a small problem; None if it cannot run in this process."""
    info, given = _info(task), task.problem
    m, n = (SMALL[1], SMALL[1]) if given.same else SMALL
    problem, case = _case(replace(given, m=m, n=n, device="cpu"))
    if not (info.supports(problem).ok and info.load().probe("cpu").ok):
        return None
    points, queries, log_weights = (torch.from_numpy(x) for x in (case.points, case.queries, case.log_weights))
    rows, columns = points if given.same else queries, Columns(points, log_weights)
    try:
        with using({task.query.kernel: config}):
            got = reduce_pass(info.load(), info, problem, columns, None if given.same else queries)
    except ValueError:  # what stands in for a card takes less than the card does
        return None
    want = reference(problem, rows, columns, [slice(None)])
    return float(errors(problem, each(got, lambda x: x.numpy()), want).max())


def reference(problem: Problem, rows: Any, columns: Columns, some: list[slice]) -> Truth:
    """Sum direct differences in float64, for some of the rows."""
    found = concatenate([reduce_exact(problem, rows[part], columns, part.start or 0) for part in some])
    host = each(found, lambda x: x.cpu().numpy())
    signed: Any = None if host.sign is None else host.sign * np.exp(host.log_magnitude - host.log_sum)
    return Truth(host.log_sum, host.shift, signed, host.log_sum)


def _stretches(m: int) -> list[slice]:
    """Return parts of m rows, evenly spaced, that do not overlap."""
    starts = range(0, m, STRETCH)
    some = {starts[i] for i in np.linspace(0, len(starts) - 1, PLACES).round().astype(int)}
    return [slice(start, min(start + STRETCH, m)) for start in sorted(some)]


def _case(problem: Problem) -> tuple[Problem, Case]:
    """Draw points and queries from a mixture of normals, scaled to the problem's extent; return it with theirs."""
    case = make("mixture", problem.n, problem.m, problem.d, problem.extent or 10.0)
    if "weights" in problem.requires:
        weights = np.random.default_rng(problem.n).random(problem.n) + 0.01
        case = replace(case, log_weights=np.log(weights / weights.sum()))
    extent = max(float(np.linalg.norm(x, axis=1).max()) for x in (case.points, case.queries))
    return replace(problem, extent=extent), case


def _info(task: Task) -> BackendInfo:
    record = registry.find(task.query.backend)
    assert record is not None and record.info is not None
    return record.info
