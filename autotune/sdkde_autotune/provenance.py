"""The versions of software under which a result was measured, and the card's clock and load.

A result of other versions is still used, but only if there is none of the present ones.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import re
import zlib
from collections.abc import Iterator, Mapping
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
            return _constant(name, "__version__").partition("+")[0]  # after it PyTorch names its CUDA, an entry below
        if name == "source":
            return _source(backend)
        return _constant("torch", "cuda") if name == "cuda" else hardware.driver_version()
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
    point = next(_points(backend), None)
    files = _files(point.load().implementation.partition(":")[0]) if point else {}
    found = 0  # hashlib takes 5 ms to load, and nobody wants to deceive us
    for name, path in sorted(files.items()):
        found = zlib.crc32(f"{name}\0".encode() + path.read_bytes() + b"\0", found)
    return f"{found:08x}" if files else ""


def _points(backend: str) -> Iterator[importlib.metadata.EntryPoint]:
    """Yield a backend's entry points, sdkde's own first, as the registry has them, which loads every plugin."""
    for own in importlib.metadata.Distribution.discover(name="sdkde-core"):
        yield from own.entry_points.select(group=registry.GROUP, name=backend)
    yield from importlib.metadata.entry_points(group=registry.GROUP, name=backend)  # takes 3 ms more


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


#: Constants of a module that are texts.
_TEXTS = re.compile(r"^(\w+)[^=\n]*=\s*['\"]([^'\"\n]+)", re.MULTILINE)


def _constant(package: str, name: str) -> str:
    """Return a text in a package's version.py, else in its __init__.py; empty if there is none.

    To import PyTorch takes seconds, and to look through all that is installed for a version milliseconds.
    """
    spec = importlib.util.find_spec(package)
    for path in (Path(spec.origin).with_name("version.py"), Path(spec.origin)) if spec and spec.origin else ():
        if path.exists():
            found = dict(_TEXTS.findall(path.read_text(encoding="utf-8")))
            if name in found:
                return found[name]
    return ""
