"""The search, against a synthetic space whose times are known, behind a runner that has no GPU."""

import itertools
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
import types
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import ClassVar

import pytest

optuna = pytest.importorskip("optuna")

from sdkde_autotune import lookup, offline, processes, worker  # noqa: E402
from sdkde_autotune.key import Key, canonical  # noqa: E402
from sdkde_autotune.problems import problems, task_of  # noqa: E402
from sdkde_autotune.runner import Outcome, Task  # noqa: E402
from sdkde_autotune.search import PAPER, candidates, search, size  # noqa: E402
from sdkde_autotune.simulate import RecordedSpace, simulate  # noqa: E402
from sdkde_autotune.store import Store  # noqa: E402

from sdkde_core.choice import cards, registry  # noqa: E402
from sdkde_core.protocol import Problem, Reduction  # noqa: E402
from sdkde_core.tuning import Compiled, Query  # noqa: E402


class Hills:
    """A stranger's space: four parameters, 217 configurations that can run, smooth times with an interaction."""

    config_version = 1
    values: ClassVar = {
        "block_m": (16, 32, 64, 128, 256),
        "block_n": (16, 32, 64, 128, 256, 512, 1024),
        "num_warps": (1, 2, 4, 8),
        "num_stages": (1, 2, 3),
    }
    start: ClassVar = {"block_m": 64, "block_n": 32, "num_warps": 1, "num_stages": 3}

    def kernels(self, problem):
        return ("sum",)

    def dimension(self, kernel, problem):
        return max(16, problem.d)

    def parameters(self, kernel):
        return self.values

    def default(self, kernel, problem, architecture):
        return self.start

    def limit(self, kernel, config, problem, architecture):
        tile = config["block_m"] * config["block_n"]
        if not 2048 <= tile / config["num_warps"] <= 32768:
            return "registers"
        return None if tile * config["num_stages"] <= 131072 else "shared memory"

    def seconds(self, kernel, config, problem, card):
        return ms(config, lambda *places: 0.3) / 1e3

    def compile(self, kernel, config, problem, architecture):
        return Compiled(64, 1024, 0)

    def code(self, kernel, config, problem):
        return kernel, tuple(config.values())

    def too_much(self, compiled, architecture):
        return None


def ms(config, wiggle=None):
    """Milliseconds: best at block_m 128, block_n 128, 8 warps, 2 stages; larger tiles want more warps."""
    m, n = (config[name].bit_length() - 1 for name in ("block_m", "block_n"))
    warps, stages = config["num_warps"].bit_length() - 1, config["num_stages"]
    more = wiggle(m, n, warps, stages) if wiggle else 0.03 * ((3 * m + 5 * n + 7 * warps + 2 * stages) % 4)
    return (
        1 + 0.08 * (m - 7) ** 2 + 0.05 * (n - 7) ** 2 + 0.07 * (m + n - 11 - warps) ** 2 + 0.1 * abs(stages - 2) + more
    )


@dataclass
class Played:
    """A runner that answers from a function, and remembers what it was asked."""

    answer: object = None
    again: object = None  # what finals give
    drift: float = 1.0
    version: str = "a"
    ran: list = field(default_factory=list)
    told: list = field(default_factory=list)
    final: list = field(default_factory=list)

    def prepare(self, task, configs):
        self.told += configs

    def run(self, task, config, best):
        assert config in self.told  # nothing comes unannounced
        self.ran.append(dict(config))
        found = (self.answer or ms)(config)
        return (
            found if isinstance(found, Outcome) else Outcome("ok", (found, found, found * 1.01), phases={"time": 0.1})
        )

    def finals(self, task, configs):
        self.final += map(dict, configs)
        times = [(self.again or ms)(config) * self.drift for config in configs]
        return [Outcome("ok", (t, t, t)) for t in times]

    def provenance(self, task):
        return {"source": self.version}

    def close(self):
        pass


def task(n=32768, m=4096, gpu="RTX A6000", architecture="sm_86"):
    query = Query("stranger", "sum", 1, 16, gpu, architecture)
    return Task(query, Problem(Reduction.LOG_SUM, m, n, 16, "float32", "fast", "cuda:0"))


