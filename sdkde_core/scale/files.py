"""Arrays in files: read in batches or, where the format has it, in any order; written in batches.

Formats by extension: .npy, .npz (one array, or ``data.npz:key``), .csv (comma; a first line without any number is a
header), .parquet (needs pyarrow, imported when used) and .zarr, a folder (needs zarr). Every array is two-dimensional
here: a one-dimensional one is a column.
"""

from __future__ import annotations

import csv
import errno
import importlib
import io
import itertools
import json
import math
import os
import re
import warnings
import zipfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from ..arrays import check_names
from ..estimator.batches import NUMBERS, ROWS
from ..messages import SdkdeWarning, caller_level, did_you_mean
from ..storage import reserve, write_atomically, write_folder

__all__ = [
    "EXTENSIONS",
    "FileError",
    "Source",
    "Write",
    "about",
    "check_order",
    "no_folder",
    "source",
    "without_key",
    "writing",
    "zarr_module",
]

Array = NDArray[Any]

#: Numbers of an array at most: 128 TiB of float64.
MOST = 1 << 44

#: Takes the next rows.
Write = Callable[[Array], Any]


class FileError(ValueError):
    """A file is not what it should be; the message begins with its name."""


@contextmanager
def about(**files: str | None) -> Iterator[None]:
    """Put the file's name before an error in what an argument holds; ``files``: by argument, None for what is no file.

    Such errors name the argument first, but for rules of the bandwidth, which are about the samples.
    """
    try:
        yield
    except FileError:
        raise
    except (TypeError, ValueError) as error:
        named = re.search(rf"\b({'|'.join(files)})\b(?!=)", str(error))
        argument = "train" if str(error).startswith("bandwidth='") else named and named[0]
        file = files.get(argument or "")
        if file is None:
            raise
        raise FileError(f"{file}: {error}") from error


