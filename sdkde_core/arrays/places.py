"""Arrays of any library on any device: where they are, moves between devices, reads by the host; NumPy's state."""

from __future__ import annotations

import functools
import importlib
import math
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import array_api_compat
import numpy as np
from array_api_compat import device as device_of
from array_api_compat import is_cupy_array, is_jax_namespace, is_torch_array, to_device
from numpy.typing import NDArray

__all__ = ["Array", "Origin", "array_namespace", "c_order", "convert", "detached", "device_name", "is_attached"]
__all__ += ["is_traced", "look", "public", "quiet", "rounded", "to_host"]

Array = NDArray[Any]
P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class Origin:
    """Where an array came from, so that results can go back there: an array-API namespace (None: NumPy) and device."""

    xp: Any = None
    device: Any = None
    on_host: bool = True

    def __reduce__(self) -> Any:
        """Modules and devices do not pickle; where they are not there, arrays are NumPy's."""
        return Origin.at, self.address

    @staticmethod
    def of(x: Any) -> Origin:
        """Where an array of the computation is."""
        return Origin() if isinstance(x, np.ndarray) else Origin(array_namespace(x), device_of(x), on_host=False)

    @property
    def address(self) -> tuple[str, str, bool]:
        return "" if self.xp is None else self.xp.__name__, str(self.device), self.on_host

    @staticmethod
    def at(library: str, device: str, on_host: bool) -> Origin:
        """Return the place of that name, if it is here; else NumPy's. Imports the library."""
        if not library:
            return Origin()
        try:
            xp = importlib.import_module(library)
            place = device_of(xp.zeros(1, device=None if "torch" not in library else device))
        except Exception:  # a library says in its own way that it has no such device
            return Origin()
        return Origin(xp, place, on_host) if str(place) == device else Origin()

    def restore(self, x: Any, dtype: str) -> Any:
        """Return ``x`` with ``dtype``, as the kind of array and on the device that this origin describes."""
        if self.xp is None or isinstance(x, np.ndarray) or (self.on_host and not is_attached(x)):
            x = np.ascontiguousarray(to_host(x), dtype=dtype)
            return x if self.xp is None else self.xp.asarray(x, device=self.device)
        if array_namespace(x) is not self.xp:
            x = self.xp.from_dlpack(x)
        if dtype == "float64" and not has_float64(self):
            dtype = "float32"
        return to_device(self.xp.astype(x, getattr(self.xp, dtype), copy=False), self.device)


def array_namespace(x: Any) -> Any:
    """Return the array-API namespace of ``x``. NumPy is its own: to load array-api-compat's takes 50 ms."""
    return np if isinstance(x, np.ndarray) else array_api_compat.array_namespace(x)


def device_name(x: Any) -> str:
    """Name the device of ``x``: ``"cpu"``, or as its library writes it (``"cuda:0"``)."""
    if isinstance(x, np.ndarray):
        return "cpu"
    device = device_of(x)
    return f"cuda:{device.id}" if type(x).__module__.startswith("cupy") else str(device).lower()


def convert(x: Any, library: str, device: str) -> Any:
    """Return the float64 array ``x`` as one of ``library`` on ``device``; itself where it is that already.

    On the host where the device has no float64: a backend that works there packs it itself.
    """
    if library == "numpy":
        return to_host(x)
    xp = importlib.import_module(f"array_api_compat.{library}")
    if device.partition(":")[0] in ("mps", "xpu") and not has_float64(Origin(xp, device)):
        device = "cpu"
    if isinstance(x, np.ndarray):
        return from_host(x, xp, device)
    if array_namespace(x) is not xp:
        x = xp.from_dlpack(x)
    return x if device_name(x) == device else to_device(x, device)


def from_host(x: np.ndarray, xp: Any, device: Any) -> Any:
    """Return a NumPy array as one of another library on a device, sharing memory where that can be.

    PyTorch has no tensors that run backwards, skip parts of numbers, or are read-only: it raises, or warns.
    """
    plain = x.flags.forc and x.flags.aligned and min(x.strides, default=0) >= 0  # one row may run backwards too
    copied = "cpu" not in str(device).lower()
    return xp.asarray(x if plain and (x.flags.writeable or copied) else np.array(x, order="C"), device=device)


def is_attached(x: Any) -> bool:
    return getattr(x, "requires_grad", False) is True and is_torch_array(x)


def is_traced(x: Any) -> bool:
    """Whether ``x`` is a tensor within ``torch.func``, where only PyTorch sees numbers, or one of forward mode."""
    if not is_torch_array(x):
        return False
    torch = sys.modules["torch"]
    inside = torch._C._are_functorch_transforms_active() or torch._C._functorch.is_functorch_wrapped_tensor(x)
    return inside or torch.autograd.forward_ad.unpack_dual(x).tangent is not None


