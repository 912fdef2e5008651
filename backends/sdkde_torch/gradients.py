"""Reductions attached to autograd: backward passes that compute their tiles again, so memory stays bounded.

With E_ij = −½‖u_i − x_j‖², S_i = Σ_j w_j e^{E_ij} and p_ij = w_j e^{E_ij} / S_i, a result's dependence on E_ij decides
everything. For cotangents g of ℓ, G of the shift m = Σ_j p_ij (x_j − u_i), and g of log |L| let

=========  ==================================  ==============================================================
LOG_SUM    q_ij = g_i p_ij                     w_j times the derivative by w_j: q_ij
MEAN       q_ij = p_ij (a_ij + g_i)            the same, with a_ij = G_i·(x_j − u_i − m_i)
LAPLACE    q_ij = g_i k_ij (2 + d/2 + E_ij)    g_i k_ij (1 + d/2 + E_ij), with k_ij = w_j e^{E_ij} / L_i
=========  ==================================  ==============================================================

q_ij is the derivative by E_ij, whose own derivatives are x_j − u_i by the row and u_i − x_j by the column. MEAN adds
Σ_i p_ij G_i to the column's, and −G_i to the row's. All is float64, whatever the precision of the forward pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sdkde_core.plugin import cpu_threads, exponents, without_grad
from sdkde_core.protocol import PRECISIONS, Columns, Partial, Problem, Reduction

from .bounds import CHUNK, expanded_limit
from .devices import side_by_side
from .tiles import NOTHING, Packed, Tensors, exponential


def to_prepare(problem: Problem, columns: Columns) -> Problem:
    """Return the pass to prepare: on a CPU MEAN for LOG_SUM where rows alone are attached, whose derivative is a shift.

    So nothing is summed twice. It is as exact as the backward pass, at extents at which that expands squares.
    """
    attached = columns.points.requires_grad or (columns.weights is not None and columns.weights.requires_grad)
    if attached or "grad" not in problem.requires or problem.reduction is not Reduction.LOG_SUM:
        return problem
    if problem.device != "cpu" or problem.extent > _limit(problem, columns.log_weights):
        return problem
    return replace(problem, reduction=Reduction.MEAN, precision=max("high", problem.precision, key=PRECISIONS.index))


def _limit(problem: Problem, log_weights: Tensor) -> float:
    """The extent up to which expanded squares keep float64's tolerance."""
    lightest = float(log_weights.detach().clamp(min=math.log(1e-200)).min())
    return expanded_limit(replace(problem, precision="float64"), "float64", -lightest)


def reduce(sums: Callable[[], Partial], problem: Problem, queries: Any, columns: Columns, memory: int) -> Partial:
    """Return the reduction that ``sums`` computes, differentiable once by queries, points and weights."""
    weights = columns.weights if "weights" in problem.requires else None
    found = _Reduction.apply(sums, problem, memory, columns.points, queries, weights, columns.log_weights.detach())
    if problem.reduction is Reduction.LAPLACE:
        return Partial(found[0], sign=found[1], log_magnitude=found[2])
    return Partial(found[0], shift=found[1] if problem.reduction is Reduction.MEAN else None)


class _Reduction(torch.autograd.Function):
    """A reduction of points, queries or None, weights or None, and log weights, which are constants."""

    @staticmethod
    def forward(
        ctx: Any, sums: Callable[[], Partial], problem: Problem, memory: int, *given: Tensor | None
    ) -> tuple[Tensor, ...]:
        got = sums()
        results = tuple(x for x in (got.log_sum, got.shift, got.sign, got.log_magnitude) if x is not None)
        ctx.set_materialize_grads(False)
        ctx.problem, ctx.memory = problem, memory
        if got.sign is not None:
            ctx.mark_non_differentiable(got.log_sum, got.sign)
        if problem.reduction is Reduction.LOG_SUM:
            ctx.mark_non_differentiable(*results[1:])
        ctx.save_for_backward(*given, *results)
        return results

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        points, queries, weights, log_weights, *results = ctx.saved_tensors
        problem = ctx.problem
        g = cotangents[2 if problem.reduction is Reduction.LAPLACE else 0]
        by_shift = cotangents[1] if problem.reduction is Reduction.MEAN else None
        if g is None and by_shift is None:
            return (None,) * 7
        by_points, by_queries, by_weights = ctx.needs_input_grad[3:6]
        asked = (by_points if queries is None else by_queries, by_points, by_weights)
        if g is not None and problem.reduction is Reduction.LOG_SUM and len(results) == 2:
            found = [g[:, None] * results[1], None, None]
        else:
            rows, tiles = points if queries is None else queries, _Tiles(problem, points, log_weights)
            found = _derivatives(tiles, rows, weights, asked, results, g, by_shift, ctx.memory)
        if torch.is_grad_enabled():  # create_graph=True
            found = [None if x is None else _Once.apply(x, points, queries, weights, *cotangents) for x in found]
        by_rows, by_columns, by_weights = found
        if queries is None:
            by_columns, by_rows = None if by_rows is None else by_rows + by_columns, None
        return (None, None, None, by_columns, by_rows, by_weights, None)


