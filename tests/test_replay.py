"""Which calls are replayed, and when, with graphs that run their call again; test_gpu.py has CUDA's."""

import contextlib
import gc
import math
import sys
import threading
import warnings
import weakref
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from array_api_compat import array_namespace

import sdkde_core
from sdkde_core import api
from sdkde_core.arrays import Argument, Data, Decisions, Origin, Taken, arguments, look, noting, rounded
from sdkde_core.choice import registry
from sdkde_core.engine.outliers import SPLIT_SHARE, outlier_share
from sdkde_core.estimator import batches, fitted, plan
from sdkde_core.estimator import graphs as replay
from sdkde_core.estimator import recording as capture
from sdkde_core.estimator.request import Goal, Request
from sdkde_core.protocol import Problem, Reduction, Work


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


def test_streams_and_the_environment_are_in_the_key(cuda, monkeypatch):
    before = key()
    cuda.cuda.current_stream = lambda device=None: SimpleNamespace(cuda_stream=8)
    assert key() != before
    cuda.cuda.current_stream = lambda device=None: SimpleNamespace(cuda_stream=7)
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


def test_how_large_a_call_is_recorded_follows_from_the_memory(cuda):
    call = {"train": Tensor(32768, 128), "query": Tensor(4096, 128)}
    assert key(**call) is not None
    cuda.cuda.get_device_properties = lambda device: SimpleNamespace(total_memory=16 << 30)
    assert key(**call) is None
    assert key(train=Tensor(16384, 128)) is not None  # 4 million coordinates on any device
    assert key(train=Tensor(16384, 129)) is None


@pytest.mark.parametrize("call", [{"device": "cuda"}, {"device": "cuda:0"}, {"bandwidth": np.float64(0.5)}])
def test_naming_the_tensors_device_or_a_number_of_numpys_changes_nothing(cuda, call):
    assert key(**call) is not None


def test_clipped_and_signed_calls_have_recordings_of_their_own(cuda):
    signed, clipped = (key(method="laplace", negative=negative) for negative in ("keep", "clip"))
    assert None not in (signed, clipped)
    assert signed != clipped
    assert key(method="laplace", negative="clip", log=True) is not None


def test_tensors_on_the_host_are_never_recorded(monkeypatch):
    monkeypatch.setattr(replay.Replays, "record", None)
    ready = sdkde_core.prepare(X, bandwidth=1.0)
    for _ in range(replay.CALLS + 2):
        sdkde_core.estimate(X, bandwidth=1.0)
        ready.estimate(X)


def test_rounded_extents_bound_and_repeat():
    for extent in (1e-300, 0.3, 1.0, 12.58, 1e4, 1e149):
        assert extent <= rounded(extent) <= 1.0906 * extent
    assert len({rounded(extent) for extent in np.geomspace(1.0, 1000.0, 5000)}) <= 8 * 10 + 1
    assert rounded(0.0) == 0.0
    assert rounded(12.4) == rounded(13.4)


def test_a_choice_is_by_shares_that_few_outliers_do_not_change():
    radii = np.ones(20_000)

    def share(far):
        return outlier_share(np.where(np.arange(20_000) < far, 9.0, 1.0), radii, 2.0)

    assert share(0) == 0.0
    for far in (1, 2, 3, 5, 19):
        assert 0.7 * far / 20_000 < share(far) < 1.42 * far / 20_000  # outliers may cost a thousand times as much
    for far in (40, 3000, 9999, 10_000, 10_001, 19_000):
        assert share(far) == pytest.approx(far / 20_000, rel=0.046)
    assert share(557) == share(560)
    assert share(40) > 0.0 and math.log2(share(3)).is_integer()
    assert share(10_000) <= SPLIT_SHARE < share(11_000)


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
    if not isinstance(kept, (float, bool)):
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


@pytest.fixture
def simple(device, replays):
    """``call(x, key)``: what an estimate does, with the largest point for the extent and their sum for the result.

    ``alike``: what is made of the extent, all of it by default.
    """

    def first(x):
        look(lambda largest: rounded(largest) if largest < 1e9 else largest, x.max())
        return {"x": x.clone()}

    def call(x, key="key", alike=lambda extent: None):
        found = replays.play(key, x)
        if found is not None:
            return found
        device.log.append("ordinary")
        with noting(Decisions()) as noted:
            result = 2.0 * first(x)["x"].sum(dim=0)
        second = lambda begun: 2.0 * begun["x"].sum(dim=0)  # noqa: E731
        replays.record(key, (x,), noted.made, [], first, second, alike(noted.made[0]))
        return result

    return call


