"""The compiled kernels: from Numba's cache on disk, or compiled at first use, which the log says."""

from __future__ import annotations

import functools
import logging
import os
import time
from typing import Any

from numba import config, types

from sdkde_core.plugin import Unforkable, claim_memory, new_lock

from .cpu_kernels import CODES, reduce_kernel_tiles, reduce_tiles
from .kept import keep
from .leaf_kernels import add_leaves, choose_leaves, list_leaves

__all__ = ["kernel", "leaf_kernels"]

_logger = logging.getLogger("sdkde")
_lock, _compiler = new_lock(), Unforkable("Numba's compiler")

try:
    if not config.DISABLE_JIT:  # else there is nothing to compile, and probe() says that the backend cannot run
        for function in (reduce_tiles, reduce_kernel_tiles, list_leaves, add_leaves, choose_leaves):
            keep(function)
except RuntimeError as error:  # nowhere to write: neither beside the package nor in the user's cache folder
    _logger.info("numba: compiled code cannot be kept for the next process: %s", error)


def kernel(dtype: str, name: str = "gaussian") -> Any:
    """Return ``reduce_tiles`` for columns of ``dtype``, compiled; of another kernel ``reduce_kernel_tiles``."""
    if name in CODES:
        return _compiled(reduce_kernel_tiles, _kernel_signature())
    return _compiled(reduce_tiles, _signature(dtype))


def leaf_kernels(d: int, moments: bool, shifts: bool) -> tuple[Any, Any, Any]:
    """Return what lists, adds and chooses leaves; for d dimensions, with moments and shifts or without."""
    listing, choosing = _list_signatures()
    return (
        _compiled(list_leaves, listing),
        _compiled(add_leaves, _add_signature(d, moments, shifts)),
        _compiled(choose_leaves, choosing),
    )


def _compiled(function: Any, signature: tuple[Any, ...]) -> Any:
    if signature not in function.overloads:
        # Numba imports SciPy's OpenBLAS, which hangs, or interrupts the process, where its threads do not start.
        cores = os.cpu_count() or 1
        with _lock, _compiler, claim_memory("compiling with Numba", 128 << 20, tasks=cores, fewest=cores):
            start = time.perf_counter()
            function.compile(signature)
            seconds, path = time.perf_counter() - start, function.stats.cache_path
            if signature not in function.stats.cache_hits:
                kept = f"kept in {path}" if path else "which cannot be kept for the next process"
                name = function.__name__
                _logger.info("numba: %s was compiled for this processor in %.1f s, %s", name, seconds, kept)
    return function


@functools.cache
def _signature(dtype: str) -> tuple[Any, ...]:
    """Only float64 has MEAN's sums: what is not used takes as long to compile."""
    real = types.float32 if dtype == "float32" else types.float64
    (cube, matrix, line), (places,) = _arrays(real, 3, 2, 1), _places(1)
    (vector, sums), switch = _arrays(types.float64, 1, 2), types.boolean
    shifts = types.none if dtype == "float32" else sums
    first = cube, matrix, places, matrix, switch, places, switch, vector, vector, vector, shifts, sums
    return *first, matrix, matrix, matrix, line


@functools.cache
def _kernel_signature() -> tuple[Any, ...]:
    cube, matrix, vector = _arrays(types.float64, 3, 2, 1)
    first = cube, matrix, types.intp, types.intp, matrix, types.intp, types.intp, vector, matrix
    return *first, matrix, matrix, vector


@functools.cache
def _add_signature(d: int, moments: bool, shifts: bool) -> tuple[Any, ...]:
    (matrix, cube), (places, table), (sums,) = _arrays(types.float32, 2, 3), _places(1, 2), _arrays(types.float64, 3)
    wanted = (sums, *(sums if wish else types.none for wish in (moments, shifts)))
    return cube, matrix, table, places, matrix, types.UniTuple(types.float64, d), *wanted


@functools.cache
def _list_signatures() -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    (line, table, block), (places, chosen) = _arrays(types.float32, 1, 2, 3), _places(1, 2)
    (vector, matrix, cube), number, count = _arrays(types.float64, 1, 2, 3), types.float64, types.intp
    listing = (
        *(cube, matrix, matrix, matrix, vector, places, matrix, number, number, count, number),
        *(block, table, block, line, table, line, places, table, chosen, places),
    )
    return listing, (cube, line, table, line, count, count, number, count, number, chosen, places)


def _arrays(kind: Any, *axes: int) -> list[Any]:
    return [types.Array(kind, k, "C") for k in axes]


def _places(*axes: int) -> list[Any]:
    return _arrays(types.intp, *axes)
