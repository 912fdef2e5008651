"""The user's arrays: recognised, validated once, and brought to one place.

Host data of every kind becomes NumPy, without a copy where possible. Data on a device stays there, in its own array
library, through the array API; a backend that wants another library or device gets a conversion from the core.

Every look at a number on a device waits for the device, so there are few: the weights are looked at once, and whether
points on a device are finite shows in their extent, which the plan reads anyway.
"""

from __future__ import annotations

import datetime
import functools
import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from array_api_compat import array_namespace, is_array_api_obj, is_torch_array, to_device
from array_api_compat import device as device_of

from .looks import look
from .places import (
    Origin,
    detached,
    device_name,
    from_host,
    grad_enabled,
    has_float64,
    is_attached,
    to_host,
    with_room,
)

__all__ = [
    "Argument",
    "Data",
    "Query",
    "check_finite",
    "check_names",
    "check_query",
    "check_shapes",
    "check_weights",
    "columns_are_points",
    "ingest",
    "is_dask",
    "refuse_dask",
    "refuse_masked",
]


#: Numbers on the host that a GPU looks at faster, the copy included, and bytes that each may take there meanwhile.
LARGE, BYTES = 1 << 18, 64


def refuse_masked(name: str, value: Any) -> None:
    """Raise TypeError for a masked array, or a list of some: as a plain array it would lose its mask in silence."""
    rows = value if isinstance(value, list | tuple) else (value,)
    if any(isinstance(row, np.ma.MaskedArray) for row in rows):
        raise TypeError(f"{name} is a masked array; pass a plain array of the rows that count")


def is_dask(value: Any) -> bool:
    """Whether this is a Dask array; Dask is not imported for that."""
    if "dask.array" not in sys.modules:
        return False
    return type(value).__module__.startswith("dask.array.") and hasattr(value, "chunks")


#: What to pass in place of what is Dask's, by the module that it comes from.
_INSTEAD = {
    "dask.delayed": "{0}.compute(), or dask.array.from_delayed({0}, shape=..., dtype=...)",
    "dask.bag": "numpy.asarray({0}.compute()), or a Dask array",
    "distributed.client": "{0}.result()",
}


def refuse_dask(name: str, value: Any) -> None:
    """Raise TypeError for what is Dask's, which says what to pass instead: in silence it would all be computed here."""
    if is_dask(value):
        raise TypeError(
            f"{name} is a Dask array, and only estimate and debias are lazy; pass {name}.compute(), if memory holds it"
        )
    module, kind = type(value).__module__, type(value).__name__.removesuffix("Leaf")
    if module.startswith(("dask.", "dask_expr.", "distributed.")):
        place = ".".join(module.split(".")[:2])
        raise TypeError(
            f"{name} is a Dask {kind}; pass {_INSTEAD.get(place, '{0}.to_dask_array(lengths=True)').format(name)}"
        )
    if isinstance(value, list | tuple) and value and type(value[0]).__module__.startswith("dask."):
        raise TypeError(
            f"{name} is a {kind} of Dask objects; pass one Dask array, such as dask.array.concatenate({name}) of arrays"
        )


class _Refused(Exception):
    """What is wrong with an argument, to follow its name."""


