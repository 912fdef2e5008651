"""Backends that are wrong, each in one way: a named check of the conformance suite must catch every one.

Most are right on the sizes, types and calls that come first to mind: what is wrong shows at the edge of a tile, for
float32 data, where two features meet, from several threads, in the second call. What nobody thought of is in
test_mutants_generated.py.
"""

import gc
import os
import random
import re
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import fields, replace
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("torch")

import plain_torch
from blocks import INFO, NumpyBackend
from plain_torch import PlainTorch
from threadpoolctl import threadpool_limits

from sdkde_core.plugin import cpu_threads, each, merge
from sdkde_core.protocol import Partial, Reduction
from sdkde_core.testing import calls
from sdkde_core.testing.checks import CHECKS, PROFILES, Profile, Target, cases, failures

RNG = np.random.default_rng(0)
QUICK = PROFILES["quick"]
ALL = replace(INFO, features=INFO.features | {"grad"})

#: Without ranges and blocks of the points, so that mutants need not know of them.
OLD = replace(INFO, features=INFO.features - {"range", "pairs"})


class Right(NumpyBackend):
    """The NumPy backend on one thread: what the mutants are made from."""

    def __init__(self):
        super().__init__(threads=1)
        self.kept = {}

    def prepare(self, problem, columns):
        return SimpleNamespace(columns=columns, packed=super().prepare(problem, columns), told=problem, kept={})

    def reduce(self, problem, queries, state, own_offset=0):
        return super().reduce(problem, queries, state.packed, own_offset)

    def reduce_pairs(self, problem, state, rows, columns):
        return super().reduce_pairs(problem, state.packed, rows, columns)


def reducing(call):
    """A backend whose ``reduce`` is ``call(self, ask, problem, queries, state, own_offset)``, ``ask`` the right one."""

    class Reducing(Right):
        def reduce(self, problem, queries, state, own_offset=0):
            return call(self, super().reduce, problem, queries, state, own_offset)

    return Reducing


def rows_of(queries, state):
    return state.columns.points if queries is None else queries


def wrong(answer=None, *, where=lambda problem: True, columns=None, ask=None, pairs=None):
    """A backend with something of its own.

    ``answer(problem, got)`` changes results ``where(problem)``; ``columns(self, problem, columns)`` what is
    packed; ``ask(problem, queries, own_offset)`` the question; ``pairs(got)`` both sides of a block.
    """

    class Wrong(Right):
        def prepare(self, problem, given):
            state = super().prepare(problem, columns(self, problem, given) if columns else given)
            state.columns = given
            return state

        def reduce(self, problem, queries, state, own_offset=0):
            asked = problem, rows_of(queries, state) if columns else queries, own_offset
            changed, rows, offset = ask(*asked) if ask else asked
            got = super().reduce(changed, rows, state, offset)
            return answer(problem, got) if answer and where(problem) else got

        def reduce_pairs(self, problem, state, rows, others):
            got = super().reduce_pairs(problem, state, rows, others)
            return pairs(got) if pairs else got

    return Wrong


def off(field="log_sum", rows=slice(None), by=0.01):
    """Return a change of some rows of a field."""

    def answer(problem, got):
        if getattr(got, field) is None:
            return got
        x = getattr(got, field).copy()
        x[rows] += by
        return replace(got, **{field: x})

    return answer


def changed(**functions):
    """Return a change of fields by functions of them."""

    def answer(problem, got):
        found = {name: getattr(got, name) for name in functions}
        return replace(got, **{name: functions[name](x) for name, x in found.items() if x is not None})

    return answer


def lost(holds, kept):
    """Return the columns without some of them, where ``holds(n)``."""

    def columns(self, problem, given):
        which = kept if holds(problem.n) else slice(None)
        return replace(given, points=given.points[which], log_weights=given.log_weights[which])

    return columns


def packing(act):
    """A backend that does something else while it packs."""
    return wrong(columns=lambda self, problem, given: (act() and given) or given)


# --- numbers ----------------------------------------------------------------------------------------------------------


