"""The hardware that is here, with its rates: the CPU, and CUDA's devices."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace

from .cards import GPU, Processor, card_name, derived, gpu, plain
from .driver import ListedGPU, ask_nvml, described, driver_version, visible_gpus

__all__ = ["ListedGPU", "ask_nvml", "driver_version", "visible_gpus"]  # of the driver, for others

_alone: ContextVar[bool] = ContextVar("sdkde_one_thread", default=False)


@contextmanager
def one_thread() -> Iterator[None]:
    """Within this, and in this thread, :func:`cpu_threads` is 1, unless the user has set ``SDKDE_NUM_THREADS``."""
    token = _alone.set(True)
    try:
        yield
    finally:
        _alone.reset(token)


def cpu_threads() -> int:
    """Threads that a CPU backend may use: ``SDKDE_NUM_THREADS``, else the cores that this process may run on.

    Raises
    ------
    ValueError
        ``SDKDE_NUM_THREADS`` is not a positive integer.
    """
    text = os.environ.get("SDKDE_NUM_THREADS", "")
    if text:
        if not re.fullmatch("[1-9][0-9]{0,8}", text):
            raise ValueError(f"SDKDE_NUM_THREADS is {text!r}; set a positive integer")
        return int(text)
    if _alone.get():
        return 1
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


#: Rates of one core of any CPU: a server core with AVX2, running NumPy on tiles in cache.
NOMINAL_CORE = Processor(
    name="CPU core, nominal",
    matrix_flops={"float64": 21e9, "float32": 42e9},
    scalar_flops=4e9,
    exps=1.1e9,
    bandwidth=8e9,
    launch_seconds=1e-5,
    overlaps=False,
    source="nominal",
)


def cpu() -> Processor:
    """Return the nominal rates of a CPU with :func:`cpu_threads` threads, which are those of all together."""
    return _cores(cpu_threads())


@functools.cache
def _cores(threads: int) -> Processor:
    core, cores = NOMINAL_CORE, speedup(threads)
    return replace(
        core,
        name=f"{core.name}, {threads} threads",
        threads=threads,
        matrix_flops={dtype: rate * cores for dtype, rate in core.matrix_flops.items()},
        scalar_flops=core.scalar_flops * cores,
        exps=core.exps * cores,
        bandwidth=core.bandwidth * min(threads, 4),  # a few cores saturate the memory
    )


def speedup(threads: float) -> float:
    """Return how many times as fast as one thread ``threads`` are, t / (1 + (t − 1)/16): they share caches and clock.

    Measured with compiled loops on 16 virtual cores of a Xeon: 1.9 for 2, 3.5 for 4, 6.0 for 8, 7.5 for 16.
    """
    return threads / (1 + (threads - 1) / 16)


def processor(device: str) -> Processor | None:
    """Return the rates for ``"cpu"`` or ``"cuda:i"``; None where they are not known."""
    if device == "cpu":
        return cpu()
    found = card(device)
    return None if found is None else found.processor


def card(device: str) -> GPU | None:
    """Return the card that ``"cuda:i"`` is; None where it is not here, or its rates are not known.

    By its name in the table of data sheets, else by what the driver says of it.
    """
    found = _listed(device)
    if found is None:
        return None
    known = gpu(found.name)
    if known is None and (said := described(found.uuid)) is not None:
        return derived(found.name, *said)
    return known


def gpu_name(device: str) -> str | None:
    """Return the name of the card that ``"cuda:i"`` is, as the cost model has it; None where it is not here.

    Unlike :func:`card` it needs no rates.
    """
    found = _listed(device)
    return None if found is None else card_name(found.name)


def local_cards() -> tuple[GPU | None, ...]:
    """Return the cards of all CUDA devices that this process may use, ``cuda:0`` first; see :func:`card`."""
    return tuple(card(f"cuda:{i}") for i in range(len(visible_gpus())))


def card_called(name: str) -> GPU | None:
    """Return the card that a user names: one of the table of data sheets, else one that is here."""
    return gpu(name) or next((c for c in local_cards() if c is not None and plain(c.name) == plain(name)), None)


def _listed(device: str) -> ListedGPU | None:
    kind, _, number = device.partition(":")
    gpus = visible_gpus() if kind == "cuda" else ()
    return gpus[int(number or 0)] if int(number or 0) < len(gpus) else None