class Argument(NamedTuple):
    """An array argument as it came: its name, its dtype's share in the result's, and where it came from."""

    name: str
    array: Any  # NumPy where on_host, otherwise as the user gave it
    dtype: str  # "float32" or "float64"
    origin: Origin
    names: tuple[str, ...] = ()  # of a data frame's columns
    first: int = 0  # of a part of the rows, the first one's number in the whole

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.array.shape)

    @classmethod
    def of(cls, name: str, value: Any) -> Argument:
        """Recognise ``value``; TypeError or ValueError for what cannot be an array of real numbers."""
        refuse_dask(name, value)
        if getattr(value, "requires_grad", False):
            if grad_enabled() or not is_attached(value):  # who differentiates has detached what comes here
                raise TypeError(
                    f"{name} requires grad, and only estimate, debias and grad_log_density differentiate, without "
                    f"out and progress; pass {name}.detach(), or call within torch.no_grad()"
                )
            value = detached(value)
        refuse_masked(name, value)
        if hasattr(value, "toarray"):  # SciPy's and CuPy's matrices and arrays
            raise TypeError(f"{name} is a sparse {type(value).__name__}; pass {name}.toarray()")
        try:
            return cls._of(name, value)
        except _Refused as error:
            raise TypeError(f"{name} {error}") from None
        except ValueError as error:
            raise ValueError(f"{name} is no array of numbers: pass rows of equal length ({error})") from None
        except Exception as error:  # a library that cannot show its array (sparse, abstract, traced …)
            kind, dense = type(value).__name__, f"{name}.to_dense()" if hasattr(value, "to_dense") else "a dense one"
            raise TypeError(f"{name} is a {kind} that cannot be read as an array ({error}); pass {dense}") from None

    @classmethod
    def _of(cls, name: str, value: Any) -> Argument:
        origin, narrow = Origin(), isinstance(value, (np.ndarray, np.generic)) or hasattr(value, "__array__")
        if is_array_api_obj(value) and not isinstance(value, (np.ndarray, np.generic)):
            xp, device = array_namespace(value), device_of(value)
            bits, place = _bits(xp, value.dtype), str(device).lower()
            if not bits:
                raise _Refused(f"has dtype {value.dtype}; pass real numbers (integer, boolean or floating)")
            if place == "meta":
                raise _Refused("is on the meta device and has no numbers")
            if bits < 32:
                value = xp.astype(value, xp.float32)  # NumPy may lack the type (bfloat16)
            origin, narrow = Origin(xp, device, on_host="cpu" in place), True  # NumPy sees its memory
            if not origin.on_host:
                return cls(name, value, "float32" if bits <= 32 else "float64", origin)
            value = to_host(value)
        elif hasattr(value, "__dlpack_device__") and not isinstance(value, (np.ndarray, np.generic)):
            if value.__dlpack_device__()[0] != 1:  # kDLCPU
                raise _Refused("is on a device and not an array-API array; pass a torch, CuPy or JAX array")
            value, narrow = np.from_dlpack(value), True
        array = np.asarray(value)
        if array.dtype.kind not in "iufb":
            raise _Refused(
                f"is {type(value).__name__} of dtype {array.dtype}; "
                f"pass real numbers (integer, boolean or floating){_numbers_from(array, value)}"
            )
        narrow = narrow and array.dtype.kind == "f" and array.dtype.itemsize <= 4
        names = () if array is value else _names_of(value)
        return cls(name, array, "float32" if narrow else "float64", origin, names)

    def rows(self, start: int, stop: int) -> Argument:
        """Return some of the rows; a memory map is not read."""
        return self._replace(array=self.array[start:stop, ...], first=self.first + start)

    def at(self, place: Origin) -> Any:
        """Return the numbers at ``place``, not a copy where they are there already.

        On the host as float64; on a device float32 stays what it is, as the first operation with float64 promotes it.
        """
        if place.xp is None:
            return np.asarray(to_host(self.array), dtype=np.float64)  # extended precision may become inf: refused
        x = self.array
        if isinstance(x, np.ndarray):
            narrow = x.dtype.kind == "f" and x.dtype.itemsize <= 4
            return from_host(np.asarray(x, dtype=np.float32 if narrow else np.float64), place.xp, place.device)
        if self.origin.xp is not place.xp:
            x = place.xp.from_dlpack(x)
        if self.origin != place:
            x = to_device(x, place.device)
        return x if place.xp.isdtype(x.dtype, "real floating") else place.xp.astype(x, place.xp.float64)


