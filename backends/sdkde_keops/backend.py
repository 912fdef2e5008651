"""The KeOps backend's implementation of the protocol: rows in blocks, sums in float32 or float64."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from sdkde_core.plugin import cpu_threads, empty, in_slabs, memory_errors
from sdkde_core.protocol import BackendUnavailable, Columns, DeviceOutOfMemory, Partial, Problem, Reduction, Support

from . import bounds, library
from .formulas import Formula, evaluate

#: What a row adds to the exponent of its own column to leave it out: far below every other exponent.
ABSENT = {torch.float64: -1e300, torch.float32: -1e37}

#: Terms of a call on a CPU for each thread, 0.1 to 0.3 s: KeOps holds Python's lock, so that an interrupt waits for it.
CALL = 1 << 27


@dataclass(frozen=True)
class _State:
    formula: Formula
    points: Tensor  # (n, d) float64, as they came
    columns: list[Tensor]  # (n, d), then (n, 1) log weights if they differ, as KeOps takes them
    uniform: float  # the log weight that all have; 0 where they differ


class KeopsBackend:
    """Pairs that KeOps compiles into one loop: nothing of size (m, n) is ever stored.

    Parameters
    ----------
    scheme : {"auto", "GPU_1D", "GPU_2D"}
        How a GPU shares the work out: rows, or rows and columns.
    """

    def __init__(self, scheme: str = "auto") -> None:
        if scheme not in ("auto", "GPU_1D", "GPU_2D"):
            raise ValueError(f"scheme is {scheme!r}; pass 'auto', 'GPU_1D' or 'GPU_2D'")
        self.scheme = scheme

    def probe(self, device: str) -> Support:
        """Say whether there are a compiler and the device, and whether KeOps works: in a process of its own, once."""
        return library.works(device)

    def prepare(self, problem: Problem, columns: Columns) -> _State:
        """Choose the dtype from the error bounds and convert to it; KeOps packs nothing."""
        if not (support := self.probe(problem.device)).ok:
            raise BackendUnavailable(support.reason)
        kind = getattr(torch, bounds.dtype(problem))
        weighted = "weights" in problem.requires
        formula = Formula(problem.reduction, problem.d, weighted, "exclude_self" in problem.requires)
        arrays = [columns.points, columns.log_weights[:, None]] if weighted else [columns.points]
        with memory_errors():
            packed = [x.to(kind).contiguous() for x in arrays]
        return _State(formula, columns.points, packed, 0.0 if weighted else float(columns.log_weights[0]))

    def reduce(self, problem: Problem, queries: Tensor | None, state: _State, own_offset: int = 0) -> Partial:
        """Reduce over all columns, a block of rows at a time."""
        rows = state.points if queries is None else queries
        m, device = rows.shape[0], rows.device
        if m == 0:
            return empty(problem, rows)
        formula, uniform = state.formula, not (state.formula.weighted or state.formula.excludes)
        if queries is None and uniform and device.type != "cpu":  # a CPU would compile for seconds to save little
            formula = formula._replace(anchored=True)
        scheme, height, room = self._plan(state)

        def block(start: int, stop: int) -> Partial:
            size = room * (stop - start)  # bytes that KeOps takes, of which PyTorch does not know
            if size and size > _memory(device) // 256:
                _make_room(device, size)
            try:
                sums = _sums(formula, state.columns, rows[start:stop], own_offset + start, scheme)
            except RuntimeError as error:
                if "[KeOps] Cuda error" in str(error):
                    _make_room(device, size)  # KeOps does not say what failed: this raises where it was memory
                raise
            return _partial(problem, formula, state.uniform, ABSENT[state.columns[0].dtype], sums)

        return in_slabs(block, m, min(m, height))

    def _plan(self, state: _State) -> tuple[str, int, int]:
        """KeOps's scheme, the rows of a call, and bytes for each row; none depends on what memory is free."""
        columns, (n, d) = state.columns[0], state.points.shape
        if columns.device.type == "cpu":
            return "CPU", max(1, CALL // (n * (d + 8))) * cpu_threads(), 0
        # Columns can be shared out among a GPU's processors too, in at most 65,535 blocks, which pays for large ones.
        width = bounds.block(d, columns.element_size())
        shares = width >= 24 and n <= 65535 * width
        if self.scheme == "GPU_1D" or (self.scheme == "auto" and not shares):
            return "GPU_1D", 1 << 40, 0
        results = d + 2 if state.formula.reduction is Reduction.MEAN else 3
        room = -(-n // width) * results * columns.element_size()
        return "GPU_2D", max(1, _memory(columns.device) // 16 // room), room


@functools.cache
def _memory(device: torch.device) -> int:
    """Bytes that a card has."""
    return int(torch.cuda.get_device_properties(device).total_memory)


def _sums(formula: Formula, columns: list[Tensor], rows: Tensor, own_offset: int, scheme: str) -> Tensor:
    """Largest exponents and sums relative to them, (b, 1 + c) float64."""
    kind, device = columns[0].dtype, columns[0].device
    arguments = [rows.to(kind).contiguous(), *columns]
    if formula.excludes:
        for first, many in ((own_offset, len(rows)), (0, len(columns[0]))):
            arguments.append(torch.arange(first, first + many, device=device).to(kind)[:, None])
        arguments.append(torch.full((1,), ABSENT[kind], dtype=kind, device=device))
    return evaluate(formula, arguments, scheme).double()


def _partial(problem: Problem, formula: Formula, uniform: float, absent: float, sums: Tensor) -> Partial:
    """The log-domain results, in few operations: for few rows each of them takes as long as KeOps does."""
    start = 0 if formula.anchored else 1
    total, others = sums[:, start], sums[:, start + 1 :]
    if formula.excludes:  # where there is nothing but a row's own column
        none = sums[:, :1] < 0.5 * absent
        total, others = torch.where(none[:, 0], 0.0, total), torch.where(none, 0.0, others)

    def log(x: Tensor) -> Tensor:
        found = x.log()
        found = found if formula.anchored else found.add_(sums[:, 0])
        return found.add_(uniform) if uniform else found

    if problem.reduction is Reduction.LAPLACE:
        half = (1.0 + 0.5 * problem.d) * total
        signed = torch.sub(half, others[:, 0], alpha=0.5)
        plus = torch.add(half, others[:, 0], alpha=0.5)
        return Partial(log(plus), sign=signed.sign(), log_magnitude=log(signed.abs()))
    shift = None
    if problem.reduction is Reduction.MEAN:
        shift = others / (total.clamp(min=1.0) if formula.excludes else total)[:, None]  # 1 and more, or none at all
    return Partial(log(total), shift=shift)


def _make_room(device: torch.device, size: int) -> None:
    """Have PyTorch give memory back where ``size`` bytes are not free; DeviceOutOfMemory where that does not help."""
    if torch.cuda.mem_get_info(device)[0] <= size:
        torch.cuda.empty_cache()  # what PyTorch keeps for later
        if torch.cuda.mem_get_info(device)[0] <= size:
            raise DeviceOutOfMemory(f"{device} has no {size >> 20} MiB free for what KeOps sums block by block")