X = torch.arange(1.0, 6.0, dtype=torch.float64)[:, None]


def test_data_sets_of_one_shape_in_turn_are_replayed_without_waste(simple, device):
    sets = X, 3.0 * X
    for i in range(2000):
        if i == 2 * replay.CALLS:
            device.log.clear()
        assert torch.equal(simple(sets[i % 2]), 2.0 * sets[i % 2].sum(dim=0))
    assert device.log == ["beginning", "wait", "whole"] * (2000 - 2 * replay.CALLS)


def test_an_extent_is_recorded_when_it_has_come_often_itself(simple, device):
    for _ in range(replay.CALLS):
        simple(X)
    assert [x for x in device.log if x.startswith("record")] == ["record beginning", "record whole"]
    for _ in range(replay.CALLS - 1):
        simple(3.0 * X)
        simple(X)
    assert device.log.count("record whole") == 1
    simple(3.0 * X)
    assert (device.log.count("record beginning"), device.log.count("record whole")) == (1, 2)


def test_the_host_does_not_wait_where_the_last_two_extents_were_one(simple, device):
    for _ in range(replay.CALLS + 2):
        simple(X)
    device.log.clear()
    simple(X)
    assert device.log == ["whole", "wait"]
    simple(3.0 * X), device.log.clear()
    for _ in range(2):
        simple(X)
    assert device.log == ["beginning", "wait", "whole"] * 2
    simple(X)
    assert device.log[-2:] == ["whole", "wait"]


def test_an_extent_that_makes_no_difference_is_replayed_from_its_second_call_on(simple, device):
    def octave(extent):
        return np.ceil(np.log2(extent))

    for _ in range(replay.CALLS):
        simple(X, alike=octave)  # an extent of 5
    device.log.clear()
    for scale in (1.2, 1.5):
        for _ in range(2):
            assert torch.equal(simple(scale * X, alike=octave), 2.0 * scale * X.sum(dim=0))
    assert [x for x in device.log if x != "wait"] == ["beginning", "ordinary", "beginning", "whole"] * 2
    simple(X, alike=octave), device.log.clear()
    for scale in (1.0, 1.2, 1.5, 1.2, 1.0):
        assert torch.equal(simple(scale * X, alike=octave), 2.0 * scale * X.sum(dim=0))
    assert device.log == ["whole", "wait"] * 5, "extents differ, and what follows is known beforehand"
    for _ in range(replay.CALLS):
        simple(2.0 * X, alike=octave)
    assert device.log.count("record whole") == 1


def test_extents_are_forgotten_in_the_end(simple, replays):
    for i in range(capture.LATELY + replay.CALLS + 3):
        simple(2.0**i * X, alike=lambda extent: "all alike")
    (recording,) = replays.recordings.values()
    assert len(recording._alike) == capture.LATELY


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_is_not_replayed(simple, replays, value):
    for _ in range(replay.CALLS + 1):
        simple(X)
    wrong = X.clone()
    wrong[2] = value
    assert replays.play("key", wrong) is None
    assert replays.play("key", wrong) is None
    assert torch.equal(simple(X), 2.0 * X.sum(dim=0))


def test_recordings_are_bounded(simple, replays, device):
    for extent in range(capture.GRAPHS + 3):
        for _ in range(replay.CALLS + 1):
            simple(2.0**extent * X)
    (recording,) = replays.recordings.values()
    assert list(recording.graphs) == [((rounded(5.0 * 2.0**i),), ()) for i in range(3, capture.GRAPHS + 3)]
    for name in range(replay.RECORDINGS + 3):
        for _ in range(replay.CALLS + 1):
            simple(X, name)
    assert list(replays.recordings) == list(range(3, replay.RECORDINGS + 3))
    for i in range(400):
        simple((1.0 + i) * X, "many")
    assert len(replays._calls) <= 256


