"""The user's arrays: recognised, validated once, and brought to one place.

Host data of every kind becomes NumPy, without a copy where possible. Data on a device stays there, in its own array
library, through the array API. Reading a number there waits for the device, so few are read: the points' extent, which
the plan needs anyway, shows whether all are finite.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from array_api_compat import device as device_of
from array_api_compat import is_array_api_obj, is_torch_array, to_device

from . import places
from .frames import Refused, library_of, names_of, read
from .places import Origin, detached, device_name, has_float64, is_attached, look, to_host, with_room

__all__ = ["Argument", "Data", "check_names", "check_query", "check_shapes", "check_weights", "columns_are_points"]
__all__ += ["ingest", "is_dask", "listed", "numbers", "refuse_masked", "refuse_misread", "refuse_not_finite"]

LARGE = 1 << 18  # host data with at least so many numbers are validated on the GPU that the user named
_HOST = Origin()


def refuse_masked(name: str, value: Any) -> None:
    """Raise TypeError for a masked array, or a list of some: as a plain array it would lose its mask."""
    rows = value if isinstance(value, list | tuple) else (value,)
    if any(isinstance(row, np.ma.MaskedArray) for row in rows):
        raise TypeError(f"{name} is a masked array; pass a plain array of the rows that count")


def is_dask(value: Any) -> bool:
    """Whether this is a Dask array; Dask is not imported for that."""
    return type(value).__module__.startswith("dask.array.") and hasattr(value, "chunks")


def refuse_misread(name: str, value: Any) -> None:
    """Raise TypeError for a masked array, which would lose its mask, and for Dask's objects: NumPy computes them."""
    if is_dask(value):
        instead = f"pass {name}.compute(), if memory holds it"
        raise TypeError(f"{name} is a Dask array, and only estimate and debias are lazy; {instead}")
    first = value[0] if isinstance(value, list | tuple) and value else value
    if type(first).__module__.startswith(("dask.", "dask_expr.", "distributed.")):
        instead = "one Dask array (.to_dask_array(lengths=True) of a data frame), or what it computes"
        raise TypeError(f"{name} is Dask's, of type {type(first).__name__}; pass {instead}")
    refuse_masked(name, value)


def numbers(name: str, value: Any) -> np.ndarray:
    """Return an argument that is real numbers, of any shape, on the host, as float64."""
    return Argument.of(name, value).at(_HOST)


