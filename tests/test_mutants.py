"""Backends that are plainly wrong, each in one way: named checks of the conformance suite must catch every one.

What a careful stranger gets wrong is in test_mutants_strangers.py, what nobody thought of in test_mutants_generated.py.
Run with `-s` for the table.
"""

import re
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("torch")

import plain_torch
from plain_torch import PlainTorch
from sdkde_numpy.backend import NumpyBackend
from sdkde_numpy.compact import Compact
from sdkde_numpy.formulas import Prepared
from sdkde_numpy.info import INFO

from sdkde_core.engine.merge import each
from sdkde_core.protocol import Reduction
from sdkde_core.testing import broken_off
from sdkde_core.testing.checks import CHECKS, Profile, Target, cases, failures

SMALL = Profile((1, 3, 17), (10.0, 100.0), draws=13)
ALL = replace(INFO, features=INFO.features | {"grad"})


class Zeros(NumpyBackend):
    """Zeros of the right shapes."""

    def reduce(self, problem, queries, state, own_offset=0):
        return each(super().reduce(problem, queries, state, own_offset), np.zeros_like)


class Noise(NumpyBackend):
    """3 % of noise in every sum, what TF32 leaves of an exponent."""

    def reduce(self, problem, queries, state, own_offset=0):
        exact = super().reduce(problem, queries, state, own_offset)
        noise = 0.03 * np.random.default_rng(0).normal(size=exact.log_sum.shape)
        magnitude = exact.log_magnitude
        return replace(
            exact, log_sum=exact.log_sum + noise, log_magnitude=None if magnitude is None else magnitude + noise
        )


class WeightsIgnored(NumpyBackend):
    def prepare(self, problem, columns):
        n = len(columns.log_weights)
        return super().prepare(problem, replace(columns, log_weights=np.full(n, -np.log(n))))


class Accumulates(NumpyBackend):
    """Adds into an output that it keeps with the state and does not reset."""

    def prepare(self, problem, columns):
        return {"state": super().prepare(problem, columns), "sums": {}}

    def reduce(self, problem, queries, state, own_offset=0):
        got = super().reduce(problem, queries, state["state"], own_offset)
        before = state["sums"].setdefault(problem.m, np.full(got.log_sum.shape, -np.inf))
        state["sums"][problem.m] = np.logaddexp(before, got.log_sum)
        return replace(got, log_sum=state["sums"][problem.m])


class SingleLogSums(NumpyBackend):
    """Exponents from expanded squares in float32 whatever the extent, as in 784 dimensions."""

    def prepare(self, problem, columns):
        state = super().prepare(problem, columns)
        single = replace(problem, reduction=Reduction.LOG_SUM, precision="fast", extent=0.0)
        return replace(state, formula=Prepared(single, columns.points, 0.0))

    def reduce(self, problem, queries, state, own_offset=0):
        return each(super().reduce(problem, queries, state, own_offset), lambda x: x.astype(np.float32).astype(float))


class AbsoluteMean(NumpyBackend):
    """The mean of the points in place of the shift from the row to it."""

    def reduce(self, problem, queries, state, own_offset=0):
        got = super().reduce(problem, queries, state, own_offset)
        if got.shift is None:
            return got
        return replace(got, shift=got.shift + (state.formula.points if queries is None else queries))


class AddedOneByOne(NumpyBackend):
    """Terms added one after another, in float32."""

    def reduce(self, problem, queries, state, own_offset=0):
        got = super().reduce(problem, queries, state, own_offset)
        if problem.requires or problem.same or got.log_magnitude is not None:
            return got
        away = state.formula.points - queries[:, None, :]
        exponents = -0.5 * np.vecdot(away, away)
        terms = np.exp(exponents - exponents.max(axis=1, keepdims=True, initial=-1e300))
        added = terms.astype(np.float32).cumsum(axis=1)[:, -1]
        return replace(got, log_sum=got.log_sum + np.log(added / terms.sum(axis=1)))


