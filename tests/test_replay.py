"""Which calls are replayed, and when, with graphs that run their call again; test_gpu.py has CUDA's."""

import contextlib
import gc
import sys
import weakref
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from array_api_compat import array_namespace

import sdkde_core
from sdkde_core.arrays import Argument, Data, Origin, Taken, arguments, noting
from sdkde_core.choice import registry
from sdkde_core.estimator import fitted, plan
from sdkde_core.estimator import graphs as replay
from sdkde_core.estimator import recording as capture
from sdkde_core.estimator import replay as glue
from sdkde_core.estimator.request import Goal, Request


class Tensor:
    """What a replay looks at of a CUDA tensor."""

    def __init__(self, *shape, dtype="float32", index=0, requires_grad=False):
        self.shape, self.ndim, self.dtype = shape, len(shape), dtype
        self.is_cuda, self.requires_grad, self.get_device = True, requires_grad, lambda: index


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
            current_stream=lambda device=None: stream,
            get_device_properties=lambda device: SimpleNamespace(total_memory=40 << 30),
        ),
        compiler=SimpleNamespace(is_compiling=lambda: False),
        _C=SimpleNamespace(),
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
        {"weights": Tensor(100)},
        {"weights": Tensor(100), "query": Tensor(100, 3)},
    ],
)
def test_what_differs_is_another_key(cuda, other):
    assert key(**other) is not None
    assert key(**other) != key()


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
        {"train": Tensor(10000, 784), "query": Tensor(10000, 784)},
        {"query": Tensor(0, 3)},
        {"query": np.zeros((3, 3))},
        {"weights": np.ones(100)},
        {"weights": Tensor(99)},
        {"weights": Tensor(100, requires_grad=True)},
        {"bandwidth": "silverman"},
        {"bandwidth": np.ones(3)},
        {"device": "cuda:1"},
        {"device": "cpu"},
        {"bandwidth": True},
        {"backend_options": {"threads": 1}},
        {"method": "laplace", "negative": "renormalise"},
    ],
)
def test_calls_that_are_not_replayed(cuda, call):
    assert key(**call) is None


# --- recordings -----------------------------------------------------------------------------------------------------


class Graph:
    """Replayed, it makes its call again, by decisions that it has taken, and leaves the result where the first is."""

    def __init__(self, parts, log, name):
        self.parts, self.log, self.name, self.result = parts, log, name, None
        self.numbers = [torch.zeros(decisions.size, dtype=torch.float64) for _, decisions in parts]
        self.run()

    def run(self):
        self.taken, found = [], ()
        for (call, decisions), numbers in zip(self.parts, self.numbers):
            with noting(Taken(decisions)) as taken:
                found = (call(*found),)
                if decisions.size:
                    numbers.copy_(taken.numbers())
            assert not taken._left, "not all was looked at again"
            self.taken.append(taken)
        self.result = found[0] if self.result is None else _into(self.result, found[0])

    def replay(self):
        self.log.append(self.name)
        self.run()


def _into(kept, found):
    if isinstance(kept, torch.Tensor):
        return kept.copy_(found)
    if kept is not None and not isinstance(kept, (float, bool)):
        kept, found = (list(x.values()) if isinstance(x, dict) else getattr(x, "__dict__", x) for x in (kept, found))
        for x, y in zip(*(x.values() if isinstance(x, dict) else x for x in (kept, found))):
            _into(x, y)
    return kept


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

    def captured(recording, first, begun, second=None, then=None):
        parts = [(lambda: first(*recording._given), begun)]
        parts += [] if second is None else [(second, then)]
        graph = Graph(parts, log, "beginning" if second is None else "whole")
        log.append(f"record {graph.name}")
        noted = [
            capture.Numbers(tuple(decisions.made), taken, numbers, Event(), True)
            for (_, decisions), taken, numbers in zip(parts, graph.taken, graph.numbers)
        ]
        return capture.Graph(graph, graph.result, noted[0], noted[-1])

    stream = SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda side: contextlib.nullcontext())
    monkeypatch.setattr(torch, "_foreach_copy_", lambda to, given: [a.copy_(b) for a, b in zip(to, given)])
    monkeypatch.setattr(torch, "empty", lambda *shape, pin_memory=False, **how: empty(*shape, **how))
    monkeypatch.setattr(capture.Recording, "_captured", captured)
    replay.release()
    yield SimpleNamespace(log=log, waits=waits)
    replay.release()


@pytest.fixture
def replays():
    return replay.Replays()


X = torch.arange(1.0, 6.0, dtype=torch.float64)[:, None]


# --- whole calls ----------------------------------------------------------------------------------------------------


@pytest.fixture
def on_device(device, monkeypatch):
    """Tensors on the CPU stay tensors, looked at as those on a device are: all but the graphs is as on a GPU."""
    there = Origin(array_namespace(X), X.device, on_host=False)

    def ingested(train, query=None, weights=None, *, check_finite=True, device=None):
        log_weights = None if weights is None else arguments._weighed(weights)
        return Data(train, query, log_weights, "float64", there, unchecked=check_finite)

    def key_of(request, train, query, log):
        return request.method, train.shape, request.weights is not None, request.bandwidth

    monkeypatch.setattr(replay, "CALLS", 2)
    for module in (plan, glue):
        monkeypatch.setattr(module, "ingest", ingested)
    for module in (fitted, glue):
        monkeypatch.setattr(module, "only_enqueues", lambda info, device: True)
    monkeypatch.setattr(replay, "key_of", key_of)
    monkeypatch.setattr(glue, "_key", lambda fitted, query, what: (what, query.shape))
    monkeypatch.setattr(fitted.Fitted, "asked", lambda self, query: Argument("query", query, "float64", self.home))
    return device


