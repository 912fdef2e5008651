"""What Numba keeps on disk of compiled code, with a digest: a changed bit could crash the process."""

from __future__ import annotations

import functools
import hashlib
import logging
import pickle
from contextlib import suppress
from typing import Any

_logger = logging.getLogger("sdkde")


def keep(dispatcher: Any) -> None:
    """Have a dispatcher keep what it compiles; a damaged file counts as missing."""
    try:
        dispatcher.enable_caching()
        files = dispatcher._cache._cache_file  # an IndexDataCacheFile, of Numba or of numba-cuda
        kind: Any = type(files)
        files.__class__ = _with_digests(kind)
    except RuntimeError as error:  # nowhere to write: neither beside the package nor in the user's cache folder
        _logger.info("numba: compiled code cannot be kept for the next process: %s", error)
    except AttributeError as error:  # another version of Numba
        _logger.info("numba: compiled code is kept without a digest: %s", error)


@functools.cache
def _with_digests(kind: Any) -> type:
    class Checked(kind):
        """An index and files of code. Processes that begin at once may give the same name to different code."""

        def save(self, key: Any, data: Any) -> None:
            raw = self._dump(data)
            super().save(key, (key, hashlib.sha256(raw).digest(), raw))

        def load(self, key: Any) -> Any:
            with suppress(Exception):  # whatever pickle makes of damaged bytes, or of what Numba itself wrote
                found, digest, raw = super().load(key)
                if found == key and hashlib.sha256(raw).digest() == digest:
                    return pickle.loads(raw)
            return None

        def _load_index(self) -> Any:
            with suppress(Exception):
                return super()._load_index()
            return {}

    return Checked