class FarRowsLost(NumpyBackend):
    """Rows have no sum where a unit in the last place of their exponents exceeds the span of exp."""

    def reduce(self, problem, queries, state, own_offset=0):
        got = super().reduce(problem, queries, state, own_offset)
        return replace(got, log_sum=np.where(got.log_sum < -1e19, -np.inf, got.log_sum))


class FarRowsUnmoved(NumpyBackend):
    """A shift of 0 where the tolerance's part relative to ℓ exceeds the distance."""

    def reduce(self, problem, queries, state, own_offset=0):
        got = super().reduce(problem, queries, state, own_offset)
        if got.shift is None:
            return got
        return replace(got, shift=np.where(got.log_sum[..., None] < -1e26, 0.0, got.shift))


class NanSpreads(NumpyBackend):
    """One row with a NaN makes all of them NaN, as one maximum for a tile would."""

    def reduce(self, problem, queries, state, own_offset=0):
        got = super().reduce(problem, queries, state, own_offset)
        return each(got, lambda x: np.full_like(x, np.nan)) if np.isnan(got.log_sum).any() else got


class NanLost(NumpyBackend):
    """A NaN is smaller than every number."""

    def reduce(self, problem, queries, state, own_offset=0):
        return each(super().reduce(problem, queries, state, own_offset), lambda x: np.where(np.isnan(x), -np.inf, x))


class NoSelfTerm(NumpyBackend):
    """Leaves out the diagonal of train × train without being asked."""

    def reduce(self, problem, queries, state, own_offset=0):
        if problem.same:
            problem = replace(problem, requires=problem.requires | {"exclude_self"})
        return super().reduce(problem, queries, state, own_offset)


class ChunkDependent(NumpyBackend):
    """One maximum for the whole batch: rows far below it underflow."""

    def reduce(self, problem, queries, state, own_offset=0):
        got = super().reduce(problem, queries, state, own_offset)
        top = got.log_sum.max(initial=-np.inf)
        with np.errstate(all="ignore"):
            return replace(got, log_sum=np.log(np.exp(got.log_sum - top)) + top)


class SingleAsDouble(NumpyBackend):
    """float32 passed off as float64."""

    def prepare(self, problem, columns):
        return super().prepare(replace(problem, precision="fast"), columns)

    def reduce(self, problem, queries, state, own_offset=0):
        return each(super().reduce(problem, queries, state, own_offset), lambda x: x.astype(np.float32).astype(float))


class ExclusionIgnored(NumpyBackend):
    """Declares exclude_self and does not do it: a requirement silently ignored."""

    def reduce(self, problem, queries, state, own_offset=0):
        problem = replace(problem, requires=problem.requires - {"exclude_self"})
        return super().reduce(problem, queries, state, own_offset)


class OffsetIgnored(NumpyBackend):
    """Leaves out the right column only where rows come in one batch."""

    def reduce(self, problem, queries, state, own_offset=0):
        return super().reduce(problem, queries, state, 0)


class ChangesQueries(NumpyBackend):
    def reduce(self, problem, queries, state, own_offset=0):
        got = super().reduce(problem, queries, state, own_offset)
        if queries is not None and queries.flags.writeable:
            queries *= 2.0
        return got


class Unsteady(NumpyBackend):
    """Different bits every time, within the tolerance."""

    rng = np.random.default_rng(0)

    def reduce(self, problem, queries, state, own_offset=0):
        got = super().reduce(problem, queries, state, own_offset)
        return replace(got, log_sum=got.log_sum + 1e-12 * self.rng.normal(size=got.log_sum.shape))


class LeftLocked(NumpyBackend):
    """A lock that an exception leaves locked."""

    def __init__(self):
        super().__init__(threads=1)
        self.lock = threading.Lock()

    def reduce(self, problem, queries, state, own_offset=0):
        self.lock.acquire()
        got = super().reduce(problem, queries, state, own_offset)
        self.lock.release()
        return got


