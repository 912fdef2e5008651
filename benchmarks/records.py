"""Records of runs: lines of JSON, appended as they are measured, under a line that says where."""

from __future__ import annotations

import functools
import json
import os
import platform
import time
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

__all__ = ["Record", "Run", "about", "append", "machine", "read"]

#: Packages whose versions a record has, if they are installed.
PACKAGES = (
    "sdkde-core", "numpy", "scipy", "scikit-learn", "numba", "numba-cuda", "finufft", "torch", "triton", "pykeops",
    "cuda-core", "flash-sd-kde", "KDEpy", "mlpack", "statsmodels", "threadpoolctl",
)  # fmt: skip

#: What may not differ within a file.
PLACE = ("cpu", "cores", "gpu", "device", "scale")


class Record(NamedTuple):
    """A case, what was measured (or ``skipped`` or ``failed``: why), and what is known of the run."""

    case: dict[str, Any]
    result: dict[str, Any]
    about: dict[str, Any]

    @property
    def row(self) -> dict[str, Any]:
        """Case and result in one."""
        return self.case | self.result

    @property
    def ok(self) -> bool:
        return not {"skipped", "failed"} & set(self.result)


class Run:
    """The file of a benchmark: what is measured already, and where the next record goes.

    Raises
    ------
    ValueError
        The file has records of another machine, device or scale.
    """

    def __init__(self, path: Path, here: dict[str, Any]) -> None:
        self.path, self._here = path, here
        before = read(path) if path.exists() else []
        for record in before:
            if other := [key for key in PLACE if record.about.get(key) != here[key]]:
                was = ", ".join(f"{key} {record.about.get(key)!r}, here {here[key]!r}" for key in other)
                raise ValueError(f"{path} has records of another run ({was}); name another folder with --to")
        self._results = {_key(record.case): record for record in before}
        self._begun = False

    def has(self, case: dict[str, Any], again: bool = False) -> bool:
        """Whether a case was measured, or failed; with ``again`` the latter does not count."""
        record = self._results.get(_key(case))
        return record is not None and (record.ok or ("failed" in record.result and not again))

    def add(self, case: dict[str, Any], result: dict[str, Any]) -> None:
        """Append a record; before the first of this run, what is known of the run."""
        if not self._begun:
            append(self.path, {"about": self._here})
            self._begun = True
        append(self.path, {"case": case, "result": result})


def append(path: Path, line: dict[str, Any]) -> None:
    """Append a line; one that was cut off before stays one of its own."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torn = path.exists() and path.read_bytes()[-1:] not in (b"", b"\n")
    with path.open("a", encoding="utf-8") as file:
        file.write("\n" * torn + json.dumps(line, default=_plain) + "\n")


def read(path: Path) -> list[Record]:
    """The latest record of every case, in the order of the first; lines that were cut off are left out."""
    found: dict[str, Record] = {}
    about: dict[str, Any] = {}
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            continue
        about = line.get("about", about)
        if "case" in line:
            found[_key(line["case"])] = Record(line["case"], line["result"], about)
    return list(found.values())


def about(device: str, scale: str) -> dict[str, Any]:
    """What is known of a run: machine, GPU and versions; nothing that names the machine."""
    when = time.strftime("%Y-%m-%d", time.gmtime())
    return machine() | _gpu(device) | {"device": device, "scale": scale, "versions": _versions(), "when": when}


@functools.cache
def machine() -> dict[str, Any]:
    """The processor, its cores, its widest instructions, Python, NumPy and what multiplies matrices."""
    from threadpoolctl import threadpool_info

    model, flags = platform.processor() or platform.machine(), ""
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as file:
            for line in file:
                key, _, value = line.partition(":")
                model = value.strip() if key.strip() == "model name" else model
                flags = value if key.strip() == "flags" else flags
    blas = [f"{b['internal_api']} {b['version']} ({b.get('architecture', '?')})" for b in threadpool_info()]
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "widest instructions": next((f for f in ("avx512f", "avx2", "avx") if f in flags.split()), "?"),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "blas": blas,
    }


def _gpu(device: str) -> dict[str, Any]:
    if not device.startswith("cuda"):
        return {"gpu": None}
    import torch

    from sdkde_core.choice import hardware

    return {"gpu": torch.cuda.get_device_name(device), "driver": hardware.driver_version(), "cuda": torch.version.cuda}


@functools.cache
def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _key(case: dict[str, Any]) -> str:
    return json.dumps(case, sort_keys=True, default=_plain)


def _plain(value: Any) -> Any:
    """NumPy's numbers and arrays as JSON has them."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if isinstance(value, Iterable):
        return list(value)
    raise TypeError(f"{type(value).__name__} in a record")
