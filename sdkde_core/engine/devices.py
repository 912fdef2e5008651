"""For backends on PyTorch's devices: the current device and stream, and errors of too little memory.

PyTorch is not imported here: the tensors that come in have brought it.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ParamSpec, TypeVar

from ..protocol import DeviceOutOfMemory, Partial
from .merge import concatenate

P = ParamSpec("P")
R = TypeVar("R")


def on_device(x: Any) -> AbstractContextManager[Any]:
    """Make a tensor's device the current one, where kernels are launched."""
    cuda = sys.modules["torch"].cuda
    return cuda.device(x.device) if x.is_cuda and x.device.index != cuda.current_device() else nullcontext()


def current_stream(device: int) -> int:
    """Return the handle of the current stream on a CUDA device; PyTorch's object of it takes ten times as long."""
    torch = sys.modules["torch"]
    handle = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return int(torch.cuda.current_stream(device).cuda_stream if handle is None else handle(device))


def captures(x: Any) -> bool:
    """Whether x is a CUDA tensor, and its user captures a CUDA graph on the current stream."""
    return getattr(x, "is_cuda", False) is True and bool(sys.modules["torch"].cuda.is_current_stream_capturing())


class memory_errors:  # a generator would take ten times as long
    """Raise :class:`DeviceOutOfMemory` for any library's error that says that memory does not suffice."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        short = isinstance(error, MemoryError) and not isinstance(error, DeviceOutOfMemory)
        if isinstance(error, RuntimeError):  # PyTorch's, cuBLAS's, cuFFT's …
            words = f"{type(error).__name__} {error}"
            short = re.search("OutOfMemoryError|out of memory|can't allocate|ALLOC_FAILED|bad_alloc", words) is not None
        if short:
            raise DeviceOutOfMemory(str(error)) from error


def without_grad(function: Callable[P, R]) -> Callable[P, R]:
    """Turn autograd off within a function; after Ctrl-C ``torch.no_grad`` might leave it off."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        library = sys.modules["torch"]._C
        before = library.is_grad_enabled()
        try:
            library._set_grad_enabled(False)
            return function(*args, **kwargs)
        finally:
            library._set_grad_enabled(before)

    return call


def in_slabs(compute: Callable[[int, int], Partial], m: int, rows: int) -> Partial:
    """Reduce m ≥ 1 rows by ``compute(start, stop)``, ``rows`` at a time, half as many where memory does not suffice.

    Raises DeviceOutOfMemory where 256 rows do not fit.
    """
    found, start = list[Partial](), 0
    while start < m:
        try:
            with memory_errors():
                found.append(compute(start, min(start + rows, m)))
            start += rows
        except DeviceOutOfMemory:
            if rows <= 256:
                raise
            rows = max(256, rows // 2)
    return concatenate(found)
