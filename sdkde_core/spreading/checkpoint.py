"""What is done of a long estimate, kept in a folder: a folder a pass, a file a block of rows.

A process may end at any moment: a file has a checksum and is written atomically. ``checkpoint.json`` says what the bits
follow from; to go on with anything else is refused. One process at a time has the folder.
"""

from __future__ import annotations

import errno
import json
import math
import os
import sqlite3
import tempfile
import warnings
import zlib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..arrays import Array
from ..files import FileError
from ..messages import SdkdeWarning, brief, caller_level
from ..storage import write_atomically


class Checkpoint(AbstractContextManager["Checkpoint"]):
    """A folder for one estimate, made where it is not there; no other process can use it until the context ends.

    ValueError: there is a checkpoint already and ``resume`` is False, or another estimate is using it.
    """

    def __init__(self, folder: Path | str, resume: bool) -> None:
        self._folder = Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._note = self._folder / "checkpoint.json"
        if not (self._folder / "lock").exists() and any(self._folder.iterdir()):
            raise ValueError(f"{folder} is there, and is no checkpoint; pass a folder that is empty, or a new one")
        self._lock, wrong = _locked(self._folder), ""
        if self._note.exists():
            wrong = "" if resume else "is there already; pass resume=True (--resume) to go on, or another folder"
        elif any(path.is_dir() for path in self._folder.iterdir()):
            wrong = "has results and no checkpoint.json; pass another folder"
        if wrong:
            self._lock.close()
            raise ValueError(f"checkpoint {folder} {wrong}")

    def __exit__(self, *exception: object) -> None:
        self._lock.close()

    def belongs_to(self, identity: Mapping[str, Any]) -> None:
        """Note what the bits follow from, as JSON; ValueError if the checkpoint is of something else."""
        wanted = json.loads(json.dumps(dict(identity)))
        if not self._note.exists():
            with write_atomically(self._note) as temporary:
                temporary.write_text(json.dumps(wanted, indent=1), encoding="utf-8")
            return
        try:
            kept = dict(json.loads(self._note.read_bytes()))
        except (TypeError, ValueError, RecursionError) as error:
            raise FileError(f"{self._note}: cannot be read ({error}); pass another checkpoint") from error
        for name, value in wanted.items():
            if kept.get(name) != value:
                what = f"of another estimate: {name} was {brief(kept.get(name))}, and is {value}"
                instead = "pass what it was made with, or another folder"
                raise ValueError(f"checkpoint {self._folder} is {what}; {instead}")

    def parts(self, name: str, shape: tuple[int, ...], dtype: str, rows: int) -> Chunks:
        """Return the array of a pass, with a file for every so many rows."""
        (self._folder / name).mkdir(exist_ok=True)
        return Chunks(self._folder / name, shape, np.dtype(dtype), rows)


def _locked(folder: Path) -> sqlite3.Connection:
    """Return a lock on a folder, until :meth:`close` or the process's end: SQLite's, as that is one on every system."""
    file = folder / "lock"
    if file.exists() and not os.access(file, os.W_OK):
        raise FileError(f"{file}: cannot be written, so other processes could use the checkpoint; pass another folder")
    held = None
    try:
        held = sqlite3.connect(file, timeout=0, isolation_level=None, check_same_thread=False)
        held.execute("BEGIN EXCLUSIVE")
    except sqlite3.Error as error:
        if held is not None:
            held.close()
        if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_BUSY:
            what = "in use by another estimate; wait until that ends, or pass another folder"
            raise ValueError(f"checkpoint {folder} is {what}") from None
        raise FileError(f"{file}: cannot be locked ({error}); pass another checkpoint") from error
    return held


class Chunks(NamedTuple):
    """An array that is made block by block: its blocks of rows are files, each with a checksum before the numbers."""

    path: Path
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    rows: int

    def has(self, start: int) -> bool:
        """Whether the block that begins there is done; warns of a damaged one, which is not."""
        try:
            self._read(start, start + 1)
        except FileNotFoundError:
            return False
        except FileError as error:
            warnings.warn(f"{error}; it is computed again", SdkdeWarning, stacklevel=caller_level())
            return False
        return True

    def write(self, start: int, block: Array) -> None:
        numbers = np.ascontiguousarray(block, self.dtype).data
        with write_atomically(self.path / str(start // self.rows)) as temporary, temporary.open("wb") as file:
            file.write(zlib.crc32(numbers).to_bytes(8, "little"))
            file.write(numbers)

    def read(self, start: int, stop: int) -> Array:
        firsts = range(start // self.rows * self.rows, stop, self.rows)
        return np.concatenate([self._read(max(start, k), min(stop, k + self.rows)) for k in firsts])

    def _read(self, start: int, stop: int) -> Array:
        file, first = self.path / str(start // self.rows), start // self.rows * self.rows
        if not file.is_file():
            raise FileNotFoundError(errno.ENOENT, "the block is gone; go on with resume=True (--resume)", str(file))
        raw, shape = file.read_bytes(), (min(self.rows, self.shape[0] - first), *self.shape[1:])
        numbers, size = memoryview(raw)[8:], math.prod(shape) * self.dtype.itemsize
        if len(numbers) != size or zlib.crc32(numbers).to_bytes(8, "little") != raw[:8]:
            raise FileError(f"{file}: the block is damaged (its checksum is wrong)")
        return np.frombuffer(numbers, self.dtype).reshape(shape)[start - first : stop - first]


class Scratch(AbstractContextManager["Scratch"]):
    """As :class:`Chunks`, in a temporary file which is gone when the context ends."""

    def __init__(self, shape: tuple[int, ...], dtype: Any) -> None:
        self._shape, self._dtype = shape, np.dtype(dtype)
        self._row = int(np.prod(shape[1:])) * self._dtype.itemsize
        self._file = tempfile.TemporaryFile(prefix="sdkde-")  # noqa: SIM115  closed where this context ends

    def has(self, start: int) -> bool:
        return False  # every block is asked for once, before it is written

    def write(self, start: int, block: Array) -> None:
        self._file.seek(start * self._row)
        self._file.write(np.ascontiguousarray(block, self._dtype).data)

    def read(self, start: int, stop: int) -> Array:
        self._file.seek(start * self._row)  # which writes what is buffered
        return np.frombuffer(self._file.read((stop - start) * self._row), self._dtype).reshape(-1, *self._shape[1:])

    def __exit__(self, *exception: object) -> None:
        self._file.close()
