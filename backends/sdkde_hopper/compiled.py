"""Compiling the kernels by NVRTC, keeping the compiled code, and launching it."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import io
import itertools
import logging
import os
import re
import struct
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import torch

from sdkde_core.plugin import cache_folder, current_stream, launches, new_lock, on_device, write_atomically

from . import plan
from .bounds import RAISED_BITS, SCALE_BITS

try:
    from cuda.bindings import driver, nvrtc

    if importlib.util.find_spec("cuda.core") is None:  # to import it takes four times as long; compiling needs it
        raise ModuleNotFoundError("No module named 'cuda.core'")
except ModuleNotFoundError as error:  # PyTorch brings other packages whose name begins with ``cuda``
    raise ModuleNotFoundError(f"{error}: pip install 'sdkde-core[hopper]'") from error

ARCHITECTURE = "sm_90a"

_logger = logging.getLogger("sdkde")


class _Module(NamedTuple):
    products: tuple[str, ...]
    files: tuple[str, ...]
    constants: Mapping[str, int]


def module_name(kind: str, width: int, weighted: bool, precision: str) -> str:
    return f"{kind}_{width}" + weighted * "_weighted" + (precision == "high") * "_high"


def wgmma(
    name: str, n: int, *, halves: bool = True, a: str = "registers", b: str = "shared", begins: bool = False
) -> str:
    """Return a C++ function ``name(sums, operands)`` that adds a product of (64, k) by (k, n) to fp32 sums.

    It is one instruction, an asynchronous product of Tensor Cores. n is a multiple of 8, and a thread holds n/2 sums; k
    is 16 of half precision, or 32 of bytes, e5m2 by e4m3. The first operand is in registers, four of a thread, or in
    shared memory, ``"transposed"`` there if it is contiguous along its rows; the second in shared memory, contiguous
    along k, or ``"transposed"`` along its columns. With ``begins`` the sums start at zero, whatever the registers hold.
    """
    sums, parameter, given, operand = n // 2, "uint64_t a", ['"l"(a)'], f"%{n // 2}"
    if a == "registers":
        parameter, given = "const uint32_t* a", [f'"r"(a[{i}])' for i in range(4)]
        operand = f"{{{', '.join(f'%{sums + i}' for i in range(4))}}}"
    count = len(given)
    flags = {"registers": "", "shared": ", 0", "transposed": ", 1"}[a] + f", {int(b == 'transposed')}" if halves else ""
    outputs = ", ".join(f'"{"=" if begins else "+"}f"(d[{i}])' for i in range(sums))
    inputs = ", ".join([*given, '"l"(b)', f'"n"({int(not begins)})'])
    registers = ", ".join(f"%{i}" for i in range(sums))
    k, types = (16, "f32.f16.f16") if halves else (32, "f32.e5m2.e4m3")
    return (
        f"__device__ __forceinline__ void {name}(float (&d)[{sums}], {parameter}, uint64_t b) {{\n"
        f'  asm volatile("{{.reg .pred p; setp.ne.b32 p, %{sums + count + 1}, 0; wgmma.mma_async.sync.aligned."\n'
        f'    "m64n{n}k{k}.{types} {{{registers}}}, {operand}, %{sums + count}, p, 1, 1{flags};}}"\n'
        f"    : {outputs} : {inputs});\n}}\n"
    )


def _both(name: str, n: int, **how: Any) -> tuple[str, str]:
    """The product that begins sums, and the one that adds to them."""
    return wgmma(f"begin_{name}", n, begins=True, **how), wgmma(f"add_{name}", n, **how)


_EXPONENTS = _both("n64", 64)


def _of_rows(kind: str, width: int, weighted: bool, precision: str) -> _Module:
    """The module of ``log_sum``, of LAPLACE too, or of ``mean_dense``."""
    mean, high = kind == "dense", int(precision == "high")
    ring, groups = plan.ring(width, precision, mean, weighted), plan.warpgroups(width, precision, mean)
    constants = {"WIDTH": width, "WEIGHTED": int(weighted), "HIGH": high, "STAGES": ring.stages}
    constants |= {"WARPGROUPS": groups, "REGISTERS": plan.REGISTERS[groups]}
    if mean:
        values, points = (_both(name, n, b="transposed") for name, n in (("values", width + 8), ("points", width)))
        products = *_EXPONENTS, *values, *points
        return _Module(products, ("exponents.cuh", "dense.cu"), constants | {"DENSE_SHARED": ring.shared})
    constants |= {"LOG_SUM_SHARED": ring.shared, "RAISED_BITS": RAISED_BITS[precision]}
    return _Module(_EXPONENTS, ("exponents.cuh", "log_sum.cu"), constants | {"LAPLACE": int(kind == "laplace")})


def _mean(width: int, precision: str) -> _Module:
    high, every = precision == "high", 2 * width + 8
    products = (
        *(*_EXPONENTS, *_both("values", 24 if high else every, b="transposed")),
        wgmma("add_hi", width + 8, b="transposed"),
        *_both("transposed", every, a="transposed", b="transposed"),
        *_both("bytes", every, halves=False, a="shared"),
    )
    shared = {"TILES": plan.TILES, "MEAN_SHARED": plan.MEAN_SHARED[precision, width]}
    constants = shared | {"WIDTH": width, "HIGH": int(high), "SCALE_BITS": SCALE_BITS[precision]}
    return _Module(products, ("pieces.cuh", "exponents.cuh", "symmetric.cu", "mean.cu"), constants)


#: Weights are relative to the largest, times two to WEIGHT_BITS: times coordinates they are in half precision's range.
MODULES: Mapping[str, _Module] = {
    "pack": _Module((), ("pieces.cuh", "pack.cu", "whiten.cu"), {"WEIGHT_BITS": 10}),
    "exact": _Module((), ("exact.cu",), {}),
    **{module_name("mean", width, False, precision): _mean(width, precision) for precision, width in plan.MEAN_SHARED},
    **{
        module_name(*which): _of_rows(*which)
        for which in itertools.product(("log_sum", "laplace", "dense"), plan.WIDTHS, (False, True), plan.LONGEST)
    },
}


def nvrtc_version() -> str:
    """Return NVRTC's version; loads the library, and raises RuntimeError where there is none."""
    error, major, minor = nvrtc.nvrtcVersion()
    if error != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise RuntimeError(f"NVRTC does not tell its version: {error.name}")
    return f"{major}.{minor}"


