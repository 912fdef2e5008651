"""Checks of features: ``"kernel"``, ``"range"``, ``"pairs"`` and ``"grad"``."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from typing import Any, cast

import numpy as np

from sdkde_core.arrays import detached, to_host
from sdkde_core.plugin import concatenate, each, merge, reduce_pass
from sdkde_core.protocol import TOLERANCES, Columns, PairsBackend, Partial, Problem, Reduction

from . import problems, reference
from .accuracy import about_tiles, boundaries, some, with_not_a_number
from .formalities import has_format
from .problems import Array, Case, Truth
from .target import Target, make, same_bits, weighted, within


def kernel(target: Target, precision: str, name: str) -> None:
    """Another kernel: tolerances, weights, own columns, rows out of reach and far off, NaN."""
    pose = functools.partial(target.problem, reduction="log_sum", precision=precision, kernel=name, requires={"kernel"})
    for case in _cases():
        # Rows that reach none but columns of little weight are those columns themselves.
        for same in (False, True) if len(case.points) < 131 or case.name.startswith("weights") else (False,):
            if "weights" in target.info.features or (case.log_weights == case.log_weights[0]).all():
                problem = pose(case, same=same)
                _bounded(problem, target.answer(problem, case), case)
    for distance in (1e9, 1e100):
        case = problems.far(29, 13, 2, distance, stray=True)
        problem = pose(case, whole=True)
        _bounded(problem, target.direct(problem, case), case)
    case = about_tiles(131, 23, 2, 5.0)
    case = weighted(case) if "weights" in target.info.features else case
    problem = pose(case, whole=True)
    got = target.direct(problem, case)
    has_format(problem, got, case.points)
    _bounded(problem, got, case)
    same_bits(got, target.direct(problem, case), "differs from one call to the next")
    case = make("mixture", 131, 11, 3, 6.0)
    others, got = with_not_a_number(target, pose(case), case)
    assert not np.isnan(got.log_sum[others]).any(), "rows without a NaN are NaN beside rows with one"


@functools.cache
def _cases() -> list[Case]:
    """In few and many dimensions, on a lattice, where r is 1 exactly, with weights, beside the edges of tiles."""
    lattice = np.stack(np.meshgrid(np.arange(9.0), np.arange(5.0)), axis=-1).reshape(-1, 2) - [4.0, 2.0]
    on_lattice = Case("a lattice", lattice, lattice[::3] + np.array([0.0, 1.0]), np.full(45, -np.log(45)))
    near = [about_tiles(131, 23, d, 6.0) for d in (1, 3, 17)]
    near += [about_tiles(n, m, 2, 4.0) for n, m in ((1, 1), (64, 8), (1025, 5), (4097, 3), (9, 257))]
    return [*near, on_lattice, make("tails", 131, 23, 2, 100.0), make("weights", 131, 23, 2, 6.0)]


def _bounded(problem: Problem, got: Partial, case: Case) -> None:
    """Assert that log sums lie between those of distances that are a little longer or shorter; see `KERNELS`."""
    rows = case.points if problem.same else case.queries
    absolute, relative = TOLERANCES[problem.precision][Reduction.LOG_SUM]
    longer, shorter = (1.0 / (1.0 + sign * relative) for sign in (1.0, -1.0))
    bound = functools.partial(reference.kernel_log_sum, rows, case.points, problem.kernel, log_weights=case.log_weights)
    low, high = bound(longer) - absolute, bound(shorter) + absolute
    right = (low <= got.log_sum) & (got.log_sum <= high)  # not NaN
    if not right.all():
        i = int(np.flatnonzero(~right)[0])
        asked = f"{problem.precision}, {case.name}, m={problem.m} n={problem.n} d={problem.d}"
        said = f"{got.log_sum[i]:.9g}, should be from {low[i]:.9g} to {high[i]:.9g}"
        many = f"{int((~right).sum())} of {right.size} rows are not"
        raise AssertionError(f"log_sum of the {problem.kernel} kernel at {asked}: row {i} is {said} ({many})")


@functools.lru_cache(maxsize=32)
def _points(n: int, features: frozenset[str], strays: bool) -> Case:
    """Return n points; with ``strays`` the first, the last, and some between are 57 bandwidths from all others.

    With weights of 1e-390 of the others' their log sums are near −900: float64 lacks the exponential.
    """
    case = about_tiles(n, 1, 3, 10.0)
    case = weighted(case) if "weights" in features else case
    if not strays:
        return case
    points, log_weights, far = 0.3 * case.points, case.log_weights.copy(), [0, 64, n // 2, n - 1]
    points[far] = 57.0 * np.eye(4, 3) - 57.0 * (np.arange(4) == 3)[:, None] * np.eye(4, 3)[0]
    if "weights" in features:
        log_weights[far] = -900.0
    return replace(case, name="some points far from all", points=points, log_weights=log_weights)


def _truth(case: Case, start: int, stop: int) -> tuple[Any, Truth]:
    """Return the rows of a range of points that are compared, those about boundaries and others, and the truth."""
    rows = np.unique([*boundaries(stop - start), *some(stop - start, 60)])
    return rows, problems.truth(case, same=True, rows=start + rows)


def _states(target: Target, precision: str, reduction: str, n: int) -> Any:
    """Yield cases of n points, without weights and with them, their problems and states."""
    mixes = dict.fromkeys([frozenset[str](), target.info.features & {"weights"}])
    for features, strays in itertools.product(mixes, (False, True)):
        case = _points(n, features, strays)
        problem = target.problem(case, Reduction(reduction), precision, same=True, requires=features, whole=True)
        yield case, problem, target.prepare(problem, case), strays


def row_range(target: Target, precision: str, reduction: str, length: str = "") -> None:
    """Some of the points as rows are within the tolerance."""
    n, asked = 211, [(0, 40), (20, 60), (63, 66), (150, 211), (210, 211)]
    if length == "long":
        n, asked = 3077, [(1024, 3074)]
    for case, problem, state, _ in _states(target, precision, reduction, n):
        for start, stop in asked:
            part = replace(problem, m=stop - start)
            rows, truth = _truth(case, start, stop)
            got = target.reduce(part, None, state, start)
            within(part, got, truth, f"{case.name}, the points from {start} to {stop}", rows)


def pairs(target: Target, precision: str, reduction: str, length: str = "") -> None:
    """The sums of all blocks of pairs merge to the whole, whichever side comes first; a block again is the same.

    Some points are far from all others.
    """
    cut, n = (3072, 6144) if length == "long" else (2048, 2049)
    backend, parts = cast(PairsBackend, target.backend), [(0, cut), (cut, n)]
    for case, problem, state, strays in _states(target, precision, reduction, n):
        if strays and not problem.requires:
            continue  # a point's own term is its largest, and blocks of others may count for nothing
        found = {}
        for i, j in ((0, 0), (1, 0) if problem.requires else (0, 1), (1, 1)):
            block = backend.reduce_pairs(problem, state, parts[i], parts[j])
            found[i, j], found[j, i] = (each(side, lambda x: np.array(to_host(x))) for side in block)
        got = concatenate([merge([found[i, j] for j in (0, 1)]) for i in (0, 1)])
        rows, truth = _truth(case, 0, n)
        within(problem, got, truth, f"{case.name}, pairs in blocks that meet at {cut}", rows)
        again = backend.reduce_pairs(problem, state, parts[1], parts[1])[1]
        same = np.array_equal(to_host(again.shift), found[1, 1].shift)
        assert same, "a block's other side, or the block again, has other bits"


def grad(target: Target, precision: str, reduction: str) -> None:
    """Derivatives by queries, points and weights, of zero weights too, whichever of them require grad.

    Like a log sum a derivative is a sum of terms with the errors of their φ_ij, if of several with different signs: it
    may be off by ten tolerances of a log sum, relative to the largest one.
    """
    allowed = 10.0 * TOLERANCES[precision][Reduction.LOG_SUM].absolute
    differentiated = {"log_sum": ["log_sum"], "mean": ["log_sum", "shift"], "laplace": ["signed"]}[reduction]
    kinds = ["near", "apart", "far"] + ["weights"] * ("weights" in target.info.features)
    for kind, same, of in itertools.product(kinds, (False, True), differentiated):
        if kind == "far" and of == "shift":  # there the distance multiplies what rounding makes of its shares
            continue
        case = _differentiable(kind)
        problem = target.problem(case, reduction, precision, same=same, requires={"grad"})
        leaves = ["points"] + ["queries"] * (not same) + ["weights"] * (kind == "weights")
        want = _derivatives(target, problem, case, of, leaves, by_definition=True)[1]
        for chosen in dict.fromkeys([(*leaves,), *((leaf,) for leaf in leaves)]):
            partial, got = _derivatives(target, problem, case, of, chosen)
            within(problem, partial, problems.truth(case, same=same), kind)
            for leaf in chosen:
                off = abs(got[leaf] - want[leaf]).max() / abs(want[leaf]).max()
                about = f"{kind}{', same' * same}: {of} by {leaf}, with grad of {', '.join(chosen)}"
                assert off <= allowed, f"{about}: off by {off:.3g} of the largest derivative, allowed {allowed:.3g}"


@functools.cache
def _differentiable(kind: str) -> Case:
    """Make a case in which every row has many columns that matter."""
    case = problems.make("mixture", 61, 23, 3, 4.0)
    if kind == "weights":  # a fifth of them zero
        weights = np.random.default_rng(0).gamma(1.0, size=61)
        weights[::5] = 0.0
        with np.errstate(divide="ignore"):
            return replace(case, log_weights=np.log(weights / weights.sum()))
    if kind == "apart":  # two clusters 10⁴ bandwidths apart, as nothing is split off
        for x in (case.points, case.queries):
            x[::2, 0] += 1e4
    if kind == "far":  # points several times over, rows 10⁹ bandwidths from all
        case.points[15:] = case.points[np.arange(15, 61) % 15]
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
