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
from .formats import FORMATS, FileError, Names, Pick, Source, Write, check_archive, filling, naming

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
    name, key = _without_key(text)
    path, extension = Path(name), Path(name).suffix.lower()
    if extension not in EXTENSIONS:
        hint = did_you_mean(extension, EXTENSIONS)
        raise FileError(f"{text}: unknown extension {extension!r}; pass one of {', '.join(EXTENSIONS)}{hint}")
    return path, extension, key


def _without_key(text: str) -> tuple[str, str]:
    """Path, and the key of an array in an archive ("" without)."""
    keyed = re.fullmatch(r"(.*\.npz):([^/\\]+)", text, re.IGNORECASE)
    return (keyed[1], keyed[2]) if keyed else (text, "")


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
            if sys.stdout is None:
                raise FileError("standard output is closed; name a file")
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


def check_apart(out: Any, checkpoint: Any, **inputs: Any) -> None:
    """Refuse to write to where an input is, by another name of it too: to it, to what it lies in, or into it.

    ``inputs``: paths, arrays or None, by the name of the argument. A checkpoint may not lie in one either.
    """
    place, folder = _place(out), _place(checkpoint)
    shown = out if isinstance(out, str | os.PathLike) else place
    for name, given in {**inputs, "the checkpoint": checkpoint}.items():
        other = _place(given)
        if place is None and out is not None and out is given:
            raise FileError(f"out is {name}; pass another out")
        if isinstance(out, np.ndarray) and isinstance(given, np.ndarray) and np.may_share_memory(out, given):
            raise FileError(f"out shares memory with {name}; pass another out")
        within, contains = _inside(place, other), _inside(other, place)
        if within and contains:
            raise FileError(f"{shown}: out and {name} are one file; pass another out")
        if contains:
            raise FileError(f"{shown}: out contains {name}, {other}, which it would replace; pass another out")
        if within:
            raise FileError(f"{shown}: out lies in {name}, {other}; pass another out")
        if name in inputs and _inside(folder, other):
            raise FileError(f"{checkpoint}: the checkpoint lies in {name}, {other}; pass another folder")


def _place(given: Any) -> Path | None:
    """Return the file or folder that an argument is, as a path or a mapped array; None: it is in memory."""
    if isinstance(given, str | os.PathLike):
        return Path(os.path.realpath(_without_key(os.fspath(given))[0]))
    store = getattr(given, "store", None)  # an array of zarr's
    local = "file" in getattr(getattr(store, "fs", None), "protocol", ())
    root = getattr(store, "root", None) or (getattr(store, "path", None) if local else None)
    if root is not None:
        return Path(os.path.realpath(root), getattr(given, "path", ""))
    while isinstance(given, np.ndarray) and not isinstance(given, np.memmap):
        given = given.base
    return Path(os.path.realpath(given.filename)) if isinstance(given, np.memmap) and given.filename else None


def _inside(a: Path | None, b: Path | None) -> bool:
    """Whether a is b or lies in it, whatever names they have."""
    if a is None or b is None:
        return False
    return any(one == b or (one.exists() and b.exists() and one.samefile(b)) for one in (a, *a.parents))
