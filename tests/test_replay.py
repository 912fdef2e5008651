"""Which calls are replayed, and when, with graphs that run their call again; test_gpu.py has CUDA's."""

import contextlib
import gc
import sys
import threading
import weakref
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from array_api_compat import array_namespace

import sdkde_core
from sdkde_core.arrays import Data, Origin
from sdkde_core.choice import registry
from sdkde_core.estimator import graphs as replay
from sdkde_core.estimator.plan import Measured, rounded
from sdkde_core.estimator.request import Goal, Request


class Tensor:
    """What a replay looks at of a CUDA tensor."""

    def __init__(self, *shape, dtype="float32", index=0, requires_grad=False):
        self.shape, self.ndim, self.dtype = shape, len(shape), dtype
        self.is_cuda, self.requires_grad, self.device = True, requires_grad, SimpleNamespace(index=index)


@pytest.fixture
def cuda(monkeypatch):
    """A torch with one CUDA device, the first, and one stream."""
    stream = SimpleNamespace(cuda_stream=7)
    fake = SimpleNamespace(
        Tensor=Tensor,
        float32="float32",
        float64="float64",
        cuda=SimpleNamespace(
            current_device=lambda: 0,
            is_current_stream_capturing=lambda: False,
            current_stream=lambda: stream,
        ),
        compiler=SimpleNamespace(is_compiling=lambda: False),
        are_deterministic_algorithms_enabled=lambda: False,
        is_inference_mode_enabled=lambda: False,
    )
    registry.records()  # what is installed is asked once a process: with the true one
    monkeypatch.setitem(sys.modules, "torch", fake)
    return fake


def key(train=None, query=None, log=False, method="sdkde", **options):
    request = Request(Goal.DENSITY, method, **{"bandwidth": 0.5} | options)
    return replay.key_of(request, Tensor(100, 3) if train is None else train, query, log)


def test_equal_calls_have_equal_keys(cuda):
    assert key() is not None
    assert key() == key(train=Tensor(100, 3))
    assert hash(key()) == hash(key())


@pytest.mark.parametrize(
    "other",
    [
        {"train": Tensor(101, 3)},
        {"train": Tensor(100, 3, dtype="float64")},
        {"query": Tensor(100, 3)},
        {"bandwidth": 0.25},
        {"backend": "triton"},
        {"log": True},
        {"check_finite": False},
        {"precision": "high"},
        {"method": "kde"},
    ],
)
def test_what_differs_is_another_key(cuda, other):
    assert key(**other) is not None
    assert key(**other) != key()


def test_streams_and_the_environment_are_in_the_key(cuda, monkeypatch):
    before = key()
    cuda.cuda.current_stream = lambda: SimpleNamespace(cuda_stream=8)
    assert key() != before
    cuda.cuda.current_stream = lambda: SimpleNamespace(cuda_stream=7)
    monkeypatch.setenv("SDKDE_TUNING", "off")
    assert key() != before


def test_there_is_a_switch(cuda, monkeypatch):
    for text in ("off", "OFF", "0", "no"):
        monkeypatch.setenv("SDKDE_REPLAY", text)
        assert key() is None
    monkeypatch.setenv("SDKDE_REPLAY", "on")
    assert key() is not None
    monkeypatch.setenv("SDKDE_REPLAY", "of")
    with pytest.raises(ValueError, match="SDKDE_REPLAY is 'of'; set 'off' or 'on'; did you mean 'off'"):
        key()


def test_the_switch_is_looked_at_without_a_gpu_too(monkeypatch):
    monkeypatch.setenv("SDKDE_REPLAY", "never")
    with pytest.raises(ValueError, match="SDKDE_REPLAY is 'never'"):
        sdkde_core.estimate([0.0, 1.0])


@pytest.mark.parametrize(
    "call",
    [
        {"train": np.zeros((3, 2))},
        {"train": Tensor(100)},
        {"train": Tensor(0, 3)},
        {"train": Tensor(100, 3, index=1)},
        {"train": Tensor(100, 3, dtype="float16")},
        {"train": Tensor(100, 3, requires_grad=True)},
        {"train": Tensor(1 << 20, 3)},
        {"train": Tensor(20000, 784)},
        {"query": Tensor(0, 3)},
        {"query": np.zeros((3, 3))},
        {"weights": np.ones(100)},
        {"bandwidth": "silverman"},
        {"bandwidth": np.ones(3)},
        {"device": "cuda"},
        {"backend_options": {"threads": 1}},
        {"method": "laplace", "log": True},
        {"method": "laplace", "negative": "renormalise"},
    ],
)
def test_calls_that_are_not_replayed(cuda, call):
    assert key(**call) is None