def _set(seed, far=0, scale=1.0, at=400.0):
    x = np.random.default_rng(seed).normal(size=(40, 2)) * scale
    x[:far] += at + 40.0 * np.arange(far)[:, None]
    return torch.from_numpy(x)


def _weights(seed, zeros=0):
    w = np.random.default_rng(seed).random(40) + 0.5
    w[5 : 5 + zeros] = 0.0
    return torch.from_numpy(w)


X40 = _set(0)

#: Numbers of calls with one shape, of which different things may be decided.
CALLS = {
    "extents": [{"x": _set(0)}, {"x": _set(1, scale=3.0)}],
    "outliers": [{"x": _set(0, 1)}, {"x": _set(1, 3)}, {"x": _set(2)}],
    "outliers in the fast formula's sight": [{"x": _set(0, 1, at=60.0)}, {"x": _set(1, 2, at=60.0)}],
    "outliers farther than centres may be": [{"x": _set(0, 1, at=1e5)}, {"x": _set(1, 1, at=1e5)}],
    "weights": [{"x": _set(0), "weights": _weights(0)}, {"x": _set(1), "weights": _weights(1)}],
    "weights of zero": [{"x": _set(0), "weights": _weights(0, 2)}, {"x": _set(0), "weights": _weights(1, 3)}],
    "weights and outliers": [{"x": _set(0, 1), "weights": _weights(0)}, {"x": _set(1, 2), "weights": _weights(1, 1)}],
}


@pytest.mark.parametrize("same", [False, True])
@pytest.mark.parametrize("sets", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("method", ["kde", "sdkde", "laplace"])
def test_estimates_are_recorded_and_replayed_with_their_bits(method, sets, same, on_device, monkeypatch):
    options = {"method": method, "bandwidth": 0.5, "backend": "torch", "precision": "fast"}

    def estimate(x, **more):
        return sdkde_core.estimate(x, None if same else _set(9, 1, at=150.0)[:7], **options, **more)

    first = [estimate(**one) for one in sets]
    for _ in range(replay.CALLS + 1):
        for one, want in zip(sets, first):
            assert torch.equal(estimate(**one), want)
    assert not torch.equal(*first[:2])
    monkeypatch.setattr(replay.Replays, "record", None)  # nothing but replays from now on
    for i in range(3 * len(sets)):
        assert torch.equal(estimate(**sets[i // 3]), first[i // 3])
        assert torch.equal(estimate(**sets[i % len(sets)]), first[i % len(sets)])


@pytest.mark.parametrize("long", [0, 1 << 33])
@pytest.mark.parametrize("sets", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("backend", ["torch", "auto"])
def test_calls_are_answered_right_whatever_comes(backend, sets, long, on_device, monkeypatch):
    monkeypatch.setattr(replay, "LONG", long)
    records = [record for record in registry.records() if record.name == "torch"]
    monkeypatch.setattr(registry, "records", lambda: records)

    def estimate(x, **more):
        return sdkde_core.estimate(x, **more, bandwidth=0.5, backend=backend, precision="fast")

    first = [estimate(**one) for one in sets]
    for i in [*np.random.default_rng(0).integers(len(sets), size=60), *[0] * 4]:
        assert torch.equal(estimate(**sets[i]), first[i])
    assert "whole" in on_device.log


def test_weights_that_are_equal_are_not_replayed_for_others(on_device):
    sets = [{"weights": torch.ones(40)}, {"weights": _weights(1)}]
    options = {"bandwidth": 0.5, "backend": "torch", "precision": "fast"}
    first = [sdkde_core.estimate(X40, **one, **options) for one in sets]
    for _ in range(4 * replay.CALLS):
        for one, want in zip(sets, first):
            assert torch.equal(sdkde_core.estimate(X40, **one, **options), want)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("far", [0, 1])
@pytest.mark.parametrize("method", ["kde", "sdkde", "laplace"])
def test_prepared_sets_are_replayed_with_their_bits(method, far, weighted, on_device, monkeypatch):
    monkeypatch.setattr("sdkde_core.engine.columns.KEPT", 64)  # these graphs look for what true ones hold
    weights = _weights(0, 1) if weighted else None
    options = {"bandwidth": 0.5, "backend": "torch", "precision": "fast", "weights": weights}
    ready = sdkde_core.prepare(_set(0, far), method=method, **options)
    queries = [_set(1)[:7], _set(1, scale=3.0)[:7], _set(2, 1)[:7], _set(3, 2, at=100.0)[:7]]
    for ask in [ready.estimate] + [ready.grad_log_density] * (method != "laplace"):
        first = [ask(y) for y in queries]
        for _ in range(replay.CALLS + 1):
            for y, want in zip(queries, first):
                assert torch.equal(ask(y), want)
        with monkeypatch.context() as patch:
            patch.setattr(replay.Replays, "record", None)  # nothing but replays from now on
            for i in [0, 1, 2, 3, 0, 0, 0, 2, 2, 2, 3, 3, 1, 1, 3, 0]:
                assert torch.equal(ask(queries[i]), first[i])
    recordings = weakref.ref(next(iter(ready._fitted.replays.recordings.values())))
    sdkde_core.release_replays()
    gc.collect()
    assert recordings() is None
    assert torch.equal(ready.estimate(queries[0]), first[0]) or method != "laplace"
