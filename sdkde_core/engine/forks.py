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
