"""How kernels are launched: compiled code, configurations, grids."""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import shutil
import struct
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import triton
from triton import knobs
from triton.errors import TritonError
from triton.runtime import cache
from triton.runtime.driver import driver
from triton.runtime.interpreter import InterpretedFunction

from sdkde_core.plugin import cache_folder, current_stream, grids, launches, new_lock, write_atomically
from sdkde_core.protocol import Problem
from sdkde_core.tuning import Query, reject, tuned

from . import kernels
from .bounds import exact, merges
from .space import Config, default, fits
from .tunables import CONFIG_VERSION, dimension

#: Whether kernels run in Triton's interpreter, on the CPU.
INTERPRETED = isinstance(kernels.mean_kernel, InterpretedFunction)

_interpreter, _logger = threading.Lock(), logging.getLogger("sdkde")

#: Compiled kernels by kernel, flags, configuration, element type, whether all pointers are aligned, and device.
_compiled: dict[Any, Future[Any]] = {}

# With more threads all of them wait for Python's lock, also those whose kernels take longest.
_pool, _driver = ThreadPoolExecutor(8, "sdkde-triton"), new_lock()


def hash_of_triton() -> str:
    """Triton's hash of itself, which takes half a second: so it is kept, by its files' sizes and dates."""
    made = getattr(cache, "triton_key", str)
    try:
        places = os.walk(Path(triton.__file__).parent, followlinks=True)
        files = sorted(os.path.join(at, x) for at, _, names in places for x in names if x.endswith((".py", ".so")))
        stats = [(x, (found := os.stat(x)).st_size, found.st_mtime_ns) for x in files]
        file = cache_folder() / "triton" / hashlib.sha256(repr(stats).encode()).hexdigest()
        if file.exists():
            digest, _, kept = file.read_bytes().partition(b" ")
            if digest == hashlib.sha256(kept).hexdigest().encode():  # else the file is not whole
                cache.triton_key = functools.cache(kept.decode)  # as Triton tells processes that compile for it
                return kept.decode()
        file.parent.mkdir(parents=True, exist_ok=True)
        with write_atomically(file) as new:
            new.write_text(f"{hashlib.sha256(made().encode()).hexdigest()} {made()}")
    except OSError as error:
        _logger.info("triton: its hash is not kept: %s", error)
    return str(made())


#: Hashed once, not in every thread; if a GPU is in use the hashing begins now.
_hash = functools.cache(lambda: _pool.submit(hash_of_triton))
if not INTERPRETED and torch.cuda.is_initialized():
    _hash()


def no_compiler() -> str:
    """Return why Triton cannot build its small C library that launches kernels, and the remedy; "" if it can."""
    has_one = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    elsewhere = not sys.platform.startswith("linux") or knobs.build.impl is not None
    if has_one or elsewhere or any(Path(knobs.cache.dir).glob("*/cuda_utils*")):  # compiled once, and kept
        return ""
    return (
        "Triton compiles what launches kernels, and there is no C compiler: install gcc, or set CC to the one to take"
    )


class LaunchFailed(RuntimeError):
    """A kernel did not compile as tuned; that configuration is not used again."""


class _Here(threading.local):
    rehearses = False  # launches only begin to compile

    def __init__(self) -> None:
        self.tuned: dict[Config, Any] = {}  # configurations in use: the query, and what the look-up found


_here = _Here()

#: The configuration of kernels without tunable launch parameters.
_WARPS = Config(1, 1, 4, 1)


class _Bits(int):
    """The bits of a :class:`.launches.Varying` number."""

    of: launches.Varying


def bits(x: float) -> int:
    """Return a number's 64 bits as an integer, as Triton passes floats in 32; for 0 those of −0, a large integer."""
    found: int = struct.unpack("q", struct.pack("d", x or -0.0))[0]
    if isinstance(x, launches.Varying):
        found = _Bits(found)
        found.of = x
    return found


@dataclass(eq=False)
class Launch:
    """A kernel with all arguments but its pointers, and its compiled code: shared by launches of one shape.

    Triton itself inspects every argument of every launch, which takes longer than a small problem's kernels.
    """

    kernel: Any  # its arguments are pointers, numbers, and compile-time parameters
    grid: tuple[int, int]
    numbers: tuple[Any, ...]
    flags: tuple[Any, ...]  # the compile-time parameters
    config: Config = _WARPS
    kept: dict[Any, Any] = field(default_factory=dict)  # code by the device, and the first pointer's dtype and place

    def __call__(self, *pointers: torch.Tensor, last: tuple[Any, ...] = ()) -> None:
        """Launch on the current stream; ``last`` are numbers that follow the others.

        The first pointer is the only one that may not be aligned: the user's rows, from somewhere in an array.
        """
        numbers = *self.numbers, *last
        if INTERPRETED:
            with _interpreter:  # it replaces parts of Triton while it runs
                self.kernel[self.grid](*pointers, *numbers, *self.flags, **self.config.options)
            return
        device = pointers[0].get_device()
        at = device, pointers[0].dtype, pointers[0].data_ptr() % 16
        code = self.kept.get(at)
        if code is None:
            plain = (int(x) if isinstance(x, int) else x for x in numbers)
            code = compiled(self.kernel, (*pointers, *plain), self.flags, self.config)
            if code is None:
                return
            self.kept[at] = code
        listed = _Listed(code, self.grid, (*pointers, *numbers, *self.flags))
        if launches.noting():
            listed.note(len(pointers))
        listed.launch(current_stream(device))


