"""What Numba keeps on disk of compiled code, for CPUs and for CUDA."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["reload_damaged"]

_logger = logging.getLogger("sdkde")

R = TypeVar("R")


def reload_damaged(compile_: Callable[[], R], dispatcher: Callable[[], Any]) -> R:
    """Return ``compile_()``; once more without what Numba has kept on disk, where that is cut short or no code at all.

    ``dispatcher`` makes one of the same function, with nothing compiled: to recompile that only empties the cache.
    """
    try:
        return compile_()
    except (EOFError, pickle.UnpicklingError) as error:
        _logger.info("numba: a damaged file of compiled code is replaced: %s", error)
        dispatcher().recompile()
        return compile_()