def noisy(problem, got):
    """3 % of noise in every sum, what TF32 leaves of an exponent."""
    noise = 0.03 * np.random.default_rng(0).normal(size=got.log_sum.shape)
    return changed(log_sum=lambda x: x + noise, log_magnitude=lambda x: x + noise)(problem, got)


def single(problem, got):
    return each(got, lambda x: x.astype(np.float32).astype(float))


def underflows(problem, got):
    """Sums of plain exponentials, relative to 1."""
    none = got.log_sum < -745.0
    return changed(log_sum=lambda x: np.where(none, -np.inf, x), shift=lambda x: np.where(none[..., None], 0.0, x))(
        problem, got
    )


def unmoved(problem, got):
    """A shift of 0 where the tolerance's part relative to ℓ exceeds the distance."""
    return changed(shift=lambda x: np.where(got.log_sum[..., None] < -1e26, 0.0, x))(problem, got)


def spreads(problem, got):
    """One row with a NaN makes all of them NaN, as one maximum for a tile would."""
    return each(got, lambda x: np.full_like(x, np.nan)) if np.isnan(got.log_sum).any() else got


def one_maximum(problem, got):
    """One maximum for the whole batch: rows far below it underflow."""
    with np.errstate(all="ignore"):
        top = got.log_sum.max(initial=-np.inf)
        return replace(got, log_sum=np.log(np.exp(got.log_sum - top)) + top)


def unweighted(self, problem, given):
    return replace(given, log_weights=np.full(problem.n, -np.log(problem.n)))


def exponentiated(self, problem, given):
    """Weights come as their exponentials; those that are 0 count for nothing."""
    with np.errstate(all="ignore"):
        return replace(given, log_weights=np.maximum(np.log(np.exp(given.log_weights)), -1e4))


def sixteen_bits(self, problem, given):
    index = np.arange(problem.n).astype(np.uint16)
    return replace(given, points=given.points[index], log_weights=given.log_weights[index])


def in_single(plainly):
    """Log sums of terms from expanded squares in float32, or of right terms added ``plainly`` one after another."""

    @reducing
    def reduce(self, ask, problem, queries, state, own_offset):
        got, points = ask(problem, queries, state, own_offset), state.columns.points
        if problem.requires or problem.reduction is not Reduction.LOG_SUM or problem.m == 0:
            return got
        rows = rows_of(queries, state)
        if plainly:
            exponents = -0.5 * np.square(points - rows[:, None, :]).sum(-1)
        else:
            x, y = (a.astype(np.float32) for a in (points, rows))
            exponents = y @ x.T - 0.5 * np.vecdot(x, x) - 0.5 * np.vecdot(y, y)[:, None]
        top = exponents.max(axis=1, keepdims=True)
        total = np.exp(exponents - top).astype(np.float32).cumsum(axis=1)[:, -1]
        return replace(got, log_sum=(top[:, 0] + np.log(total)).astype(float) + state.columns.log_weights[0])

    return reduce


@reducing
def absolute_mean(self, ask, problem, queries, state, own_offset):
    """The mean of the points in place of the shift from the row to it."""
    rows = rows_of(queries, state)
    return changed(shift=lambda x: x + rows)(problem, ask(problem, queries, state, own_offset))


# --- one call after another, and at once ------------------------------------------------------------------------------


@reducing
def scratch_norms(self, ask, problem, queries, state, own_offset):
    """Keeps the rows' norms on itself from the beginning of a call to its end."""
    rows = rows_of(queries, state)
    norms = self.norms = 0.5 * np.vecdot(rows, rows)
    got = ask(problem, queries, state, own_offset)
    by = self.norms - norms if len(self.norms) == len(norms) else 0.0
    return replace(got, log_sum=(got.log_sum.T + by).T)


class ScratchWhilePacking(Right):
    """Packs through memory of its own."""

    def prepare(self, problem, columns):
        self.packed = columns.points
        np.sort(columns.points.ravel())  # what else there is to do
        return super().prepare(problem, replace(columns, points=self.packed))


