"""Files of ours: where they are kept, and how a file or a folder is replaced in a single step."""

from __future__ import annotations

import ctypes
import errno
import os
import re
import shutil
import stat
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from .messages import SdkdeWarning, caller_level


def cache_folder() -> Path:
    """Return the user's cache folder for sdkde, which need not exist: on Linux ``$XDG_CACHE_HOME/sdkde``.

    FileNotFoundError: the user has no home.
    """
    import platformdirs  # takes milliseconds, and most calls keep nothing

    with suppress(RuntimeError):
        found = platformdirs.user_cache_path("sdkde", appauthor=False, opinion=False)
        if found.is_absolute():  # older versions return "~/.cache" as it stands
            return found
    raise FileNotFoundError("the user has no home to keep files in: set HOME, or XDG_CACHE_HOME")


@contextmanager
def write_atomically(path: Path | str) -> Iterator[Path]:
    """Yield the path of a new, empty file that replaces ``path`` at the end; after an error nothing has changed.

    The new file lies in the same folder, with the same extension, and gets the owner and the mode of the file that it
    replaces. It is on disk before it takes that file's place, so a power cut leaves the old one or the new one. A
    symbolic link stays one. What is no regular file, such as ``/dev/stdout`` or a pipe, is written to as it is. An
    OSError names ``path``: its folder does not exist or takes no new file, or the owner cannot be kept.
    """
    final = Path(os.path.realpath(path))
    beside = _beside(final)
    try:
        before: os.stat_result | None = None
        with suppress(FileNotFoundError):
            before = os.stat(path)
            if not os.access(path, os.W_OK, effective_ids=os.access in os.supports_effective_ids):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        is_open = re.fullmatch(r"/dev/(stdout|stderr|fd/\d+)|/proc/(self|\d+)/fd/\d+", os.path.abspath(path))
        if before is not None and (is_open or not stat.S_ISREG(before.st_mode)):  # what this process has open too
            yield Path(path)
        else:
            _make(beside, before)
            yield beside
            sync(beside)
            if before is not None:
                beside.chmod(before.st_mode & 0o777)
            try:
                beside.replace(final)
            except OSError as error:  # a file that is mounted, as into a container, is written in place
                if error.errno != errno.EBUSY:
                    raise
                shutil.copyfile(beside, final)
            with suppress(OSError):  # a folder that may not be read; the new file is in place all the same
                sync(final.parent)
    except OSError as error:
        if error.filename is None or os.path.basename(error.filename) == beside.name:
            error.filename = str(path)
        raise
    finally:
        with suppress(OSError):
            beside.unlink()


@contextmanager
def write_folder(path: Path | str, check: Callable[[Path], object]) -> Iterator[Path]:
    """Yield the path of a new, empty folder that replaces ``path`` at the end; after an error nothing has changed.

    The new folder lies in the same folder, is brought to disk, and takes its place in one step: the kernel exchanges
    the two names, and the older folder is removed. A process that is killed leaves the old one or the new one, whole.

    ``check(folder)`` raises an OSError if the folder at ``path`` may not be replaced. It is called again before the new
    folder takes its place: if what is there may no longer be replaced, the new folder is kept, and the error says
    where. That two folders cannot be exchanged (Windows, NFS) is an OSError before anything is written.
    """
    final = Path(os.path.realpath(path))
    beside, unplaced = _beside(final), False
    check(final)
    try:
        beside.mkdir()
        if final.exists():
            _check_exchange(beside, path)
        yield beside
        for one in (*beside.rglob("*"), beside):
            sync(one)
        try:
            check(final)
            if final.exists():
                before, made = final.stat(), beside.stat()
                beside.chmod(before.st_mode & 0o777)
                if hasattr(os, "chown") and (made.st_uid, made.st_gid) != (before.st_uid, before.st_gid):
                    with suppress(PermissionError):
                        for one in (beside, *beside.rglob("*")):
                            os.chown(one, before.st_uid, before.st_gid)
                _exchange(beside, final)
            else:
                beside.rename(final)
        except OSError as error:
            unplaced = True
            raise OSError(error.errno, f"{error.strerror}; the new one is {beside}", str(path)) from error
        with suppress(OSError):
            sync(final.parent)
    finally:
        if not unplaced and not _remove_folder(beside):
            warnings.warn(f"{beside} cannot be removed", SdkdeWarning, stacklevel=caller_level())


def _beside(final: Path) -> Path:
    return final.with_name(f".{final.name[:40]}.{os.urandom(8).hex()}{final.suffix}")


def _check_exchange(beside: Path, path: Path | str) -> None:
    """Refuse now to replace a folder, if two folders cannot be exchanged here."""
    probes = beside / "a", beside / "b"
    for probe in probes:
        probe.mkdir()
    try:
        _exchange(*probes)
    except OSError as error:
        cause = f"a folder cannot be replaced in one step here ({error.strerror}); remove it first, or name another"
        raise OSError(error.errno, cause, str(path)) from error
    for probe in probes:
        probe.rmdir()


def _exchange(a: Path, b: Path) -> None:
    """Exchange the names of two folders in one step: Linux's RENAME_EXCHANGE, and macOS's RENAME_SWAP."""
    at_working_folder, exchange = -100, 2
    names = os.fsencode(a), os.fsencode(b)
    try:
        library = ctypes.CDLL(None, use_errno=True)
        if sys.platform == "darwin":
            failed = library.renamex_np(*names, exchange)
        else:
            failed = library.renameat2(at_working_folder, names[0], at_working_folder, names[1], exchange)
        code = ctypes.get_errno() if failed else 0
    except (AttributeError, TypeError):  # Windows, or a C library without it
        code = errno.ENOSYS
    if code:
        raise OSError(code, os.strerror(code), str(b))


def sync(path: Path) -> None:
    """Wait until a file is on disk, or the names in a folder are, where the system does that."""
    if os.name == "nt" and path.is_dir():
        return
    number = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(number)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # a file system that cannot
            raise
    finally:
        os.close(number)


def _remove_folder(path: Path) -> bool:
    """Remove a folder; False if it stays. Other threads may still write in it, as zarr's do after an interrupt."""
    for _ in range(25):
        shutil.rmtree(path, ignore_errors=True)
        time.sleep(0.02)  # a thread makes the folder anew where it has a file to write
        if not path.exists():
            return True
    return False


def _make(beside: Path, before: os.stat_result | None) -> None:
    """Make the new file, with the owner of the one that it replaces."""
    wrong = f"the folder {beside.parent} takes no new file"
    try:
        # exist_ok=False: neither another's file nor a link is opened. Meanwhile a private file is nobody else's either.
        beside.touch(0o666 if before is None else 0o600, exist_ok=False)
        if before is not None:
            made = beside.stat()
            if (made.st_uid, made.st_gid) != (before.st_uid, before.st_gid):
                wrong = "its owner cannot be kept; remove it first, or name another"
                os.chown(beside, before.st_uid, before.st_gid)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        raise OSError(error.errno, f"{error.strerror} ({wrong})") from error


def reserve(file: BinaryIO, size: int) -> None:
    """Raise for a full disk now, before anything is computed."""
    if not hasattr(os, "posix_fallocate"):
        return
    try:
        os.posix_fallocate(file.fileno(), 0, size)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):  # others: a pipe, or a file system that cannot
            raise
