"""How kernels are launched: compiled code, configurations, grids."""

from __future__ import annotations

import functools
import os
import shutil
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from triton import knobs
from triton.errors import TritonError
from triton.runtime.interpreter import InterpretedFunction

from sdkde_core.plugin import current_stream
from sdkde_core.protocol import Problem
from sdkde_core.tuning import Query, reject, tuned

from . import kernels
from .bounds import merges
from .grid import Processor, most_parts, resident, slab_rows, splits
from .space import Config, default, fits
from .tunables import CONFIG_VERSION, dimension

#: Whether kernels run in Triton's interpreter, on the CPU.
INTERPRETED = isinstance(kernels.mean_kernel, InterpretedFunction)


_interpreter = threading.Lock()

#: Compiled kernels by kernel, flags, configuration, element type, device, and whether all pointers are aligned.
_compiled: dict[Any, Any] = {}


def no_compiler() -> str:
    """Why Triton cannot build what launches kernels on a card, and what to do; empty where it can.

    That is a small library in C, which Triton compiles once and keeps: by ``CC``, else by gcc or clang.
    """
    if not sys.platform.startswith("linux") or knobs.build.impl is not None:
        return ""
    if os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang"):
        return ""
    if any(Path(knobs.cache.dir).glob("*/cuda_utils*")):
        return ""
    return (
        "Triton compiles what launches kernels, and there is no C compiler: install gcc, or set CC to the one to take"
    )


def _compile(
    kernel: Any, first: torch.Tensor, arguments: Callable[[], tuple[Any, ...]], flags: tuple[Any, ...], config: Config
) -> Any:
    """Return the compiled kernel for its first argument, all arguments, and compile-time parameters, which come last.

    None where it is interpreted. Triton itself looks at every argument of every launch to find the compiled code, which
    takes longer than a small problem's kernels. No integer is specialised on, so what is left is in this key; a kernel
    is one of the modules', and Triton takes a lock to hash it. ``first`` is the only pointer that may not be aligned:
    the user's rows, from somewhere in an array.
    """
    if INTERPRETED:
        return None
    key = (id(kernel), flags, config, first.dtype, first.device.index, first.data_ptr() % 16)
    found, _ = _compiled.get(key, (None, None))
    if found is None:
        given = arguments()
        named = dict(zip(kernel.arg_names[len(given) :], flags, strict=True))
        try:
            found = kernel.warmup(*given, grid=(1,), **named, **config.options)
            found._init_handles()  # loads it, which tells its registers
        except TritonError as error:
            raise _tuned_only(error, config) or error from error
        _compiled[key] = found, kernel  # which keeps its number
    return found


def _run(
    kernel: Any, compiled: Any, grid: tuple[int, int], arguments: tuple[Any, ...], flags: Any, config: Config
) -> None:
    if compiled is None:
        with _interpreter:  # it replaces parts of Triton while it runs
            kernel[grid](*arguments, *flags, **config.options)
    else:  # compiled[grid] would prepare for a profiler's hooks, which takes as long as the launch
        stream, hooks = current_stream(torch.cuda.current_device()), (None, None, None)
        compiled.run(*grid, 1, stream, compiled.function, compiled.packed_metadata, *hooks, *arguments, *flags)


def launch(
    kernel: Any, grid: tuple[int, int], arguments: tuple[Any, ...], flags: tuple[Any, ...], config: Config
) -> None:
    """Launch a kernel: arguments, then compile-time parameters, in its order."""
    compiled = _compile(kernel, arguments[0], lambda: arguments, flags, config)
    _run(kernel, compiled, grid, arguments, flags, config)


def copy(kernel: Any, programs: int, arguments: tuple[Any, ...], flags: tuple[Any, ...]) -> None:
    """Launch a kernel without launch parameters to choose."""
    launch(kernel, (programs, 1), arguments, flags, Config(1, 1, 4, 1))


def configuration(kernel: str, problem: Problem, columns: int, processor: Processor, pieces: int = 2) -> Config:
    """Return the tuned launch parameters of a kernel, or the default where none that suit it are known."""
    query, asked = _question(kernel, problem, columns, pieces, processor)
    found = tuned(query, asked, lambda x: fits(kernel, Config.of(x), columns, processor.capability, pieces))
    if found is not None:
        config = Config.of(found.config)
        # The tuned configurations that this thread was given last, newest last.
        _in_use.tuned = [*getattr(_in_use, "tuned", [])[-7:], (query, found, config)]
        return config
    return default(kernel, columns, processor.capability, merges(problem.d), pieces)


_in_use = threading.local()


@functools.lru_cache(maxsize=4096)
def _question(kernel: str, problem: Problem, columns: int, pieces: int, processor: Processor) -> tuple[Query, Problem]:
    """Return what to look up for a kernel, and the problem without the fields that change no kernel.

    All numbers arrive as float64, and all sums are deterministic.
    """
    name = kernel + ("_full" if pieces == 3 else "")
    architecture = f"sm_{processor.capability}" if processor.name != "CPU" else "interpreted"
    number = dimension(kernel, columns, problem.d)
    query = Query("triton", name, CONFIG_VERSION, number, processor.name, architecture)
    asked = replace(problem, dtype="float32" if problem.precision == "fast" else "float64")
    return query, asked


class LaunchFailed(RuntimeError):
    """A kernel did not compile or could not be launched as tuned; that configuration is not used again."""


def _tuned_only(error: Exception, config: Config) -> LaunchFailed | None:
    """Return the error to raise if the configuration was a tuned one, which is rejected; the caller tries another."""
    for query, found, used in reversed(getattr(_in_use, "tuned", [])):
        if used == config and found.rung != "forced":
            reject(query, found, error)
            return LaunchFailed(str(error))
    return None


def reduce(
    kernel: Any,
    config: Config,
    step: int,
    whole: int,
    m: int,
    n: int,
    per_row: int,
    before: Any,
    after: Any,
    flags: Any,
    most_steps: int,
    last: Sequence[int] = (),
) -> tuple[torch.Tensor, int]:
    """Launch a reduction of m rows over all splits of the columns; return their results, and how many.

    There are ``per_row`` numbers for every row and split, float64 if the columns are. The kernel's arguments are
    ``before``, the buffer of results, ``after``, and the columns of a split; a program takes ``step`` of them at a
    time, at most ``most_steps`` times, unless a grid has not that many programs. The number of splits follows from
    ``whole``, the rows of the problem: however few of them come at a time, the bits are the same.
    """
    device, dtype = before[0].device, torch.float64 if before[1].dtype is torch.float64 else torch.float32
    processor = Processor.of(device)
    flags = (*flags, config.block_m, config.block_n)
    if "STAGES" in kernel.arg_names:
        flags = (*flags, config.num_stages, *last)
    # The number of splits, and so the buffer's size, follows from the compiled kernel: a view stands in for the buffer.
    compiled = _compile(kernel, before[0], lambda: (*before, before[0].view(dtype), *after, n), flags, config)
    slots = processor.multiprocessors * resident(compiled, config, processor)
    bytes_per_row, columns = per_row * dtype.itemsize, most_steps * step
    most = most_parts(slab_rows(whole, n, bytes_per_row, columns), bytes_per_row)
    parts, length = splits(whole, n, config.block_m, step, slots, most, columns)
    out = torch.empty(parts * m * per_row, dtype=dtype, device=device)
    _run(kernel, compiled, (-(-m // config.block_m), parts), (*before, out, *after, length), flags, config)
    return out, parts
