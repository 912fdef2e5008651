"""Whether KeOps compiles and runs here, found out in a process of its own: with some compilers it crashes.

The answer is kept in the process, and a good one on disk by all that it depends on, so that few processes pay for it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from sdkde_core.plugin import new_lock, run_python, write_atomically
from sdkde_core.protocol import Support

from . import library

__all__ = ["check"]

#: Seconds that the check may take: it compiles once or twice, on a machine that may be busy.
PATIENCE = 240.0

CODE = "import sys; from sdkde_keops import formulas; formulas.trial(sys.argv[1])"

#: What KeOps reads of the environment.
VARIABLES = (
    *("CXX", "CXXFLAGS", "CUDA_PATH", "CUDA_HOME", "CONDA_PREFIX", "CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH"),
    "KEOPS_CACHE_FOLDER",
)

_lock = new_lock()


def check(device: str) -> Support:
    """Say whether KeOps works on ``device``, ``"cpu"`` or ``"cuda:0"``."""
    with _lock:  # threads that ask at once wait for one answer
        return _check(device)


@functools.cache
def _check(device: str) -> Support:
    about = _depends_on(device)
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:20]
    kept = library.folder() / f"health-{digest}.json"
    found = _read(kept)
    if found is None:
        found = _try(device, about["compiler"])
        if found.ok:  # a failure may be mended by what the answer is not kept by
            _write(kept, found, about)
    return found


def _engines() -> dict[str, int]:
    """What KeOps built once for all formulas on GPUs, by when: built by another compiler, it needs another check."""
    files = sorted(library.keops_folder().glob("*/*nvrtc*"))
    return {str(path): path.stat().st_mtime_ns for path in files if path.suffix == ".so"}


def _depends_on(device: str) -> dict[str, Any]:
    """What the answer is kept by."""
    compiler = library.compiler()
    stat = os.stat(compiler) if compiler else None
    return {
        "versions": {
            name: importlib.metadata.version(name) for name in ("pykeops", "keopscore", "torch", "sdkde-core")
        },
        "python": [sys.executable, platform.python_version(), platform.platform()],
        "compiler": compiler,
        "compiler file": [os.path.realpath(compiler), stat.st_size, stat.st_mtime_ns] if compiler and stat else None,
        "device": device if device == "cpu" else f"{device} {torch.cuda.get_device_name(device)}",
        "environment": {name: os.environ.get(name) for name in VARIABLES},
    }


def _try(device: str, compiler: str) -> Support:
    """Run the trial; a failure says its cause, and what mends it."""
    environment = {k: v for k, v in os.environ.items() if k not in ("KEOPS_VERBOSE", "PYKEOPS_VERBOSE")}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "errors": "replace"}
    try:
        done = run_python(CODE, device, env=environment, timeout=PATIENCE, **pipes)
    except subprocess.TimeoutExpired:
        return _failure(device, compiler, f"it was not done after {PATIENCE:g} s", "")
    except OSError as error:
        return _failure(device, compiler, f"{sys.executable} does not start: {error}", "")
    if done.returncode == 0:
        return Support(True, f"KeOps compiles and runs on {device} with {compiler}")
    cause = f"it ended with status {done.returncode}"
    if done.returncode < 0:
        cause = f"it was ended by {signal.Signals(-done.returncode).name}"
    return _failure(device, compiler, cause, done.stdout)


def _unwritable() -> OSError | None:
    """Why KeOps's folder, or one in it, takes no file; None if all do."""
    folder = library.keops_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for place in (folder, *(path for path in folder.iterdir() if path.is_dir())):
            with tempfile.TemporaryFile(dir=place) as file:
                file.write(bytes(1 << 16))
    except OSError as error:
        return error
    return None


def _failure(device: str, compiler: str, cause: str, printed: str) -> Support:
    fault = _unwritable()
    if fault is not None:
        return Support(
            False,
            f"KeOps does not work on {device}: it keeps what it compiles in {library.keops_folder()}, which cannot be "
            f"written ({fault}). Make it so, or set KEOPS_CACHE_FOLDER to another folder before KeOps is imported",
        )
    last = [line.strip() for line in printed.splitlines() if line.strip()][-4:]
    said = f", saying: {' | '.join(last)[-600:]}" if last else ""
    remedy = "set CXX to the system's own g++ (one no newer than its libstdc++)"
    if device != "cpu":
        remedy += ", and CUDA_PATH to the CUDA toolkit, which has include/cuda.h and include/nvrtc.h"
    remedy += f"; then delete {library.keops_folder()}, where KeOps keeps what the other compiler built"
    return Support(
        False,
        f"KeOps does not work on {device}: a trial in a process of its own failed. Cause: with the compiler {compiler} "
        f"{cause}{said}. Remedy: {remedy}",
    )


def _read(path: Path) -> Support | None:
    try:
        kept = json.loads(path.read_text())
        return Support(True, str(kept["reason"])) if kept["engines"] == _engines() else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(path: Path, found: Support, about: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # nowhere to write: every process finds out for itself
        path.parent.mkdir(parents=True, exist_ok=True)
        with write_atomically(path) as temporary:
            temporary.write_text(json.dumps({"reason": found.reason, "engines": _engines(), **about}, indent=1))
