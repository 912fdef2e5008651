"""What a forked child can use of its parent's: only the thread that forked goes on in it, with whatever others held."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

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


class Unforkable:
    """A library with locks of its own; what another thread locked before a fork stays locked in the child.

    Calls of it stand in ``with``. In such a child that raises RuntimeError, where the call would never return.
    ``name`` is the one that users know. ``keeps_threads``: it shares work out to threads that it started before, which
    no child has once its parent has called it.
    """

    def __init__(self, name: str, *, keeps_threads: bool = False) -> None:
        self.name, self._keeps_threads = name, keeps_threads
        self._inside, self._entered, self._lost = set[int](), False, False
        in_child(self._look)

    def __enter__(self) -> None:
        if self._lost:
            threads = f"or {self.name} itself had threads, which are not here"
            cause = threads if self._keeps_threads else f"was inside {self.name}, whose locks stay locked here"
            raise RuntimeError(
                f"{self.name} cannot be used in this process: it was forked while another thread {cause}; "
                'start processes by the method "spawn" or "forkserver" of multiprocessing'
            )
        self._entered = True
        self._inside.add(threading.get_ident())

    def __exit__(self, *error: object) -> None:
        self._inside.discard(threading.get_ident())

    def _look(self) -> None:
        self._lost |= bool(self._inside - {threading.get_ident()}) or (self._keeps_threads and self._entered)
        self._inside.clear()
