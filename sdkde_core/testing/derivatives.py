"""The check of the feature ``"grad"``: a backend's derivatives, beside those of the definition by autograd."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from sdkde_core.arrays import detached, to_host
from sdkde_core.plugin import each, reduce_pass
from sdkde_core.protocol import TOLERANCES, Columns, Partial, Problem, Reduction

from . import problems
from .problems import Array, Case
from .target import Target, within

__all__ = ["grad"]


def grad(target: Target, parameter: str) -> None:
    """Derivatives by queries, points and weights, of zero weights too, whichever of them require grad.

    Like a log sum a derivative is a sum of terms with the errors of their φ_ij, if of several with different signs: it
    may be off by ten tolerances of a log sum, relative to the largest one.
    """
    precision, reduction = parameter.split("-")
    allowed = 10.0 * TOLERANCES[precision][Reduction.LOG_SUM].absolute
    differentiated = {"log_sum": ["log_sum"], "mean": ["log_sum", "shift"], "laplace": ["signed"]}[reduction]
    for kind in ("near", "weights", "apart", "far"):
        case = _make(kind)
        if kind == "weights" and "weights" not in target.info.features:
            continue
        for same in (False, True):
            problem = target.problem(case, reduction, precision, same=same, requires={"grad"})
            leaves = ["points"] + ["queries"] * (not same) + ["weights"] * (kind == "weights")
            for of in differentiated:
                if kind == "far" and of == "shift":  # there the distance multiplies what rounding makes of its shares
                    continue
                want = _derivatives(target, problem, case, of, leaves, by_definition=True)[1]
                for chosen in dict.fromkeys([(*leaves,), *((leaf,) for leaf in leaves)]):
                    partial, got = _derivatives(target, problem, case, of, chosen)
                    within(problem, partial, problems.truth(case, same=same), kind)
                    for leaf in chosen:
                        off = abs(got[leaf] - want[leaf]).max() / abs(want[leaf]).max()
                        assert off <= allowed, (
                            f"{kind}{', same' * same}: {of} by {leaf}, with grad of {', '.join(chosen)}: off by "
                            f"{off:.3g} of the largest derivative, allowed {allowed:.3g}"
                        )


def _make(kind: str, n: int = 61, m: int = 23, d: int = 3) -> Case:
    """Make a case in which every row has many columns that matter.

    ``"near"``: within a few bandwidths. ``"weights"``: a fifth of the weights zero. ``"apart"``: two clusters 10⁴
    bandwidths apart, as nothing is split off. ``"far"``: points several times over, rows 10⁹ bandwidths from all.
    """
    case = problems.make("mixture", n, m, d, 4.0)
    if kind == "weights":
        weights = np.random.default_rng(0).gamma(1.0, size=n)
        weights[::5] = 0.0
        with np.errstate(divide="ignore"):
            return replace(case, log_weights=np.log(weights / weights.sum()))
    if kind == "apart":
        for x in (case.points, case.queries):
            x[::2, 0] += 1e4
    if kind == "far":
        case.points[n // 4 :] = case.points[np.arange(n // 4, n) % (n // 4)]
        case.queries[::4] *= 1e9
    return case


def _derivatives(
    target: Target, problem: Problem, case: Case, of: str, leaves: Any, by_definition: bool = False
) -> tuple[Partial, dict[str, Array]]:
    """Return a backend's result, and the derivatives of its sum with random factors by what requires grad.

    ``by_definition``: those of direct differences. Of L_i / M_i the M_i are constants.
    """
    give = target.give
    given = {"points": give(case.points.copy()), "queries": give(case.queries.copy())}
    if "weights" in problem.requires:
        given["weights"] = give(np.exp(case.log_weights))
    for name in leaves:
        given[name].requires_grad_()
    rows = given["points"] if problem.same else given["queries"]
    if by_definition:
        partial, result = Partial(None), _definition(rows, given["points"], given.get("weights", 1.0), of)
    else:
        columns = Columns(given["points"], give(case.log_weights), weights=given.get("weights"))
        partial = reduce_pass(target.backend, target.info, problem, columns, None if problem.same else rows)
        result = getattr(partial, of, None)
        if of == "signed":
            result = partial.sign.detach() * (partial.log_magnitude - partial.log_sum.detach()).exp()
    assert result is not None and result.requires_grad, f"{of} is not attached to {', '.join(leaves)}"
    result = result.reshape(problem.m, -1)
    factors = np.random.default_rng(1).uniform(0.5, 1.5, tuple(result.shape))
    (result * give(factors)).sum().backward()
    for name in leaves:
        assert given[name].grad is not None, f"{of} has no derivative by {name}"
    return each(partial, lambda x: to_host(detached(x))), {name: to_host(given[name].grad) for name in leaves}


def _definition(rows: Any, points: Any, weights: Any, of: str) -> Any:
    """ℓ_i up to a constant, the shift, or L_i / M_i, as PyTorch's tensors."""
    away = points - rows[:, None, :]  # (m, n, d)
    exponent = -0.5 * (away * away).sum(-1)
    terms = (exponent - exponent.detach().amax(1, keepdim=True)).exp() * weights
    if of == "log_sum":
        return terms.sum(1).log()
    if of == "shift":
        return (terms[:, :, None] * away).sum(1) / terms.sum(1)[:, None]
    half = 1.0 + 0.5 * points.shape[1]
    return (terms * (half + exponent)).sum(1) / (terms * (half - exponent)).sum(1).detach()