HILLS = Hills()
TASK = task()
KEY = Key.of(TASK.query, TASK.problem)
ALL = candidates(TASK, Hills())
BEST = min(ALL, key=ms)
RECORDS = [(config, ms(config)) for config in ALL]


@pytest.fixture
def compiled(monkeypatch):
    """What compiles, in order, in this process and at once; nothing is interpreted."""
    asked = []

    def submit(self, name, work, *arguments):
        if name not in self.begun:
            self.begun[name] = Future()
            try:
                self.begun[name].set_result(work(*arguments))
            except Exception as error:
                self.begun[name].set_exception(error)
        return self.begun[name]

    def compile_(self, kernel, config, problem, architecture):
        asked.append(dict(config))
        return Compiled(64, 1024, 0)

    monkeypatch.setattr(processes.Pool, "submit", submit)
    monkeypatch.setattr(offline, "space_for", lambda task: HILLS)
    monkeypatch.setattr(offline, "_interpreted", lambda task, config: None)
    monkeypatch.setattr(Hills, "compile", compile_)
    return asked


@pytest.fixture
def store(tmp_path):
    with Store(tmp_path / "tuning.sqlite") as opened:
        yield opened
    lookup.forget()


# --- finding the best ---------------------------------------------------------------------------------------------


def test_the_synthetic_space_is_as_described():
    assert size(TASK, Hills()) == 420
    assert 180 <= len(ALL) <= 240
    times = sorted(map(ms, ALL))
    assert times[0] < times[1]  # one best
    assert ms(Hills.start) > 1.15 * times[0]


def test_grid_finds_the_optimum_exactly(store):
    result = search(TASK, Hills(), Played(), store, sampler="grid", trials=None)
    assert result.best == BEST
    assert result.outcome.median == ms(BEST)
    assert result.tried == len(ALL)
    assert result.default.median == pytest.approx(ms(Hills.start))


@pytest.mark.parametrize(
    ("sampler", "mean", "worst"), [pytest.param("tpe", 0.01, 0.06, marks=pytest.mark.slow), ("random", 0.15, 0.25)]
)
def test_samplers_come_near_the_optimum(sampler, mean, worst):
    """Fractions above the best time after 60 of the 217 configurations."""
    space = RecordedSpace(RECORDS, Hills.start)
    losses = [simulate(RECORDS, TASK, space, sampler, 60, seed) for seed in range(20)]
    assert sum(losses) / len(losses) <= mean
    assert max(losses) <= worst


def test_a_replayed_grid_loses_nothing():
    assert simulate(RECORDS, TASK, RecordedSpace(RECORDS, Hills.start), "grid", None) == 0
    with pytest.raises(ValueError, match="not known without backend stranger"):
        simulate(RECORDS, TASK, RecordedSpace(RECORDS, Hills.start), "priced")
    prices = {canonical(config): ms for config, ms in RECORDS}
    assert simulate(RECORDS, TASK, RecordedSpace(RECORDS, Hills.start, prices), "priced", 2) == 0
    assert simulate(RECORDS, TASK, RecordedSpace(RECORDS, Hills.start, prices), "tpe", 4) == 0
    with pytest.raises(ValueError, match="nothing to compare"):
        simulate([(BEST, float("inf"))], TASK, RecordedSpace(RECORDS, BEST))


def test_a_recorded_space_is_that_of_its_records():
    space = RecordedSpace(RECORDS, Hills.start)
    assert space.parameters("sum") == Hills.values
    assert candidates(TASK, space) == ALL
    assert Key.of(*_parts(task_of(KEY))) == KEY


def _parts(found):
    return found.query, found.problem


@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_a_seed_decides(sampler, tmp_path):
    orders = []
    for i, seed in enumerate((3, 3, 4)):
        runner = Played()
        with Store(tmp_path / f"{i}.sqlite") as opened:
            search(TASK, Hills(), runner, opened, sampler=sampler, trials=25, seed=seed)
        orders.append(runner.ran)
    assert orders[0] == orders[1] != orders[2]


def test_an_unknown_sampler_is_named(store):
    with pytest.raises(ValueError, match=r"'best'.*tpe, random, grid"):
        search(TASK, Hills(), Played(), store, sampler="best")


# --- the order ----------------------------------------------------------------------------------------------------


