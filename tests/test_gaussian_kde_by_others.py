"""SciPy's own tests of gaussian_kde, as installed with it, run against ours.

What fails stands in ``FAILS`` with the reason. It has to fail: a test that passes there is an error.
"""

import importlib.util
from pathlib import Path

import pytest

import sdkde_core

#: By the test's name, or what it begins with.
FAILS = {
    "test_kde_output_dtype[float128-": "extended precision is computed in float64, and the result says so",
}


def _tests():
    """The functions of SciPy's module, with ours where they say ``stats.gaussian_kde``; slow where SciPy says so."""
    spec = importlib.util.find_spec("scipy.stats.tests.test_kdeoth") if importlib.util.find_spec("scipy") else None
    if spec is None:
        pytest.skip("SciPy is not installed with its tests", allow_module_level=True)
    source = Path(spec.origin).read_text()
    assert source.count("stats.gaussian_kde(") > 20
    source = source.replace("stats.gaussian_kde", "gaussian_kde").replace("mark.xslow", "mark.slow")
    names = {"__name__": __name__, "gaussian_kde": sdkde_core.gaussian_kde}
    exec(compile(source, spec.origin, "exec"), names)
    return {name: value for name, value in names.items() if name.startswith("test_")}


globals().update(_tests())


@pytest.fixture(autouse=True)
def _expected(request):
    for name, reason in FAILS.items():
        if request.node.name.startswith(name):
            request.applymarker(pytest.mark.xfail(reason=reason, strict=True))