def test_clipped_and_signed_calls_have_recordings_of_their_own(cuda):
    signed, clipped = (key(method="laplace", negative=negative) for negative in ("keep", "clip"))
    assert None not in (signed, clipped)
    assert signed != clipped
    assert key(method="laplace", negative="clip", log=True) is not None  # which looks at nothing on the host


def test_tensors_on_the_host_are_never_recorded():
    for _ in range(replay.CALLS + 2):
        sdkde_core.estimate(torch.zeros(5, 2) + torch.arange(5.0)[:, None], bandwidth=1.0)
    assert not replay._recordings
    assert not replay._calls


def test_rounded_extents_bound_and_repeat():
    for extent in (1e-300, 0.3, 1.0, 12.58, 1e4, 1e149):
        assert extent <= rounded(extent) <= 1.0906 * extent
    assert len({rounded(extent) for extent in np.geomspace(1.0, 1000.0, 5000)}) <= 8 * 10 + 1
    assert rounded(0.0) == 0.0
    assert rounded(12.4) == rounded(13.4)


# --- recordings -----------------------------------------------------------------------------------------------------


class Graph:
    """Replayed, it makes its call again and leaves the result where the first one is."""

    def __init__(self, call, log, name):
        self.call, self.log, self.name, self.result = call, log, name, call()

    def replay(self):
        self.log.append(self.name)
        found, kept = self.call(), self.result
        for x, y in zip(vars(kept).values(), vars(found).values()) if isinstance(kept, Measured) else [(kept, found)]:
            x.copy_(y)


@pytest.fixture
def device(monkeypatch):
    """CUDA's part of a recording, on the CPU: ``log`` has what was recorded, replayed and waited for."""
    log, empty = [], torch.empty
    waits = SimpleNamespace(before=lambda: None)  # called where the host waits for the device

    class Event:
        def record(self):
            pass

        def synchronize(self):
            log.append("wait")
            waits.before()

    def captured(recording, call):
        graph = Graph(call, log, "first" if recording._first is None else "second")
        log.append(f"record {graph.name}")
        return graph, graph.result

    stream = SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda side: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch, "empty", lambda *shape, pin_memory=False, **how: empty(*shape, **how))
    monkeypatch.setattr(replay._Recording, "_captured", captured)
    monkeypatch.setattr(replay, "only_enqueues", lambda info, problems: True)
    monkeypatch.setattr(replay, "ingest", lambda train, query: Data(train, query, None, "", Origin(array_namespace(X))))
    replay.release()
    yield SimpleNamespace(log=log, waits=waits)
    replay.release()


@pytest.fixture
def simple(device, monkeypatch):
    """``call(x, key)``: what an estimate does, with the largest point for the extent and their sum for the result."""
    monkeypatch.setattr(replay, "measure", lambda data, bandwidth: Measured(*_measured(data.train)))
    monkeypatch.setattr(replay, "run", lambda plan: plan.columns.points.sum(dim=0))
    monkeypatch.setattr(replay, "replace", lambda x, **changes: SimpleNamespace(**({"n": len(X)} | vars(x) | changes)))

    def call(x, key="key"):
        found = replay.play(key, x, None)
        if found is not None:
            return found
        device.log.append("ordinary")
        choice = SimpleNamespace(info=None)
        data = SimpleNamespace(dtype="float64")
        extent = rounded(float(x.max()))
        plan = SimpleNamespace(extent=extent, choice=choice, problems=(), bandwidth=None, data=data, looked=False)
        replay.record(key, x, None, plan, lambda sums: 2.0 * sums)
        return 2.0 * x.sum(dim=0)

    return call


X = torch.arange(1.0, 6.0, dtype=torch.float64)[:, None]


def _measured(x):
    return x.clone(), x[:, 0].clone(), x.max().clone(), torch.zeros(len(x)), torch.zeros(1)


def test_data_sets_of_one_shape_in_turn_are_replayed_without_waste(simple, device):
    sets = X, 3.0 * X
    for i in range(2000):
        if i == 2 * replay.CALLS:
            device.log.clear()
        assert torch.equal(simple(sets[i % 2]), 2.0 * sets[i % 2].sum(dim=0))
    assert device.log == ["first", "wait", "second"] * (2000 - 2 * replay.CALLS)


def test_an_extent_is_recorded_when_it_has_come_often_itself(simple, device):
    for _ in range(replay.CALLS):
        simple(X)
    assert [x for x in device.log if x.startswith("record")] == ["record first", "record second"]
    for _ in range(replay.CALLS - 1):
        simple(3.0 * X)
        simple(X)
    assert device.log.count("record second") == 1
    simple(3.0 * X)
    assert (device.log.count("record first"), device.log.count("record second")) == (1, 2)


