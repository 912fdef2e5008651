"""The report of ``sdkde doctor``: the environment, versions, devices, and a probe of each backend."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .. import __version__
from ..choice import hardware, registry


def sections() -> Iterator[tuple[str, Sequence[Sequence[str]]]]:
    """Yield each section of the report: its title, and rows of cells."""
    variables = [(name, value) for name, value in sorted(os.environ.items()) if name.startswith("SDKDE_")]
    python = f"{platform.python_version()} at {sys.executable}"
    here = [("sdkde", f"{__version__} in {Path(__file__).parent.parent}"), ("python", python)]
    yield "environment", [*here, ("platform", platform.platform()), *(variables or [("SDKDE_*", "no variable set")])]
    versions = []
    for name in (
        *("numpy", "array-api-compat", "threadpoolctl", "click", "platformdirs", "nvidia-ml-py"),
        *("torch", "triton", "numba", "numba-cuda", "cuda-core", "pykeops", "finufft", "optuna", "pyarrow"),
    ):
        try:
            versions.append((name, importlib.metadata.version(name)))  # which imports nothing
        except importlib.metadata.PackageNotFoundError:
            versions.append((name, "not installed"))
    yield "versions", versions
    cpu, failure = registry.ask(hardware.cpu)
    devices = [("cpu", failure)]  # SDKDE_NUM_THREADS
    if not failure:
        rates = f"{cpu.matrix_flops['float32'] / 1e9:.3g} GFLOP/s in float32, {cpu.exps / 1e9:.3g} G exp/s"
        devices = [("cpu", cpu.name), ("", f"{rates}, {cpu.bandwidth / 1e9:.3g} GB/s"), ("", cpu.source)]
    yield "devices", [*devices, *_gpus()]
    rows = []
    for record in registry.records():
        rows.append((record.name, "-", record.status, record.reason))
        if record.ok and record.info is not None:
            for device in record.info.devices:
                _, support = registry.start(record.info, device if device == "cpu" else f"{device}:0")
                rows.append((record.name, device, "works" if support.ok else "no", support.reason))
    yield "backends", rows


def _gpus() -> list[tuple[str, str]]:
    rows = []
    for i, (name, uuid, *_) in enumerate(hardware.visible_gpus()):

        def size(nvml: Any, uuid: str = uuid) -> str:
            return f"{nvml.nvmlDeviceGetMemoryInfo(nvml.nvmlDeviceGetHandleByUUID(uuid)).total / 2**30:.1f} GiB"

        memory = hardware.ask_nvml(size, "memory not known: pip install nvidia-ml-py")
        card = hardware.card(f"cuda:{i}")
        rows.append((f"cuda:{i}", f"{name}, driver {hardware.driver_version()}, {memory}"))
        rows.append(("", f"rates: {card.source}" if card else "rates not known: no predicted times"))
    unseen = hardware.may_have_driver() and importlib.util.find_spec("pynvml") is None
    return rows or [("gpu", "none found" + "; those of NVIDIA need: pip install nvidia-ml-py" * unseen)]
