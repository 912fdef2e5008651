"""SD-KDE by subjects whose calls take turns: ratios of times that hold on a host with other work too."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import sdkde_core

from .. import compare, timing
from ..problems import pool
from ..registry import REGISTRY, Benchmark, Case, Setting, Skipped
from ..report import COMPARED, Table
from ..subjects import Call, Task, find

#: Whom the others are compared with; rounds of calls, forwards and backwards in turn.
FIRST, ROUNDS = "flash-sd-kde TF32", 8

KIND = "eight"


def names(setting: Setting, d: int) -> list[str]:
    ours = [name for name in compare.ours(setting, d) if not name.startswith(("torch", "keops", "fourier"))]
    return [FIRST, "auto, fast", *ours]


def cases(setting: Setting) -> Iterator[Case]:
    sizes = [(2**k, 16) for k in setting.at((8,), (12,), (15, 11, 12, 13, 14, 16))]
    sizes += [(sizes[0][0], d) for d in setting.at((), (2, 64), (2, 8, 32, 64, 128))]
    for n, d in sizes:
        yield from compare.cases(names(setting, d), ["sdkde"], [(n, n // 8, d)], KIND)


def measure(setting: Setting, case: Case) -> dict[str, Any]:
    """A subject's part of what all take in turn."""
    n, m, d = case["n"], case["m"], case["d"]
    found = _turns(tuple(names(setting, d)), n, m, d, setting.device, setting.seconds)[case["subject"]]
    if isinstance(found, Exception):
        raise found
    return found


@functools.lru_cache(maxsize=1)  # the cases of a size come one after another
def _turns(subjects: tuple[str, ...], n: int, m: int, d: int, device: str, seconds: float) -> dict[str, Any]:
    """What was measured of every subject, or why not."""
    found: dict[str, Any] = {}
    calls: dict[str, tuple[Call, Task, Any]] = {}
    for name in subjects:
        subject = find(name)
        try:
            subject.check("sdkde", n * (m + n), d, device)
            drawn = pool(KIND, n, m, d, subject.dtype, device, 3)
            # One bandwidth, as a user's.
            drawn = tuple(data._replace(h=drawn[0].h) for data in drawn)
            task = Task("sdkde", drawn[0], device)
            calls[name] = subject.make(task), task, drawn
            timing.measured(calls[name][0].whole, drawn, device, seconds / 4, subject.compiles)  # compiles and records
        except Exception as error:  # what one cannot do is no failure of the others
            calls.pop(name, None)
            found[name] = Skipped(str(error)) if isinstance(error, sdkde_core.BackendUnavailable) else error
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(ROUNDS):
        for name in list(calls)[:: 1 if turn % 2 else -1]:
            call, _, drawn = calls[name]
            last = min(timing.clocked(call.whole, data, device)[0] for data in drawn)  # after another's, not counted
            for k in range(int(max(1, min(60, 1e3 * seconds / ROUNDS / max(last, 1e-3))))):
                times[name].append(timing.clocked(call.whole, drawn[k % len(drawn)], device)[0])
    kind = device.partition(":")[0]
    for name, (call, task, drawn) in calls.items():
        raw = call.whole(*drawn[0])
        errors = compare.errors(call, raw, (KIND, n, m, d), task, n >= compare.LARGE[kind], kind)
        found[name] = timing.spread(times[name]) | {"h": drawn[0].h} | errors
        if FIRST in calls:
            found[name]["over"] = found[name]["ms"] / found[FIRST]["ms"]
    return found


REGISTRY.add(
    Benchmark(
        "in-turn",
        "readers",
        "SD-KDE with calls of sdkde and of flash-sd-kde in turn, 2k to 64k samples, 2 to 128 dimensions.",
        cases,
        measure,
        (
            Table(
                "Milliseconds, worst row, and the time over that of flash-sd-kde with TF32",
                ("d", "n", "subject"),
                {"ratio": "over"} | COMPARED,
            ),
        ),
        gpu=True,
    )
)
