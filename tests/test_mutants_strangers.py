"""Backends as a stranger might write them, each wrong in one way; named checks of the suite must catch every one.

They are right on the sizes, types and calls that come first to mind: what is wrong shows at the edge of a tile, for
float32 data, where two features meet, from several threads, in the second call. Run with `-s` for the table.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
from sdkde_numpy import info
from sdkde_numpy.backend import NumpyBackend

from sdkde_core.plugin import concatenate, each, stack
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


def columns_lost(holds: Callable, kept: Callable, reductions=tuple(Reduction)):
    """A backend that sums over ``columns[kept(n)]`` only, where ``holds(n)``."""

    class Lost(Right):
        def prepare(self, problem, columns):
            points, n = columns.points, len(columns.points)
            if holds(n) and problem.reduction in reductions:
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


class ShiftBuffer(OutputBuffer):
    """Writes every shift into the same memory."""

    fields = ("shift",)


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


class FirstScaleExcludes(Right):
    """Leaves the own column out at the first scale only."""

    def reduce(self, problem, queries, state, own_offset=0):
        got = super().reduce(problem, queries, state, own_offset)
        if not both(problem, "exclude_self", "multi_scale"):
            return got
        rest = replace(problem, requires=problem.requires - {"exclude_self"})
        other = super().reduce(rest, queries, state, own_offset)
        parts = [each(other if s else got, lambda x, s=s: x[:, s]) for s in range(len(problem.scales))]
        return stack(parts)


class ShiftInScaled(Right):
    """Gives shifts in bandwidths of their scale."""

    def reduce(self, problem, queries, state, own_offset=0):
        got = super().reduce(problem, queries, state, own_offset)
        if got.shift is None or not problem.scales:
            return got
        return replace(got, shift=got.shift / np.array(problem.scales)[:, None])


class FactorUnscaled(Right):
    """LAPLACE's factor has r², not r² / s²."""

    def reduce(self, problem, queries, state, own_offset=0):
        got = super().reduce(problem, queries, state, own_offset)
        if got.sign is None or not problem.scales:
            return got
        plain = replace(problem, reduction=Reduction.LOG_SUM)
        kernel = super().reduce(plain, queries, state, own_offset).log_sum
        with np.errstate(all="ignore"):
            half = 1.0 + 0.5 * problem.d
            signed = got.sign * np.exp(got.log_magnitude - kernel)  # of the scale's sums
            signed = half + (signed - half) * np.array(problem.scales) ** 2
            return replace(got, sign=np.sign(signed), log_magnitude=np.log(abs(signed)) + kernel)


def dropped_axis(axis, reductions=tuple(Reduction)):
    """A backend that drops an axis of length one."""

    class Dropped(Right):
        def reduce(self, problem, queries, state, own_offset=0):
            got = super().reduce(problem, queries, state, own_offset)
            if problem.reduction not in reductions:
                return got
            if axis == "scale" and len(problem.scales) == 1:
                return each(got, lambda x: x[:, 0])
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


# --- the list -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mutant:
    make: Callable
    checks: set  # each catches it, in the quick profile and in the full one


def m64(problem, own_offset):
    return problem.m > 0 and problem.m % 64 == 0


def past(k):
    return slice(k, None)


