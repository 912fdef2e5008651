"""Files of ours: where they are kept, and how one is replaced in a single step."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["cache_folder", "remove_temporaries", "write_atomically"]


def cache_folder() -> Path:
    """Return the user's cache folder for sdkde, which need not exist: on Linux ``$XDG_CACHE_HOME/sdkde``.

    Raises
    ------
    RuntimeError
        The user has no home.
    """
    import platformdirs  # takes milliseconds, and most calls keep nothing

    return platformdirs.user_cache_path("sdkde", appauthor=False, opinion=False)


@contextmanager
def write_atomically(path: Path | str) -> Iterator[Path]:
    """Yield the path of a new, empty file that replaces ``path`` at the end; after an error nothing has changed.

    The new file lies in the same folder, under a name that nobody can foresee, and ends as ``path`` does. It gets the
    mode of the file that it replaces. A symbolic link stays one: what it points to is replaced, as editors do. What is
    there and no regular file, such as ``/dev/stdout`` or a pipe, cannot be replaced: its own path is yielded.

    Parameters
    ----------
    path : path
        In a folder that exists.
    """
    if os.path.exists(path) and not os.path.isfile(path):  # a pipe's real path is no path
        yield Path(path)
        return
    final = Path(os.path.realpath(path))
    temporary = final.with_name(f".{final.name}.{os.urandom(8).hex()}{final.suffix}")
    try:
        mode = final.stat().st_mode & 0o777 if final.exists() else None
        # exist_ok=False: neither another's file nor a link is opened. Meanwhile a private file is nobody else's either.
        _temporaries.add(temporary)
        temporary.touch(0o666 if mode is None else 0o600, exist_ok=False)
        yield temporary
        if mode is not None:
            temporary.chmod(mode)
        temporary.replace(final)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename in (None, temporary, str(temporary)):
            error.filename = str(path)
        raise
    finally:
        _temporaries.discard(temporary)


#: Files that are being written.
_temporaries: set[Path] = set()


def remove_temporaries() -> None:
    """Remove the files that are being written, for a process that ends without further ado."""
    for path in list(_temporaries):
        path.unlink(missing_ok=True)
