"""The Fourier backend on PyTorch's devices passes the suite: as it is, and transforming wherever it can."""

from typing import ClassVar

import pytest

from sdkde_core.testing import BackendConformance

torch = pytest.importorskip("torch")


@pytest.mark.covering(1)  # a transform in three dimensions takes a second
class TestFourierTorchAlways(BackendConformance):
    backend = "fourier-torch"
    device = "cpu"
    options: ClassVar = {"always": True}
    dimensions = (2,)
    draws = 8
    slow = ("sizes", "threads", "leaks", "surroundings", "new_contents", "many_alive")

    @pytest.mark.covering(2)
    def test_tolerance(self, parameter):
        super().test_tolerance(parameter)


@pytest.mark.slow
class TestFourierTorch(BackendConformance):
    backend = "fourier-torch"
    device = "cpu"
    dimensions = (1, 2, 3)
    draws = 24


@pytest.mark.slow
class TestFourierTorchFull(BackendConformance):
    backend = "fourier-torch"
    device = "cpu"
    options: ClassVar = {"always": True}
    profile = "full"
    dimensions = (1, 2, 3)
    draws, pairs = 24, 60_000

    # The checks that do not depend on the profile are those of the class above.
    test_result_format = test_sizes = test_threads = None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestFourierTorchOnCuda(BackendConformance):
    backend = "fourier-torch"
    device = "cuda:0"
    options: ClassVar = {"always": True}
    profile = "full"
    dimensions = (1, 2, 3)