def test_the_default_then_neighbours_then_the_papers(store):
    near, far, elsewhere = ALL[50], ALL[60], ALL[70]
    for other, config in (
        (task(n=65536), near),
        (task(n=262144), far),
        (task(gpu="RTX 3090"), elsewhere),
        (task(gpu="H100 SXM", architecture="sm_90"), ALL[90]),
    ):
        key = Key.of(*_parts(other))
        store.add(key, config, Outcome("ok", (1.0, 1.0, 1.0)), "measured", {})
    runner = Played()
    search(TASK, Hills(), runner, store, trials=12)
    assert runner.ran[:6] == [Hills.start, near, far, elsewhere, ALL[90], PAPER]


def test_neighbours_that_do_not_fit_are_left_out_and_what_they_lack_is_the_defaults(store):
    too_large = {"block_m": 256, "block_n": 1024, "num_warps": 8, "num_stages": 3}
    for i, config in enumerate((too_large, {**ALL[80], "block_k": 3}, {"block_m": 48}, {"block_m": 128})):
        key = Key.of(*_parts(task(n=2 ** (16 + i))))
        store.add(key, config, Outcome("ok", (1.0, 1.0, 1.0)), "measured", {})
    runner = Played()
    search(TASK, Hills(), runner, store, trials=4)
    assert runner.ran[:3] == [Hills.start, {**Hills.start, "block_m": 128}, PAPER]


def test_nothing_is_run_twice_and_invalid_ones_never(store):
    runner = Played()
    result = search(TASK, Hills(), runner, store, trials=150)
    names = [json.dumps(config, sort_keys=True) for config in runner.ran]
    assert len(names) == len(set(names)) == result.tried == 150
    assert all(Hills().limit("sum", config, None, "") is None for config in runner.ran)


def test_a_default_that_cannot_run_is_not_run(store):
    space = Hills()
    space.start = {"block_m": 256, "block_n": 1024, "num_warps": 8, "num_stages": 3}
    runner = Played()
    result = search(TASK, space, runner, store, trials=10)
    assert space.start not in runner.ran
    assert result.default is None


def test_a_default_outside_the_values_worth_trying_is_run(store):
    space = Hills()
    space.start = {"block_m": 64, "block_n": 96, "num_warps": 1, "num_stages": 2}
    runner = Played()
    result = search(TASK, space, runner, store, trials=20)
    assert runner.ran[0] == space.start
    assert result.tried == 20


def test_the_best_priced_come_first(store):
    class Priced(Hills):
        def seconds(self, kernel, config, problem, card):
            assert card.name == "RTX A6000"
            return ms(config)

    runner = Played()
    result = search(TASK, Priced(), runner, store, sampler="priced", trials=17)
    assert runner.ran[0] == Hills.start
    assert runner.ran[1:] == sorted(ALL, key=ms)[:16]  # neither neighbours nor the paper's
    assert result.tried == 17
    again = Played()
    assert search(TASK, Priced(), again, store, sampler="priced", trials=17).replayed == 17
    assert not again.ran


# --- remembering --------------------------------------------------------------------------------------------------


def test_a_finished_search_runs_nothing_again(store):
    search(TASK, Hills(), Played(), store, trials=30)
    runner = Played()
    result = search(TASK, Hills(), runner, store, trials=30)
    assert not runner.ran
    assert not runner.final
    assert (result.tried, result.replayed) == (0, 30)
    assert result.outcome.median == store.best()[0].ms


def test_more_trials_go_on_where_fewer_ended(store):
    search(TASK, Hills(), Played(), store, trials=20)
    runner = Played()
    result = search(TASK, Hills(), runner, store, trials=45)
    assert (result.tried, result.replayed, len(runner.ran)) == (25, 20, 25)
    assert len(store.trials(KEY)) == 45


def test_other_code_is_measured_anew_and_the_earlier_finalists_with_it(store):
    search(TASK, Hills(), Played(), store, trials=60)
    final = {json.dumps(t.config) for t in store.trials(KEY) if "finals" in t.outcome.phases}
    assert len(final) == 4
    runner = Played(lambda config: 2 * ms(config), version="b", drift=2.0)
    result = search(TASK, Hills(), runner, store, trials=10)
    assert result.tried == 10
    assert final <= {json.dumps(config, sort_keys=True) for config in runner.ran}
    assert store.best()[0].provenance == {"source": "b"}
    assert store.best()[0].ms == pytest.approx(2 * ms(BEST))


