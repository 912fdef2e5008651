"""The search, against a synthetic space whose times are known, behind a runner that has no GPU."""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
import types
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import ClassVar

import pytest

optuna = pytest.importorskip("optuna")

from sdkde_autotune import lookup, measure  # noqa: E402
from sdkde_autotune.problems import place_of, problems, tasks  # noqa: E402
from sdkde_autotune.records import Key, Task, Trial  # noqa: E402
from sdkde_autotune.search import candidates, predict, search  # noqa: E402
from sdkde_autotune.store import Store  # noqa: E402
from tuning_files import add, failed, guess  # noqa: E402

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
        return ms(config, rough=False) / 1e3

    def compile(self, kernel, config, problem, architecture):
        return Compiled(64, 1024, 0)

    def code(self, kernel, config, problem):
        return kernel, tuple(config.values())

    def too_much(self, compiled, architecture):
        return None


def ms(config, rough=True):
    """Milliseconds: best at block_m 128, block_n 128, 8 warps, 2 stages; larger tiles want more warps."""
    m, n = (config[name].bit_length() - 1 for name in ("block_m", "block_n"))
    warps, stages = config["num_warps"].bit_length() - 1, config["num_stages"]
    wiggle = 0.03 * ((3 * m + 5 * n + 7 * warps + 2 * stages) % 4) if rough else 0.3
    tile = 0.08 * (m - 7) ** 2 + 0.05 * (n - 7) ** 2 + 0.07 * (m + n - 11 - warps) ** 2
    return 1 + tile + 0.1 * abs(stages - 2) + wiggle


@dataclass
class Played:
    """A runner that answers from a function, and remembers what it was asked."""

    answer: object = None
    drift: float = 1.0
    device: str = "cuda:0"
    ran: list = field(default_factory=list)
    told: list = field(default_factory=list)
    final: list = field(default_factory=list)
    pruned: list = field(default_factory=list)

    def prepare(self, task, configs):
        self.told += configs

    def run(self, task, config, slow):
        assert config in self.told  # nothing comes unannounced
        self.ran.append(dict(config))
        found = (self.answer or ms)(config)
        if isinstance(found, dict):
            return Trial(task.key, config, **found)
        if slow(3, found):
            self.pruned.append(dict(config))
        return Trial(task.key, config, ms=(found, found, found * 1.01))

    def finals(self, task, configs):
        self.final += map(dict, configs)
        times = [ms(config) * self.drift for config in configs]
        return [Trial(task.key, config, ms=(t, t, t), final=True) for config, t in zip(configs, times)]

    def close(self):
        pass


HILLS = Hills()


def task(n=32768, space=HILLS):
    query = Query("stranger", "sum", 1, 16, "RTX A6000", "sm_86")
    return Task(query, Problem(Reduction.LOG_SUM, 4096, n, 16, "float32", "fast", "cuda:0"), space)


def few():
    """A space with 60 of the configurations, the default and the best among them."""
    space = Hills()
    space.values = {**Hills.values, "block_n": (32, 128)}
    return space


TASK = task()
KEY = TASK.key
ALL = candidates(TASK)
BEST = min(ALL, key=ms)


@pytest.fixture
def compiled(monkeypatch):
    """What compiles, in order, in this process and at once."""
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

    monkeypatch.setattr(measure.Pool, "submit", submit)
    monkeypatch.setattr(Hills, "compile", compile_)
    return asked


@pytest.fixture
def store(tmp_path):
    with Store(tmp_path / "tuning.sqlite") as opened:
        yield opened
    lookup.forget()


# --- finding the best ---------------------------------------------------------------------------------------------


def test_a_search_comes_near_the_optimum(store):
    """After 60 of the 217 configurations; the median pruner ends the timing of slow ones, and never of the best."""
    runner = Played()
    result = search(TASK, runner, store)
    assert ms(result.best.config) <= 1.06 * ms(BEST)
    assert len(runner.ran) == 60
    times = sorted(map(ms, runner.ran))
    assert runner.pruned
    assert min(map(ms, runner.pruned)) > times[5]


# --- the order ----------------------------------------------------------------------------------------------------


