"""Arrays in files: read in batches or, where the format has it, in any order; written in batches.

Formats by extension: .npy, .npz (one array, or ``data.npz:key``), .csv, .tsv, .parquet (needs pyarrow, imported
when used) and .zarr, a folder (needs zarr). Every array is two-dimensional here: a one-dimensional one is a column.
"""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ..messages import did_you_mean
from ..storage import write_atomically
from .common import FileError, Pick, Source, Write, check_apart, filling, naming, without_key
from .formats import FORMATS, Names, check_archive

EXTENSIONS = tuple(FORMATS)


@contextmanager
def about(**files: str | None) -> Iterator[None]:
    """Put the file's name before an error in what an argument holds; ``files``: by argument, None for what is no file.

    Such errors name the argument first, but for rules of the bandwidth and ends, which are about samples, and for a
    bandwidth with its value in parentheses, which is too small for what is named next.
    """
    try:
        yield
    except FileError:
        raise
    except (TypeError, ValueError) as error:
        text, rules = str(error), ("bandwidth='", "support: ", "coordinates: ")
        named = re.search(rf"\b({'|'.join(files)})\b(?!=| \()", text)
        file = files.get("train" if text.startswith(rules) else named[0] if named else "")
        if file is None:
            raise
        row = re.search(r"\b(?:row|index) (\d+)", text)
        if row and file.lower().endswith((".csv", ".tsv")):  # whose lines count from 1, with what is before the samples
            rows = source(file, lambda names, width: [width - 1]).rows
            with open(file, encoding="utf-8-sig") as lines:
                filled = np.flatnonzero(np.fromiter((not line.isspace() for line in lines), bool))
            text = text.replace(row[0], f"{row[0]} (line {1 + filled[int(row[1]) - rows]})", 1)
        raise FileError(f"{file}: {text}") from error


def source(text: str, pick: Pick = lambda names, width: range(width), name: str = "") -> Source:
    """Open a path, or ``path.npz:key``, for reading; FileError if it is not the file of one array of numbers.

    ``pick``: which columns; ``name``: what errors call the file.
    """
    path, extension, key = _parse_place(text)
    text = name or text
    if not path.is_file() and not (extension == ".zarr" and path.is_dir()):
        code = errno.EISDIR if path.is_dir() else errno.ENOENT
        raise OSError(code, os.strerror(code), str(path))
    with naming(text):
        before = _stamp(path)
        found = FORMATS[extension][0](text, path, key, pick)
        if found.dtype.kind not in "iufbc":
            raise ValueError(f"the array is of dtype {found.dtype}; pass numbers")
        if not found.columns:
            raise ValueError("the array has no columns; pass (points, dimensions)")
        if found.rows * found.columns > 1 << 44:  # 128 TiB of float64: zarr has no chunks of what is all fill value
            raise ValueError(f"its metadata say shape {(found.rows, found.columns)}, more than anything here can sum")

    def check() -> None:
        if _stamp(path) != before:
            raise FileError(f"{text}: has changed since it was opened; leave it alone while it is read")

    return replace(found, check=check, at=None if found.at is None else naming(text)(found.at))


def _stamp(path: Path) -> list[tuple[Any, ...]]:
    """Return what changes with a file, or with any file of a folder."""
    seen = [(str(p), p.stat()) for p in (sorted(path.rglob("*")) if path.is_dir() else [path])]
    return [(name, found.st_ino, found.st_size, found.st_mtime_ns) for name, found in seen]


def _parse_place(text: str) -> tuple[Path, str, str]:
    """Path, extension in lower case, and key ("" without)."""
    name, key = without_key(text)
    path, extension = Path(name), Path(name).suffix.lower()
    if extension not in EXTENSIONS:
        hint = did_you_mean(extension, EXTENSIONS)
        raise FileError(f"{text}: unknown extension {extension!r}; pass one of {', '.join(EXTENSIONS)}{hint}")
    return path, extension, key


def is_stdout(text: str) -> bool:
    """Whether an output is standard output: ``-``, as .csv, or such as ``-.tsv``."""
    return text == "-" or (text.startswith("-.") and "/" not in text)


@contextmanager
def writing(text: str, shape: tuple[int, ...], dtype: str, name: str, names: Names = ()) -> Iterator[Write]:
    """Open a file for an array, and yield the function that appends a batch of its rows.

    The file takes its place at the end; after an error an older one is as it was. A folder is replaced only if it is a
    zarr array that sdkde wrote. ``name``: of the column (.csv, .parquet; of several, with a number, unless they have
    ``names``) or of the array (.npz without a key). See :func:`is_stdout`.
    """
    path, extension, key = _parse_place("-.csv" if text == "-" else text)
    if is_stdout(text) and extension == ".zarr":
        raise FileError(f"{text}: a zarr array is a folder; name one")
    if path.is_dir() and extension != ".zarr":
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    check_folder(path)
    if extension == ".npz" and path.is_file() and not is_stdout(text):
        check_archive(path, key or name, most=0 if key else 1)
    with ExitStack() as kept:
        target: Any = path
        if is_stdout(text):
            target = sys.stdout.buffer
            kept.callback(target.flush)
        elif extension != ".zarr":
            target = kept.enter_context(kept.enter_context(write_atomically(path)).open("wb"))
        names = names or ([name] if len(shape) == 1 else [f"{name}_{j}" for j in range(shape[1])])
        names = [key or name] if extension == ".npz" else names
        yield kept.enter_context(FORMATS[extension][1](target, shape, np.dtype(dtype), names))


def check_folder(path: Path) -> None:
    """Refuse an output in a folder that does not exist."""
    if not (folder := Path(os.path.realpath(path)).parent).is_dir():
        raise FileNotFoundError(errno.ENOENT, f"there is no folder {folder}; make it, or name another file", str(path))