def test_predictions_are_not_measurements(store):
    for config in ALL[:20]:
        store.add(KEY, config, Outcome("ok", (0.1,) * 3), "predicted", {"source": "a"})
    runner = Played()
    assert search(TASK, Hills(), runner, store, trials=20).tried == 20
    assert store.best()[0].source == "measured"


def test_ctrl_c_keeps_everything(store):
    count = itertools.count()

    def interrupted(config):
        if next(count) == 13:
            raise KeyboardInterrupt
        return ms(config)

    runner = Played(interrupted)
    with pytest.raises(KeyboardInterrupt):
        search(TASK, Hills(), runner, store, trials=40)
    kept = store.trials(KEY)
    assert [trial.config for trial in kept] == runner.ran[:13]
    assert store.best()[0].ms == min(trial.outcome.median for trial in kept)
    assert store.best()[0].default_ms == pytest.approx(ms(Hills.start))
    runner = Played()
    assert search(TASK, Hills(), runner, store, trials=40).tried == 27
    assert len(store.trials(KEY)) == 40


def test_a_killed_process_loses_the_trial_in_flight_only(tmp_path):
    """A real process, kill -9 in the middle of a trial; the rerun resumes."""
    path, log = tmp_path / "tuning.sqlite", tmp_path / "log"
    script = textwrap.dedent(f"""
        import time
        from test_autotune_search import *

        def slow(config):
            time.sleep(0.02)
            with open({str(log)!r}, "a") as file:
                print(json.dumps(config, sort_keys=True), file=file)
            return ms(config)

        with Store({str(path)!r}) as store:
            search(TASK, Hills(), Played(slow), store, sampler="random", trials=200)
        """)
    folders = [os.path.dirname(__file__), *sys.path]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, folders))}
    process = subprocess.Popen([sys.executable, "-c", script], env=env)
    deadline = time.monotonic() + 30
    while (not log.exists() or len(log.read_text().splitlines()) < 12) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    ended = log.read_text().splitlines()
    with Store(path) as store:
        kept = [json.dumps(trial.config, sort_keys=True) for trial in store.trials(KEY)]
        assert kept in (ended, ended[:-1])
        assert len(kept) >= 11
        runner = Played()
        result = search(TASK, Hills(), runner, store, sampler="random", trials=60)
        assert result.replayed == len(kept)
        assert result.tried == len(runner.ran) == 60 - len(kept)
        assert not {json.dumps(config, sort_keys=True) for config in runner.ran} & set(kept)


# --- predictions --------------------------------------------------------------------------------------------------

CARD = cards.gpu("a6000")
PRICED = sorted(ALL, key=lambda config: HILLS.seconds("sum", config, None, CARD))


def predicted(store, *tasks, **options):
    return list(offline.predict([(each, HILLS) for each in tasks or (TASK,)], CARD, store, **options))


def test_the_best_priced_that_compiles_is_the_prediction(store, compiled):
    (result,) = predicted(store)
    assert compiled == PRICED[:1] == [result.best]
    assert (result.tried, result.replayed) == (1, 0)
    (best,) = store.best()
    assert (best.config, best.source) == (result.best, "predicted")
    assert best.default_ms == pytest.approx(1e3 * HILLS.seconds("sum", HILLS.start, None, CARD))
    compiled.clear()
    (again,) = predicted(store)
    assert (again.tried, again.replayed, again.best, compiled) == (0, 2, result.best, [])


def test_what_spills_fails_or_is_wrong_is_passed_over(store, compiled, monkeypatch):
    def compile_(self, kernel, config, problem, architecture):
        compiled.append(dict(config))
        if config == PRICED[0]:
            raise RuntimeError("out of registers")
        return Compiled(64, 1024, 512 if config == PRICED[1] else 0)

    monkeypatch.setattr(Hills, "compile", compile_)
    monkeypatch.setattr(Hills, "too_much", lambda self, found, architecture: "spills" if found.spills else None)
    monkeypatch.setattr(offline, "_interpreted", lambda task, config: 7.0 if config == PRICED[2] else 0.5)
    (result,) = predicted(store)
    assert result.best == PRICED[3]
    assert dict(result.counts) == {"compile_error": 2, "wrong": 1, "ok": 2}
    errors = [trial.outcome.error for trial in store.trials(KEY) if trial.outcome.status != "ok"]
    assert sorted(errors) == [
        "RuntimeError: out of registers",
        "spills",
        "the worst row is off by 7 of the tolerance, as interpreted",
    ]
    assert predicted(store, task(n=65536), check=False)[0].best == PRICED[2]


