"""What PyTorch's devices can do, how they are set, and the threads of a CPU."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

import torch

from sdkde_core.plugin import cpu_threads, in_child, map_threads, new_lock, without_grad

A = TypeVar("A")
R = TypeVar("R")


class Place(NamedTuple):
    """A device, and whether it has float64. Where it has none, points come and results go as tensors on the host."""

    device: torch.device
    double: bool


@functools.cache
def place(device: str) -> Place:
    """Return what ``device`` names; its float64 is tried once."""
    found = torch.device(device)
    double = found.type in ("cpu", "cuda")
    if not double and found.type != "mps":  # Apple's GPUs have none
        with contextlib.suppress(RuntimeError, TypeError):  # some devices hold what they cannot add
            double = float(torch.ones(1, dtype=torch.float64, device=found).add_(1.0)) == 2.0
    return Place(found, double)


def computes_float32_exactly(device: torch.device) -> bool:
    """Whether products of float32 are rounded to float32 as PyTorch is set now, and not to TF32 or bfloat16.

    Settings are read, never written: other threads depend on them.
    """
    try:
        if torch.get_float32_matmul_precision() != "highest":
            return False
        if device.type == "cuda":
            return not torch.backends.cuda.matmul.allow_tf32
        settings = getattr(torch.backends.mkldnn, "matmul", None)
        return getattr(settings, "fp32_precision", "none") in ("none", "ieee")
    except RuntimeError:  # PyTorch refuses to say, where settings of two generations were mixed
        return False


_lock = new_lock()
_here = threading.local()


@without_grad
def side_by_side(device: torch.device, task: Callable[[A], R], arguments: Sequence[A]) -> list[R]:
    """Return ``[task(a) for a in arguments]``: side by side on a CPU, each on one thread; elsewhere one by one.

    Left alone, PyTorch shares out every operation on a tile over threads that wait for one another after it: on a busy
    machine that is ten times slower.
    """
    if device.type == "cpu":
        try:
            return map_threads(functools.partial(_alone, task), arguments, cpu_threads(), pool=_workers())
        except BaseException:  # an interrupt may have left locks within the pool locked: they are Python's own
            _workers.cache_clear()
            raise
    return [task(a) for a in arguments]


@functools.cache
def _workers() -> ThreadPoolExecutor:
    """As many threads as are asked for, which stay: to prepare one takes longer than a small problem."""
    return ThreadPoolExecutor(1 << 16, "sdkde-torch")


def _alone(task: Callable[[A], R], argument: A) -> R:
    """Return ``task(argument)``; within a thread's first task, which the call waits for, the thread is prepared.

    PyTorch is to use one thread here, and to record nothing; both settings are the thread's own. The number is also
    what new threads begin with. That is put back within microseconds, by a thread whose own number it may become; where
    none can be started this one goes on with the process's number.
    """
    if not getattr(_here, "prepared", False):
        torch.set_grad_enabled(False)
        with _lock, contextlib.suppress(RuntimeError):
            before = torch.get_num_threads()  # a thread's first call takes over the process's number
            number_is_set = threading.Event()

            def put_back() -> None:
                number_is_set.wait()
                torch.set_num_threads(before)

            other = threading.Thread(target=put_back)
            other.start()
            torch.set_num_threads(1)
            number_is_set.set()
            other.join()
        _here.prepared = True
    return task(argument)


# In a forked child none of the threads is there: neither those above nor those that OpenMP would wait for.
in_child(_workers.cache_clear)
in_child(lambda: torch.set_num_threads(1))