def test_the_default_then_earlier_finalists_then_the_best_priced(store):
    """Of predictions too; who tries all finds the best."""
    for i, config in enumerate((ALL[50], ALL[60])):
        add(store, KEY, config, guess(i + 1), "predicted", {"source": "a"})
    runner = Played()
    search(TASK, runner, store, trials=12, card=CARD)
    expected = [Hills.start, ALL[50], ALL[60], *PRICED[:12]]
    assert runner.ran == [config for i, config in enumerate(expected) if config not in expected[:i]][:12]
    assert store.best()[0].source == "measured"
    known = len({*map(json.dumps, runner.ran)} & {*map(json.dumps, candidates(task(space=few())))})
    result = search(task(space=few()), Played(), store, trials=217)
    assert (result.best.config, result.best.median) == (BEST, ms(BEST))
    assert known and result.tried == 60 - known


def test_nothing_is_run_twice_and_invalid_ones_never(store):
    runner = Played()
    result = search(task(space=few()), runner, store, trials=50)
    names = [json.dumps(config, sort_keys=True) for config in runner.ran]
    assert len(names) == len(set(names)) == result.tried == 50
    assert all(Hills().limit("sum", config, None, "") is None for config in runner.ran)


def test_a_default_outside_the_values_worth_trying_is_run(store):
    space = Hills()
    space.start = {"block_m": 64, "block_n": 96, "num_warps": 1, "num_stages": 2}
    runner = Played()
    result = search(task(space=space), runner, store, trials=20)
    assert runner.ran[0] == space.start
    assert result.tried == 20


# --- remembering --------------------------------------------------------------------------------------------------


def test_more_trials_go_on_where_fewer_ended(store):
    search(TASK, Played(), store, trials=20)
    runner = Played()
    result = search(TASK, runner, store, trials=45)
    assert result.tried == len(runner.ran) == 25
    assert len(store.trials(KEY)) == 45
    assert search(TASK, Played(), store, trials=45).tried == 0


def test_other_code_is_measured_anew_and_the_earlier_finalists_with_it(store, monkeypatch):
    search(TASK, Played(), store, trials=20)
    final = {json.dumps(t.config) for t in store.trials(KEY) if t.final}
    assert len(final) == 4
    monkeypatch.setattr("sdkde_autotune.search.versions", lambda backend: {"source": "b"})
    runner = Played(lambda config: 2 * ms(config), drift=2.0)
    result = search(TASK, runner, store, trials=10)
    assert result.tried == 10
    assert final <= {json.dumps(config, sort_keys=True) for config in runner.ran}
    assert store.best()[0].provenance == {"source": "b"}
    assert store.best()[0].median == pytest.approx(2 * ms(result.best.config))


# --- predictions --------------------------------------------------------------------------------------------------

CARD = cards.gpu("a6000")
PRICED = sorted(ALL, key=lambda config: HILLS.seconds("sum", config, None, CARD))


def predicted(store, *tasks, **options):
    return list(predict(tasks or (TASK,), CARD, store, **options))


def test_the_best_priced_that_compiles_is_the_prediction_and_has_a_rank(store, compiled):
    (result,) = predicted(store)
    assert compiled == PRICED[:1] == [result.best.config]
    assert (result.best.rank, result.best.ms) == (1, None)
    (best,) = store.best()
    assert (best.config, best.source, best.rank) == (result.best.config, "predicted", 1)
    assert best.default.rank > 1
    compiled.clear()
    (again,) = predicted(store)
    assert (again.tried, again.best.config, compiled) == (0, result.best.config, [])
    assert predicted(store, budget=0.0) == []


def test_what_spills_or_fails_is_passed_over(store, compiled, monkeypatch):
    def compile_(self, kernel, config, problem, architecture):
        if config == PRICED[0]:
            raise RuntimeError("out of registers")
        return Compiled(64, 1024, 512 if config == PRICED[1] else 0)

    monkeypatch.setattr(Hills, "compile", compile_)
    monkeypatch.setattr(Hills, "too_much", lambda self, found, architecture: "spills" if found.spills else None)
    (result,) = predicted(store)
    assert (result.best.config, result.best.rank) == (PRICED[2], 3)
    assert [trial.status for trial in result.known.values()] == ["compile_error"] * 2 + ["ok", "ok"]
    errors = [trial.error for trial in store.trials(KEY) if trial.status != "ok"]
    assert sorted(errors) == ["RuntimeError: out of registers", "spills"]


