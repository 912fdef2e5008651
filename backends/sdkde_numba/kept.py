"""What Numba keeps on disk of compiled code, for CPUs and for CUDA: files with a digest, which Numba's own lack.

A bit that has changed in compiled code would crash the process, or give other numbers.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import pickle
from pathlib import Path
from typing import Any

_logger = logging.getLogger("sdkde")


def keep(dispatcher: Any) -> None:
    """Have a dispatcher keep what it compiles; a damaged file counts as missing. RuntimeError: nowhere to write."""
    dispatcher.enable_caching()
    try:
        files = dispatcher._cache._cache_file  # an IndexDataCacheFile, of Numba or of numba-cuda
        kind: Any = type(files)
        files.__class__ = _with_digests(kind)
    except AttributeError as error:  # another version of Numba
        _logger.info("numba: compiled code is kept without a digest: %s", error)


@functools.cache
def _with_digests(kind: Any) -> type:
    class Checked(kind):
        """An index and files of code; Numba takes an OSError for a file that is missing, and compiles."""

        def save(self, key: Any, data: Any) -> None:
            super().save(key, (key, data))  # processes that begin at once may give the same name to different code

        def load(self, key: Any) -> Any:
            found = super().load(key)
            return None if found is None or found[0] != key else found[1]

        def _dump(self, obj: Any) -> bytes:
            raw = super()._dump(obj)
            return hashlib.sha256(raw).digest() + raw

        def _load_index(self) -> dict[Any, str]:
            try:
                raw = Path(self._index_path).read_bytes().removeprefix(pickle.dumps(self._version, protocol=-1))
                stamp, overloads = _checked(raw, self._index_path)
            except OSError:
                return {}
            return overloads if stamp == self._source_stamp else {}

        def _load_data(self, name: str) -> Any:
            path = self._data_path(name)
            return _checked(Path(path).read_bytes(), path)

    return Checked


def _checked(raw: bytes, path: str) -> Any:
    """What was dumped; OSError where it is damaged, or Numba itself or another version wrote it."""
    digest, dumped = raw[:32], raw[32:]
    if hashlib.sha256(dumped).digest() != digest:
        _logger.info("numba: compiled code is made anew, as its file is damaged: %s", path)
        raise OSError(f"{path} is damaged")
    return pickle.loads(dumped)