class RoomForStates(Right):
    """Has room for eight states."""

    room = 8

    def prepare(self, problem, columns):
        place = self.kept["last"] = (self.kept.get("last", 0) + 1) % self.room
        self.kept[place] = super().prepare(problem, columns)
        return place

    def reduce(self, problem, queries, state, own_offset=0):
        return super().reduce(problem, queries, self.kept[state], own_offset)


class LastPrepared(RoomForStates):
    room = 1


@reducing
def output_buffer(self, ask, problem, queries, state, own_offset):
    """Writes every result into the same memory; as much as is needed of it is returned."""
    got, found = ask(problem, queries, state, own_offset), {}
    for name in (field.name for field in fields(Partial)):
        x, memory = getattr(got, name), self.kept.get((problem.d, name))
        if x is not None:
            if memory is None or len(memory) < len(x):
                memory = self.kept[problem.d, name] = np.empty_like(x)
            memory[: len(x)] = x
            found[name] = memory[: len(x)]
    return replace(got, **found)


@reducing
def points_remembered(self, ask, problem, queries, state, own_offset):
    """Answers for the points themselves once, and hands out the same arrays from then on."""
    if queries is not None:
        return ask(problem, queries, state, own_offset)
    if problem not in state.kept:
        state.kept[problem] = ask(problem, queries, state, own_offset)
    return state.kept[problem]


@reducing
def accumulates(self, ask, problem, queries, state, own_offset):
    """Adds into an output that it keeps with the state and does not reset."""
    got = ask(problem, queries, state, own_offset)
    before = state.kept.get(problem.m, -np.inf)
    state.kept[problem.m] = np.logaddexp(before, got.log_sum)
    return replace(got, log_sum=state.kept[problem.m])


@reducing
def empty_query_corrupts(self, ask, problem, queries, state, own_offset):
    """An empty query leaves the state without its last column."""
    if problem.m == 0 and problem.n > 1:
        x, log_weights = state.columns.points[:-1], state.columns.log_weights[:-1]
        state.packed = NumpyBackend.prepare(self, problem, replace(state.columns, points=x, log_weights=log_weights))
    return ask(problem, rows_of(queries, state), state, own_offset)


@reducing
def m_trusted(self, ask, problem, queries, state, own_offset):
    """Has room for as many rows as ``prepare`` was told, and repeats the last of them."""
    got, room = ask(problem, queries, state, own_offset), max(1, state.told.m)
    return each(got, lambda x: np.concatenate([x[:room], np.repeat(x[room - 1 : room], max(0, len(x) - room), 0)]))


@reducing
def same_trusted(self, ask, problem, queries, state, own_offset):
    """Takes the rows to be the points whenever ``prepare`` was told so."""
    if state.told.same and queries is not None and problem.m <= problem.n:
        queries = state.columns.points[: problem.m]
    return ask(problem, queries, state, own_offset)


@reducing
def extent_trusted(self, ask, problem, queries, state, own_offset):
    """Packs columns for the extent that ``prepare`` is told, and looks for those of the call's."""
    assert problem.extent > 0.5 * state.told.extent, "packed for another extent"
    return ask(problem, queries, state, own_offset)


def by_address(self, problem, given):
    """Copies columns once for each address."""
    key = given.points.ctypes.data, given.points.shape, given.log_weights[0]
    return self.kept.setdefault(key, replace(given, points=given.points.copy()))


@reducing
def queries_by_name(self, ask, problem, queries, state, own_offset):
    """Keeps the rows of the last call, for the same array."""
    if queries is not None and (not self.kept or self.kept["last"][0] is not queries):
        self.kept["last"] = queries, queries.copy()
    return ask(problem, queries if queries is None else self.kept["last"][1], state, own_offset)


@reducing
def changes_queries(self, ask, problem, queries, state, own_offset):
    got = ask(problem, queries, state, own_offset)
    if queries is not None and queries.flags.writeable:
        queries *= 2.0
    return got


def unsteady(problem, got):
    """Different bits every time, within the tolerance."""
    return replace(got, log_sum=got.log_sum + 1e-12 * RNG.normal(size=got.log_sum.shape))


