"""Backends that fail while they work: whose failure it is, and checks of their answers that cost nothing."""

from __future__ import annotations

import functools
import math
import signal
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar

import numpy as np
from array_api_compat import is_torch_array

from ..arrays import detached, to_host
from ..protocol import BackendInfo, BackendUnavailable, Columns, Partial, Problem, Reduction
from .devices import memory_errors

R = TypeVar("R")


class BackendFailed(BackendUnavailable):
    """A backend raised something while it worked, which is the cause, or gave what cannot be an answer.

    ``spoiled``: the points that it was given are not what they were.
    """

    def __init__(self, info: BackendInfo, device: str, what: str, spoiled: bool = False) -> None:
        self.backend, self.device, self.spoiled = info.name, device, spoiled
        mend = f"reinstall it ({info.install})" if info.install else "tell its authors"
        super().__init__(f"backend {info.name!r} failed on {device}: {what}; {mend}, or name another backend")


class OutOfReach(BackendUnavailable):
    """Rows lie farther from the samples than a backend can answer: another one may."""

    def __init__(self, info: BackendInfo, device: str, why: str) -> None:
        self.backend, self.device = info.name, device
        super().__init__(f"backend {info.name!r} cannot do this: {why}")


def call(info: BackendInfo, problem: Problem, method: Callable[..., R], *arguments: Any, inputs: Sequence[Any]) -> R:
    """Return ``method(problem, *arguments)`` of a backend; an error in it becomes a :class:`BackendFailed`.

    So does a write to its ``inputs``: NumPy's arrays are read-only, and PyTorch counts in-place changes of a tensor. A
    SystemExit is a failure too: a plugin must not end the program. Passed on are errors of signal handlers, warnings
    that the user has made errors, and a lack of memory.
    """
    tensors = [x for x in inputs if is_torch_array(x)] if info.arrays == "torch" else []
    counts = [(x, x._version) for x in tensors if not x.is_inference()]
    try:
        with memory_errors() if info.arrays == "torch" else nullcontext():
            found = method(problem, *arguments)
    except (MemoryError, BackendUnavailable, Warning):
        raise
    except (Exception, SystemExit) as error:
        raise_interrupt(error)
        raise BackendFailed(info, problem.device, f"{type(error).__name__}: {error}") from error
    if any(x._version != count for x, count in counts):
        raise BackendFailed(info, problem.device, "it wrote to its inputs", spoiled=True)
    return found


def raise_interrupt(error: BaseException) -> None:
    """Raise an error again that is not a backend's: a signal handler's, or the Ctrl-C that it came of."""
    codes = []
    for handler in filter(callable, map(signal.getsignal, signal.valid_signals())):
        while isinstance(handler, functools.partial):
            handler = handler.func
        codes.append(getattr(handler if hasattr(handler, "__code__") else type(handler).__call__, "__code__", None))
    if any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__)):
        raise error
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, KeyboardInterrupt):
        cause = cause.__context__
    if cause is not None:  # a lock of Python's own that Ctrl-C broke off raises another error at its end
        raise cause from None


def read_only(x: Any) -> Any:
    """Return a view of ``x`` that cannot be written to, where its library has such a thing."""
    if isinstance(x, np.ndarray):
        x = x.view()
        x.flags.writeable = False
    return x


def checked(info: BackendInfo, problem: Problem, columns: Columns, rows: Any, partial: Any) -> Partial:
    """Return an answer; BackendFailed for other fields or shapes than the question's, and for NaN of finite rows.

    NaN is looked for on the host, where that costs nothing.
    """
    m = rows.shape[0]  # which may be fewer than the problem's m
    expected: dict[str, tuple[int, ...]] = {"log_sum": (m,)}
    if problem.reduction is Reduction.MEAN:
        expected["shift"] = (m, problem.d)
    elif problem.reduction is Reduction.LAPLACE:
        expected |= {"sign": (m,), "log_magnitude": (m,)}
    for name in Partial.__dataclass_fields__:
        x = getattr(partial, name, None)
        found, wanted = None if x is None else tuple(getattr(x, "shape", ())), expected.get(name)
        if found != wanted:
            what = f"its {name} for {problem.reduction} has shape {found}, not {wanted}"
            raise BackendFailed(info, problem.device, what)
    x = partial.log_sum
    if not (isinstance(x, np.ndarray) or (is_torch_array(x) and x.device.type == "cpu")):
        return partial
    for name in expected:
        x = detached(getattr(partial, name))
        if not math.isnan(x.sum()) or np.isnan(to_host(detached(columns.points))).any():
            continue
        wrong = np.isnan(to_host(x).reshape(m, -1)).any(axis=1) & ~np.isnan(to_host(detached(rows))).any(axis=1)
        if wrong.any():
            i = int(np.flatnonzero(wrong)[0])
            what = f"its {name} for {problem.reduction} is NaN for row {i}, though all coordinates are finite"
            raise BackendFailed(info, problem.device, what)
    return partial