MUTANTS = {
    "scratch norms on self": Mutant(ScratchNorms, {"threads"}),
    "scratch rows on self": Mutant(ScratchQueries, {"threads"}),
    "scratch while packing on self": Mutant(ScratchWhilePacking, {"threads"}),
    "the last prepared columns on self": Mutant(LastPrepared, {"state_reuse", "threads"}),
    "one output buffer": Mutant(OutputBuffer, {"results_are_the_callers", "threads"}),
    "one buffer of shifts": Mutant(ShiftBuffer, {"results_are_the_callers", "threads"}),
    "an output buffer in the state": Mutant(StateBuffer, {"results_are_the_callers", "threads"}),
    "results alias the state": Mutant(PointsRemembered, {"results_are_the_callers"}),
    "last column dropped, n % 64 == 0": Mutant(
        columns_lost(lambda n: n % 64 == 0, lambda n: slice(n - 1)), {"sizes", "drawn"}
    ),
    "last column dropped, n % 256 == 0, MEAN": Mutant(
        columns_lost(lambda n: n % 256 == 0, lambda n: slice(n - 1), (Reduction.MEAN,)), {"sizes", "drawn"}
    ),
    "first column dropped, n % 128 == 0": Mutant(
        columns_lost(lambda n: n % 128 == 0, lambda n: slice(1, None)), {"sizes", "drawn"}
    ),
    "columns past 4096 ignored": Mutant(columns_lost(lambda n: n > 4096, lambda n: slice(4096)), {"sizes", "drawn"}),
    "columns past 4096 ignored, LAPLACE": Mutant(
        columns_lost(lambda n: n > 4096, lambda n: slice(4096), (Reduction.LAPLACE,)), {"sizes", "drawn"}
    ),
    "last row wrong, m % 64 == 0": Mutant(when(m64, spoil("log_sum", -1)), {"sizes", "drawn"}),
    "last row's shift wrong, m % 64 == 0": Mutant(when(m64, spoil("shift", -1)), {"sizes", "drawn"}),
    "last row's sign wrong, m % 64 == 0": Mutant(when(m64, spoil("sign", -1)), {"sizes", "drawn"}),
    "rows past 2048 wrong": Mutant(when(lambda p, o: p.m > 2048, spoil("log_sum", past(2048))), {"sizes", "drawn"}),
    "rows past 2048, shifts wrong": Mutant(
        when(lambda p, o: p.m > 2048, spoil("shift", past(2048))), {"sizes", "drawn"}
    ),
    "float32 data summed in float32": Mutant(when(lambda p, o: p.dtype == "float32", single), {"sizes", "drawn"}),
    "float32 data, shift wrong": Mutant(when(lambda p, o: p.dtype == "float32", spoil("shift")), {"sizes", "drawn"}),
    "d = 4 wrong": Mutant(when(lambda p, o: p.d == 4, spoil("log_sum")), {"drawn"}),
    "d = 4, last coordinate of the shift wrong": Mutant(
        when(lambda p, o: p.d == 4, spoil("shift", (..., -1))), {"drawn"}
    ),
    "d = 4, magnitude wrong": Mutant(when(lambda p, o: p.d == 4, spoil("log_magnitude")), {"drawn"}),
    "exclude_self ignored with weights": Mutant(ignored(lambda p, o: both(p, "weights")), {"exclude_self", "drawn"}),
    "exclude_self ignored at own_offset ≥ 1": Mutant(ignored(lambda p, o: o > 0), {"exclude_self", "drawn"}),
    "own_offset ≥ n wraps": Mutant(asks_otherwise(wrapped), {"exclude_self", "drawn"}),
    "negative own_offset taken as 0": Mutant(asks_otherwise(at_least_0), {"exclude_self", "drawn"}),
    "exclude_self at the first scale only": Mutant(FirstScaleExcludes, {"multi_scale", "drawn"}),
    "exclude_self ignored with several scales": Mutant(
        ignored(lambda p, o: len(p.scales) > 1), {"multi_scale", "drawn"}
    ),
    "shift in scaled bandwidths": Mutant(ShiftInScaled, {"multi_scale", "drawn"}),
    "LAPLACE's factor unscaled": Mutant(FactorUnscaled, {"multi_scale", "drawn"}),
    "axis of one row dropped": Mutant(dropped_axis("row"), {"result_format"}),
    "axis of one dimension dropped": Mutant(dropped_axis("dimension"), {"result_format"}),
    "axis of one scale dropped": Mutant(dropped_axis("scale"), {"result_format", "multi_scale"}),
    "m = 0 corrupts the state": Mutant(EmptyQueryCorrupts, {"no_rows"}),
    "prepare's m trusted": Mutant(ExpectedRowsTrusted, {"expected_rows", "drawn"}),
    "prepare's same trusted": Mutant(SameTrusted, {"expected_rows"}),
    "ℓ clipped at −1e15": Mutant(clipped("log_sum"), {"far_below"}),
    "log |L| clipped at −1e15": Mutant(clipped("log_magnitude"), {"far_below"}),
}


def _caught(name, profile):
    mutant = MUTANTS[name]
    target = Target(INFO, mutant.make(), "cpu")
    return {check for check in sorted(mutant.checks) if failures(target, PROFILES[profile], [check], most=1)}


@pytest.mark.parametrize("name", MUTANTS)
def test_named_checks_catch_it(name):
    caught = _caught(name, "quick")
    print(f"| {name} | {', '.join(sorted(caught))} |")
    assert caught == MUTANTS[name].checks


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_named_checks_of_the_full_profile_catch_it(name):
    assert _caught(name, "full") == MUTANTS[name].checks


@pytest.mark.slow  # test_conformance_numpy.py has the same checks
def test_what_they_are_made_from_passes():
    """A check that catches everything would catch nothing."""
    named = set().union(*(mutant.checks for mutant in MUTANTS.values()))
    assert named <= set(CHECKS)
    assert failures(Target(INFO, Right(), "cpu"), PROFILES["quick"], sorted(named)) == {}
