"""Which calls may be replayed; the replays themselves are tested where there is a GPU (test_gpu.py)."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

import sdkde_core
from sdkde_core.choice import registry
from sdkde_core.estimator import graphs as replay
from sdkde_core.estimator.plan import rounded
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
    ],
)
def test_calls_that_are_not_replayed(cuda, call):
    assert key(**call) is None


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