def test_more_calls_in_turn_than_are_kept_are_ever_less_recorded(simple, replays, device):
    names = range(replay.RECORDINGS + 1)
    for _ in range(64 * replay.CALLS):
        for name in names:
            simple(X, name)
    recorded = [entry for entry in device.log if entry == "record whole"]
    assert len(names) < len(recorded) <= 7 * len(names)  # 1 + 2 + … + 64 times CALLS calls


def test_what_was_worth_its_recording_is_recorded_again_at_once(simple, replays, device):
    for _ in range(5):
        for name in range(replay.RECORDINGS + 1):
            for _ in range(replay.CALLS + replay.WORTH):
                simple(X, name)
    assert device.log.count("ordinary") == 5 * (replay.RECORDINGS + 1) * replay.CALLS


def test_a_recording_that_was_forgotten_counts_as_none(simple, replays, device, monkeypatch):
    monkeypatch.setattr(capture, "LATELY", 2 * replay.RECORDINGS)
    names = range(3 * replay.RECORDINGS)
    for name in names:
        for _ in range(replay.CALLS + 1):
            simple(X, name)
    for name in names:
        for _ in range(4 * replay.CALLS):
            simple(X, name)
        assert device.log[-1] == "whole" or device.log[-2] == "whole"


def test_fewer_recordings_of_large_calls_are_kept(simple, replays, monkeypatch):
    monkeypatch.setattr(replay, "NUMBERS", 2)
    monkeypatch.setattr(replay, "_most", lambda device: X.numel())
    for name in range(replay.LARGEST + 3):
        for _ in range(replay.CALLS):
            simple(X, name)
    assert list(replays.recordings) == list(range(3, replay.LARGEST + 3))


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


def test_who_waits_for_the_device_keeps_nobody_else_and_release_takes_nothing_from_it(simple, replays, device):
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
    assert not replays.recordings
    go_on.set()
    thread.join()
    assert torch.equal(found[0], 2.0 * X.sum(dim=0))


def test_released_recordings_are_gone_and_are_made_again(simple, replays, device):
    for _ in range(replay.CALLS - 1):
        simple(X, "counted")
    for _ in range(replay.CALLS):
        simple(X)
    (recording,) = (weakref.ref(r) for r in replays.recordings.values())
    sdkde_core.release_replays()
    gc.collect()
    assert recording() is None
    device.log.clear()
    simple(X, "counted")
    for _ in range(replay.CALLS):
        simple(X)
    assert device.log == ["ordinary"] * (replay.CALLS + 1) + ["record beginning", "record whole"]
    simple(X)
    assert device.log[-1] == "whole"


def test_what_cannot_be_recorded_goes_on_as_before(simple, device, monkeypatch):
    monkeypatch.setattr(capture.Recording, "_captured", lambda recording, *parts: 1 / 0)
    for _ in range(replay.CALLS + 3):
        assert torch.equal(simple(X), 2.0 * X.sum(dim=0))
    assert device.log == ["ordinary"] * (replay.CALLS + 3)


# --- whole calls ----------------------------------------------------------------------------------------------------


@pytest.fixture
def on_device(device, monkeypatch):
    """Tensors on the CPU stay tensors, looked at as those on a device are: all but the graphs is as on a GPU."""
    there = Origin(array_namespace(X), X.device, on_host=False)

    def ingested(train, query=None, weights=None, *, check_finite=True, device=None):
        log_weights = None if weights is None else arguments._weighed(weights)
        return Data(train, query, log_weights, "float64", there, check_finite)

    def key_of(request, train, query, log):
        return request.method, train.shape, request.weights is not None, request.bandwidth

    monkeypatch.setattr(replay, "CALLS", 2)
    for module in (plan, api):
        monkeypatch.setattr(module, "ingest", ingested)
    for module in (fitted, api):
        monkeypatch.setattr(module, "only_enqueues", lambda info, device: True)
    monkeypatch.setattr(replay, "key_of", key_of)
    monkeypatch.setattr(batches, "_key", lambda fitted, query, wanted: (wanted.name, query.shape))
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


