"""Whether a plugin can answer the passes of an estimate, and what that would cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ..engine.outliers import SPLIT_SHARE, limit_of, within_limit
from ..protocol import BackendInfo, Problem, Support
from . import cost, registry
from .calibration import calibration_of, machine_of
from .cards import PLAIN
from .hardware import Processor, gpu_name, processor

__all__ = [
    "Candidate",
    "Share",
    "StartUp",
    "as_support",
    "ask",
    "calls_of",
    "judge",
    "machine",
    "only_enqueues",
    "start_up",
]

#: ``share(step, limit)``: the share of a pass's pairs that have a point farther than ``limit`` from the origin.
Share = Callable[[int, float], float]

#: Calls that a process makes, over which start-up is spread: with data on the host, and with data on a device, which
#: are in loops. The command line makes one.
CALLS, DEVICE_CALLS = 10, 10_000

#: Seconds that an estimate on a GPU takes besides its passes, ordinarily and replayed, and what share of its
#: time a launch still takes in a replay. Ordinarily it is the host's time for validation, whitening and some twenty
#: small kernels; replayed, a copy each way and the same kernels as a graph. Measured on an H200 and its host with
#: python -m benchmarks.choice.overheads: 0.48 to 0.69 ms, 0.09, and 4 to 8 %.
CALL_SECONDS, REPLAY_SECONDS, REPLAYED_LAUNCH = 0.5e-3, 0.09e-3, 0.06

#: What it takes more, likewise, where points are summed apart: to find them, to sort rows and columns and to put sums
#: together are some thirty kernels, and the host waits for some numbers. 0.4 to 1.4 ms there, and 0.15 to 0.5.
APART_SECONDS, APART_REPLAY_SECONDS = 1.0e-3, 0.25e-3


@dataclass(frozen=True)
class Candidate:
    """A plugin on a device, as it stands for the problems at hand.

    Parameters
    ----------
    name, device : str
    ok : bool
        It can answer.
    reason : str
        Why, or why not.
    seconds : float or None
        Predicted time of all passes and of transfers; None where not known.
    pass_seconds : tuple of float
        Predicted time of each pass, where known.
    startup_seconds : float
        Starting and compiling, as if nothing were imported or compiled yet.
    counted_seconds : float
        What of that is added to ``seconds`` when ranking; see :func:`start_up`.
    chosen : bool
    plain_seconds : float or None
        Where nobody knows the device's rates: what ``seconds`` would be on a plain GPU. No prediction: it ranks those
        whose ``seconds`` are None.
    """

    name: str
    device: str
    ok: bool
    reason: str
    seconds: float | None = None
    startup_seconds: float = 0.0
    counted_seconds: float = 0.0
    pass_seconds: tuple[float, ...] = ()
    chosen: bool = False
    plain_seconds: float | None = None

    @property
    def total_seconds(self) -> float:
        """Predicted time with what counts of start-up; inf where not known."""
        return math.inf if self.seconds is None else self.seconds + self.counted_seconds


class StartUp(NamedTuple):
    """Seconds before a backend's first result, and what of them counts for one call."""

    whole: float
    counted: float


def calls_of(calls: int | None, data_device: str) -> int:
    """Over how many calls start-up is spread: as many as the caller says, else by where the data are."""
    if calls is not None:
        return calls
    return CALLS if data_device == "cpu" else DEVICE_CALLS


def machine(device: str) -> str | None:
    """Return the name by which measurements on a device are kept; None where it is not here.

    A card's own, so that CUDA is not asked for the rates of an unlisted one.
    """
    name = gpu_name(device)
    if name is None and (on := processor(device)) is not None:
        name = machine_of(on)
    return name