@dataclass(frozen=True)
class Data:
    """Validated input, in one array library on one device.

    Parameters
    ----------
    train : (n, d) array
        float64; on a device also float32.
    query : (m, d) array or None
        Likewise. None: the training points.
    log_weights : (n,) float64 array or None
        Their exponentials sum to 1; −inf for weight zero. None: all equal.
    dtype : {"float32", "float64"}
        Of the result.
    origin : Origin
        Of the query, else of train: where results go.
    unchecked : bool
        NaN and inf are to be refused but were not looked for: :meth:`check_finite` does.
    names : tuple of str
        Of train's columns; empty where it has none.
    taken : bool
        Brought from the host to the device that the caller named.
    """

    train: Any
    query: Any
    log_weights: Any
    dtype: str
    origin: Origin
    unchecked: bool = False
    names: tuple[str, ...] = ()
    taken: bool = False

    @property
    def n(self) -> int:
        return int(self.train.shape[0])

    @property
    def d(self) -> int:
        return int(self.train.shape[1])

    @property
    def m(self) -> int:
        return self.n if self.query is None else int(self.query.shape[0])

    @property
    def device(self) -> str:
        return device_name(self.train)

    @property
    def came_from(self) -> str:
        """The device where the user had them."""
        return "cpu" if self.taken else self.device

    def check_finite(self) -> None:
        """Look for NaN and inf where that is still to be done; ValueError names the first."""
        if self.unchecked:
            _check_points(self.train, self.query)

    def row(self, i: int) -> tuple[str, int, Any]:
        """Return a point, by its number among those of train and query: its argument, its number there, its values."""
        name, x, k = ("train", self.train, i) if i < self.n else ("query", self.query, i - self.n)
        return name, k, to_host(x[k, :])


def ingest(
    train: Any, query: Any = None, weights: Any = None, *, check_finite: bool = True, device: str | None = None
) -> Data:
    """Validate the user's arrays and bring them to one place.

    That place is the device of train, else of query, if it has float64, else the host. What is on the host stays there,
    but for large arrays that a GPU is to work with and has memory for: it looks at them faster.

    Parameters
    ----------
    train : (n, d) or (n,) array_like
        One-dimensional: n points in one dimension.
    query : (m, d) or (m,) array_like, optional
    weights : (n,) array_like, optional
    check_finite : bool
        Refuse NaN and inf in the points (in the weights they are always refused). On the host they are looked for here;
        on a device the result is ``unchecked``.
    device : str, optional
        Where they will be worked with, if the caller named it. ``"cpu"``: everything goes there, wherever it is.

    Raises
    ------
    TypeError
        Complex, object or string dtype, a masked array, a tensor that requires grad in grad mode.
    ValueError
        An empty train, wrong or mismatched shapes, data frames whose columns differ in name or order, NaN or inf,
        weights that are negative or all zero.
    """
    x = Argument.of("train", train)
    q = None if query is None else Argument.of("query", query)
    w = None if weights is None else Argument.of("weights", weights)
    check_shapes(x, q, w)
    place, taken = Origin(), False
    on_device = [a.origin for a in (x, q) if a is not None and not a.origin.on_host]
    numbers = sum(math.prod(a.shape) for a in (x, q) if a is not None)
    if on_device and device != "cpu":
        place = on_device[0] if has_float64(on_device[0]) else Origin()
    elif device and not on_device and numbers >= LARGE:
        place = with_room(device, BYTES * numbers)
        taken = place.xp is not None
    points = _columns(x.at(place))
    rows = None if q is None else _columns(q.at(place)) if q.shape[0] else points[:0, :]
    look = check_finite and place.xp is None
    if look:
        _check_points(points, rows)
    log_weights = None if w is None else _weighed(w.at(place))
    return Data(
        train=points,
        query=rows,
        log_weights=log_weights,
        dtype=max(x.dtype, (q or x).dtype),  # "float64" > "float32"
        origin=(q or x).origin,
        unchecked=check_finite and not look,
        names=x.names,
        taken=taken,
    )


