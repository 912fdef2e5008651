"""Calls of the compiled loops: from Numba's cache on disk, or compiled at first use, which the log says."""

from __future__ import annotations

import logging
import time
from typing import Any

from numba import config, typeof

from sdkde_core.plugin import checkpoint, new_lock

from .cpu_kernels import reduce_groups, reduce_tiles
from .kept import keep
from .leaf_kernels import add_leaves, choose_leaves, list_leaves

_logger = logging.getLogger("sdkde")
_lock = new_lock()
_ready: set[tuple[Any, ...]] = set()

if not config.DISABLE_JIT:  # else there is nothing to compile, and probe() says that the backend cannot run
    for loop in (reduce_tiles, reduce_groups, list_leaves, add_leaves, choose_leaves):
        keep(loop)


def call(function: Any, variant: tuple[Any, ...], *arguments: Any) -> Any:
    """Call one of the loops, compiled for the types of these arguments. The types must follow from ``variant``.

    Nothing interrupts a loop, so that every call is a checkpoint.
    """
    checkpoint()
    if (function, variant) not in _ready:
        _compile(function, tuple(typeof(argument) for argument in arguments))
        _ready.add((function, variant))
    return function(*arguments)


def _compile(function: Any, signature: tuple[Any, ...]) -> None:
    with _lock:
        if signature in function.overloads:
            return
        start = time.perf_counter()
        function.compile(signature)
        seconds, path = time.perf_counter() - start, function.stats.cache_path
        if signature not in function.stats.cache_hits:
            kept = f"kept in {path}" if path else "which cannot be kept for the next process"
            _logger.info("numba: %s was compiled for this processor in %.1f s, %s", function.__name__, seconds, kept)