@pytest.mark.parametrize("long", [0, 1 << 33])
def test_points_that_are_far_for_another_backend_make_no_difference_to_replays(long, on_device, monkeypatch):
    monkeypatch.setattr(replay, "LONG", long)
    (record,) = (record for record in registry.records() if record.name == "torch")
    dear = {"work": lambda problem, config: Work(scalar_flops=1e13), "extent_limit": lambda problem: 12.0}
    info = replace(record.info, name="dear", **dear)
    records = [replace(record, name="dear", info=info), record]
    monkeypatch.setattr(registry, "records", lambda: records)
    sets = [X40.clone() for _ in range(4)]
    for i, x in enumerate(sets):
        x[: 1 + 2 * i] = torch.tensor([9.5, 0.0], dtype=torch.float64)
    request = Request(Goal.DENSITY, "sdkde", bandwidth=0.5, precision="fast")
    plans = [plan.plan(request, x) for x in sets]
    assert {found.choice.name for found in plans} == {"torch"}
    assert len({found.alike for found in plans}) == 1
    assert all(found.shares for found in plans)

    def estimate(x):
        return sdkde_core.estimate(x, bandwidth=0.5, precision="fast")

    first = [estimate(x) for x in sets]
    for _ in range(replay.CALLS + 2):
        for x in sets:
            estimate(x)
    on_device.log.clear()
    for i in np.random.default_rng(0).integers(4, size=40):
        assert torch.equal(estimate(sets[i]), first[i])
    assert set(on_device.log) == {"whole", "wait"}


@pytest.mark.parametrize("long", [False, True])
def test_what_only_leads_to_a_choice_may_differ(long, device, replays):
    """Sums by one of two backends, chosen by how many points are beyond 4; the extent is of 5."""

    def first(x):
        look(rounded, x.max())
        return {"x": x.clone()}

    def share(begun):
        return look(lambda far: far / 100.0, (begun["x"] > 4.0).sum(dtype=torch.float64))

    def second(begun, chosen):
        return (2.0 if chosen == "one" else 3.0) * begun["x"].sum(dim=0)

    def ask(begun):
        return "one" if share(begun) < 0.03 else "other"

    def call(x):
        found = replays.play("key", x)
        if found is not None:
            return found
        device.log.append("ordinary")
        with noting(Decisions()) as noted:
            begun = first(x)
            chosen = ask(begun)
            result = second(begun, chosen)

        def again(begun):
            share(begun)
            return second(begun, chosen)

        replays.record("key", (x,), noted.made[:1], noted.made[1:], first, again, chosen, long, 1)
        return result

    def points(far):
        return torch.cat([torch.full((far,), 5.0), torch.full((20 - far,), 1.0)])[:, None].double()

    def want(far):
        return (2.0 if far < 3 else 3.0) * points(far).sum(dim=0)

    for far in (1, 2, 1, 2, 2) * 2 + (1,) * replay.CALLS:
        assert torch.equal(call(points(far)), want(far))
    device.log.clear()
    for far in (1, 2) * 6:
        assert torch.equal(call(points(far)), want(far))
    assert set(device.log) == {"whole", "wait"}
    for far in np.random.default_rng(0).integers(1, 7, size=100):
        assert torch.equal(call(points(far)), want(far))
    device.log.clear()
    for far in (1, 6, 2, 5, 4, 1) if not long else (1, 2, 1, 2, 6, 5, 4, 4, 6):
        assert torch.equal(call(points(far)), want(far))
    assert device.log.count("ordinary") <= (2 if long else 0)
    if long:
        device.log.clear()
        for far in (1, 6) * 10:
            assert torch.equal(call(points(far)), want(far))
        assert device.log.count("whole") <= 2, "the host does not know which it will be"


def test_long_calls_are_not_replayed_in_vain(on_device, monkeypatch):
    monkeypatch.setattr(replay, "LONG", 0)
    sets, log = [_set(0) for _ in range(3)], on_device.log
    for i, x in enumerate(sets):
        x[: 2 + i] += 400.0  # one extent, other numbers of outliers

    def estimate(x):
        return sdkde_core.estimate(x, bandwidth=0.5, backend="torch", precision="fast")

    for _ in range(replay.CALLS + 2):
        for x in sets:
            estimate(x)
    log.clear()
    for i in range(12):
        estimate(sets[i % 3])
    assert log.count("beginning") == 12  # each needed, to know the extent
    assert "whole" not in log, "how many outliers there are differs from call to call"
    log.clear()
    for _ in range(4):
        estimate(sets[1])
    assert "whole" in log
    log.clear()
    for _ in range(4):
        estimate(sets[1])
    assert set(log) == {"whole", "wait"}, "one that comes again is replayed at once"


