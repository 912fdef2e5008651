"""The Fourier backend passes the suite that every backend runs: as it is, and transforming wherever it can."""

from typing import ClassVar

import pytest

from sdkde_core.testing import BackendConformance

pytest.importorskip("finufft")


@pytest.mark.covering(2)
class TestFourier(BackendConformance):
    backend = "fourier"

    @pytest.mark.covering(1)
    def test_threads(self, parameter):
        super().test_threads(parameter)

    @pytest.mark.covering(1)
    def test_multi_scale(self, parameter):
        super().test_multi_scale(parameter)

    @pytest.mark.covering(1)
    def test_exclude_self(self, parameter):
        super().test_exclude_self(parameter)


@pytest.mark.covering(1)  # a transform in three dimensions takes a second
class TestFourierAlways(BackendConformance):
    backend = "fourier"
    options: ClassVar = {"always": True}
    dimensions = (2,)
    draws = 8

    @pytest.mark.covering(2)
    def test_tolerance(self, parameter):
        super().test_tolerance(parameter)

    @pytest.mark.slow
    def test_sizes(self, parameter):
        super().test_sizes(parameter)

    @pytest.mark.slow
    def test_result_format(self, parameter):
        super().test_result_format(parameter)

    @pytest.mark.slow
    def test_expected_rows(self, parameter):
        super().test_expected_rows(parameter)

    @pytest.mark.slow
    def test_multi_scale(self, parameter):
        super().test_multi_scale(parameter)

    @pytest.mark.slow
    def test_exclude_self(self, parameter):
        super().test_exclude_self(parameter)

    @pytest.mark.slow
    def test_threads(self, parameter):
        super().test_threads(parameter)


@pytest.mark.slow
class TestFourierFull(BackendConformance):
    backend = "fourier"
    options: ClassVar = {"always": True}
    profile = "full"
    dimensions = (1, 2, 3)
