"""The hardware that is here: the CPU with its rates, and the GPUs that the driver lists."""

from __future__ import annotations

import functools
import json
import math
import os
import platform
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from ..fresh import run_python
from ..messages import warn_once
from ..storage import cache_folder, write_atomically
from .cards import Processor, gpu

__all__ = [
    "ListedGPU",
    "ask_nvml",
    "cpu",
    "cpu_cache_file",
    "cpu_threads",
    "driver_version",
    "is_here",
    "local_gpus",
    "measure_cpu",
    "processor",
    "speedup",
    "visible_gpus",
]

_T = TypeVar("_T")

#: Where the Linux driver publishes what it knows.
PROC = Path("/proc/driver/nvidia")


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
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


#: Rates of one core, for a CPU that has not been measured: a server core with AVX2, running NumPy on tiles in cache.
NOMINAL_CORE = Processor(
    name="CPU core, nominal",
    matrix_flops={"float64": 25e9, "float32": 50e9},
    scalar_flops=6e9,
    exps=1.6e9,
    bandwidth=10e9,
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


def speedup(threads: int) -> float:
    """Return how many times as fast as one thread ``threads`` are, t / (1 + (t − 1)/16): they share caches and clock.

    Measured with compiled loops on 16 virtual cores of a Xeon: 1.9 for 2, 3.5 for 4, 6.0 for 8, 7.5 for 16.
    """
    return threads / (1 + (threads - 1) / 16)


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


class ListedGPU(NamedTuple):
    """A GPU by the driver's name for it, and its UUID."""

    name: str
    uuid: str


def local_gpus(root: Path = PROC) -> tuple[str, ...]:
    """Return the driver's names of the NVIDIA GPUs that this process may use; see :func:`visible_gpus`."""
    return tuple(gpu.name for gpu in visible_gpus(root))


def visible_gpus(root: Path = PROC) -> tuple[ListedGPU, ...]:
    """Return the NVIDIA GPUs that this process may use, ``cuda:0`` first; empty where none is listed.

    Of those that the driver lists, ``CUDA_VISIBLE_DEVICES`` names the ones that count, and their order, as CUDA has it:
    by number or by the beginning of a UUID, up to the first that is not listed (a MIG slice never is). The driver lists
    by PCI bus. CUDA numbers so with ``CUDA_DEVICE_ORDER=PCI_BUS_ID``; its default is the fastest first, then by bus,
    which differs where the cards do.
    """
    gpus, chosen = _listed_gpus(root), os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return gpus
    visible: list[ListedGPU] = []
    for word in map(str.strip, chosen.split(",")):
        if word.isdecimal():
            found = gpus[int(word) :][:1]
        else:
            found = tuple(gpu for gpu in gpus if word and gpu.uuid.startswith(word))
        if len(found) != 1 or found[0] in visible:
            break
        visible += found
    return tuple(visible)


@functools.cache
def _listed_gpus(root: Path) -> tuple[ListedGPU, ...]:
    """What the Linux driver publishes as text, in a millisecond; elsewhere (Windows, WSL) NVML knows.

    NVML takes 130 ms in a fresh process beside an H100, and wakes cards that sleep.
    """
    gpus = []
    for path in sorted(root.glob("gpus/*/information")):
        text = path.read_text()
        name, uuid = (re.search(rf"^{field}:\s*(.+?)\s*$", text, re.MULTILINE) for field in ("Model", "GPU UUID"))
        gpus.append(ListedGPU(name[1] if name else "unknown", uuid[1] if uuid else path.parent.name))
    return tuple(gpus) or ask_nvml(_gpus_of_nvml, ())


def _gpus_of_nvml(nvml: Any) -> tuple[ListedGPU, ...]:
    handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
    return tuple(ListedGPU(nvml.nvmlDeviceGetName(gpu), nvml.nvmlDeviceGetUUID(gpu)) for gpu in handles)


@functools.cache
def driver_version(root: Path = PROC) -> str:
    """Return the version of NVIDIA's driver; empty where there is none."""
    try:
        found = re.search(r"\b\d+(\.\d+)+\b", (root / "version").read_text().partition("\n")[0])
    except OSError:
        return ask_nvml(lambda nvml: str(nvml.nvmlSystemGetDriverVersion()), "")
    return found[0] if found else ""


def ask_nvml(question: Callable[[Any], _T], default: _T) -> _T:
    """Return ``question(pynvml)``, or the default: without nvidia-ml-py, without a driver, or where NVML fails."""
    try:
        import pynvml
    except ImportError:
        return default
    try:
        pynvml.nvmlInit()
        try:
            return question(pynvml)
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return default


def is_here(device: str) -> bool:
    """Whether a device is here, as far as that is known without a library of its own: of CUDA devices it is."""
    kind, _, index = device.partition(":")
    return kind != "cuda" or int(index or 0) < len(visible_gpus())


def processor(device: str) -> Processor | None:
    """Return the rates for ``"cpu"`` or ``"cuda:i"``; None where they are not known."""
    if device == "cpu":
        return cpu()
    kind, _, index = device.partition(":")
    names = local_gpus() if kind == "cuda" else ()
    number = int(index or 0)
    return _card(names[number]) if number < len(names) else None


@functools.cache
def _card(name: str) -> Processor | None:
    card = gpu(name)
    return None if card is None else card.at()