class Argument(NamedTuple):
    """An array argument as it came: its name, its contribution to the result's dtype, and where it came from."""

    name: str
    array: Any  # NumPy where on_host, otherwise as the user gave it
    dtype: str  # "float32" or "float64"
    origin: Origin
    names: tuple[str, ...] = ()  # of a data frame's columns
    first: int = 0  # the number of its first row in the whole array

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape in plain numbers, whatever the library has."""
        return tuple(self.array.shape)

    @classmethod
    def of(cls, name: str, value: Any) -> Argument:
        """Recognise ``value``; TypeError or ValueError for what cannot be an array of real numbers."""
        if type(value) is np.ndarray and value.dtype.kind in "iufb":  # the common case
            narrow = value.dtype.kind == "f" and value.dtype.itemsize <= 4
            return cls(name, value, "float32" if narrow else "float64", _HOST)
        if isinstance(value, cls):
            return value
        refuse_misread(name, value)
        if places.is_traced(value):
            only = "which estimate and grad_log_density take as their query alone, without out, progress"
            instead = "call outside, or differentiate by torch.autograd.grad"
            raise TypeError(f"{name} is a tensor within torch.func or forward mode, {only}; {instead}")
        if getattr(value, "requires_grad", False):
            if not is_attached(value) or sys.modules["torch"].is_grad_enabled():  # in no_grad, values are wanted
                only = "only estimate, debias and grad_log_density differentiate: by a query every density, by all else"
                ways = "methods other than 'stacked' without coordinates and support, and none with out, progress"
                instead = f"pass {name}.detach(), or call within torch.no_grad()"
                raise TypeError(f"{name} requires grad, and {only} {ways}; {instead}")
            value = detached(value)
        if hasattr(value, "toarray"):  # SciPy's and CuPy's matrices and arrays
            raise TypeError(f"{name} is a sparse {type(value).__name__}; pass {name}.toarray()")
        try:
            return cls._recognised(name, value)
        except Refused as error:
            raise TypeError(str(error)) from None
        except ValueError as error:
            raise ValueError(f"{name} is no array of numbers: pass rows of equal length ({error})") from None
        except Exception as error:  # a library that cannot show its array (sparse, abstract, traced …)
            kind, dense = type(value).__name__, f"{name}.to_dense()" if hasattr(value, "to_dense") else "a dense one"
            raise TypeError(f"{name} is a {kind} that cannot be read as an array ({error}); pass {dense}") from None

    @classmethod
    def _recognised(cls, name: str, value: Any) -> Argument:
        numpys, library = isinstance(value, (np.ndarray, np.generic)), ""
        origin, has_dtype = _HOST, numpys or hasattr(value, "__array__")
        if not numpys and is_array_api_obj(value):
            xp, device = places.array_namespace(value), device_of(value)
            bits, place = _bits(xp, value.dtype), str(device).lower()
            if not bits:
                raise Refused(f"{name} has dtype {value.dtype}; pass real numbers (integer, boolean or floating)")
            if place == "meta":
                raise Refused(f"{name} is on the meta device and has no numbers")
            if bits < 32:
                value = xp.astype(value, xp.float32)  # NumPy may lack the type (bfloat16)
            origin, has_dtype = Origin(xp, device, on_host="cpu" in place), True  # NumPy sees its memory
            if not origin.on_host:
                return cls(name, value, "float32" if bits <= 32 else "float64", origin)
            value = to_host(value)
        elif not numpys and not (library := library_of(value)) and hasattr(value, "__dlpack_device__"):
            if value.__dlpack_device__()[0] != 1:  # kDLCPU
                raise Refused(f"{name} is on a device and not an array-API array; pass a torch, CuPy or JAX array")
            value, has_dtype = np.from_dlpack(value), True
        array = read(name, value, library) if library else np.asarray(value)
        if array.dtype.kind not in "iufb":
            hint = "; of a data frame, .to_numpy(float)" if hasattr(value, "to_numpy") else ""
            hint = "; of times, (t - t[0]) / np.timedelta64(1, 's')" if array.dtype.kind in "mM" else hint
            instead = f"pass real numbers (integer, boolean or floating){hint}"
            raise Refused(f"{name} is {type(value).__name__} of dtype {array.dtype}; {instead}")
        narrow = has_dtype and array.dtype.kind == "f" and array.dtype.itemsize <= 4
        names = () if array is value else names_of(value, library)
        return cls(name, array, "float32" if narrow else "float64", origin, names)

    def rows(self, start: int, stop: int) -> Argument:
        """Return some of the rows; a memory map is not read."""
        return self._replace(array=self.array[start:stop, ...], first=self.first + start)

    def at(self, place: Origin) -> Any:
        """Return the numbers at ``place``, not a copy where they are there already.

        On the host as float64; on a device float32 stays what it is, as the first operation with float64 promotes it.
        """
        if place.xp is None:
            return np.asarray(to_host(self.array), dtype=np.float64)  # extended precision may overflow: refused later
        x = self.array
        if isinstance(x, np.ndarray):
            narrow = x.dtype.kind == "f" and x.dtype.itemsize <= 4
            return places.from_host(np.asarray(x, dtype=np.float32 if narrow else np.float64), place.xp, place.device)
        if self.origin.xp is not place.xp:
            x = place.xp.from_dlpack(x)
        if self.origin != place:
            x = to_device(x, place.device)
        return x if place.xp.isdtype(x.dtype, "real floating") else place.xp.astype(x, place.xp.float64)


class Data(NamedTuple):
    """Validated input, in one array library on one device."""

    train: Any  # (n, d) float64; on a device also float32
    query: Any  # (m, d) likewise; None: the training points
    log_weights: Any  # (n,) float64, whose exponentials sum to 1, −inf for weight zero; None: all equal
    dtype: str  # of the result: "float32" or "float64"
    origin: Origin  # of the query, else of train: where results go
    device: str = "cpu"  # where the points are
    came_from: str = "cpu"  # where the user had them: host data may have been copied to a GPU
    unchecked: bool = False  # NaN and inf are to be refused, but have not been looked for yet
    names: tuple[str, ...] = ()  # of train's columns; empty where it has none
    name: str = "train"  # the argument that the points came as
    first: int = 0  # the number of their first row in the whole argument
    weight_span: float = math.inf  # see Problem

    def check_finite(self) -> None:
        """Raise ValueError for the first NaN or inf, where they are to be refused."""
        if self.unchecked:
            refuse_not_finite(self.name, self.train, self.first, self.names)
            if self.query is not None:
                refuse_not_finite("query", self.query, names=self.names)

    def row(self, i: int) -> tuple[str, int, Any]:
        """Return the argument, the number there and the values of point i, counting train's, then the query's."""
        n = self.train.shape[0]
        if i < n:
            return self.name, self.first + i, to_host(self.train[i, :])
        return "query", i - n, to_host(self.query[i - n, :])


def ingest(
    train: Any, query: Any = None, weights: Any = None, *, check_finite: bool = True, device: str | None = None
) -> Data:
    """Validate the user's arrays and bring them to one place.

    That place is the device of train, else of query, if it has float64, else the host. If ``device`` is a GPU with
    enough free memory, host data of at least :data:`LARGE` numbers are copied there; ``"cpu"`` brings everything to the
    host.

    TypeError or ValueError for data that cannot be right: their kind, shapes, names or weights. NaN and inf in the
    points are found when their extent is read, see :meth:`Data.check_finite`.
    """
    x = Argument.of("train", train)
    q = None if query is None else Argument.of("query", query)
    w = None if weights is None else Argument.of("weights", weights)
    check_shapes(x, q, w)
    place = _HOST
    points = [x] if q is None else [x, q]
    on_device = [a.origin for a in points if not a.origin.on_host]
    if on_device and device != "cpu" and has_float64(on_device[0]):
        place = on_device[0]
    elif device and not on_device and (numbers := sum(math.prod(a.shape) for a in points)) >= LARGE:
        place = with_room(device, 64 * numbers)  # bytes, work space included
    train = x.at(place)
    train = train[:, None] if train.ndim == 1 else train
    if q is not None:
        query = q.at(place) if q.array.shape[0] else train[:0, :]
        query = query[:, None] if query.ndim == 1 else query
    device = device_name(train)
    came_from = device if on_device else "cpu"
    weighed, span = (None, math.inf) if w is None else _weighed(w.at(place))
    dtype, origin = max(x.dtype, (q or x).dtype), (q or x).origin  # "float64" > "float32"
    return Data(train, query, weighed, dtype, origin, device, came_from, check_finite, x.names, weight_span=span)


def check_query(query: Argument, n: int, d: int, names: tuple[str, ...] = ()) -> None:
    """Refuse a query whose shape or columns' names do not fit train, (n, d); none of its values is read."""
    if names and query.names and (query.array.ndim == 2 or len(names) == 1):
        check_names(names, query.names)
    shape = query.shape
    if len(shape) not in (1, 2):
        raise _wrong_axes(query)
    if len(shape) == 1 and d > 1 and shape != (0,):
        hint = "query[None, :] for one point" if shape == (d,) else f"shape (m, {d})"
        hint += f", or a data frame with the columns {listed(names)} (a row of pandas: df.iloc[[0]])" if names else ""
        raise ValueError(f"query has shape {shape}, but train has {d} dimensions; pass {hint}")
    if len(shape) == 2 and shape[1] != d:
        hint = ""
        if shape[0] == d:
            hint = columns_are_points(*shape, "query")
        elif n in shape:
            hint = columns_are_points(n, d, *(("train", "query") if shape[0] == n else ("train",)))
        raise ValueError(f"query has {shape[1]} dimensions, but train has {d}; pass shape (m, {d}){hint}")


