"""The versions of software under which a result was measured, and the card's clock and load.

A result of other versions is still used, but only if there is none of the present ones.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sdkde_core.choice import hardware, registry

__all__ = ["NAMES", "clocks", "current", "same"]

#: The entries that are compared; a result may have more.
NAMES = ("source", "sdkde", "triton", "torch", "cuda", "driver")


@functools.cache
def current(backend: str) -> Mapping[str, str]:
    """Return the versions that a backend runs under in this process. Never raises; asked once per backend.

    Parameters
    ----------
    backend : str
        As the registry knows it.

    Returns
    -------
    mapping of str to str
        ``source``, a hash of the backend's Python files; the versions of ``sdkde``, ``triton`` and ``torch`` that are
        installed; ``cuda``, with which PyTorch was built; ``driver``. Empty strings: not found.
    """
    asked = {"source": lambda: _source(backend), "cuda": _cuda, "driver": hardware.driver_version}
    found = {name: _quietly(ask) for name, ask in asked.items()}
    for name, distribution in (("sdkde", "sdkde-core"), ("triton", "triton"), ("torch", "torch")):
        version = _quietly(lambda distribution=distribution: importlib.metadata.version(distribution))
        if version:
            found[name] = version
    return found


def same(stored: Mapping[str, Any], now: Mapping[str, str]) -> bool:
    """Whether a stored result is of these versions."""
    return all(stored.get(name) == now.get(name) for name in NAMES)


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


def _quietly(ask: Any) -> str:
    try:
        return str(ask() or "")
    except Exception:  # looking for a package may run its code, which may raise anything
        return ""


def _source(backend: str) -> str:
    record = registry.find(backend)
    if record is None or record.info is None:
        return ""
    files = _files(record.info.implementation.partition(":")[0])
    digest = hashlib.sha256()
    for name, path in sorted(files.items()):
        digest.update(f"{name}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16] if files else ""


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
