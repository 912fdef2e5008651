"""The implementation of the protocol."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from sdkde_core.plugin import PerStream, empty, memory_errors, on_device
from sdkde_core.protocol import Columns, Partial, Problem, Support

from . import launch
from .bounds import grid_step
from .compiled import nvrtc_version

#: What the code is compiled for; that of no other card runs it, later ones' neither.
CAPABILITY = (9, 0)


@dataclass(frozen=True)
class _State:
    """The training points, and what has been made of them so far."""

    problem: Problem  # as given to prepare: its extent is the largest
    points: torch.Tensor  # (n, d) float64
    log_weights: torch.Tensor  # (n,)
    made: PerStream = field(default_factory=PerStream)

    def packed(self) -> launch.Packed:
        """The points as rows and as columns."""
        step = grid_step(self.problem.extent)
        make = lambda: launch.pack(self.points, step)  # noqa: E731
        return self.made.get(step, make, self.points, launch.Packed.tensors)


class HopperBackend:
    """Kernels for GPUs of compute capability 9.0."""

    def probe(self, device: str) -> Support:
        """Look for such a GPU, and for what compiles for it."""
        if not torch.cuda.is_available():
            return Support(False, "PyTorch finds no CUDA device")
        index = torch.device(device).index or 0
        if index >= torch.cuda.device_count():
            return Support(False, f"there are {torch.cuda.device_count()} CUDA devices, no {device}")
        name, capability = torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)
        if capability != CAPABILITY:
            of = ".".join(map(str, capability))
            return Support(False, f"{name} has compute capability {of}; the kernels are for 9.0 (H100, H200)")
        try:
            version = nvrtc_version()
        except Exception as error:  # whatever loading it raises
            return Support(False, f"NVRTC, which compiles the kernels, cannot be used: {str(error).partition(chr(10))[0]}")
        return Support(True, f"{name}, NVRTC {version}")

    def prepare(self, problem: Problem, columns: Columns) -> _State:
        """Keep the training points; they are packed when the first rows come."""
        return _State(problem, columns.points, columns.log_weights)

    def reduce(self, problem: Problem, queries: Any, state: _State, own_offset: int = 0) -> Partial:
        """Reduce over all columns for every row."""
        points = state.points if queries is None else queries
        if points.shape[0] == 0:
            return empty(problem, points)
        with on_device(points), memory_errors():
            return launch.mean(state.packed(), problem.d, state.log_weights)
