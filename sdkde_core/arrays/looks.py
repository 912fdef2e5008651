"""What the host reads of arrays on a device, and what it decides from that.

A call that is recorded as a CUDA graph cannot wait for the device. What calls before it have decided is taken for
granted there, and the numbers that it was decided from are read after every replay, to see that they still say so.
Hence whatever depends on numbers that may be on a device is decided by :func:`look`, in the core and in backends that
are ``capturable``.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
from array_api_compat import array_namespace, is_torch_array

from .places import to_host

R = TypeVar("R")
N = TypeVar("N", bound="Decisions | Taken | None")


class Decisions:
    """What a call has decided from numbers on a device, in order, and from how many numbers."""

    def __init__(self) -> None:
        self.made: list[Any] = []
        self.size = 0

    def look(self, decide: Callable[..., R], numbers: tuple[Any, ...]) -> R:
        """Decide, and note it."""
        read = _read(numbers)
        result = decide(*read)
        self.made.append(result)
        self.size += len(read)
        return result


class Taken:
    """Decisions that are taken for granted, of a call that looks for the same in the same order, and their numbers.

    ``kept`` has what must live as long as the recording does.
    """

    def __init__(self, decisions: Decisions) -> None:
        self.kept: list[Any] = []
        self._left = decisions.made[::-1]
        self._numbers: list[Any] = []
        self._checks: list[tuple[int, Callable[..., Any]]] = []  # how many numbers, and what is decided from them

    def look(self, decide: Callable[..., R], numbers: tuple[Any, ...]) -> R:
        """Take the next decision, and keep what it is to be checked by."""
        flat = _flat(numbers)
        self._numbers.append(flat)
        self._checks.append((flat.shape[0], decide))
        result: R = self._left.pop()
        return result

    def numbers(self) -> Any:
        """Return all numbers, on the device, and keep them no longer."""
        found, self._numbers = self._numbers, []
        return array_namespace(*found).concat(found)

    def decided(self, numbers: Sequence[float]) -> tuple[Any, ...]:
        """Return what is decided from other numbers, on the host."""
        found, start = [], 0
        for size, decide in self._checks:
            found.append(decide(*numbers[start : start + size]))
            start += size
        return tuple(found)


class _Noted(threading.local):
    by: Decisions | Taken | None = None


_noted = _Noted()


@contextmanager
def noting(by: N) -> Iterator[N]:
    """Have what this thread decides noted, or taken; ``by``: where, None: nowhere."""
    before, _noted.by = _noted.by, by
    try:
        yield by
    finally:
        _noted.by = before


def taken() -> Taken | None:
    """Return what decisions are taken from, where a call is being recorded."""
    return _noted.by if isinstance(_noted.by, Taken) else None


def decided() -> int:
    """How many decisions of this thread's call have been noted so far."""
    return len(_noted.by.made) if isinstance(_noted.by, Decisions) else 0


def recording() -> bool:
    """Whether what this thread decides is noted, or taken: for a call that is recorded, or about to be."""
    return _noted.by is not None


def look(decide: Callable[..., R], *numbers: Any) -> R:
    """Return ``decide(*numbers)`` of numbers that may be on a device: all read at once.

    Parameters
    ----------
    decide : callable
        Of a float for every number. What it returns follows from them alone, is equal where the same is to be done, and
        is nothing that work on the device depends on to more digits than that. It raises nothing.
    *numbers : array
        float64; of arrays with axes every entry.
    """
    if isinstance(numbers[0], (np.ndarray, np.generic)):
        return decide(*[float(x) for number in numbers for x in np.ravel(number)])
    if _noted.by is None:
        return decide(*_read(numbers))
    return _noted.by.look(decide, numbers)


def rounded(x: float) -> float:
    """Return a number ≥ 0 rounded up by at most a twelfth: what is decided from it changes rarely with the data."""
    return 2.0 ** (math.ceil(8.0 * math.log2(x)) / 8.0) if 0.0 < x < math.inf else x


def _read(numbers: tuple[Any, ...]) -> list[float]:
    if len(numbers) == 1 and numbers[0].ndim == 0:
        return [float(numbers[0])]
    flat = _flat(numbers)
    found: list[float] = (flat if is_torch_array(flat) else to_host(flat)).tolist()
    return found


def _flat(numbers: tuple[Any, ...]) -> Any:
    xp = array_namespace(numbers[0])
    flat = [x.reshape(-1) if is_torch_array(x) else xp.reshape(x, (-1,)) for x in numbers]
    return flat[0] if len(flat) == 1 else xp.concat(flat)
