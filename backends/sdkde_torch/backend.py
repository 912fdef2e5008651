"""The PyTorch backend's implementation of the protocol."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sdkde_core.plugin import concatenate, exponents, parse_size, without_grad
from sdkde_core.protocol import Columns, Partial, Problem, Reduction, Support

from . import gradients
from .bounds import formula, refines
from .devices import Place, computes_float32_exactly, place, side_by_side
from .formulas import NOTHING, high_low, make
from .tiles import Prepared, Summed


@dataclass(frozen=True)
class _State:
    """The training points, and what was packed of them."""

    problem: Problem  # as given to prepare
    columns: Columns
    place: Place
    single: bool  # whether products of float32 were exact when the columns were packed
    prepared: Prepared


class TorchBackend:
    """Chunked tensor operations on any device of PyTorch.

    Parameters
    ----------
    memory : int or str
        Bytes that temporaries may take at a time, ``"256MiB"``: at least a row of 1024 columns is computed.
    """

    def __init__(self, memory: int | str = "256MiB") -> None:
        self.memory = parse_size(memory)

    def probe(self, device: str) -> Support:
        """Make a tensor on the device, and say whether it has float64."""
        try:
            found = place(device)
            torch.zeros(1, device=found.device).add_(1.0).cpu()
        except (RuntimeError, AssertionError, ValueError, NotImplementedError) as error:
            why = str(error).splitlines()[0].partition(". ")[0]  # then come all the names that PyTorch knows
            return Support(False, f"PyTorch {torch.__version__} cannot use {device}: {why}")
        numbers = "float64" if found.double else "float32 alone: float64 stays on the host"
        return Support(True, f"PyTorch {torch.__version__} on {device}, {numbers}")

    @without_grad
    def prepare(self, problem: Problem, columns: Columns) -> _State:
        """Choose the formula from the error bounds, and pack the columns."""
        where = place(problem.device)
        single = computes_float32_exactly(where.device)
        return _State(problem, columns, where, single, self._packed(problem, columns, where, single))

    def reduce(self, problem: Problem, queries: Any, state: _State, own_offset: int = 0) -> Partial:
        """Reduce over all columns, a block of rows at a time."""
        sums = functools.partial(self._sums, problem, queries, state)
        if "grad" in problem.requires:
            return gradients.reduce(sums, problem, queries, state.columns, self.memory)
        return sums()

    @without_grad
    def _sums(self, problem: Problem, queries: Any, state: _State) -> Partial:
        points = state.columns.points if queries is None else queries
        prepared = state.prepared
        if state.single and not computes_float32_exactly(state.place.device):  # the setting has changed since
            prepared = self._packed(state.problem, state.columns, state.place, single=False)
        has_own_term = queries is None and "weights" not in problem.requires
        uniform = None if "weights" in problem.requires else state.columns.log_weights[0]
        height = prepared.height(len(points))
        starts = range(0, max(len(points), 1), height)

        def block(start: int) -> Partial:
            rows = points[start : start + height]
            return _partial(problem, prepared, rows, prepared.sums(rows, has_own_term), uniform)

        return concatenate(side_by_side(prepared.library.device, block, starts))

    def _packed(self, problem: Problem, columns: Columns, where: Place, single: bool) -> Prepared:
        points, log_weights = columns.points.detach(), columns.log_weights.detach()
        span = 0.0
        if "weights" in problem.requires:
            carries = log_weights > NOTHING[torch.float32]  # with "grad" some are −inf
            span = float(-torch.where(carries, log_weights, 0.0).min())
        name = formula(problem, span, single=single, double=where.double)
        if not name:  # beyond float32: the points are on the host, as float64
            return self._packed(problem, columns, Place(points.device, True), single)
        how, library = make(name, problem, where.device, span)
        direct = isinstance(how, exponents.Direct)
        laplace, mean = (problem.reduction is r for r in (Reduction.LAPLACE, Reduction.MEAN))
        # Direct differences hold so far from every column that exponents are below float32's −1e30; split squares
        # divide by their grid, and −1e300 would overflow.
        lowest = NOTHING[library.dtype if direct else torch.float32]
        added = log_weights.clamp(min=lowest) if "weights" in problem.requires else None
        in_pairs = library.dtype == torch.float32 and refines(problem, problem.extent)
        return Prepared(
            problem,
            how,
            library,
            how.columns(points, None if laplace else added),
            right=library.place(points, 1.0) if mean and not direct else None,
            log_weights=library.place(added)[:, 0] if laplace and added is not None else None,
            pairs=exponents.Packed(library.place(*high_low(points))) if in_pairs else None,
            double=where.double,
            memory=self.memory,
        )


def _partial(problem: Problem, prepared: Prepared, rows: Tensor, summed: Summed, uniform: Tensor | None) -> Partial:
    """The log-domain results."""
    total, log_scale = summed.total, summed.log_scale if uniform is None else summed.log_scale + uniform
    if summed.moment is not None:
        return exponents.laplace(problem.d, total, summed.moment, log_scale)
    shift = None
    if summed.mean is not None:
        if isinstance(prepared.formula, exponents.Direct):
            shift = summed.mean
        else:  # as the means were rounded, where they were: a point's own term cancels
            exact = prepared.pairs is not None or prepared.library.dtype == torch.float64
            shift = summed.mean - (rows if exact else rows.to(prepared.library.dtype).double())
    return Partial(total.log() + log_scale, shift=shift)
