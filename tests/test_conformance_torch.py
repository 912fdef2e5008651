"""The PyTorch backend passes the suite that every backend runs, on the CPU and on a GPU where there is one."""

import functools
from dataclasses import replace

import pytest

pytest.importorskip("torch")

import torch
from sdkde_torch import backend, devices

from sdkde_core.choice import registry
from sdkde_core.testing import BackendConformance
from sdkde_core.testing.checks import Target


@pytest.mark.covering(1, tolerance=2, limits=2, far_below=2, heap=2, not_a_number=2)
class TestTorch(BackendConformance):
    backend = "torch"
    device = "cpu"
    draws = 26  # each of thirteen dimensions twice
    slow = ("price[d1]",)


@pytest.mark.slow
class TestTorchFull(BackendConformance):
    backend = "torch"
    device = "cpu"
    profile = "full"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestTorchOnCuda(BackendConformance):
    backend = "torch"
    device = "cuda:0"
    profile = "full"


@pytest.fixture
def no_float64(monkeypatch):
    """The CPU passed off as a device without float64: "mps", whose tensors the core keeps on the host."""
    pretend = devices.Place(torch.device("cpu"), False)
    real = devices.place
    monkeypatch.setattr(backend, "place", lambda device: pretend if device == "mps" else real(device))


class _WithoutFloat64(BackendConformance):
    backend = "torch"

    @pytest.fixture(autouse=True)
    def _pretend(self, no_float64):
        """For every check."""

    @classmethod
    @functools.cache
    def _targets(cls):
        info = registry.find("torch").info
        return [Target(replace(info, precisions=("fast", "high")), info.load(), "mps")]


@pytest.mark.slow  # its 400 checks would take a minute of the ten that `make test` may
class TestWithoutFloat64(_WithoutFloat64):
    """The formulas of float32 alone, with everything packed from float64 on the host."""

    dimensions = (1, 3, 17)


@pytest.mark.slow
class TestWithoutFloat64Full(_WithoutFloat64):
    profile = "full"
    draws = 40
