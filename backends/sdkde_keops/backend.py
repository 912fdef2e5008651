"""The KeOps backend's implementation of the protocol: the reductions as KeOps's formulas, rows in blocks.

With F_ij = −½ ‖x_i − y_j‖² + log w_j, KeOps gives for every row m_i = max_j F_ij and Σ_j exp(F_ij − m_i) g_ij: g is 1
for LOG_SUM, [1, y_j − x_i] for MEAN, [1, ‖x_i − y_j‖²] for LAPLACE. Differences are taken before they are squared or
summed, so that nothing cancels, at any distance from the origin. Where every row is a column and weights are equal,
m_i is 0, and Σ_j exp(F_ij) g_ij takes a sixth less time.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import threadpoolctl
import torch
from torch import Tensor

from sdkde_core.plugin import cpu_threads, empty, exponents, in_slabs, map_threads, without_grad
from sdkde_core.protocol import BackendUnavailable, Columns, DeviceOutOfMemory, Partial, Problem, Reduction, Support

from . import bounds, library

_ready: set[tuple[Any, ...]] = set()


class Formula(NamedTuple):
    """What KeOps compiles; the arguments of a call are ``x, y``, then log weights."""

    reduction: Reduction
    d: int
    weighted: bool = False
    anchored: bool = False  # every row is a column too, of equal weight: its largest exponent is its own, 0


@dataclass(frozen=True)
class _State:
    formula: Formula
    points: Tensor  # (n, d) float64, as they came
    columns: list[Tensor]  # (n, d), then (n, 1) log weights if they differ, as KeOps takes them
    uniform: float  # the log weight that all have; 0 where they differ


class KeopsBackend:
    """Pairs that KeOps compiles into one loop: nothing of size (m, n) is ever stored."""

    def probe(self, device: str) -> Support:
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
            top, sums = (0.0, sums) if anchored else (sums[:, 0], sums[:, 1:])
            total, others, scale = sums[:, 0], sums[:, 1:], top + state.uniform
            if problem.reduction is Reduction.LAPLACE:
                return exponents.laplace(problem.d, total, -0.5 * others[:, 0], scale)
            shift = others / total[:, None] if problem.reduction is Reduction.MEAN else None
            return Partial(total.log() + scale, shift=shift)

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


@functools.cache
def _symbolic(formula: Formula) -> Any:
    """KeOps's object for a formula; it compiles when it is first called."""
    from pykeops.torch import Genred

    aliases = [f"x=Vi({formula.d})", f"y=Vj({formula.d})"]
    exponent = "RatCst(-1,2)*SqDist(x,y)"
    if formula.weighted:
        aliases.append("w=Vj(1)")
        exponent += "+w"
    others = {Reduction.MEAN: "y-x", Reduction.LAPLACE: "SqDist(x,y)"}
    summed = f"Concat(IntCst(1),{others[formula.reduction]})" if formula.reduction in others else "IntCst(1)"
    how = {"axis": 1, "sum_scheme": "block_sum"}
    if formula.anchored:
        return Genred(f"Exp({exponent})*{summed}", aliases, reduction_op="Sum", **how)
    return Genred(exponent, aliases, reduction_op="Max_SumShiftExpWeight", formula2=summed, **how)


def evaluate(formula: Formula, arguments: list[Tensor], scheme: str) -> Tensor:
    """Return (m, 1 + c): the largest exponent of each row, and its sums relative to that; (m, c) where that is 0."""
    device = arguments[0].device
    key = (formula, arguments[0].dtype, scheme, device)

    @without_grad
    def run(key: tuple[Any, ...]) -> Tensor:
        if key not in _ready:
            try:
                with library.building():
                    _call(formula, [x[:1] for x in arguments], scheme)
            except (ImportError, OSError, ValueError) as error:  # no library where the compiler should have left one
                raise BackendUnavailable(
                    f"KeOps could not compile a formula with {library.compiler()}: {type(error).__name__}: {error}; "
                    f"pykeops.check_health() says how it is set up, pykeops.clean_pykeops() empties its cache"
                ) from error
            _ready.add(key)
        if device.type != "cpu":
            return _call(formula, arguments, scheme)
        with _openmp().limit(limits=cpu_threads(), user_api="openmp"):  # of the thread that calls
            return _call(formula, arguments, scheme)

    with library.exclusive():
        # For a thread of its own OpenMP makes threads anew: those of the parent are not there in a forked child.
        return map_threads(run, [key], 1, apart=device.type == "cpu")[0]


@functools.cache
def _openmp() -> Any:  # KeOps's, which need not be PyTorch's, is loaded once a formula was called
    return threadpoolctl.ThreadpoolController()


def _call(formula: Formula, arguments: list[Tensor], scheme: str) -> Tensor:
    device = arguments[0].device
    if device.type == "cpu":
        return _symbolic(formula)(*arguments, backend=scheme)
    # KeOps works on the default stream, which does not wait for others, and returns when all is done. It leaves its own
    # context current.
    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()
        return _symbolic(formula)(*arguments, backend=scheme, device_id=device.index or 0)


def trial(device: str) -> None:
    """Compile a small reduction and check its result; KeOps's messages are printed. For a process of its own."""
    library.import_keops()
    x = torch.tensor([[0.0], [3.0]], dtype=torch.float64, device=device)
    with library.building():
        got = _call(Formula(Reduction.LOG_SUM, 1), [x, x], "CPU" if device == "cpu" else "GPU_2D").tolist()
    want = [0.0, 1.0 + math.exp(-4.5)]
    if not all(math.isclose(a, b, rel_tol=1e-12) for row in got for a, b in zip(row, want, strict=True)):
        raise ValueError(f"KeOps computes {got}, not {[want, want]}")
