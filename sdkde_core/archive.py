r"""Files of arrays and what belongs to them: NumPy's archives, with a digest, and nothing in them is executed.

Format version 1 is what :func:`numpy.savez` writes, a zip of ``.npy`` members that are not compressed. The member
``sdkde`` holds JSON in UTF-8, as an array of bytes: ``format``, the version; ``kind``, what was saved; ``library``, the
version of sdkde-core that did; ``content``, an object that is the kind's own. The others are arrays of float64, float32
or int64. The zip's comment is ``sdkde sha256 `` and the SHA-256, in hexadecimal digits, of all bytes before the
comment's length.

Reading checks the digest first, and the length that each array declares against that of its member before memory is
taken, so a file takes no more than its size. The digest finds damage; it is no signature, and does not say who wrote
the file.

A kind is a class with ``save(path)``, which calls :func:`write` with the kind's name, and a class method
``from_saved(content, arrays, name)``. One that has a :class:`.Prepared` keeps what its ``to_saved`` returns.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .arrays import public
from .messages import brief
from .storage import write_atomically

Array = NDArray[Any]

VERSION = 1  # of the format
LONGEST = 1 << 22  # bytes of JSON
DTYPES: dict[str, Any] = {"float64": np.dtype("<f8"), "float32": np.dtype("<f4"), "int64": np.dtype("<i8")}


class Saved(NamedTuple):
    """What a file holds."""

    kind: str
    content: dict[str, Any]  # what JSON has
    arrays: dict[str, Array]


def plain(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options as a file keeps them; TypeError, beginning with ``name``, for one that JSON does not have."""
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
    """Write a file in a single step; ``content`` has what JSON has, ``arrays`` are of :data:`DTYPES`, on the host."""
    from . import __version__

    _check_path(path)
    members: dict[str, Any] = {name: np.asarray(x, dtype=DTYPES[x.dtype.name], order="C") for name, x in arrays.items()}
    about = {"format": VERSION, "kind": kind, "library": __version__, "content": dict(content)}
    header = json.dumps(about, allow_nan=False).encode()
    if len(header) > LONGEST:
        raise ValueError(f"what is to be saved beside the arrays takes {len(header)} bytes, and {LONGEST} at most")
    members["sdkde"] = np.frombuffer(header, np.uint8)
    with write_atomically(path) as temporary, temporary.open("w+b") as file:
        np.savez(file, **members)
        file.seek(-2, os.SEEK_END)  # the length of the comment, which is none yet
        file.write(_comment(file, file.tell()))


def read(path: Path | str) -> Saved:
    """Read a file that :func:`write` has written; ValueError if it is another, damaged, or of another format."""
    _check_path(path)
    with open(path, "rb") as file:
        try:
            if (begins := file.read(4)) != b"PK\x03\x04"[: len(begins)]:
                raise ValueError("is no file that sdkde has saved; pass one that save() has written")
            whole = file.seek(0, os.SEEK_END) - 79  # the comment and its length
            if whole < 0 or _comment(file, whole) != file.read():
                raise ValueError("is cut off, altered or damaged, or another program wrote it; save it anew")
            return _parsed(file)
        except ValueError as error:
            raise ValueError(f"{os.fspath(path)!r} {error}") from error.__cause__


def _check_path(path: Any) -> None:
    if not isinstance(path, str | os.PathLike):  # a number is a file that is open
        raise TypeError(f"path is {brief(path)}; pass a string or a Path")


def _comment(file: IO[bytes], length: int) -> bytes:
    """The length of the comment and the comment, about the first bytes of a file; the file stands behind them."""
    import hashlib  # a millisecond, and most processes write and read no file

    digest, left = hashlib.sha256(), length
    file.seek(0)
    while left and (piece := file.read(min(left, 1 << 20))):
        digest.update(piece)
        left -= len(piece)
    return struct.pack("<H", 77) + b"sdkde sha256 " + digest.hexdigest().encode()