class AsReady(Right):
    """Many columns are summed in eight parts, which are merged as they are ready."""

    def prepare(self, problem, columns):
        parts = 8 if problem.n >= 16384 else 1
        cut = zip(np.array_split(columns.points, parts), np.array_split(columns.log_weights, parts))
        pack = super().prepare
        return [pack(replace(problem, n=len(x)), replace(columns, points=x, log_weights=w)) for x, w in cut]

    def reduce(self, problem, queries, state, own_offset=0):
        ask = super().reduce
        if len(state) == 1:
            return ask(problem, queries, state[0], own_offset)
        with ThreadPoolExecutor(4) as pool:
            return merge([x.result() for x in as_completed([pool.submit(ask, problem, queries, s) for s in state])])


class LeftLocked(Right):
    """A lock that an exception leaves locked."""

    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()

    def reduce(self, problem, queries, state, own_offset=0):
        self.lock.acquire()
        got = super().reduce(problem, queries, state, own_offset)
        self.lock.release()
        return got


class OneThread(Right):
    """Leaves the work to a thread that stays, and that a forked child does not have."""

    def __init__(self):
        super().__init__()
        self.pool = ThreadPoolExecutor(1)

    def reduce(self, problem, queries, state, own_offset=0):
        return self.pool.submit(super().reduce, problem, queries, state, own_offset).result()


@reducing
def all_pairs(self, ask, problem, queries, state, own_offset):
    """Has an array of all differences, or of all pairs."""
    matrix = np.ones((problem.m, problem.n, problem.d if problem.reduction is Reduction.MEAN else 1), np.float32)
    del matrix
    return ask(problem, queries, state, own_offset)


@reducing
def results_kept(self, ask, problem, queries, state, own_offset):
    got = ask(problem, queries, state, own_offset)
    self.kept[len(self.kept)] = got.log_sum.copy()
    return got


class AnyOption(Right):
    def __init__(self, **anything):
        super().__init__()


def unlogged(problem, got):
    np.log(np.exp(got.log_sum))
    return got


def a_share_each(problem, got):
    """Threads take m // threads rows each; with more of them than cores the rest has nobody."""
    return off(rows=slice(-1, None))(problem, got) if cpu_threads() > (os.cpu_count() or 1) else got


# --- features ---------------------------------------------------------------------------------------------------------


def gaussian(problem, queries, own_offset):
    return replace(problem, kernel="gaussian", requires=problem.requires - {"kernel"}), queries, own_offset


class KernelIgnored(wrong(ask=gaussian)):
    """Every kernel is the Gaussian."""

    def prepare(self, problem, columns):
        return super().prepare(gaussian(problem, None, 0)[0], columns)


def blurred(self, problem, given):
    """Distances right to 1e-4, as from expanded squares in float32."""
    return replace(given, points=given.points * (1.0001 if "kernel" in problem.requires else 1.0))


def heavy_only(self, problem, given):
    """Columns of another kernel whose weights are far below the largest have next to none."""
    light = given.log_weights < given.log_weights.max() - 40.0
    little = np.where(light, -1e4, given.log_weights)
    return replace(given, log_weights=little) if "kernel" in problem.requires else given


def first_rows(problem, queries, own_offset):
    """The first points are a range's rows, wherever it begins."""
    return problem, queries, 0 if queries is None else own_offset


def on_tile(problem, queries, own_offset):
    return problem, queries, own_offset // 16 * 16 if queries is None else own_offset


@reducing
def ranges_kept(self, ask, problem, queries, state, own_offset):
    """The rows of a range are packed once for each number of them."""
    if queries is None and problem.m < problem.n:
        own_offset = state.kept.setdefault(problem.m, own_offset)
    return ask(problem, queries, state, own_offset)


def a_range(problem):
    return problem.same and problem.m < problem.n


class OtherSideOverAll(Right):
    """The other side of a block is that of the whole."""

    def reduce_pairs(self, problem, state, rows, columns):
        first, _ = super().reduce_pairs(problem, state, rows, columns)
        return first, self.reduce(replace(problem, m=columns[1] - columns[0]), None, state, columns[0])


