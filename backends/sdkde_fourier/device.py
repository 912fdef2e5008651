"""The backend on PyTorch's devices: transforms as matrix products, and exact sums for the rows that those leave."""

from __future__ import annotations

import functools
import math

import numpy as np
import torch
from torch import Tensor

from sdkde_core.nearby import Neighbours
from sdkde_core.plugin import PerStream, in_child, memory_errors, without_grad
from sdkde_core.protocol import Columns, Partial, Problem, Reduction, Support

from . import bounds, price, separable
from .modes import Box, choose_box, density_bound
from .series import Fourier, Series, State


class _Directly:
    """Direct sums over all columns, which are put in order when the first row asks."""

    def __init__(self, columns: Columns) -> None:
        self._columns, self._made = columns, PerStream()

    def __call__(self, problem: Problem, rows: Tensor, own: Tensor | None) -> Partial:
        columns = self._columns
        near = self._made.get("near", lambda: Neighbours(columns), columns.points, Neighbours.buffers)
        return near.reduce(problem, rows, own)


def _without_threads() -> None:
    """In a forked child OpenMP would wait for threads that are not there, so that PyTorch does without."""
    torch.set_num_threads(1)


in_child(_without_threads)


class TorchFourierBackend(Fourier):
    """Fourier series in up to three dimensions as matrix products in PyTorch, direct sums over tiles for isolated rows.

    Parameters
    ----------
    always : bool
        Transform also where direct sums would be faster. For tests.
    """

    rows_at_once = 1 << 21

    def probe(self, device: str) -> Support:
        """Make a tensor in float64 on the device."""
        try:
            torch.zeros(1, dtype=torch.float64, device=device).add_(1.0).cpu()
        except (RuntimeError, AssertionError, ValueError, TypeError, NotImplementedError) as error:
            why = str(error).splitlines()[0].partition(". ")[0]  # then come all the names that PyTorch knows
            return Support(False, f"PyTorch {torch.__version__} cannot use {device} in float64: {why}")
        return Support(True, f"PyTorch {torch.__version__} on {device}")

    @without_grad
    def prepare(self, problem: Problem, columns: Columns) -> State:
        """Transform the columns to modes, if that is faster than direct sums."""
        with memory_errors():
            return State(columns, self._transform(problem, columns), _Directly(columns))

    def _transform(self, problem: Problem, columns: Columns) -> Series | None:
        points, log_weights = columns.points, columns.log_weights
        step = max(1, len(points) // (1 << 13))
        some, weights = points[::step].flatten(), log_weights[::step]
        weighed = torch.stack([log_weights.mean().exp(), log_weights.exp().sum()])
        known, d = torch.cat([points.amin(0), points.amax(0), weighed, weights, some]).cpu().numpy(), problem.d
        # A point's own row has at least its own term; no sum is more than all weights.
        floor, total = float(known[2 * d]), float(known[2 * d + 1])
        if not total > bounds.SMALLEST or any(map(math.isnan, known[: 2 * d])):  # a NaN is in no box, and counts
            return None
        epsilon = bounds.tolerance(problem, floor, total)
        ends, rest = (known[:d], known[d : 2 * d]), known[2 * d + 2 :]
        sample = rest[len(weights) :].reshape(-1, d)
        cost = functools.partial(price.box_seconds, price.DEVICE, problem, epsilon)
        found = choose_box(problem, ends, sample, epsilon, cost)
        if not self.always:
            direct = price.direct_seconds(price.DEVICE, problem, sample, rest[: len(weights)])
            modes = math.inf if found is None else found[1]
            if modes > direct:
                return None
        if found is None:
            return None
        box = found[0]
        inside = box.holds(points, np.zeros(d))
        weights = torch.where(inside, log_weights.exp(), 0.0)  # (n,)
        # Columns outside the box are those of a trimmed one: rarely many.
        whole = (box.low <= ends[0]).all() and (box.high >= ends[1]).all()
        low = torch.as_tensor(box.low, device=points.device)
        held = points if whole else torch.where(inside[:, None], points, low)
        modes = separable.to_modes(_basis(box, points.device), held, weights)
        largest = density_bound(box, held, weights)
        if not largest > bounds.SMALLEST:
            return None
        error = bounds.error(epsilon, largest, float(box.period.max()))
        members = torch.nonzero(~inside)[:, 0]
        if not len(members):
            return Series(box, modes, epsilon, error)
        outside = Neighbours(Columns(points[members], log_weights[members]), members)
        return Series(box, modes, epsilon, error, inside, outside, weight=1.0)  # all weights are 1 at most

    @without_grad
    def reduce(self, problem: Problem, queries: Tensor | None, state: State, own_offset: int = 0) -> Partial:
        """Sum by modes, then directly the rows whose sum is too small against the bound on its error."""
        with memory_errors():
            return super().reduce(problem, queries, state, own_offset)

    def evaluate(self, problem: Problem, series: Series, rows: Tensor) -> tuple[Tensor, list[Tensor]]:
        basis = _basis(series.box, rows.device)
        coefficients = separable.fields(problem, basis, series.modes)
        slope = 1.0 if problem.reduction is Reduction.MEAN else 0.0
        total, *others = separable.to_points(basis, rows, coefficients, slope)
        return total, others


def _basis(box: Box, device: torch.device) -> separable.Basis:
    """The functions of a box; blocks of points are by the card's size, not by what is free: sums do not change."""
    if device.type == "cpu":
        return separable.Basis(box, device, 1 << 26)
    total = int(torch.get_device_module(device).get_device_properties(device).total_memory)
    return separable.Basis(box, device, min(1 << 30, total // 32))
