"""One problem: its data, its float64 reference, and a backend's error and time by configuration."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Any

import numpy as np

from sdkde_core.arrays import convert
from sdkde_core.choice import registry
from sdkde_core.engine.exact import reduce_exact
from sdkde_core.engine.merge import concatenate, each
from sdkde_core.protocol import BackendInfo, Columns, Problem
from sdkde_core.testing.problems import Case, Truth, errors, make
from sdkde_core.tuning import Config, using

from .records import Task

__all__ = ["Bench", "CudaBench", "interpreted"]


class Bench:
    """Random data for a problem, and the backend's prepared state; on a CPU."""

    def __init__(self, task: Task, device: str) -> None:
        self.task, self.device = task, device
        self.problem, case = _case(replace(task.problem, device=device))
        info = _info(task)
        points, queries, log_weights = (
            convert(x, info.arrays, device) for x in (case.points, case.queries, case.log_weights)
        )
        self.columns, self.queries = Columns(points, log_weights), None if self.problem.same else queries
        self.backend: Any = info.load()
        self.state: Any = None
        self.prepared: Any = None  # the configuration that the state is for
        rows = points if self.problem.same else queries
        starts = range(0, len(rows), 64)  # eight stretches of 64 rows, evenly spaced, are compared
        some = {starts[i] for i in np.linspace(0, len(starts) - 1, 8).round().astype(int)}
        self.some = [slice(start, start + 64) for start in sorted(some)]
        self.want = _reference(self.problem, rows, self.columns, self.some)

    def check(self, config: Config) -> float:
        """Return the worst row's error over its tolerance."""
        got = self.reduce(config)
        some = concatenate([each(got, lambda x: _host(x[part])) for part in self.some])  # noqa: B023
        return float(errors(self.problem, some, self.want).max())

    def time(self, config: Config) -> float:
        """Return the milliseconds of one reduction."""
        self.prepare(config)
        start = time.perf_counter()
        self.reduce(config)
        return 1e3 * (time.perf_counter() - start)

    def failed(self, error: Exception) -> tuple[str, bool]:
        """Return the status of a configuration that raised, and whether this process is of no more use."""
        return "oom" if isinstance(error, MemoryError) else "invalid", False

    def prepare(self, config: Config) -> None:
        """Pack the columns as the configuration has them."""
        key = tuple(sorted(config.items()))
        if self.prepared != key:
            with using({self.task.query.kernel: config}):
                self.state = self.backend.prepare(self.problem, self.columns)
            self.prepared = key

    def reduce(self, config: Config) -> Any:
        """Return the reduction's Partial."""
        self.prepare(config)
        with using({self.task.query.kernel: config}):
            return self.backend.reduce(self.problem, self.queries, self.state)


class CudaBench(Bench):
    """The same on a card, where columns are packed alike for all configurations."""

    def __init__(self, task: Task, device: str) -> None:
        import torch

        self.torch = torch
        torch.cuda.set_device(torch.device(device))
        # A state's buffers belong to the stream of its first use, and a CUDA graph may wait for no other stream.
        torch.cuda.set_stream(torch.cuda.Stream(torch.device(device)))
        super().__init__(task, device)
        self.state = self.backend.prepare(self.problem, self.columns)
        # Overwritten between timings to empty the cache: more than any card's cache holds.
        self.scratch = torch.empty(256 << 20, dtype=torch.uint8, device=device)
        self.graphs: dict[Any, Any] = {}

    def prepare(self, config: Config) -> None:
        """Nothing: it is done."""

    def check(self, config: Config) -> float:
        """Return the worst row's error over its tolerance; the output's memory was filled with NaN before."""
        poison = self.torch.full((32 << 20,), math.nan, dtype=self.torch.float64, device=self.device)
        del poison  # the reduction's next allocation reuses this memory
        return super().check(config)

    def time(self, config: Config) -> float:
        """Return the milliseconds of one reduction by CUDA events: a CUDA graph, replayed with empty caches."""
        graph = self._graph(config)
        start, end = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.scratch.zero_()
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end))

    def failed(self, error: Exception) -> tuple[str, bool]:
        """Return the status, and whether the CUDA context is unusable."""
        try:
            self.torch.cuda.synchronize(self.device)
            lost = False
        except Exception:
            lost = True
        memory = isinstance(error, self.torch.cuda.OutOfMemoryError | MemoryError)
        return "oom" if memory else "crash" if lost else "invalid", lost

    def _graph(self, config: Config) -> Any:
        key = self.task.query.kernel, tuple(sorted(config.items()))
        if key not in self.graphs:
            if len(self.graphs) > 8:
                self.graphs.clear()
            for _ in range(2):
                self.reduce(config)
            self.torch.cuda.synchronize()
            graph = self.torch.cuda.CUDAGraph()
            with self.torch.cuda.graph(graph, stream=self.torch.cuda.current_stream()):
                self.reduce(config)
            graph.replay()  # the first replay is slower
            self.graphs[key] = graph
        return self.graphs[key]


def interpreted(task: Task, config: Config) -> float | None:
    """Return the worst row's error over its tolerance of a small problem; None if it cannot run in this process."""
    info, m = _info(task), 201 if task.problem.same else 70  # neither is whole tiles
    small = replace(task.problem, m=m, n=201, device="cpu")
    if not (info.supports(small).ok and info.load().probe("cpu").ok):
        return None
    try:
        return Bench(task._replace(problem=small), "cpu").check(config)
    except ValueError:  # what stands in for a card takes less than the card does
        return None


def _reference(problem: Problem, rows: Any, columns: Columns, some: list[slice]) -> Truth:
    """Sum direct differences in float64, for some of the rows."""
    found = concatenate([reduce_exact(problem, rows[part], columns, part.start or 0) for part in some])
    host = each(found, _host)
    signed: Any = None if host.sign is None else host.sign * np.exp(host.log_magnitude - host.log_sum)
    return Truth(host.log_sum, host.shift, signed, host.log_sum)


def _host(x: Any) -> Any:
    return x if isinstance(x, np.ndarray) else x.cpu().numpy()


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
