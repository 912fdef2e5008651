"""The Fourier backends pass the suite that every backend runs: as they are, and transforming wherever they can."""

from typing import ClassVar

import pytest

from sdkde_core.testing import BackendConformance

pytest.importorskip("finufft")
torch = pytest.importorskip("torch")


@pytest.mark.covering(1)
class TestFourier(BackendConformance):
    backend = "fourier"
    slow = (
        *("drawn[10-d1-p400000]", "drawn[17-d3-p400000]", "leaks", "price[d3]"),  # each as long as the 38 others
        *("surroundings[mean]", "surroundings[laplace]"),
    )


@pytest.mark.covering(1, tolerance=2)  # a transform in three dimensions takes a second
class TestFourierAlways(BackendConformance):
    backend = "fourier"
    options: ClassVar = {"always": True}
    dimensions = (2,)
    draws = 8
    slow = (
        *("sizes", "result_format", "threads", "surroundings", "thread_counts"),
        *("leaks", "new_contents", "many_alive", "state_reuse", "results_are_the_callers[float64-laplace]"),
        "repeat[float64-laplace-n20000-m20]",
    )


@pytest.mark.slow
class TestFourierTorchAlways(TestFourierAlways):
    backend = "fourier-torch"
    device = "cpu"
    slow = ("sizes", "threads", "leaks", "surroundings", "new_contents", "many_alive", "repeat")


@pytest.mark.slow
class TestFourierTorch(BackendConformance):
    backend = "fourier-torch"
    device = "cpu"
    dimensions = (1, 2, 3)
    draws = 24


@pytest.mark.slow
class TestFourierFull(BackendConformance):
    backend = "fourier"
    options: ClassVar = {"always": True}
    profile = "full"
    dimensions = (1, 2, 3)
    draws, pairs = 24, 60_000

    # The checks that do not depend on the profile are those of the class above.
    test_result_format = test_sizes = test_threads = None


class TestFourierTorchFull(TestFourierFull):
    backend = "fourier-torch"
    device = "cpu"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestFourierTorchOnCuda(BackendConformance):
    backend = "fourier-torch"
    device = "cuda:0"
    options: ClassVar = {"always": True}
    profile = "full"
    dimensions = (1, 2, 3)
