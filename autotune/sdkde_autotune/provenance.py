"""Under which versions and circumstances a result came about.

A mismatch of versions lowers a stored result's rung; it never discards it.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sdkde_core.choice import registry

__all__ = ["NAMES", "clocks", "current", "same"]

#: What is compared; a result may carry more.
NAMES = ("source", "sdkde", "triton", "torch", "cuda", "driver")

_DRIVER = Path("/proc/driver/nvidia/version")


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
    found = {"source": _quietly(lambda: _source(backend)), "cuda": _quietly(_cuda), "driver": _quietly(_driver)}
    for name in ("sdkde", "triton", "torch"):
        version = _quietly(lambda name=name: importlib.metadata.version(name))
        if version:
            found[name] = version
    return found


def same(stored: Mapping[str, Any], now: Mapping[str, str]) -> bool:
    """Whether a result came about under these versions."""
    return all(stored.get(name) == now.get(name) for name in NAMES)


def clocks(device: str) -> dict[str, Any]:
    """Return the card's clock, in MHz, and what else runs there, as its driver reports it; empty where it does not."""
    index = device.partition(":")[2] or "0"
    fields = "clocks.sm,clocks.max.sm,utilization.gpu,memory.used"
    command = ["nvidia-smi", "-i", index, f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
        clock, most, load, used = (float(x) for x in answer.strip().split(","))
    except (OSError, ValueError, subprocess.SubprocessError):
        return {}
    return {"sm_mhz": clock, "sm_mhz_most": most, "load_percent": load, "memory_mib": used}


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


def _driver() -> str | None:
    found = re.search(r"\b\d+(\.\d+)+\b", _DRIVER.read_text().partition("\n")[0])
    return found and found[0]
