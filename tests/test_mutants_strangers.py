"""Backends as a stranger might write them, each wrong in one way; named checks of the suite must catch every one.

They are right on the sizes, types and calls that come first to mind: what is wrong shows at the edge of a tile, for
float32 data, where two features meet, from several threads, in the second call. Run with `-s` for the table.
"""

import gc
import os
import random
import sys
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace

import numpy as np
import pytest
from sdkde_numpy import info
from sdkde_numpy.backend import NumpyBackend
from threadpoolctl import threadpool_limits

from sdkde_core.plugin import concatenate, cpu_threads, each, merge
from sdkde_core.protocol import Reduction
from sdkde_core.testing.checks import CHECKS, PROFILES, Target, failures

#: As of protocol 1.0: ranges of the points, of which every mutant would have to know, have mutants of their own.
INFO = replace(info.INFO, protocol=(1, 0), features=info.INFO.features - {"range", "pairs"})

FIELDS = ("log_sum", "shift", "sign", "log_magnitude")


class Right(NumpyBackend):
    """The NumPy backend on one thread: what the mutants are made from."""

    def __init__(self):
        super().__init__(threads=1)


def spoil(field, rows=slice(None), by=0.01):
    """Return a change of some rows of a field."""

    def change(problem, got, own_offset):
        x = getattr(got, field)
        if x is None:
            return got
        x = x.copy()
        x[rows] = -x[rows] if field == "sign" else x[rows] + by
        return replace(got, **{field: x})

    return change


def when(holds: Callable, change: Callable):
    """A backend whose results are changed where ``holds(problem, own_offset)``."""

    class Changed(Right):
        def reduce(self, problem, queries, state, own_offset=0):
            got = super().reduce(problem, queries, state, own_offset)
            return change(problem, got, own_offset) if holds(problem, own_offset) else got

    return Changed


def asks_otherwise(other: Callable):
    """A backend that answers the question ``other(problem, own_offset)`` instead."""

    class Otherwise(Right):
        def reduce(self, problem, queries, state, own_offset=0):
            problem, own_offset = other(problem, own_offset)
            return super().reduce(problem, queries, state, own_offset)

    return Otherwise


def columns_lost(holds: Callable, kept: Callable):
    """A backend that sums over ``columns[kept(n)]`` only, where ``holds(n)``."""

    class Lost(Right):
        def prepare(self, problem, columns):
            points, n = columns.points, len(columns.points)
            if holds(n):
                columns = replace(columns, points=points[kept(n)], log_weights=columns.log_weights[kept(n)])
            return points, super().prepare(problem, columns)

        def reduce(self, problem, queries, state, own_offset=0):
            points, packed = state
            return super().reduce(problem, points if queries is None else queries, packed, own_offset)

    return Lost


# --- memory that is shared ------------------------------------------------------------------------------------------


class ScratchNorms(Right):
    """Keeps the rows' norms on itself from the beginning of a call to its end."""

    def reduce(self, problem, queries, state, own_offset=0):
        rows = state.formula.points if queries is None else queries
        norms = self.norms = 0.5 * np.vecdot(rows, rows)
        got = super().reduce(problem, queries, state, own_offset)
        off = self.norms - norms if len(self.norms) == len(norms) else 0.0
        return replace(got, log_sum=(got.log_sum.T + off).T)