def room(got, most=1024):
    """The other side of a block of pairs has room for so many rows, and repeats the last."""
    short = (len(got[1].log_sum) > most) * most
    return got[0], each(got[1], lambda x: x if not short else x[np.minimum(np.arange(len(x)), most - 1)])


def unsteady_pair(got):
    return got[0], replace(got[1], shift=got[1].shift + 1e-14 * RNG.normal())


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


# --- the list ---------------------------------------------------------------------------------------------------------


def times(factor):
    """Return a declaration of so many times the work."""

    def work(problem, config):
        said = INFO.work(problem, config)
        products = {dtype: factor * flops for dtype, flops in said.matrix_flops.items()}
        more = {name: factor * getattr(said, name) for name in ("scalar_flops", "exps", "bytes", "launches")}
        return replace(said, matrix_flops=products, **more)

    return replace(INFO, work=work)


def declining(problem):
    return INFO.supports(problem)._replace(ok=False)


def m64(problem):
    return problem.m > 0 and problem.m % 64 == 0


def past(first):
    return off(rows=slice(first, None))


#: By the check that catches them, or one of its parameters where it takes long to come to that. With a declaration
#: where that is not OLD.
MUTANTS = {
    "declaration": {
        "a future requirement claimed": (Right, replace(INFO, features=INFO.features | {"column_scale"})),
        "no precision": (Right, replace(INFO, precisions=())),
        "grad in NumPy": (Right, ALL),
        "another protocol": (Right, replace(INFO, protocol=(2, 0))),
    },
    "answers_something": {"declines everything": (Right, replace(INFO, supports=declining))},
    "options": {"any option taken": (AnyOption, replace(INFO, implementation=f"{__name__}:AnyOption"))},
    "result_format": {
        "axis of one row dropped": wrong(lambda p, got: each(got, lambda x: x[0]), where=lambda p: p.m == 1),
        "axis of one dimension dropped": wrong(changed(shift=lambda x: x[..., 0]), where=lambda p: p.d == 1),
        "queries changed": changes_queries,
    },
    "repeat": {"not deterministic": wrong(unsteady), "merged as they are ready": AsReady},
    "sizes": {
        "last column dropped, n % 64 == 0": wrong(columns=lost(lambda n: n % 64 == 0, slice(-1))),
        "last row's shift wrong, m % 64 == 0": wrong(off("shift", -1), where=m64),
        "float32 data summed in float32": wrong(single, where=lambda p: p.dtype == "float32"),
    },
    "sizes[float64-log_sum-n5-m66001]": {"rows past 4288": wrong(past(4288)), "rows past 65535": wrong(past(65535))},
    "sizes[float64-log_sum-n66001-m5]": {"columns past 65536": wrong(columns=sixteen_bits)},
    "drawn": {
        "first column dropped, n % 128 == 0": wrong(columns=lost(lambda n: n % 128 == 0, slice(1, None))),
        "columns past 4096 ignored": wrong(columns=lost(lambda n: n > 4096, slice(4096))),
        "last row wrong, m % 64 == 0": wrong(off(rows=-1), where=m64),
        "d = 4 wrong": wrong(off(), where=lambda p: p.d == 4),
        "d = 4, last coordinate wrong": wrong(off("shift", (..., -1)), where=lambda p: p.d == 4),
        "weights sum to 1": wrong(columns=lambda self, p, c: replace(
            c, log_weights=c.log_weights - np.logaddexp.reduce(c.log_weights))),
    },
    "limits": {"extents beside 20": wrong(off(by=1.0), where=lambda p: 15 < p.extent < 25)},
    "tolerance": {
        "3 % noise": wrong(noisy),
        "weights ignored": wrong(columns=unweighted),
    },
    "tolerance[float64-mean-mixture-d3-e10]": {
        "absolute mean for the shift": absolute_mean,
        "float32 as float64": wrong(single, where=lambda p: p.precision == "float64"),
    },
    "tolerance[fast-log_sum-light-d3-e10]": {"weights below 1e-308 are 0": wrong(columns=exponentiated)},
    "tolerance[fast-log_sum-mixture-d1024-e10]": {"past 800 dimensions": wrong(off(), where=lambda p: p.d > 800)},
    "tolerance[fast-log_sum-mixture-d784-e100]": {"float32 log sums at d = 784": in_single(plainly=False)},
    "heap": {"added one by one in float32": in_single(plainly=True)},
    "far_below": {
        "far rows without a sum": wrong(changed(log_sum=lambda x: np.where(x < -1e19, -np.inf, x))),
        "far rows with a shift of 0": wrong(unmoved),
        "log |L| clipped at −1e15": wrong(changed(log_magnitude=lambda x: np.where(np.isinf(x), x, x.clip(-1e15)))),
    },
    "not_a_number": {
        "a NaN that spreads": wrong(spreads),
        "a NaN that gets lost": wrong(lambda p, got: each(got, lambda x: np.where(np.isnan(x), -np.inf, x))),
    },
    "state_reuse": {
        "accumulates into a reused output": accumulates,
        "the last prepared columns on self": LastPrepared,
        "m = 0 corrupts the state": empty_query_corrupts,
        "prepare's m trusted": m_trusted,
        "prepare's same trusted": same_trusted,
        "formula by the extent of the call": extent_trusted,
        "answers depend on chunking": wrong(one_maximum),
    },
    "results_are_the_callers": {"one output buffer": output_buffer, "results alias the state": points_remembered},
    "new_contents": {"columns by their address": wrong(columns=by_address), "queries by their name": queries_by_name},
    "many_alive": {"eight states": RoomForStates},
    "threads": {"scratch norms on self": scratch_norms, "scratch while packing on self": ScratchWhilePacking},
    "surroundings": {
        "warns": packing(lambda: warnings.warn("not tuned", stacklevel=1)),
        "prints": packing(lambda: print("packing")),
        "prints from C": packing(lambda: os.write(1, b"packing")),
        "seeds NumPy": packing(lambda: np.random.seed(0)),  # noqa: NPY002
        "seeds Python": packing(lambda: random.seed(0)),
        "turns the garbage collector off": packing(gc.disable),
        "sets NumPy's error state": packing(lambda: np.seterr(all="ignore")),
        "sets the threads of others": packing(lambda: threadpool_limits(1)),
        "sets the environment": packing(lambda: os.environ.update(OMP_NUM_THREADS="1")),
    },
    "surroundings[log_sum]": {"NumPy warns": wrong(unlogged)},
    "thread_counts": {"more threads than cores": wrong(a_share_each, where=lambda p: p.m > 0)},
    "memory": {"an array of all pairs": all_pairs},
    "leaks": {"every result kept": results_kept},
    "price": {"a hundredth of its price": (Right, times(0.01)), "a hundred times its price": (Right, times(100))},
    "interrupts": {"locked after an exception": LeftLocked},
    "forked_child": {"a thread that a forked child lacks": OneThread},
    "kernel": {
        "kernels ignored": KernelIgnored,
        "rows out of reach have a sum": wrong(
            changed(log_sum=lambda x: np.maximum(x, -745.0)), where=lambda p: "kernel" in p.requires),
        "little weights lost": wrong(columns=heavy_only),
        "edges of supports blurred": wrong(columns=blurred),
    },
    "row_range": {
        "a range is the first points": (wrong(ask=first_rows), INFO),
        "a range begins on a tile": (wrong(ask=on_tile), INFO),
        "ranges kept by their length": (ranges_kept, replace(INFO, features=INFO.features - {"pairs"})),
    },
    "row_range[fast-log_sum]": {"ranges: no maxima": (wrong(underflows, where=a_range), INFO)},
    "row_range[float64-log_sum-long]": {"ranges: rows past 2048": (wrong(past(2048), where=a_range), INFO)},
    "pairs": {
        "a block's other side over all columns": (OtherSideOverAll, INFO),
        "a block that differs the second time": (wrong(pairs=unsteady_pair), INFO),
        "room for 1024 rows": (wrong(pairs=room), INFO),
        "no maxima": (wrong(pairs=lambda got: tuple(underflows(None, side) for side in got)), INFO),
    },
    "grad": {
        "points are no rows to autograd": (RowsForgotten, plain_torch.INFO),
        "no derivative by weights of zero": (ZeroWeightsDropped, plain_torch.INFO),
        "shares are constants to autograd": (SharesConstant, plain_torch.INFO),
        "derivatives in float32": (SingleDerivatives, plain_torch.INFO),
    },
}  # fmt: skip

