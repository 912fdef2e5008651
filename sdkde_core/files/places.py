"""Where arguments are, on disk or in memory, so that no output is an input."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from .common import FileError, Source, without_key


def check_apart(out: Any, checkpoint: Any, **inputs: Any) -> None:
    """Refuse to write to where an input is, by another name of it too: to it, to what it lies in, or into it.

    ``inputs``: paths, arrays, Sources or None, by the name of the argument. A checkpoint may not lie in one either.
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
    if isinstance(given, Source):
        given = given.name
    if isinstance(given, str | os.PathLike):
        return Path(os.path.realpath(without_key(os.fspath(given))[0]))
    store = getattr(given, "store", None)  # an array of zarr's
    local = "file" in getattr(getattr(store, "fs", None), "protocol", ())
    root = getattr(store, "root", None) or (getattr(store, "path", None) if local else None)
    if root is not None:
        return Path(os.path.realpath(root), getattr(given, "path", ""))
    while isinstance(given, np.ndarray) and not isinstance(given, np.memmap):
        given = given.base
    name = getattr(given, "filename", None) if isinstance(given, np.memmap) else None
    return None if name is None else Path(os.path.realpath(name))


def _inside(a: Path | None, b: Path | None) -> bool:
    """Whether a is b or lies in it, whatever names they have."""
    return a is not None and b is not None and any(_same(one, b) for one in (a, *a.parents))


def _same(a: Path, b: Path) -> bool:
    try:
        return a.samefile(b)
    except OSError:  # one of them is not there
        return a == b
