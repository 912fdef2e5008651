"""What runs on Dask's workers: the planner's steps as functions of blocks. Between them there are host arrays.

A task takes one thread, as Dask means it, unless ``SDKDE_NUM_THREADS`` says otherwise: Dask runs as many tasks at a time
as a worker has threads.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..arrays import quiet, to_host
from ..choice.hardware import one_thread
from ..estimator.request import Request
from ..protocol import Columns, Partial
from .planner import Frozen, Shape, freeze
from .survey import Question, Reach

__all__ = [
    "Survey",
    "after",
    "answer",
    "columns",
    "density",
    "folded",
    "moved",
    "moved_columns",
    "partial",
    "rows_of",
    "score",
    "unwhitened",
    "whitened",
]

Array = NDArray[Any]
P = ParamSpec("P")
R = TypeVar("R")


def task(function: Callable[P, R]) -> Callable[P, R]:
    """Mark what runs on a worker: in one thread, whatever NumPy's error state is there."""

    @functools.wraps(function)
    def work(*args: P.args, **kwargs: P.kwargs) -> R:
        with one_thread():
            return function(*args, **kwargs)

    return quiet(work)


@dataclass(frozen=True)
class Survey:
    """How far the planner's questions have come.

    A generator does not travel, so it is asked anew with the answers so far.
    """

    request: Request
    shape: Shape
    answers: tuple[Any, ...] = ()
    question: Question | None = None
    frozen: Frozen | None = None

    @classmethod
    def begun(cls, request: Request, shape: Shape) -> Survey:
        """Return the first question; raises what can be said without data."""
        return cls(request, shape)._asked()

    def after(self, answer: Any) -> Survey:
        """Return the next question, or what is frozen."""
        return replace(self, answers=(*self.answers, answer))._asked()

    def _asked(self) -> Survey:
        questions, frozen = freeze(self.request, self.shape), None
        try:
            question = next(questions)
            for answer in self.answers:
                question = questions.send(answer)
        except StopIteration as end:
            question, frozen = None, end.value
        found = replace(self, question=question, frozen=frozen)
        if isinstance(question, Reach) and isinstance(self.request.bandwidth, str):
            # It is chosen by now, and choosing takes longer than all else here.
            chosen = replace(self.request, bandwidth=question.bandwidth)
            found = replace(found, request=chosen, answers=self.answers[:1])
        return found


@task
def answer(survey: Survey, points: Any, weights: Any = None, *, about: str, start: int) -> Any:
    """Put the question to a block; None where it is not about that, or none is left."""
    question = survey.question
    if question is None or question.about != about:
        return None
    return question.of(to_host(points), None if weights is None else to_host(weights), start)


@task
def after(survey: Survey, answers: list[Any], *, last: bool) -> Survey | Frozen:
    """Merge the answers of all blocks, and go on to the next question; at last return what is frozen."""
    if answers[0] is not None:
        assert survey.question is not None
        survey = survey.after(functools.reduce(survey.question.merge, answers))
    if not last:
        return survey
    if survey.frozen is None:
        raise RuntimeError(f"the planner asks more than was foreseen: {survey.question}")
    return survey.frozen


@task
def columns(frozen: Frozen, points: Any, weights: Any = None) -> Columns:
    return frozen.columns(to_host(points), None if weights is None else to_host(weights))


@task
def moved_columns(shard: Columns, blocks: list[Array]) -> Columns:
    """Return a shard of moved samples."""
    return replace(shard, points=np.concatenate(blocks))


@task
def rows_of(shard: Columns, *, start: int, stop: int) -> Array:
    return shard.points[start:stop]


@task
def whitened(frozen: Frozen, points: Any) -> Array:
    return frozen.whitened(to_host(points))


@task
def partial(frozen: Frozen, shard: Columns, rows: Array, *, step: int) -> Partial:
    return frozen.partial(step, shard, rows)


@task
def folded(frozen: Frozen, parts: list[Partial]) -> Partial:
    return functools.reduce(frozen.fold, parts)


@task
def moved(frozen: Frozen, rows: Array, sums: Partial) -> Array:
    return frozen.moved(rows, sums)


@task
def unwhitened(frozen: Frozen, points: Array) -> Array:
    return frozen.unwhitened(points)


@task
def density(frozen: Frozen, sums: Partial, *, log: bool) -> Array:
    return frozen.density(sums, log, lambda *_: None)


@task
def score(frozen: Frozen, sums: Partial) -> Array:
    return frozen.bandwidth.pull_back(sums.shift).astype(frozen.shape.dtype)