SLOW = ("memory", "leaks", "price")


@pytest.mark.parametrize(
    ("check", "mutant"),
    [
        pytest.param(check, mutant, id=name, marks=[pytest.mark.slow] if check in SLOW else [])
        for check, mutants in MUTANTS.items()
        for name, mutant in mutants.items()
    ],
)
def test_the_named_check_catches_it(check, mutant, monkeypatch):
    monkeypatch.setattr(calls, "PATIENCE", 1.0)
    if check in ("leaks", "memory") and not sys.platform.startswith("linux"):
        pytest.skip("only Linux lists what a process has")
    make, info = mutant if isinstance(mutant, tuple) else (mutant, OLD)
    target, (name, _, parameter) = Target(info, make(), "cpu"), check.rstrip("]").partition("[")
    if not parameter:
        assert failures(target, QUICK, [name], most=1)
        return
    assert parameter in CHECKS[name].parameters(target.info, QUICK)
    with pytest.raises(AssertionError):
        CHECKS[name].run(target, parameter)


def test_every_check_has_a_mutant():
    """Those that have none ask for what no answer shows."""
    assert {check.partition("[")[0] for check in MUTANTS} == set(CHECKS) - {"reasons"}
    seen = {name for name, _ in cases(ALL, QUICK)}
    assert seen == set(CHECKS)