def test_where_nothing_compiles_no_more_than_the_trials_are_compiled(store, compiled, monkeypatch):
    monkeypatch.setattr(Hills, "too_much", lambda self, found, architecture: "spills")
    (result,) = predicted(store, trials=5)
    assert result.best is None
    assert len(store.trials(KEY)) == 5
    assert HILLS.start in compiled


def test_the_default_is_kept_unless_a_prediction_is_faster_by_the_margin(store, compiled, monkeypatch):
    """A candidate 4 % faster by the cost model is not worth it, one 6 % faster is."""
    for faster, expected in ((0.96, HILLS.start), (0.94, BEST)):
        prices = {json.dumps(HILLS.start): 1.0, json.dumps(BEST): faster}
        monkeypatch.setattr(Hills, "seconds", lambda self, k, config, p, c, at=prices: at.get(json.dumps(config), 2.0))
        assert predicted(store, task(n=2**20 if faster > 0.95 else 2**10))[0].best.config == expected


@pytest.mark.parametrize("path", sorted(lookup.TABLES.glob("*.json")), ids=lambda path: path.stem)
def test_what_ships_is_what_the_tuner_would_search(path):
    """Of every backend: the keys are those of its problems, and the configurations can run."""
    dump = json.loads(path.read_text())
    rows = dump["trial"]
    assert rows
    for row in rows:
        key = Key._make(row[name] for name in Key._fields)
        record = registry.find(key.backend)
        if record is not None and record.ok:
            sizes = [2**key.n_octave], [2**key.m_octave]
            wanted = problems([key.reduction], [key.d], *sizes, [key.precision], filter(None, [key.requires]))
            (found,) = [task for task in tasks(wanted, place_of(key.gpu), key.backend) if task.key == key]
            assert found.limit(row["config"]) is None


# --- processes ----------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="needs POSIX")
@pytest.mark.usefixtures("heeded")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_compilers_and_what_they_run_end_with_the_tuner(number, tmp_path):
    """Whatever of them is left would hold the standard output, and `communicate` would wait for it."""
    script = """if True:
        import subprocess, sys
        from sdkde_autotune.measure import Pool

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


def test_a_process_that_dies_is_an_outcome_and_another_takes_its_place():
    pool = measure.Pool(1, failure="crash")
    try:
        with pytest.raises(measure.Failed) as caught:
            pool.result("dies", os._exit, 3)
        assert caught.value.args == ("crash", "its process died")
        assert pool.result("works", len, [1, 2]) == 2
    finally:
        pool.close()


def test_what_is_measured_goes_through_a_worker_that_is_replaced(compiled, monkeypatch):
    class Bench:
        made: ClassVar = []

        def __init__(self, task, device):
            self.task = task
            self.made.append(device)

        def check(self, config):
            if config["num_warps"] == 2:
                raise RuntimeError("illegal access")
            if config["num_warps"] == 4:
                raise measure.Failed("wrong", "off")

        def times(self, configs, count):
            return [[2.0] * count] * len(configs)

        def status(self, error):
            return "crash"

    monkeypatch.setitem(sys.modules, "sdkde_autotune.bench", types.SimpleNamespace(Bench=Bench, CudaBench=Bench))
    monkeypatch.setattr(measure, "_bench", None)
    runner, asked = measure.MeasuringRunner("cuda:0"), []

    def slow(timings, median):
        asked.append((timings, median))
        return timings == 9

    trials = [runner.run(TASK, {**BEST, "num_warps": warps}, slow) for warps in (8, 4, 2)]
    assert [trial.status for trial in trials] == ["ok", "wrong", "crash"]
    assert trials[0].ms == (2.0, 2.0, 2.0)
    assert asked == [(3, 2.0), (9, 2.0)]
    assert [trial.status for trial in runner.finals(task(n=65536), [BEST, Hills.start])] == ["ok", "ok"]
    assert Bench.made == ["cuda:0"] * 2  # for each problem one
    runner.close()


# --- what candidates do -------------------------------------------------------------------------------------------


def test_failures_are_outcomes_and_do_not_win(store):
    statuses = itertools.cycle(("timeout", "crash", "wrong", "oom", "compile_error", "invalid"))

    def rough(config):
        if config["num_warps"] == 8 or config["block_m"] == 16:
            status = next(statuses)
            return failed(status, f"{status}, as it happens")
        return ms(config)

    result = search(TASK, Played(rough), store, trials=60)
    possible = [config for config in ALL if config["num_warps"] != 8 and config["block_m"] != 16]
    assert result.best.config in possible
    assert result.best.median <= 1.1 * min(map(ms, possible))
    assert len(result.known) == 60
    rows = store.trials(KEY)
    assert {row.status for row in rows} >= {"ok", "timeout", "crash", "wrong"}
    assert all(row.error for row in rows if row.status != "ok")
    runner = Played()
    search(TASK, runner, store, trials=60)
    assert not runner.ran  # what failed is not tried again either


def test_a_space_in_which_nothing_can_run(store):
    class Closed(Hills):
        def limit(self, kernel, config, problem, architecture):
            return "closed"

    result = search(task(space=Closed()), Played(), store)
    assert (result.best, result.tried) == (None, 0)


def test_a_killed_search_loses_the_trial_in_flight_only(tmp_path):
    """A real process, kill -9 in the middle of a trial; the next search goes on."""
    path, log = tmp_path / "tuning.sqlite", tmp_path / "log"
    script = f"""
