"""The Numba backend passes the suite that every backend runs."""

import pytest

from sdkde_core.testing import BackendConformance


@pytest.mark.covering(2)
class TestNumba(BackendConformance):
    backend = "numba"


@pytest.mark.slow
class TestNumbaFull(BackendConformance):
    backend = "numba"
    profile = "full"