def test_the_host_does_not_wait_where_the_last_two_extents_were_one(simple, device):
    for _ in range(replay.CALLS + 2):
        simple(X)
    device.log.clear()
    simple(X)
    assert device.log == ["first", "second", "wait"]
    simple(3.0 * X), device.log.clear()
    for _ in range(2):
        simple(X)
    assert device.log == ["first", "wait", "second"] * 2
    simple(X)
    assert device.log[-3:] == ["first", "second", "wait"]


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_is_not_replayed(simple, value):
    for _ in range(replay.CALLS + 1):
        simple(X)
    wrong = X.clone()
    wrong[2] = value
    assert replay.play("key", wrong, None) is None
    assert replay.play("key", wrong, None) is None
    assert torch.equal(simple(X), 2.0 * X.sum(dim=0))


def test_recordings_are_bounded(simple, device):
    for extent in range(replay.EXTENTS + 3):
        for _ in range(replay.CALLS + 1):
            simple(2.0**extent * X)
    (recording,) = replay._recordings.values()
    assert list(recording._seconds) == [rounded(5.0 * 2.0**i) for i in range(3, replay.EXTENTS + 3)]
    for name in range(replay.RECORDINGS + 3):
        for _ in range(replay.CALLS + 1):
            simple(X, name)
    assert list(replay._recordings) == list(range(3, replay.RECORDINGS + 3))
    for i in range(400):
        simple((1.0 + i) * X, "many")
    assert len(replay._calls) <= 256


def test_threads_get_their_own_results(simple):
    for _ in range(replay.CALLS):
        simple(X), simple(3.0 * X)
    wrong = []

    def work(i):
        x = (X, 3.0 * X, X.flip(0), 4.5 * X / 1.5)[i]
        for _ in range(200):
            if not torch.equal(simple(x), 2.0 * x.sum(dim=0)):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_who_waits_for_the_device_keeps_nobody_else_and_release_takes_nothing_from_it(simple, device):
    for name in ("one", "other"):
        for _ in range(replay.CALLS):
            simple(X, name)
    waiting, go_on, found = threading.Event(), threading.Event(), []

    def before():
        if threading.current_thread() is thread:
            waiting.set()
            assert go_on.wait(60)

    device.waits.before = before
    thread = threading.Thread(target=lambda: found.append(simple(X, "one")))
    thread.start()
    assert waiting.wait(60)
    ordinary = device.log.count("ordinary")
    simple(X, "other")
    assert device.log.count("ordinary") == ordinary, "another recording is not replayed meanwhile"
    sdkde_core.release_replays()
    assert not replay._recordings
    go_on.set()
    thread.join()
    assert torch.equal(found[0], 2.0 * X.sum(dim=0))


def test_released_recordings_are_gone_and_are_made_again(simple, device):
    for _ in range(replay.CALLS - 1):
        simple(X, "counted")
    for _ in range(replay.CALLS):
        simple(X)
    (recording,) = (weakref.ref(r) for r in replay._recordings.values())
    sdkde_core.release_replays()
    gc.collect()
    assert recording() is None
    device.log.clear()
    simple(X, "counted")
    for _ in range(replay.CALLS):
        simple(X)
    assert device.log == ["ordinary"] * (replay.CALLS + 1) + ["record first", "record second"]
    simple(X)
    assert device.log[-1] == "second"


def test_what_cannot_be_recorded_goes_on_as_before(simple, device, monkeypatch):
    monkeypatch.setattr(replay._Recording, "_captured", lambda recording, call: 1 / 0)
    for _ in range(replay.CALLS + 3):
        assert torch.equal(simple(X), 2.0 * X.sum(dim=0))
    assert device.log == ["ordinary"] * (replay.CALLS + 3)


@pytest.mark.parametrize("method", ["kde", "sdkde", "laplace"])
def test_estimates_are_recorded_and_replayed_with_their_bits(method, device, monkeypatch):
    """All but the graphs themselves is what calls on a GPU do."""
    monkeypatch.setattr(replay, "key_of", lambda request, train, query, log: (request.method, train.shape))
    sets = [torch.from_numpy(np.random.default_rng(i).normal(scale=1 + 2 * i, size=(30, 2))) for i in (0, 1)]
    options = {"method": method, "bandwidth": 0.5, "backend": "torch"}
    first = [sdkde_core.estimate(x, x[:7], **options) for x in sets]
    for _ in range(replay.CALLS + 1):
        for x, want in zip(sets, first):
            assert torch.equal(sdkde_core.estimate(x, x[:7], **options), want)
    assert device.log[-6:] == ["first", "wait", "second"] * 2
