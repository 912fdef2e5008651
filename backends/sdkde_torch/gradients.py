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

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sdkde_core.plugin import cpu_threads, exponents, without_grad
from sdkde_core.protocol import Columns, Partial, Problem, Reduction

from .bounds import CHUNK, expanded_limit
from .devices import side_by_side
from .formulas import NOTHING, Tensors, exponential
from .tiles import Formula, Packed


def reduce(sums: Callable[[], Partial], problem: Problem, queries: Any, columns: Columns, memory: int) -> Partial:
    """Return the reduction that ``sums`` computes, differentiable once by queries, points and weights."""
    weights = columns.weights if "weights" in problem.requires else None
    log_weights = columns.log_weights.detach()
    found = _Reduction.apply(columns.points, queries, weights, log_weights, sums, problem, memory)
    if problem.reduction is Reduction.LAPLACE:
        log_plus, sign, log_magnitude = found
        return Partial(log_plus, sign=sign, log_magnitude=log_magnitude)
    return Partial(found[0], shift=found[1]) if problem.reduction is Reduction.MEAN else Partial(found[0])


class _Reduction(torch.autograd.Function):
    """A reduction of (points, queries or None, weights or None)."""

    @staticmethod
    def forward(
        ctx: Any,
        points: Tensor,
        queries: Tensor | None,
        weights: Tensor | None,
        log_weights: Tensor,
        sums: Callable[[], Partial],
        *how: Any,
    ) -> tuple[Tensor, ...]:
        got, problem = sums(), how[0]
        ctx.set_materialize_grads(False)
        ctx.how = how  # the problem, bytes
        if problem.reduction is Reduction.LAPLACE:
            ctx.mark_non_differentiable(got.log_sum, got.sign)
            ctx.save_for_backward(points, queries, weights, log_weights, got.log_magnitude, got.sign)
            return got.log_sum, got.sign, got.log_magnitude
        results = (got.log_sum,) if got.shift is None else (got.log_sum, got.shift)
        ctx.save_for_backward(points, queries, weights, log_weights, *results)
        return results

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        points, queries, weights, log_weights, *results = ctx.saved_tensors
        rows = points if queries is None else queries
        wants, (problem, memory) = ctx.needs_input_grad, ctx.how
        g = cotangents[2 if problem.reduction is Reduction.LAPLACE else 0]
        by_shift = cotangents[1] if problem.reduction is Reduction.MEAN else None
        nothing: tuple[None, ...] = (None,) * 7
        if g is None and by_shift is None:
            return nothing
        g = torch.zeros_like(rows[:, 0]) if g is None else g
        asked = (wants[0] if queries is None else wants[1], wants[0], wants[2])
        backward = _Backward(problem, rows, points, weights, log_weights, memory, asked)
        found = backward.run(results, g, by_shift)
        if torch.is_grad_enabled():  # create_graph=True
            given = (points, queries, weights, *cotangents)
            found = _Found(*(None if x is None else _Once.apply(x, *given) for x in found))
        if queries is None:
            both = None if found.rows is None or found.columns is None else found.rows + found.columns
            return (both, None, found.weights, *nothing[3:])
        return (found.columns, found.rows, found.weights, *nothing[3:])


class _Found(NamedTuple):
    """Derivatives, float64; None: not asked for."""

    rows: Tensor | None  # (m, d)
    columns: Tensor | None  # (n, d)
    weights: Tensor | None  # (n,)


