"""Tables: .csv (comma; a first line without any number is a header) and .parquet (by pyarrow)."""

from __future__ import annotations

import csv
import itertools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ..messages import optional
from .common import Array, Source, Write


def read_csv(name: str, path: Path, key: str) -> Source:
    """Open a .csv file; what looks like an index, or other separators, is refused."""
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


def read_parquet(name: str, path: Path, key: str) -> Source:
    """Open a .parquet file of numbers."""
    arrow, parquet = _pyarrow()
    with parquet.ParquetFile(path) as file:
        schema, rows = file.schema_arrow, file.metadata.num_rows
    # pandas writes its index as a column of this name; it is no dimension
    kept = [i for i, n in enumerate(schema.names) if not re.fullmatch(r"__index_level_\d+__", n)]
    numbers = arrow.types.is_floating, arrow.types.is_integer, arrow.types.is_boolean
    for i in kept:
        kind = schema.field(i).type
        if not any(is_one(kind) for is_one in numbers):
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
    how = "parquet files need pyarrow", "parquet"
    return optional("pyarrow", *how), optional("pyarrow.parquet", *how)


@contextmanager
def write_csv(file: BinaryIO, shape: tuple[int, ...], dtype: Any, name: str) -> Iterator[Write]:
    """Write a .csv file with a header."""
    file.write((",".join(_names(name, shape)) + "\n").encode())

    def write(batch: Array) -> None:
        if len(shape) == 1:
            file.writelines(f"{value!s}\n".encode() for value in batch)  # the shortest that reads back
        else:
            file.writelines((",".join(map(str, row)) + "\n").encode() for row in batch)

    yield write


@contextmanager
def write_parquet(file: BinaryIO, shape: tuple[int, ...], dtype: Any, name: str) -> Iterator[Write]:
    """Write a .parquet file with checksums."""
    arrow, parquet = _pyarrow()
    schema = arrow.schema([(one, arrow.from_numpy_dtype(dtype)) for one in _names(name, shape)])

    def write(batch: Array) -> None:
        columns = [np.ascontiguousarray(column) for column in batch.reshape(len(batch), -1).T]
        writer.write_batch(arrow.record_batch([arrow.array(column) for column in columns], schema=schema))

    with parquet.ParquetWriter(file, schema, write_page_checksum=True) as writer:
        yield write


def _names(name: str, shape: tuple[int, ...]) -> list[str]:
    return [name] if len(shape) == 1 else [f"{name}_{j}" for j in range(shape[1])]
