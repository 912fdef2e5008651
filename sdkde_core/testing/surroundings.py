"""Checks of a call's surroundings: settings, output, memory, numbers of threads, what is left behind, and time."""

from __future__ import annotations

import ctypes
import gc
import itertools
import logging
import math
import os
import pickle
import random
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from threadpoolctl import threadpool_info, threadpool_limits

from sdkde_core.choice import cost, hardware
from sdkde_core.protocol import Columns, Problem, Reduction

from . import problems
from .accuracy import about_tiles
from .problems import Case
from .target import NotDeclared, Target, make, weighted


def surroundings(target: Target, name: str) -> None:
    """A call warns of nothing, prints nothing, and leaves the process's random states and settings as they were.

    The backend is asked by way of the core, and itself, as NumPy's error state is by default: the core ignores what
    NumPy warns of in the calling thread, but not in others. Settings are moved first: what an earlier call has set
    would otherwise count as found.
    """
    reduction, small = Reduction(name), make("mixture", 50, 20, 3, 5.0)
    target.answer(target.problem(small, reduction, target.info.precisions[0]), small)  # libraries are loaded then
    # Cases in which logarithms of zero and differences of infinities come up, and one of many columns.
    far = problems.far(97, 13, 3, 1e12, stray=True)
    asked: list[tuple[Case, dict[str, Any]]] = [(about_tiles(1500, 70, 3, 10.0), {}), (far, {}), (weighted(far), {})]
    asked += [(make("tails", 211, 67, 3, 1e4), {}), (make("outlier", 211, 67, 3, 10.0), {"same": True})]
    asked += [(make("weights", 211, 67, 3, 10.0), {})]
    asked += [(make(kind, n, 1, 3, 10.0), {"same": True}) for kind, n in (("mixture", 1), ("outlier", 31))]
    if reduction is Reduction.LOG_SUM:
        asked.append((far, {"requires": {"kernel"}, "kernel": "epanechnikov"}))
    with _moved_settings():
        before = _settings()
        with warnings.catch_warnings(record=True) as warned, _output() as output:
            warnings.simplefilter("always")
            filters = list(warnings.filters)
            for (case, options), precision in itertools.product(asked, target.info.precisions):
                with suppress(NotDeclared):
                    problem = target.problem(case, reduction, precision, **options)
                    target.answer(problem, case)
                    if np.isfinite(case.log_weights).all() and target.info.supports(problem).ok:
                        target.direct(problem, case)
            changed = ["the filters of warnings"] * (list(warnings.filters) != filters)
        after = _settings()
    hidden = DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning  # developers alone see these
    shown = [w for w in warned if not issubclass(w.category, hidden)]
    assert not shown, f"a call warns: {shown[0].category.__name__}: {shown[0].message}"
    assert not output, f"a call prints: {output[0][:200]!r}"
    changed += [name for name, value in before.items() if after[name] != value]
    assert not changed, f"a call changes {', '.join(changed)}"


@contextmanager
def _moved_settings() -> Iterator[None]:
    """Set what a backend may change to what no backend would set it to; restore it at the end."""
    moved: tuple[tuple[Any, Callable[[Any], object], Any], ...] = (
        (gc.isenabled(), lambda on: gc.enable() if on else gc.disable(), True),
        (gc.get_threshold(), lambda counts: gc.set_threshold(*counts), (701, 11, 11)),
        (logging.getLogger().level, logging.getLogger().setLevel, 37),
        (sys.getswitchinterval(), sys.setswitchinterval, 0.0043),
        (random.getstate(), random.setstate, random.Random(86_420).getstate()),
        (np.random.get_state(), np.random.set_state, np.random.RandomState(86_420).get_state()),  # noqa: NPY002
    )
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ))
        # Libraries read these when they are loaded: a backend that sets one in a call sets it for other libraries.
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "KMP_DUPLICATE_LIB_OK"):
            os.environ.pop(name, None)
        stack.enter_context(np.errstate(all="warn", under="ignore"))
        if torch := sys.modules.get("torch"):  # before the limits: PyTorch tells OpenMP's number for its own
            stack.callback(torch.set_num_threads, torch.get_num_threads())
        stack.enter_context(threadpool_limits(3))
        for found, put, other in moved:
            stack.callback(put, found)
            put(other)
        if torch:
            stack.callback(torch.set_rng_state, torch.get_rng_state())
            torch.set_num_threads(3)
            torch.rand(1)
        yield


