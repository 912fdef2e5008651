"""What the suite does not ask: JAX's settings, which are the user's, its platforms, and how often XLA compiles."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sdkde_jax import info, tiles

import sdkde_core
from sdkde_core.protocol import Problem, Reduction

X = np.random.default_rng(0).normal(size=(300, 2))


def test_the_users_jax_stays_as_it_was():
    sdkde_core.estimate(X, backend="jax", precision="float64")
    assert not jax.config.jax_enable_x64
    assert jnp.zeros(1).dtype == "float32"


def test_few_shapes_are_compiled():
    tiles.add_tile.clear_cache()
    for n in (257, 300, 1000, 2500):
        points = np.random.default_rng(n).normal(size=(n, 2))
        sdkde_core.estimate(points, points[: n // 2], method="kde", bandwidth=0.5, backend="jax")
    assert tiles.add_tile._cache_size() <= 3


def test_each_formula_is_used():
    def formula(precision, extent, reduction=Reduction.LOG_SUM):
        return info.formula(Problem(reduction, 100, 100, 3, precision=precision, extent=extent))

    assert formula("fast", 10.0) == ("products", "float32")
    assert formula("high", 10.0) == formula("fast", 10.0, Reduction.MEAN) == ("products", "float64")
    assert formula("fast", 1e9) == formula("float64", 300.0) == ("differences", "float64")


def test_a_platform_that_is_not_there_is_named():
    with pytest.raises(sdkde_core.protocol.BackendUnavailable, match="no platform 'nope'"):
        sdkde_core.estimate(X, backend="jax", backend_options={"platform": "nope"})
    with pytest.raises(ValueError, match="platform is 1; pass the name"):
        sdkde_core.estimate(X, backend="jax", backend_options={"platform": 1})


def test_listing_imports_no_jax():
    code = "import sys, sdkde_core; sdkde_core.backends(); sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
