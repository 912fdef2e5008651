"""What a tuner learns of a candidate, and who tells it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from typing import Protocol as TypingProtocol

from sdkde_core.protocol import Problem
from sdkde_core.tuning import Config, Query

__all__ = ["FINALS", "MARGIN", "SOURCES", "STATUSES", "Outcome", "Runner", "Task", "fastest"]

#: What can become of a candidate: it ran; its parameters rule it out; it did not compile, or spills; it took too long;
#: memory did not suffice; it killed its process; its answer was wrong.
STATUSES = ("ok", "invalid", "compile_error", "timeout", "oom", "crash", "wrong")

#: Where a row comes from.
SOURCES = ("measured", "predicted", "imported")


#: The phase that a finalist's outcome carries: it was timed in turns with the others.
FINALS = "finals"

#: A gain below this, as a fraction, is no reason to leave the default: it is within what clocks drift.
MARGIN = 0.01


@dataclass(frozen=True)
class Task:
    """One kernel to tune for one problem: the problem as a typical call has it, its sizes powers of two."""

    query: Query
    problem: Problem


@dataclass(frozen=True)
class Outcome:
    """What became of a candidate.

    Parameters
    ----------
    status : str
        One of :data:`STATUSES`.
    ms : tuple of float
        With ``"ok"``: the 20 %, 50 % and 80 % quantiles of its time, in milliseconds; predicted: three times the same.
    error : str
        Otherwise: why, one line.
    phases : mapping of str to float
        Seconds spent on it, by phase: ``"compile"``, ``"check"``, ``"time"``, ``"finals"``.
    """

    status: str
    ms: tuple[float, float, float] | None = None
    error: str = ""
    phases: Mapping[str, float] = field(default_factory=dict)

    @property
    def median(self) -> float:
        """Milliseconds; inf unless it ran."""
        return self.ms[1] if self.ms else float("inf")


def fastest(outcomes: Mapping[str, Outcome], default: str | None) -> str | None:
    """Return which of some configurations is to be used, by name; None if none ran.

    Finalists were timed side by side: a lucky time of another does not beat them. The default is left for what is
    faster by more than :data:`MARGIN`.
    """
    ran = {name: outcome for name, outcome in outcomes.items() if outcome.status == "ok"}
    final = {name: outcome for name, outcome in ran.items() if FINALS in outcome.phases} or ran
    best = min(final, key=lambda name: (final[name].median, name), default=None)
    if best is not None and default in final and final[best].median >= (1 - MARGIN) * final[default].median:
        return default
    return best


class Runner(TypingProtocol):
    """Tries candidates. Never raises for what a candidate does; KeyboardInterrupt passes."""

    #: ``"measured"`` or ``"predicted"``.
    source: str

    def prepare(self, task: Task, configs: Sequence[Config]) -> None:
        """Hear which candidates will probably come next, and compile them side by side; may do nothing."""

    def run(self, task: Task, config: Config, best: float) -> Outcome:
        """Compile, check, then time a candidate; one far behind ``best`` (milliseconds) may be stopped early."""

    def finals(self, task: Task, configs: Sequence[Config]) -> list[Outcome]:
        """Time the finalists again, interleaved, so that drift of the clock hits all alike; in the order given."""

    def provenance(self, task: Task) -> dict[str, Any]:
        """Versions and circumstances that go with its results; see :mod:`sdkde_autotune.provenance`."""

    def close(self) -> None:
        """Stop workers, if there are any."""