class ScratchQueries(Right):
    """Copies the rows into memory of its own, and sums from there in slabs."""

    def reduce(self, problem, queries, state, own_offset=0):
        if queries is None or problem.m < 2:
            return super().reduce(problem, queries, state, own_offset)
        self.rows, parts = queries, []
        for start, stop in ((0, problem.m // 2), (problem.m // 2, problem.m)):
            part = replace(problem, m=stop - start)
            parts.append(super().reduce(part, self.rows[start:stop], state, own_offset + start))
        return concatenate(parts)


class ScratchWhilePacking(Right):
    """Packs through memory of its own."""

    def prepare(self, problem, columns):
        self.packed = columns.points
        np.sort(columns.points.ravel())  # what else there is to do
        return super().prepare(problem, replace(columns, points=self.packed))


class LastPrepared(Right):
    """Keeps the columns that were prepared last on itself."""

    def prepare(self, problem, columns):
        self.last = super().prepare(problem, columns)
        return self.last

    def reduce(self, problem, queries, state, own_offset=0):
        return super().reduce(problem, queries, self.last, own_offset)


class OutputBuffer(Right):
    """Writes every result into the same memory; as much as is needed of it is returned."""

    fields = FIELDS

    def __init__(self):
        super().__init__()
        self.memory = {}

    def where(self, state):
        return self.memory

    def reduce(self, problem, queries, state, own_offset=0):
        got, memory = super().reduce(problem, queries, self.state(state), own_offset), self.where(state)
        found = {}
        for name in FIELDS:
            x = getattr(got, name)
            if x is None or name not in self.fields:
                found[name] = x
                continue
            key = (name, x.shape[1:])
            if key not in memory or len(memory[key]) < len(x):
                memory[key] = np.empty_like(x)
            memory[key][: len(x)] = x
            found[name] = memory[key][: len(x)]
        return replace(got, **found)

    def state(self, state):
        return state


class StateBuffer(OutputBuffer):
    """Keeps the memory of results with the state."""

    def prepare(self, problem, columns):
        return super().prepare(problem, columns), {}

    def state(self, state):
        return state[0]

    def where(self, state):
        return state[1]


class PointsRemembered(Right):
    """Answers for the points themselves once, and hands out the same arrays from then on."""

    def prepare(self, problem, columns):
        return super().prepare(problem, columns), {}

    def reduce(self, problem, queries, state, own_offset=0):
        packed, kept = state
        if queries is not None:
            return super().reduce(problem, queries, packed, own_offset)
        if problem not in kept:
            kept[problem] = super().reduce(problem, queries, packed, own_offset)
        return kept[problem]


class EmptyQueryCorrupts(Right):
    """An empty query leaves the state without its last column."""

    def prepare(self, problem, columns):
        short = replace(columns, points=columns.points[:-1], log_weights=columns.log_weights[:-1])
        return {"rows": columns.points, "state": super().prepare(problem, columns), "columns": short}

    def reduce(self, problem, queries, state, own_offset=0):
        if problem.m == 0 and problem.n > 1:
            state["state"] = super().prepare(problem, state["columns"])
        return super().reduce(problem, state["rows"] if queries is None else queries, state["state"], own_offset)


class ExpectedRowsTrusted(Right):
    """Has room for as many rows as ``prepare`` was told, and repeats the last of them."""

    def prepare(self, problem, columns):
        return max(1, problem.m), super().prepare(problem, columns)

    def reduce(self, problem, queries, state, own_offset=0):
        room, packed = state
        got = super().reduce(problem, queries, packed, own_offset)
        return each(got, lambda x: np.concatenate([x[:room], np.repeat(x[room - 1 : room], max(0, len(x) - room), 0)]))


class SameTrusted(Right):
    """Takes the rows to be the points whenever ``prepare`` was told so."""

    def prepare(self, problem, columns):
        return problem.same, super().prepare(problem, columns)

    def reduce(self, problem, queries, state, own_offset=0):
        same, packed = state
        if same and queries is not None and problem.m <= problem.n:
            queries = packed.formula.points[: problem.m]
        return super().reduce(problem, queries, packed, own_offset)


# --- features -------------------------------------------------------------------------------------------------------


def without(feature):
    return lambda problem, own_offset: (replace(problem, requires=problem.requires - {feature}), own_offset)


def both(problem, *features):
    return set(features) <= problem.requires


def dropped_axis(axis, reductions=tuple(Reduction)):
    """A backend that drops an axis of length one."""

    class Dropped(Right):
        def reduce(self, problem, queries, state, own_offset=0):
            got = super().reduce(problem, queries, state, own_offset)
            if problem.reduction not in reductions:
                return got
            if axis == "row" and problem.m == 1:
                return each(got, lambda x: x[0])
            if axis == "dimension" and problem.d == 1 and got.shift is not None:
                return replace(got, shift=got.shift[..., 0])
            return got

    return Dropped


def clipped(field):
    def change(problem, got, own_offset):
        x = getattr(got, field)
        return got if x is None else replace(got, **{field: np.where(np.isinf(x), x, np.maximum(x, -1e15))})

    return when(lambda problem, own_offset: True, change)


def single(problem, got, own_offset):
    return each(got, lambda x: x.astype(np.float32).astype(np.float64))


def wrapped(problem, own_offset):
    """An offset of n or more begins again at the first column."""
    return problem, own_offset % problem.n if own_offset >= problem.n else own_offset


def at_least_0(problem, own_offset):
    return problem, max(0, own_offset)


def ignored(holds):
    return asks_otherwise(lambda p, o: without("exclude_self")(p, o) if holds(p, o) else (p, o))


# --- what shows at other sizes, in other places, or in what is around a call ----------------------------------------


def rows_past(first):
    """Return a change of the log sums of these rows."""
    return lambda got: replace(got, log_sum=np.concatenate([got.log_sum[:first], got.log_sum[first:] + 0.01]))


def underflows(got):
    """Sums of plain exponentials, relative to 1."""
    lost = got.log_sum < -745.0
    shift = None if got.shift is None else np.where(lost[..., None], 0.0, got.shift)
    return replace(got, log_sum=np.where(lost, -np.inf, got.log_sum), shift=shift)


def hooked(before=None, columns=None, after=None, pairs=None):
    """A backend with something of its own in its methods, for ``(self, problem, …)``."""

    class Hooked(Right):
        def __init__(self):
            super().__init__()
            self.kept, self.calls = {}, 0

        def prepare(self, problem, given):
            if before:
                before(self, problem)
            return super().prepare(problem, columns(self, problem, given) if columns else given)

        def reduce(self, problem, queries, state, own_offset=0):
            got = super().reduce(problem, queries, state, own_offset)
            return after(self, problem, queries, got) if after else got

        def reduce_pairs(self, problem, state, rows, others):
            got = super().reduce_pairs(problem, state, rows, others)
            return pairs(got) if pairs else got

    return Hooked


def a_range(problem, queries):
    return queries is None and problem.m < problem.n


def room(got, most=1024):
    """The other side of a block of pairs has room for so many rows, and repeats the last."""
    short = (len(got[1].log_sum) > most) * most
    return got[0], each(got[1], lambda x: x if not short else x[np.minimum(np.arange(len(x)), most - 1)])


def sixteen_bits(self, problem, given):
    index = np.arange(problem.n).astype(np.uint16)
    return replace(given, points=given.points[index], log_weights=given.log_weights[index])


def by_address(self, problem, given):
    """Copies columns once for each address."""
    key = given.points.ctypes.data, given.points.shape, given.log_weights[0]
    return self.kept.setdefault(key, replace(given, points=given.points.copy()))


def exponentiated(self, problem, given):
    """Weights come as their exponentials; those that are 0 count for nothing."""
    with np.errstate(all="ignore"):
        return replace(given, log_weights=np.maximum(np.log(np.exp(given.log_weights)), -1e4))


class QueriesByName(Right):
    """Keeps the rows of the last call, for the same array."""

    last = None

    def reduce(self, problem, queries, state, own_offset=0):
        if queries is not None and (self.last is None or self.last[0] is not queries):
            self.last = queries, queries.copy()
        return super().reduce(problem, queries if queries is None else self.last[1], state, own_offset)


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


class AllPairs(Right):
    """Has an array of all differences, or of all pairs."""

    def reduce(self, problem, queries, state, own_offset=0):
        d = problem.d if problem.reduction is Reduction.MEAN else 1
        self.matrix = np.ones((problem.m, problem.n, d), np.float32)
        del self.matrix
        return super().reduce(problem, queries, state, own_offset)


class EightStates(Right):
    """Has room for eight states."""

    def __init__(self):
        super().__init__()
        self.room, self.last = {}, 0

    def prepare(self, problem, columns):
        self.last = (self.last + 1) % 8
        self.room[self.last] = super().prepare(problem, columns)
        return self.last

    def reduce(self, problem, queries, state, own_offset=0):
        return super().reduce(problem, queries, self.room[state], own_offset)


class KnowsTheOption(Right):
    """Refuses one name."""

    def __init__(self, **options):
        super().__init__()
        if "no_such_option_of_any_backend" in options:
            raise TypeError("there is no such option")


def a_share_each(self, problem, queries, got):
    """Threads take m // threads rows each; with more of them than cores the rest has nobody."""
    return rows_past(-1)(got) if cpu_threads() > (os.cpu_count() or 1) and problem.m else got


class ExtentOfCall(Right):
    """Packs columns for the extent that ``prepare`` is told, and looks for those of the call's."""

    def prepare(self, problem, columns):
        return super().prepare(problem, columns), problem.extent

    def reduce(self, problem, queries, state, own_offset=0):
        assert problem.extent > 0.5 * state[1], "packed for another extent"
        return super().reduce(problem, queries, state[0], own_offset)


def keep_result(self, problem, queries, got):
    self.kept[self.calls] = got.log_sum.copy()
    self.calls += 1
    return got


def unlogged(self, problem, queries, got):
    np.log(np.exp(got.log_sum))
    return got


def times(factor):
    """Return a declaration of so many times the work."""

    def work(problem, config):
        said = info.INFO.work(problem, config)
        products = {dtype: factor * flops for dtype, flops in said.matrix_flops.items()}
        fields = {name: factor * getattr(said, name) for name in ("scalar_flops", "exps", "bytes", "launches")}
        return replace(said, matrix_flops=products, **fields)

    return replace(info.INFO, work=work)


# --- the list -------------------------------------------------------------------------------------------------------


def m64(problem, own_offset):
    return problem.m > 0 and problem.m % 64 == 0


def past(k):
    return slice(k, None)


MANY_ROWS = "sizes[float64-log_sum-n5-m66001]"

#: Mutant, and the checks each of which catches it, in the quick profile and in the full one; as ``"check[parameter]"``
#: where it takes long to come to that.
MUTANTS = {
    "scratch norms on self": (ScratchNorms, {"threads"}),
    "scratch rows on self": (ScratchQueries, {"threads"}),
    "scratch while packing on self": (ScratchWhilePacking, {"threads"}),
    "the last prepared columns on self": (LastPrepared, {"state_reuse", "threads"}),
    "one output buffer": (OutputBuffer, {"results_are_the_callers", "threads"}),
    "an output buffer in the state": (StateBuffer, {"results_are_the_callers", "threads"}),
    "results alias the state": (PointsRemembered, {"results_are_the_callers"}),
    "last column dropped, n % 64 == 0": (
        columns_lost(lambda n: n % 64 == 0, lambda n: slice(n - 1)),
        {"sizes", "drawn"},
    ),
    "first column dropped, n % 128 == 0": (
        columns_lost(lambda n: n % 128 == 0, lambda n: slice(1, None)),
        {"sizes", "drawn"},
    ),
    "columns past 4096 ignored": (columns_lost(lambda n: n > 4096, lambda n: slice(4096)), {"sizes", "drawn"}),
    "last row wrong, m % 64 == 0": (when(m64, spoil("log_sum", -1)), {"sizes", "drawn"}),
    "last row's shift wrong, m % 64 == 0": (when(m64, spoil("shift", -1)), {"sizes", "drawn"}),
    "rows past 2048 wrong": (when(lambda p, o: p.m > 2048, spoil("log_sum", past(2048))), {"sizes", "drawn"}),
    "float32 data summed in float32": (when(lambda p, o: p.dtype == "float32", single), {"sizes", "drawn"}),
    "d = 4 wrong": (when(lambda p, o: p.d == 4, spoil("log_sum")), {"drawn"}),
    "d = 4, last coordinate of the shift wrong": (when(lambda p, o: p.d == 4, spoil("shift", (..., -1))), {"drawn"}),
    "exclude_self ignored with weights": (ignored(lambda p, o: both(p, "weights")), {"exclude_self", "drawn"}),
    "exclude_self ignored at own_offset ≥ 1": (ignored(lambda p, o: o > 0), {"exclude_self", "drawn"}),
    "own_offset ≥ n wraps": (asks_otherwise(wrapped), {"exclude_self", "drawn"}),
    "negative own_offset taken as 0": (asks_otherwise(at_least_0), {"exclude_self", "drawn"}),
    "axis of one row dropped": (dropped_axis("row"), {"result_format"}),
    "axis of one dimension dropped": (dropped_axis("dimension"), {"result_format"}),
    "m = 0 corrupts the state": (EmptyQueryCorrupts, {"no_rows"}),
    "prepare's m trusted": (ExpectedRowsTrusted, {"expected_rows", "drawn"}),
    "prepare's same trusted": (SameTrusted, {"expected_rows"}),
    "ℓ clipped at −1e15": (clipped("log_sum"), {"far_below"}),
    "log |L| clipped at −1e15": (clipped("log_magnitude"), {"far_below"}),
    "pairs: room for 1024 rows": (hooked(pairs=room), {"pairs[fast-mean]"}),
    "pairs: no maxima": (hooked(pairs=lambda got: tuple(map(underflows, got))), {"pairs[fast-mean]"}),
    "ranges: no maxima": (
        hooked(after=lambda self, p, q, got: underflows(got) if a_range(p, q) else got),
        {"row_range[fast-log_sum]"},
    ),
    "ranges: rows past 2048": (
        hooked(after=lambda self, p, q, got: rows_past(2048)(got) if a_range(p, q) else got),
        {"row_range[float64-log_sum-long]"},
    ),
    "rows past 4288": (hooked(after=lambda self, p, q, got: rows_past(4288)(got)), {MANY_ROWS}),
    "rows past 65535": (hooked(after=lambda self, p, q, got: rows_past(65535)(got)), {MANY_ROWS}),
    "columns past 65536": (hooked(columns=sixteen_bits), {"sizes[float64-log_sum-n66001-m5]"}),
    "dimensions past 800": (
        hooked(after=lambda self, p, q, got: rows_past(0)(got) if p.d > 800 else got),
        {"wide[fast-log_sum-d1024]"},
    ),
    "more threads than cores": (hooked(after=a_share_each), {"thread_counts"}),
    "merged as they are ready": (AsReady, {"repeat_many"}),
    "columns by their address": (hooked(columns=by_address), {"new_contents"}),
    "queries by their name": (QueriesByName, {"new_contents"}),
    "weights below 1e-308 are 0": (hooked(columns=exponentiated), {"tolerance[fast-log_sum-light-d3-e10]"}),
    "an array of all pairs": (AllPairs, {"memory"}),
    "formula by the extent of the call": (ExtentOfCall, {"expected_rows"}),
    "every result kept": (hooked(after=keep_result), {"leaks"}),
    "eight states": (EightStates, {"many_alive"}),
    "warns": (hooked(before=lambda self, p: warnings.warn("not tuned", stacklevel=1)), {"surroundings"}),
    "NumPy warns": (hooked(after=unlogged), {"surroundings[log_sum]"}),
    "prints": (hooked(before=lambda self, p: print("packing")), {"surroundings"}),
    "prints from C": (hooked(before=lambda self, p: os.write(1, b"packing")), {"surroundings"}),
    "seeds NumPy": (hooked(before=lambda self, p: np.random.seed(0)), {"surroundings"}),  # noqa: NPY002
    "seeds Python": (hooked(before=lambda self, p: random.seed(0)), {"surroundings"}),
    "turns the garbage collector off": (hooked(before=lambda self, p: gc.disable()), {"surroundings"}),
    "sets NumPy's error state": (hooked(before=lambda self, p: np.seterr(all="ignore")), {"surroundings"}),
    "sets the threads of others": (hooked(before=lambda self, p: threadpool_limits(1)), {"surroundings"}),
    "sets the environment": (hooked(before=lambda self, p: os.environ.update(OMP_NUM_THREADS="1")), {"surroundings"}),
    "knows an option by its name": (
        KnowsTheOption,
        {"options"},
        replace(info.INFO, implementation=f"{__name__}:KnowsTheOption"),
    ),
    "a thirtieth of its price": (Right, {"price"}, times(1 / 30)),
    "thirty times its price": (Right, {"price"}, times(30)),
}


def _caught(name, profile):
    make, checks, *declared = MUTANTS[name]
    if checks & {"leaks", "memory"} and not sys.platform.startswith("linux"):
        pytest.skip("only Linux lists what a process has")
    hooks = any(check.startswith(("pairs", "row_range")) for check in checks)
    target = Target(*declared or [info.INFO if hooks else INFO], make(), "cpu")
    return {check for check in sorted(checks) if _fails(target, check, profile)}


def _fails(target, check, profile):
    name, _, parameter = check.rstrip("]").partition("[")
    if not parameter:
        return bool(failures(target, PROFILES[profile], [name], most=1))
    assert parameter in CHECKS[name].parameters(target.info, PROFILES[profile])
    with pytest.raises(AssertionError):
        CHECKS[name].run(target, parameter)
    return True


#: Caught by checks of many calls, or of large arrays.
LONG = {name for name, (_, checks, *_) in MUTANTS.items() if checks & {"leaks", "memory", "price"}}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow) if name in LONG else name for name in MUTANTS],
)
def test_named_checks_catch_it(name):
    caught = _caught(name, "quick")
    print(f"| {name} | {', '.join(sorted(caught))} |")
    assert caught == MUTANTS[name][1]


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_named_checks_of_the_full_profile_catch_it(name):
    assert _caught(name, "full") == MUTANTS[name][1]


@pytest.mark.slow  # test_conformance_numpy.py has the same checks
def test_what_they_are_made_from_passes():
    """A check that catches everything would catch nothing."""
    named = {check.partition("[")[0] for _, checks, *_ in MUTANTS.values() for check in checks}
    assert named <= set(CHECKS)
    assert failures(Target(info.INFO, Right(), "cpu"), PROFILES["quick"], sorted(named)) == {}