def test_where_nothing_compiles_no_more_than_the_trials_are_compiled(store, compiled, monkeypatch):
    monkeypatch.setattr(Hills, "too_much", lambda self, found, architecture: "spills")
    (result,) = predicted(store, trials=5)
    assert result.best is None
    assert len(store.trials(KEY)) == 5
    assert result.reason == "spills"
    assert HILLS.start in compiled


def test_the_default_is_kept_unless_a_prediction_is_faster_by_the_margin(store, compiled, monkeypatch):
    """A candidate 4 % faster by the cost model is not worth it, one 6 % faster is."""
    for faster, expected in ((0.96, HILLS.start), (0.94, BEST)):
        prices = {json.dumps(HILLS.start): 1.0, json.dumps(BEST): faster}
        monkeypatch.setattr(Hills, "seconds", lambda self, k, config, p, c, at=prices: at.get(json.dumps(config), 2.0))
        assert predicted(store, task(n=2**20 if faster > 0.95 else 2**10))[0].best == expected
        assert compiled.pop() == expected


def test_problems_that_share_a_kernel_have_it_compiled_once(store, compiled, monkeypatch):
    """Candidates whose prices differ by less than the margin are alike: the one that another size has is taken."""
    first, second = PRICED[:2]

    def seconds(self, kernel, config, problem, card):
        near = {json.dumps(first): 1.0, json.dumps(second): 1.03}
        if problem.n > 32768:
            near = {json.dumps(first): 1.03, json.dumps(second): 1.0}
        return near.get(json.dumps(config), 2.0)

    monkeypatch.setattr(Hills, "seconds", seconds)
    results = predicted(store, *(task(n=2**n) for n in (15, 16, 17)))
    assert [result.best for result in results] == [first] * 3
    assert compiled == [first]


def test_a_budget_ends_predictions(store, compiled):
    assert predicted(store, budget=0.0) == []


def test_weights_and_leave_one_out_are_problems_of_their_own():
    (plain,) = problems(["log_sum"], [16])
    (weighted,) = problems(["log_sum"], [16], requires=["weights"])
    (left_out,) = problems(["log_sum"], [16], requires=["exclude_self"])
    assert (weighted.requires, weighted.m, weighted.same) == ({"weights"}, plain.m, False)
    assert (left_out.requires, left_out.m, left_out.same) == ({"exclude_self"}, left_out.n, True)
    for problem in (plain, weighted, left_out):
        key = Key.of(TASK.query, problem)
        assert Key.of(*task_of(key)) == key


@pytest.mark.parametrize("path", sorted(lookup.TABLES.glob("*.json")), ids=lambda path: path.stem)
def test_what_ships_is_what_the_tuner_would_search(path):
    """Of every backend: the keys are those of its problems, and the configurations can run."""
    dump = json.loads(path.read_text())
    rows = dump.get("best") or dump["trial"]
    assert rows
    for row in rows:
        key = Key._make(row[name] for name in Key._fields)
        record = registry.find(key.backend)
        if record is not None and record.ok:
            found = task_of(key)
            space = offline.space_for(found)
            assert key.kernel in space.kernels(found.problem)
            assert Key.of(*_parts(found)) == key
            assert space.limit(key.kernel, row["config"], found.problem, key.architecture) is None


