"""The entry point: what the core knows before it imports anything heavy."""

from sdkde_core.protocol import TOLERANCES, AdvancedInfo, Reduction, Support, Work


def extent_limit(problem):
    """Return the R, in bandwidths, up to which expanded squares keep the precision.

    Each of the three products of length d in an exponent errs by at most d ε R² times its factor 1, ½ or ½, and their
    additions by at most 4 ε R²: δ = (2 d + 4) ε R² in all. That moves a log sum by δ, LAPLACE's sums by 2 δ, and
    a shift, which averages points up to 2 R apart, by δ R. A quarter of the tolerance leaves room for the rest.
    """
    per_square = (2 * problem.d + 4) * 2.0**-53
    budget = TOLERANCES[problem.precision][problem.reduction].absolute / 4
    power = 3 if problem.reduction is Reduction.MEAN else 2
    return (budget / per_square) ** (1 / power)


def supports(problem):
    """Decline what lies beyond the limit: the core then sums the points out there itself."""
    limit = extent_limit(problem)
    if problem.extent > limit:
        return Support(False, f"expanded squares hold up to {limit:.3g} bandwidths, not {problem.extent:.3g}")
    return Support(True, "expanded squares in float64")


def work(problem, config):
    """Return what the formulas do: a matrix product for the exponents, one more for MEAN's shift, six array operations.

    Their operands are too large for a cache: a dozen numbers a pair travel to memory and back.
    """
    products = 2 if problem.reduction is Reduction.MEAN else 1
    return Work(
        matrix_flops={"float64": 2.0 * products * problem.d * problem.pairs},
        scalar_flops=2.0 * 6.0 * problem.pairs,  # one in double precision counts as two
        exps=float(problem.pairs),
        bytes=8.0 * 12.0 * problem.pairs,
    )


INFO = AdvancedInfo(
    name="squares",
    protocol=(1, 0),
    implementation="squares_backend.backend:ExpandedSquares",
    devices=("cpu",),
    precisions=("fast", "high"),
    features=frozenset({"weights"}),
    requires_modules=("numpy",),
    install="pip install sdkde-squares",
    startup_seconds=0.002,
    supports=supports,
    extent_limit=extent_limit,
    work=work,
)
