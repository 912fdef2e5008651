"""benchmarks/choice: which cases it draws, how it judges, and its errors; nothing is timed that counts."""

import functools
import importlib
import math
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import reference

from sdkde_core.protocol import TOLERANCES, Reduction

ROOT = Path(__file__).parent.parent
MODULES = {name: f"benchmarks.choice.{name}" for name in ("cases", "worker", "report")}
MODULES["main"] = "benchmarks.choice.__main__"

pytestmark = pytest.mark.filterwarnings("ignore:the Laplace estimate is negative:RuntimeWarning")


@pytest.fixture(scope="module")
def choice():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT)  # also of processes that are started meanwhile
        yield SimpleNamespace(**{name: importlib.import_module(module) for name, module in MODULES.items()})


# --- the grid -------------------------------------------------------------------------------------------------------


def test_every_value_comes_equally_often_and_nothing_asks_too_much(choice):
    cases = choice.cases

    def prices(case):  # 0.1 ns a pair, and one that is not worth measuring
        return [cases.Price(1e-10 * case.pairs, 0.0), cases.Price(1e-8 * case.pairs, 0.0)]

    drawn = cases.draw(120, ("host", "device"), 3, 0.5, 1e9, prices)
    assert drawn == cases.draw(120, ("host", "device"), 3, 0.5, 1e9, prices)
    assert drawn != cases.draw(120, ("host", "device"), 4, 0.5, 1e9, prices)
    for axis, count in (("method", 3), ("precision", 3), ("d", 8), ("spread", 3), ("kind", 7), ("place", 2)):
        assert set(Counter(getattr(c, axis) for c in drawn).values()) == {120 // count, -(-120 // count)}
    assert all(cases.effort(prices(c)) <= 0.5 and c.pairs <= 1e9 for c in drawn)
    assert all(max(c.n, c.m) * c.d <= cases.NUMBERS for c in drawn)
    assert len({(c.n, c.m) for c in drawn}) > 5
    assert max(c.pairs for c in drawn) > 1e8  # not all fell to the smallest


def test_auto_is_asked_for_host_data_as_if_no_gpu_had_been_used(choice, monkeypatch):
    monkeypatch.setattr("sdkde_core.choice.judge.has_context", lambda device: True)
    case = choice.cases.Case("kde", "high", 1000, 100, 2, "third")
    asked = {way: choice.main.Bench("cuda").explain(case, *choice.cases.data(case), way) for way in ("whole", "calls")}
    assert (asked["whole"].calls, asked["calls"].calls) == (1, 10)
    counted = [next(c.counted_seconds for c in e.candidates if c.name == "numpy") for e in asked.values()]
    assert counted == pytest.approx([0.12, 0.012])  # as it declares


@pytest.mark.parametrize(("spread", "kind"), [("silverman", "benign"), ("tenth", "benign"), ("silverman", "outliers")])
def test_data(choice, spread, kind):
    case = choice.cases.Case("kde", "fast", 3000, 500, 3, spread, kind=kind)
    (x, y, h), (again, _, _) = (choice.cases.data(case) for _ in range(2))
    assert x.dtype == np.float32 and x.shape == (3000, 3) and y.shape == (500, 3) and np.array_equal(x, again)
    radii = np.sqrt((x**2).sum(axis=1)) / h
    out = radii > 0.9 * choice.cases.OUT
    assert out.sum() == out[:3].sum() == (3 if kind == "outliers" else 0)
    std = float(x[~out].std(axis=0).mean())
    silverman = 0.9 * std * 3000 ** (-1 / 7)
    assert h == pytest.approx(silverman * (0.1 if spread == "tenth" else 1.0), rel=0.01)


# --- verdicts -------------------------------------------------------------------------------------------------------

STARTUPS = {"a": 0.1, "b": 1.0, "c (cuda:0)": 3.0}


def candidate(name, seconds=None, chosen=False, outcome="measured", device="cpu", predicted=1.0, **more):
    entry = {"name": name, "device": device, "predicted": predicted, "predicted_passes": [predicted], "chosen": chosen}
    entry |= {"declared_startup": 0.5, "reason": "", "outcome": outcome}
    if seconds is not None:
        entry |= {"seconds": seconds, "pass_seconds": [seconds], "error": 0.1}
    return entry | more


def record(*candidates, place="host", d=2, **more):
    case = {"method": "kde", "precision": "high", "n": 10, "m": 5, "d": d, "spread": "tenth", "place": place, "seed": 0}
    return {"case": case, "candidates": list(candidates)} | more


def test_start_up_counts_in_three_ways(choice):
    judge = choice.report.judge
    slow = candidate("c", 0.1, device="cuda:0", compiling=20.0, compiled=False)
    both = record(candidate("a", 0.6), candidate("b", 0.35), slow, picks={"whole": "a", "calls": "a", "warm": "b"})
    found = {way: judge(both, STARTUPS, way) for way in choice.report.WAYS}
    assert [(v.pick, v.fastest) for v in found.values()] == [("a", "a"), ("a", "b"), ("b", "b")]
    assert [v.pick_seconds for v in found.values()] == pytest.approx([0.7, 0.61, 0.35])
    assert [v.ratio for v in found.values()] == pytest.approx([1.0, 0.61 / 0.45, 1.0])
    device = both | {"case": both["case"] | {"place": "device"}}
    there = {way: judge(device, STARTUPS, way) for way in choice.report.WAYS_OF["device"]}
    assert [v.fastest for v in there.values()] == ["c (cuda:0)", "c (cuda:0)"]
    assert there["calls"].fastest_seconds == pytest.approx(0.1 + 23e-4)
    assert there["warm"].fastest_seconds == pytest.approx(0.1 + 20e-4)


def test_what_was_not_measured_is_no_rival_and_what_was_given_up_a_bound(choice):
    judge = functools.partial(choice.report.judge, way="whole")
    skipped, failed = candidate("b", outcome="skipped"), candidate("c", outcome="failed", device="cuda:0", why="no")
    over = candidate("b", 0.01, outcome="over")  # at least that
    alone = judge(record(candidate("a", 0.6, chosen=True), skipped, failed, over), STARTUPS)
    assert (alone.ratio, alone.at_least) == (1.0, False)
    given_up = judge(record(candidate("a", 5.0, chosen=True, outcome="over"), candidate("b", 0.2)), STARTUPS)
    assert given_up.at_least and given_up.ratio == pytest.approx(5.1 / 1.2)
    assert judge(record(candidate("a", outcome="failed", chosen=True), candidate("b", 0.2)), STARTUPS) is None
    assert judge(record(candidate("a", chosen=True, outcome="skipped")), STARTUPS) is None


# --- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["benign", "zeros", "counts", "clusters", "outliers", "heavy", "surface"])
def test_the_truth_leaves_nothing_out_that_counts(choice, kind):
    x, y, h = choice.cases.data(choice.cases.Case("kde", "high", 2000, 40, 3, "third", kind=kind))
    want, got = reference.sums(y, x, h), choice.worker.sums(y, x, h)
    for name in ("log_sum", "signed", "log_plus"):
        np.testing.assert_allclose(getattr(got, name), getattr(want, name), rtol=1e-14, atol=1e-14)
    np.testing.assert_allclose(got.shift / h, want.shift / h, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("method", ["kde", "laplace"])
@pytest.mark.parametrize("precision", ["fast", "high"])
def test_errors_are_over_the_tolerance(choice, method, precision):
    case, worker = choice.cases.Case(method, precision, 400, 30, 2, "third"), choice.worker
    x, y, h = choice.cases.data(case)
    want = worker.sums(y, x, h)
    x, y = x.astype(float), y.astype(float)
    log_p = reference.estimate(x, y, method=method, bandwidth=h, log=True)
    assert worker.density_error(case, log_p, want, h) < 1e-6
    row = int(np.argmax(np.where(want.signed > 0, want.signed, 0.0)))  # the largest of L over M, for Laplace
    off = 3 * TOLERANCES[precision][Reduction.LOG_SUM].at((want.log_sum if method == "kde" else want.log_plus)[row])
    share = 1.0 if method == "kde" else want.signed[row]
    log_p[row] += math.log1p(off / share) if method == "laplace" else off
    assert worker.density_error(case, log_p, want, h) == pytest.approx(3.0, rel=0.01)
    log_p[row] = math.nan
    assert worker.density_error(case, log_p, want, h) > 100


def test_a_negative_density_is_no_error_where_it_is_negative(choice):
    case, worker = choice.cases.Case("laplace", "high", 1, 1, 1, "silverman"), choice.worker
    want = worker.sums(np.array([[3.0]]), np.zeros((1, 1)), 1.0)
    assert want.signed < 0
    assert worker.density_error(case, np.array([math.nan]), want, 1.0) < 1e-9
    assert worker.density_error(case, want.log_plus, want, 1.0) > 100


def test_the_shifts_error(choice):
    case, worker = choice.cases.Case("sdkde", "high", 300, 30, 3, "silverman"), choice.worker
    x, _, h = choice.cases.data(case)
    want = worker.sums(x[:10], x, h)
    shift = want.shift / h
    assert worker.shift_error(case, shift, want, h) == 0.0
    shift[4, 1] += 2 * TOLERANCES["high"][Reduction.MEAN].absolute
    assert worker.shift_error(case, shift, want, h) == pytest.approx(2.0, rel=1e-3)


@pytest.mark.parametrize("method", ["kde", "sdkde", "laplace"])
def test_a_backend_is_measured(choice, method):
    case, worker = (
        choice.cases.Case(method, "high", 500, 60, 2, "silverman", kind="outliers"),
        choice.worker,
    )
    job = worker.Job(case, "numpy", "cpu", worker.truth(case, *choice.cases.data(case)))
    messages = list(worker.measure(job))
    assert [kind for kind, _ in messages] == ["ready", "first", "done"]
    done = messages[-1][1]
    assert 0 < done["seconds"] < 10 and len(done["times"]) <= choice.cases.CALLS
    assert len(done["pass_seconds"]) == (2 if method == "sdkde" else 1)
    assert 0 <= done["error"] < 1
