"""Files of ours: where they are kept, and how one is replaced in a single step."""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["cache_folder", "remove_temporaries", "write_atomically"]

#: Names of what this process has open: written to, even where that is a regular file.
_OPEN = re.compile(r"/dev/(stdout|stderr|fd/\d+)|/proc/(self|\d+)/fd/\d+")


def cache_folder() -> Path:
    """Return the user's cache folder for sdkde, which need not exist: on Linux ``$XDG_CACHE_HOME/sdkde``.

    Raises
    ------
    FileNotFoundError
        The user has no home.
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

    The new file lies in the same folder, under a name that nobody can foresee, and ends as ``path`` does. It gets the
    owner and the mode of the file that it replaces. A symbolic link stays one: what it points to is replaced, as
    editors do. What is there and no regular file, such as ``/dev/stdout`` or a pipe, cannot be replaced: its own path
    is yielded.

    Where the folder takes no new file, or the owner cannot be kept, the new file lies in a temporary folder, and its
    bytes are written into the old one at the end.

    Parameters
    ----------
    path : path
        In a folder that exists.

    Raises
    ------
    OSError
        It cannot be written. Names ``path``.
    """
    final = Path(os.path.realpath(path))
    beside = final.with_name(f".{final.name[:40]}.{os.urandom(8).hex()}{final.suffix}")
    _temporaries.add(beside)
    try:
        before = _found(path)
        if before is not None and (_OPEN.fullmatch(os.path.abspath(path)) or not stat.S_ISREG(before.st_mode)):
            yield Path(path)
        elif _made(beside, final, before):
            yield beside
            _replace(final, beside, before)
        else:
            with tempfile.TemporaryDirectory() as folder:
                apart = Path(folder, beside.name)
                apart.touch(0o600)
                yield apart
                _overwrite(final, apart)
    except OSError as error:
        if error.filename is None or os.path.basename(error.filename) == beside.name:
            error.filename = str(path)
        raise
    finally:
        with suppress(OSError):
            beside.unlink()
        _temporaries.discard(beside)


#: Files that are being written.
_temporaries: set[Path] = set()


def remove_temporaries() -> None:
    """Remove the files that are being written, for a process that ends without further ado."""
    for path in list(_temporaries):
        path.unlink(missing_ok=True)


def _found(path: Path | str) -> os.stat_result | None:
    try:
        return os.stat(path)
    except FileNotFoundError:
        return None


def _made(beside: Path, final: Path, before: os.stat_result | None) -> bool:
    """Make the new file, with the owner of the one before; False if that one has to be written itself, and can be."""
    try:
        # exist_ok=False: neither another's file nor a link is opened. Meanwhile a private file is nobody else's either.
        beside.touch(0o666 if before is None else 0o600, exist_ok=False)
        if before is not None:
            made = beside.stat()
            if (made.st_uid, made.st_gid) != (before.st_uid, before.st_gid):
                os.chown(beside, before.st_uid, before.st_gid)
    except OSError as error:
        if before is None or error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        os.close(_opened(final))
        return False
    return True


def _replace(final: Path, new: Path, before: os.stat_result | None) -> None:
    if before is not None:
        new.chmod(before.st_mode & 0o777)
    try:
        new.replace(final)
    except OSError as error:
        if error.errno != errno.EBUSY:  # a file that is mounted, as into a container
            raise
        _overwrite(final, new)


def _overwrite(final: Path, new: Path) -> None:
    with new.open("rb") as source, open(_opened(final), "wb") as target:
        shutil.copyfileobj(source, target)
        target.truncate()


def _opened(final: Path) -> int:
    """Open a file for writing, as it is; no link that took its place meanwhile."""
    return os.open(final, os.O_WRONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0))
