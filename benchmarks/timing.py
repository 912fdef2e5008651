"""What a call takes: medians over calls that get other data than the call before."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from .problems import Data

__all__ = ["clocked", "measured", "seconds_of", "wait"]

#: Calls that are timed, at least and at most; calls of which one reads the clock, which takes milliseconds.
LEAST, MOST, CLOCKED = 3, 300, 32

#: Calls before the first that counts, at most: compilation, tuning and the clock.
WARM_UP = 30


def wait(device: str) -> None:
    """Until a device has done what was asked of it."""
    if device != "cpu":
        import torch

        torch.cuda.synchronize(device)


def clocked(call: Callable[..., Any], data: Data, device: str, clocks: list[int] | None = None) -> tuple[float, Any]:
    """Milliseconds of one call, the host's part included, and what it returned."""
    if device == "cpu":
        start = time.perf_counter()
        result = call(*data)
        return 1e3 * (time.perf_counter() - start), result
    import torch

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    result = call(*data)
    end.record()
    if clocks is not None:
        try:
            clocks.append(torch.cuda.clock_rate())  # MHz of the multiprocessors, still at work
        except Exception:  # no NVML
            clocks.clear()
    end.synchronize()
    return begin.elapsed_time(end), result


def measured(
    call: Callable[..., Any], pool: Sequence[Data], device: str, seconds: float, compiles: bool = True
) -> tuple[dict[str, Any], Any]:
    """Median and spread of about ``seconds`` of calls, and what the last, of ``pool[0]``, returned.

    A call that alone takes several times as long is timed once: a peer may take minutes. It is the first where nothing
    is compiled.
    """
    begun = time.process_time()
    last, result = clocked(call, pool[0], device)
    if not compiles and 1e-3 * last > 5 * seconds:
        return once(last, begun, device), result
    # By the shortest so far: what compiles for one data set or another should not end this.
    # The first data come twice, so that one call compiles nothing.
    shortest, k, recent = last, 1, [last]
    while k < WARM_UP and (k < 2 or 1e-3 * shortest * k < seconds):
        last, _ = clocked(call, pool[(k - 1) % len(pool)], device)
        shortest, k, recent = min(shortest, last), k + 1, [*recent[-8:], last]
    if 1e-3 * shortest > 3 * seconds:
        begun = time.process_time()
        last, result = clocked(call, pool[0], device)
        return once(last, begun, device), result
    count = int(max(LEAST, min(MOST, 1e3 * seconds / max(statistics.median(recent), 1e-3))))
    count += -(count - 1) % len(pool)  # the last call gets pool[0], and the one before other data
    times: list[float] = []
    clocks: list[int] = []
    before = time.process_time()
    for k in range(count):
        ms, result = clocked(call, pool[k % len(pool)], device, clocks if k % CLOCKED == 0 else None)
        times.append(ms)
    found = spread(times)
    if device == "cpu":  # neighbours take the cores: processor time is what the work took
        found["cpu_ms"] = 1e3 * (time.process_time() - before) / count
    elif clocks:
        found["mhz"] = statistics.median(clocks)
    return found, result


def once(ms: float, begun: float, device: str) -> dict[str, Any]:
    """What is known of a single call that began at a process time."""
    return spread([ms]) | ({"cpu_ms": 1e3 * (time.process_time() - begun)} if device == "cpu" else {})


def spread(times: Sequence[float]) -> dict[str, Any]:
    """Median, the quantiles at 20 and 80 %, and how many."""
    ordered = sorted(times)
    at = [ordered[round(q * (len(ordered) - 1))] for q in (0.2, 0.8)]
    return {"ms": statistics.median(ordered), "ms_low": at[0], "ms_high": at[1], "calls": len(ordered)}


def seconds_of(work: Callable[[], Any], device: str) -> tuple[float, Any]:
    """Seconds of one piece of work, the device waited for before and after, and what it returned."""
    wait(device)
    start = time.perf_counter()
    result = work()
    wait(device)
    return time.perf_counter() - start, result
