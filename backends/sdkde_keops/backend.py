"""The KeOps backend's implementation of the protocol: rows in blocks, sums in float32 or float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sdkde_core.plugin import cpu_threads, empty, exponents, in_slabs
from sdkde_core.protocol import BackendUnavailable, Columns, DeviceOutOfMemory, Partial, Problem, Reduction, Support

from . import bounds, library
from .formulas import Formula, evaluate


@dataclass(frozen=True)
class _State:
    formula: Formula
    points: Tensor  # (n, d) float64, as they came
    columns: list[Tensor]  # (n, d), then (n, 1) log weights if they differ, as KeOps takes them
    uniform: float  # the log weight that all have; 0 where they differ


class KeopsBackend:
    """Pairs that KeOps compiles into one loop: nothing of size (m, n) is ever stored."""

    def probe(self, device: str) -> Support:
        """Say whether there are a compiler and the device, and whether KeOps works: in a process of its own, once."""
        return library.works(device)

    def prepare(self, problem: Problem, columns: Columns) -> _State:
        """Choose the dtype from the error bounds and convert to it; KeOps packs nothing."""
        if not (support := self.probe(problem.device)).ok:
            raise BackendUnavailable(support.reason)
        kind = getattr(torch, bounds.dtype(problem))
        weighted = "weights" in problem.requires
        formula = Formula(problem.reduction, problem.d, weighted)
        arrays = [columns.points, columns.log_weights[:, None]] if weighted else [columns.points]
        packed = [x.to(kind).contiguous() for x in arrays]
        return _State(formula, columns.points, packed, 0.0 if weighted else float(columns.log_weights[0]))

    def reduce(self, problem: Problem, queries: Tensor | None, state: _State, own_offset: int = 0) -> Partial:
        """Reduce over all columns, a block of rows at a time."""
        rows = state.points if queries is None else queries
        m, device = rows.shape[0], rows.device
        if m == 0:
            return empty(problem, rows)
        # A CPU would compile for seconds to save little.
        anchored = queries is None and not state.formula.weighted and device.type != "cpu"
        formula = state.formula._replace(anchored=anchored)
        scheme, height = self._plan(state)

        def block(start: int, stop: int) -> Partial:
            some = rows[start:stop].to(state.columns[0].dtype).contiguous()
            try:
                sums = evaluate(formula, [some, *state.columns], scheme).double()
            except RuntimeError as error:
                if "[KeOps] Cuda error" not in str(error):
                    raise
                torch.cuda.empty_cache()  # KeOps does not say what failed, mostly memory, which is not PyTorch's
                message = f"{device} has no room for {stop - start} rows that KeOps sums: {error}"
                raise DeviceOutOfMemory(message) from error
            return _partial(problem, formula, state.uniform, sums)

        return in_slabs(block, m, min(m, height))

    def _plan(self, state: _State) -> tuple[str, int]:
        """KeOps's scheme, and the rows of a call; neither depends on what memory is free."""
        columns, (n, d) = state.columns[0], state.points.shape
        if columns.device.type == "cpu":
            # A call takes 0.1 to 0.3 s: KeOps holds Python's lock, so that an interrupt waits for its end.
            return "CPU", max(1, (1 << 27) // (n * (d + 8))) * cpu_threads()
        # Columns can be shared out among a GPU's processors too, in at most 65,535 blocks, which pays for large ones.
        width = bounds.block(d, columns.element_size())
        if width < 24 or n > 65535 * width:
            return "GPU_1D", 1 << 40
        results = d + 2 if state.formula.reduction is Reduction.MEAN else 3  # of a block and a row, which KeOps keeps
        memory = torch.cuda.get_device_properties(columns.device).total_memory
        return "GPU_2D", max(1, memory // 16 // (-(-n // width) * results * columns.element_size()))


def _partial(problem: Problem, formula: Formula, uniform: float, sums: Tensor) -> Partial:
    start = 0 if formula.anchored else 1
    total, others = sums[:, start], sums[:, start + 1 :]
    scale = uniform if formula.anchored else sums[:, 0] + uniform
    if problem.reduction is Reduction.LAPLACE:
        return exponents.laplace(problem.d, total, -0.5 * others[:, 0], scale)
    shift = others / total[:, None] if problem.reduction is Reduction.MEAN else None
    return Partial(total.log() + scale, shift=shift)
