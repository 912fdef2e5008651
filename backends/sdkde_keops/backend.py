"""The KeOps backend's implementation of the protocol: rows in blocks, sums in float32 or float64."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from sdkde_core.plugin import concatenate
from sdkde_core.protocol import BackendUnavailable, Columns, DeviceOutOfMemory, Partial, Problem, Reduction, Support

from . import bounds, health, library
from .formulas import Formula, evaluate

#: What a row's own column adds to its exponent, far below all that float64 and float32 have of others.
ABSENT = {torch.float64: -1e300, torch.float32: -1e37}

#: Terms of a call on a CPU, a fraction of a second: KeOps lets neither other threads of Python nor an interrupt in.
CALL = 1 << 28

#: Blocks of at least so many columns are shared out among a GPU's processors too, up to so many of them. Their results
#: take a share of the card's memory at most, and that much is asked for before KeOps takes it, where it is not little.
LEAST_BLOCK, MOST_BLOCKS, SHARE, LITTLE = 24, 65535, 1 / 16, 1 / 256

#: Devices that were found to work.
_usable: set[str] = set()


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
        if library.compiler() is None:
            return Support(
                False,
                "KeOps compiles as it runs, and there is no C++ compiler: install g++, or set CXX to the one to take",
            )
        try:
            torch.zeros(1, device=device).add_(1.0).cpu()
        except (RuntimeError, AssertionError, ValueError) as error:
            return Support(False, f"PyTorch {torch.__version__} cannot use {device}: {str(error).splitlines()[0]}")
        if torch.device(device).type not in ("cpu", "cuda"):
            return Support(False, f"KeOps runs on CPUs and CUDA GPUs, not on {device}")
        support = health.check(device)
        if support.ok:
            _usable.add(device)
        return support

    def prepare(self, problem: Problem, columns: Columns) -> _State:
        """Choose the precision from the error bounds; KeOps packs nothing."""
        if problem.device not in _usable and not (support := self.probe(problem.device)).ok:
            raise BackendUnavailable(support.reason)
        kind = getattr(torch, bounds.dtype(problem))
        weighted = "weights" in problem.requires
        formula = Formula(problem.reduction, problem.d, weighted, "exclude_self" in problem.requires)
        with _memory_errors(columns.points.device):
            packed = [columns.points, columns.log_weights[:, None]] if weighted else [columns.points]
            packed = [x.to(kind).contiguous() for x in packed]
        return _State(formula, columns.points, packed, 0.0 if weighted else float(columns.log_weights[0]))

    def reduce(self, problem: Problem, queries: Tensor | None, state: _State, own_offset: int = 0) -> Partial:
        """Reduce over all columns, a block of rows at a time."""
        rows = state.points if queries is None else queries
        formula, uniform = state.formula, not (state.formula.weighted or state.formula.excludes)
        if queries is None and uniform and rows.device.type != "cpu":  # a CPU would compile for seconds to save little
            formula = formula._replace(peaked=True)
        scheme, height, room = self._plan(state)
        absent, blocks = ABSENT[state.columns[0].dtype], []
        with _memory_errors(rows.device, room * min(len(rows), height)):
            for start in range(0, max(len(rows), 1), height):
                sums = _sums(formula, state.columns, rows[start : start + height], own_offset + start, scheme)
                blocks.append(_partial(problem, formula, state.uniform, absent, sums))
        return concatenate(blocks)

    def _plan(self, state: _State) -> tuple[str, int, int]:
        """KeOps's scheme, the rows of a call, and bytes for each: they depend on the problem, not on what is free."""
        columns, (n, d) = state.columns[0], state.points.shape
        if columns.device.type == "cpu":
            return "CPU", max(1, CALL // (n * (d + 8))), 0
        width = bounds.block(d, columns.element_size())
        shares = width >= LEAST_BLOCK and n <= MOST_BLOCKS * width
        if self.scheme == "GPU_1D" or (self.scheme == "auto" and not shares):
            return "GPU_1D", 1 << 40, 0
        results = d + 2 if state.formula.reduction is Reduction.MEAN else 3
        room = -(-n // width) * results * columns.element_size()
        return "GPU_2D", max(1, int(SHARE * _memory(columns.device)) // room), room


@functools.cache
def _memory(device: torch.device) -> int:
    """Bytes that a card has."""
    return int(torch.cuda.get_device_properties(device).total_memory)


def _sums(formula: Formula, columns: list[Tensor], rows: Tensor, own_offset: int, scheme: str) -> Tensor:
    """Largest exponents and sums relative to them, (b, 1 + c) float64."""
    kind, device = columns[0].dtype, columns[0].device
    if not len(rows):
        return torch.zeros((0, formula.d + 2), dtype=torch.float64, device=device)
    arguments = [rows.to(kind).contiguous(), *columns]
    if formula.excludes:
        own = torch.arange(own_offset, own_offset + len(rows), device=device).to(kind)[:, None]
        arguments += [own, torch.arange(len(columns[0]), device=device).to(kind)[:, None]]
        arguments.append(torch.full((1,), ABSENT[kind], dtype=kind, device=device))
    return evaluate(formula, arguments, scheme).double()


def _partial(problem: Problem, formula: Formula, uniform: float, absent: float, sums: Tensor) -> Partial:
    """The log-domain results, in few operations: of few rows each takes as long as KeOps; an empty sum has log −inf."""
    start = 0 if formula.peaked else 1
    total, others = sums[:, start], sums[:, start + 1 :]
    if formula.excludes:  # where there is nothing but a row's own column
        none = sums[:, :1] < 0.5 * absent
        total, others = torch.where(none[:, 0], 0.0, total), torch.where(none, 0.0, others)

    def log(x: Tensor) -> Tensor:
        found = x.log()
        found = found if formula.peaked else found.add_(sums[:, 0])
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


@contextmanager
def _memory_errors(device: torch.device, size: int = 0) -> Iterator[None]:
    """Says of a device that ran out of memory what the core understands; KeOps takes ``size`` bytes past PyTorch."""
    try:
        if size and size > LITTLE * _memory(device):
            _make_room(device, size)
        yield
    except RuntimeError as error:
        full = isinstance(error, torch.OutOfMemoryError) or re.search("out of memory|can't allocate", str(error))
        if not full and "[KeOps] Cuda error" in str(error):
            _make_room(device, size)  # it does not say what failed
        if full:
            raise DeviceOutOfMemory(str(error)) from error
        raise


def _make_room(device: torch.device, size: int) -> None:
    if torch.cuda.mem_get_info(device)[0] > size:
        return
    torch.cuda.empty_cache()  # what PyTorch keeps for later
    if torch.cuda.mem_get_info(device)[0] <= size:
        raise DeviceOutOfMemory(f"{device} has no {size >> 20} MiB free for what KeOps sums block by block")
