"""The entry point: what the core knows before it imports anything heavy."""

import math

from sdkde_core.protocol import TOLERANCES, BackendInfo, Reduction, Support, Work

UNIT_ROUNDOFF = {"float32": 2.0**-24, "float64": 2.0**-53}


def product_limit(problem, dtype):
    """Return the extent R, in bandwidths, up to which expanded squares in a dtype keep the precision.

    With unit roundoff ε, each of the three products of length d errs by ε R² √d/3, times its factor 1, ½ or ½, and
    what adds them up by ε R² 3/2: standard deviations, as roundings are independent. Four times their sum is at most
    δ = 4 ε R² (√d/2 + 2). That moves a log sum by δ, LAPLACE's sums by 2 δ, and a shift, a mean of points within R of
    its middle, by δ R. Half of the tolerance is for that.
    """
    per_square = 4.0 * UNIT_ROUNDOFF[dtype] * (0.5 * math.sqrt(problem.d) + 2.0)
    ratio = 0.5 * TOLERANCES[problem.precision][problem.reduction].absolute / per_square
    if problem.reduction is Reduction.MEAN:
        return ratio ** (1 / 3)
    return math.sqrt(ratio / 2 if problem.reduction is Reduction.LAPLACE else ratio)


def extent_limit(problem):
    """Return where products end, in float64."""
    return product_limit(problem, "float64")


def formula(problem):
    """Return how exponents are computed, and in which dtype: the fastest way that keeps the precision.

    In float32 the log weights of some problems would cost the digits that the exponents need, and a shift would be
    right up to three bandwidths.
    """
    single = problem.precision == "fast" and problem.reduction is not Reduction.MEAN
    if single and "weights" not in problem.requires and problem.extent <= product_limit(problem, "float32"):
        return "products", "float32"
    return "products" if problem.extent <= extent_limit(problem) else "differences", "float64"


def supports(problem):
    """Take every problem; people read the reason in ``explain``."""
    return Support(True, "JAX, {} in {}".format(*formula(problem)))


def work(problem, config):
    """Return what the formulas do for a pair; one operation in double precision counts as two.

    Products: one of length d for the exponent, another for MEAN's shift. Differences: four operations a dimension, as
    many again for the shift. Besides some seven for the maximum, the sums and what is left out: they fit the times of
    two cores.
    """
    how, dtype = formula(problem)
    double, twice = 1.0 if dtype == "float32" else 2.0, 2.0 if problem.reduction is Reduction.MEAN else 1.0
    products = {dtype: 2.0 * twice * problem.d * problem.pairs} if how == "products" else {}
    each = 7.0 + (0.0 if products else 4.0 * twice * problem.d)
    return Work(
        matrix_flops=products,
        scalar_flops=double * each * problem.pairs,
        exps=double * problem.pairs,
        bytes=8.0 * (problem.m + problem.n) * (problem.d + 2),
        launches=100 + 20 * math.ceil(problem.pairs / 2**20),
    )


def compile_seconds(problem):
    """XLA compiles a tile for the dimension, the reduction, the formula, and one of eight shapes."""
    return 0.2


INFO = BackendInfo(
    name="jax",
    protocol=(1, 0),
    implementation="sdkde_jax.backend:JaxBackend",
    devices=("cpu",),
    precisions=("fast", "high", "float64"),
    features=frozenset({"weights"}),
    requires_modules=("jax",),
    install="pip install 'jax[cpu]'",
    startup_seconds=0.8,
    supports=supports,
    extent_limit=extent_limit,
    work=work,
    compile_seconds=compile_seconds,
)