def check_driver() -> None:
    """Raise RuntimeError where the driver is of an older major version than NVRTC, whose code it does not load."""
    version, compiler = _check(driver.cuDriverGetVersion()), nvrtc_version()
    if version // 1000 < int(compiler.partition(".")[0]):
        known = f"the driver knows CUDA up to {version // 1000}.{version % 1000 // 10}"
        raise RuntimeError(f"NVRTC is {compiler} and {known}; install cuda-core's extra for it")


def source(module: str) -> str:
    products, files, constants = MODULES[module]
    defined = "".join(f"#define {name} {value}\n" for name, value in constants.items())
    names = ("sm90.cuh", *files)
    first, *rest = (resources.files(__package__).joinpath("device", name).read_text("utf-8") for name in names)
    return "\n".join([defined, first, *products, *rest])


_importing = new_lock()


def compile_module(module: str, log: io.StringIO | None = None) -> bytes:
    """Compile a module, which needs no card; ``log`` is told registers, spills, and what the assembler warns of."""
    with _importing:  # for the first time by one thread: another one would find half of it
        from cuda.core import Program, ProgramOptions

    options = ProgramOptions(arch=ARCHITECTURE, std="c++17", ptxas_options=None if log is None else ["-v"])
    with closing(Program(source(module), "c++", options)) as program:
        return bytes(program.compile("cubin", logs=log).code)


def _folder() -> Path:
    """The folder of compiled code, which nobody but the user can change; OSError where there is none."""
    folder = cache_folder() / "hopper"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    if hasattr(os, "getuid") and found.st_uid != os.getuid():
        raise PermissionError(f"{folder} is another user's; set XDG_CACHE_HOME to a folder of your own")
    if found.st_mode & 0o777 != 0o700:
        folder.chmod(0o700)
    return folder


def _code(module: str) -> bytes:
    """A module's compiled code: from disk, where it follows its digest, or compiled."""
    key = hashlib.sha256("\n".join([source(module), nvrtc_version(), ARCHITECTURE]).encode()).hexdigest()
    name, code = f"{module}-{key[:32]}", b""

    def digest(code: bytes) -> bytes:
        return hashlib.sha256(name.encode() + code).digest()  # no other file's code is taken for it

    try:
        path = _folder() / name
        if path.exists():
            kept = path.read_bytes()
            if kept[:32] == digest(kept[32:]):
                return kept[32:]
        code = compile_module(module)
        with write_atomically(path) as new:
            new.write_bytes(digest(code) + code)
    except OSError as error:
        _logger.info("hopper: compiled code is not kept: %s", error)
    return code or compile_module(module)


class _Arguments:
    """A kernel's arguments as the driver takes them in one piece. A list of them takes twice as long."""

    def __init__(self, size: int) -> None:
        self.buffer, self.size = ctypes.create_string_buffer(size), ctypes.c_size_t(size)
        pieces = 1, ctypes.addressof(self.buffer), 2, ctypes.addressof(self.size), 0  # CU_LAUNCH_PARAM_BUFFER_…
        self._pieces = (ctypes.c_void_p * 5)(*pieces)
        self.extra = ctypes.addressof(self._pieces)


class _Here(threading.local):
    """Where a thread launches: the device, the stream, and the arguments of a kernel."""

    def __init__(self) -> None:
        self.device, self.stream = -1, 0
        self.arguments = _Arguments(512)


_here = _Here()


