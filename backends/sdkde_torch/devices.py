"""What PyTorch's devices can do, how they are set, and the threads of a CPU."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from sdkde_core.plugin import claim_memory, cpu_threads

__all__ = ["Place", "computes_float32_exactly", "place", "workers"]


class Place(NamedTuple):
    """A device, and whether it has float64. Where it has none, points come and results go as tensors on the host."""

    device: torch.device
    double: bool


_places: dict[str, Place] = {}


def place(device: str) -> Place:
    """Return what ``device`` names; its float64 is tried once."""
    if device not in _places:
        found = torch.device(device)
        _places[device] = Place(found, found.type in ("cpu", "cuda") or _adds_float64(found))
    return _places[device]


def _adds_float64(device: torch.device) -> bool:
    if device.type == "mps":  # Apple's GPUs have none
        return False
    try:  # a tensor alone proves nothing: some devices hold what they cannot add
        return float(torch.ones(1, dtype=torch.float64, device=device).add_(1.0)) == 2.0
    except (RuntimeError, TypeError):
        return False


def computes_float32_exactly(device: torch.device) -> bool:
    """Whether a matrix product of float32 rounds its terms to float32 and no further, as PyTorch is set now.

    TF32 and bfloat16 products, which users allow for all of a process, would lose what the bounds count on. Settings
    are read, never written: other threads depend on them. Where they cannot be read the answer is no.
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


_lock = threading.Lock()


@contextmanager
def workers(device: torch.device, tasks: int) -> Iterator[Callable[[Callable[[Any], Any], Iterable[Any]], list[Any]]]:
    """Give a ``map`` that runs tasks side by side on a CPU, each on one thread, and one after another elsewhere.

    Left alone, PyTorch shares out every operation on a tile over threads that wait for one another after it: on a busy
    machine that is ten times slower. The number of threads is ``SDKDE_NUM_THREADS``, else that of the cores.
    """
    if device.type != "cpu":
        with torch.no_grad():
            yield lambda task, arguments: [task(a) for a in arguments]
        return
    with claim_memory("a sum over tiles", tasks=min(cpu_threads(), max(tasks, 1))) as threads:
        ready = threading.Barrier(threads + 1)
        with ThreadPoolExecutor(threads, "sdkde-torch", _single_threaded) as pool:
            # torch.set_num_threads also sets what new threads begin with, so the caller's number is put back at once.
            with _lock:
                before = torch.get_num_threads()
                try:
                    for _ in range(threads):
                        pool.submit(ready.wait)
                    ready.wait()
                except BaseException:  # a thread does not start, or the user interrupts: the others would wait for ever
                    ready.abort()
                    raise
                finally:
                    torch.set_num_threads(before)
            yield lambda task, arguments: list(pool.map(task, arguments))


def _single_threaded() -> None:
    """Prepare a thread of the pool; both settings are the thread's own."""
    torch.get_num_threads()  # a thread's first call takes over the process's number, so it comes before the setting
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
