"""Threads of a CPU: how many a call may use, and tasks shared out over them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

__all__ = ["check_threads", "map_threads"]

A = TypeVar("A")
R = TypeVar("R")


def check_threads(threads: Any) -> int | None:
    """Return the option ``threads`` of a backend; ValueError for what is neither None nor a positive integer."""
    if threads is None:
        return None
    if isinstance(threads, bool) or operator.index(threads) < 1:
        raise ValueError(f"threads is {threads!r}; pass a positive integer")
    return operator.index(threads)


def map_threads(task: Callable[[A], R], arguments: Sequence[A], threads: int) -> list[R]:
    """Return ``[task(a) for a in arguments]``, computed by up to ``threads`` threads that end with the call."""
    if threads == 1 or len(arguments) <= 1:
        return [task(a) for a in arguments]
    with ThreadPoolExecutor(min(threads, len(arguments)), thread_name_prefix="sdkde") as pool:
        return list(pool.map(task, arguments))
