"""What NVIDIA's driver says: the GPUs that it lists, and those that CUDA shows this process, in CUDA's order."""

from __future__ import annotations

import functools
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from ..fresh import run_python

__all__ = ["PROC", "CudaDevice", "ListedGPU", "ask_nvml", "cuda_devices", "driver_version", "visible_gpus"]

_T = TypeVar("_T")

#: Where the Linux driver publishes what it knows.
PROC = Path("/proc/driver/nvidia")

#: Seconds after which CUDA is not waited for: it wakes every card, in seconds where there are many.
PATIENCE = 30.0


class ListedGPU(NamedTuple):
    """A GPU by the driver's name for it, and its UUID."""

    name: str
    uuid: str


class CudaDevice(NamedTuple):
    """A device as CUDA describes it; 0: not known.

    Parameters
    ----------
    name, uuid : str
        Of a MIG slice its own.
    sms : int
        Multiprocessors.
    clock_khz, memory_khz : int
        The boost clock of data sheets, which cards exceed (an RTX 4090: 2520 MHz, where NVML's largest is 3105), and
        half the rate at which a bit of the memory bus is transferred.
    bus_bits : int
    major, minor : int
        Compute capability.
    """

    name: str
    uuid: str
    sms: int
    clock_khz: int
    memory_khz: int
    bus_bits: int
    major: int
    minor: int

    @property
    def bandwidth(self) -> float:
        """Bytes per second of its memory.

        Twice the clock times the bus, for HBM as for GDDR, whose reported clock is made to fit: 2 · 9751 MHz · 384 bits
        are an RTX 3090's 936 GB/s, 2 · 1215 MHz · 5120 bits the 1555 GB/s of an A100 with 40 GB.
        """
        return 2e3 * self.memory_khz * self.bus_bits / 8


def visible_gpus(root: Path = PROC) -> tuple[ListedGPU, ...]:
    """Return the NVIDIA GPUs that this process may use, ``cuda:0`` first; empty where none is listed.

    Of those that the driver lists, ``CUDA_VISIBLE_DEVICES`` names the ones that count, and their order, as CUDA has it:
    by number or by the beginning of a UUID, up to the first that is not listed. The driver lists by PCI bus. CUDA
    numbers so with ``CUDA_DEVICE_ORDER=PCI_BUS_ID``; its default is the fastest first, which is another order where the
    cards differ. There, and where cards are sliced (MIG), CUDA is asked; if it does not answer the list has to do.
    """
    listed, words = _listed_gpus(root), os.environ.get("CUDA_VISIBLE_DEVICES")
    chosen = None if words is None else [word.strip() for word in words.split(",")]
    if listed and _only_cuda_knows(listed, chosen, root):
        devices = cuda_devices()
        if devices is not None:
            return tuple(ListedGPU(device.name, device.uuid) for device in devices)
    if chosen is None:
        return listed
    visible: list[int] = []
    for word in chosen:
        if word.isdecimal():
            found = [int(word)] if int(word) < len(listed) else []
        else:
            found = [i for i, gpu in enumerate(listed) if word and gpu.uuid.startswith(word)]
        if len(found) != 1 or found[0] in visible:
            break
        visible += found
    return tuple(listed[i] for i in visible)


def _only_cuda_knows(listed: tuple[ListedGPU, ...], chosen: list[str] | None, root: Path) -> bool:
    """Whether the list does not tell which devices CUDA shows, or in which order."""
    if _sliced(root) or any(word.startswith("MIG-") for word in chosen or ()):
        return True
    if any("?" in gpu.uuid for gpu in listed) and any(word.startswith("GPU-") for word in chosen or ()):
        return True  # the driver publishes no UUID of a card that nobody has used yet
    numbered = chosen is None or any(word.isdecimal() for word in chosen)
    by_bus = os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    return numbered and not by_bus and len({gpu.name for gpu in listed}) > 1


@functools.cache
def _sliced(root: Path) -> bool:
    """Whether any card is sliced, as the Linux driver publishes it."""
    return any(root.glob("capabilities/gpu*/mig/gi*"))


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


def cuda_devices() -> tuple[CudaDevice, ...] | None:
    """Return what CUDA shows a process with this one's environment, ``cuda:0`` first; None where it does not answer.

    A process of its own asks, in some tenths of a second, once: see :mod:`sdkde_core.choice.cuda_devices`.
    """
    return _cuda_devices(os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ.get("CUDA_DEVICE_ORDER"))


@functools.cache
def _cuda_devices(chosen: str | None, order: str | None) -> tuple[CudaDevice, ...] | None:
    if getattr(sys, "frozen", False):  # an application that has Python within itself would start itself again
        return None
    code = "import runpy, sys; runpy.run_path(sys.argv[1], run_name='__main__')"
    program = str(Path(__file__).with_name("cuda_devices.py"))
    try:
        done = run_python(code, program, capture_output=True, timeout=PATIENCE, check=True)
        return tuple(CudaDevice(*device) for device in json.loads(done.stdout.splitlines()[-1]))
    except Exception:  # no driver, one that does not answer, or no interpreter to ask it with
        return None


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
