"""The hardware that is here, with its rates: the CPU, and CUDA's devices."""

from __future__ import annotations

import functools
import json
import math
import os
import platform
import re
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ..fresh import run_python
from ..messages import warn_once
from ..storage import cache_folder, write_atomically
from .cards import GPU, Processor, card_name, derived, gpu, same_name
from .driver import Described, ListedGPU, ask_nvml, described, driver_version, visible_gpus

__all__ = [
    "ListedGPU",
    "ask_nvml",
    "busy",
    "card",
    "card_called",
    "cpu",
    "cpu_cache_file",
    "cpu_threads",
    "driver_version",
    "gpu_name",
    "is_here",
    "local_cards",
    "measure_cpu",
    "one_thread",
    "processor",
    "speedup",
    "visible_gpus",
]


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


#: Rates of one core, for a CPU that has not been measured: a server core with AVX2, running NumPy on tiles in cache.
NOMINAL_CORE = Processor(
    name="CPU core, nominal",
    matrix_flops={"float64": 21e9, "float32": 42e9},
    scalar_flops=4e9,
    exps=1.1e9,
    bandwidth=8e9,
    launch_seconds=1e-5,
    overlaps=False,
    source="nominal; `sdkde doctor --measure` measures this one",
)


def cpu() -> Processor:
    """Return the rates of this CPU with :func:`cpu_threads` threads: as :func:`measure_cpu` kept them, else nominal."""
    global _asked
    core, threads = _measured_core() or NOMINAL_CORE, cpu_threads()
    known = _asked
    if known is None or known[0] is not core or known[1] != threads:
        _asked = known = core, threads, _cores(core, threads)
    return known[2]


#: A core, threads, and the rates of so many, as :func:`cpu` was asked last: that is ten times for every choice.
_asked: tuple[Processor, int, Processor] | None = None


def _cores(core: Processor, threads: int) -> Processor:
    """The rates of so many threads together."""
    cores = speedup(threads)
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


def busy(tasks: float, threads: int) -> float:
    """Return how many of the threads work at a time, on average, on tasks of one length; a last one may be shorter."""
    whole = int(tasks)
    return tasks / (math.ceil(whole / threads) + (tasks - whole if whole % threads == 0 else 0.0))


def measure_cpu() -> Processor:
    """Measure one core's rates with NumPy on tiles in cache; store them in the user's cache folder, and return them.

    Takes about a second, in a process of its own: BLAS reads its number of threads from the environment as it loads.
    """
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    code = "import json; from sdkde_core.choice import hardware; print(json.dumps(hardware._measure()))"
    printed = run_python(code, env={**os.environ, **one_thread}, capture_output=True, check=True).stdout
    kept = {**json.loads(printed), "numpy": np.__version__}
    path = cpu_cache_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    with write_atomically(path) as temporary:
        temporary.write_text(json.dumps(kept, indent=1))
    _measured_core.cache_clear()
    core = _measured_core()
    assert core is not None  # written just now
    return core


def _measure() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    single = rng.normal(size=(256, 1024)).astype(np.float32)
    out, matrix = np.empty_like(single), {}
    for dtype in ("float32", "float64"):  # thin, like the products of kernel sums
        a, b = rng.normal(size=(256, 32)).astype(dtype), rng.normal(size=(32, 1024)).astype(dtype)
        tile = np.empty((256, 1024), dtype)
        matrix[dtype] = 2 * 256 * 32 * 1024 / _seconds(functools.partial(np.matmul, a, b, out=tile))
    large = np.zeros(1 << 23)
    return {
        "name": platform.processor() or platform.machine(),
        "matrix_flops": matrix,
        "scalar_flops": single.size / _seconds(lambda: np.subtract(single, 0.5, out=out)),
        "exps": single.size / _seconds(lambda: np.exp(single, out=out)),
        "bandwidth": 2 * large.nbytes / _seconds(lambda: np.negative(large, out=large)),
        "launch_seconds": NOMINAL_CORE.launch_seconds,
        "overlaps": False,
        "source": "measured",
    }


def _seconds(call: Callable[[], Any]) -> float:
    """Median time of a call."""
    call()
    times = []
    for _ in range(21):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def cpu_cache_file() -> Path:
    """Return the file in which :func:`measure_cpu` keeps the rates of this host."""
    return cache_folder() / f"cpu-{platform.node() or 'host'}.json"


@functools.cache
def _measured_core() -> Processor | None:
    path: Path | None = None
    try:
        path = cpu_cache_file()
        return _kept_core(path.read_text(encoding="utf-8"))
    except FileNotFoundError:  # nothing was measured
        return None
    except Exception as error:  # an estimate must not fail because of what is in a file
        if path is not None:  # else the user has no home
            warn_once(f"{path} is not used: {error!r}; `sdkde doctor --measure` writes it anew", str(path))
        return None


def _kept_core(text: str) -> Processor | None:
    """The rates in a file's text; None if another NumPy has them."""
    kept = json.loads(text)
    if kept.pop("numpy") != np.__version__:
        return None
    core = Processor(**kept)
    by_dtype = core.matrix_flops["float32"], core.matrix_flops["float64"], *core.matrix_flops.values()
    rates = (*by_dtype, core.scalar_flops, core.exps, core.bandwidth, core.launch_seconds)
    if not all(0 < rate < math.inf for rate in rates):
        raise ValueError("rates are positive numbers")
    return core


def is_here(device: str) -> bool:
    """Whether a device is here, as far as that is known without a library of its own: of CUDA devices it is."""
    return not device.startswith("cuda") or gpu_name(device) is not None


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
    kind, number = _parsed(device)
    gpus = visible_gpus() if kind == "cuda" else ()
    if number >= len(gpus):
        return None
    known = gpu(gpus[number].name)
    if known is not None:
        return known
    said = described(gpus[number].uuid)
    return None if said is None else _derived(gpus[number].name, said)


@functools.cache
def _derived(name: str, said: Described) -> GPU | None:
    return derived(name, said.capability, said.sms, said.clock_mhz / 1e3, said.bandwidth)


def gpu_name(device: str) -> str | None:
    """Return the name of the card that ``"cuda:i"`` is, as the cost model has it; None where it is not here.

    Unlike :func:`card` it needs no rates.
    """
    kind, number = _parsed(device)
    gpus = visible_gpus() if kind == "cuda" else ()
    return card_name(gpus[number].name) if number < len(gpus) else None


def local_cards() -> tuple[GPU | None, ...]:
    """Return the cards of all CUDA devices that this process may use, ``cuda:0`` first; see :func:`card`."""
    return tuple(card(f"cuda:{i}") for i in range(len(visible_gpus())))


def card_called(name: str) -> GPU | None:
    """Return the card that a user names: one of the table of data sheets, else one that is here."""
    return gpu(name) or next((c for c in local_cards() if c is not None and same_name(c.name, name)), None)


def _parsed(device: str) -> tuple[str, int]:
    kind, _, number = device.partition(":")
    return kind, int(number or 0)
