"""The PyTorch backend passes the suite that every backend runs, on the CPU and on a GPU where there is one."""

import pytest
import torch

from sdkde_core.testing import BackendConformance


class TestTorch(BackendConformance):
    backend = "torch"
    device = "cpu"


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
