"""The versions of software under which a result was measured, and the card's clock and load.

A result of other versions is still used, but only if there is none of the present ones.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import sdkde_core
from sdkde_core.choice import hardware, registry

__all__ = ["NAMES", "clocks", "current", "same"]

#: The entries that are compared; a result may have more.
NAMES = ("sdkde", "cuda", "triton", "torch", "source", "driver")


def current(backend: str) -> dict[str, str]:
    """Return the versions that a backend runs under in this process. Never raises; each is asked once.

    ``source`` is a hash of the backend's Python files, ``cuda`` is what PyTorch was built with. Empty: not found.
    """
    return {name: _version(name, backend) for name in NAMES}


def same(stored: Mapping[str, Any], backend: str) -> bool:
    """Whether a stored result is of the present versions; what takes long to find out is asked last."""
    return all(stored.get(name, "") == _version(name, backend) for name in NAMES)


@functools.cache
def _version(name: str, backend: str) -> str:
    try:
        if name == "sdkde":
            return sdkde_core.__version__
        if name in ("triton", "torch"):
            return importlib.metadata.version(name)
        if name == "source":
            return _source(backend)
        return _cuda() or "" if name == "cuda" else hardware.driver_version()
    except Exception:  # looking for a package may run its code, which may raise anything
        return ""


def clocks(device: str) -> dict[str, Any]:
    """Return a card's clock (MHz), load (percent) and memory in use (MiB); empty without NVML."""
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
    import hashlib  # takes milliseconds

    # Not from the registry, which loads every plugin.
    for point in importlib.metadata.entry_points(group=registry.GROUP, name=backend):
        files = _files(point.load().implementation.partition(":")[0])
        digest = hashlib.sha256()
        for name, path in sorted(files.items()):
            digest.update(f"{name}\0".encode() + path.read_bytes() + b"\0")
        return digest.hexdigest()[:16] if files else ""
    return ""


def _files(module: str) -> dict[str, Path]:
    """Return the Python files of a module's package by name, without importing it."""
    top, *rest = module.split(".")
    spec = importlib.util.find_spec(top)
    if spec is None:
        return {}
    for folder in map(Path, spec.submodule_search_locations or ()):
        package = folder.joinpath(*rest[:-1])
        files = {path.relative_to(package).as_posix(): path for path in package.rglob("*.py")}
        if files:
            return files
    return {f"{top}.py": Path(spec.origin)} if spec.origin and not rest else {}


def _cuda() -> str | None:
    torch = sys.modules.get("torch")
    if torch is not None:
        return torch.version.cuda
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    text = Path(spec.origin).with_name("version.py").read_text()  # to import torch takes seconds
    found = re.search(r"^cuda\b[^=\n]*=\s*['\"]([^'\"]+)", text, re.MULTILINE)
    return found and found[1]
