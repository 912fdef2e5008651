"""Folders that are arrays of zarr's."""

from __future__ import annotations

import errno
import json
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..messages import SdkdeWarning, caller_level, optional
from ..storage import write_folder
from .common import MOST, Source, Write, filling

#: Attributes of an array that sdkde wrote, and may replace.
OURS = {"written_by": "sdkde"}


def read_zarr(name: str, path: Path, key: str) -> Source:
    """Open a zarr array; warns of chunks that are not there."""
    x = zarr_module().open_array(path, mode="r")
    # zarr takes chunks that are not there for numbers; its own count looks for each one that could be.
    known = (path / "zarr.json").is_file() and x.shards is None
    missing = x.nchunks - sum(chunk.is_file() for chunk in (path / "c").rglob("*")) if known else 0
    if missing > 0 and math.prod(x.shape) <= MOST:
        message = f"{name}: {missing} of {x.nchunks} chunks are not there, and are read as {x.fill_value}"
        warnings.warn(message, SdkdeWarning, stacklevel=caller_level())
    return Source.reading(name, x.shape, x.dtype, lambda start, stop: x[start:stop])


def zarr_module() -> Any:
    """Return the module zarr; ImportError says how to install it."""
    return optional("zarr", "zarr arrays and checkpoints need zarr", "zarr")


@contextmanager
def write_zarr(path: Path, shape: tuple[int, ...], dtype: Any, name: str) -> Iterator[Write]:
    """Write a zarr array with checksums, which takes its place at the end."""
    with write_folder(path, _check_ours) as folder:
        chunks = max(1, min(shape[0], (1 << 20) // math.prod(shape[1:]))), *shape[1:]
        zarr = zarr_module()
        how = {"shape": shape, "chunks": chunks, "dtype": dtype, "attributes": OURS}
        how["compressors"] = [zarr.codecs.ZstdCodec(), zarr.codecs.Crc32cCodec()]
        how["config"] = {"write_empty_chunks": True}  # a chunk that is not there is lost, and not zeros
        yield filling(zarr.create_array(folder, **how))


def _check_ours(folder: Path) -> None:
    """Refuse to replace anything but an array of zarr's that sdkde wrote, with nothing else in its folder."""
    if not folder.exists():
        return
    try:
        metadata = json.loads((folder / "zarr.json").read_bytes())
        ours = metadata["node_type"] == "array" and metadata["attributes"] == OURS
        for path in folder.rglob("*"):
            first, *rest = path.relative_to(folder).parts
            ours = ours and ((first == "zarr.json" and not rest) or (first == "c" and all(map(str.isdecimal, rest))))
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        ours = False
    if not ours:
        cause = "is there, and is no array that sdkde wrote; name another, or remove it first"
        raise FileExistsError(errno.EEXIST, cause, str(folder))
