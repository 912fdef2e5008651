"""KeOps, imported and called without its messages: one call at a time, and a formula compiled by one process."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import os
import platform
import shutil
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import filelock
import torch

from sdkde_core.plugin import cache_folder, in_child, new_lock

from . import built

__all__ = ["compiler", "exclusive", "folder", "forked", "import_keops", "keops_folder", "load", "locked", "no_compiler"]

#: KeOps keeps the arguments of a call in an object that all calls of a formula share.
_calls = new_lock(threading.RLock)

#: Whether this is a forked child of a process that imported this module.
forked = False


def _fork() -> None:
    """Have PyTorch use one thread: its OpenMP would wait for threads that a forked child does not have."""
    global forked
    forked = True
    torch.set_num_threads(1)


in_child(_fork)

#: A process that uses KeOps writes a file about its formulas as it ends. Another that reads half of it tries again.
ATTEMPTS, PAUSE = 20, 0.1


def compiler() -> str | None:
    """Return the path of the compiler that KeOps will take, by its own rule; None where there is none."""
    names = ["g++"] if platform.system() != "Darwin" else ["clang++", "g++"]
    return next(filter(None, map(shutil.which, [os.environ.get("CXX", ""), *names])), None)


def folder() -> Path:
    """Where locks and the results of health checks are kept."""
    return cache_folder() / "keops"


def keops_folder() -> Path:
    """Where KeOps keeps what it compiled, by its own rule."""
    named = os.environ.get("KEOPS_CACHE_FOLDER")
    return Path(named) if named else Path.home() / ".cache" / f"keops{importlib.metadata.version('keopscore')}"


def no_compiler() -> str:
    """Why nothing can be compiled, and what to do; empty where there is a compiler."""
    if compiler() is not None:
        return ""
    named = os.environ.get("CXX")
    lacking = "no C++ compiler" + (f" (CXX is {named!r}, which is not found)" if named else "")
    return f"KeOps compiles as it runs, and there is {lacking}: install g++, or set CXX to the one to take"


@contextlib.contextmanager
def locked(name: str) -> Iterator[None]:
    """Let in one process at a time: KeOps would load what another is still writing. No lock where none can be had."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError, NotImplementedError):  # nowhere to write; a file system without locks
            folder().mkdir(parents=True, exist_ok=True)
            stack.enter_context(filelock.FileLock(folder() / f"{name}.lock"))
        yield


@functools.cache
def load() -> Any:
    """Import KeOps without its messages, and return the module ``pykeops``; users' own calls print as they asked."""
    with _calls:
        if "pykeops" in sys.modules:
            return sys.modules["pykeops"]
        names = ("PYKEOPS_VERBOSE", "KEOPS_VERBOSE")
        before = {name: os.environ.get(name) for name in names}
        os.environ.update(dict.fromkeys(names, "0"))
        try:
            pykeops = import_keops()
        finally:
            for name, value in before.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value
        pykeops.set_verbose("0" not in before.values())
        return pykeops


def import_keops() -> Any:
    """Import KeOps, messages and all, and return the module ``pykeops``."""
    for attempt in range(ATTEMPTS):
        try:
            with locked("import"), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                import pykeops.torch

                built.forget()
                return pykeops
        except Exception as error:
            if attempt == ATTEMPTS - 1 or not _unreadable(error):
                raise
            for name in [n for n in sys.modules if n.partition(".")[0] in ("pykeops", "keopscore")]:
                del sys.modules[name]
            time.sleep(PAUSE)
            if attempt == ATTEMPTS - 2:  # nobody is writing them: a process that was killed has
                for path in keops_folder().glob("*/*_cache.pkl"):
                    path.unlink(missing_ok=True)
    raise AssertionError("unreachable")


def _unreadable(error: BaseException) -> bool:
    """Whether an error comes of reading what KeOps keeps of formulas in pickles."""
    frames = traceback.extract_tb(error.__traceback__)
    return any(frame.filename.endswith(os.path.join("utils", "Cache.py")) for frame in frames)


@contextlib.contextmanager
def exclusive() -> Iterator[None]:
    """One call of KeOps at a time, without its messages."""
    pykeops = load()
    keopscore: Any = sys.modules["keopscore"]
    with _calls:
        before = pykeops.verbose, keopscore.verbose
        pykeops.verbose = keopscore.verbose = False
        try:
            yield
        finally:
            pykeops.verbose, keopscore.verbose = before
