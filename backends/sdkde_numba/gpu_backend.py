"""The CUDA target's implementation of the protocol."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from numba import cuda

from sdkde_core.plugin import PerStream, empty, grids, in_slabs, on_device
from sdkde_core.protocol import Columns, DeviceOutOfMemory, Partial, Problem, Support
from sdkde_core.tuning import reject

from . import gpu_launch as launch
from .gpu_bounds import anchored, arithmetic
from .gpu_kernels import SIMULATED
from .gpu_launch import Packed
from .gpu_space import LaunchConfig, depth_of


@dataclass(frozen=True)
class _State:
    problem: Problem  # as given to prepare: its extent is the largest
    points: torch.Tensor  # (n, d) float64
    log_weights: torch.Tensor  # (n,)
    span: float  # largest magnitude of a log weight, nats
    uniform: torch.Tensor  # () what all log weights are, where they do not vary, else 0
    made: PerStream = field(default_factory=PerStream)

    def packed(self, kind: str, width: int, tile: int) -> Packed:
        """The points as columns, whole tiles of them."""
        weights = self.log_weights if "weights" in self.problem.requires else None
        pack = functools.partial(launch.pack, self.points, kind, width, weights, tile)
        return self.made.get((kind, width, tile), pack, self.points)


class CudaBackend:
    """Kernels that Numba compiles for any NVIDIA GPU, in the arithmetic of its ordinary cores."""

    def probe(self, device: str) -> Support:
        if SIMULATED:
            return Support(device == "cpu", "Numba's simulator runs kernels on the CPU")
        if not device.startswith("cuda"):
            return Support(False, "compiles for GPUs; set NUMBA_ENABLE_CUDASIM=1 to simulate them on a CPU")
        found = grids.probe(device, range(50, 1000), "Numba needs 5.0")
        if found.ok:
            try:
                with cuda.gpus[torch.device(device).index or 0]:
                    cuda.current_context()
            except Exception as error:  # whatever the driver or Numba miss
                name = torch.cuda.get_device_name(device)
                return Support(False, f"Numba cannot use {name}: {str(error).strip().partition(chr(10))[0]}")
        return found

    def prepare(self, problem: Problem, columns: Columns) -> _State:
        vary = "weights" in problem.requires
        span = max(0.0, -float(columns.log_weights.min())) if vary else 0.0
        uniform = torch.zeros_like(columns.log_weights[0]) if vary else columns.log_weights[0].clone()
        return _State(problem, columns.points, columns.log_weights, span, uniform)

    def reduce(self, problem: Problem, queries: Any, state: _State, own_offset: int = 0) -> Partial:
        """Reduce over all columns for every row.

        Rows come in slabs; where memory does not suffice, in smaller ones, with the same bits. A tuned configuration
        that fails is given up for the next best, whose bits may differ.
        """
        points = state.points[own_offset : own_offset + problem.m] if queries is None else queries
        m = points.shape[0]
        if m == 0:
            return empty(problem, points)
        kind = arithmetic(replace(problem, extent=state.problem.extent), state.span)
        while True:
            config, tuned = launch.configuration(problem, kind, points.device)

            def slab(start: int, stop: int, config: LaunchConfig = config) -> Partial:
                depth, group = depth_of(problem.d, config.depth)
                columns = state.packed(kind, depth * group, config.columns)
                if anchored(problem) and stop - start == columns.n:
                    rows = columns  # the rows are the columns, packed alike
                else:
                    rows = launch.pack(points[start:stop], kind, depth * group)
                return launch.reduce(problem, rows, columns, state.uniform, kind, config)

            try:
                with on_device(points):
                    return in_slabs(slab, m, launch.most_rows(problem))
            except DeviceOutOfMemory:
                raise
            except Exception as error:
                if tuned is None or tuned[1].rung == "forced":
                    raise
                reject(*tuned, error)