def start_up(info: BackendInfo, problems: Sequence[Problem], calls: int, on: str | None = None) -> StartUp:
    """Return what a backend's start costs: as measured on this machine, else as declared, and compiling.

    One of ``calls`` calls counts so much less of it, and nothing of what :func:`sdkde_core.warm_up` has done. Nothing
    else that is imported or compiled already matters, so that the choice does not depend on the calls before. Infinite
    where the plugin gives no number of seconds for compiling. ``on``: :func:`machine` of their device, where the caller
    has it.
    """
    device = problems[0].device
    on = on or machine(device)
    measured = calibration_of(info.name, on).startup if on is not None else None
    compiling = compile_seconds(info, problems)
    starting = info.startup_seconds if measured is None else measured
    compiled = registry.warm.get((info.name, device))
    left = starting + compiling if compiled is None else 0.0 if compiled else compiling
    return StartUp(starting + compiling, left / calls)


def compile_seconds(info: BackendInfo, problems: Sequence[Problem]) -> float:
    """Return what a backend says that compiling for the problems takes; inf where that is no number of seconds."""
    if info.compile_seconds is BackendInfo.compile_seconds:  # the default: compiles nothing
        return 0.0
    seconds, failure = ask(lambda: sum(float(info.compile_seconds(p)) for p in dict.fromkeys(problems)))
    return seconds if not failure and seconds >= 0.0 else math.inf  # not NaN


def only_enqueues(info: BackendInfo, device: str) -> bool:
    """Whether a backend's passes only enqueue work on a CUDA stream, so that they can be recorded."""
    return info.capturable and info.arrays == "torch" and device.startswith("cuda")


def judge(
    info: BackendInfo,
    problems: Sequence[Problem],
    data_device: str,
    share: Share | None,
    startup: StartUp | None,
    replays: bool = False,
) -> Candidate:
    """Return what becomes of a plugin for the passes of one estimate.

    Parameters
    ----------
    info : BackendInfo
    problems : sequence of Problem
        The passes, on the device in question.
    data_device, share, replays
        As for :func:`sdkde_core.choice.select.rank`.
    startup : StartUp or None
        None: the price does not matter, and is not asked for.
    """
    device, priced = problems[0].device, startup is not None
    startup = startup or StartUp(info.startup_seconds, 0.0)
    on = processor(device) if priced else None
    measured = calibration_of(info.name, on) or None if on is not None else None
    rates = on or (PLAIN if priced else None)
    replayed = replays and device == data_device and only_enqueues(info, device)
    if replayed and rates is not None:  # most of a launch, and what a pass takes besides, is the host's
        rates = replace(rates, launch_seconds=REPLAYED_LAUNCH * rates.launch_seconds)
        measured = None if measured is None else replace(measured, overhead=0.0)

    def no(reason: str) -> Candidate:
        return Candidate(info.name, device, False, reason, None, *startup)

    reasons: list[tuple[str, str]] = []
    passes: list[float | None] = []
    transfer = transfer_seconds(problems, data_device, rates)
    apart: list[tuple[float, float]] = []  # shares of the pairs, and the limits beyond which they are
    for step, problem in enumerate(problems):
        if problem.precision not in info.precisions:
            return no(f"has precisions {', '.join(info.precisions)}, not {problem.precision}")
        lacking = sorted(problem.requires - info.features)
        if lacking:
            return no(f"lacks {', '.join(lacking)}")
        answer, failure = ask(_supports, info, problem, step, share)
        if failure:
            return no(f"broken: its BackendInfo fails on this problem: {failure}")
        asked, far, support = answer
        if not support.ok:
            return no(support.reason)
        if asked is not problem and far > SPLIT_SHARE:  # it has no formula of its own for them
            lacks = as_support(info.supports(problem)).reason
            return no(f"{lacks}; {far:.0%} of the pairs have a point beyond {asked.extent:.3g}")
        reasons.append((problem.reduction, support.reason))
        if asked is not problem and far:
            apart.append((far, asked.extent))
        if not priced:
            passes.append(None)
            continue
        predicted, failure = ask(_seconds, info, problem, asked, far, rates)
        if failure:
            return no(f"broken: its work fails on this problem: {failure}")
        if predicted is not None and not predicted >= 0.0:
            return no(f"broken: its work gives {predicted} seconds for this problem")
        passes.append(measured.seconds(problem, predicted) if measured and predicted is not None else predicted)
    known = tuple(p for p in passes if p is not None)
    differ = len({text for _, text in reasons}) > 1
    notes = [f"{reduction}: {text}" if differ else text for reduction, text in reasons]
    if apart:
        share_apart, limit = max(apart)
        notes.append(f"points beyond {limit:.3g} bandwidths summed apart, {share_apart:.2g} of the pairs")
    if measured:
        notes.append("priced as measured on this machine")
    if replayed:
        notes.append("priced as replayed")
    if priced and on is None:
        notes.append(f"no {device} found whose rates are known: ranked as if it were a plain GPU")
    compiled = registry.warm.get((info.name, device))
    if compiled is not None:
        notes.append("warmed up: " + ("start-up does not count" if compiled else "of start-up only compiling counts"))
    reason = "; ".join(dict.fromkeys(notes))
    if transfer is None or len(known) < len(passes):
        return Candidate(info.name, device, True, reason, None, *startup)
    on_gpu = "cuda" in (data_device.partition(":")[0], device.partition(":")[0])
    host = REPLAY_SECONDS if replayed else CALL_SECONDS
    if apart:
        host += APART_REPLAY_SECONDS if replayed else APART_SECONDS
    total = transfer + host * on_gpu + sum(known)
    if on is None:
        return Candidate(info.name, device, True, reason, None, *startup, plain_seconds=total)
    return Candidate(info.name, device, True, reason, total, *startup, known)


