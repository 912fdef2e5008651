"""A run of the tuner: one search after another, within a budget of time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from .problems import Tunable
from .runner import Runner
from .search import Memory, Result, search

__all__ = ["tune"]

_Progress = Callable[[int, int, float], None]


def _hidden(label: str) -> AbstractContextManager[_Progress | None]:
    return nullcontext()


def tune(
    tasks: Sequence[Tunable],
    runner: Runner,
    store: Memory,
    *,
    budget: float | None = None,
    shared: bool = True,
    progress: Callable[[str], AbstractContextManager[_Progress | None]] = _hidden,
    **options: Any,
) -> Iterator[Result]:
    """Search each task's configurations in turn; end early when the budget is spent.

    Parameters
    ----------
    tasks : sequence of Tunable
    runner : Runner
    store : Memory
    budget : float, optional
        Seconds for all.
    shared : bool
        Each search gets its share of the time left, so that all are begun; else each takes the time that it needs.
    progress : callable
        ``progress(label)`` yields the ``progress`` of :func:`sdkde_autotune.search.search`.
    **options
        Passed to each search.

    Yields
    ------
    Result
    """
    start = time.monotonic()
    for i, (task, space) in enumerate(tasks):
        left = None if budget is None else budget - (time.monotonic() - start)
        if left is not None and left <= 0:
            return
        share = left / (len(tasks) - i) if left is not None and shared else left
        label = f"{i + 1}/{len(tasks)} {task.query.kernel} {task.problem.reduction} d={task.problem.d}"
        with progress(label) as advance:
            found = search(task, space, runner, store, budget=share, progress=advance, **options)
        yield found