def _parsed(file: IO[bytes]) -> Saved:
    try:
        arrays = _members(file)
        about = json.loads(arrays.pop("sdkde").tobytes().decode(), parse_constant=int)  # not NaN: int raises
        version, kind, content = about["format"], about["kind"], about["content"]
        if not (type(version) is int and isinstance(kind, str) and isinstance(content, dict)):
            raise ValueError("its member 'sdkde' is incomplete")
    except Exception as error:  # of a forged file the libraries raise nearly everything
        raise ValueError(f"is altered or damaged: {error!r:.200}; save it anew") from error
    if version != VERSION:
        from . import __version__

        remedy = "pip install -U sdkde-core" if version > VERSION else "save it anew"
        raise ValueError(f"is of format version {version}, and sdkde-core {__version__} reads {VERSION}; {remedy}")
    return Saved(kind, content, arrays)


def _members(file: IO[bytes]) -> dict[str, Array]:
    """The arrays of a zip by their names; together they take no more memory than the file has bytes."""
    import zipfile

    archive: Any
    with zipfile.ZipFile(file) as archive:
        infos, size = archive.infolist(), os.fstat(file.fileno()).st_size
        found = {info.filename.removesuffix(".npy"): info for info in infos}
        whole = all(info.compress_type == zipfile.ZIP_STORED and info.header_offset >= 0 for info in infos)
        if not whole or len(found) < len(infos) or sum(info.file_size for info in infos) > size:
            raise ValueError("its members do not fit it")
        if "sdkde" in found and found["sdkde"].file_size > LONGEST + 1000:
            raise ValueError("its member 'sdkde' is too long")
        arrays = {}
        for name, info in found.items():
            with archive.open(info) as member:
                version = np.lib.format.read_magic(member)
                shape, by_columns, dtype = np.lib.format.read_array_header_1_0(member, max_header_size=1000)
                taken = math.prod(shape) * dtype.itemsize
                known = version == (1, 0) and dtype in (*DTYPES.values(), np.uint8) and not by_columns
                if not known or min(shape, default=0) < 0 or len(shape) > 8 or member.tell() + taken != info.file_size:
                    raise ValueError(f"{info.filename} does not have the {dtype} numbers of the shape {shape}")
                x = np.empty(shape, dtype)
                if member.readinto(x.reshape(-1).view(np.uint8)) != taken:
                    raise ValueError(f"{info.filename} is cut off")
            arrays[name] = x.astype(dtype.newbyteorder("="), copy=False)
        return arrays


@public
def load(path: Path | str) -> Any:
    """Load what ``save`` has written: nothing in the file is executed, and damage is found.

    The numbers are those of what was saved, to the last bit with the same backend and threads. Where that backend or
    its device is not here, the best one that is takes its place, within the precision's bounds; with one
    :class:`SdkdeWarning` where the user had named it.

    Parameters
    ----------
    path : path

    Returns
    -------
    Prepared, KernelDensity or gaussian_kde
        What was saved.

    Raises
    ------
    OSError
        It cannot be read.
    ValueError
        It is another file, cut off, altered, or of another version of sdkde-core; the message names it.
    BackendUnavailable
        No backend that is here can take it.

    Examples
    --------
    >>> import numpy as np, sdkde_core
    >>> x = np.random.default_rng(0).normal(size=(500, 2))
    >>> sdkde_core.prepare(x).save("x.sdkde")  # doctest: +SKIP
    >>> sdkde_core.load("x.sdkde").estimate([[0.0, 0.0]]).shape  # doctest: +SKIP
    (1,)
    """
    kind, content, arrays = read(path)
    name = os.fspath(path)
    modules = {  # a file says which of these it is for, and no more
        "KernelDensity": "sdkde_core.interop.kernel_density",
        "Prepared": "sdkde_core.estimator.prepared",
        "gaussian_kde": "sdkde_core.interop.gaussian_kde",
    }
    if kind not in modules:
        raise ValueError(f"{name!r} holds a {kind!r:.60}, which this version does not know; pip install -U sdkde-core")
    try:
        return getattr(importlib.import_module(modules[kind]), kind).from_saved(content, arrays, name)
    except KeyError as error:
        raise ValueError(f"{name!r} cannot be loaded: its {error.args[0]} is missing; save it anew") from error
    except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError) as error:  # forged
        raise ValueError(f"{name!r} cannot be loaded: {error}; save it anew") from error
