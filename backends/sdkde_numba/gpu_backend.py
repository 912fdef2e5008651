"""The CUDA target's implementation of the protocol."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from numba import cuda

from sdkde_core.plugin import concatenate, stack
from sdkde_core.protocol import Columns, DeviceOutOfMemory, Partial, Problem, Reduction, Support
from sdkde_core.tuning import reject

from . import gpu_launch as launch
from .gpu_bounds import anchored, arithmetic
from .gpu_kernels import SIMULATED
from .gpu_launch import Packed
from .gpu_space import Config, depth_of

#: Rows that are not cut further where memory does not suffice.
FEWEST_ROWS = 256

#: The least compute capability that any CUDA toolkit which Numba works with compiles for.
LEAST_CAPABILITY = (5, 0)


@dataclass(frozen=True)
class _State:
    """The training points, and what has been packed of them so far. (Two threads may both pack; either serves.)"""

    problem: Problem  # as given to prepare: its extent is the largest
    points: torch.Tensor  # (n, d) float64
    log_weights: torch.Tensor  # (n,)
    span: float  # largest magnitude of a log weight, nats
    uniform: torch.Tensor  # () what all log weights are, where they do not vary, else 0
    scaled: tuple[_State, ...] = ()  # multi_scale: the points at every scale
    made: dict[Any, Any] = field(default_factory=dict)

    def packed(self, kind: str, width: int, tile: int) -> Packed:
        """The points as columns, whole tiles of them; who asks on another stream waits for them there."""
        key = kind, width, tile
        if not self.points.is_cuda:
            return self.made[key] if key in self.made else self.made.setdefault(key, self._pack(*key))
        stream = torch.cuda.current_stream(self.points.device)
        if key not in self.made:
            self.made[key] = self._pack(*key), stream, stream.record_event()
        value, made_on, ready = self.made[key]
        if stream != made_on:
            stream.wait_event(ready)
            for buffer in (value.numbers, value.terms):
                if buffer is not None:
                    buffer.record_stream(stream)  # keeps the memory until that stream is through
        return value

    def _pack(self, kind: str, width: int, tile: int) -> Packed:
        weights = self.log_weights if "weights" in self.problem.requires else None
        return launch.pack(self.points, kind, width, weights, tile)


class CudaBackend:
    """Kernels that Numba compiles for any NVIDIA GPU, in the arithmetic of its ordinary cores."""

    def probe(self, device: str) -> Support:
        """Look for a GPU, and for what Numba compiles with."""
        if SIMULATED:
            return Support(device == "cpu", "Numba's simulator runs kernels on the CPU")
        if not device.startswith("cuda"):
            return Support(False, "compiles for GPUs; set NUMBA_ENABLE_CUDASIM=1 to simulate them on a CPU")
        if not torch.cuda.is_available():
            return Support(False, "PyTorch finds no CUDA device")
        index = torch.device(device).index or 0
        if index >= torch.cuda.device_count():
            return Support(False, f"there are {torch.cuda.device_count()} CUDA devices, no {device}")
        name, capability = torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)
        if capability < LEAST_CAPABILITY:
            return Support(False, f"{name} has compute capability {capability[0]}.{capability[1]}; Numba needs 5.0")
        try:
            with cuda.gpus[index]:
                cuda.current_context()
        except Exception as error:  # whatever the driver or Numba miss
            return Support(False, f"Numba cannot use {name}: {str(error).strip().partition(chr(10))[0]}")
        return Support(True, f"{name}, compute capability {capability[0]}.{capability[1]}")

    def prepare(self, problem: Problem, columns: Columns) -> _State:
        """Keep the training points; they are packed when the first rows come."""
        vary = "weights" in problem.requires
        span = float(-columns.log_weights.min()) if vary else 0.0
        uniform = torch.zeros_like(columns.log_weights[0]) if vary else columns.log_weights[0].clone()
        state = _State(problem, columns.points, columns.log_weights, span, uniform)
        scaled = [replace(state, problem=_at(problem, s), points=state.points / s, made={}) for s in problem.scales]
        return replace(state, scaled=tuple(scaled))

    def reduce(self, problem: Problem, queries: Any, state: _State, own_offset: int = 0) -> Partial:
        """Reduce over all columns for every row.

        Rows come in slabs; where memory does not suffice, in smaller ones, with the same bits.
        """
        points = state.points if queries is None else queries
        if points.shape[0] == 0:
            return _empty(problem, points.device)
        with _on(points):
            if not problem.scales:
                return _in_slabs(problem, points, state, own_offset)
            answers = []
            for scale, at_scale in zip(problem.scales, state.scaled):
                rows = at_scale.points if queries is None else queries / scale
                answers.append(_times(_in_slabs(_at(problem, scale), rows, at_scale, own_offset), scale))
            return stack(answers)


def _at(problem: Problem, scale: float) -> Problem:
    """The problem in units of a scale."""
    return replace(problem, requires=problem.requires - {"multi_scale"}, scales=(), extent=problem.extent / scale)


def _times(partial: Partial, scale: float) -> Partial:
    return partial if partial.shift is None else replace(partial, shift=partial.shift * scale)


def _in_slabs(problem: Problem, points: torch.Tensor, state: _State, own_offset: int) -> Partial:
    kind = arithmetic(problem, state.problem.extent, state.span)
    config, tuned = launch.configuration(problem, kind, launch.Processor.of(points.device))
    rows, m = launch.most_rows(problem), points.shape[0]
    found: list[Partial] = []
    start = 0
    while start < m:
        own = own_offset + start if "exclude_self" in problem.requires else None
        try:
            found.append(_slab(problem, points, start, start + rows, state, kind, config, own))
            start += rows
        except torch.cuda.OutOfMemoryError as error:
            if rows <= FEWEST_ROWS:
                raise DeviceOutOfMemory(str(error)) from error
            rows = max(FEWEST_ROWS, rows // 2)
        except Exception as error:
            if tuned is None or tuned[1].rung == "forced":
                raise
            reject(*tuned, error)
            found, start = [], 0  # with the next best configuration, whose bits may differ
            config, tuned = launch.configuration(problem, kind, launch.Processor.of(points.device))
    return concatenate(found)


def _slab(
    problem: Problem,
    points: torch.Tensor,
    start: int,
    stop: int,
    state: _State,
    kind: str,
    config: Config,
    own: int | None,
) -> Partial:
    depth, group = depth_of(problem.d, config.depth)
    columns = state.packed(kind, depth * group, config.columns)
    if problem.same and anchored(problem) and start == 0 and stop >= points.shape[0]:
        rows = replace(columns, count=points.shape[0])  # the columns' own
    else:
        rows = launch.pack(points[start:stop], kind, depth * group)
    return launch.reduce(problem, rows, columns, state.uniform, kind, config, own)


def _empty(problem: Problem, device: torch.device) -> Partial:
    def empty(*shape: int) -> torch.Tensor:
        scales = (len(problem.scales),) if problem.scales else ()
        return torch.empty((0, *scales, *shape), dtype=torch.float64, device=device)

    laplace = problem.reduction is Reduction.LAPLACE
    return Partial(
        empty(),
        empty(problem.d) if problem.reduction is Reduction.MEAN else None,
        empty() if laplace else None,
        empty() if laplace else None,
    )


def _on(x: torch.Tensor) -> AbstractContextManager[Any]:
    """Make the tensor's device the current one, where kernels are launched."""
    if not x.is_cuda or x.device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(x.device)