def _supports(info: BackendInfo, problem: Problem, step: int, share: Share | None) -> tuple[Problem, float, Support]:
    """The problem as the backend will see it, the share of the pairs that it will not, and its answer."""
    limit = limit_of(info, problem)
    far = share(step, limit) if share is not None and problem.extent > limit else 1.0
    asked = problem if share is None else within_limit(info, problem, far)
    return asked, far, as_support(info.supports(asked))


def _seconds(info: BackendInfo, problem: Problem, asked: Problem, far: float, on: Processor | None) -> float | None:
    """Predicted time of a problem of which the backend is ``asked`` some and a share of the pairs, ``far``, is apart.

    These are summed by the backend if it can, else exactly. Near rows over far columns and far rows are calls of their
    own, and far rows take all columns, packed for their extent.
    """
    near = cost.predict(info, asked, on)
    if near is None or on is None or asked is problem:
        return near
    beyond = cost.predict(info, problem, on) if info.supports(problem).ok else None
    begun = cost.predict(info, replace(asked, m=1, n=1), on) or 0.0
    packed = begun if beyond is None else cost.predict(info, replace(problem, m=1), on) or 0.0
    if beyond is None:
        beyond = cost.work_seconds(cost.exact_work(problem), on)
    return (1.0 - far) * near + far * beyond + (begun + packed) * (far > 0.0)


def transfer_seconds(problems: Sequence[Problem], data_device: str, on: Processor | None) -> float | None:
    """Time to bring the points to the device and the result back; None where the device is not known."""
    if on is None:
        return None
    first, last = problems[0], problems[-1]
    if first.device == data_device:
        return 0.0
    return 8.0 * (first.n * (first.d + 1) + last.m * (last.d + 1)) / on.transfer


def ask(question: Callable[..., Any], *arguments: Any) -> tuple[Any, str]:
    """Ask a plugin something; return its answer and "", or None and what it did instead.

    A plugin may raise anything, SystemExit included, but must not take the program down; only the user's interrupt
    and memory that does not suffice pass.
    """
    try:
        return question(*arguments), ""
    except (KeyboardInterrupt, MemoryError):
        raise
    except BaseException as error:
        return None, f"{type(error).__name__}: {error}"


def as_support(answer: Any) -> Support:
    """Return a plugin's answer as a Support with a reason, whatever it is."""
    if not isinstance(answer, Support):
        return Support(False, f"broken: it answered {answer!r}, not a Support")
    return answer if answer.reason else answer._replace(reason="no reason given")
