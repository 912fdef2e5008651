"""What KeOps has built on disk, loaded only if it is as it was built: a digest lies beside each library.

A build that is killed leaves a short library, and to load that is an error for ever, or ends the process.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any, TypeVar

from sdkde_core.plugin import write_atomically

__all__ = ["forget", "loading"]

R = TypeVar("R")

#: What the names of the libraries begin with: a formula's tag follows.
LIBRARY = "pykeops_cpp_"


def loading(call: Callable[[], R], folder: Path) -> R:
    """Return ``call()``, which loads a library; once more without a formula's files in ``folder`` that are damaged."""
    try:
        with _checking(folder):
            return call()
    except Exception as error:
        damaged = _damaged(error)
        if damaged is None or folder.resolve() not in damaged.resolve().parents or not _removed(damaged):
            raise
    with _checking(folder):
        return call()


def forget() -> None:
    """Have KeOps forget what it has read of formulas from its files, which may be damaged; it takes milliseconds."""
    for module, name in (("keopscore.get_keops_dll", "get_keops_dll"), (f"{_IO}.LoadKeOps_cpp", "LoadKeOps_cpp")):
        with contextlib.suppress(AttributeError):  # another version of KeOps
            getattr(sys.modules.get(module), name).reset()


_IO = "pykeops.common.keops_io"


class _Checks(MetaPathFinder):
    """Finds KeOps's libraries as Python does; ImportError for one that was there before and is not as it was built."""

    def __init__(self, before: set[Path]) -> None:
        self.before = before

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if not name.startswith(LIBRARY):
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.origin is not None:
            self.check(Path(spec.origin))
        return spec

    def check(self, library: Path) -> None:
        kept, digest = library.with_name(library.name + ".sha256"), _digest(library)
        with contextlib.suppress(OSError):
            if kept.read_text(errors="replace") == digest:
                return
        if library.resolve() in self.before and os.access(library.parent, os.W_OK):
            raise ImportError(f"{library} is not as it was built", path=str(library))
        with contextlib.suppress(OSError), write_atomically(kept) as new:
            new.write_text(digest)


@contextlib.contextmanager
def _checking(folder: Path) -> Iterator[None]:
    checks = _Checks({path.resolve() for path in folder.glob(f"*/{LIBRARY}*")})
    sys.meta_path.insert(0, checks)
    try:
        yield
    finally:
        sys.meta_path.remove(checks)


def _digest(library: Path) -> str:
    """The SHA-256 of a library, and of the file that says what its arguments are."""
    digest = hashlib.sha256(library.read_bytes())
    digest.update(library.with_name(_tag(library) + ".nfo").read_bytes())
    return digest.hexdigest()


def _tag(path: Path) -> str:
    return path.name.removeprefix(LIBRARY).partition(".")[0]


def _damaged(error: Exception) -> Path | None:
    """The file that an error comes of: a library, or what KeOps reads of one with no check, and evaluates."""
    if isinstance(error, ImportError):
        return Path(error.path) if error.path else None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_name == "read_info":
            return Path(frame.f_locals["self"].info_file)
    return None


def _removed(damaged: Path) -> bool:
    """Whether the files of that formula could be removed; KeOps makes them anew."""
    try:
        for path in list(damaged.parent.glob(f"*{_tag(damaged)}*")):
            path.unlink(missing_ok=True)
    except OSError:
        return False
    forget()
    importlib.invalidate_caches()
    return True
