"""What every test runs under."""

import gc
import os
import signal
from collections import defaultdict

import pytest
from pairwise import covering

from sdkde_core.choice import registry

# What is imported and collected lives to the end: to look it through again and again takes a quarter of the collection.
gc.disable()

# Two processes with as many threads each: those that have nothing to do wait without spinning, which saves a third.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers():
    """One more than the CPUs that may be used: tests that wait for a process, a lock or a clock left them idle."""
    if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ:
        return None
    return (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1) + 1


@pytest.fixture(scope="session")
def shared(tmp_path_factory):
    """A folder of this run that all its processes share."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(autouse=True, scope="session")
def _own_cache(shared):
    """What a user has measured on this machine must not decide what tests see; what one compiles another finds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(shared / "cache"))
        # PyTorch warns of it where another process makes this folder meanwhile.
        (shared / "cache" / "torch" / "kernels").mkdir(parents=True, exist_ok=True)
        patch.setenv("KEOPS_CACHE_FOLDER", str(shared / "keops"))
        for name in ("BACKEND", "PRECISION", "NUM_THREADS", "TUNING", "DB"):
            patch.delenv(f"SDKDE_{name}", raising=False)
        yield


@pytest.fixture(autouse=True)
def _nothing_aside(monkeypatch):
    """What does not start or fails in one test, "auto" takes in the next; what one warms up is cold in the next."""
    monkeypatch.setattr(registry, "aside", {})
    monkeypatch.setattr(registry, "warm", {})
    monkeypatch.setattr(registry, "chosen", {})


@pytest.fixture
def heeded():
    """Signals that end a program do: a shell's background jobs, and what nohup starts, come with some ignored."""
    usual = {"SIGINT": signal.default_int_handler, "SIGTERM": signal.SIG_DFL, "SIGHUP": signal.SIG_DFL}
    numbers = {getattr(signal, name): handler for name, handler in usual.items() if hasattr(signal, name)}
    before = {number: signal.signal(number, handler) for number, handler in numbers.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def untold(monkeypatch):
    """Warnings that are given once a process are given again."""
    monkeypatch.setattr("sdkde_core.messages._told", set())


#: What the Makefile's targets leave out.
LEFT_OUT = {"not slow and not gpu": {"slow", "gpu"}, "not gpu": {"gpu"}}


def pytest_pycollect_makeitem(collector, obj):
    """Do not make tests of a class, a function or a module that all are deselected: 20 000 of the full suite's."""
    known = (getattr(one, "pytestmark", ()) for one in (obj, collector.obj) if callable(one) or one is collector.obj)
    marks = {mark.name for found in known for mark in (found if isinstance(found, list) else [])}
    return [] if marks & LEFT_OUT.get(collector.config.option.markexpr, set()) else None


#: What takes minutes in one process of its own begins at once, beside everything else.
FIRST = ("test_in_the_interpreter", "test_in_the_simulator")


def pytest_collection_finish():
    """Collect garbage from now on, but not what is there already."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Leave all checks of a class marked ``covering`` but a covering selection to `make test-full`.

    So the conformance suite's products become few cases, in which all that any two (``covering(2)``) of precision,
    reduction, kind, dimension and extent can do together occurs; ``covering(1, tolerance=2)``: in that check alone.
    """
    items.sort(key=lambda item: getattr(item, "originalname", "") not in FIRST)
    groups = defaultdict(dict)
    for item in items:
        if (marker := item.get_closest_marker("covering")) and hasattr(item, "callspec"):
            row = tuple(item.callspec.params["parameter"].split("-"))
            strength = marker.kwargs.get(item.originalname.removeprefix("test_"), marker.args[0])
            groups[item.parent.nodeid, item.originalname, strength][row] = item
    for (*_, strength), group in groups.items():
        chosen = set(covering(list(group), strength=strength))
        for row, item in group.items():
            if row not in chosen:
                item.add_marker(pytest.mark.slow)
