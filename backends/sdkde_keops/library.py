"""KeOps as a library: imported quietly, tried in another process, and building one formula at a time."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import filelock
import torch

from sdkde_core.plugin import cache_folder, in_child, new_lock, run_python
from sdkde_core.protocol import Support

#: KeOps keeps the arguments of a call in an object that all calls of a formula share.
_calls, _trials = new_lock(threading.RLock), new_lock()

# In a forked child PyTorch's OpenMP would wait for threads that are not there.
in_child(lambda: torch.set_num_threads(1))


def compiler() -> str | None:
    """Return the path of the compiler that KeOps will take, by its own rule; None where there is none."""
    names = ["g++"] if platform.system() != "Darwin" else ["clang++", "g++"]
    return next(filter(None, map(shutil.which, [os.environ.get("CXX", ""), *names])), None)


def _ours(name: str) -> Path:
    return cache_folder() / "keops" / name


@contextmanager
def building() -> Iterator[None]:
    """Let in one process at a time that imports or builds: KeOps would load what another is still writing."""
    with ExitStack() as stack:
        with suppress(OSError, NotImplementedError):  # nowhere to write; a file system without locks
            _ours("").mkdir(parents=True, exist_ok=True)
            stack.enter_context(filelock.FileLock(_ours("lock")))
        yield


def import_keops() -> Any:
    with building(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import pykeops.torch

        return pykeops


@contextmanager
def exclusive() -> Iterator[None]:
    """One call of KeOps at a time, without its messages; users' own calls print as they asked."""
    with _calls:
        if "pykeops" not in sys.modules:
            before = {name: os.environ.get(name) for name in ("PYKEOPS_VERBOSE", "KEOPS_VERBOSE")}
            os.environ.update(dict.fromkeys(before, "0"))
            try:
                import_keops().set_verbose("0" not in before.values())
            finally:
                for name, value in before.items():
                    del os.environ[name]
                    if value is not None:
                        os.environ[name] = value
        modules: list[Any] = [sys.modules["pykeops"], sys.modules["keopscore"]]
        verbose = [module.verbose for module in modules]
        try:
            for module in modules:
                module.verbose = False
            yield
        finally:
            for module, said in zip(modules, verbose):
                module.verbose = said


def works(device: str) -> Support:
    """Say whether KeOps compiles and runs on ``device``, ``"cpu"`` or ``"cuda:0"``."""
    if (found := compiler()) is None:
        named = os.environ.get("CXX")
        lacking = "no C++ compiler" + (f" (CXX is {named!r}, which is not found)" if named else "")
        why = f"KeOps compiles as it runs, and there is {lacking}: install g++, or set CXX to the one to take"
        return Support(False, why)
    with _trials:  # threads that ask at once wait for one answer
        return _tried(device, found)


@functools.cache
def _tried(device: str, compiler: str) -> Support:
    """Compile and check a small sum in another process, as what some compilers build ends whoever loads it."""
    kind, named = torch.device(device).type, os.environ.get("KEOPS_CACHE_FOLDER")  # KeOps keeps there what it compiled
    folder = Path(named) if named else Path.home() / ".cache" / f"keops{importlib.metadata.version('keopscore')}"
    try:
        torch.zeros(1, device=device).add_(1.0).cpu()
    except (RuntimeError, AssertionError) as error:
        return Support(False, f"PyTorch {torch.__version__} cannot use {device}: {str(error).splitlines()[0]}")
    about = [importlib.metadata.version(name) for name in ("pykeops", "keopscore", "torch", "sdkde-core")]
    about += [sys.executable, platform.platform(), os.path.realpath(compiler), str(os.stat(compiler).st_mtime_ns)]
    about += [str(folder), device if kind == "cpu" else torch.cuda.get_device_name(device)]
    about += [os.environ.get(name, "") for name in ("CXXFLAGS", "CUDA_PATH", "LD_LIBRARY_PATH")]
    # A good answer is kept on disk by all that it depends on.
    good = Support(True, f"KeOps compiles and runs on {device} with {compiler}")
    kept = _ours(f"works-{hashlib.sha256(repr(about).encode()).hexdigest()[:20]}")
    if kept.exists():
        return good
    loud = {k: v for k, v in os.environ.items() if k not in ("KEOPS_VERBOSE", "PYKEOPS_VERBOSE")}
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "errors": "replace", "env": loud}
    try:
        code = f"from sdkde_keops import backend; backend.trial({device!r})"
        run_python(code, timeout=240.0, check=True, **how)  # on a machine that may be busy
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        said = error.output if isinstance(error.output, str) else ""
        last = [line.strip() for line in said.splitlines() if line.strip()][-4:]
        ended = str(error).rpartition("' ")[2].rstrip(".") + (f", saying: {' | '.join(last)[-600:]}" if last else "")
        toolkit = ", and CUDA_PATH to the CUDA toolkit, which has include/cuda.h and include/nvrtc.h"
        return Support(
            False,
            f"KeOps does not work on {device}: a trial in a process of its own failed. Cause: with the compiler "
            f"{compiler} it {ended}. Remedy: set CXX to the system's own g++ (one no newer than its libstdc++)"
            f"{'' if kind == 'cpu' else toolkit}; then delete {folder}, where KeOps keeps what it built. If that "
            "cannot be written, set KEOPS_CACHE_FOLDER to another folder before KeOps is imported",
        )
    with suppress(OSError):  # nowhere to write: every process finds out for itself
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.touch()
    return good
