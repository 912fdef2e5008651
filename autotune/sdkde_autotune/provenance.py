"""Under which versions and circumstances a result came about.

A mismatch of versions lowers a stored result's rung; it never discards it.
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

#: What is compared; a result may carry more.
NAMES = ("source", "sdkde", "triton", "torch", "cuda", "driver")


@functools.cache
def current(backend: str) -> Mapping[str, str]:
    """Return the versions that a backend runs under, here and now. Never raises; read once per process and backend.

    Parameters
    ----------
    backend : str
        As the registry knows it.

    Returns
    -------
    mapping of str to str
        ``source``, a hash of the backend's Python files; the versions of ``sdkde``, ``triton`` and ``torch``, as far as
        they are installed; ``cuda``, which torch was built with; ``driver``. Empty strings stand for what is not there.
    """
    asked = {"source": lambda: _source(backend), "cuda": _cuda, "driver": hardware.driver_version}
    found = {name: _quietly(ask) for name, ask in asked.items()}
    for name, distribution in (("sdkde", "sdkde-core"), ("triton", "triton"), ("torch", "torch")):
        version = _quietly(lambda distribution=distribution: importlib.metadata.version(distribution))
        if version:
            found[name] = version
    return found


def same(stored: Mapping[str, Any], now: Mapping[str, str]) -> bool:
    """Whether a result came about under these versions."""
    return all(stored.get(name) == now.get(name) for name in NAMES)


def clocks(device: str) -> dict[str, Any]:
    """Return the clock of a card, in MHz, and what else runs there; empty where NVML is not there to say."""
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
    except Exception:  # whatever a stranger's package does when it is looked for
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
    """The Python files of the package that a module is in, by name. Imports none of its parents."""
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
