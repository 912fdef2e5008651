"""The KeOps backend passes the suite that every backend runs, on the CPU and on a GPU where there is one.

KeOps compiles for every dimension and reduction, ten seconds each on a CPU: `make test` has what is in
test_keops_backend.py and test_pairs.py.
"""

import importlib.util

import pytest

from sdkde_core.testing import BackendConformance

if importlib.util.find_spec("pykeops") is None:  # which reads its folder's name when it is imported
    pytest.skip("needs pykeops", allow_module_level=True)
torch = pytest.importorskip("torch")


@pytest.mark.slow
class TestKeops(BackendConformance):
    backend = "keops"
    device = "cpu"
    dimensions = (3,)
    draws = 12


@pytest.mark.slow
class TestKeopsFull(BackendConformance):
    backend = "keops"
    device = "cpu"
    profile = "full"
    dimensions = (1, 3, 64)
    draws, pairs = 24, 100_000

    # The checks that do not depend on the profile are those of the class above.
    test_result_format = test_sizes = test_threads = None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestKeopsOnCuda(BackendConformance):
    backend = "keops"
    device = "cuda:0"
    profile = "full"