def _wrong_axes(a: Argument) -> ValueError:
    return ValueError(f"{a.name} has shape {a.shape}; pass (points, dimensions), or in one dimension (points,): [0.5]")


@functools.lru_cache(maxsize=64)
def _bits(xp: Any, dtype: Any) -> int:
    """The bits of a floating dtype; 64 for integers and booleans; 0 for a dtype without real numbers."""
    if xp.isdtype(dtype, "real floating"):
        return int(xp.finfo(dtype).bits)
    return 64 if xp.isdtype(dtype, ("integral", "bool")) else 0


def columns_are_points(n: int, d: int, *names: str) -> str:
    """A hint for errors that points in columns may cause, where there are more dimensions than points; else ""."""
    if n >= d:
        return ""
    return f"; if columns are points, as for SciPy's gaussian_kde, pass {' and '.join(f'{x}.T' for x in names)}"


def check_names(train: tuple[str, ...], query: tuple[str, ...], name: str = "query") -> None:
    """Refuse columns that have other names than train's, or another order; columns without names fit any."""
    if not (train and query) or train == query:
        return
    reordered = sorted(train) == sorted(query)
    if name == "score" and not reordered:
        return  # slopes may have names of their own
    other = "the columns of train in another order" if reordered else "other columns than train"
    has = f"{name} has {other}: {listed(query)}, where train has {listed(train)}"
    how = f"a Series by .rename, a DataArray by .sel, a data frame by {name}[list(train.columns)]"
    raise ValueError(f"{has}; pass the same ones in one order ({how})")


