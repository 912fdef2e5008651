"""The KeOps backend's implementation of the protocol: the reductions as KeOps's formulas, rows in blocks.

With F_ij = −½ ‖x_i − y_j‖² + log w_j, KeOps gives for every row m_i = max_j F_ij and Σ_j exp(F_ij − m_i) g_ij: g is 1
for LOG_SUM, [1, y_j − x_i] for MEAN, [1, ‖x_i − y_j‖²] for LAPLACE. Differences are taken before they are squared or
summed, so that nothing cancels, at any distance from the origin.
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

#: KeOps's OpenMP, which need not be PyTorch's, is loaded once a formula was called.
_openmp = functools.cache(threadpoolctl.ThreadpoolController)


class Formula(NamedTuple):
    """What KeOps compiles; the arguments of a call are ``x, y``, then log weights."""

    reduction: Reduction
    d: int
    weighted: bool = False


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
        # On a CPU a call takes 0.1 to 0.3 s: KeOps holds Python's lock, so that an interrupt waits for its end.
        height = max(1, (1 << 27) // (problem.n * (problem.d + 8))) * cpu_threads() if device.type == "cpu" else m

        def block(start: int, stop: int) -> Partial:
            some = rows[start:stop].to(state.columns[0].dtype).contiguous()
            try:
                sums = evaluate(state.formula, [some, *state.columns]).double()
            except RuntimeError as error:
                if "[KeOps] Cuda error" not in str(error):
                    raise
                torch.cuda.empty_cache()  # KeOps does not say what failed, mostly memory, which is not PyTorch's
                message = f"{device} has no room for {stop - start} rows that KeOps sums: {error}"
                raise DeviceOutOfMemory(message) from error
            total, others, scale = sums[:, 1], sums[:, 2:], sums[:, 0] + state.uniform
            if problem.reduction is Reduction.LAPLACE:
                return exponents.laplace(problem.d, total, -0.5 * others[:, 0], scale)
            shift = others / total[:, None] if problem.reduction is Reduction.MEAN else None
            return Partial(total.log() + scale, shift=shift)

        return in_slabs(block, m, min(m, height))


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
    return Genred(exponent, aliases, reduction_op="Max_SumShiftExpWeight", formula2=summed, **how)


def evaluate(formula: Formula, arguments: list[Tensor]) -> Tensor:
    """Return (m, 1 + c): the largest exponent of each row, and its sums relative to that."""
    device = arguments[0].device
    key = (formula, arguments[0].dtype, device)

    @without_grad
    def run(key: tuple[Any, ...]) -> Tensor:
        if key not in _ready:
            try:
                with library.building():
                    _call(formula, [x[:1] for x in arguments])
            except (ImportError, OSError, ValueError) as error:  # no library where the compiler should have left one
                raise BackendUnavailable(
                    f"KeOps could not compile a formula with {library.compiler()}: {type(error).__name__}: {error}; "
                    f"pykeops.check_health() says how it is set up, pykeops.clean_pykeops() empties its cache"
                ) from error
            _ready.add(key)
        if device.type != "cpu":
            return _call(formula, arguments)
        with _openmp().limit(limits=cpu_threads(), user_api="openmp"):  # of the thread that calls
            return _call(formula, arguments)

    with library.exclusive():
        # For a thread of its own OpenMP makes threads anew: those of the parent are not there in a forked child.
        return map_threads(run, [key], 1, apart=device.type == "cpu")[0]


def _call(formula: Formula, arguments: list[Tensor]) -> Tensor:
    device = arguments[0].device
    if device.type == "cpu":
        return _symbolic(formula)(*arguments, backend="CPU")
    # KeOps works on the default stream, which does not wait for others, and returns when all is done. It leaves its own
    # context current.
    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()
        return _symbolic(formula)(*arguments, backend="GPU_1D", device_id=device.index or 0)


def trial(device: str) -> None:
    """Compile a small reduction and check its result; KeOps's messages are printed. For a process of its own."""
    library.import_keops()
    x = torch.tensor([[0.0], [3.0]], dtype=torch.float64, device=device)
    with library.building():
        got = _call(Formula(Reduction.LOG_SUM, 1), [x, x]).tolist()
    want = [0.0, 1.0 + math.exp(-4.5)]
    if not all(math.isclose(a, b, rel_tol=1e-12) for row in got for a, b in zip(row, want, strict=True)):
        raise ValueError(f"KeOps computes {got}, not {[want, want]}")
