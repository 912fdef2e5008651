"""Checks of what a call costs: memory while it runs, what it leaves behind, and time beside its price."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from sdkde_core.choice import cost, hardware
from sdkde_core.protocol import BackendInfo, Problem, Reduction

from . import problems
from .problems import Case
from .target import NotDeclared, Profile, Target, make, threads_set

__all__ = ["MANY", "leaks", "memory", "memory_parameters", "price"]

#: Pairs of a profile from which on a backend is taken for one that is not simulated.
MANY = 400_000


def memory_parameters(info: BackendInfo, profile: Profile) -> Iterator[str]:
    """The first precision declared, in the first dimension and another. Not where a backend is slow."""
    if profile.pairs >= MANY:
        first, *_, other = profile.dimensions[:3] if len(profile.dimensions) > 1 else profile.dimensions * 2
        yield f"{info.precisions[0]}-{Reduction.LOG_SUM}-d{first}-x1"
        for reduction in (Reduction.MEAN, Reduction.LAPLACE):
            yield f"{info.precisions[0]}-{reduction}-d{other}-x{other}"


def memory(target: Target, parameter: str) -> None:
    """No array of all pairs is ever there, nor one of all their differences: a few tiles take a few hundred MiB.

    Such an array takes 512 MiB in float32. A call may take 400 beside what it returns: PyTorch's backend takes 256.
    On a GPU, whose programs cut the work less finely, both are four times as many.
    """
    precision, name, *numbers = parameter.split("-")
    d, each = (int(x[1:]) for x in numbers)
    times = 4 if target.device.startswith("cuda") else 1
    n = m = math.isqrt((times << 27) // each) + 1

    def call(share: int) -> int:
        case = problems.make("mixture", n // share, m // share, d, 6.0)
        problem = target.whole_problem(case, Reduction(name), precision)
        columns, queries = target.columns(case), target.give(case.queries)
        return _peak(target, lambda: target.backend.reduce(problem, queries, target.backend.prepare(problem, columns)))

    call(64)  # compiles, and loads what is needed
    peak = call(1)
    assert peak <= times * (400 << 20), f"{m} rows over {n} columns in {d} dimensions take {peak >> 20} MiB at once"


def _peak(target: Target, call: Callable[[], object]) -> int:
    """Return the bytes by which memory grew while a call ran, at most."""
    if target.device.startswith("cuda") and "torch" in sys.modules:
        cuda = sys.modules["torch"].cuda
        cuda.reset_peak_memory_stats()
        before = cuda.memory_allocated()
        call()
        return int(cuda.max_memory_allocated() - before)
    try:  # forget the peak so far
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        raise NotDeclared("for Linux, where a process can reset the peak of its memory") from None
    before = _status("VmRSS")
    call()
    return _status("VmHWM") - before


def _status(name: str) -> int:
    """Return bytes of a line of the process's status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) << 10


def leaks(target: Target, parameter: str) -> None:
    """Nothing of a call is left behind: no memory, no threads, no open files.

    Sixteen calls lie between two looks: a number kept of each row is 12 MiB. Six looks in turn must find more, since
    what is left behind grows every time, and a heap until it suffices.
    """
    if not sys.platform.startswith("linux") or target.device != "cpu":
        raise NotDeclared("for CPUs, on Linux, which lists what a process has")
    many, few = (make("mixture", n, m, 2, 6.0) for n, m in ((100_000, 2), (2, 100_000)))

    def left_by(calls: int) -> dict[str, int]:
        for case in (many, few) * calls:
            problem = target.whole_problem(case, Reduction.MEAN, target.info.precisions[0])
            target.backend.reduce(problem, target.give(case.queries), target.prepare(problem, case))
        return _left()

    allowed = {"bytes": 8 << 20, "threads": 8, "open files": 8}
    with threads_set(1):  # each has a heap of its own
        before = left_by(3)
        for _ in range(6):
            after = left_by(16)
            more = {name: after[name] - before[name] for name in allowed}
            grown = [f"{more[name]} {name}" for name in allowed if more[name] >= allowed[name]]
            if not grown:
                return
            before = after
    raise AssertionError(f"32 calls have left {' and '.join(grown)}, and so 6 times")


def _left() -> dict[str, int]:
    """Return what there is once what nobody refers to is gone."""
    gc.collect()
    with contextlib.suppress(AttributeError):  # another C library than GNU's
        ctypes.CDLL(None).malloc_trim(0)
    tasks, files = (len(os.listdir(f"/proc/self/{name}")) for name in ("task", "fd"))
    return {"bytes": _status("VmRSS"), "threads": max(tasks, threading.active_count()), "open files": files}


def price(target: Target, parameter: str) -> None:
    """What ``work`` says is near the time taken: whoever is priced too low is chosen where it is slow.

    Load makes neither the wall's clock nor the processors' run less, and the lesser of the two is compared.
    """
    if target.info.work is None or target.device != "cpu":
        raise NotDeclared("for CPUs, of backends with a price")
    case = make("mixture", 3000, 3000, int(parameter[1:]), 8.0)
    for reduction in Reduction:
        problem = target.whole_problem(case, reduction, target.info.precisions[0])
        with threads_set(1):  # whose time is the same beside a load
            said, taken = cost.predict(target.info, problem, hardware.cpu()), _seconds(target, problem, case)
        if said is not None:
            assert taken / 12.0 <= said <= 12.0 * taken, (
                f"work says {said:.2g} s of {reduction.name} of {problem.m} rows and {problem.n} columns in "
                f"{problem.d} dimensions, which takes {taken:.2g} s: more than 12 times off"
            )


def _seconds(target: Target, problem: Problem, case: Case) -> float:
    columns, queries = target.columns(case), target.give(case.queries)
    found = []
    for _ in range(4):  # the first one compiles
        wall, process = time.perf_counter(), time.process_time()
        target.backend.reduce(problem, queries, target.backend.prepare(problem, columns))
        found.append(min(time.perf_counter() - wall, time.process_time() - process))
    return min(found)
