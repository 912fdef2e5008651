"""The NumPy backend passes the suite that every backend runs."""

import pytest

from sdkde_core.testing import BackendConformance


@pytest.mark.covering(2)
class TestNumpy(BackendConformance):
    backend = "numpy"


@pytest.mark.slow
class TestNumpyFull(BackendConformance):
    backend = "numpy"
    profile = "full"
