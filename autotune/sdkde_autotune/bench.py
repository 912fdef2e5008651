"""One problem: its data, its float64 reference, and a backend's error and time by configuration."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Any

import numpy as np

from sdkde_core.arrays import convert, to_host
from sdkde_core.choice import registry
from sdkde_core.plugin import concatenate, each, reduce_exact
from sdkde_core.protocol import Columns
from sdkde_core.testing.problems import Truth, errors, make
from sdkde_core.testing.target import weighted
from sdkde_core.tuning import Config, using

from .measure import Failed
from .records import Task


class Bench:
    """Random data for a problem, and the backend's prepared state; on a CPU."""

    def __init__(self, task: Task, device: str) -> None:
        record = registry.find(task.query.backend)
        assert record is not None and record.info is not None
        self.task, self.device, wanted, self.backend = task, device, task.problem, record.info.load()
        case = make("mixture", wanted.n, wanted.m, wanted.d, wanted.extent or 10.0)
        case = weighted(case) if "weights" in wanted.requires else case
        extent = max(float(np.linalg.norm(x, axis=1).max()) for x in (case.points, case.queries))
        self.problem = replace(wanted, device=device, extent=extent)
        arrays = case.points, case.queries, case.log_weights
        points, queries, log_weights = (convert(x, record.info.arrays, device) for x in arrays)
        self.columns, self.queries = Columns(points, log_weights), None if wanted.same else queries
        rows = points if wanted.same else queries
        starts = np.unique(np.linspace(0, max(len(rows) - 64, 0), 8).astype(int)).tolist()
        self.some = [slice(start, start + 64) for start in starts]  # rows that are compared, evenly spaced
        want = each(concatenate([reduce_exact(self.problem, rows[x], self.columns) for x in self.some]), to_host)
        signed: Any = None if want.sign is None else want.sign * np.exp(want.log_magnitude - want.log_sum)
        self.want = Truth(want.log_sum, want.shift, signed, want.log_sum)

    def check(self, config: Config) -> None:
        """Raise Failed if a row is beyond its tolerance."""
        got = self.reduce(config, self.prepare(config))
        some = concatenate([each(got, lambda x: to_host(x[part])) for part in self.some])  # noqa: B023
        worst = float(errors(self.problem, some, self.want).max())
        if not worst <= 1:
            raise Failed("wrong", f"the worst row is off by {worst:.3g} of the tolerance")

    def times(self, configs: list[Config], count: int) -> list[list[float]]:
        """Return ``count`` times of each configuration in milliseconds, measured in turns."""
        return list(map(list, zip(*([self.time(config) for config in configs] for _ in range(count)))))

    def time(self, config: Config) -> float:
        state, start = self.prepare(config), time.perf_counter()
        self.reduce(config, state)
        return 1e3 * (time.perf_counter() - start)

    def status(self, error: Exception) -> str:
        """Return the status of a configuration that raised; after ``"crash"`` this process is of no more use."""
        return "oom" if isinstance(error, MemoryError) else "invalid"

    def prepare(self, config: Config) -> Any:
        with using({self.task.query.kernel: config}):
            return self.backend.prepare(self.problem, self.columns)

    def reduce(self, config: Config, state: Any) -> Any:
        with using({self.task.query.kernel: config}):
            return self.backend.reduce(self.problem, self.queries, state)


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

    def prepare(self, config: Config) -> Any:
        return self.state

    def check(self, config: Config) -> None:
        poison = self.torch.full((32 << 20,), math.nan, dtype=self.torch.float64, device=self.device)
        del poison  # the reduction's next allocation reuses this memory
        super().check(config)

    def time(self, config: Config) -> float:
        """Return the milliseconds of one reduction by CUDA events: a CUDA graph, replayed with empty caches."""
        key = self.task.query.kernel, tuple(sorted(config.items()))
        if key not in self.graphs:
            if len(self.graphs) > 8:
                self.graphs.clear()
            for _ in range(2):
                self.reduce(config, self.state)
            self.torch.cuda.synchronize()
            graph = self.torch.cuda.CUDAGraph()
            with self.torch.cuda.graph(graph, stream=self.torch.cuda.current_stream()):
                self.reduce(config, self.state)
            graph.replay()  # the first replay is slower
            self.graphs[key] = graph
        start, end = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.scratch.zero_()
        start.record()
        self.graphs[key].replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end))

    def status(self, error: Exception) -> str:
        try:
            self.torch.cuda.synchronize(self.device)
        except Exception:
            return "crash"  # the CUDA context is unusable
        return "oom" if isinstance(error, self.torch.cuda.OutOfMemoryError | MemoryError) else "invalid"
