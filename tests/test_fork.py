"""What a forked child can do: as much as its parent, or say at once why it cannot."""

import subprocess
import sys
import threading

import numpy as np
import pytest

import sdkde_core
from sdkde_core.choice import registry
from sdkde_core.engine import columns
from sdkde_core.plugin import new_lock
from sdkde_core.testing.calls import _status_of_child

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="processes go on after a fork on Linux")

FOUND = {r.name for r in registry.records() if r.ok}


@pytest.fixture
def elsewhere():
    """Run a function in another thread, up to where it waits for the event; at the end it goes on."""
    ready, end, running = threading.Event(), threading.Event(), []

    def start(function):
        def run():
            with function():
                ready.set()
                end.wait(60)

        running.append(threading.Thread(target=run))
        running[0].start()
        assert ready.wait(60)

    yield start
    end.set()
    for thread in running:
        thread.join(60)


@pytest.mark.parametrize("kind", [threading.Lock, threading.RLock])
def test_a_lock_that_another_thread_held_is_free(kind, elsewhere):
    lock = new_lock(kind)
    elsewhere(lambda: lock)

    def take():
        assert lock.acquire(timeout=0)

    assert _status_of_child(take) == 0
    assert not lock.acquire(timeout=0)


def test_a_prepared_set_that_another_thread_is_packing(elsewhere):
    x = np.random.default_rng(0).normal(size=(300, 3))
    prepared = sdkde_core.prepare(x, backend="numpy", bandwidth=0.5)
    want = prepared.estimate(x)
    elsewhere(lambda: prepared._fitted._lock)

    def estimate():
        assert np.array_equal(prepared.estimate(x), want)

    assert _status_of_child(estimate) == 0


def test_outliers_that_another_thread_is_looking_for(monkeypatch):
    x, find, looking, end = (
        np.random.default_rng(0).normal(size=(300, 3)),
        columns.find_outliers,
        threading.Event(),
        threading.Event(),
    )

    def look(*arguments):
        looking.set()
        end.wait(60)
        return find(*arguments)

    def estimate():
        sdkde_core.estimate(x, backend="numpy", bandwidth=0.5)

    monkeypatch.setattr(columns, "find_outliers", look)
    thread = threading.Thread(target=estimate)
    thread.start()
    assert looking.wait(60)
    monkeypatch.undo()
    try:
        assert _status_of_child(estimate) == 0
    finally:
        end.set()
        thread.join(60)


@pytest.mark.skipif("fourier" not in FOUND, reason="needs finufft")
def test_fourier_sums_of_which_finufft_shared_out_the_rows():
    x = np.random.default_rng(0).normal(size=(40_000, 2))
    options = {"backend": "fourier", "bandwidth": 0.3, "method": "kde"}
    options["backend_options"] = {"always": True, "threads": 2}
    want = sdkde_core.estimate(x, **options)

    def estimate():
        assert np.array_equal(sdkde_core.estimate(x, **options), want)

    assert _status_of_child(estimate) == 0


#: Forks while threads compute, and estimates in the children, which end by themselves or are killed.
STORM = """
import os, sys, threading, time, warnings
import numpy as np
import sdkde_core
from sdkde_core.testing.calls import _status_of_child

backend, forks = sys.argv[1], int(sys.argv[2])
d, n = (2, 60_000) if backend == "fourier" else (4, 20_000)
x = np.random.default_rng(0).normal(size=(n, d))
y = x if backend == "fourier" else x[:1000]
options = {"backend": backend, "bandwidth": 0.3, "method": "kde"}
options["backend_options"] = {"always": True} if backend == "fourier" else None
prepared = sdkde_core.prepare(x, **options)
calls = [lambda: sdkde_core.estimate(x, y, **options), lambda: prepared.estimate(y)]
want = [call() for call in calls]

def answer():
    for call, right in zip(calls, want):
        try:
            assert np.array_equal(call(), right)
        except RuntimeError as error:
            assert backend == "fourier" and "spawn" in str(error)

def work(call):
    while True:
        call()

if sys.argv[3] == "while":
    for call in calls:
        threading.Thread(target=work, args=(call,), daemon=True).start()
found = [_status_of_child(answer) for _ in range(forks)]
print({status: found.count(status) for status in found}, flush=True)
os._exit(0 if set(found) == {0} else 1)
"""


@pytest.mark.slow
@pytest.mark.parametrize("when", ["while", "after"])
@pytest.mark.parametrize("backend", ["numpy", "numba", "torch", "keops", "fourier"])
def test_many_forks(backend, when):
    if backend not in FOUND:
        pytest.skip(f"{backend} is not here")
    done = subprocess.run(
        [sys.executable, "-c", STORM, backend, "64", when], capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout + done.stderr
