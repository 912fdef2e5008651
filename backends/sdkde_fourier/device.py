"""The backend on PyTorch's devices: transforms as matrix products, and exact sums for the rows that those leave."""

from __future__ import annotations

import torch
from torch import Tensor

from sdkde_core.nearby import Neighbours
from sdkde_core.plugin import PerStream, in_child, without_grad
from sdkde_core.protocol import Columns, Partial, Problem, Reduction, Support

from . import price, separable
from .modes import Box
from .series import Fourier, Series, State

# In a forked child OpenMP would wait for threads that are not there.
in_child(lambda: torch.set_num_threads(1))


class TorchFourierBackend(Fourier):
    """Fourier series in up to three dimensions as matrix products in PyTorch, direct sums over tiles for isolated rows.

    Parameters
    ----------
    always : bool
        Transform also where direct sums would be faster. For tests.
    """

    ways = price.DEVICE

    def probe(self, device: str) -> Support:
        try:
            torch.zeros(1, dtype=torch.float64, device=device).add_(1.0).cpu()
        except (RuntimeError, AssertionError, ValueError, TypeError, NotImplementedError) as error:
            why = str(error).splitlines()[0].partition(". ")[0]  # then come all the names that PyTorch knows
            return Support(False, f"PyTorch {torch.__version__} cannot use {device} in float64: {why}")
        return Support(True, f"PyTorch {torch.__version__} on {device}")

    @without_grad
    def prepare(self, problem: Problem, columns: Columns) -> State:
        made = PerStream()

        def directly(problem: Problem, rows: Tensor) -> Partial:
            return made.get("near", lambda: Neighbours(columns), columns.points).reduce(problem, rows)

        return State(columns, self.transform(problem, columns), directly)

    def to_modes(self, box: Box, points: Tensor, weights: Tensor, epsilon: float) -> Tensor:
        return separable.to_modes(_basis(box, points.device), points, weights)

    reduce = without_grad(Fourier.reduce)

    def evaluate(self, problem: Problem, series: Series, rows: Tensor) -> tuple[Tensor, list[Tensor]]:
        basis = _basis(series.box, rows.device)
        coefficients = separable.fields(problem, basis, series.modes)
        total, *others = separable.to_points(basis, rows, coefficients, problem.reduction is Reduction.MEAN)
        return total, others


def _basis(box: Box, device: torch.device) -> separable.Basis:
    """The functions of a box; blocks of points are by the card's size, not by what is free: sums do not change."""
    if device.type == "cpu":
        return separable.Basis(box, device, 1 << 26)
    total = int(torch.get_device_module(device).get_device_properties(device).total_memory)
    return separable.Basis(box, device, min(1 << 30, total // 32))