class _Once(torch.autograd.Function):
    """x, attached to what was given; raises on a second derivative, which would silently be that of a constant."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *given: Tensor | None) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> None:
        raise RuntimeError("sdkde differentiates once: its derivatives have none themselves")


@dataclass(frozen=True)
class _Block:
    """A block of rows: packed so that exponents come less their scale, and what tiles are multiplied by."""

    start: int
    packed: Packed
    ones: Tensor  # (b, d + 1) [u, 1]
    g: Tensor  # (b, 1)
    scale: Tensor  # (b, 1): the log of what is divided by; finite
    by_shift: Tensor | None = None  # (b, d) G
    middle: Tensor | None = None  # (b, 1) G·(u + m)


@dataclass(frozen=True)
class _Backward:
    """One backward pass over all tiles; every sum is in a fixed order."""

    problem: Problem
    rows: Tensor
    points: Tensor
    weights: Tensor | None
    log_weights: Tensor  # (n,) −inf where the weight is 0
    memory: int
    wants: tuple[bool, bool, bool]  # by rows, columns, weights

    @without_grad
    def run(self, results: list[Tensor], g: Tensor, by_shift: Tensor | None) -> _Found:
        """Return the derivatives; ``results`` are the log of what is divided by, and the shift, or L's sign."""
        formula = self._formula()
        log_weights = self.log_weights.clamp(min=NOTHING[torch.float64])
        columns = formula.columns(self.points, None if self._laplace else log_weights)
        ones = _with_one(self.points)
        asked = zip(self.wants, (self.rows, self.points, self.weights))
        found = _Found(*(torch.zeros_like(x) if want and x is not None else None for want, x in asked))
        light, by_light = None, torch.zeros(0)
        if found.weights is not None and self.weights is not None:
            # They have a pass of their own for the derivative by the weight: w φ underflows, so w φ / w is lost.
            light = (self.weights < 1e-200).nonzero()[:, 0]
            by_light = self.weights.new_zeros(len(light))
        chunks = _slices(len(self.points), CHUNK)

        def chunk(where: tuple[_Block, slice]) -> Tensor | None:
            block, some = where
            extra = log_weights[some] if self._laplace else None
            return self._add(found, formula, block, columns.at(some), ones[some], extra, some)

        for given in self._blocks(formula, results, g, by_shift):
            block = given
            # To units in the last place of exponents of R², the logs that the forward pass gave are off by 10⁻⁶ and
            # more from here on. At 10⁸ bandwidths they know nothing of what was summed.
            if self.problem.extent > 1e5:
                block = self._summed(formula, given, columns, ones, log_weights)
            found_by = side_by_side(self.points.device, chunk, [(block, some) for some in chunks])
            by_rows = [x for x in found_by if x is not None]
            if found.rows is not None:
                here = slice(block.start, block.start + len(block.g))
                for part in by_rows:
                    found.rows[here] += part
                if given.by_shift is not None:
                    found.rows[here] -= given.by_shift
            if light is not None:
                by_light += self._by_light(formula, block, light)
        if found.weights is not None and self.weights is not None and light is not None:
            return found._replace(weights=(found.weights / self.weights).index_copy_(0, light, by_light))
        return found

    @property
    def _laplace(self) -> bool:
        return self.problem.reduction is Reduction.LAPLACE

    def _formula(self) -> Formula:
        problem = replace(self.problem, precision="float64")
        span = float(-torch.where(self.log_weights > NOTHING[torch.float32], self.log_weights, 0.0).min())
        library = Tensors(torch.float64, self.points.device)
        fits = self.problem.extent <= expanded_limit(problem, "float64", span)
        return exponents.Expanded(library) if fits else exponents.Direct(library)

    def _blocks(self, formula: Formula, results: list[Tensor], g: Tensor, by_shift: Tensor | None) -> Any:
        """The rows, in blocks whose tiles fit in memory."""
        elements = self.memory // (5 * 8)  # a backward pass holds five tiles at a time, of float64
        if self.points.device.type == "cpu":
            elements = min(elements // cpu_threads(), 1 << 18)
        scale = results[0]
        alive = scale > -torch.inf  # not where L is 0
        scale = torch.where(alive, scale, -NOTHING[torch.float32])
        g = torch.where(alive, g * results[1] if self._laplace else g, 0.0)
        for here in _slices(len(self.rows), max(1, elements // min(len(self.points), CHUNK))):
            u = self.rows[here]
            block = _Block(here.start, formula.rows(u), _with_one(u), g[here, None], scale[here, None])
            if by_shift is not None:
                weight = torch.where(alive[here, None], by_shift[here], 0.0)
                middle = (weight * (u + results[1][here])).sum(1, keepdim=True)
                block = replace(block, by_shift=weight, middle=middle)
            yield block

    def _summed(self, formula: Formula, block: _Block, columns: Packed, ones: Tensor, log_weights: Tensor) -> _Block:
        """Return a block relative to its rows' largest exponents, what it is multiplied by divided by their sums."""
        d, chunks = self.problem.d, _slices(len(ones), CHUNK)

        def tile(some: slice) -> tuple[Tensor, Tensor]:
            exponents = formula.first(block.packed, columns.at(some))
            return exponents, exponents + log_weights[some] if self._laplace else exponents.clone()

        def largest(some: slice) -> Tensor:
            return tile(some)[1].amax(1, keepdim=True)

        top = torch.stack(side_by_side(self.points.device, largest, chunks)).amax(0)

        def sums(some: slice) -> Tensor:
            exponents, terms = tile(some)
            phi = exponential(terms.sub_(top), in_place=True)
            if not self._laplace:
                return phi @ ones[some]  # Σ w φ [x, 1]
            return exponents.add_(1.0 + 0.5 * d).mul_(phi).sum(1, keepdim=True)  # L

        first, *others = side_by_side(self.points.device, sums, chunks)
        found = sum(others, first)
        total = found[:, -1:].abs()
        total = torch.where(total == 0, 1.0, total)
        block = replace(block, scale=top, g=block.g / total)
        if block.by_shift is None:
            return block
        by_shift = block.by_shift / total
        return replace(block, by_shift=by_shift, middle=(by_shift * found[:, :d] / total).sum(1, keepdim=True))

    def _add(
        self, found: _Found, formula: Formula, block: _Block, columns: Packed, ones: Tensor, extra: Any, some: slice
    ) -> Tensor | None:
        """Add what a tile contributes to its columns, which are its alone; return what it does to its rows, (b, d)."""
        d, for_rows = self.problem.d, None
        q, p, by_weight = self._derivatives(formula, block, columns, ones, extra, some)
        u, x = block.ones[:, :d], ones[:, :d]
        if found.rows is not None:
            by_rows = q @ ones  # (b, d + 1)
            for_rows = by_rows[:, :d] - u * by_rows[:, d:]
        if found.columns is None and found.weights is None:
            return for_rows
        by_columns = q.T @ block.ones  # (w, d + 1)
        if found.columns is not None:
            found.columns[some] += by_columns[:, :d] - x * by_columns[:, d:]
            if block.by_shift is not None:
                found.columns[some] += p.T @ block.by_shift
        if found.weights is not None:
            found.weights[some] += by_columns[:, d] if by_weight is None else by_weight.sum(0)
        return for_rows

    def _derivatives(
        self, formula: Formula, block: _Block, columns: Packed, ones: Tensor, log_weights: Any, some: slice | Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """q, p (of LAPLACE k), and of LAPLACE what the weight's derivative sums, (b, w); in fewer buffers."""
        tile = formula.first(block.packed, columns)
        if self._laplace:
            exponent = tile - block.scale if log_weights is None else (tile + log_weights).sub_(block.scale)
        else:
            exponent = tile.sub_(block.scale)
        if isinstance(some, Tensor):  # of columns without their weights
            exponent.clamp_(max=709.0)
        p = exponential(exponent, in_place=True)
        if self._laplace:
            by_weight = tile.add_(1.0 + 0.5 * self.problem.d).mul_(p.mul_(block.g))
            return by_weight + p, p, by_weight
        if block.by_shift is None or block.middle is None:
            return p.mul_(block.g), p, None
        a = torch.addmm(block.g - block.middle, block.by_shift, ones[:, : self.problem.d].T)
        return a.mul_(p), p, None

    def _by_light(self, formula: Formula, block: _Block, light: Tensor) -> Tensor:
        """A block's share of the derivatives by some weights: by way of e^E / S, which may overflow."""
        points = self.points.index_select(0, light)
        columns, ones = formula.columns(points, None), _with_one(points)
        sums = torch.empty_like(light, dtype=torch.float64)
        for some in _slices(len(light), CHUNK):
            q, _, by_weight = self._derivatives(formula, block, columns.at(some), ones[some], None, light[some])
            sums[some] = (q if by_weight is None else by_weight).sum(0)
        return sums


def _with_one(points: Tensor) -> Tensor:
    return torch.cat([points, torch.ones_like(points[:, :1])], 1)


def _slices(size: int, width: int) -> list[slice]:
    return [slice(start, min(start + width, size)) for start in range(0, size, width)]
