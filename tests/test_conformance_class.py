"""The pytest face of the suite: what a plugin's author sees."""

import pytest

pytest_plugins = "pytester"

TINY = """
from sdkde_core.testing import BackendConformance

class TestMine(BackendConformance):
    backend = "{backend}"
    dimensions = (2,)
    xfail = {xfail}
"""


def _run(pytester, backend="numpy", xfail="{}", *arguments):
    pytester.makepyfile(TINY.format(backend=backend, xfail=xfail))
    return pytester.runpytest_subprocess("-p", "no:cacheprovider", "-q", *arguments)


def test_a_class_with_a_name_is_a_whole_test_file(pytester):
    result = _run(pytester)
    counts = result.parseoutcomes()
    assert counts["passed"] > 100
    assert "failed" not in counts
    names = _run(pytester, "numpy", "{}", "--collect-only").outlines
    assert any(line.endswith("::TestMine::test_tolerance[high-mean-tails-d2-e100]") for line in names)


def test_a_backend_that_is_not_there_fails(pytester):
    result = _run(pytester, backend="absent")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["*backend 'absent' is not installed*"])
    assert "passed" not in result.parseoutcomes() or result.parseoutcomes()["passed"] == 1


def test_expected_failures_are_strict(pytester):
    result = _run(pytester, xfail='{"repeat[high-mean]": "never fails"}')
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
    result = _run(pytester, "numpy", xfail, "-k", "expected_failures")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines([f"*{message}*"])


def test_nothing_executed_is_a_failure(pytester):
    pytester.makepyfile(
        TINY.format(backend="numpy", xfail="{}").replace("dimensions", 'device = "cuda:0"\n    dimensions')
    )
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "-q")
    result.stdout.fnmatch_lines(["*runs on no device here, so nothing was executed*"])
    assert result.parseoutcomes().get("passed", 0) <= 1
