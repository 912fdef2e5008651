"""The hardware that is here, with its rates: the CPU, and the GPUs that NVIDIA's driver lists.

The driver is asked by NVML (nvidia-ml-py), not by CUDA: a forked child could not use what has been initialised in its
parent. The first look for a GPU asks, once in a process: some 30 ms beside a card, and nothing where no driver is.
"""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVar

from .cards import GPU, Processor, card_name, cores, derived, gpu, plain

_T = TypeVar("_T")

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
    if text := os.environ.get("SDKDE_NUM_THREADS"):
        if not re.fullmatch("[1-9][0-9]{0,8}", text):
            raise ValueError(f"SDKDE_NUM_THREADS is {text!r}; set a positive integer")
        return int(text)
    if _alone.get():
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu() -> Processor:
    """Return the nominal rates of a CPU with :func:`cpu_threads` threads, which are those of all together."""
    return _cores(cpu_threads())


@functools.cache
def _cores(threads: int) -> Processor:
    """Rates of a server's cores with AVX2, running NumPy on tiles in cache."""
    cores = speedup(threads)
    return Processor(
        name=f"CPU core, nominal, {threads} threads",
        matrix_flops={"float64": 21e9 * cores, "float32": 42e9 * cores},
        scalar_flops=4e9 * cores,
        exps=1.1e9 * cores,
        bandwidth=8e9 * min(threads, 4),  # a few cores saturate the memory
        launch_seconds=1e-5,
        threads=threads,
        overlaps=False,
        source="nominal",
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
    found = _gpu_of(device)
    return None if found is None else gpu(found.name) or derived(found.name, *found[2:])


def gpu_name(device: str) -> str | None:
    """Return the name of the card that ``"cuda:i"`` is, as the cost model has it; None where it is not here."""
    found = _gpu_of(device)
    return None if found is None else card_name(found.name)


def _gpu_of(device: str) -> ListedGPU | None:
    kind, _, number = device.partition(":")
    gpus = visible_gpus() if kind == "cuda" else ()
    return gpus[int(number or 0)] if int(number or 0) < len(gpus) else None


def local_cards() -> tuple[GPU | None, ...]:
    """Return the cards of all CUDA devices that this process may use, ``cuda:0`` first; see :func:`card`."""
    return tuple(card(f"cuda:{i}") for i in range(len(visible_gpus())))


def card_called(name: str) -> GPU | None:
    """Return the card that a user names: one of the table of data sheets, else one that is here."""
    return gpu(name) or next((c for c in local_cards() if c is not None and plain(c.name) == plain(name)), None)


# --- what NVIDIA's driver lists --------------------------------------------------------------------------------------


class ListedGPU(NamedTuple):
    """A GPU, or a slice of one (MIG), and what the driver says of it; 0: nothing."""

    name: str
    uuid: str
    capability: int = 0  # ten times the compute capability
    sms: int = 0  # multiprocessors
    clock_ghz: float = 0.0  # their largest clock
    bandwidth: float = 0.0  # of the memory, bytes per second


_GPUs = tuple[ListedGPU, ...]


def visible_gpus() -> tuple[ListedGPU, ...]:
    """Return the NVIDIA GPUs that this process may use, ``cuda:0`` first; empty where none is listed.

    ``CUDA_VISIBLE_DEVICES`` names those that count, and their order, as CUDA has it: by number or by the beginning of a
    UUID, up to the first that is not there. CUDA numbers cards by PCI bus with ``CUDA_DEVICE_ORDER=PCI_BUS_ID``. Its
    default is the fastest card first, and the others in an order that is not specified: here by bus.
    """
    (numbered, every, fastest), words = _listed(), os.environ.get("CUDA_VISIBLE_DEVICES")
    if fastest and os.environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        numbered = (numbered[fastest], *numbered[:fastest], *numbered[fastest + 1 :])
    if words is None:
        return numbered
    visible: list[ListedGPU] = []
    for word in map(str.strip, words.split(",")):
        if word.isdecimal():
            named = numbered[int(word) : int(word) + 1]
        else:
            named = tuple(one for one in every if word and one.uuid.startswith(word))
        if len(named) != 1 or named[0] in visible:
            break
        visible += named
    return tuple(visible)


@functools.cache
def _listed() -> tuple[_GPUs, _GPUs, int]:
    """What CUDA can show: cards by PCI bus, of a sliced one its first slice; every card and slice; the fastest."""

    def ask(nvml: Any) -> tuple[_GPUs, _GPUs, int]:
        found = [_parts(nvml, nvml.nvmlDeviceGetHandleByIndex(i)) for i in range(nvml.nvmlDeviceGetCount())]
        numbered = tuple(parts[0] for parts in found if parts)  # a sliced card may have no slice yet
        speeds = [gpu.sms * gpu.clock_ghz for gpu in numbered]
        every = tuple(one for parts in found for one in parts)
        return numbered, every, speeds.index(max(speeds)) if speeds else 0

    none: _GPUs = ()
    return ask_nvml(ask, (none, none, 0))


def _parts(nvml: Any, handle: Any) -> list[ListedGPU]:
    """What CUDA can show of a card: its slices if it is sliced, else itself.

    Memory transfers twice in a clock, by HBM as by GDDR, whose reported clock is made to fit: 2 · 9751 MHz · 384 bits
    are an RTX 3090's 936 GB/s, 2 · 1215 MHz · 5120 bits the 1555 GB/s of an A100 with 40 GB.
    """

    def ask(question: Callable[..., Any], *arguments: Any, default: Any = 0) -> Any:
        try:
            return question(*arguments)
        except nvml.NVMLError:  # it has no answer for that card
            return default

    def named(x: Any) -> tuple[str, str]:
        return nvml.nvmlDeviceGetName(x), nvml.nvmlDeviceGetUUID(x)

    major, minor = ask(nvml.nvmlDeviceGetCudaComputeCapability, handle, default=(0, 0))
    capability = 10 * major + minor
    clock, memory = (ask(nvml.nvmlDeviceGetMaxClockInfo, handle, k) for k in (nvml.NVML_CLOCK_SM, nvml.NVML_CLOCK_MEM))
    bandwidth = 2e6 * memory * ask(nvml.nvmlDeviceGetMemoryBusWidth, handle) / 8
    sms = ask(nvml.nvmlDeviceGetNumGpuCores, handle) // cores(capability)
    if not ask(nvml.nvmlDeviceGetMigMode, handle, default=(0, 0))[0]:
        return [ListedGPU(*named(handle), capability, sms, clock / 1e3, bandwidth)]
    slices = []
    for i in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        if part := ask(nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, i):
            has, whole = ask(nvml.nvmlDeviceGetAttributes, part), ask(nvml.nvmlDeviceGetMemoryInfo, handle)
            share = has.memorySizeMB * 2**20 / whole.total if has and whole else 0.0
            count = has.multiprocessorCount if has else 0
            slices.append(ListedGPU(*named(part), capability, count, clock / 1e3, share * bandwidth))
    return slices


@functools.cache
def driver_version() -> str:
    """Return the version of NVIDIA's driver; empty where there is none."""
    return ask_nvml(lambda nvml: str(nvml.nvmlSystemGetDriverVersion()), "")


def may_have_driver() -> bool:
    """Whether a driver of NVIDIA's may be here: on Linux it has devices, on WSL another one; on Macs there is none."""
    devices = ("/dev/nvidiactl", "/dev/dxg", "/dev/nvhost-gpu")
    return sys.platform != "darwin" and (sys.platform != "linux" or any(map(os.path.exists, devices)))


def ask_nvml(question: Callable[[Any], _T], default: _T) -> _T:
    """Return ``question(pynvml)``, or the default: without nvidia-ml-py, without a driver, or where NVML fails."""
    if "pynvml" not in sys.modules and not may_have_driver():  # to import it takes 10 ms
        return default
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