class OneThread(NumpyBackend):
    """Leaves the work to a thread that stays, and that a forked child does not have."""

    def __init__(self):
        super().__init__(threads=1)
        self.pool = ThreadPoolExecutor(1)

    def reduce(self, problem, queries, state, own_offset=0):
        return self.pool.submit(super().reduce, problem, queries, state, own_offset).result()


class AnyOption(NumpyBackend):
    def __init__(self, **anything):
        super().__init__()


class KernelIgnored(NumpyBackend):
    """Every kernel is the Gaussian."""

    def prepare(self, problem, columns):
        return super().prepare(_gaussian(problem), columns)

    def reduce(self, problem, queries, state, own_offset=0):
        return super().reduce(_gaussian(problem), queries, state, own_offset)


def _gaussian(problem):
    return replace(problem, kernel="gaussian", requires=problem.requires - {"kernel"})


class NothingIsLittle(NumpyBackend):
    """A row that reaches no column has a small sum in place of none."""

    def reduce(self, problem, queries, state, own_offset=0):
        got = super().reduce(problem, queries, state, own_offset)
        return replace(got, log_sum=np.maximum(got.log_sum, -745.0)) if "kernel" in problem.requires else got


class OneLevel(NumpyBackend):
    """Columns of another kernel whose weights are far below the largest have none."""

    def prepare(self, problem, columns):
        state = super().prepare(problem, columns)
        if isinstance(state.formula, Compact):
            state.formula.weights[:, 1:] = 0.0
        return state


class EdgesBlurred(NumpyBackend):
    """Distances right to 1e-4, as from expanded squares in float32."""

    def prepare(self, problem, columns):
        if "kernel" in problem.requires:
            columns = replace(columns, points=columns.points / 1.0001)
        return super().prepare(problem, columns)

    def reduce(self, problem, queries, state, own_offset=0):
        if "kernel" in problem.requires and queries is not None:
            queries = queries / 1.0001
        return super().reduce(problem, queries, state, own_offset)


class FirstRows(NumpyBackend):
    """The first points are its rows, wherever a range begins."""

    def reduce(self, problem, queries, state, own_offset=0):
        return super().reduce(problem, queries, state, 0 if queries is None else own_offset)