class _Once(torch.autograd.Function):
    """x, attached to what was given; raises on a second derivative, which would silently be that of a constant."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *given: Tensor | None) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> None:
        raise RuntimeError(
            "sdkde differentiates once: its derivatives have none themselves; prepare(train).estimate(query) "
            "differentiates twice, by the query"
        )


class _Block(NamedTuple):
    """A block of rows, and what tiles are multiplied by."""

    packed: Packed
    ones: Tensor  # (b, d + 1) [u, 1]
    g: Tensor  # (b, 1)
    scale: Tensor  # (b, 1): the log of what is divided by; finite
    by_shift: Tensor | None = None  # (b, d) G
    middle: Tensor | None = None  # (b, 1) G·(u + m)


class _Tiles:
    """The columns of a backward pass.

    The derivative by a weight, a sum of w φ over w, is lost where w φ underflows. So φ is multiplied by v, the larger
    of w and 1e-200, and sums over columns by w / v.
    """

    def __init__(self, problem: Problem, points: Tensor, log_weights: Tensor) -> None:
        self.problem, self.points, self.chunks = problem, points, _slices(len(points), CHUNK)
        self.laplace = problem.reduction is Reduction.LAPLACE
        self.log_v = log_weights.clamp(min=math.log(1e-200))  # (n,)
        self.log_share = log_weights.clamp(min=NOTHING[torch.float64]) - self.log_v  # (n,) log w / v
        self.light = bool((self.log_share < 0).any())
        self.share = self.log_share.exp()[:, None]
        self.library = Tensors(torch.float64, points.device)
        near = problem.extent <= _limit(problem, log_weights)
        self.formula = (exponents.Expanded if near else exponents.Direct)(self.library)
        self.columns = self.formula.columns(points, None if self.laplace else self.log_v)

    def exponents(self, rows: Packed, some: slice) -> tuple[Tensor, Tensor]:
        """−½ r² of LAPLACE, and log v φ, (b, w): one tile but for LAPLACE."""
        tile = self.formula.first(rows, self.columns.at(some))
        return tile, tile + self.log_v[some] if self.laplace else tile

    def derivatives(self, block: _Block, some: slice) -> tuple[Tensor, Tensor, Tensor | None]:
        """q, p (of LAPLACE k), and of LAPLACE what the weight's derivative sums, (b, w), times v / w."""
        tile, exponent = self.exponents(block.packed, some)
        exponent.sub_(block.scale)
        if self.light:  # of a positive weight p v / w is less
            exponent.clamp_(max=285.0)
        p = exponential(exponent, in_place=True)
        if self.laplace:
            by_weight = tile.add_(1.0 + 0.5 * self.problem.d).mul_(p.mul_(block.g))
            return by_weight + p, p, by_weight
        if block.by_shift is None or block.middle is None:
            return p.mul_(block.g), p, None
        return torch.addmm(block.g - block.middle, block.by_shift, self.points[some].T).mul_(p), p, None

    def relative(self, block: _Block) -> _Block:
        """Return a block relative to its rows' largest exponents, what it is multiplied by divided by their sums."""

        def tile(some: slice) -> tuple[Tensor, Tensor]:
            exponents, terms = self.exponents(block.packed, some)
            return exponents, terms + self.log_share[some]

        tops = side_by_side(self.points.device, lambda some: tile(some)[1].amax(1, keepdim=True), self.chunks)
        top = torch.stack(tops).amax(0)

        def sums(some: slice) -> Tensor:
            exponents, terms = tile(some)
            phi = exponential(terms.sub_(top), in_place=True)
            if not self.laplace:
                return phi @ self.library.place(self.points[some], 1.0)  # Σ w φ [x, 1]
            return exponents.add_(1.0 + 0.5 * self.problem.d).mul_(phi).sum(1, keepdim=True)  # L

        first, *others = side_by_side(self.points.device, sums, self.chunks)
        found = sum(others, first)
        total = found[:, -1:].abs()
        total = torch.where(total == 0, 1.0, total)
        block = block._replace(scale=top, g=block.g / total)
        if block.by_shift is None:
            return block
        by_shift = block.by_shift / total
        return block._replace(by_shift=by_shift, middle=(by_shift * found[:, :-1] / total).sum(1, keepdim=True))


