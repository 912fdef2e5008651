"""The CUDA target's implementation of the protocol."""

from __future__ import annotations

import functools
import importlib
import math
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
from .gpu_space import LaunchConfig, depth_of


@dataclass(frozen=True)
class _State:
    extent: float  # the largest of all problems
    points: torch.Tensor  # (n, d) float64
    log_weights: torch.Tensor | None  # (n,), where they vary
    span: float  # largest magnitude of a log weight, nats
    uniform: torch.Tensor  # () what all log weights are, where they do not vary, else 0
    packed: PerStream = field(default_factory=PerStream)


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
                importlib.import_module("numba.cuda.np.arrayobj")  # what its compiler imports
                with cuda.gpus[torch.device(device).index or 0]:
                    cuda.current_context()
            except Exception as error:  # whatever the driver or Numba miss
                reason = str(error).strip().partition("\n")[0]
                if "row_stack" in reason:  # which NumPy no longer has
                    return Support(False, "numba-cuda does not run with NumPy 2.5 or later: pip install 'numpy<2.5'")
                return Support(False, f"Numba cannot use {torch.cuda.get_device_name(device)}: {reason}")
        return found

    def prepare(self, problem: Problem, columns: Columns) -> _State:
        log_weights, first = columns.log_weights, columns.log_weights[0]
        if "weights" not in problem.requires:
            return _State(problem.extent, columns.points, None, 0.0, first.clone())
        span = max(0.0, -float(log_weights.min()))
        return _State(problem.extent, columns.points, log_weights, span, torch.zeros_like(first))

    def reduce(self, problem: Problem, queries: Any, state: _State, own_offset: int = 0) -> Partial:
        """Reduce over all columns for every row.

        Rows come in slabs; where memory does not suffice, in smaller ones, with the same bits. A tuned configuration
        that fails is given up for the next best, whose bits may differ.
        """
        points = state.points[own_offset : own_offset + problem.m] if queries is None else queries
        m = points.shape[0]
        if m == 0:
            return empty(problem, points)
        kind = arithmetic(replace(problem, extent=state.extent), state.span)
        while True:
            config, tuned = launch.configuration(problem, kind, points.device)

            def slab(start: int, stop: int, config: LaunchConfig = config) -> Partial:
                width = math.prod(depth_of(problem.d, config.depth))
                pack = functools.partial(launch.pack, state.points, kind, width, state.log_weights, config.columns)
                columns = state.packed.get((kind, width, config.columns), pack, state.points)
                alike = anchored(problem) and stop - start == columns.n  # the rows are the columns, packed alike
                rows = columns if alike else launch.pack(points[start:stop], kind, width)
                return launch.reduce(problem, rows, columns, state.uniform, kind, config)

            try:
                with on_device(points):
                    return in_slabs(slab, m, launch.most_rows(problem))
            except Exception as error:
                if isinstance(error, DeviceOutOfMemory) or tuned is None or tuned[1].rung == "forced":
                    raise
                reject(*tuned, error)
