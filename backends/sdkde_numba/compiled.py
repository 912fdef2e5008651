"""The compiled kernel: from Numba's cache on disk, or compiled at first use, with a notice where that takes long."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
import threading
import time
from typing import Any, NamedTuple

from numba import config, types

from sdkde_core.plugin import Unforkable, claim_memory, new_lock

from .cpu_kernels import CODES, reduce_kernel_tiles, reduce_tiles
from .kept import keep
from .leaf_kernels import add_leaves, choose_leaves, list_leaves

__all__ = ["LeafKernels", "kernel", "leaf_kernels"]

_logger = logging.getLogger("sdkde")

#: Seconds after which a compilation is announced.
PATIENCE = 1.0

#: What compiling takes, bytes; and the threads of SciPy's OpenBLAS, which Numba imports, and which hangs, or interrupts
#: the process, where they do not start.
COMPILER, CORES = 128 << 20, os.cpu_count() or 1

_lock, _compiler = new_lock(), Unforkable("Numba's compiler")
_announced = False

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


class LeafKernels(NamedTuple):
    """The functions of :mod:`sdkde_numba.leaf_kernels`, compiled."""

    list: Any
    add: Any
    choose: Any


def leaf_kernels(d: int, moments: bool, shifts: bool) -> LeafKernels:
    """Return the functions over leaves; for d dimensions, with moments and shifts or without."""
    listing, choosing = _list_signatures()
    return LeafKernels(
        _compiled(list_leaves, listing),
        _compiled(add_leaves, _add_signature(d, moments, shifts)),
        _compiled(choose_leaves, choosing),
    )


def _compiled(function: Any, signature: tuple[Any, ...]) -> Any:
    if signature not in function.overloads:
        with _lock, _compiler, claim_memory("compiling with Numba", COMPILER, tasks=CORES, fewest=CORES):
            _compile(function, signature)
    return function


def _compile(function: Any, signature: tuple[Any, ...]) -> None:
    start = time.perf_counter()
    timer = threading.Timer(PATIENCE, _announce)
    timer.daemon = True
    with contextlib.suppress(RuntimeError):  # where no thread can be started it is said afterwards
        timer.start()
    try:
        function.compile(signature)
    finally:
        timer.cancel()
        if timer.is_alive():
            timer.join()
    if time.perf_counter() - start > PATIENCE:  # the compiler may not have let the timer's thread run
        _announce()


def _announce() -> None:
    """Say once what the wait is for: on the log, or on the terminal where nobody listens to the log."""
    global _announced
    if _announced:
        return
    _announced = True
    line = f"numba: the first call compiles for this processor, some seconds; {_kept()}"
    _logger.info(line)
    logged = _logger.isEnabledFor(logging.INFO) and any(
        not isinstance(handler, logging.NullHandler) for handler in (*_logger.handlers, *logging.getLogger().handlers)
    )
    if not logged and sys.stderr is not None and sys.stderr.isatty():
        print(line, file=sys.stderr)


def _kept() -> str:
    path = reduce_tiles.stats.cache_path
    return f"later ones find the code in {path}" if path else "the code cannot be kept for the next process"


@functools.cache
def _signature(dtype: str) -> tuple[Any, ...]:
    real = types.float32 if dtype == "float32" else types.float64
    cube, matrix = types.Array(real, 3, "C"), types.Array(real, 2, "C")
    vector, sums = (types.Array(types.float64, k, "C") for k in (1, 2))
    places, switch = types.Array(types.intp, 1, "C"), types.boolean
    return cube, matrix, places, matrix, switch, places, switch, vector, vector, vector, sums, sums


@functools.cache
def _add_signature(d: int, moments: bool, shifts: bool) -> tuple[Any, ...]:
    (matrix, cube), (places, table) = _arrays(types.float32, 2, 3), _arrays(types.intp, 1, 2)
    (sums,) = _arrays(types.float64, 3)
    wanted = (sums, *(sums if wish else types.none for wish in (moments, shifts)))
    return cube, matrix, table, places, matrix, types.UniTuple(types.float64, d), *wanted


@functools.cache
def _list_signatures() -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    (line, table, block), (places, chosen) = _arrays(types.float32, 1, 2, 3), _arrays(types.intp, 1, 2)
    (vector, matrix, cube), number, count = _arrays(types.float64, 1, 2, 3), types.float64, types.intp
    listing = (
        *(cube, matrix, matrix, matrix, vector, places, matrix, number, number, count, number),
        *(block, table, block, line, table, line, places, table, chosen, places),
    )
    return listing, (cube, line, table, line, count, count, number, count, number, chosen, places)


def _arrays(kind: Any, *axes: int) -> list[Any]:
    return [types.Array(kind, k, "C") for k in axes]


@functools.cache
def _kernel_signature() -> tuple[Any, ...]:
    cube, matrix, vector = (types.Array(types.float64, k, "C") for k in (3, 2, 1))
    return cube, matrix, types.intp, types.intp, matrix, types.intp, types.intp, vector, matrix
