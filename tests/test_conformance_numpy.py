"""The NumPy backend passes the suite that every backend runs."""

import pytest

from sdkde_core.testing import BackendConformance


@pytest.mark.covering(1, tolerance=2, limits=2, far_below=2, heap=2, not_a_number=2)
class TestNumpy(BackendConformance):
    backend = "numpy"
    draws = 26  # each of thirteen dimensions twice
    slow = ("price[d3]",)


@pytest.mark.slow
class TestNumpyFull(BackendConformance):
    backend = "numpy"
    profile = "full"