class launching:
    """Launch what follows on a tensor's device, on its current stream. (A generator takes three times as long.)"""

    def __init__(self, x: torch.Tensor) -> None:
        self._device, self._x = on_device(x), x

    def __enter__(self) -> None:
        self._device.__enter__()
        _here.device = self._x.get_device()
        _here.stream = current_stream(_here.device)
        # PyTorch does not make it the driver's current device where a thread has only taken memory from its pool.
        error, device = driver.cuCtxGetDevice()
        if error != driver.CUresult.CUDA_SUCCESS or int(device) != _here.device:
            _check(driver.cuCtxSetCurrent(_check(driver.cuDevicePrimaryCtxRetain(_here.device))))

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._device.__exit__(kind, error, trace)


class Kernel:
    """A kernel of a module: so many threads a program, which takes so many bytes of shared memory beyond its own."""

    def __init__(self, module: str, name: str, threads: int, shared: int) -> None:
        self._kernel = _check(driver.cuLibraryGetKernel(_module(module), name.encode()))
        self._function = driver.CUfunction(int(self._kernel))
        self._threads, self._shared = threads, shared
        self.layout = struct.Struct(parameters(source(module), name))
        self._allowed: set[int] = set()  # devices on which it may take that much

    def __call__(self, programs: int, *arguments: torch.Tensor | int | float | None) -> None:
        """Launch it, within :func:`launching`. None is a null pointer."""
        here, shared = _here, self._shared
        if shared and here.device not in self._allowed:
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            _check(driver.cuKernelSetAttribute(attribute, shared, self._kernel, here.device))
            self._allowed.add(here.device)
        if launches.noting():
            _Listed(self, programs, arguments)
        values = [x.data_ptr() if isinstance(x, torch.Tensor) else x or 0 for x in arguments]
        self.layout.pack_into(here.arguments.buffer, 0, *values)
        here.arguments.size.value = self.layout.size
        self.launch(programs, here.stream, here.arguments.extra)

    def launch(self, programs: int, stream: int, extra: int) -> None:
        """Launch it with arguments in one piece; ``extra``: the address of what says where they are."""
        threads, shared = self._threads, self._shared
        found = driver.cuLaunchKernel(self._function, programs, 1, 1, threads, 1, 1, shared, stream, 0, extra)
        if found[0]:  # CUDA_SUCCESS is 0
            _check(found)


class _Listed:
    """A launch of a list, with arguments of its own; see :class:`sdkde_core.engine.launches.Launch`."""

    def __init__(self, kernel: Kernel, programs: int, arguments: tuple[Any, ...]) -> None:
        self._kernel, self._programs, self._layout = kernel, programs, kernel.layout
        kinds = zip(kernel.layout.format, arguments, strict=True)
        self._pointers = [k for k, (kind, x) in enumerate(kinds) if kind == "P" or isinstance(x, launches.Varying)]
        launches.note(self, [0 if arguments[k] is None else arguments[k] for k in self._pointers])
        self._values = [0 if k in self._pointers else x for k, x in enumerate(arguments)]
        self.key = kernel, programs, tuple(self._values)
        self._arguments = _Arguments(kernel.layout.size)

    def place(self, addresses: Sequence[Any]) -> None:
        for k, address in zip(self._pointers, addresses):
            self._values[k] = address
        self._layout.pack_into(self._arguments.buffer, 0, *self._values)

    def launch(self, stream: int) -> None:
        self._kernel.launch(self._programs, stream, self._arguments.extra)


def parameters(code: str, kernel: str) -> str:
    """Return the types of a kernel's parameters, as :mod:`struct` has them, aligned as in C."""
    found = re.search(rf"__global__[^;{{]*?\b{kernel}\(([^)]*)\)\s*{{", code)
    assert found is not None, kernel
    kinds = {"int": "i", "double": "d"}
    return "".join("P" if "*" in x else kinds[x.split()[0]] for x in found[1].split(","))


_lock = new_lock()


@functools.cache
def _module(name: str) -> Any:
    return _check(driver.cuLibraryLoadData(_code(name), [], [], 0, [], [], 0))


def load(*names: str) -> None:
    """Load modules; those that are not on disk are compiled at the same time, as each takes a second."""
    with _lock, ThreadPoolExecutor(len(names)) as pool:
        list(pool.map(_module, names))


@functools.cache
def kernel(module: str, name: str, threads: int, shared: int = 0) -> Kernel:
    """Return a kernel, compiled the first time; see :class:`Kernel`."""
    with _lock:  # another thread may be compiling the module
        return Kernel(module, name, threads, shared)


def _check(result: tuple[Any, ...]) -> Any:
    """Return what the driver's function returned beside its status; RuntimeError where it failed."""
    if result[0] != driver.CUresult.CUDA_SUCCESS:
        message = driver.cuGetErrorString(result[0])[1]
        raise RuntimeError(f"CUDA: {message.decode() if message else result[0].name}")
    return result[-1]
