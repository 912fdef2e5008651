"""The pytest face of the suite: what a plugin's author sees."""

import pytest
from sdkde_numpy.backend import NumpyBackend

from sdkde_core.protocol import BackendInfo

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


@pytest.mark.parametrize("method", ["probe", "prepare", "reduce"])
def test_a_missing_method_is_one_failure(pytester, monkeypatch, method):
    names = {"probe", "prepare", "reduce"} - {method}
    lacking = type("Lacking", (), {name: getattr(NumpyBackend, name) for name in names})
    monkeypatch.setattr(BackendInfo, "load", lambda info, options=None: lacking())
    result = _run(pytester, "numpy", "{}", "-k", SOME)
    counts = result.parseoutcomes()
    assert (counts["failed"], counts["passed"]) == (1, 1)
    result.stdout.fnmatch_lines([f"*has no method '{method}'*"])


def test_expected_failures_are_strict(pytester):
    result = _run(pytester, "numpy", '{"repeat[high-mean]": "never fails"}', "-k", "repeat")
    assert result.parseoutcomes()["failed"] == 1
    result.stdout.fnmatch_lines(["*XPASS(strict)*never fails*"])


@pytest.mark.parametrize(
    ("xfail", "message"),
    [
        ('{"repeat[high-mean]": ""}', "has no reason"),
        ('{"repeat[high-median]": "typo"}', "is no check of this backend"),
    ],
)
def test_expected_failures_need_a_reason_and_a_check(pytester, xfail, message):
    result = _run(pytester, "numpy", xfail, "-k", "are_real_and_have_reasons")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines([f"*{message}*"])


def test_nothing_executed_is_a_failure(pytester):
    pytester.makepyfile(
        TINY.format(backend="numpy", xfail="{}").replace("dimensions", 'device = "cuda:0"\n    dimensions')
    )
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", "-q", "-k", SOME)
    result.stdout.fnmatch_lines(["*runs on no device here, so nothing was executed*"])
    counts = result.parseoutcomes()
    assert (counts["failed"], counts["passed"]) == (1, 1)