class _Listed:
    """A launch with its arguments; see :class:`sdkde_core.engine.launches.Launch`."""

    def __init__(self, code: Any, grid: tuple[int, int], arguments: tuple[Any, ...]) -> None:
        self._code, self._grid, self._arguments = code, grid, arguments

    def note(self, pointers: int) -> None:
        """Record the launch, with its pointers, which come first, and its varying numbers."""
        given = list(self._arguments)
        self._placed = [k for k, x in enumerate(given) if k < pointers or isinstance(x, _Bits)]
        launches.note(self, [given[k].of if isinstance(given[k], _Bits) else given[k] for k in self._placed])
        rest = (None if k in self._placed else x for k, x in enumerate(given))
        self.key = self._code, self._grid, tuple(rest)

    def place(self, addresses: Sequence[Any]) -> None:
        given = list(self._arguments)
        for k, x in zip(self._placed, addresses):
            given[k] = bits(x) if isinstance(x, float) else x
        self._arguments = tuple(given)

    def launch(self, stream: int) -> None:
        code = self._code
        # code[grid] would prepare for a profiler's hooks, which takes as long as the launch
        code.run(*self._grid, 1, stream, code.function, code.packed_metadata, None, None, None, *self._arguments)


def compiled(kernel: Any, arguments: tuple[Any, ...], flags: tuple[Any, ...], config: Config) -> Any:
    """Return the compiled kernel for the current device, arguments, and compile-time parameters, which come last.

    An argument that is a dtype stands for an aligned array of that. A rehearsal only begins to compile it: None.
    """
    first = arguments[0]
    like = (first, 0) if isinstance(first, torch.dtype) else (first.dtype, first.data_ptr() % 16)
    key = (id(kernel), flags, config, *like, torch.cuda.current_device())
    begun = _compiled.get(key)
    if begun is None:
        begun = _compiled[key] = _pool.submit(_compile, _hash(), key[-1], kernel, arguments, flags, config)
    if _here.rehearses:
        return None
    try:
        found = begun.result()
        found._init_handles()  # loads the code: then its registers are known
        return found
    except BaseException as error:
        _compiled.pop(key, None)  # the next try may work
        query, tried = _here.tuned.pop(config, (None, None))
        if query is None or not isinstance(error, TritonError) or tried.rung == "forced":
            raise
        reject(query, tried, error)
        raise LaunchFailed(str(error)) from error


def _compile(hashed: Future[str], device: int, kernel: Any, arguments: Any, flags: Any, config: Config) -> Any:
    """Compile a kernel, in a thread; loading the code there would end another thread's capture of a CUDA graph."""
    with torch.cuda.device(device):
        with _driver:  # Triton makes it when it is first asked for, by the C compiler
            launcher = driver.active.launcher_cls
        hashed.result()
        named = dict(zip(kernel.arg_names[len(arguments) :], flags, strict=True))
        found = kernel.warmup(*arguments, grid=(1,), **named, **config.options)
        launcher(found.src, found.metadata)  # up to Triton 3.6 the C compiler makes it, which takes as long; it is kept
        return found


def rehearse(function: Callable[..., Any], *arguments: Any, **more: Any) -> None:
    """Call a function whose launches only begin to compile, for the current GPU; their tensors may be on the CPU."""
    before, _here.rehearses = _here.rehearses, True
    try:
        function(*arguments, **more)
    finally:
        _here.rehearses = before


@functools.cache
def card(device: torch.device) -> grids.Card:
    """Describe a device; the CPU, if nothing is interpreted, as the current GPU."""
    rehearses = device.type == "cpu" and not INTERPRETED and torch.cuda.is_available()
    return grids.Card.of(torch.device("cuda", torch.cuda.current_device()) if rehearses else device)


def configuration(kernel: str, problem: Problem, columns: int, processor: grids.Card, pieces: int = 2) -> Config:
    """Return a kernel's tuned launch parameters, or the defaults where no suitable ones are stored."""
    query, asked = _question(kernel, problem, columns, pieces, processor)
    found = tuned(query, asked, lambda x: fits(kernel, Config.of(x), columns, processor.capability, pieces))
    if found is None:
        return default(kernel, columns, processor.capability, merges(problem.d), pieces)
    config = Config.of(found.config)
    _here.tuned[config] = query, found
    return config


@functools.lru_cache(maxsize=4096)
def _question(kernel: str, problem: Problem, columns: int, pieces: int, processor: grids.Card) -> tuple[Query, Problem]:
    """Return what to look up for a kernel, and the problem with the dtype that stands for both in tables."""
    name = kernel + ("_full" if pieces == 3 else "")
    architecture = f"sm_{processor.capability}" if processor.name != "CPU" else "interpreted"
    number = dimension(kernel, columns, problem.d)
    query = Query("triton", name, CONFIG_VERSION, number, processor.name, architecture)
    asked = replace(problem, dtype="float64", precision="high") if exact(problem) else replace(problem, dtype="float32")
    return query, asked