@dataclass(frozen=True)
class Query:
    """Query points of a prepared training set, where that is; NaN and inf were not looked for."""

    points: Any  # (m, d) float64; on a device also float32
    dtype: str  # the query's share in the result's
    origin: Origin
    unchecked: bool  # as Data's
    first: int = 0  # as Argument's

    @classmethod
    def of(cls, query: Argument, place: Origin, check_finite: bool) -> Query:
        """Bring what :func:`check_query` has let pass to ``place``."""
        return cls(_columns(query.at(place)), query.dtype, query.origin, check_finite, query.first)

    def check_finite(self) -> None:
        """Look for NaN and inf where they are to be refused; ValueError names the first."""
        if self.unchecked:
            check_finite("query", self.points, self.first)

    def row(self, i: int) -> tuple[str, int, Any]:
        """Return a point: its argument, its number there, its values."""
        return "query", self.first + i, to_host(self.points[i, :])


def check_query(query: Argument, n: int, d: int, names: tuple[str, ...] = ()) -> None:
    """Validate the shape of query points against train, (n, d), and its columns' names; none of their values is read.

    Raises as :func:`ingest` does.
    """
    check_names(names, query.names)
    _check_query(query, n, d)


@functools.lru_cache(maxsize=64)
def _bits(xp: Any, dtype: Any) -> int:
    """Of a floating number, 64 of an integer or a boolean, 0 of what is no real number."""
    if xp.isdtype(dtype, "real floating"):
        return int(xp.finfo(dtype).bits)
    return 64 if xp.isdtype(dtype, ("integral", "bool")) else 0


def _numbers_from(array: Any, value: Any) -> str:
    """A hint at how an array of something else becomes one of numbers."""
    kinds = {type(x) for x in array.flat[:1000]} if array.dtype.kind == "O" else set()
    if array.dtype.kind == "M" or any(issubclass(kind, datetime.date) for kind in kinds):
        return ": of times, those since one of them in some unit, such as (t - t[0]) / np.timedelta64(1, 's')"
    if array.dtype.kind == "m" or any(issubclass(kind, datetime.timedelta) for kind in kinds):
        return ": of durations, those in some unit, such as t / np.timedelta64(1, 's')"
    return "; of a data frame, .to_numpy(float)" if hasattr(value, "to_numpy") else ""


def columns_are_points(n: int, d: int, *names: str) -> str:
    """A hint for errors that come of points in columns, where there are more dimensions than points; else nothing."""
    if n >= d:
        return ""
    return f"; if columns are points, as for SciPy's gaussian_kde, pass {' and '.join(f'{x}.T' for x in names)}"


def _names_of(value: Any) -> tuple[str, ...]:
    """The names of a data frame's columns, if all are strings: pandas, polars and pyarrow are recognised by them."""
    for attribute in ("columns", "column_names"):
        names = getattr(value, attribute, None)
        if isinstance(names, Iterable) and all(isinstance(name, str) for name in names):
            return tuple(names)
    return ()


def check_names(train: tuple[str, ...], query: tuple[str, ...]) -> None:
    """Refuse columns that have other names than train's, or another order: no names fit any.

    Columns are not brought into order here: what numbers per column mean, in a bandwidth or a result, would be unclear.

    Raises
    ------
    ValueError
    """
    if not (train and query) or train == query:
        return
    texts = [", ".join(names if len(names) <= 10 else (*names[:9], f"… ({len(names)})")) for names in (query, train)]
    other = "in another order" if sorted(train) == sorted(query) else "under other names"
    raise ValueError(
        f"query has the columns of train {other}: {texts[0]}, where train has {texts[1]}; pass the same ones in one "
        "order (of a data frame, query[list(train.columns)])"
    )


def _columns(x: Any) -> Any:
    return x[:, None] if x.ndim == 1 else x


def check_shapes(x: Argument, q: Argument | None, w: Argument | None) -> None:
    """Refuse train, query and weights whose shapes do not fit, as :func:`ingest` does."""
    for a in (x, q):
        if a is not None:
            _check_axes(a)
    if 0 in x.shape:
        raise ValueError(f"train is empty (shape {x.shape}); pass at least one point with at least one dimension")
    d = 1 if len(x.shape) == 1 else x.shape[1]
    if q is not None:
        check_names(x.names, q.names)
        _check_query(q, x.shape[0], d)
    if w is not None and w.shape != x.shape[:1]:
        n = x.shape[0]
        hint = columns_are_points(n, d, "train") if w.shape == (d,) else ""
        raise ValueError(f"weights has shape {w.shape}, but train has {n} points; pass shape ({n},){hint}")


