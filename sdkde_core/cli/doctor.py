"""What ``sdkde doctor`` reports: the environment, versions, devices, and a probe of each backend."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

from .. import __version__
from ..choice import cards, hardware, registry
from ..choice.select import as_support, ask
from ..protocol import BackendInfo, Support

__all__ = ["backends", "devices", "environment", "versions"]

#: Distributions that ``sdkde doctor`` lists, by name, importing none.
DISTRIBUTIONS = (
    *("numpy", "array-api-compat", "threadpoolctl", "click"),
    *("torch", "triton", "numba", "numba-cuda", "pykeops", "optuna", "pyarrow"),
)


def environment() -> list[tuple[str, str]]:
    """sdkde, Python, the platform, and the variables that sdkde reads."""
    rows = [
        ("sdkde", f"{__version__} in {Path(__file__).parent}"),
        ("python", f"{platform.python_version()} at {sys.executable}"),
        ("platform", platform.platform()),
    ]
    variables = [(name, value) for name, value in sorted(os.environ.items()) if name.startswith("SDKDE_")]
    return rows + (variables or [("SDKDE_*", "no variable set")])


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def versions() -> list[tuple[str, str]]:
    """The distributions that sdkde can use, importing none."""
    return [(name, _version(name)) for name in DISTRIBUTIONS]


def backends() -> list[tuple[str, str, str, str]]:
    """Every plugin's record, and a probe of each of its kinds of device: name, device, verdict, reason."""
    rows = []
    for record in registry.records():
        rows.append((record.name, "-", record.status, record.reason))
        if record.ok and record.info is not None:
            for device in record.info.devices:
                support = _probe(record.info, device)
                rows.append((record.name, device, "works" if support.ok else "no", support.reason))
    return rows


def devices() -> list[tuple[str, str]]:
    """The CPU with its rates, and the GPUs that the driver lists."""
    cpu, failure = ask(hardware.cpu)
    if failure:  # SDKDE_NUM_THREADS
        return [("cpu", failure), *_gpus()]
    rates = f"{cpu.matrix_flops['float32'] / 1e9:.3g} GFLOP/s in float32, {cpu.exps / 1e9:.3g} G exp/s"
    return [("cpu", cpu.name), ("", f"{rates}, {cpu.bandwidth / 1e9:.3g} GB/s"), ("", cpu.source), *_gpus()]


def _gpus() -> list[tuple[str, str]]:
    """Ask the driver's own tool: importing a GPU library takes seconds."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return [("gpu", "none found (there is no nvidia-smi)")]
    query = [tool, "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        printed = subprocess.run(query, capture_output=True, text=True, check=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return [("gpu", f"none found ({error})")]
    rows = []
    for i, line in enumerate(filter(None, printed.splitlines())):
        name, *rest = (part.strip() for part in line.split(","))
        known = "rates known" if cards.gpu(name) else "rates not known: no predicted times"
        rows.append(
            (f"cuda:{i}", ", ".join((name, *(f"driver {x}" if k == 0 else x for k, x in enumerate(rest)), known)))
        )
    return rows or [("gpu", "none found")]


def _probe(info: BackendInfo, device: str) -> Support:
    """Whether a backend works on a kind of device, here and now, whatever it raises."""
    backend, failure = ask(info.load)
    if failure:
        return Support(False, f"does not load: {failure}")
    answer, failure = ask(backend.probe, device if device == "cpu" else f"{device}:0")
    return Support(False, f"its probe failed: {failure}") if failure else as_support(answer)
