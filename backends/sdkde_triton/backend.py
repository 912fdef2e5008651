"""The Triton backend's implementation of the protocol."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from sdkde_core.merge import concatenate
from sdkde_core.protocol import Columns, DeviceOutOfMemory, Partial, Problem, Reduction, Support

from . import launch
from .bounds import depth_limit, direct_dtype, form, formula, grid_step, shifts_rows
from .grid import MOST_COLUMNS, slabs
from .launch import Packed, Weights
from .space import COLUMN_PADDING


@dataclass(frozen=True)
class _State:
    """The training points, and what has been made of them so far.

    Rows that are shifted by their log sums want another grid, and direct differences may want another precision: both
    depend on the rows, so each is packed when first asked for. (Two threads may then both pack; either result serves.)
    """

    problem: Problem  # as given to prepare: its extent is the largest
    points: torch.Tensor  # (n, d) float64
    weights: Weights
    span: float  # largest magnitude of a log weight, nats
    made: dict[Any, Any] = field(default_factory=dict)

    def packed(self, step: float, scaled: bool) -> Packed:
        """The points as columns of the first product, and as rows."""
        return self._made((step, scaled), lambda: launch.pack_columns(self.points, step, self.weights, scaled=scaled))

    def transposed(self, dtype: torch.dtype) -> torch.Tensor:
        """The points as the direct kernel reads them, (d, n)."""
        return self._made(dtype, lambda: launch.transpose(self.points, dtype, COLUMN_PADDING))

    def _made(self, key: Any, make: Callable[[], Any]) -> Any:
        """Make something once; who asks on another stream waits for it there."""
        if not self.points.is_cuda:
            return self.made[key] if key in self.made else self.made.setdefault(key, make())
        stream = torch.cuda.current_stream(self.points.device)
        if key not in self.made:
            value = make()
            self.made[key] = value, stream, stream.record_event()
        value, made_on, ready = self.made[key]
        if stream != made_on:
            stream.wait_event(ready)
            buffer = value.buffer if isinstance(value, Packed) else value
            buffer.record_stream(stream)  # keeps the memory until that stream is through
        return value


class TritonBackend:
    """Tensor Core kernels for CUDA GPUs of compute capability 8.0 and later."""

    def probe(self, device: str) -> Support:
        """Look for a GPU with half-precision Tensor Cores that take asynchronous copies."""
        if launch.INTERPRETED:
            return Support(True, "Triton's interpreter")
        if not device.startswith("cuda"):
            return Support(False, "Triton compiles for GPUs; set TRITON_INTERPRET=1 to interpret its kernels on a CPU")
        if not torch.cuda.is_available():
            return Support(False, "PyTorch finds no CUDA device")
        index = torch.device(device).index or 0
        if index >= torch.cuda.device_count():
            return Support(False, f"there are {torch.cuda.device_count()} CUDA devices, no {device}")
        major, minor = torch.cuda.get_device_capability(index)
        name = torch.cuda.get_device_name(index)
        if major < 8:
            return Support(False, f"{name} has compute capability {major}.{minor}; the kernels need 8.0")
        return Support(True, f"{name}, compute capability {major}.{minor}")

    def prepare(self, problem: Problem, columns: Columns) -> _State:
        """Keep the training points; they are packed when the first rows come."""
        vary = "weights" in problem.requires
        span = float(-columns.log_weights.min()) if vary else 0.0
        log_weights = columns.log_weights
        if log_weights.data_ptr() % 16:  # kernels are compiled for aligned pointers
            log_weights = log_weights.clone()
        return _State(problem, columns.points, Weights(log_weights, vary), span)

    def reduce(self, problem: Problem, queries: Any, state: _State, own_offset: int = 0) -> Partial:
        """Reduce over all columns for every row."""
        points = state.points if queries is None else queries
        if points.shape[0] == 0:
            return _empty(problem, points.device)
        try:
            with _on(points):
                compute = _packed if formula(problem, state.problem.extent, state.span) == "packed" else _direct
                # Partial results of every row and part of the columns: at most some of the rows at a time.
                parts = max(8, -(-state.points.shape[0] // MOST_COLUMNS))
                width = problem.d + 3 if problem.reduction is Reduction.MEAN else 3
                found = [compute(problem, points[some], state) for some in slabs(problem.m, 8 * parts * width)]
                return found[0] if len(found) == 1 else concatenate(found)
        except torch.cuda.OutOfMemoryError as error:
            raise DeviceOutOfMemory(str(error)) from error


def _direct(problem: Problem, points: torch.Tensor, state: _State) -> Partial:
    dtype = getattr(torch, direct_dtype(problem, state.problem.extent, state.span))
    return launch.direct(problem, launch.transpose(points, dtype), state.transposed(dtype), state.weights)


def _packed(problem: Problem, points: torch.Tensor, state: _State) -> Partial:
    shifted, weights = shifts_rows(problem), state.weights
    step = grid_step(problem.d, state.problem.extent, shifted=shifted, log_weight_span=state.span)
    corrections, scaled = form(problem, state.problem.extent, step), problem.reduction is Reduction.MEAN and not shifted
    columns = state.packed(step, scaled)
    # The columns' own rows serve where all of them are asked for.
    whole = problem.same and points.shape[0] == columns.count
    rows = columns if whole else launch.pack_rows(points, step, weights, scaled=scaled)
    if scaled:
        return launch.mean(problem, rows, columns, weights, corrections)
    if problem.reduction is not Reduction.MEAN:
        return launch.log_sum(problem, rows, columns, weights, corrections)
    log_sums = launch.log_sum(
        replace(problem, reduction=Reduction.LOG_SUM), rows, columns, weights, corrections
    ).log_sum
    rows = launch.pack_rows(points, step, weights, scaled=True, log_sums=log_sums)
    result = launch.mean(problem, rows, columns, weights, corrections, log_sums)
    deep = torch.nonzero(log_sums < weights.log.max() - depth_limit(problem.d, step))[:, 0]
    if deep.numel():
        exact = _direct(replace(problem, m=deep.numel(), same=False), points[deep], state)
        result.log_sum[deep], result.shift[deep] = exact.log_sum, exact.shift
    return result


def _empty(problem: Problem, device: torch.device) -> Partial:
    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.float64, device=device)

    laplace = problem.reduction is Reduction.LAPLACE
    return Partial(
        empty(0),
        empty(0, problem.d) if problem.reduction is Reduction.MEAN else None,
        empty(0) if laplace else None,
        empty(0) if laplace else None,
    )


def _on(x: torch.Tensor) -> AbstractContextManager[Any]:
    """Make the tensor's device the current one, where kernels are launched."""
    if not x.is_cuda or x.device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(x.device)
