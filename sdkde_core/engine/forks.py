"""What a forked child can use of its parent's: only the thread that forked goes on in it, with whatever others held."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

_locks: weakref.WeakSet[Any] = weakref.WeakSet()


def in_child(call: Callable[[], Any]) -> None:
    """Call something first in every forked child."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=call)


# As threading, logging and concurrent.futures do.
in_child(lambda: [lock._at_fork_reinit() for lock in list(_locks)])


def new_lock(kind: Callable[[], Any] = threading.Lock) -> Any:
    """Return a lock, or what else of ``threading`` the kind is, that is free in a forked child whoever held it."""
    made = kind()
    _locks.add(made)
    return made


class cached_property(functools.cached_property[T]):
    """Python's, without the lock of Python 3.11: all objects of a class share that, and a forked child may miss it."""

    def __init__(self, function: Callable[[Any], T]) -> None:
        super().__init__(function)
        self.lock = contextlib.nullcontext()
