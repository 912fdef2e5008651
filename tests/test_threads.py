"""Tasks shared out over threads: in order, ended by an exception or an interrupt, and done where no thread starts."""

import threading
import time
from concurrent.futures import BrokenExecutor, ThreadPoolExecutor

import numpy as np
import pytest

import sdkde_core
from sdkde_core.choice import registry
from sdkde_core.plugin import checkpoint, map_threads

CPU = [r.name for r in registry.records() if r.ok and "cpu" in r.info.devices]


@pytest.fixture
def no_threads(monkeypatch):
    """As where the system or a container has no more."""

    def start(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)


@pytest.mark.parametrize("count", [0, 1, 5, 200])
@pytest.mark.parametrize("how", [{}, {"apart": True}, {"pool": ThreadPoolExecutor(2)}])
def test_results_come_in_the_arguments_order(how, count):
    for threads in (1, 2, 7):
        assert map_threads(lambda i: i * i, range(count), threads, **how) == [i * i for i in range(count)]
    # One whose start an interrupt of another test broke off is listed for ever.
    assert not [t for t in threading.enumerate() if t.name.startswith("sdkde_") and t.is_alive()]


def test_which_thread_does_the_work():
    mine = threading.get_ident()
    assert map_threads(lambda _: threading.get_ident(), [0, 1], 1) == [mine, mine]
    assert map_threads(lambda _: threading.get_ident(), [0], 2) == [mine]
    assert mine not in map_threads(lambda _: threading.get_ident(), [0, 1], 1, apart=True)


@pytest.mark.parametrize("how", [{}, {"apart": True}, {"pool": ThreadPoolExecutor(2)}])
def test_without_threads_the_caller_does_the_work(how, no_threads):
    assert map_threads(lambda i: i * i, range(5), 3, **how) == [0, 1, 4, 9, 16]


@pytest.mark.parametrize("backend", CPU)
def test_backends_do_without_threads(backend, no_threads):
    """All but what KeOps does itself; PyTorch's are those that stay."""
    if backend == "torch":
        pytest.importorskip("sdkde_torch.devices")._workers.cache_clear()
    if backend in ("keops", "triton", "numba-cuda", "fourier-torch"):
        pytest.skip("has no threads of ours, or takes long")
    x = np.random.default_rng(0).normal(size=(900, 2))
    got = sdkde_core.estimate(x, backend=backend, bandwidth=0.3, precision="high")
    want = sdkde_core.estimate(x, backend="numpy", bandwidth=0.3, precision="high", backend_options={"threads": 1})
    np.testing.assert_allclose(got, want, rtol=1e-4)


@pytest.mark.parametrize("how", [{}, {"pool": ThreadPoolExecutor(2)}])
def test_after_an_exception_nothing_begins_and_what_runs_ends_at_a_checkpoint(how):
    begun, ended = [], []

    def task(i):
        begun.append(i)
        if i == 0:
            while len(begun) < 2:
                time.sleep(1e-4)
            raise ZeroDivisionError
        try:
            for _ in range(100_000):  # which only keeps a failure from hanging
                checkpoint()
                time.sleep(1e-4)
        finally:
            ended.append(i)

    with pytest.raises(ZeroDivisionError):
        map_threads(task, range(50), 2, **how)
    assert sorted(begun) == [0, 1]
    assert ended == [1]
    assert map_threads(lambda i: i, range(5), 2, **how) == list(range(5))  # threads that stay go on


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_pool_that_fails_itself_is_an_error():
    def fail():
        raise ZeroDivisionError

    with pytest.raises(BrokenExecutor):
        map_threads(lambda i: i, [0, 1], 2, pool=ThreadPoolExecutor(2, initializer=fail))


def test_what_reaches_no_checkpoint_is_left_behind():
    """After an interrupt nobody waits for the end of a library's call."""
    begun, end, ended = threading.Event(), threading.Event(), threading.Event()

    def long(i):
        if i == 0:
            begun.wait(60)
            raise KeyboardInterrupt
        begun.set()
        end.wait(60)
        ended.set()

    with pytest.raises(KeyboardInterrupt):
        map_threads(long, [0, 1, 2], 2)
    assert not ended.is_set()
    end.set()
    assert ended.wait(60)


def test_a_checkpoint_elsewhere_does_nothing():
    checkpoint()
    with pytest.raises(ZeroDivisionError):
        map_threads(lambda i: 1 // i, [0, 1], 2)
    checkpoint()
