"""The versions of software under which a result was measured, and the card's clock and load."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

import sdkde_core
from sdkde_core.choice import hardware, registry

__all__ = ["clocks", "current"]


@functools.cache
def current(backend: str) -> dict[str, str]:
    """Return the versions that a backend runs under; empty text for what is not here.

    ``source`` is a hash of the backend's Python files: outcomes of other code are measured again.
    """
    found = {"sdkde": sdkde_core.__version__, "driver": hardware.driver_version() or "", "source": _source(backend)}
    for name in "triton", "torch", "numba":
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def clocks(device: str) -> dict[str, Any]:
    """Return a card's clock (MHz), load (percent) and memory in use (MiB), or a CPU's load; empty if unknown."""
    if device == "cpu":
        load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
        return {"load_percent": 100 * load / (os.cpu_count() or 1)}
    index, gpus = int(device.partition(":")[2] or 0), hardware.visible_gpus()
    if index >= len(gpus):
        return {}

    def ask(nvml: Any) -> dict[str, Any]:
        gpu = nvml.nvmlDeviceGetHandleByUUID(gpus[index].uuid)
        return {
            "sm_mhz": nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM),
            "sm_mhz_most": nvml.nvmlDeviceGetMaxClockInfo(gpu, nvml.NVML_CLOCK_SM),
            "load_percent": nvml.nvmlDeviceGetUtilizationRates(gpu).gpu,
            "memory_mib": nvml.nvmlDeviceGetMemoryInfo(gpu).used / 2**20,
        }

    return hardware.ask_nvml(ask, {})


def _source(backend: str) -> str:
    """Return a hash of the backend's package, without importing more than the package itself."""
    record, found = registry.find(backend), 0
    if record is None or record.info is None:
        return ""
    spec = importlib.util.find_spec(record.info.implementation.partition(":")[0].partition(".")[0])
    if spec is None or not spec.origin:
        return ""
    origin = Path(spec.origin)
    for path in sorted(origin.parent.rglob("*.py")) if origin.name == "__init__.py" else [origin]:
        found = zlib.crc32(path.name.encode() + b"\0" + path.read_bytes() + b"\0", found)
    return f"{found:08x}"
