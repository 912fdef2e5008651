"""The reductions as KeOps's formulas, and calls of them.

With F_ij = −½ ‖x_i − y_j‖² + log w_j, KeOps gives for every row m_i = max_j F_ij and Σ_j exp(F_ij − m_i) g_ij: g is 1
for LOG_SUM, [1, y_j − x_i] for MEAN, [1, ‖x_i − y_j‖²] for LAPLACE. Differences are taken before they are squared or
summed, so that nothing cancels, at any distance from the origin. Where every row is a column and weights are equal,
m_i is 0, and Σ_j exp(F_ij) g_ij takes a sixth less time.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import threadpoolctl
import torch
from torch import Tensor

from sdkde_core.plugin import cpu_threads, map_threads, without_grad
from sdkde_core.protocol import BackendUnavailable, Reduction

from . import library


class Formula(NamedTuple):
    """What KeOps compiles; the arguments of a call are ``x, y``, then log weights."""

    reduction: Reduction
    d: int
    weighted: bool = False
    anchored: bool = False  # every row is a column too, of equal weight: its largest exponent is its own, 0


_ready: set[tuple[Any, ...]] = set()


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
    """Return (m, 1 + c): the largest exponent of each row, and its sums relative to that; (m, c) where that is 0.

    BackendUnavailable: KeOps could not compile the formula.
    """
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
