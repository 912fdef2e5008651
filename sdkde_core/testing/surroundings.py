"""Checks of what a call leaves as it found it, the process's settings and output, and of numbers of threads."""

from __future__ import annotations

import gc
import locale
import logging
import os
import pickle
import random
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from typing import Any

import numpy as np
from threadpoolctl import threadpool_info, threadpool_limits

from sdkde_core.protocol import Reduction

from . import problems
from .accuracy import about_tiles
from .problems import Case
from .target import NotDeclared, Target, make, threads_set, weighted

__all__ = ["surroundings", "thread_counts"]


def surroundings(target: Target, parameter: str) -> None:
    """A call warns of nothing, prints nothing, and leaves the process's random states and settings as they were.

    The backend is asked by way of the core, and itself, as NumPy's error state is by default: the core ignores what
    NumPy warns of in the calling thread, but not in others. Settings are moved first: what an earlier call has set
    would otherwise count as found.
    """
    reduction, small = Reduction(parameter), make("mixture", 50, 20, 3, 5.0)
    target.answer(target.problem(small, reduction, target.info.precisions[0]), small)  # libraries are loaded then
    asked = _asked(target, reduction)
    with _moved_settings():
        before = _settings()
        with warnings.catch_warnings(record=True) as warned, _output() as output:
            warnings.simplefilter("always")
            filters = list(warnings.filters)
            for case, options in asked:
                for precision in target.info.precisions:
                    try:
                        problem = target.problem(case, reduction, precision, **options)
                    except NotDeclared:
                        continue
                    target.answer(problem, case)
                    if np.isfinite(case.log_weights).all() and target.info.supports(problem).ok:
                        target.reduce(problem, None if problem.same else case.queries, target.prepare(problem, case))
            changed = ["the filters of warnings"] * (list(warnings.filters) != filters)
        after = _settings()
    hidden = (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning)  # but from developers
    shown = [w for w in warned if not issubclass(w.category, hidden)]
    assert not shown, f"a call warns: {shown[0].category.__name__}: {shown[0].message}"
    assert not output, f"a call prints: {output[0][:200]!r}"
    changed += [name for name, value in before.items() if after[name] != value]
    assert not changed, f"a call changes {', '.join(changed)}"


def _asked(target: Target, reduction: Reduction) -> list[tuple[Case, dict[str, Any]]]:
    """Cases in which logarithms of zero and differences of infinities come up, and one of many columns."""
    far = problems.far(97, 13, 3, 1e12, stray=True)
    asked: list[tuple[Case, dict[str, Any]]] = [(about_tiles(1500, 70, 3, 10.0), {}), (far, {})]
    asked += [(make("tails", 211, 67, 3, 1e4), {}), (make("outlier", 211, 67, 3, 10.0), {"same": True})]
    if "weights" in target.info.features:
        asked += [(make("weights", 211, 67, 3, 10.0), {}), (weighted(far), {})]
    if "exclude_self" in target.info.features:
        for kind, n in (("mixture", 1), ("outlier", 31)):
            asked.append((make(kind, n, 1, 3, 10.0), {"same": True, "exclude_self": True}))
    if "kernel" in target.info.features and reduction is Reduction.LOG_SUM:
        asked.append((far, {"requires": {"kernel"}, "kernel": "epanechnikov"}))
    return asked


@contextmanager
def _moved_settings() -> Iterator[None]:
    """Set what a backend may change to what no backend would set it to; restore it at the end."""
    # Libraries read these when they are loaded: a backend that sets one in a call sets it for other libraries.
    read_once = [f"{name}_NUM_THREADS" for name in ("OMP", "MKL", "OPENBLAS")] + ["KMP_DUPLICATE_LIB_OK"]
    torch, saved = sys.modules.get("torch"), {name: os.environ.pop(name) for name in read_once if name in os.environ}
    moved: tuple[tuple[Callable[[], Any], Callable[[Any], object], Any], ...] = (
        (gc.isenabled, lambda on: gc.enable() if on else gc.disable(), True),
        (gc.get_threshold, lambda counts: gc.set_threshold(*counts), (701, 11, 11)),
        (lambda: logging.getLogger().level, logging.getLogger().setLevel, 37),
        (lambda: np.get_printoptions()["precision"], lambda digits: np.set_printoptions(precision=digits), 11),
        (sys.getswitchinterval, sys.setswitchinterval, 0.0043),
        (sys.getrecursionlimit, sys.setrecursionlimit, 1717),
    )
    with ExitStack() as stack:
        stack.callback(os.environ.update, saved)
        stack.callback(lambda: [os.environ.pop(name, None) for name in read_once])
        stack.callback(random.setstate, random.getstate())
        stack.callback(np.random.set_state, np.random.get_state())  # noqa: NPY002 -- the state that users share
        stack.enter_context(np.errstate(all="warn", under="ignore"))
        if torch is not None:  # before the limits: PyTorch tells OpenMP's number for its own
            stack.callback(torch.set_num_threads, torch.get_num_threads())
        stack.enter_context(threadpool_limits(3))
        for get, put, other in moved:
            stack.callback(put, get())
            put(other)
        if torch is not None:
            stack.callback(torch.set_rng_state, torch.get_rng_state())
            torch.set_num_threads(3)
            torch.rand(1)
        random.random()
        np.random.random()  # noqa: NPY002
        yield


def _settings() -> dict[str, Any]:
    """Return the process's settings by what a message calls them."""
    root = logging.getLogger()
    found = {
        "NumPy's error state": np.geterr(),
        "NumPy's printing options": repr(np.get_printoptions()),
        "NumPy's random state": pickle.dumps(np.random.get_state()),  # noqa: NPY002
        "Python's random state": random.getstate(),
        "the environment": dict(os.environ),
        "the working directory": os.getcwd(),
        "the locale": locale.setlocale(locale.LC_ALL),
        "the root logger": (root.level, list(root.handlers)),
        "the garbage collector": (gc.isenabled(), gc.get_threshold()),
        "the recursion limit": sys.getrecursionlimit(),
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
    with tempfile.TemporaryFile() as file, tempfile.TemporaryFile("w+") as text:
        kept = [(number, os.dup(number)) for number in (1, 2)]
        try:
            for number, _ in kept:
                os.dup2(file.fileno(), number)
            with redirect_stdout(text), redirect_stderr(text):
                yield found
        finally:
            for number, copy in kept:
                os.dup2(copy, number)
                os.close(copy)
            file.seek(0)
            text.seek(0)
            found += [x for x in (text.read(), file.read().decode(errors="replace")) if x]


def thread_counts(target: Target, parameter: str) -> None:
    """Any number of threads that ``SDKDE_NUM_THREADS`` allows is right: one, more than cores, more than rows."""
    if target.device != "cpu":
        raise NotDeclared("for CPUs")
    for count in (1, 3, (os.cpu_count() or 1) + 5):
        for n, m in ((211, 67), (5, 2), (2, 5), (1025, 300)):
            try:
                with threads_set(count):
                    target.check(about_tiles(n, m, 3, 10.0), parameter, target.info.precisions[-1])
            except AssertionError as error:
                raise AssertionError(f"SDKDE_NUM_THREADS={count}: {error}") from error