def listed(names: Sequence[str]) -> str:
    return ", ".join(names if len(names) <= 10 else (*names[:9], f"… ({len(names)})"))


def check_shapes(x: Argument, q: Argument | None, w: Argument | None) -> None:
    """Refuse train, query and weights whose shapes do not fit, as :func:`ingest` does."""
    shape = x.shape
    if len(shape) not in (1, 2):
        raise _wrong_axes(x)
    if 0 in shape:
        raise ValueError(f"train is empty (shape {shape}); pass at least one point with at least one dimension")
    n, d = shape if len(shape) == 2 else (shape[0], 1)
    if q is not None:
        check_query(q, n, d, x.names)
    if w is not None and w.shape != (n,):
        hint = columns_are_points(n, d, "train") if w.shape == (d,) else ""
        raise ValueError(f"weights has shape {w.shape}, but train has {n} points; pass shape ({n},){hint}")


def refuse_not_finite(name: str, x: Any, first: int = 0, names: tuple[str, ...] = ()) -> None:
    """Raise ValueError for the first value of points (n, d) that is not finite; ``first``: the first row's number."""
    xp = places.array_namespace(x)
    total = float(xp.sum(x))  # one pass without temporaries; a finite sum has only finite terms
    if np.isfinite(total) or bool(xp.all(xp.isfinite(x))):
        return
    i, j = (int(k) for k in np.argwhere(~np.isfinite(to_host(x)))[0])
    found = f"{to_host(x)[i, j]} at row {first + i}, column {j}{f' ({names[j]!r})' if names else ''}"
    raise ValueError(f"{name} has values that are not finite, the first {found}; drop or fill them")


def _weighed(w: Any) -> tuple[Any, float]:
    """Normalised log weights (n,), float64, None where all are equal; and their span."""
    xp = places.array_namespace(w)
    w = xp.astype(w, xp.float64, copy=False)
    wrong, span = check_weights(w)
    if wrong == "zero":
        raise ValueError("weights are all zero; pass at least one positive weight")
    if wrong == "equal":
        return None, math.inf
    log_w = xp.log(w)
    if is_torch_array(w):
        return log_w.log_softmax(0), span  # one kernel for five
    log_w = log_w - xp.max(log_w)  # logs first: the ratio of two weights may underflow
    return log_w - xp.log(xp.sum(xp.exp(log_w))), span


def check_weights(w: Any, first: int = 0) -> tuple[str, float]:
    """Return whether weights (n,) are all ``"equal"``, or all ``"zero"``, or neither (``""``); and their logs' span.

    ValueError for the first that is negative or not finite; ``first`` is the number of the first one.
    """
    xp = places.array_namespace(w)
    least, most = look(lambda *ends: ends, *(w.aminmax() if is_torch_array(w) else (xp.min(w), xp.max(w))))
    if not (math.isfinite(least) and math.isfinite(most)):
        i = first + int(np.flatnonzero(~np.isfinite(to_host(w)))[0])
        raise ValueError(f"weights has values that are not finite, the first at index {i}; drop those points")
    if least < 0:
        i = int(np.flatnonzero(to_host(w) < 0)[0])
        raise ValueError(f"weights has negative values, the first {float(w[i])} at index {first + i}; pass weights ≥ 0")
    span = float(math.ceil(math.log(most) - math.log(least))) if least > 0.0 else math.inf
    return "zero" if most == 0 else "equal" if least == most else "", span