@without_grad
def _derivatives(
    tiles: _Tiles, rows: Tensor, weights: Tensor | None, asked: tuple[bool, bool, bool], results: list[Tensor],
    g: Tensor | None, by_shift: Tensor | None, memory: int,
) -> list[Tensor | None]:  # fmt: skip
    """Return the derivatives by rows (m, d), columns (n, d) and weights (n,); None where one is not asked for.

    Every sum is in a fixed order. ``results`` are those of the forward pass.
    """
    points, d, scale = tiles.points, tiles.problem.d, results[-1 if tiles.laplace else 0]
    alive = scale > -torch.inf  # not where L is 0
    scale = torch.where(alive, scale, -NOTHING[torch.float32])
    g = torch.zeros_like(scale) if g is None else g
    g = torch.where(alive, g * results[1] if tiles.laplace else g, 0.0)
    if by_shift is not None:
        by_shift = torch.where(alive[:, None], by_shift, 0.0)
    found = [torch.zeros_like(x) if want and x is not None else None for want, x in zip(asked, (rows, points, weights))]
    by_rows, by_columns, by_weights = found

    def chunk(where: tuple[_Block, slice]) -> Tensor | None:
        """Add what a tile contributes to its columns, which are its alone; return what it does to its rows, (b, d)."""
        block, some = where
        q, p, by_weight = tiles.derivatives(block, some)
        if by_columns is not None or by_weights is not None:
            sums = q.T @ block.ones  # (w, d + 1)
            if by_weights is not None:
                by_weights[some] += sums[:, d] if by_weight is None else by_weight.sum(0)
            if by_columns is not None:
                moved = sums[:, :d] - points[some] * sums[:, d:]
                moved = moved if block.by_shift is None else moved + p.T @ block.by_shift
                by_columns[some] += moved * tiles.share[some]
        if by_rows is None:
            return None
        q = q.mul_(tiles.share[some].T) if tiles.light else q
        return q @ points[some] - block.ones[:, :d] * q.sum(1, keepdim=True)

    elements = memory // (5 * 8)  # five tiles at a time, of float64
    if points.device.type == "cpu":
        elements = min(elements // cpu_threads(), 1 << 18)
    for here in _slices(len(rows), max(1, elements // min(len(points), CHUNK))):
        u = rows[here]
        block = _Block(tiles.formula.rows(u), tiles.library.place(u, 1.0), g[here, None], scale[here, None])
        if by_shift is not None:
            middle = (by_shift[here] * (u + results[1][here])).sum(1, keepdim=True)
            block = block._replace(by_shift=by_shift[here], middle=middle)
        # To units in the last place of exponents of R², the logs that the forward pass gave are off by 10⁻⁶ and more
        # from here on. At 10⁸ bandwidths they know nothing of what was summed.
        if tiles.problem.extent > 1e5:
            block = tiles.relative(block)
        for part in side_by_side(points.device, chunk, [(block, some) for some in tiles.chunks]):
            if by_rows is not None and part is not None:
                by_rows[here] += part
    if by_rows is not None and by_shift is not None:
        by_rows -= by_shift
    if by_weights is not None and weights is not None:
        by_weights /= weights.clamp(min=1e-200)
    return found


def _slices(size: int, width: int) -> list[slice]:
    return [slice(start, min(start + width, size)) for start in range(0, size, width)]
