"""Blocks of points, read from wherever they are, and questions put to all of them."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, TypeVar

from .planner import cut, width_of_a_shard
from .survey import Question

__all__ = ["answered", "asked_of"]

R = TypeVar("R")

#: ``read(start, stop)`` returns some rows.
Read = Callable[[int, int], Any]


def answered(questions: Generator[Question, Any, R], ask: Callable[[Question], Any]) -> R:
    """Return what a generator of questions comes to; ``ask(question)`` returns the merged answer of all blocks."""
    answer = None
    while True:
        try:
            question = questions.send(answer)
        except StopIteration as end:
            return end.value
        answer = ask(question)


def asked_of(question: Question, read: Read, weights: Read | None, length: int, d: int) -> Any:
    """Put a question to all blocks of points, here, one after another."""
    merged = None
    for k, (start, stop) in enumerate(cut(length, width_of_a_shard(length, d))):
        answer = question.of(read(start, stop), None if weights is None else weights(start, stop), start)
        merged = answer if k == 0 else question.merge(merged, answer)
    return merged
