"""The Fourier backend passes the suite that every backend runs: as it is, and transforming wherever it can."""

from typing import ClassVar

import pytest

from sdkde_core.testing import BackendConformance

pytest.importorskip("finufft")
torch = pytest.importorskip("torch")


class TestFourier(BackendConformance):
    backend = "fourier"


class TestFourierAlways(BackendConformance):
    backend = "fourier"
    options: ClassVar = {"always": True}


@pytest.mark.slow
class TestFourierFull(BackendConformance):
    backend = "fourier"
    options: ClassVar = {"always": True}
    profile = "full"
    dimensions = (1, 2, 3)


class TestFourierTorch(BackendConformance):
    backend = "fourier-torch"
    device = "cpu"


class TestFourierTorchAlways(BackendConformance):
    backend = "fourier-torch"
    device = "cpu"
    options: ClassVar = {"always": True}


@pytest.mark.slow
class TestFourierTorchFull(BackendConformance):
    backend = "fourier-torch"
    device = "cpu"
    options: ClassVar = {"always": True}
    profile = "full"
    dimensions = (1, 2, 3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestFourierTorchOnCuda(BackendConformance):
    backend = "fourier-torch"
    device = "cuda:0"
    options: ClassVar = {"always": True}
    profile = "full"
    dimensions = (1, 2, 3)