def is_followed(x: Any) -> bool:
    """Whether results from ``x`` need derivatives, as autograd records or ``torch.func`` traces."""
    return (is_attached(x) and sys.modules["torch"].is_grad_enabled()) or is_traced(x)


def detached(x: Any) -> Any:
    """Return ``x`` detached from autograd, or itself if it is not attached."""
    return x.detach() if is_attached(x) else x


def c_order(x: Any) -> Any:
    """Return ``x`` in C order, itself where it is: what kernels that are given its address rely on."""
    if isinstance(x, np.ndarray):
        return np.ascontiguousarray(x)
    if is_torch_array(x):
        return x.contiguous()
    return importlib.import_module("cupy").ascontiguousarray(x) if is_cupy_array(x) else x


def to_host(x: Any) -> np.ndarray:
    """Return ``x`` as a NumPy array, without a copy where it is on the host."""
    if isinstance(x, np.ndarray):
        return x
    try:
        x = to_device(x, "cpu")
    except ValueError:  # a library with other names for its devices: its default one is the host
        x = to_device(x, array_namespace(x).__array_namespace_info__().default_device())
    return np.asarray(x)


def with_room(device: str, size: int) -> Origin:
    """Return an NVIDIA or AMD GPU as PyTorch's, if so many bytes are free there; else the host."""
    kind, _, number = device.partition(":")
    if kind != "cuda":
        return Origin()
    try:
        xp = importlib.import_module("array_api_compat.torch")
        place = xp.device("cuda", int(number or 0))
        free = xp.cuda.mem_get_info(place)[0] if xp.cuda.is_available() else 0
    except (ImportError, RuntimeError, AssertionError):  # the backend says what is wrong
        return Origin()
    return Origin(xp, place, on_host=False) if free >= size else Origin()


_float64: dict[tuple[str, str], bool] = {}  # whether a device has it, by library and device


def has_float64(place: Origin) -> bool:
    """Whether the device has float64; JAX is asked every time, as users switch it on and off."""
    xp, device = place.xp, place.device
    key = xp.__name__, str(device)
    if key not in _float64 or is_jax_namespace(xp):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # JAX says that it gives float32
                one = xp.asarray([1.0], dtype=xp.float64, device=device)
                adds = "xpu" not in str(device) or bool((one + one)[0] == 2.0)  # some Intel GPUs hold it and cannot add
                _float64[key] = one.dtype == xp.float64 and adds
        except (TypeError, ValueError, RuntimeError):  # Apple's GPUs have none
            _float64[key] = False
    return _float64[key]


def look(decide: Callable[..., R], *numbers: Any) -> R:
    """Return ``decide(*floats)``, the entries of float64 arrays that may be on a device.

    They are read at once, as the host waits for the device at every read.
    """
    if len(numbers) == 1 and numbers[0].ndim == 0:
        return decide(float(numbers[0]))
    if isinstance(numbers[0], (np.ndarray, np.generic)):
        return decide(*[float(x) for number in numbers for x in np.ravel(number)])
    xp = array_namespace(numbers[0])
    flat = [xp.reshape(x, (-1,)) for x in numbers]
    together = flat[0] if len(flat) == 1 else xp.concat(flat)
    return decide(*(together if is_torch_array(together) else to_host(together)).tolist())


def rounded(x: float) -> float:
    """Round a number ≥ 0 up by at most an eleventh, so that decisions by it rarely change with the data."""
    return 2.0 ** (math.ceil(8.0 * math.log2(x)) / 8.0) if 0.0 < x < 1e300 else x


#: Have NumPy pass over underflow, overflow and NaN within a function: a decorator. Sums of exponentials underflow by
#: design, and what must not overflow is checked.
quiet = np.errstate(all="ignore")


def public(function: Callable[P, R]) -> Callable[P, R]:
    """Make ``function`` :func:`quiet`, and break PyTorch's graphs at its call: nothing within is traced.

    Tracing takes ten seconds, and fails in kernels. PyTorch is not imported for this: without its tracer nobody traces.
    """
    outside: Any = None

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        nonlocal outside
        if "torch._dynamo" not in sys.modules:
            with np.errstate(all="ignore"):
                return function(*args, **kwargs)
        if outside is None:
            outside = sys.modules["torch"].compiler.disable(quiet(function))
        return outside(*args, **kwargs)

    call.__code__ = call.__code__.replace(co_name=function.__name__)  # of its own: by it PyTorch counts recompilations
    return functools.wraps(function)(call)