class RangeBeginsOnTile(NumpyBackend):
    """A range begins where the tile of its first row does."""

    def reduce(self, problem, queries, state, own_offset=0):
        return super().reduce(problem, queries, state, own_offset // 16 * 16 if queries is None else own_offset)


class RangeLeavesOutFirstColumns(NumpyBackend):
    """Row i of a range leaves out column i, which is not its own."""

    def reduce(self, problem, queries, state, own_offset=0):
        if queries is not None:
            return super().reduce(problem, queries, state, own_offset)
        rows = state.formula.points[own_offset : own_offset + problem.m]
        return super().reduce(replace(problem, same=False), rows, state, 0)


class RangeCutByRows(NumpyBackend):
    """How columns are cut follows from how many rows there are."""

    def reduce(self, problem, queries, state, own_offset=0):
        if queries is None:
            queries = state.formula.points[own_offset : own_offset + problem.m]
        return super().reduce(problem, queries, state, own_offset)


class RangesKept(NumpyBackend):
    """The rows of a range are packed once for each number of them."""

    def prepare(self, problem, columns):
        return {"state": super().prepare(problem, columns), "rows": {}}

    def reduce(self, problem, queries, state, own_offset=0):
        kept, state = state["rows"], state["state"]
        if queries is None and problem.m < len(state.formula.points):
            own_offset = kept.setdefault(problem.m, own_offset)
        return super().reduce(problem, queries, state, own_offset)


class OtherSideUnweighted(NumpyBackend):
    """The weights count for the first side of a block only."""

    def reduce_pairs(self, problem, state, rows, columns):
        first, other = super().reduce_pairs(problem, state, rows, columns)
        if rows != columns and state.log_weights is not None:
            equal = replace(state, log_weights=np.full_like(state.log_weights, state.log_weights.mean()))
            other = super().reduce_pairs(problem, equal, rows, columns)[1]
        return first, other


class BlocksForgetTheOtherSide(NumpyBackend):
    """The other side of a block is that of the whole."""

    def reduce_pairs(self, problem, state, rows, columns):
        first, _ = super().reduce_pairs(problem, state, rows, columns)
        return first, self.reduce(replace(problem, m=columns[1] - columns[0]), None, state, columns[0])


class PairsUnsteady(NumpyBackend):
    rng = np.random.default_rng(0)

    def reduce_pairs(self, problem, state, rows, columns):
        first, other = super().reduce_pairs(problem, state, rows, columns)
        return first, replace(other, shift=other.shift + 1e-14 * self.rng.normal())


class Unattached(PlainTorch):
    """Declares derivatives, and gives results without."""

    def reduce(self, problem, queries, state, own_offset=0):
        return each(super().reduce(problem, queries, state, own_offset), lambda x: x.detach())


class RowsForgotten(PlainTorch):
    """Differentiates by the points as columns only, where they are the rows too."""

    def reduce(self, problem, queries, state, own_offset=0):
        return super().reduce(problem, state.points.detach() if queries is None else queries, state, own_offset)


class ZeroWeightsDropped(PlainTorch):
    """The derivative by a weight that is zero is not."""

    def prepare(self, problem, columns):
        if columns.weights is None:
            return columns
        return replace(columns, weights=columns.weights * (columns.weights > 0))


class SharesConstant(PlainTorch):
    """The shift with its shares p_ij as constants: their derivatives are forgotten."""

    def reduce(self, problem, queries, state, own_offset=0):
        got = super().reduce(problem, queries, state, own_offset)
        if got.shift is None:
            return got
        rows = state.points if queries is None else queries
        shares = (-0.5 * (state.points - rows[:, None, :]).pow(2).sum(-1) + state.log_weights).softmax(1)
        return replace(got, shift=shares.detach() @ state.points - rows)


class SingleDerivatives(PlainTorch):
    """Sums in float64, derivatives in float32."""

    def prepare(self, problem, columns):
        columns.points.requires_grad and columns.points.register_hook(lambda g: g.float().double())
        return columns


# mutant, its BackendInfo, and the checks of which at least one parameter must fail
MUTANTS = {
    "zeros": (Zeros, INFO, {"tolerance", "sizes", "state_reuse"}),
    "3 % noise": (Noise, INFO, {"tolerance"}),
    "weights ignored": (WeightsIgnored, INFO, {"tolerance", "column_chunks"}),
    "accumulates into a reused output": (Accumulates, INFO, {"state_reuse"}),
    "float32 log sums at d = 784": (SingleLogSums, INFO, {"tolerance"}),
    "absolute mean for the shift": (AbsoluteMean, INFO, {"tolerance"}),
    "added one by one in float32": (AddedOneByOne, replace(INFO, precisions=("fast", "high")), {"heap"}),
    "far rows without a sum": (FarRowsLost, INFO, {"far_below"}),
    "far rows with a shift of 0": (FarRowsUnmoved, INFO, {"far_below"}),
    "a NaN that spreads": (NanSpreads, INFO, {"not_a_number"}),
    "a NaN that gets lost": (NanLost, INFO, {"not_a_number"}),
    "self term missing": (NoSelfTerm, INFO, {"tolerance"}),
    "answers depend on chunking": (ChunkDependent, INFO, {"query_chunks"}),
    "float32 as float64": (SingleAsDouble, INFO, {"tolerance"}),
    "a requirement ignored": (ExclusionIgnored, INFO, {"exclude_self"}),
    "a future requirement claimed": (
        NumpyBackend,
        replace(INFO, features=INFO.features | {"column_scale"}),
        {"declaration"},
    ),
    "batches of rows miscounted": (OffsetIgnored, INFO, {"exclude_self"}),
    "queries changed": (ChangesQueries, INFO, {"inputs_untouched"}),
    "not deterministic": (Unsteady, INFO, {"repeat"}),
    "any option taken": (AnyOption, replace(INFO, implementation=f"{__name__}:AnyOption"), {"options"}),
    "locked after an exception": (LeftLocked, INFO, {"interrupts"}),
    "a thread that a forked child lacks": (OneThread, INFO, {"forked_child"}),
    "no precision": (NumpyBackend, replace(INFO, precisions=()), {"declaration"}),
    "grad in NumPy": (NumpyBackend, replace(INFO, features=INFO.features | {"grad"}), {"declaration"}),
    "kernels ignored": (KernelIgnored, INFO, {"kernel"}),
    "rows out of reach have a sum": (NothingIsLittle, INFO, {"kernel"}),
    "little weights lost by other kernels": (OneLevel, INFO, {"kernel"}),
    "edges of supports blurred": (EdgesBlurred, INFO, {"kernel"}),
    "a range is the first points": (FirstRows, INFO, {"row_range", "range_bits"}),
    "a range begins on a tile": (RangeBeginsOnTile, INFO, {"row_range"}),
    "a range leaves out the first columns": (RangeLeavesOutFirstColumns, INFO, {"row_range", "range_bits"}),
    "a range is cut by its rows": (RangeCutByRows, INFO, {"range_bits"}),
    "ranges kept by their length": (RangesKept, replace(INFO, features=INFO.features - {"pairs"}), {"planned"}),
    "a block's other side without weights": (OtherSideUnweighted, INFO, {"pairs"}),
    "a block's other side over all columns": (BlocksForgetTheOtherSide, INFO, {"pairs"}),
    "a block that differs the second time": (PairsUnsteady, INFO, {"pairs"}),
    "features of a later protocol": (NumpyBackend, replace(INFO, protocol=(1, 0)), {"declaration"}),
    "results not attached": (Unattached, plain_torch.INFO, {"grad"}),
    "points are no rows to autograd": (RowsForgotten, plain_torch.INFO, {"grad"}),
    "no derivative by weights of zero": (ZeroWeightsDropped, plain_torch.INFO, {"grad"}),
    "shares are constants to autograd": (SharesConstant, plain_torch.INFO, {"grad"}),
    "derivatives in float32": (SingleDerivatives, plain_torch.INFO, {"grad"}),
    "declines everything": (
        NumpyBackend,
        replace(INFO, supports=lambda problem: INFO.supports(problem)._replace(ok=False)),
        {"answers_something"},
    ),
}


def _profile(name):
    return Profile((784,), (30.0,)) if "784" in name else SMALL


@pytest.mark.parametrize("name", MUTANTS)
def test_named_checks_catch_it(name, monkeypatch):
    monkeypatch.setattr(broken_off, "PATIENCE", 2.0)
    factory, info, expected = MUTANTS[name]
    target = Target(info, factory(), "cpu")
    caught = {check for check in sorted(expected) if failures(target, _profile(name), [check], most=1)}
    print(f"| {name} | {', '.join(sorted(caught))} |")
    assert caught == expected


def test_only_a_heap_shows_sums_that_are_added_one_by_one():
    target = Target(replace(INFO, precisions=("fast",)), AddedOneByOne(), "cpu")
    assert failures(target, SMALL, only=["tolerance", "sizes", "drawn"]) == {}
    assert set(failures(target, SMALL, only=["heap"])) == {
        f"heap[fast-{name}-d{d}-e{out}-n33333]"
        for name in ("log_sum", "mean")
        for d in SMALL.dimensions
        for out in (7, 350)
    }


def test_float32_log_sums_are_caught_in_784_dimensions_where_they_would_pass_in_few():
    target = Target(replace(INFO, precisions=("fast",)), SingleLogSums(), "cpu")
    few = failures(target, Profile((3,), (10.0,)), only=["tolerance"])
    many = failures(target, Profile((784,), (100.0,)), only=["tolerance"])
    assert not [key for key in few if "log_sum-mixture" in key]
    assert [key for key in many if "log_sum-mixture" in key]


def test_a_right_backend_with_derivatives_passes():
    target = Target(plain_torch.INFO, PlainTorch(), "cpu")
    profile = SMALL._replace(pairs=4000)
    assert failures(target, profile, only=["declaration", "grad", "sizes", "drawn"]) == {}


class NoPrepare:
    """Lacks a method."""

    probe = NumpyBackend.probe
    reduce = NumpyBackend.reduce


class OtherArguments(NumpyBackend):
    """Takes what no caller passes."""

    def prepare(self, columns):
        return super().prepare(None, columns)


@pytest.mark.parametrize(
    ("backend", "message"),
    [(NoPrepare(), "has no method 'prepare'"), (OtherArguments(), "takes 2 positional arguments")],
)
def test_what_does_not_work_at_all_is_one_failure(backend, message):
    found = failures(Target(INFO, backend, "cpu"), SMALL)
    assert list(found) == ["answers_something[backend]"]
    assert message in found["answers_something[backend]"]


def test_messages_say_what_was_asked_and_what_came():
    class Off(NumpyBackend):
        def reduce(self, problem, queries, state, own_offset=0):
            got = super().reduce(problem, queries, state, own_offset)
            return got if got.shift is None else replace(got, shift=got.shift + 0.5)

    found = failures(Target(replace(INFO, precisions=("high",)), Off(), "cpu"), SMALL, ["exclude_self"])
    message = found["exclude_self[high-mean]"]
    for part in ("shift of MEAN at high", "mixture", "m=211 n=211 d=3", "exclude_self", "row "):
        assert part in message
    assert re.search(r"row \d+ is \[.*\], should be \[.*\]; off by 0\.866, \d\.\d+e\+04 times the tolerance", message)


def test_every_check_is_needed_or_guards_a_format():
    """No check is dead weight: each has parameters for a backend that declares everything."""
    seen = {name for name, _ in cases(ALL, SMALL._replace(dimensions=(1, 3, 784)))}
    assert seen == set(CHECKS)


def test_names_are_stable():
    """Plugins name checks in their lists of expected failures."""
    names = [f"{name}[{parameter}]" for name, parameter in cases(ALL, SMALL)]
    assert len(names) == len(set(names))
    assert {
        "declaration[backend]",
        "tolerance[high-mean-tails-d17-e100]",
        "tolerance[fast-log_sum-clusters-d1-e100000]",
        "sizes[float64-laplace-n129-m1]",
        "far_below[high-mean-d3-e1e+12-n1100]",
        "heap[high-laplace-d17-e350-n33333]",
        "exclude_self[high-mean]",
        "grad[high-mean]",
        "kernel[high-tophat]",
        "row_range[high-laplace]",
        "range_bits[fast-mean]",
        "pairs[float64-mean]",
        "planned[float64-sdkde]",
        "drawn[12-d17-p400000]",
    } <= set(names)
    assert set(CHECKS) == {
        *("declaration", "answers_something", "reasons", "options", "result_format", "tolerance", "sizes", "no_rows"),
        *("state_reuse", "query_chunks", "column_chunks", "repeat", "inputs_untouched", "results_are_the_callers"),
        *("expected_rows", "threads", "far_below", "not_a_number", "exclude_self", "grad", "drawn"),
        *("interrupts", "forked_child", "kernel", "row_range", "range_bits", "pairs", "planned", "heap", "leaks"),
        *("limits", "many_alive", "memory", "new_contents", "price", "repeat_many", "surroundings", "thread_counts"),
        "wide",
    }


def test_reductions_are_all_asked_for():
    parameters = [p for name, p in cases(INFO, SMALL) if name == "tolerance"]
    for reduction in Reduction:
        assert any(f"-{reduction}-" in p for p in parameters)
