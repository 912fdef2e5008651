"""Tables and labelled arrays: their numbers, the names of their columns, and results with the labels of their rows.

Results for pandas and xarray keep the labels of the rows. Those for polars and Arrow, whose rows have none, are
NumPy's, as many of its functions refuse a polars Series. No library is imported: one whose objects come in is loaded.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

# What arguments are, for those who check types, by what they have: NumPy reads HasArray; LibrarysArray is of PyTorch,
# JAX or CuPy, LabelledArray of xarray, Frame and Column of pandas, each with a method that tells the other's type.


class HasArray(Protocol):
    def __array__(self, *args: Any, **kwargs: Any) -> Any: ...


class LibrarysArray(Protocol):
    @property
    def shape(self) -> Any: ...
    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...


class LabelledArray(Protocol):
    @property
    def coords(self) -> Any: ...


class Frame(Protocol[T_co]):
    def pop(self, item: Any, /) -> T_co: ...


class Column(Protocol[T_co]):
    @property
    def iloc(self) -> Any: ...
    def to_frame(self, *args: Any, **kwargs: Any) -> T_co: ...


Plain: TypeAlias = NDArray[Any] | Sequence[Any]
Rows: TypeAlias = Plain | LibrarysArray | LabelledArray | Frame[Any] | Column[Any]
Values: TypeAlias = HasArray | Sequence[float | HasArray | Sequence[float]]
Kind = TypeVar("Kind", bound=LibrarysArray | LabelledArray | Column[Any])  # a density (m,) is of the same
Same = TypeVar("Same", bound=LibrarysArray | LabelledArray | Frame[Any])  # rows (m, d) are


class Refused(TypeError):
    """An argument that is no array of real numbers, found by the code here and not by an array library."""


def library_of(value: Any) -> str:
    """Return which library of tables an object is of, a subclass of its classes too; empty for other objects."""
    found = (str(one.__module__).partition(".")[0] for one in type(value).__mro__)
    return next((library for library in found if library in ("pandas", "polars", "pyarrow", "xarray")), "")


def check_labels(name: str, value: Any, names: Sequence[str]) -> None:
    """ValueError where a Series or a frame of pandas has the columns' names in another order."""
    if names and hasattr(value, "iloc"):
        labels = [str(label) for label in value.index]
        if labels != list(names) and sorted(labels) == sorted(names):
            raise ValueError(f"{name} has the columns in another order, {', '.join(labels)}; pass {', '.join(names)}")


def names_of(value: Any, library: str) -> tuple[str, ...]:
    """Return the names of an object's columns; empty where it has none, or some are no strings."""
    found = getattr(value, "column_names" if library == "pyarrow" else "columns", None)
    if library == "xarray" and value.ndim == 2 and value.dims[1] in getattr(value, "coords", ()):
        found = value.coords[value.dims[1]].values.tolist()
    if len(getattr(value, "shape", ())) == 1 and getattr(value, "name", None):
        found = (value.name,)  # a Series, or a labelled array of one column
    names = tuple(found) if isinstance(found, Iterable) else ()
    return names if all(isinstance(name, str) for name in names) else ()


def read(name: str, value: Any, library: str) -> np.ndarray:
    """Return the numbers of a table or a labelled array; missing ones are NaN.

    :class:`Refused` names the column that holds no numbers. Where a table as a whole is none of numbers, as of floats
    and booleans, or of pandas' nullable ones, it is read by its columns.
    """
    if library == "polars" and hasattr(value, "collect"):
        raise Refused(f"{name} is a polars {type(value).__name__}, which has no rows yet; pass {name}.collect()")
    if library == "xarray" and hasattr(value, "data_vars"):
        raise Refused(f"{name} is an xarray Dataset; pass {name}.to_dataarray('column').transpose(..., 'column')")
    try:
        array = np.asarray(value)
    except TypeError:  # columns without a type in common
        array = np.array(None)
    if array.dtype.kind in "iufb":
        return array
    if not array.size:
        return np.empty(array.shape)
    if not hasattr(value, "columns"):
        return _column(f"{name} is a {type(value).__name__} and", value, library)
    if library == "pandas":
        columns, drop = value.items(), "drop(columns={!r})"
    elif library == "polars":
        columns, drop = zip(value.columns, value.get_columns()), "drop({!r})"
    else:
        columns, drop = zip(value.column_names, value.columns), "drop_columns({!r})"
    leave = f", or leave it out: {name}."
    found = [_column(f"column {label!r} of {name}", x, library, leave + drop.format(label)) for label, x in columns]
    return np.stack(found, axis=1)


def _column(what: str, column: Any, library: str, hint: str = "") -> np.ndarray:
    array = np.asarray(column)
    dtype = getattr(column, "dtype", getattr(column, "type", array.dtype))
    if array.dtype.kind in "iufb":
        return array
    known = sys.modules["pandas"].api.types if library == "pandas" and array.dtype.kind == "O" else None
    if known and (known.is_numeric_dtype(dtype) or known.is_bool_dtype(dtype)):  # booleans with NA, decimals
        return column.to_numpy(np.float64, na_value=np.nan)
    how = ", of times as (t - t[0]) / np.timedelta64(1, 's')" if array.dtype.kind in "mM" else ""
    raise Refused(f"{what} has dtype {dtype}; pass real numbers (integer, boolean or floating): convert it{how}{hint}")


def labelled(given: Any, values: Any, name: str = "") -> Any:
    """Return NumPy's values (m,) or (m, d) with the labels of the rows ``given`` and of its columns, if it has some.

    Without a ``name`` the values are rows of the same kind, and keep the name and the attributes that these have.
    """
    library = library_of(given) if type(values) is np.ndarray else ""
    if library == "pandas" and hasattr(given, "iloc"):
        pandas = sys.modules["pandas"]
        if values.ndim == 1:
            return pandas.Series(values, given.index, name=name, copy=False)
        columns = given.columns if given.ndim == 2 else given.to_frame().columns
        return pandas.DataFrame(values, given.index, columns, copy=False)
    if library == "xarray" and hasattr(given, "coords"):
        if values.ndim < given.ndim:
            given = given.isel({given.dims[-1]: 0}, drop=True)
        elif values.ndim > given.ndim:
            given = given.expand_dims("dim_1", -1)
        result = given.copy(data=values)
        if name:
            result.name, result.attrs = name, {}
        return result
    return values
