"""NumPy's files: .npy, read in any order, and .npz, read from the beginning on."""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ..storage import reserve
from .common import Array, FileError, Source, Write, width_of


def read_npy(name: str, path: Path, key: str) -> Source:
    """Open a .npy file."""
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


def read_npz(name: str, path: Path, key: str) -> Source:
    """Open one array of an archive: the one that there is, or ``key``."""
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
    width = width_of(shape)

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
    first = np.lib.format.read_magic(file) == (1, 0)
    header = (np.lib.format.read_array_header_1_0 if first else np.lib.format.read_array_header_2_0)(file)
    if header[2].hasobject:
        raise ValueError("the array is of Python objects; pass numbers")
    if min(header[0], default=0) < 0:
        raise ValueError(f"its header says shape {header[0]}, which is negative")
    return header


def _check_length(shape: tuple[int, ...], dtype: Any, length: int) -> None:
    """Refuse an array with another number of bytes than its header says."""
    if length != (wanted := math.prod(shape) * dtype.itemsize):
        what = "is cut off" if length < wanted else "has more bytes than its array"
        raise ValueError(f"{what}: its header says shape {shape}, {wanted} bytes, and there are {length}")


@contextmanager
def write_npy(file: BinaryIO, shape: tuple[int, ...], dtype: Any, name: str) -> Iterator[Write]:
    """Write a .npy file; a full disk is found now."""
    head = _npy_head(shape, dtype)
    reserve(file, len(head) + math.prod(shape) * dtype.itemsize)
    file.write(head)
    yield lambda batch: file.write(batch.tobytes())


@contextmanager
def write_npz(file: BinaryIO, shape: tuple[int, ...], dtype: Any, name: str) -> Iterator[Write]:
    """Write an archive with one array."""
    with zipfile.ZipFile(file, "w") as archive, archive.open(f"{name}.npy", "w", force_zip64=True) as member:
        member.write(_npy_head(shape, dtype))
        yield lambda batch: member.write(batch.tobytes())


def _npy_head(shape: tuple[int, ...], dtype: Any) -> bytes:
    head = io.BytesIO()
    header = {"shape": shape, "fortran_order": False, "descr": np.lib.format.dtype_to_descr(dtype)}
    np.lib.format.write_array_header_1_0(head, header)
    return head.getvalue()


def check_archive(path: Path, key: str) -> None:
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
