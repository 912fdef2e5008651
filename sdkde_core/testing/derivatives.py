"""The check of the feature ``"grad"``: a backend's derivatives beside the reductions' in closed form.

With a_ij = u_j − u_i, e_ij = −½‖a_ij‖², φ_ij = exp(e_ij), p_ij = w_j φ_ij / Σ_k w_k φ_ik, s_i the shift, c = 1 + d/2:

==========================  ====================================  ===========================================
of a row's                  by e_ij                               by w_j
==========================  ====================================  ===========================================
ℓ_i                         p_ij                                  φ_ij / Σ_k w_k φ_ik
C · s_i                     p_ij C · (a_ij − s_i)                 (φ_ij / Σ_k w_k φ_ik) C · (a_ij − s_i)
L_i / M_i, M_i constant     w_j φ_ij (c + e_ij + 1) / M_i         φ_ij (c + e_ij) / M_i
==========================  ====================================  ===========================================

and e_ij by u_j is −a_ij, by u_i a_ij; C · s_i has p_ij C by u_j besides, and −C by u_i.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from array_api_compat import array_namespace
from numpy.typing import NDArray

from sdkde_core.arrays import detached, to_host
from sdkde_core.plugin import each, reduce_pass
from sdkde_core.protocol import TOLERANCES, Columns, Partial, Problem, Reduction

from . import problems
from .problems import Case
from .target import Target, within

__all__ = ["grad"]

Array = NDArray[np.float64]


def grad(target: Target, parameter: str) -> None:
    """Derivatives by queries, points and weights, of zero weights too, whichever of them require grad.

    Like a log sum a derivative is a sum of terms with the errors of their φ_ij, if of several with different signs: it
    may be off by ten tolerances of a log sum, relative to the largest one.
    """
    precision, name = parameter.split("-")
    reduction = Reduction(name)
    allowed = 10.0 * TOLERANCES[precision][Reduction.LOG_SUM].absolute
    differentiated = {"log_sum": ["log_sum"], "mean": ["log_sum", "shift"], "laplace": ["signed"]}[name]
    for kind in ("near", "weights", "apart", "far"):
        case = make(kind)
        with_weights = kind == "weights"
        if with_weights and "weights" not in target.info.features:
            continue
        for same in (False, True):
            problem = target.problem(case, reduction, precision, same=same, requires={"grad"})
            truth = problems.truth(case, same=same)
            leaves = ["points"] + ["queries"] * (not same) + ["weights"] * with_weights
            for of in differentiated:
                if kind == "far" and of == "shift":  # there the distance multiplies what rounding makes of its shares
                    continue
                want = closed_form(case, of, same)
                for chosen in dict.fromkeys([(*leaves,), *((leaf,) for leaf in leaves)]):
                    partial, got = answered(target, problem, case, of, chosen)
                    within(problem, each(partial, lambda x: to_host(detached(x))), truth, kind)
                    for leaf in chosen:
                        off = abs(got[leaf] - want[leaf]).max() / abs(want[leaf]).max()
                        assert off <= allowed, (
                            f"{kind}{', same' * same}: {of} by {leaf}, with grad of {', '.join(chosen)}: off by "
                            f"{off:.3g} of the largest derivative, allowed {allowed:.3g}"
                        )


def make(kind: str, n: int = 61, m: int = 23, d: int = 3) -> Case:
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


def _factors(case: Case, of: str) -> Array:
    """What the derivatives are taken of is the sum of the results times these: (m, 1), of the shift (m, d)."""
    m, d = case.queries.shape
    size = (max(m, len(case.points)), d if of == "shift" else 1)
    return np.random.default_rng(1).uniform(0.5, 1.5, size)


def closed_form(case: Case, of: str, same: bool) -> dict[str, Array]:
    """Return the derivatives by ``"points"``, ``"queries"`` (0 rows with ``same``) and ``"weights"``, in float64."""
    rows, d = case.points if same else case.queries, case.points.shape[1]
    factors = _factors(case, of)[: len(rows)]
    away = case.points - rows[:, None, :]  # (m, n, d): a_ij
    exponent = -0.5 * (away**2).sum(-1)
    weights, half = np.exp(case.log_weights), 1.0 + 0.5 * d
    phi = np.exp(exponent - exponent.max(1, keepdims=True))  # (m, n), as M_i and Σ_k w_k φ_ik relative to the nearest
    by_point, by_row = np.zeros_like(away), np.zeros_like(rows)  # besides what comes through e_ij
    if of == "signed":
        plus = ((weights * phi) * (half - exponent)).sum(1, keepdims=True)
        by_weight = factors * phi * (half + exponent) / plus
        by_exponent = factors * weights * phi * (half + exponent + 1.0) / plus
    else:
        share = phi / (weights * phi).sum(1, keepdims=True)
        slope = factors
        if of == "shift":
            p = weights * share
            slope = ((away - (p[:, :, None] * away).sum(1, keepdims=True)) * factors[:, None, :]).sum(-1)
            by_point, by_row = p[:, :, None] * factors[:, None, :], -factors
        by_weight = share * slope
        by_exponent = weights * by_weight
    pull = by_exponent[:, :, None] * away
    points, queries = (by_point - pull).sum(0), by_row + pull.sum(1)
    if same:
        points, queries = points + queries, queries[:0]
    return {"points": points, "queries": queries, "weights": by_weight.sum(0)}


def answered(
    target: Target, problem: Problem, case: Case, of: str, leaves: tuple[str, ...]
) -> tuple[Partial, dict[str, Array]]:
    """Return a backend's result, and its derivatives by those of points, queries and weights that require grad."""
    give = target.give
    given = {"points": give(case.points.copy()), "queries": give(case.queries.copy())}
    if "weights" in problem.requires:
        given["weights"] = give(np.exp(case.log_weights))
    for name in leaves:
        given[name].requires_grad_()
    columns = Columns(given["points"], give(case.log_weights), weights=given.get("weights"))
    queries = None if problem.same else given["queries"]
    partial = reduce_pass(target.backend, target.info, problem, columns, queries)
    result = getattr(partial, of, None)
    if of == "signed":
        xp = array_namespace(partial.log_magnitude)
        result = partial.sign.detach() * xp.exp(partial.log_magnitude - partial.log_sum.detach())
    assert result is not None and result.requires_grad, f"{of} is not attached to {', '.join(leaves)}"
    factors = give(_factors(case, of)[: problem.m])
    (result.reshape(problem.m, -1) * factors).sum().backward()
    found = {}
    for name in leaves:
        assert given[name].grad is not None, f"{of} has no derivative by {name}"
        found[name] = to_host(given[name].grad)
    return partial, found
