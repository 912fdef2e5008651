"""The paper's tables, through the public face, by the data and errors of benchmarks/."""

import numpy as np
import of_benchmarks  # noqa: F401 - makes the package importable
import pytest

import sdkde_core
from benchmarks import metrics, problems, published

METHODS = ("kde", "sdkde", "laplace")


def test_one_dimensional_oracle():
    """Mean integrated squared error on a mixture of three normals, to every digit given."""
    for n, want in published.ORACLE_1D.items():
        errors = []
        for oracle in problems.oracle_1d(n):
            how = {"bandwidth": "silverman", "precision": "float64"}
            densities = [sdkde_core.estimate(oracle.x, oracle.y, method=m, **how) for m in METHODS]
            errors.append([metrics.against_truth(p, oracle)["mise"] for p in densities])
        assert (np.abs(np.mean(errors, axis=0) - want) <= 5.01e-7).all(), f"n = {n}"  # half a unit of the last digit


def test_the_true_densities_integrate_to_one():
    oracle = problems.oracle_1d(128)[0]
    assert oracle.weights @ oracle.truth == pytest.approx(1, abs=1e-6)
    wide = problems.oracle_16d(
        50, 0, m=20_000, d=1
    )  # queries are drawn from it: their inverse densities tell the range
    inside = np.abs(wide.y[:, 0]) < 1.5
    assert (1 / wide.truth[inside]).sum() / 20_000 == pytest.approx(3, rel=0.05)


#: Half a unit of the last digit given: MISE × 1e6, MIAE.
HALF = np.array([[0.05, 0.05, 0.005], [0.005, 0.005, 0.005]])


@pytest.mark.slow
@pytest.mark.parametrize("n", [3_000, 10_000])
def test_sixteen_dimensional_oracle(n):
    """Errors on a mixture of eight normals in 16 dimensions, within the digits given."""
    found = []
    for seed in (0, 1, 2):
        oracle = problems.oracle_16d(n, seed)
        densities = [sdkde_core.estimate(oracle.x, oracle.y, method=m, bandwidth="silverman-iso") for m in METHODS]
        densities[2] = np.maximum(densities[2], 1e-30)
        errors = [metrics.against_truth(p, oracle) for p in densities]
        found.append([[e["mise"] * 1e6 for e in errors], [e["miae"] for e in errors]])
    assert (abs(np.mean(found, axis=0) - published.ORACLE_16D[n]) <= HALF).all()