# --- reading ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Source:
    """An array that is read in batches.

    Parameters
    ----------
    name : str
        As in the command.
    rows, columns : int
    dtype : numpy.dtype
    read_batches : callable
        ``read_batches(rows)`` yields arrays of at most so many rows, in order.
    names : tuple of str
        The columns' names; empty if the format has none.
    at : callable, optional
        ``at(start, stop)`` reads these rows; None: the format is read from its beginning on.
    check : callable
        Raises a FileError if the file has changed since it was opened; of what is no file nothing is known.
    """

    name: str
    rows: int
    columns: int
    dtype: Any
    read_batches: Callable[[int], Iterator[Array]]
    names: tuple[str, ...] = ()
    at: Callable[[int, int], Array] | None = None
    check: Callable[[], object] = lambda: None

    @classmethod
    def of(cls, name: str, x: Array) -> Source:
        """Make a source of an array, mapped or in memory; only a batch at a time is copied."""
        x = _columns(x)
        return cls.reading(name, x.shape, x.dtype, lambda start, stop: np.array(x[start:stop]))

    @classmethod
    def reading(cls, name: str, shape: tuple[int, ...], dtype: Any, at: Callable[[int, int], Array]) -> Source:
        """Make a source of what reads rows in any order."""
        if len(shape) not in (1, 2):
            raise ValueError(f"the array has shape {shape}; pass (points, dimensions), or (points,) in one dimension")
        width = 1 if len(shape) == 1 else int(shape[1])

        declared = np.dtype(dtype)

        def rows_at(start: int, stop: int) -> Array:
            block = at(start, stop)
            if isinstance(block, np.ma.MaskedArray):
                raise TypeError(f"{name} has masked rows; pass a plain array of the rows that count")
            x, wanted = np.asarray(block), (stop - start, *shape[1:])
            if x.shape != wanted or x.dtype.newbyteorder("=") != declared.newbyteorder("="):
                raise ValueError(
                    f"{name}: rows {start} to {stop} are declared as {declared} of shape {wanted}, and are {x.dtype} "
                    f"of shape {x.shape}"
                )
            return x.reshape(-1, width)

        def batches(rows: int) -> Iterator[Array]:
            for start in range(0, shape[0], rows):
                yield rows_at(start, min(start + rows, shape[0]))

        return cls(name, int(shape[0]), width, np.dtype(dtype), batches, at=rows_at)

    def batches(self, rows: int) -> Iterator[Array]:
        """Yield (≤ rows, columns) arrays; a FileError names the file that cannot be read."""
        done = 0
        with _naming(self.name):
            for batch in self.read_batches(rows):
                done += len(batch)
                yield batch
            if done != self.rows:
                raise ValueError(f"had {self.rows} rows and now {done}; leave the file alone while it is read")

    def read(self) -> Array:
        """Return the whole array, (rows, columns)."""
        done = 0
        with _naming(self.name):
            result = np.empty((self.rows, self.columns), self.dtype)
        for batch in self.batches(max(1, min(ROWS, NUMBERS // max(1, self.columns)))):
            result[done : done + len(batch)] = batch
            done += len(batch)
        return result


def source(text: str) -> Source:
    """Open a file for reading: a path, or ``path.npz:key``.

    Raises
    ------
    OSError
        No such file, or no permission.
    FileError
        An unknown extension, or a file that does not hold one array of numbers.
    ImportError
        A parquet file, and pyarrow is not installed.
    """
    path, extension, key = _parse_place(text)
    if not path.is_file() and not (extension == ".zarr" and path.is_dir()):
        code = errno.EISDIR if path.is_dir() else errno.ENOENT
        raise OSError(code, os.strerror(code), str(path))
    with _naming(text):
        before = _stamp(path)
        found = _READERS[extension](text, path, key)
        if found.dtype.kind not in "iufbc":
            raise ValueError(f"the array is of dtype {found.dtype}; pass numbers")
        if not found.columns:
            raise ValueError("the array has no columns; pass (points, dimensions)")
        if found.rows * found.columns > MOST:  # zarr has no chunks of what is all fill value
            raise ValueError(f"its metadata say shape {(found.rows, found.columns)}, more than anything here can sum")

    def check() -> None:
        if _stamp(path) != before:
            raise FileError(f"{text}: has changed since it was opened; leave it alone while it is read")

    return replace(found, check=check, at=None if found.at is None else _naming(text)(found.at))


def _stamp(path: Path) -> list[tuple[Any, ...]]:
    """Return what changes with a file, or with any file of a folder."""
    paths = sorted(path.rglob("*")) if path.is_dir() else [path]
    seen = [(str(p), p.stat()) for p in paths]
    return [(name, found.st_ino, found.st_size, found.st_mtime_ns) for name, found in seen]


def check_order(*sources: Source) -> None:
    """Refuse a query's columns that have train's names in another order; other names may just be another file's."""
    if len(sources) == 2 and sorted(sources[0].names) == sorted(sources[1].names):
        check_names(sources[0].names, sources[1].names)


def without_key(text: str) -> tuple[str, str]:
    """Path, and the key of an array in an archive ("" without)."""
    keyed = re.fullmatch(r"(.*\.npz):([^/\\]+)", text, re.IGNORECASE)
    return (keyed[1], keyed[2]) if keyed else (text, "")


def _parse_place(text: str) -> tuple[Path, str, str]:
    """Path, extension in lower case, and key ("" without)."""
    name, key = without_key(text)
    path = Path(name)
    extension = path.suffix.lower()
    if extension not in EXTENSIONS:
        hint = did_you_mean(extension, EXTENSIONS)
        raise FileError(f"{text}: unknown extension {extension!r}; pass one of {', '.join(EXTENSIONS)}{hint}")
    return path, extension, key


def _columns(x: Array) -> Array:
    if x.ndim not in (1, 2):
        raise ValueError(f"the array has shape {x.shape}; pass (points, dimensions), or (points,) in one dimension")
    return x[:, None] if x.ndim == 1 else x


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Put the file's name before the message of an error in reading it."""
    try:
        yield
    except (FileError, ImportError):
        raise
    except MemoryError as error:
        raise MemoryError(f"{name}: {error}") from error
    except Exception as error:  # what a library raises for a damaged file is its own affair
        if isinstance(error, OSError) and error.filename:
            raise  # it has the name
        raise FileError(f"{name}: {error}") from error


def _read_npy(name: str, path: Path, key: str) -> Source:
    with path.open("rb") as file:
        shape, fortran, dtype = _npy_header(file)
        first = file.tell()
    _check_length(shape, dtype, path.stat().st_size - first)
    if fortran and len(shape) > 1:
        return Source.of(name, np.load(path, mmap_mode="r"))
    row = math.prod(shape[1:])

    def at(start: int, stop: int) -> Array:  # no map: what is read of one counts as this process's memory
        count = (stop - start) * row
        return np.fromfile(path, dtype, count, offset=first + start * row * dtype.itemsize).reshape(-1, *shape[1:])

    return Source.reading(name, shape, dtype, at)


def _read_zarr(name: str, path: Path, key: str) -> Source:
    x = zarr_module().open_array(path, mode="r")
    # zarr takes chunks that are not there for numbers; its own count looks for each one that could be.
    known = (path / "zarr.json").is_file() and x.shards is None
    missing = x.nchunks - sum(chunk.is_file() for chunk in (path / "c").rglob("*")) if known else 0
    if missing > 0 and math.prod(x.shape) <= MOST:
        told = f"{name}: {missing} of {x.nchunks} chunks are not there, and are read as {x.fill_value}"
        warnings.warn(told, SdkdeWarning, stacklevel=caller_level())
    return Source.reading(name, x.shape, x.dtype, lambda start, stop: x[start:stop])


def zarr_module() -> Any:
    """Return the module zarr; ImportError says how to install it."""
    try:
        return importlib.import_module("zarr")
    except ImportError as error:
        raise ImportError(f"zarr arrays and checkpoints need zarr: pip install 'sdkde-core[zarr]' ({error})") from error


def _read_npz(name: str, path: Path, key: str) -> Source:
    with zipfile.ZipFile(path) as archive:
        arrays = [n.removesuffix(".npy") for n in archive.namelist() if n.endswith(".npy")]
        if not key and len(arrays) != 1:
            raise ValueError(f"holds {len(arrays)} arrays ({', '.join(arrays)}); name one, as in {path}:KEY")
        key = key or arrays[0]
        if key not in arrays:
            raise ValueError(f"holds no {key!r}, only {', '.join(arrays)}")
        with archive.open(f"{key}.npy") as member:
            shape, fortran, dtype = _npy_header(member)
            first = member.tell()
            _check_length(shape, dtype, archive.getinfo(f"{key}.npy").file_size - first)
            if fortran and len(shape) > 1:  # rows do not follow one another; read to the end, the checksum is compared
                return Source.of(name, np.frombuffer(member.read(), dtype).reshape(shape, order="F"))
    width = _columns(np.empty((0, *shape[1:]) if shape else ())).shape[1]

    def batches(rows: int) -> Iterator[Array]:
        with zipfile.ZipFile(path) as archive, archive.open(f"{key}.npy") as member:
            _npy_header(member)
            for start in range(0, shape[0], rows):
                count = min(rows, shape[0] - start)
                data = member.read(count * width * dtype.itemsize)
                yield np.frombuffer(data, dtype).reshape(count, width)
            member.read(1)  # at the end the checksum is compared

    return Source(name, shape[0], width, dtype, batches)


def _npy_header(file: Any) -> tuple[tuple[int, ...], bool, Any]:
    """Shape, whether in Fortran order, and dtype of the .npy stream that follows."""
    version = np.lib.format.read_magic(file)
    if version == (1, 0):
        header = np.lib.format.read_array_header_1_0(file)
    else:
        header = np.lib.format.read_array_header_2_0(file)
    if header[2].hasobject:
        raise ValueError("the array is of Python objects; pass numbers")
    if min(header[0], default=0) < 0:
        raise ValueError(f"its header says shape {header[0]}, which is negative")
    return header


def _check_length(shape: tuple[int, ...], dtype: Any, length: int) -> None:
    """Refuse an array with another number of bytes than its header says."""
    wanted = math.prod(shape) * dtype.itemsize
    if length != wanted:
        what = "is cut off" if length < wanted else "has more bytes than its array"
        raise ValueError(f"{what}: its header says shape {shape}, {wanted} bytes, and there are {length}")


def _read_csv(name: str, path: Path, key: str) -> Source:
    with path.open(encoding="utf-8-sig") as file:
        skipped, first = 0, ""
        for first in file:
            if not first.isspace():
                break
            skipped += 1
        fields = _fields(first)
        header = not any(_is_number(f) for f in fields)
        if len(fields) > 1 and fields == [str(k) for k in range(len(fields))]:
            raise ValueError(
                f"its first line, {first.strip()[:40]}, is a data frame's default header, or a sample; "
                "write it with names, or without a header (pandas: header=False)"
            )
        if header and any(_is_number(part) for part in re.split(r"[;\s]+", first.strip())):
            raise ValueError(f"values are separated by commas, but its first line is {first.strip()[:60]!r}")
        if header and fields[0] == "" and len(fields) > 1:
            raise ValueError(
                "the first column has no name in the header: a data frame's index? "
                "write the file without it (pandas: index=False), or name the column"
            )
        rows = sum(not line.isspace() for line in file) + (not header)
    if not first.strip():
        raise ValueError("the file is empty")
    start = skipped + header  # lines before the first that may hold data

    def batches(rows: int) -> Iterator[Array]:
        with path.open(encoding="utf-8-sig") as file:
            lines, number = itertools.islice(file, start, None), start + 1
            while block := list(itertools.islice(lines, rows)):
                yield _parse_lines(block, number, len(fields))
                number += len(block)

    return Source(name, rows, len(fields), np.dtype(np.float64), batches, tuple(fields) if header else ())


def _fields(line: str) -> list[str]:
    """The values of a line, in quotes or not."""
    return [field.strip() for field in next(csv.reader([line], skipinitialspace=True))] or [""]


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _parse_lines(lines: list[str], number: int, columns: int) -> Array:
    """Return the numbers in ``lines``, the first of which is line ``number`` of its file; blank lines are skipped."""
    filled = [line for line in lines if not line.isspace()]
    if not filled:
        return np.empty((0, columns))
    try:
        x = np.loadtxt(filled, delimiter=",", quotechar='"', comments=None, ndmin=2)
        if x.shape[1] == columns:
            return x
    except ValueError:  # below, the line is named by its number, and what only Python takes for a number is read
        pass
    rows = []
    for i, line in enumerate(lines, number):
        fields = [] if line.isspace() else _fields(line)
        for field in fields:
            if not _is_number(field):
                raise ValueError(f"line {i}: {field!r} is not a number (values are separated by commas)")
        if fields and len(fields) != columns:
            raise ValueError(f"line {i} has {len(fields)} values, the first line {columns}")
        rows += [[float(field) for field in fields]] if fields else []
    return np.array(rows)


def _read_parquet(name: str, path: Path, key: str) -> Source:
    arrow, parquet = _pyarrow()
    with parquet.ParquetFile(path) as file:
        schema, rows = file.schema_arrow, file.metadata.num_rows
    # pandas writes its index as a column of this name; it is no dimension
    kept = [i for i, n in enumerate(schema.names) if not re.fullmatch(r"__index_level_\d+__", n)]
    kinds = arrow.types
    for i in kept:
        kind = schema.field(i).type
        if not (kinds.is_floating(kind) or kinds.is_integer(kind) or kinds.is_boolean(kind)):
            raise ValueError(f"column {schema.names[i]!r} is of type {kind}; pass real numbers only")
    narrow = bool(kept) and all(schema.field(i).type in (arrow.float16(), arrow.float32()) for i in kept)
    dtype = np.dtype(np.float32 if narrow else np.float64)

    def batches(rows: int) -> Iterator[Array]:
        with parquet.ParquetFile(path, page_checksum_verification=True) as file:
            for batch in file.iter_batches(batch_size=rows):
                x = np.empty((batch.num_rows, len(kept)), dtype)
                for j, i in enumerate(kept):
                    column = batch.column(i)
                    if column.null_count:
                        raise ValueError(f"column {schema.names[i]!r} has missing values; drop or fill them")
                    x[:, j] = column.to_numpy(zero_copy_only=False)
                yield x

    return Source(name, rows, len(kept), dtype, batches, tuple(schema.names[i] for i in kept))


def _pyarrow() -> tuple[Any, Any]:
    try:
        return importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise ImportError(f"parquet files need pyarrow: pip install 'sdkde-core[parquet]' ({error})") from error


# --- writing ----------------------------------------------------------------------------------------------------


@contextmanager
def writing(text: str, shape: tuple[int, ...], dtype: str, name: str) -> Iterator[Write]:
    """Open a file for an array, and yield the function that appends a batch of its rows.

    The file takes its place at the end; after an error an older one is as it was. A folder is replaced only if it is a
    zarr array that sdkde wrote.

    Parameters
    ----------
    text : str
        The path, or ``path.npz:key``; an existing file is replaced.
    shape : (rows,) or (rows, columns)
    dtype : {"float32", "float64"}
    name : str
        Of the column (.csv, .parquet; of several, with a number) or of the array (.npz without a key).
    """
    path, extension, key = _parse_place(text)
    if path.is_dir() and extension != ".zarr":
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not Path(os.path.realpath(path)).parent.is_dir():
        raise no_folder(path)
    if key:
        _check_archive(path, key)
    if extension == ".zarr":
        with _write_zarr(path, shape, np.dtype(dtype)) as write:
            yield write
        return
    with (
        write_atomically(path) as temporary,
        temporary.open("wb") as file,
        _WRITERS[extension](file, shape, np.dtype(dtype), key or name) as write,
    ):
        yield write


def _check_archive(path: Path, key: str) -> None:
    """Refuse to write an array to an archive that has others: a file is replaced as a whole."""
    if not path.is_file():
        return
    try:
        with zipfile.ZipFile(path) as archive:
            others = sorted({member.removesuffix(".npy") for member in archive.namelist()} - {key})
    except zipfile.BadZipFile as error:
        raise FileError(f"{path}: is there, and is no archive; name another, or remove it first") from error
    if others:
        raise FileError(f"{path}: also holds {', '.join(others)}, which would be lost; name another file")


@contextmanager
def _write_zarr(path: Path, shape: tuple[int, ...], dtype: Any) -> Iterator[Write]:
    with write_folder(path, _check_ours) as folder:
        rows, done = max(1, min(shape[0], (1 << 20) // math.prod(shape[1:]))), 0
        chunks = (rows, *shape[1:])
        zarr = zarr_module()
        checked = {
            "compressors": [zarr.codecs.ZstdCodec(), zarr.codecs.Crc32cCodec()],
            "config": {"write_empty_chunks": True},  # a chunk that is not there is lost, and not zeros
        }
        x = zarr.create_array(folder, shape=shape, chunks=chunks, dtype=dtype, attributes=_OURS, **checked)

        def write(batch: Array) -> None:
            nonlocal done
            x[done : done + len(batch)] = batch
            done += len(batch)

        yield write


#: Attributes by which an array is known as one that sdkde wrote, and may replace.
_OURS = {"written_by": "sdkde"}


def _check_ours(folder: Path) -> None:
    """Refuse to replace anything but an array of zarr's that sdkde wrote, with nothing else in its folder."""
    if not folder.exists():
        return
    try:
        metadata = json.loads((folder / "zarr.json").read_bytes())
        ours = metadata["node_type"] == "array" and metadata["attributes"] == _OURS
        for path in folder.rglob("*"):
            first, *rest = path.relative_to(folder).parts
            ours = ours and ((first == "zarr.json" and not rest) or (first == "c" and all(map(str.isdecimal, rest))))
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        ours = False
    if not ours:
        cause = "is there, and is no array that sdkde wrote; name another, or remove it first"
        raise FileExistsError(errno.EEXIST, cause, str(folder))


def no_folder(path: Path) -> FileNotFoundError:
    """Return the error of an output in a folder that does not exist."""
    folder = Path(os.path.realpath(path)).parent
    return FileNotFoundError(errno.ENOENT, f"there is no folder {folder}; make it, or name another file", str(path))


@contextmanager
def _write_npy(file: BinaryIO, shape: tuple[int, ...], dtype: Any, name: str) -> Iterator[Write]:
    head = _npy_head(shape, dtype)
    reserve(file, len(head) + math.prod(shape) * dtype.itemsize)
    file.write(head)
    yield lambda batch: file.write(batch.tobytes())


def _npy_head(shape: tuple[int, ...], dtype: Any) -> bytes:
    head = io.BytesIO()
    header = {"shape": shape, "fortran_order": False, "descr": np.lib.format.dtype_to_descr(dtype)}
    np.lib.format.write_array_header_1_0(head, header)
    return head.getvalue()


@contextmanager
def _write_npz(file: BinaryIO, shape: tuple[int, ...], dtype: Any, name: str) -> Iterator[Write]:
    with zipfile.ZipFile(file, "w") as archive, archive.open(f"{name}.npy", "w", force_zip64=True) as member:
        member.write(_npy_head(shape, dtype))
        yield lambda batch: member.write(batch.tobytes())


@contextmanager
def _write_csv(file: BinaryIO, shape: tuple[int, ...], dtype: Any, name: str) -> Iterator[Write]:
    file.write((",".join(_names(name, shape)) + "\n").encode())

    def write(batch: Array) -> None:
        if len(shape) == 1:
            file.writelines(f"{value!s}\n".encode() for value in batch)  # the shortest that reads back
        else:
            file.writelines((",".join(map(str, row)) + "\n").encode() for row in batch)

    yield write


def _names(name: str, shape: tuple[int, ...]) -> list[str]:
    """The columns' names."""
    return [name] if len(shape) == 1 else [f"{name}_{j}" for j in range(shape[1])]


@contextmanager
def _write_parquet(file: BinaryIO, shape: tuple[int, ...], dtype: Any, name: str) -> Iterator[Write]:
    arrow, parquet = _pyarrow()
    schema = arrow.schema([(one, arrow.from_numpy_dtype(dtype)) for one in _names(name, shape)])

    def write(batch: Array) -> None:
        columns = [np.ascontiguousarray(column) for column in batch.reshape(len(batch), -1).T]
        writer.write_batch(arrow.record_batch([arrow.array(column) for column in columns], schema=schema))

    with parquet.ParquetWriter(file, schema, write_page_checksum=True) as writer:
        yield write


_READERS: dict[str, Callable[[str, Path, str], Source]] = {
    ".npy": _read_npy,
    ".npz": _read_npz,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
    ".zarr": _read_zarr,
}
_WRITERS: dict[str, Callable[[BinaryIO, tuple[int, ...], Any, str], AbstractContextManager[Write]]] = {
    ".npy": _write_npy,
    ".npz": _write_npz,
    ".csv": _write_csv,
    ".parquet": _write_parquet,
}
EXTENSIONS = tuple(_READERS)
