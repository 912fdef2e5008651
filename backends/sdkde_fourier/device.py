"""The backend on PyTorch's devices: transforms as matrix products, and exact sums for the rows that those leave.

A Gaussian is even and a product over dimensions, so cosines and sines need not be mixed:

    Π_a Σ_k g_k cos k(θ_a − θ'_a) = Π_a Σ_k g_k (cos kθ_a cos kθ'_a + sin kθ_a sin kθ'_a).

With f_i the functions 1, cos θ … cos Kθ, sin θ … sin Kθ of one dimension, the modes are the tensor
Σ_j w_j f_i(θ_j1) f_k(θ_j2) …, as many real numbers as there are modes: one matrix product of what the points' functions
are in one dimension with what they are in the other. Back to points it is one product with a matrix, and a sum over
each row. In one dimension k = a + P b, with a and b about the root of K: functions of θ and of Pθ, again a product.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from sdkde_core.nearby import Neighbours
from sdkde_core.plugin import PerStream, in_child, without_grad
from sdkde_core.protocol import Columns, Partial, Problem, Reduction, Support

from . import info
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

    ways = info.DEVICE

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
        return to_modes(_basis(box, points.device), points, weights)

    reduce = without_grad(Fourier.reduce)

    def evaluate(self, problem: Problem, series: Series, rows: Tensor) -> tuple[Tensor, list[Tensor]]:
        basis = _basis(series.box, rows.device)
        coefficients = fields(problem, basis, series.modes)
        total, *others = to_points(basis, rows, coefficients, problem.reduction is Reduction.MEAN)
        return total, others


def _basis(box: Box, device: torch.device) -> Basis:
    """The functions of a box; blocks of points are by the card's size, not by what is free: sums do not change."""
    if device.type == "cpu":
        return Basis(box, device, 1 << 26)
    total = int(torch.get_device_module(device).get_device_properties(device).total_memory)
    return Basis(box, device, min(1 << 30, total // 32))


@dataclass(frozen=True)
class Basis:
    """The functions of a box; those of a block of points may take ``memory`` bytes."""

    box: Box
    device: torch.device
    memory: int
    depth: ClassVar[int] = 2048  # points of one of the products that are computed side by side, and summed in order

    @property
    def waves(self) -> list[Tensor]:
        """Per factor its wave numbers, in multiples of θ; the first is 0. One dimension has two factors."""
        highest = self.box.highest
        if len(highest) > 1:
            return [torch.arange(k + 1, dtype=torch.float64, device=self.device) for k in highest]
        step = math.isqrt(highest[0]) + 1  # P
        count = highest[0] // step + 1
        return [torch.arange(k, dtype=torch.float64, device=self.device) * by for k, by in ((step, 1), (count, step))]

    def rows(self, fields: int = 1) -> int:
        """The number of points in a block that memory allows, for the evaluation of ``fields`` fields."""
        sizes = [2 * len(w) for w in self.waves]
        numbers = 3 * sum(sizes) + 2 * fields * math.prod(sizes[:-1])
        most = max(32, self.memory // (8 * numbers))
        return most // self.depth * self.depth or most

    def functions(self, points: Tensor) -> list[Tensor]:
        """Per factor cosines and sines of its waves at the points, (b, 2 waves − 1)."""
        found, angles = [], self.box.angles(points)
        for theta, waves in zip(angles if len(angles) > 1 else angles * 2, self.waves):
            count = len(waves)
            out = theta.new_empty(len(theta), 2 * count - 1)
            phase = theta[:, None] * waves
            torch.cos(phase, out=out[:, :count])
            torch.sin(phase[:, 1:], out=out[:, count:])
            found.append(out)
        return found


def to_modes(basis: Basis, points: Tensor, weights: Tensor) -> Tensor:
    """Return Σ_j w_j Π_a f(θ_ja): (2 K_1 + 1, 2 K_2 + 1, …)."""
    total: Any = 0.0
    for start in range(0, len(points), basis.rows()):
        here = slice(start, start + basis.rows())
        first, *others = basis.functions(points[here])
        first *= weights[here, None]
        if len(others) == 2:  # (b, N1 · N2)
            first = (first[:, :, None] * others.pop(0)[:, None, :]).flatten(1)
        last = others[0]
        whole = len(first) // basis.depth * basis.depth
        part = first[whole:].T @ last[whole:]
        if whole:
            left, right = (x[:whole].unflatten(0, (-1, basis.depth)) for x in (first, last))
            part = part + torch.bmm(left.mT, right).sum(0)
        total = total + part
    return _joined(basis, total) if len(basis.box.highest) == 1 else total.unflatten(0, basis.box.shape[:-1])


def _joined(basis: Basis, product: Tensor) -> Tensor:
    """In one dimension: the sums of cos kθ and sin kθ from those of products, k = a + P b."""
    (a, b), highest = [len(w) for w in basis.waves], basis.box.highest[0]
    cosines, sines = product[:a, :b].clone(), product.new_zeros(a, b)
    cosines[1:, 1:] -= product[a:, b:]  # sin 0 is 0
    sines[1:] += product[a:, :b]
    sines[:, 1:] += product[:a, b:]
    return torch.cat([cosines.T.flatten()[: highest + 1], sines.T.flatten()[1 : highest + 1]])


def _parted(basis: Basis, coefficients: Tensor) -> Tensor:
    """In one dimension: the matrix by which products of functions sum to Σ c_k cos kθ + s_k sin kθ."""
    (a, b), highest = [len(w) for w in basis.waves], basis.box.highest[0]
    c, s = coefficients.new_zeros(2, a * b)
    c[: highest + 1] = coefficients[: highest + 1]
    s[1 : highest + 1] = coefficients[highest + 1 :]
    c, s = c.unflatten(0, (b, a)).T, s.unflatten(0, (b, a)).T  # (a, b)
    return torch.cat([torch.cat([c, s[:, 1:]], 1), torch.cat([s[1:], -c[1:, 1:]], 1)])


def _wave_numbers(basis: Basis, a: int) -> Tensor:
    """κ of the functions of a dimension, in 1/bandwidths: (2 K + 1,)."""
    k = torch.arange(basis.box.highest[a] + 1, dtype=torch.float64, device=basis.device)
    return torch.cat([k, k[1:]]) * (2.0 * math.pi / float(basis.box.period[a]))


def _along(x: Tensor, a: int, d: int) -> Tensor:
    return x.view([-1 if b == a else 1 for b in range(d)])


def fields(problem: Problem, basis: Basis, modes: Tensor) -> list[Tensor]:
    """Return the coefficients of S; then of MEAN's Σ w φ (u_j − y), by dimension, or of LAPLACE's L.

    As :func:`sdkde_fourier.modes.fields` does for complex modes: the kernel exp(−½ r²) has per dimension the
    coefficients √(2π) / P · exp(−½ κ²), twice for k > 0; Σ w φ (u_j − y) = ∇S. The first of MEAN's d sums is
    left to :func:`to_points` where there are two dimensions or more.
    """
    d, product = problem.d, modes
    kappa = [_wave_numbers(basis, a) for a in range(d)]
    for a, k in enumerate(kappa):
        gaussian = (2.0 * math.sqrt(2.0 * math.pi) / float(basis.box.period[a])) * torch.exp(-0.5 * k**2)
        gaussian[0] *= 0.5
        product = product * _along(gaussian, a, d)
    if problem.reduction is Reduction.LOG_SUM:
        return [product]
    if problem.reduction is Reduction.LAPLACE:
        half = sum(_along(0.5 * k**2, a, d) for a, k in enumerate(kappa))
        return [product, product * (1.0 + half)]
    return [product] + [_derivative(product, k, a) for a, k in enumerate(kappa) if a or d == 1]


def _derivative(coefficients: Tensor, kappa: Tensor, a: int) -> Tensor:
    """Along a dimension: c cos κy + s sin κy has the derivative κ s cos κy − κ c sin κy."""
    count = len(kappa) // 2
    moved = coefficients.movedim(a, -1)
    zero = torch.zeros_like(moved[..., :1])
    return (torch.cat([zero, moved[..., count + 1 :], -moved[..., 1 : count + 1]], -1) * kappa).movedim(-1, a)


def to_points(basis: Basis, points: Tensor, coefficients: list[Tensor], slope: bool) -> Tensor:
    """Return the values of every field at the points, (fields, b).

    With ``slope``, in two dimensions or more, the second row is the first field's derivative along the first dimension:
    its products are those of the field itself.
    """
    if points.shape[1] == 1:
        coefficients, slope = [_parted(basis, c) for c in coefficients], False
    # (fields · N1 [· N2], N last), so that one product serves all fields
    matrix = torch.cat([c.flatten(0, -2) for c in coefficients])
    found = points.new_empty(len(coefficients) + slope, len(points))
    rows = basis.rows(len(coefficients))
    for start in range(0, len(points), rows):
        here = slice(start, start + rows)
        *others, last = basis.functions(points[here])
        values = (last @ matrix.T).unflatten(1, (len(coefficients), -1))  # (b, fields, N1 [· N2])
        if len(others) == 2:
            values = values.unflatten(2, (others[0].shape[1], -1)) @ others.pop()[:, None, :, None]
            values = values.squeeze(-1)
        first = others[0]  # (b, N1)
        sums = torch.bmm(values, first[:, :, None])[:, :, 0].T
        if not slope:
            found[:, here] = sums
            continue
        found[0, here], found[2:, here] = sums[0], sums[1:]
        count = basis.box.highest[0]
        cosines, sines = values[:, 0, 1 : count + 1], values[:, 0, count + 1 :]
        turned = sines * first[:, 1 : count + 1] - cosines * first[:, count + 1 :]
        found[1, here] = turned @ _wave_numbers(basis, 0)[1 : count + 1]
    return found
