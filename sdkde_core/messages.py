"""Messages to users: warnings about their own line, once for each cause, and names they may have meant; switches."""

from __future__ import annotations

import importlib
import os
import re
import sys
import threading
import warnings
from collections.abc import Iterable
from types import FrameType
from typing import Any


class SdkdeWarning(UserWarning):
    """Estimates do without something that cannot be used, such as a failed backend or a damaged file.

    Each cause has one warning in a process. It is about the line that called sdkde, so filter by this category:
    ``warnings.simplefilter("ignore", sdkde_core.SdkdeWarning)``.
    """


_lock = threading.Lock()
_told: set[str] = set()


def warn_once(message: str, cause: str | None = None) -> None:
    """Warn with :class:`SdkdeWarning`, once a process for every cause; the default cause is the message."""
    with _lock:
        cause = cause or message
        if cause in _told:
            return
        _told.add(cause)
    warnings.warn(message, SdkdeWarning, stacklevel=caller_level())


def caller_level() -> int:
    """Return the ``stacklevel`` with which the calling function warns about the line that called this package."""
    level, ours = 0, 0
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        level += not ("importlib" in file and "_bootstrap" in file)  # imports, which ``stacklevel`` leaves out
        name = frame.f_globals.get("__name__") or ""
        compiled = name == "torch._dynamo.eval_frame" and ours == level - 1  # what torch.compile puts around a call
        if compiled or name.partition(".")[0] == __name__.partition(".")[0]:
            ours = level
        frame = frame.f_back
    return ours + 1


def optional(name: str, purpose: str, extra: str, instead: str = "") -> Any:
    """Import an optional library; the ImportError has its purpose, the command that installs it, and ``instead``."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f"{purpose}: pip install 'sdkde-core[{extra}]' ({error}){instead}") from error


def did_you_mean(given: object, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'kde'?"``, or nothing if no known name is close to what was given."""
    import difflib  # takes a millisecond, and most calls have no mistake

    names = {name.lower(): name for name in known}
    close = difflib.get_close_matches(str(given).lower(), names, n=1, cutoff=0.75)
    return f"; did you mean {names[close[0]]!r}?" if close else ""


def brief(value: object) -> str:
    """Return the value as messages show it: on one line, cut where it is long, whatever its ``repr`` does."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # what cannot be shown is named
        text = f"a {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:76]} …"


def switched_off(variable: str) -> bool:
    """Whether a variable that is on by default says off; ValueError if it says neither."""
    on, off = ("on", "1", "true", "yes"), ("off", "0", "false", "no")
    text = os.environ.get(variable, "").lower()
    if text and text not in (*on, *off):
        raise ValueError(f"{variable} is {text!r}; set 'off' or 'on'{did_you_mean(text, (*on, *off))}")
    return text in off


def parse_size(text: int | float | str) -> int:
    """Return the bytes that an option ``memory`` says: a number, or a string such as ``"1.5 GB"`` or ``"512MiB"``."""
    units = {"": 1, "b": 1}
    for k, prefix in enumerate("kmgt", 1):
        units |= {f"{prefix}b": 1000**k, f"{prefix}ib": 1024**k}
    found = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*([a-z]*)\s*", str(text).lower())
    number, unit = found.groups() if found else ("0", "")
    size = float(number) * units.get(unit, 0)
    if size < 1.0 or (not unit and size % 1.0):
        raise ValueError(f"memory is {brief(text)}; pass bytes, or a string such as '1.5 GB' or '512 MiB'")
    return int(size)
