"""What a search asks for and gets: tasks and outcomes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from sdkde_core.protocol import Problem
from sdkde_core.tuning import Query

__all__ = ["FINALS", "MARGIN", "SOURCES", "STATUSES", "Outcome", "Task", "fastest"]

#: Statuses of a candidate: it ran; it cannot be launched; it did not compile, or spills; it took too long; memory ran
#: out; its process died; its results were wrong.
STATUSES = ("ok", "invalid", "compile_error", "timeout", "oom", "crash", "wrong")

#: Where a result comes from.
SOURCES = ("measured", "predicted", "imported")

#: The phase in the outcome of a finalist: it was timed in turns with the other finalists.
FINALS = "finals"

#: The default is kept unless another is faster by more than this fraction: clocks drift by as much.
MARGIN = 0.01


class Task(NamedTuple):
    """One kernel to tune for one problem, whose sizes are powers of two."""

    query: Query
    problem: Problem


@dataclass(frozen=True)
class Outcome:
    """The outcome of trying a candidate.

    Parameters
    ----------
    status : str
        One of :data:`STATUSES`.
    ms : tuple of float
        With ``"ok"``: the 20 %, 50 % and 80 % quantiles of its time in milliseconds; equal if it was predicted.
    error : str
        With any other status: the reason, in one line.
    phases : mapping of str to float
        Seconds spent on the candidate, by phase: ``"compile"``, ``"check"``, ``"time"``, ``"finals"``.
    """

    status: str
    ms: tuple[float, float, float] | None = None
    error: str = ""
    phases: Mapping[str, float] = field(default_factory=dict)

    @property
    def median(self) -> float:
        """Median in milliseconds; inf unless it ran."""
        return self.ms[1] if self.ms else float("inf")


def fastest(outcomes: Mapping[str, Outcome], default: str | None) -> str | None:
    """Return the name of the configuration to use; None if none ran.

    If there are finalists, it is one of them: they were timed in turns, so no lucky time decides. The default is kept
    unless another is faster by more than :data:`MARGIN`.
    """
    ran = {name: outcome for name, outcome in outcomes.items() if outcome.status == "ok"}
    final = {name: outcome for name, outcome in ran.items() if FINALS in outcome.phases} or ran
    best = min(final, key=lambda name: (final[name].median, name), default=None)
    if best is not None and default in final and final[best].median >= (1 - MARGIN) * final[default].median:
        return default
    return best
