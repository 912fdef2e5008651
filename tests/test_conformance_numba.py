"""The Numba backend passes the suite that every backend runs."""

from typing import ClassVar

import pytest

from sdkde_core.testing import BackendConformance


@pytest.mark.covering(1, tolerance=2, limits=2, far_below=2, heap=2, not_a_number=2)
class TestNumba(BackendConformance):
    backend = "numba"
    draws = 26  # each of thirteen dimensions twice


@pytest.mark.covering(1)
class TestNumbaSkipping(BackendConformance):
    """Tiles left out wherever they can be."""

    backend = "numba"
    options: ClassVar = {"skip": True}
    dimensions = (3,)
    draws = 6
    slow = (
        *("declaration", "sizes", "result_format", "threads", "interrupts", "forked_child", "kernel"),
        *("state_reuse", "results_are_the_callers", "repeat", "leaks", "surroundings", "price"),
    )


@pytest.mark.slow
class TestNumbaSkippingFull(BackendConformance):
    backend = "numba"
    options: ClassVar = {"skip": True}
    profile = "full"
    dimensions = (1, 3, 16)


@pytest.mark.slow
class TestNumbaFull(BackendConformance):
    backend = "numba"
    profile = "full"
