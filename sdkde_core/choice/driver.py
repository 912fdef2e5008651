"""What NVIDIA's driver says, by NVML (nvidia-ml-py): the GPUs that this process may use, and what each can do.

CUDA is not asked: a forked child could not use what has been initialised in its parent. NVML is asked when a GPU is
first looked for, once in a process; that takes some 30 ms beside a card, and nothing where no driver is.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from .cards import cores

_T = TypeVar("_T")


class ListedGPU(NamedTuple):
    """A GPU, or a slice of one (MIG), by the driver's name for it, and its UUID."""

    name: str
    uuid: str


class Described(NamedTuple):
    """What the driver says of a GPU or a slice, as :func:`~sdkde_core.choice.cards.derived` takes it; 0: unknown."""

    capability: int  # ten times the compute capability
    sms: int  # multiprocessors
    clock_ghz: float  # their largest clock
    bandwidth: float  # of the memory, bytes per second


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
            named = tuple(gpu for gpu in every if word and gpu.uuid.startswith(word))
        if len(named) != 1 or named[0] in visible:
            break
        visible += named
    return tuple(visible)


@functools.cache
def _listed() -> tuple[_GPUs, _GPUs, int]:
    """What CUDA can show: cards by PCI bus, of a sliced one its first slice; every card and slice; the fastest card."""
    none: _GPUs = ()
    return ask_nvml(_list, (none, none, 0))


def _list(nvml: Any) -> tuple[_GPUs, _GPUs, int]:
    cards: list[ListedGPU] = []
    every: list[ListedGPU] = []
    handles: list[Any] = []
    for i in range(nvml.nvmlDeviceGetCount()):
        handle = nvml.nvmlDeviceGetHandleByIndex(i)
        parts = [handle]
        if _or_nothing(nvml, nvml.nvmlDeviceGetMigMode, handle, default=(0, 0))[0]:  # is sliced
            places = range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle))
            parts = [_or_nothing(nvml, nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, j) for j in places]
        found = [ListedGPU(nvml.nvmlDeviceGetName(x), nvml.nvmlDeviceGetUUID(x)) for x in parts if x]
        if found:  # a sliced card may have no slice yet
            cards, every, handles = [*cards, found[0]], [*every, *found], [*handles, handle]
    fastest = 0
    if len({gpu.name for gpu in cards}) > 1:
        speeds = [said.sms * said.clock_ghz for said in (_describe(handle, nvml) for handle in handles)]
        fastest = speeds.index(max(speeds))
    return tuple(cards), tuple(every), fastest


@functools.cache
def described(uuid: str) -> Described | None:
    """Return what the driver says of the GPU or slice with a UUID; None where it says nothing."""

    def ask(nvml: Any) -> Described:
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        if not uuid.startswith("MIG-"):
            return _describe(handle, nvml)
        part = nvml.nvmlDeviceGetAttributes(handle)
        card = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
        whole, share = _describe(card, nvml), part.memorySizeMB * 2**20 / nvml.nvmlDeviceGetMemoryInfo(card).total
        return whole._replace(sms=part.multiprocessorCount, bandwidth=share * whole.bandwidth)

    return ask_nvml(ask, None)


def _describe(handle: Any, nvml: Any) -> Described:
    """What NVML says of a whole card.

    Memory transfers twice in a clock, by HBM as by GDDR, whose reported clock is made to fit: 2 · 9751 MHz · 384 bits
    are an RTX 3090's 936 GB/s, 2 · 1215 MHz · 5120 bits the 1555 GB/s of an A100 with 40 GB.
    """
    ask = functools.partial(_or_nothing, nvml)
    major, minor = ask(nvml.nvmlDeviceGetCudaComputeCapability, handle, default=(0, 0))
    capability = 10 * major + minor
    clock, memory = (ask(nvml.nvmlDeviceGetMaxClockInfo, handle, k) for k in (nvml.NVML_CLOCK_SM, nvml.NVML_CLOCK_MEM))
    bandwidth = 2e6 * memory * ask(nvml.nvmlDeviceGetMemoryBusWidth, handle) / 8
    sms = ask(nvml.nvmlDeviceGetNumGpuCores, handle) // cores(capability)
    return Described(capability, sms, clock / 1e3, bandwidth)


def _or_nothing(nvml: Any, question: Callable[..., Any], *arguments: Any, default: Any = 0) -> Any:
    """An answer of NVML's, or the default where it has none for that card."""
    try:
        return question(*arguments)
    except nvml.NVMLError:
        return default


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
