"""The reductions by PyTorch's products of float64 matrices: many dimensions, beyond what half precision holds.

From some sixteen dimensions on they beat direct differences, which have no product for Tensor Cores to take.
"""

from __future__ import annotations

import torch

from sdkde_core.plugin import exponents
from sdkde_core.protocol import Partial, Problem, Reduction

#: Rows and columns of a tile: 128 MiB of exponents.
ROWS, COLUMNS = 8192, 2048


def reduce(problem: Problem, rows: torch.Tensor, columns: torch.Tensor, log_weights: torch.Tensor) -> Partial:
    """Any reduction of float64 rows over columns by log φ = u_i·u_j − ½‖u_j‖² − ½‖u_i‖², the row's part added last."""
    (m, d), n = rows.shape, columns.shape[0]
    laplace, mean = problem.reduction is Reduction.LAPLACE, problem.reduction is Reduction.MEAN
    of_columns = log_weights - 0.5 * columns.square().sum(1)
    of_rows = -0.5 * rows.square().sum(1)
    top = rows.new_full((m,), -torch.inf)
    total, moment, sums = rows.new_zeros(m), rows.new_zeros(m), rows.new_zeros(m, d if mean else 0)
    for first in range(0, n, COLUMNS):
        some = slice(first, min(first + COLUMNS, n))
        e = torch.addmm(of_columns[some], rows, columns[some].T)
        highest = torch.maximum(top, e.amax(1))
        decay = (top - highest).exp_()
        if laplace:  # Σ φ log φ, less the weights' logs and the row's part; 0 · (−∞) is 0
            p = (e - highest[:, None]).exp_()
            logs = log_weights[some].clamp(min=-1e300)
            moment = moment * decay + (e.clamp_(min=-1e300) * p).sum(1) - p @ logs
        else:
            p = e.sub_(highest[:, None]).exp_()
        total = total * decay + p.sum(1)
        if mean:
            sums = torch.addmm(sums * decay[:, None], p, columns[some])
        top = highest
    log_sum = top + of_rows + total.log()
    if mean:
        return Partial(log_sum, sums / total[:, None] - rows)
    if not laplace:
        return Partial(log_sum)
    return exponents.laplace(d, total, moment + of_rows * total, top + of_rows)
