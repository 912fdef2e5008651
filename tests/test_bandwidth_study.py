"""benchmarks/bandwidths.py: its densities, its integrals of the error, its search and its record; nothing is timed."""

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import sdkde_core
from sdkde_core.bandwidth.matrix import Bandwidth

FOLDER = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture(scope="module")
def study():
    """The modules of the benchmark, by name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        names = ["densities", "density_errors", "bandwidths", "step", "estimates"]
        names += [f"bandwidth_{part}" for part in ("data", "peers", "plots", "report")]
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})
    for name in names:
        sys.modules.pop(name, None)


def test_samples_are_of_the_density(study):
    """∫p² three ways: in closed form or on the grid, and as the mean of p over samples, within five standard errors."""
    rng = np.random.default_rng(1)
    for density in study.densities.DENSITIES:
        values = density.pdf(density.sample(rng, 4000))
        closed = not isinstance(density, study.densities.Function)
        if density.d <= 2:
            grid = study.density_errors.errors_of(density)
            jump = density.name == "exponential"  # half of a grid's step counts beyond it
            assert grid.weights @ grid.truth == pytest.approx(1, abs=1e-3 if jump else 2e-4), density.name
            square = grid.weights @ grid.truth**2
            if closed:
                assert density.square() == pytest.approx(square, rel=1e-6), density.name
        else:
            square = density.square()
        assert abs(values.mean() - square) < 5 * values.std() / np.sqrt(len(values)) + 1e-3 * square, density.name


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        *(("claw", "diagonal"), ("t3", "diagonal"), ("mixture-2", "full"), ("t3-2", "full")),
        pytest.param("t3-2", "diagonal", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("method", ["kde", "sdkde", "laplace"])
def test_the_grid_and_the_closed_form_agree(study, name, method, shape):
    density = study.densities.named(name)
    rng = np.random.default_rng(2)
    samples, held_out = density.sample(rng, 120), density.sample(rng, 4000)
    matrix = 0.15 * np.diag([1.0, 1.4][: density.d])
    if shape == "full":
        matrix[0, -1] = matrix[-1, 0] = 0.05
    ask = samples, method, Bandwidth.of(matrix, density.d), held_out
    grid = study.density_errors.errors_of(density).all(*ask)
    closed = study.density_errors.Closed(density).all(*ask)
    sampled = name == "t3-2" and shape == "full"  # its convolution with correlated normals is sampled
    assert closed.ise == pytest.approx(grid.ise, rel=0.02 if sampled else 2e-4)
    assert closed.l1 == pytest.approx(grid.l1, rel=0.1)
    assert closed.negative == pytest.approx(grid.negative, rel=0.1)
    assert closed.likelihood == grid.likelihood
    assert (closed.negative > 0) == (method == "laplace")


@pytest.mark.parametrize("d", [1, 2])
def test_errors_by_points_are_those_of_a_grid(study, d):
    grid = study.density_errors.errors_of(study.densities._random("mixture 0", d, 7000))
    law = study.estimates.laws(d, 7)["mixture 0"]
    x = law[0](np.random.default_rng(3), 300)
    values = sdkde_core.estimate(x, grid.points, method="kde", bandwidth="silverman")
    kl, ise = study.estimates.errors(law, x, "kde Silverman", [1])
    assert kl == pytest.approx(grid.weights @ (grid.truth * np.log(grid.truth / values)), rel=0.1)
    assert ise == pytest.approx(grid.weights @ (values - grid.truth) ** 2, rel=0.1)