def _check_query(q: Argument, n: int, d: int) -> None:
    """Refuse a query that is not of train's d dimensions; n is how many points that has."""
    _check_axes(q)
    if len(q.shape) == 1 and d > 1 and q.shape != (0,):
        hint = "query[None, :] for one point" if q.shape == (d,) else f"shape (m, {d})"
        raise ValueError(f"query has shape {q.shape}, but train has {d} dimensions; pass {hint}")
    if len(q.shape) == 2 and q.shape[1] != d:
        hint = ""
        if q.shape[0] == d:
            hint = columns_are_points(*q.shape, "query")
        elif n in q.shape:
            hint = columns_are_points(n, d, *(("train", "query") if q.shape[0] == n else ("train",)))
        raise ValueError(f"query has {q.shape[1]} dimensions, but train has {d}; pass shape (m, {d}){hint}")


def _check_axes(a: Argument) -> None:
    if len(a.shape) not in (1, 2):
        raise ValueError(f"{a.name} has shape {a.shape}; pass (points, dimensions), or (points,) in one dimension")


def _check_points(train: Any, query: Any) -> None:
    check_finite("train", train)
    if query is not None:
        check_finite("query", query)


def check_finite(name: str, x: Any, first: int = 0) -> None:
    """Raise ValueError for the first value of points (n, d) that is not finite; ``first``: the first row's number."""
    xp = array_namespace(x)
    total = float(xp.sum(x))  # one pass without temporaries; a finite sum has only finite terms
    if np.isfinite(total) or bool(xp.all(xp.isfinite(x))):
        return
    i, j = (int(k) for k in np.argwhere(~np.isfinite(to_host(x)))[0])
    raise ValueError(
        f"{name} has values that are not finite, the first {to_host(x)[i, j]} at row {first + i}, column {j}; "
        "drop or fill them"
    )


def _weighed(w: Any) -> Any:
    """Log weights (n,), float64, normalised; None where the weights are all equal."""
    xp = array_namespace(w)
    w = xp.astype(w, xp.float64, copy=False)
    wrong = check_weights(w)
    if wrong == "zero":
        raise ValueError("weights are all zero; pass at least one positive weight")
    if wrong == "equal":
        return None
    log_w = xp.log(w)
    if is_torch_array(w):
        return log_w.log_softmax(0)  # one kernel for five
    log_w = log_w - xp.max(log_w)  # logs first: the ratio of two weights may underflow
    return log_w - xp.log(xp.sum(xp.exp(log_w)))


def check_weights(w: Any, first: int = 0) -> str:
    """Return whether weights (n,) are all ``"equal"``, or all ``"zero"``, or neither (an empty string).

    ``first`` is the number of the first one.

    Raises
    ------
    ValueError
        The first that is not finite, or negative.
    """
    xp = array_namespace(w)
    least, most = w.aminmax() if is_torch_array(w) else (xp.min(w), xp.max(w))
    wrong: str = look(_judged, least, most)
    if wrong == "not finite":
        i = first + int(np.flatnonzero(~np.isfinite(to_host(w)))[0])
        raise ValueError(f"weights has values that are not finite, the first at index {i}; drop those points")
    if wrong == "negative":
        i = int(np.flatnonzero(to_host(w) < 0)[0])
        raise ValueError(f"weights has negative values, the first {float(w[i])} at index {first + i}; pass weights ≥ 0")
    return wrong


def _judged(least: float, most: float) -> str:
    """What is to be said of weights with these ends, NaN if there is one."""
    if not (math.isfinite(least) and math.isfinite(most)):
        return "not finite"
    if least < 0 or least == most or most == 0:
        return "negative" if least < 0 else "zero" if most == 0 else "equal"
    return ""
