r"""Files of ours that hold a header and arrays: no pickle, nothing in them is executed, and damage is found.

Format version 1, numbers little-endian, nothing compressed:

===========  ==================================================================================================
8 bytes      ``\x89sdkde\r\n``: what it is; what copies it as text spoils it
4 bytes      the format version, an unsigned integer
4 bytes      H, the length of the header, an unsigned integer
8 bytes      the length of the whole file, an unsigned integer
H bytes      the header: JSON in UTF-8
…            the arrays' numbers, one after another in the header's order, each in C order
32 bytes     SHA-256 of all that stands before
===========  ==================================================================================================

The header is an object: ``kind``, what was saved, a string; ``library``, the version of sdkde-core that did, a string;
``arrays``, a list of ``[name, dtype, shape]``, the dtype ``"float64"``, ``"float32"`` or ``"int64"``; ``content``, an
object that is the kind's own. Later versions of the library read version 1 too.

Reading checks every length against the file's own before anything is allocated, so a file takes no more memory than its
size, and its header some twenty times its own, which is bounded. SHA-256 finds damage; it is no signature, and does not
say who wrote the file.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .messages import brief
from .storage import write_atomically

__all__ = ["Saved", "plain", "read", "write"]

Array = NDArray[Any]

MAGIC, VERSION = b"\x89sdkde\r\n", 1

_HEAD = struct.Struct("<8sIIQ")

#: Bytes of the fingerprint, and of a header at most.
_DIGEST, _LONGEST = 32, 1 << 22

#: What arrays may be of, by name.
_DTYPES: dict[str, Any] = {"float64": np.dtype("<f8"), "float32": np.dtype("<f4"), "int64": np.dtype("<i8")}


class Saved(NamedTuple):
    """What a file holds."""

    kind: str
    content: dict[str, Any]  # what JSON has
    arrays: dict[str, Array]


class _Wrong(ValueError):
    """What is wrong with a file, to follow its name."""


def plain(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options as a file keeps them: :func:`read` gives back the same.

    Raises
    ------
    TypeError
        One of them is something else than JSON has; the message begins with ``name``.
    """
    for option, value in options.items():
        try:
            if json.loads(json.dumps(value, allow_nan=False)) == value:
                continue
        except (TypeError, ValueError, RecursionError):
            pass
        raise TypeError(
            f"{name} has {option}={brief(value)}, which a file does not keep; pass None, booleans, numbers, strings, "
            "or lists and dicts of those"
        )
    return dict(options)


def write(path: Path | str, kind: str, content: Mapping[str, Any], arrays: Mapping[str, Any]) -> None:
    """Write a file in a single step; after an error or an interrupt an older one is as it was.

    Parameters
    ----------
    path : path
        In a folder that exists; overwritten.
    kind : str
        What it is.
    content : mapping
        Of what JSON has, finite: :func:`read` returns the same.
    arrays : mapping of str to array
        float64, float32 or int64, on the host, of any shape.

    Raises
    ------
    TypeError
        The path is none.
    OSError
        It cannot be written.
    ValueError
        The content is longer than 4 MiB.
    """
    from . import __version__

    _check_path(path)
    kept = {name: np.asarray(x, dtype=_DTYPES[x.dtype.name], order="C") for name, x in arrays.items()}
    listed = [[name, x.dtype.name, list(x.shape)] for name, x in kept.items()]
    header = json.dumps(
        {"kind": kind, "library": __version__, "arrays": listed, "content": dict(content)}, allow_nan=False
    ).encode()
    if len(header) > _LONGEST:
        raise ValueError(f"what is to be saved beside the arrays takes {len(header)} bytes, and {_LONGEST} at most")
    total = _HEAD.size + len(header) + sum(x.nbytes for x in kept.values()) + _DIGEST
    pieces: list[Any] = [_HEAD.pack(MAGIC, VERSION, len(header), total), header, *map(_bytes_of, kept.values())]
    import hashlib  # a millisecond, and most processes write and read no file

    digest = hashlib.sha256()
    with write_atomically(path) as temporary, temporary.open("wb") as file:
        for piece in pieces:
            digest.update(piece)
            file.write(piece)
        file.write(digest.digest())


