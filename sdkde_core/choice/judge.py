"""Whether a plugin can answer the passes of an estimate, and what that would cost."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ..engine.outliers import CLEAR, SPLIT_SHARE, limit_of, within_limit
from ..protocol import BackendInfo, Problem
from . import cost, registry
from .cards import PLAIN, Processor
from .hardware import processor
from .registry import as_support, ask

#: ``share(step, limit)``: the share of a pass's pairs that have a point farther than ``limit`` from the origin.
Share = Callable[[int, float], float]


@dataclass(frozen=True)
class Candidate:
    """A plugin on a device, as it stands for the problems at hand."""

    name: str
    device: str
    ok: bool  # it can answer
    reason: str  # why, or why not
    seconds: float | None = None  # predicted, of all passes and of transfers; None where not known
    startup_seconds: float = 0.0  # starting and compiling, as if nothing were imported or compiled yet
    counted_seconds: float = 0.0  # the part of it that is added to ``seconds`` when ranking; see start_up
    pass_seconds: tuple[float, ...] = ()  # predicted, of each pass, where known
    chosen: bool = False

    @property
    def total_seconds(self) -> float:
        """Predicted time with what counts of start-up; inf where not known."""
        return math.inf if self.seconds is None else self.seconds + self.counted_seconds


class StartUp(NamedTuple):
    """Seconds before a backend's first result, and the part of them that counts for one call."""

    whole: float
    counted: float


def calls_of(calls: int | None, data_device: str) -> int:
    """Return the number of calls that start-up is spread over: ``calls``, else by the data's device."""
    if calls is not None:
        return calls
    return 10 if data_device == "cpu" and not has_context("cuda") else 10_000


def start_up(info: BackendInfo, problems: Sequence[Problem], calls: int) -> StartUp:
    """Return what a backend's start costs: the declared seconds, and compiling; a call counts one ``calls``-th of it.

    docs/backends.md says what is left out. No other import or compilation matters, so that the choice does not depend
    on earlier calls.
    """
    device, compiling = problems[0].device, compile_seconds(info, problems)
    compiled = registry.warm.get((info.name, device))
    left = 0.0 if compiled else compiling
    if compiled is None and not has_context(device):
        left += info.startup_seconds
    return StartUp(info.startup_seconds + compiling, left / calls)


def has_context(device: str) -> bool:
    """Whether a device is a GPU and PyTorch has made its context, which is most of a backend's start."""
    torch = sys.modules.get("torch")
    return device.startswith("cuda") and torch is not None and bool(torch.cuda.is_initialized())


def compile_seconds(info: BackendInfo, problems: Sequence[Problem]) -> float:
    """Return what a backend says that compiling for the problems takes; inf where that is no number of seconds."""
    seconds, failure = ask(lambda: sum(float(info.compile_seconds(p)) for p in dict.fromkeys(problems)))
    return seconds if not failure and seconds >= 0.0 else math.inf  # not NaN