# --- processes ----------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="needs POSIX")
@pytest.mark.usefixtures("heeded")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_compilers_and_what_they_run_end_with_the_tuner(number, tmp_path):
    """Whatever of them is left would hold the standard output, and `communicate` would wait for it."""
    script = """if True:
        import subprocess, sys
        from sdkde_autotune.processes import Pool

        pool = Pool(2)
        try:
            for i in range(2):
                pool.submit(i, subprocess.run, ["sh", "-c", "echo >> begun; sleep 600"])
            pool.result(0, None)
        finally:
            pool.close()
        """
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "start_new_session": True}
    process = subprocess.Popen([sys.executable, "-c", script], env=env, cwd=tmp_path, **options)
    try:
        log, deadline = tmp_path / "begun", time.monotonic() + 60
        while not (log.exists() and len(log.read_text()) == 2) and time.monotonic() < deadline:
            time.sleep(0.01)
        process.send_signal(number)
        assert process.communicate(timeout=60) == (b"", None)
        assert process.returncode != 0
    finally:
        process.kill()


def test_what_is_measured_goes_through_a_worker_that_is_replaced(compiled, monkeypatch):
    class Bench:
        made: ClassVar = []

        def __init__(self, task, device):
            self.task = task
            self.made.append(device)
            if task.problem.n == 1:
                raise MemoryError("too many points")

        def check(self, config):
            if config["num_warps"] == 2:
                raise RuntimeError("illegal access")
            return 3.0 if config["num_warps"] == 4 else 0.5

        def time(self, config):
            return 2.0

        def memory(self, error):
            return False

        def lost(self, error):
            return True

    closed = []
    monkeypatch.setitem(sys.modules, "sdkde_autotune.bench", types.SimpleNamespace(Bench=Bench))
    monkeypatch.setattr(worker, "space_for", lambda task: HILLS)
    monkeypatch.setattr(worker, "_bench", None)
    runner = worker.MeasuringRunner("cuda:0")
    monkeypatch.setattr(runner._worker, "close", lambda: closed.append(1))
    outcomes = [runner.run(TASK, {**BEST, "num_warps": warps}, 1.0) for warps in (8, 4, 2)]
    assert [outcome.status for outcome in outcomes] == ["ok", "wrong", "crash"]
    assert outcomes[0].ms == (2.0, 2.0, 2.0)
    assert {"compile", "check", "time"} == outcomes[0].phases.keys()
    assert len(Bench.made) == len(closed) == 1
    assert [outcome.status for outcome in runner.finals(task(n=65536), [BEST, Hills.start])] == ["ok", "ok"]
    (outcome,) = runner.finals(task(n=1), [BEST])
    assert (outcome.status, outcome.error) == ("crash", "MemoryError: too many points")
    assert len(Bench.made) == 3
    runner._compilers.close()


@pytest.mark.slow
def test_a_prediction_is_interpreted(monkeypatch):
    """Triton's kernel, as a configuration cuts it, against the reference; a kernel that is wrong is told."""
    pytest.importorskip("triton")
    (given,) = problems(["mean"], [17], precisions=["high"])
    query = Query("triton", "mean_full", 1, 32, "RTX A6000", "sm_86")
    pool = processes.Pool(1, interpret=True)
    config = {"block_m": 64, "block_n": 32, "num_warps": 4, "num_stages": 2}
    try:
        assert 0 < pool.result("right", offline._interpreted, Task(query, given), config) < 1
        assert pool.result("numba", offline._interpreted, Task(replace(query, backend="numba-cuda"), given), {}) is None
    finally:
        pool.close()


# --- what candidates do -------------------------------------------------------------------------------------------


def test_failures_are_outcomes_and_do_not_win(store):
    statuses = itertools.cycle(("timeout", "crash", "wrong", "oom", "compile_error", "invalid"))

    def rough(config):
        if config["num_warps"] == 8 or config["block_m"] == 16:
            status = next(statuses)
            return Outcome(status, error=f"{status}, as it happens")
        return ms(config)

    result = search(TASK, Hills(), Played(rough), store, trials=60)
    ok = [config for config in ALL if config["num_warps"] != 8 and config["block_m"] != 16]
    assert result.best in ok
    assert result.outcome.median <= 1.1 * min(map(ms, ok))
    assert sum(result.counts.values()) == 60
    assert result.rejected == 60 - result.counts["ok"] > 0
    assert result.reason.endswith("as it happens")
    rows = store.trials(KEY)
    assert {row.outcome.status for row in rows} >= {"ok", "timeout", "crash", "wrong"}
    assert all(row.outcome.error for row in rows if row.outcome.status != "ok")
    runner = Played()
    search(TASK, Hills(), runner, store, trials=60)
    assert not runner.ran  # what failed is not tried again either