def _warned(ask, x):
    """What a call returns, and what it warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        got = ask(x)
    return got, [str(warning.message) for warning in caught]


@pytest.mark.parametrize("prepared", [False, True])
def test_logs_of_negative_densities_are_replayed_with_their_warnings(prepared, on_device, monkeypatch):
    options = {"method": "laplace", "bandwidth": 0.3, "backend": "torch", "precision": "fast"}
    ready, near = sdkde_core.prepare(X40, **options), X40[:7].clone()  # at a sample it is positive

    def ask(query):
        return ready.estimate(query, log=True) if prepared else sdkde_core.estimate(X40, query, log=True, **options)

    queries = [near, near + 0.5, near.flip(1).contiguous()]
    first = [_warned(ask, y) for y in queries]
    assert len({len(told) for _, told in first}) == 2, "one has a warning, and one has none"
    for _ in range(replay.CALLS + 1):
        for y in queries:
            _warned(ask, y)
    monkeypatch.setattr(replay.Replays, "record", None)  # nothing but replays from now on
    for y, (want, told) in zip(queries, first):
        got, again = _warned(ask, y)
        assert torch.equal(got.isnan(), want.isnan())
        assert torch.equal(got.nan_to_num(), want.nan_to_num())
        assert again == told == [f"the Laplace estimate is negative at {n} of 7 points, where its log is NaN; use "
            "log=False for the signed values, negative='clip', or method='sdkde', which is never negative"
            for n in [int(want.isnan().sum())] if n]  # fmt: skip


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


def test_what_a_recording_reads_of_a_prepared_set_outlives_that_sets_cache(on_device, monkeypatch):
    monkeypatch.setattr("sdkde_core.engine.columns.KEPT", 1)
    ready = sdkde_core.prepare(_set(0, 1), bandwidth=0.5, backend="torch", precision="fast", method="kde")
    near, far = _set(1)[:7], _set(2, 1)[:7]
    want = ready.estimate(near)
    for _ in range(replay.CALLS):
        assert torch.equal(ready.estimate(near), want)
    (recording,) = ready._fitted.replays.recordings.values()
    (graph,) = recording.graphs.values()
    assert graph.then.taken.kept
    ready.estimate(far)  # drops what was packed for the others
    assert not set(map(id, ready._fitted._packed[graph.then.taken.kept[0].problem.reduction]._states.values())) & set(
        map(id, graph.then.taken.kept)
    )


def test_what_goes_on_otherwise_than_taken_for_granted_is_not_answered_by_that(device, replays, monkeypatch):
    """The first look is the same, and the second one, within the second graph, is not."""

    def first(x):
        look(lambda largest: rounded(largest), x.max())
        return {"x": x.clone()}

    def second(begun):
        return look(int, (begun["x"] > 2.0).sum()) * begun["x"]

    def call(x):
        found = replays.play("key", x)
        if found is not None:
            return found
        with noting(Decisions()) as noted:
            result = second(first(x))
        replays.record("key", (x,), noted.made[:1], noted.made[1:], first, second)
        return result

    one, two = X, X.clone()
    two[1] = 2.5
    for _ in range(replay.CALLS):
        assert torch.equal(call(one), 3 * one)
    assert torch.equal(call(one), 3 * one)
    for _ in range(replay.CALLS):
        device.log.clear()
        assert replays.play("key", two) is None
        assert "whole" in device.log
        assert torch.equal(call(two), 4 * two)
    monkeypatch.setattr(replay.Replays, "record", None)  # each has a graph
    assert torch.equal(call(two), 4 * two) and torch.equal(call(one), 3 * one) and torch.equal(call(two), 4 * two)


@pytest.mark.parametrize("variant", [lambda problem: 1 / 0, lambda problem: [1.0]])
def test_a_plugin_that_does_not_tell_what_it_makes_of_extents_is_recorded_by_them(variant):
    info = replace(registry.find("numpy").info, variant=variant)
    asked = Problem(Reduction.LOG_SUM, 10, 10, 2, extent=3.0)
    found = [plan._but_for_the_extent(info, (replace(asked, extent=extent),)) for extent in (3.0, 3.0, 4.0)]
    assert found[0] == found[1] != found[2]
