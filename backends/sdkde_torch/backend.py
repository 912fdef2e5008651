"""The PyTorch backend's implementation of the protocol."""

from __future__ import annotations

import functools
from typing import Any

import torch

from sdkde_core.plugin import concatenate, parse_size, without_grad
from sdkde_core.protocol import Columns, Partial, Problem, Support

from . import gradients
from .devices import computes_float32_exactly, place, side_by_side
from .tiles import Prepared


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
        try:
            found = place(device)
            torch.zeros(1, device=found.device).add_(1.0).cpu()
        except (RuntimeError, AssertionError, ValueError, NotImplementedError) as error:
            why = str(error).splitlines()[0].partition(". ")[0]  # then come all the names that PyTorch knows
            return Support(False, f"PyTorch {torch.__version__} cannot use {device}: {why}")
        numbers = "float64" if found.double else "float32 alone: float64 stays on the host"
        return Support(True, f"PyTorch {torch.__version__} on {device}, {numbers}")

    @without_grad
    def prepare(self, problem: Problem, columns: Columns) -> Prepared:
        where, problem = place(problem.device), gradients.to_prepare(problem, columns)
        return Prepared(problem, columns, where, computes_float32_exactly(where.device), self.memory)

    def reduce(self, problem: Problem, queries: Any, state: Prepared, own_offset: int = 0) -> Partial:
        sums = functools.partial(self._sums, problem, queries, state)
        if "grad" in problem.requires:
            return gradients.reduce(sums, problem, queries, state.given, self.memory)
        return sums()

    @without_grad
    def _sums(self, problem: Problem, queries: Any, state: Prepared) -> Partial:
        points = state.given.points if queries is None else queries
        if state.single and not computes_float32_exactly(state.place.device):  # the setting has changed since
            state = Prepared(state.problem, state.given, state.place, False, self.memory)
        has_own_term = queries is None and "weights" not in problem.requires
        height = state.height(len(points))

        def block(start: int) -> Partial:
            return state.sums(points[start : start + height], has_own_term)

        return concatenate(side_by_side(state.library.device, block, range(0, max(len(points), 1), height)))