def test_nothing_that_runs_leaves_no_winner(store):
    result = search(TASK, Hills(), Played(lambda config: Outcome("crash", error="illegal access")), store, trials=15)
    assert result.best is None
    assert result.outcome is None
    assert result.reason == "illegal access"
    assert store.best() == []


@pytest.mark.parametrize("sampler", ["tpe", "random", "grid"])
def test_a_space_smaller_than_the_trials(sampler, store):
    space = Hills()
    space.values = {**Hills.values, "block_m": (64,), "block_n": (64, 128), "num_warps": (1, 2)}
    space.start = {"block_m": 64, "block_n": 64, "num_warps": 2, "num_stages": 1}
    count = len(candidates(TASK, space))
    runner = Played()
    result = search(TASK, space, runner, store, sampler=sampler, trials=500)
    assert result.tried == len(runner.ran) == count == 12


@pytest.mark.parametrize("sampler", ["tpe", "random", "grid"])
def test_a_space_that_is_mostly_invalid(sampler, store):
    class Holes(Hills):
        def limit(self, kernel, config, problem, architecture):
            place = config["block_m"] * 7 + config["block_n"] * 3 + config["num_warps"] * 5 + config["num_stages"]
            return None if place % 59 == 1 else "a hole"

    space = Holes()
    left = candidates(TASK, space)
    assert 3 <= len(left) <= 12
    runner = Played()
    result = search(TASK, space, runner, store, sampler=sampler, trials=100)
    assert sorted(map(canonical, runner.ran)) == sorted(map(canonical, left))
    assert result.best == min(left, key=ms)


def test_a_space_in_which_nothing_can_run(store):
    class Closed(Hills):
        def limit(self, kernel, config, problem, architecture):
            return "closed"

    for sampler in ("tpe", "random", "grid", "priced"):
        result = search(TASK, Closed(), Played(), store, sampler=sampler)
        assert (result.best, result.tried) == (None, 0)


def test_the_budget_ends_a_search(store):
    def slow(config):
        time.sleep(0.02)
        return ms(config)

    result = search(TASK, Hills(), Played(slow), store, trials=200, budget=0.3)
    assert 1 < result.tried < 20
    assert result.best is not None
    assert search(TASK, Hills(), Played(slow), store, trials=200, budget=0.0).tried == 1


def test_progress_tells_how_far_and_the_best(store):
    told = []
    search(TASK, Hills(), Played(), store, trials=20, progress=lambda *x: told.append(x))
    assert [x[0] for x in told] == list(range(1, 21))
    assert {x[1] for x in told} == {20}
    bests = [x[2] for x in told]
    assert bests == sorted(bests, reverse=True)


# --- finals -------------------------------------------------------------------------------------------------------


def test_interleaved_finals_decide(store):
    """A lucky time of a mediocre candidate, and a clock that drifts: those timed side by side win."""
    lucky = sorted(ALL, key=ms)[12]

    def noisy(config):
        return 0.6 * ms(config) if config == lucky else ms(config)

    runner = Played(noisy, drift=1.3)
    result = search(TASK, Hills(), runner, store, trials=None, sampler="grid")
    assert runner.final[0] == lucky
    assert len(runner.final) == 4
    assert Hills.start in runner.final
    assert result.best == BEST
    (best,) = store.best()
    assert best.config == BEST
    assert best.ms == result.outcome.median == pytest.approx(1.3 * ms(BEST))
    assert best.default_ms == pytest.approx(1.3 * ms(Hills.start))


def test_later_finals_include_the_earlier_winner(store):
    search(TASK, Hills(), Played(), store, trials=20)
    winner = store.best()[0].config
    runner = Played(drift=1.2)
    search(TASK, Hills(), runner, store, trials=None, sampler="grid")
    assert winner in runner.final


def test_finals_that_one_takes_down_change_nothing(store):
    runner = Played()
    runner.finals = lambda task, configs: [Outcome("crash", error="gone")] * len(configs)
    result = search(TASK, Hills(), runner, store, trials=30)
    assert result.outcome.status == "ok"
    assert store.best()[0].ms == result.outcome.median