def judge(
    info: BackendInfo, problems: Sequence[Problem], data_device: str, share: Share | None, startup: StartUp | None
) -> Candidate:
    """Return what becomes of a plugin for the passes of one estimate, on their device; without ``startup`` no price."""
    device, priced = problems[0].device, startup is not None
    startup = startup or StartUp(info.startup_seconds, 0.0)
    on = processor(device) if priced else None
    rates = on or (PLAIN if priced else None)  # a device with unknown rates is priced as a plain GPU
    beyond = False  # whether points lie beyond the backend's limit, summed apart or not
    answers: list[tuple[str, str]] = []  # reductions, and reasons
    passes: list[float | None] = []
    apart: list[tuple[float, float]] = []  # shares of the pairs, and the limits beyond which they are
    for step, problem in enumerate(problems):
        answer, failure = ask(_pass, info, problem, step, share, rates)
        if failure:
            answer = f"broken: its BackendInfo fails on this problem: {failure}"
        if isinstance(answer, str):
            return Candidate(info.name, device, False, answer, None, *startup)
        asked, far, reason, seconds = answer
        answers.append((problem.reduction, reason))
        passes.append(seconds)
        if asked is not problem and far:
            apart.append((far, asked.extent))
        beyond = beyond or far > 0.0 or asked is not problem  # by the extent, which is rounded up
    differ = len({text for _, text in answers}) > 1
    notes = [f"{reduction}: {text}" if differ else text for reduction, text in answers]
    if apart:
        share_apart, limit = max(apart)
        notes.append(f"points beyond {limit:.3g} bandwidths summed apart, {share_apart:.2g} of the pairs")
    if priced and on is None:
        notes.append(f"no {device} found whose rates are known: priced as if it were a plain GPU")
    if (compiled := registry.warm.get((info.name, device))) is not None:
        notes.append("warmed up: " + ("start-up does not count" if compiled else "of start-up only compiling counts"))
    reason = "; ".join(dict.fromkeys(notes))
    known = tuple(p for p in passes if p is not None)
    if rates is None or len(known) < len(passes):
        return Candidate(info.name, device, True, reason, None, *startup)
    total = sum(known)
    if device != data_device:  # the points travel to the device, and the result travels back
        first, last = problems[0], problems[-1]
        total += 8.0 * (first.n * (first.d + 1) + last.m * (last.d + 1)) / rates.transfer
    if "cuda" in (data_device.partition(":")[0], device.partition(":")[0]):
        # Whether an estimate takes few launches: see sdkde_core.estimator.straight.
        line = "line" in info.features and device.startswith("cuda")
        straight = line and not beyond and all(p.extent <= CLEAR for p in problems)
        aside = len(problems) + 2 * len(apart) if line and not straight else 0
        total += host_seconds(straight and device == data_device, beyond, aside)
    return Candidate(info.name, device, True, reason, total, *startup, known)


def _pass(
    info: BackendInfo, problem: Problem, step: int, share: Share | None, rates: Processor | None
) -> str | tuple[Problem, float, str, float | None]:
    """Why the backend cannot run a pass; or the problem that it gets, the share of far pairs, its reason and time."""
    if problem.precision not in info.precisions:
        return f"has precisions {', '.join(info.precisions)}, not {problem.precision}"
    if lacking := sorted(problem.requires - info.features):
        return f"lacks {', '.join(lacking)}"
    limit = limit_of(info, problem)
    far = 0.0 if problem.extent <= limit else 1.0 if share is None else share(step, limit)
    asked = problem if share is None else within_limit(info, problem, far)
    support = as_support(info.supports(asked))
    if not support.ok:
        return support.reason
    if asked is not problem and far > SPLIT_SHARE:  # it has no formula of its own for them
        lacks = as_support(info.supports(problem)).reason
        return f"{lacks}; {far:.0%} of the pairs have a point beyond {asked.extent:.3g}"
    seconds, failure = ask(_seconds, info, problem, asked, far, rates) if rates is not None else (None, "")
    if failure:
        return f"broken: its work fails on this problem: {failure}"
    if seconds is not None and not seconds >= 0.0:
        return f"broken: its work gives {seconds} seconds for this problem"
    return asked, far, support.reason, seconds


def _seconds(info: BackendInfo, problem: Problem, asked: Problem, far: float, on: Processor) -> float | None:
    """Predicted time where the backend sums ``asked``, and it or Exact sums a share ``far`` of the pairs apart.

    Near rows over far columns are a call of their own. So are far rows, over all columns, packed for their extent.
    """
    near = cost.predict(info, asked, on)
    if near is None or asked is problem:
        return near
    beyond = cost.predict(info, problem, on) if info.supports(problem).ok else None
    begun = cost.predict(info, replace(asked, m=1, n=1), on) or 0.0
    packed = begun if beyond is None else cost.predict(info, replace(problem, m=1), on) or 0.0
    if beyond is None:
        beyond = cost.work_seconds(cost.exact_work(problem), on)
    return (1.0 - far) * near + far * beyond + (begun + packed) * (far > 0.0)


def host_seconds(straight: bool, beyond: bool, aside: int) -> float:
    """Return what an estimate on a GPU takes besides its passes, which is the host's time.

    0.5 ms are validation, whitening and some twenty small kernels (on the straight line a tenth), 1.0 ms some thirty
    more that find points ``beyond`` a backend's limit, 0.55 ms each call, ``aside`` of the line, of a backend that has
    it: fitted to calls on two hosts (python -m benchmarks.choice.overheads).
    """
    return 0.06e-3 if straight else 0.5e-3 + 1.0e-3 * beyond + 0.55e-3 * aside