def _settings() -> dict[str, Any]:
    """Return the process's settings by what a message calls them."""
    root = logging.getLogger()
    found = {
        "NumPy's error state": np.geterr(),
        "NumPy's random state": pickle.dumps(np.random.get_state()),  # noqa: NPY002
        "Python's random state": random.getstate(),
        "the environment": dict(os.environ),
        "the working directory": os.getcwd(),
        "the root logger": (root.level, list(root.handlers)),
        "the garbage collector": (gc.isenabled(), gc.get_threshold()),
        "the switch interval": sys.getswitchinterval(),
        "the handler of Ctrl-C": signal.getsignal(signal.SIGINT),
        "what is less than 2⁻¹⁰²² (0 now)": bool((np.array([2.0**-1060]) * 0.5)[0]),
        "the threads of libraries": {each["filepath"]: each["num_threads"] for each in threadpool_info()},
    }
    if torch := sys.modules.get("torch"):
        found |= {
            "PyTorch's random state": torch.get_rng_state().numpy().tobytes(),
            "PyTorch's threads": torch.get_num_threads(),
            "PyTorch's default dtype": torch.get_default_dtype(),
            "PyTorch's recording of gradients": torch.is_grad_enabled(),
            "PyTorch's precision of products": torch.get_float32_matmul_precision(),
            "PyTorch's deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        }
    return found


@contextmanager
def _output() -> Iterator[list[str]]:
    """Return a list to which what Python and C print is added at the end."""
    found: list[str] = []
    sys.stdout.flush(), sys.stderr.flush()
    with tempfile.TemporaryFile("w+", errors="replace") as file:
        kept = [(number, os.dup(number)) for number in (1, 2)]
        try:
            for number, _ in kept:
                os.dup2(file.fileno(), number)
            with redirect_stdout(file), redirect_stderr(file):
                yield found
        finally:
            for number, copy in kept:
                os.dup2(copy, number)
                os.close(copy)
            file.seek(0)
            found += filter(None, [file.read()])


def thread_counts(target: Target, reduction: str) -> None:
    """Any number of threads that ``SDKDE_NUM_THREADS`` allows is right: one, more than cores, more than rows."""
    if target.device != "cpu":
        raise NotDeclared("for CPUs")
    sizes = (211, 67), (5, 2), (2, 5), (1025, 300)
    for count, (n, m) in itertools.product((1, 3, (os.cpu_count() or 1) + 5), sizes):
        case = replace(about_tiles(n, m, 3, 10.0), name=f"about tiles, SDKDE_NUM_THREADS={count}")
        with mock.patch.dict(os.environ, SDKDE_NUM_THREADS=str(count)):
            target.check(case, reduction, target.info.precisions[-1])


def _call(target: Target, problem: Problem, case: Case) -> Callable[[], object]:
    """Return a call that prepares and reduces a case whose arrays are where the backend takes them from."""
    columns, queries = Columns(target.give(case.points), target.give(case.log_weights)), target.give(case.queries)
    return lambda: target.backend.reduce(problem, queries, target.backend.prepare(problem, columns))


def memory(target: Target, precision: str, name: str, d: int) -> None:
    """No array of all pairs is ever there, nor one of all their differences: a few tiles take a few hundred MiB.

    Such an array takes 512 MiB in float32. A call may take 400 beside what it returns: PyTorch's backend takes 256.
    On a GPU, whose programs cut the work less finely, both are four times as many.
    """
    times = 4 if target.device.startswith("cuda") else 1
    n = m = math.isqrt((times << 27) // (1 if name == Reduction.LOG_SUM else d)) + 1

    def peak(share: int) -> int:
        case = problems.make("mixture", n // share, m // share, d, 6.0)
        return _peak(target, _call(target, target.problem(case, name, precision, whole=True), case))

    peak(64)  # compiles, and loads what is needed
    most = peak(1)
    assert most <= times * (400 << 20), f"{m} rows over {n} columns in {d} dimensions take {most >> 20} MiB at once"


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
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) << 10


def leaks(target: Target, parameter: str) -> None:
    """Nothing of a call is left behind: no memory, no threads, no open files.

    Sixteen calls lie between two measurements: a number kept for each row is 12 MiB. Growth in six measurements in a
    row is a failure: a leak grows every time, a heap only until it is large enough.
    """
    if not sys.platform.startswith("linux") or target.device != "cpu":
        raise NotDeclared("for CPUs, on Linux, which lists what a process has")
    cases = [make("mixture", n, m, 2, 6.0) for n, m in ((100_000, 2), (2, 100_000))]

    def left_by(calls: int) -> dict[str, int]:
        for case in cases * calls:
            _call(target, target.problem(case, Reduction.MEAN, target.info.precisions[0], whole=True), case)()
        gc.collect()
        with suppress(AttributeError):  # another C library than GNU's
            ctypes.CDLL(None).malloc_trim(0)
        tasks, files = (len(os.listdir(f"/proc/self/{name}")) for name in ("task", "fd"))
        return {"bytes": _status("VmRSS"), "threads": max(tasks, threading.active_count()), "open files": files}

    allowed = {"bytes": 8 << 20, "threads": 8, "open files": 8}
    with mock.patch.dict(os.environ, SDKDE_NUM_THREADS="1"):  # each has a heap of its own
        before = left_by(3)
        for _ in range(6):
            after = left_by(16)
            more = {name: after[name] - before[name] for name in allowed}
            grown = [f"{more[name]} {name}" for name in allowed if more[name] >= allowed[name]]
            if not grown:
                return
            before = after
    raise AssertionError(f"32 calls have left {' and '.join(grown)}, and so 6 times")


def price(target: Target, d: int) -> None:
    """What ``work`` says is near the time taken: a backend that is priced too low is chosen where it is slow.

    The lesser of wall time and processor time is compared: a busy machine makes neither of them less.
    """
    if target.info.work is None or target.device != "cpu":
        raise NotDeclared("for CPUs, of backends with a price")
    case = make("mixture", 3000, 3000, d, 8.0)
    for reduction in Reduction:
        problem, taken = target.problem(case, reduction, target.info.precisions[0], whole=True), math.inf
        call = _call(target, problem, case)
        with mock.patch.dict(os.environ, SDKDE_NUM_THREADS="1"):  # a busy machine changes the time of one thread least
            said = cost.predict(target.info, problem, hardware.cpu())
            for _ in range(4):  # the first one compiles
                wall, process = time.perf_counter(), time.process_time()
                call()
                taken = min(taken, time.perf_counter() - wall, time.process_time() - process)
        if said is not None:
            what = f"{reduction.name} of {problem.m} rows and {problem.n} columns in {problem.d} dimensions"
            about = f"work says {said:.2g} s of {what}, which takes {taken:.2g} s: more than 12 times off"
            assert taken / 12.0 <= said <= 12.0 * taken, about
