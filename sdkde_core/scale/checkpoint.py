"""What is done of a long estimate, kept in a folder: a zarr array a pass, a chunk a block of rows.

A chunk is written under another name and then renamed, so one that is there is whole: a process may end at any moment,
and a disk may be full. ``checkpoint.json`` says what the bits follow from. To go on with anything else is refused.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..storage import write_atomically
from .files import zarr_module

__all__ = ["Checkpoint", "Parts", "Scratch"]

Array = NDArray[Any]


class Parts(Protocol):
    """An array that is made block by block."""

    def has(self, start: int) -> bool:
        """Whether the block that begins there is done."""

    def write(self, start: int, block: Array) -> None:
        """Keep a block."""

    def read(self, start: int, stop: int) -> Array:
        """Return rows that are done."""


class Checkpoint:
    """A folder for one estimate.

    Parameters
    ----------
    folder : path
        Made where it is not there.
    identity : mapping
        What the bits follow from, of what JSON has.
    resume : bool
        Go on with what is there.

    Raises
    ------
    ValueError
        There is a checkpoint already, or one of another estimate.
    """

    def __init__(self, folder: Path | str, identity: Mapping[str, Any], resume: bool) -> None:
        self._folder = Path(folder)
        zarr_module()
        self._folder.mkdir(parents=True, exist_ok=True)
        note = self._folder / "checkpoint.json"
        if not note.exists():
            if any(self._folder.glob("*.zarr")):
                raise ValueError(f"checkpoint {self._folder} has arrays and no checkpoint.json; pass another folder")
            with write_atomically(note) as temporary:
                temporary.write_text(json.dumps(dict(identity), indent=1), encoding="utf-8")
            return
        if not resume:
            raise ValueError(
                f"checkpoint {self._folder} is there already; pass resume=True (--resume) to go on, or another folder"
            )
        try:
            kept = json.loads(note.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"checkpoint {note} cannot be read ({error}); pass another folder") from error
        wanted = json.loads(json.dumps(dict(identity)))
        for name in wanted:
            if not isinstance(kept, dict) or kept.get(name) != wanted[name]:
                was = kept.get(name) if isinstance(kept, dict) else None
                raise ValueError(
                    f"checkpoint {self._folder} is of another estimate: {name} was {was}, and is {wanted[name]}; "
                    "pass what it was made with, or another folder"
                )

    def parts(self, name: str, shape: tuple[int, ...], dtype: str, rows: int) -> Parts:
        """Return the array of a pass, with a chunk for every so many rows."""
        zarr, path = zarr_module(), self._folder / f"{name}.zarr"
        if (path / "zarr.json").exists():
            return _Chunks(path, zarr.open_array(path, mode="r+"))
        made = zarr.create_array(
            path,
            shape=shape,
            chunks=(rows, *shape[1:]),
            dtype=dtype,
            compressors=None,
            filters=None,
            config={"write_empty_chunks": True},  # a chunk of zeros is done too
        )
        return _Chunks(path, made)


class _Chunks:
    def __init__(self, path: Path, array: Any) -> None:
        self._path, self._array = path, array.with_config({"write_empty_chunks": True})
        self._size = int(np.prod(array.chunks)) * array.dtype.itemsize

    def has(self, start: int) -> bool:
        key = (start // self._array.chunks[0],) + (0,) * (self._array.ndim - 1)
        file = self._path / self._array.metadata.encode_chunk_key(key)
        return file.is_file() and file.stat().st_size == self._size

    def write(self, start: int, block: Array) -> None:
        self._array[start : start + len(block)] = block

    def read(self, start: int, stop: int) -> Array:
        return np.asarray(self._array[start:stop])


class Scratch(AbstractContextManager["Scratch"]):
    """An array in a temporary file, which is gone when the context ends; nothing is kept of it in memory."""

    def __init__(self, shape: tuple[int, ...], dtype: Any) -> None:
        self._shape, self._dtype, self._done = shape, np.dtype(dtype), set[int]()
        self._row = int(np.prod(shape[1:])) * self._dtype.itemsize
        self._file = tempfile.TemporaryFile(prefix="sdkde-")  # noqa: SIM115  closed where this context ends

    def has(self, start: int) -> bool:
        """See :class:`Parts`."""
        return start in self._done

    def write(self, start: int, block: Array) -> None:
        """See :class:`Parts`."""
        self._file.seek(start * self._row)
        self._file.write(np.ascontiguousarray(block, self._dtype).data)
        self._done.add(start)

    def read(self, start: int, stop: int) -> Array:
        """See :class:`Parts`."""
        self._file.flush()
        self._file.seek(start * self._row)
        block = np.empty((stop - start, *self._shape[1:]), self._dtype)
        self._file.readinto(block.reshape(-1).view(np.uint8).data)
        return block

    def __exit__(self, *exception: object) -> None:
        self._file.close()
