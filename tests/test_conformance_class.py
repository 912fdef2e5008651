"""The pytest face of the suite: what a plugin's author sees."""

import pytest
import scipy.stats  # noqa: F401 - modules that a run of pytest within this process imports first are dropped at its end
from sdkde_numpy.backend import NumpyBackend

from sdkde_core.protocol import BackendInfo
from sdkde_core.testing import BackendConformance

pytest_plugins = "pytester"

TINY = """
from sdkde_core.testing import BackendConformance

class TestMine(BackendConformance):
    backend = "{backend}"
    dimensions = (2,)
    draws = 3
    xfail = {xfail}
"""

#: Few of the hundreds of checks: two that ask the backend, and the one that asks for reasons.
SOME = "repeat or state_reuse or are_real_and_have_reasons"


@pytest.fixture(autouse=True)
def _alone(monkeypatch):
    """Other packages' plugins are imported anew in every run within this process."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")


def _run(pytester, backend="numpy", xfail="{}", *arguments):
    pytester.makepyfile(TINY.format(backend=backend, xfail=xfail))
    return pytester.runpytest_inprocess("-p", "no:cacheprovider", "-q", *arguments)


@pytest.mark.slow
def test_a_class_with_a_name_is_a_whole_test_file(pytester):
    result = _run(pytester, "numpy", "{}", "-vv")
    counts = result.parseoutcomes()
    assert counts["passed"] > 100
    assert "failed" not in counts
    assert any("::TestMine::test_tolerance[high-mean-tails-d2-e100] PASSED" in line for line in result.outlines)
    assert any("::TestMine::test_drawn[2-d2-p400000] PASSED" in line for line in result.outlines)


def test_a_backend_that_is_not_there_is_one_failure(pytester):
    result = _run(pytester, "absent", "{}", "-rs")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    counts = result.parseoutcomes()
    assert (counts["failed"], counts["passed"]) == (1, 1)
    assert "errors" not in counts
    result.stdout.fnmatch_lines(["*backend 'absent' is not installed*", "*one check has failed for all*"])


def test_a_missing_method_is_one_failure(pytester, monkeypatch):
    lacking = type("Lacking", (), {"probe": NumpyBackend.probe, "reduce": NumpyBackend.reduce})
    monkeypatch.setattr(BackendInfo, "load", lambda info, options=None: lacking())
    result = _run(pytester, "numpy", "{}", "-k", SOME)
    counts = result.parseoutcomes()
    assert (counts["failed"], counts["passed"]) == (1, 1)
    result.stdout.fnmatch_lines(["*has no method 'prepare'*"])


def test_expected_failures_are_strict_and_need_a_reason_and_a_check(pytester):
    expected = {"repeat[high-mean]": "never fails", "options": ""}
    result = _run(pytester, "numpy", repr(expected), "-k", "repeat or have_reasons")
    result.stdout.fnmatch_lines(["*xfail[[]'options'[]] has no reason*", "*XPASS(strict)*never fails*"])
    mistyped = type("TestMine", (BackendConformance,), {"backend": "numpy", "xfail": {"repeat[high-median]": "typo"}})
    with pytest.raises(AssertionError, match="is no check of this backend"):
        mistyped().test_expected_failures_are_real_and_have_reasons()


def test_nothing_executed_is_a_failure(pytester):
    pytester.makepyfile(
        TINY.format(backend="numpy", xfail="{}").replace("dimensions", 'device = "cuda:0"\n    dimensions')
    )
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", "-q", "-k", SOME)
    result.stdout.fnmatch_lines(["*runs on no device here, so nothing was executed*"])
    counts = result.parseoutcomes()
    assert (counts["failed"], counts["passed"]) == (1, 1)