import time
from test_autotune_search import *

def slow(config):
    time.sleep(0.02)
    with open({str(log)!r}, "a") as file:
        print(json.dumps(config, sort_keys=True), file=file)
    return ms(config)

with Store({str(path)!r}) as store:
    search(TASK, Played(slow), store, trials=200)
"""
    paths = os.pathsep.join(filter(None, [os.path.dirname(__file__), *sys.path]))
    process = subprocess.Popen([sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": paths})
    while process.poll() is None and (not log.exists() or len(log.read_text().splitlines()) < 12):
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    ended = [line for line in log.read_text().splitlines(keepends=True) if line.endswith("\n")]
    with Store(path) as store:
        kept = [json.dumps(trial.config, sort_keys=True) for trial in store.trials(KEY)]
        assert kept in ([line.strip() for line in ended], [line.strip() for line in ended[:-1]])
        assert len(kept) >= 11
        runner = Played()
        search(TASK, runner, store, trials=60)
        assert len(store.trials(KEY)) == 60
        assert not {json.dumps(config, sort_keys=True) for config in runner.ran} & set(kept)


def test_the_budget_ends_a_search(store):
    def slow(config):
        time.sleep(0.1)
        return ms(config)

    result = search(TASK, Played(slow), store, trials=200, budget=1.0)
    assert 1 < result.tried < 20
    assert result.best is not None
    assert search(TASK, Played(slow), store, trials=200, budget=0.0).tried == 1


# --- finals -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_interleaved_finals_decide(store):
    """A lucky time of a mediocre candidate, and a clock that drifts: those timed side by side win."""
    lucky = sorted(ALL, key=ms)[12]

    def noisy(config):
        return 0.6 * ms(config) if config == lucky else ms(config)

    runner = Played(noisy, drift=1.3)
    result = search(TASK, runner, store, trials=217)
    assert runner.final[0] == lucky
    assert len(runner.final) == 4
    assert Hills.start in runner.final
    assert result.best.config == BEST
    (best,) = store.best()
    assert best.config == BEST
    assert best.median == result.best.median == pytest.approx(1.3 * ms(BEST))
    assert best.default.median == pytest.approx(1.3 * ms(Hills.start))


def test_finals_that_one_takes_down_change_nothing(store):
    def crash(task, configs):
        raise measure.Failed("crash", "gone")

    runner = Played()
    runner.finals = crash
    result = search(TASK, runner, store, trials=30)
    assert result.best.status == "ok"
    assert store.best()[0].median == result.best.median