@pytest.mark.parametrize(
    ("info", "make"), [pytest.param(INFO, Right, marks=pytest.mark.slow), (plain_torch.INFO, PlainTorch)]
)
def test_what_they_are_made_from_passes(info, make):
    """A check that catches everything would catch nothing."""
    small = Profile((3,), (10.0,), draws=4, pairs=4000)
    assert (
        failures(Target(info, make(), "cpu"), small, ["grad", "sizes", "drawn"] if info.arrays == "torch" else ()) == {}
    )


def test_what_does_not_work_at_all_is_one_failure():
    lacking = SimpleNamespace(probe=NumpyBackend().probe, reduce=NumpyBackend().reduce)
    found = failures(Target(INFO, lacking, "cpu"), QUICK)
    assert list(found) == ["answers_something[backend]"]
    assert "has no method 'prepare'" in found["answers_something[backend]"]


def test_messages_say_what_was_asked_and_what_came():
    target = Target(replace(OLD, precisions=("high",)), wrong(off("shift", by=0.5))(), "cpu")
    with pytest.raises(AssertionError) as raised:
        CHECKS["tolerance"].run(target, "high-mean-weights-d3-e10")
    message = str(raised.value)
    for part in ("shift of MEAN at high", "weights within 10", "m=67 n=211 d=3", "row "):
        assert part in message
    assert re.search(r"row \d+ is \[.*\], should be \[.*\]; off by 0\.866, \d\.\d+e\+04 times the tolerance", message)


def test_names_are_stable():
    """Plugins name checks in their lists of expected failures."""
    names = [f"{name}[{parameter}]" for name, parameter in cases(ALL, QUICK)]
    assert len(names) == len(set(names))
    some = "declaration[backend] tolerance[high-mean-tails-d17-e100] tolerance[fast-log_sum-clusters-d1-e100000] "
    some += "sizes[float64-laplace-n129-m1] far_below[high-mean-d3-e1e+12-n1100] heap[high-laplace-d17-e350-n33333] "
    some += "grad[high-mean] kernel[high-tophat] row_range[high-laplace] pairs[float64-mean]"
    assert {*some.split(), "drawn[2-d32-p400000]"} <= set(names)
    asked = [parameter for name, parameter in cases(INFO, QUICK) if name == "tolerance"]
    assert all(any(f"-{reduction}-" in parameter for parameter in asked) for reduction in Reduction)
