"""Files of arrays and what belongs to them: NumPy's archives, and nothing in them is executed.

Format version 1 is what :func:`numpy.savez` writes, a zip of ``.npy`` members that are not compressed, each with its
CRC-32. The member ``sdkde`` holds JSON in UTF-8, as an array of bytes: ``format``, the version; ``kind``, what was
saved; ``library``, the version of sdkde-core that did; ``content``, an object that is the kind's own.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import numpy as np

from . import __version__
from .arrays import Array, public
from .messages import brief
from .storage import write_atomically

VERSION = 1  # of the format


def jsonable(value: Any) -> Any:
    """A parameter with lists for tuples, and Python's numbers for NumPy's."""
    if isinstance(value, list | tuple):
        return [jsonable(one) for one in value]
    return value.item() if isinstance(value, np.generic) else value


def plain(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options as a file keeps them; TypeError, beginning with ``name``, for one that JSON does not have."""
    for option, value in options.items():
        with suppress(TypeError, ValueError, RecursionError):
            if json.loads(json.dumps(value, allow_nan=False)) == value:
                continue
        instead = "pass None, booleans, numbers, strings, or lists and dicts of those"
        raise TypeError(f"{name} has {option}={brief(value)}, which a file does not keep; {instead}")
    return dict(options)


def write(path: Path | str, kind: str, content: Mapping[str, Any], arrays: Mapping[str, Any]) -> None:
    """Write a file in a single step; ``content`` has what JSON has, ``arrays`` are NumPy's."""
    check_replaced(path)
    about = {"format": VERSION, "kind": kind, "library": __version__, "content": dict(content)}
    header = np.frombuffer(json.dumps(about, allow_nan=False).encode(), np.uint8)
    ordered: dict[str, Any] = {name: np.asarray(x, order="C") for name, x in arrays.items()}
    with write_atomically(path) as temporary, temporary.open("wb") as file:
        np.savez(file, sdkde=header, **ordered)


def read(path: Path | str) -> tuple[str, dict[str, Any], dict[str, Array]]:
    """Return the kind, the content and the arrays that :func:`write` was given; ValueError if the file is another."""
    name = _named(path)
    with open(path, "rb") as file:
        if (begins := file.read(4)) != b"PK\x03\x04"[: len(begins)]:
            raise ValueError(f"{name!r} is no file that sdkde has saved; pass one that save() has written")
        try:
            arrays = _members(file)
            about = json.loads(arrays.pop("sdkde").tobytes(), parse_constant=int)  # not NaN: int raises
            version, kind, content = about["format"], about["kind"], about["content"]
            if not (type(version) is int and isinstance(kind, str) and isinstance(content, dict)):
                raise ValueError("its member 'sdkde' is incomplete")
        except Exception as error:  # of a forged file the libraries raise nearly everything
            cause = f"is cut off, altered or damaged, or another program wrote it ({error!r:.200}); save it anew"
            raise ValueError(f"{name!r} {cause}") from error
    if version != VERSION:
        found = f"is of format version {version}, and sdkde-core {__version__} reads {VERSION}"
        remedy = "pip install -U sdkde-core" if version > VERSION else "save it anew"
        raise ValueError(f"{name!r} {found}; {remedy}")
    return kind, content, arrays


def check_replaced(path: Path | str) -> None:
    """Raise FileExistsError where a file is there that is neither empty nor one that :func:`write` made."""
    name = _named(path)
    if os.path.isfile(name) and os.path.getsize(name) and not is_ours(name):
        raise FileExistsError(f"{name}: is there, and is no density; name another, or remove it first")


def is_ours(path: Path | str) -> bool:
    """Whether a file begins as what :func:`write` writes, cut off or damaged behind that or not."""
    with open(path, "rb") as file:
        begins = file.read(512)
    return begins[:4] == b"PK\x03\x04" and begins[30:39] == b"sdkde.npy" and b'{"format": ' in begins


def _named(path: Any) -> str:
    if not isinstance(path, str | os.PathLike):  # a number is a file that is open
        raise TypeError(f"path is {brief(path)}; pass a string or a Path")
    return os.fspath(path)


def _members(file: IO[bytes]) -> dict[str, Array]:
    """The arrays of a zip by their names; what unpacks to more than the file has bytes is refused."""
    import zipfile  # takes milliseconds, and most processes read no file

    arrays = {}
    with zipfile.ZipFile(file) as archive:
        infos = archive.infolist()
        if sum(info.file_size for info in infos) > os.fstat(file.fileno()).st_size:
            raise ValueError("its members do not fit it")
        for info in infos:
            with archive.open(info) as member:
                arrays[info.filename.removesuffix(".npy")] = np.lib.format.read_array(member, allow_pickle=False)
                if member.read(1):  # its end, where the CRC-32 is compared, has to be read too
                    raise ValueError(f"{info.filename} is longer than its array")
    return arrays


@public
def load(path: Path | str) -> Any:
    """Load what ``save`` has written: nothing in the file is executed, and damage is found.

    With the same backend and threads results are the same to the last bit. Where that backend or its device is not
    here, the best one here takes its place, within the precision's bounds, with one :class:`SdkdeWarning` if the user
    had named it.

    Parameters
    ----------
    path : path

    Returns
    -------
    Prepared, KernelDensity or gaussian_kde
        The saved object.

    Raises
    ------
    OSError
        It cannot be read.
    ValueError
        It is another file, cut off, altered, or of another version of sdkde-core; the message names it.
    BackendUnavailable
        No backend that is here can take it.
    """
    kind, content, arrays = read(path)
    name = os.fspath(path)
    if kind not in ("KernelDensity", "Prepared", "gaussian_kde"):  # a file says which of these it is for, and no more
        raise ValueError(f"{name!r} holds a {kind!r:.60}, which this version does not know; pip install -U sdkde-core")
    try:
        return getattr(sys.modules[__package__], kind).from_saved(content, arrays, name)
    except KeyError as error:
        raise ValueError(f"{name!r} cannot be loaded: its {error.args[0]} is missing; save it anew") from error
    except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError) as error:  # forged
        raise ValueError(f"{name!r} cannot be loaded: {error}; save it anew") from error
