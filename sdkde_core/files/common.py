"""What all formats share: the array in a file as a :class:`Source`, errors that name it, and that no output is one."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..arrays import Argument, Array, refuse_masked

Write = Callable[[Array], Any]  #: Takes the next rows.

#: Which columns are read, and in what order: of a file with these names, or none, and so many columns.
Pick = Callable[[tuple[str, ...], int], Sequence[int]]


class FileError(ValueError):
    """A file is not what it should be; the message begins with its name."""


@contextmanager
def naming(name: str) -> Iterator[None]:
    """Put the file's name before the message of an error in reading it."""
    try:
        yield
    except Exception as error:
        if isinstance(error, FileError | ImportError) or getattr(error, "filename", None):  # an OSError has the name
            raise
        text = "it is no text in UTF-8: save it as that, and unpack .gz files first"
        text = text if isinstance(error, UnicodeDecodeError) else str(error)
        raise (MemoryError if isinstance(error, MemoryError) else FileError)(f"{name}: {text}") from error


def filling(array: Any) -> Write:
    """Return a function that writes the next rows of an array."""
    done = 0

    def write(batch: Array) -> None:
        nonlocal done
        array[done : done + len(batch)] = batch
        done += len(batch)

    return write


@dataclass(frozen=True)
class Source:
    """An array that is read in batches."""

    name: str  # as in the command
    rows: int
    columns: int
    dtype: Any
    read_batches: Callable[[int], Iterator[Array]]  # read_batches(rows): arrays of at most so many rows, in order
    names: tuple[str, ...] = ()  # of the columns; empty if the format has none
    at: Any = None  # at(start, stop) returns rows; None: it is read from the beginning on
    check: Callable[[], object] = lambda: None  # raises a FileError if the file has changed since it was opened
    whole: Source | None = None  # of all columns of the file, those of tables as text; None: this one

    @classmethod
    def of(cls, name: str, x: Array) -> Source:
        """Make a source of an array, mapped or in memory; only a batch at a time is copied."""
        return cls.reading(name, x.shape, x.dtype, lambda start, stop: np.array(x[start:stop]))

    @classmethod
    def reading(cls, name: str, shape: tuple[int, ...], dtype: Any, at: Callable[[int, int], Array]) -> Source:
        """Make a source of what reads rows in any order."""
        width, declared = width_of(shape), np.dtype(dtype)

        def checked(start: int, stop: int) -> Array:
            block = at(start, stop)
            refuse_masked(name, block)
            x, wanted = np.asarray(block), (stop - start, *shape[1:])
            if x.shape != wanted or x.dtype.newbyteorder("=") != declared.newbyteorder("="):
                some = f"rows {start} to {stop} are declared as {declared} of shape {wanted}"
                raise ValueError(f"{name}: {some}, and are {x.dtype} of shape {x.shape}")
            return x.reshape(-1, width)

        def batches(rows: int) -> Iterator[Array]:
            for start in range(0, shape[0], rows):
                yield checked(start, min(start + rows, shape[0]))

        return cls(name, int(shape[0]), width, declared, batches, at=checked)

    def batches(self, rows: int | None = None) -> Iterator[Array]:
        """Yield (≤ rows, columns) arrays, by default of up to 32 MiB; a FileError names a file that cannot be read."""
        done = 0
        with naming(self.name):
            for batch in self.read_batches(rows or max(1, min(1 << 16, (1 << 22) // max(1, self.columns)))):
                done += len(batch)
                yield batch
            if done != self.rows:
                raise ValueError(f"had {self.rows} rows and now {done}; leave the file alone while it is read")

    def read(self) -> Array:
        """Return the whole array, (rows, columns)."""
        with naming(self.name):
            result = np.empty((self.rows, self.columns), self.dtype)
        write = filling(result)
        for batch in self.batches():
            write(batch)
        return result

    def picked(self, pick: Pick) -> Source:
        """Return a source of some columns of an array, which have no names."""
        wanted, read, at = list(pick((), self.columns)), self.read_batches, self.at
        if wanted == list(range(self.columns)):
            return self
        some = replace(self, columns=len(wanted), read_batches=lambda rows: (x[:, wanted] for x in read(rows)))
        return replace(some, at=at and (lambda start, stop: at(start, stop)[:, wanted]), whole=self)

    def shaped(self, name: str) -> Argument:
        """Return an argument of this shape and dtype, without its numbers."""
        return Argument.of(name, np.broadcast_to(np.zeros((), self.dtype), (self.rows, self.columns)))


def width_of(shape: tuple[int, ...]) -> int:
    if len(shape) not in (1, 2):
        raise ValueError(f"the array has shape {shape}; pass (points, dimensions), or (points,) in one dimension")
    return 1 if len(shape) == 1 else int(shape[1])


def without_key(text: str) -> tuple[str, str]:
    """Path, and the key of an array in an archive ("" without)."""
    keyed = re.fullmatch(r"(.*\.npz):([^/\\]+)", text, re.IGNORECASE)
    return (keyed[1], keyed[2]) if keyed else (text, "")


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
        return Path(os.path.realpath(without_key(os.fspath(given))[0]))
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