def read(path: Path | str) -> Saved:
    """Read a file that :func:`write` has written.

    Raises
    ------
    TypeError
        The path is none.
    OSError
        It cannot be read.
    ValueError
        It is something else, cut off, altered, or of a newer format; the message names it.
    """
    _check_path(path)
    with open(path, "rb") as file:
        try:
            return _read(file)
        except _Wrong as error:
            raise ValueError(f"{os.fspath(path)!r} {error}") from None


def _check_path(path: Any) -> None:
    if not isinstance(path, str | os.PathLike):  # a number is a file that is open
        raise TypeError(f"path is {brief(path)}; pass a string or a Path")


def _read(file: BinaryIO) -> Saved:
    size, head = os.fstat(file.fileno()).st_size, file.read(_HEAD.size)
    if head[: len(MAGIC)] != MAGIC[: len(head)]:
        raise _Wrong("is no file that sdkde has saved; pass one that save() has written")
    if len(head) < _HEAD.size:
        raise _Wrong(f"is cut off after {len(head)} bytes; save it anew")
    _, version, length, total = _HEAD.unpack(head)
    if version > VERSION:
        from . import __version__

        raise _Wrong(
            f"is of format version {version}, and sdkde-core {__version__} reads up to {VERSION}; "
            "pip install -U sdkde-core"
        )
    if size < total:
        raise _Wrong(f"is cut off: it has {size} of {total} bytes; save it anew")
    space = total - _HEAD.size - length - _DIGEST
    if version < 1 or size > total or length > _LONGEST or space < 0:
        raise _damaged("the lengths that it begins with do not fit it")
    import hashlib

    raw, digest = file.read(length), hashlib.sha256(head)
    digest.update(raw)
    kind, content, arrays = _parsed(raw, space)
    for x in arrays.values():
        buffer = _bytes_of(x)
        if file.readinto(buffer) != len(buffer):  # type: ignore[attr-defined]
            raise _Wrong("was cut off while it was read; leave it alone meanwhile")
        digest.update(buffer)
    if file.read() != digest.digest():
        raise _damaged("its fingerprint is another")
    return Saved(kind, content, {name: x.astype(x.dtype.newbyteorder("="), copy=False) for name, x in arrays.items()})


def _parsed(raw: bytes, space: int) -> tuple[str, dict[str, Any], dict[str, Array]]:
    """The kind, the content, and arrays to be filled, which fit the space in bytes."""
    try:
        header = json.loads(raw.decode(), parse_constant=_no_number)
        kind, content, listed = header["kind"], header["content"], header["arrays"]
        fits = isinstance(kind, str) and isinstance(content, dict)
        laid_out = {str(name): (_DTYPES[dtype], _shape(shape, space)) for name, dtype, shape in listed}
    except (ValueError, TypeError, KeyError, RecursionError):
        raise _damaged("its header cannot be read") from None
    taken = sum(dtype.itemsize * math.prod(shape) for dtype, shape in laid_out.values())
    if not fits or len(laid_out) != len(listed) or taken != space:
        raise _damaged("its header does not fit it")
    return kind, content, {name: np.empty(shape, dtype) for name, (dtype, shape) in laid_out.items()}


def _shape(shape: Any, space: int) -> tuple[int, ...]:
    if not (isinstance(shape, list) and len(shape) <= 8 and all(type(k) is int and 0 <= k <= space for k in shape)):
        raise ValueError
    return tuple(shape)


def _no_number(text: str) -> Any:
    raise ValueError(text)


def _damaged(what: str) -> _Wrong:
    return _Wrong(f"is altered or damaged: {what}; save it anew")


def _bytes_of(x: Array) -> Any:
    """The bytes of an array in C order, not a copy."""
    return x.reshape(-1).view(np.uint8).data
