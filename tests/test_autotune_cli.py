"""``sdkde-autotune``, on a stranger's backend and without a GPU."""

import itertools
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("optuna")
pytest.importorskip("click_default_group")

import test_autotune_search
from click.testing import CliRunner
from sdkde_autotune import lookup, measure, report
from sdkde_autotune.cli import main
from sdkde_autotune.problems import place_of, problems, tasks
from sdkde_autotune.store import Store
from test_autotune_search import BEST, HILLS, Played, ms
from tuning_files import add, failed, ok

import sdkde_core
from sdkde_core import tuning
from sdkde_core.choice import cards, hardware, registry
from sdkde_core.plugin import grids
from sdkde_core.protocol import BackendInfo, Problem, Reduction, Support

PAGE = (Path(__file__).parent.parent / "docs" / "autotuning.md").read_text()
STRANGER = BackendInfo(
    name="stranger",
    protocol=(1, 2),
    implementation="test_autotune_search:Backend",
    devices=("cuda",),
    precisions=("fast", "high"),
    supports=lambda problem: Support(problem.d <= 100, "takes up to 100 dimensions"),
    tuning="test_autotune_search:HILLS",
)
PLAIN = BackendInfo("plain", (1, 2), "nowhere:Backend", ("cpu", "cuda"), ("fast",))
compiled = test_autotune_search.compiled  # a fixture
ONE = ("--reduction", "log_sum", "--dim", "16")


@pytest.fixture(autouse=True)
def _place(tmp_path, monkeypatch):
    """Two strangers' backends, no GPU, and files of our own."""
    records = [registry.Record(i.name, "ok", "installed", "x", "1", "x:INFO", i) for i in (PLAIN, STRANGER)]
    gone = registry.Record("gone", "missing", "needs torch; install with: pip install torch", "x", "1", "x:INFO", PLAIN)
    monkeypatch.setattr(registry, "records", lambda: (*records, gone))
    monkeypatch.setenv("SDKDE_DB", str(tmp_path / "tuning.sqlite"))
    monkeypatch.chdir(tmp_path)
    listed_cards(monkeypatch)
    for forget in (lookup.forget, measure.versions.cache_clear):  # versions of backends that only these tests have
        forget()
    yield
    for forget in (lookup.forget, measure.versions.cache_clear):
        forget()


def listed_cards(monkeypatch, *names):
    """Those that are here; the driver describes a T1200, and says of others that they are too old."""
    said = {name: (75 if name == "NVIDIA T1200" else 55, 16, 1.425, 160e9) for name in names}
    gpus = tuple(hardware.ListedGPU(name, f"GPU-{i}", *said[name]) for i, name in enumerate(names))
    monkeypatch.setattr(hardware, "visible_gpus", lambda: gpus)


class Made(list):
    """Runners, and how they answer."""

    answer = None


@pytest.fixture
def worker(monkeypatch):
    """Stand in for the runner that measures; returns the runners that are made of it."""
    made = Made()

    def make(device, compilers):
        made.append(Played(made.answer, device=device))
        return made[-1]

    monkeypatch.setattr(measure, "MeasuringRunner", make)
    return made


def run(*arguments, code=0):
    result = CliRunner().invoke(main, [str(a) for a in arguments])
    assert result.exit_code == code, result.output + repr(result.exception)
    return result


def refused(*arguments):
    """The one line that is told, with exit status 2."""
    result = run(*arguments, code=2)
    lines = [line for line in result.output.splitlines() if not line.startswith("no RTX")]
    assert len(lines) == 1, result.output
    assert lines[0].startswith("Error: ")
    return lines[0]


# --- commands --------------------------------------------------------------------------------------------------------


def test_no_arguments_print_help():
    output = run().output
    assert output == run("--help").output
    for name in main.commands:
        assert re.search(rf"^  {name}", output, re.M), name


@pytest.mark.parametrize("name", sorted(main.commands))
def test_every_command_and_option_has_help_and_is_documented(name):
    command = main.commands[name]
    assert command.help
    assert f"sdkde-autotune {name}" in PAGE
    for parameter in command.params:
        assert parameter.help, parameter.name
        for option in parameter.opts:
            if option.startswith("--"):
                assert f"`{option}" in PAGE, option
    assert run(name, "--help").output.startswith("Usage: ")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--gpu", "gtx9000"), r"no GPU is known as 'gtx9000'; pass auto, cpu, or one of v100, .*a100, .*b200, .*"),
        (("--gpu", "auto"), "no NVIDIA GPU is visible here; name one to predict for, such as --gpu a6000"),
        (("tune",), "no NVIDIA GPU is visible here"),
        (("--gpu", "a6000", "--reduction", "sum"), "'sum' is not one of"),
        (("--gpu", "a6000", "--dim", "0"), "0 is not in the range"),
        (("--gpu", "a6000", "--n-train", "many"), "'many' is not a valid integer"),
        (("--gpu", "a6000", "--precision", "float64"), "stranger: has precisions fast, high, not float64"),
        (("--gpu", "a6000", "--dim", "101"), "stranger: takes up to 100 dimensions"),
        (("--gpu", "a6000", "--backend", "plain"), "'plain' has nothing to tune; backends that can be tuned: stranger"),
        (("--gpu", "a6000", "--backend", "nope"), "'nope' is unknown; installed: gone, plain, stranger"),
        (("--gpu", "a6000", "--backend", "gone"), "'gone' is missing: needs torch"),
        (("--gpu", "a6000", "--budget", "soon"), "'soon' is no time; pass one such as 90s, 10m or 1h"),
        (("--gpu", "a6000", "--budget", "0"), "'0' is no time"),
        (("--gpu", "a6000", "--trials", "0"), "0 is not in the range"),
        (("--gpu", "a6000", "show"), "unexpected extra argument"),
        (("--frobnicate",), "No such option"),
        (("import", "absent.json"), "absent.json cannot be read: No such file"),
        (("export", "out.json"), "nothing is tuned yet"),
        (("tuen", "--gpu", "a6000"), "no command 'tuen'.*did you mean 'tune'"),
        (("xyzzy",), "no command 'xyzzy'; pass one of tune, "),
        (("a6000",), "did you mean --gpu a6000"),
        (("export", "out.json", "--gpu", "h100"), "nothing is tuned yet"),
    ],
)
def test_errors_are_one_line(arguments, told):
    assert re.search(told, refused(*arguments))


# --- what there is to tune -------------------------------------------------------------------------------------------


def test_problems_are_typical_calls():
    found = problems()
    assert len(found) == 9
    assert {p.d for p in found} == {2, 16, 64}
    for problem in found:
        mean = problem.reduction is Reduction.MEAN
        assert (problem.n, problem.m, problem.same) == (32768, 32768 if mean else 4096, mean)
        assert (problem.dtype, problem.precision, problem.device) == ("float32", "fast", "cuda:0")
        assert problem.extent == pytest.approx(1.2 * problem.d**0.5 + 6)
    (high,) = problems(["log_sum"], [3], [1000], [100], ["high"])
    assert (high.n, high.m, high.dtype) == (1024, 128, "float64")


def test_a_key_is_tuned_once():
    found = tasks(problems(dim=(2, 5, 16, 17), n_train=(32768, 33000)), place_of("a6000"))
    keys = [task.key for task in found]
    assert len(keys) == len(set(keys)) == 6  # dimensions of 16 and less are one kernel's
    assert {key.architecture for key in keys} == {"sm_86"}


def test_a_dry_run_does_nothing(compiled, tmp_path):
    result = run("--gpu", "a6000", "--dry-run")
    assert re.search(r"stranger +sum +log_sum +fast +16 +2\^15 +2\^12 +217", result.output)
    assert not compiled
    assert not list(tmp_path.iterdir())
    (row, *_) = json.loads(run("tune", "--gpu", "a6000", "--dry-run", "--json").stdout)
    assert row["configurations"] == 217


# --- tuning ----------------------------------------------------------------------------------------------------------


def test_without_that_gpu_the_best_priced_is_compiled_and_kept_as_predicted(compiled, tmp_path):
    result = run("--gpu", "a6000", *ONE)
    first, second = result.stderr.splitlines()  # not a terminal: progress is lines
    told = "no RTX A6000 here: nothing is measured; ranking by the cost model and compiling for sm_86"
    assert first == f"{told}; problems: 1, 16 trials each at most (--trials); no time limit (--budget)"
    assert re.match(r"1/1, 0:0\d: sum log_sum fast d=16 n=32768: rank 1 by block_m=", second)
    assert len(compiled) == 1
    assert re.search(r"log_sum +fast +16 .* rank \d+ +rank 1 +block_m=.* \d +0 +0$", result.stdout, re.M)
    assert result.stdout.splitlines()[-1].startswith("predicted for RTX A6000 in ")
    assert re.search(r"rank \d+ +rank 1 +predicted", run("show").stdout)
    (row,) = json.loads(run("show", "--json").stdout)
    assert (row["ms"], row["default_ms"], row["rank"]) == (None, None, 1)
    again = json.loads(run("--gpu", "A6000", *ONE, "--json").stdout)
    assert (again["gpu"], again["source"]) == ("RTX A6000", "predicted")
    assert (again["tasks"][0]["tried"], again["tasks"][0]["known before"]) == (0, 2)
    assert len(compiled) == 1


def test_a_log_has_a_line_a_minute(capsys, monkeypatch):
    """While a problem is searched: with the trials and the best time."""
    (task, *_) = todo = tasks(problems(["log_sum"], [16]), place_of("a6000"))
    clock = itertools.count()
    monkeypatch.setattr("time.monotonic", lambda: 7.0 * next(clock))
    progress = report.Progress(todo, 600.0)
    for known in range(20):
        progress.during(task, known, 20, 0.25)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert re.fullmatch(r"0/1, \d:\d\d of 10:00: sum log_sum fast d=16 n=32768: \d+/20, best 0\.25 ms", lines[0])


def test_where_nothing_is_named_the_budget_is_ten_minutes(compiled, monkeypatch):
    clock = itertools.count()
    monkeypatch.setattr("time.monotonic", lambda: 5.0 * next(clock))
    result = run("--gpu", "a6000")
    assert re.search(r"problems: \d+, 16 trials each at most \(--trials\); 600 s at most", result.stderr)
    assert re.search(r"^7/\d+, \d:\d\d of 10:00: ", result.stderr, re.M)
    assert "the budget is spent" in result.stderr
    assert re.search(r"predicted for RTX A6000", result.stdout)


def test_a_card_that_is_here_is_measured(worker, monkeypatch, tmp_path):
    listed_cards(monkeypatch, "NVIDIA H100 80GB HBM3", "NVIDIA RTX A6000")
    db = tmp_path / "other.sqlite"
    result = run("--gpu", "a6000", *ONE, "--db", db, "--trials", 20)
    assert result.stderr.startswith(
        "measuring on cuda:1; problems: 1, 20 trials each at most (--trials); no time limit"
    )
    (runner,) = worker
    assert runner.device == "cuda:1"
    assert len(runner.ran) == 20
    assert "measured for RTX A6000" in result.stdout
    assert str(db) in result.stdout
    with Store(db) as store:
        (best,) = store.best()
        assert best.source == "measured"
        assert ms(best.config) <= 1.2 * ms(BEST)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other.sqlite"]


def test_a_card_here_that_nobody_knows(monkeypatch):
    listed_cards(monkeypatch, "NVIDIA GeForce GT 710")
    assert "'NVIDIA GeForce GT 710'" in refused("--gpu", "auto")
    assert "older than compute capability 7.0" in refused("tune")


def test_a_card_here_that_nobody_listed_is_tuned(worker, monkeypatch, tmp_path):
    listed_cards(monkeypatch, "NVIDIA RTX A6000", "NVIDIA T1200")
    for name in ("nvidia t1200", "T1200"):
        result = run("--gpu", name, *ONE, "--trials", "3")
        assert "for T1200 in" in result.stdout
        assert worker[-1].device == "cuda:1"
    with Store(tmp_path / "tuning.sqlite") as store:
        (best,) = store.best()
    assert (best.key.gpu, best.key.architecture) == ("T1200", "sm_75")
    assert "T1200" in run("show", "--gpu", "t1200").stdout
    assert "for T1200 in" in run("--gpu", "t1200", *ONE, "--trials", "5").stdout
    listed_cards(monkeypatch, "NVIDIA T1200")
    assert "for T1200 in" in run("--gpu", "AUTO", *ONE, "--trials", "3").stdout
    listed_cards(monkeypatch)
    assert "did you mean 't4'" not in refused("--gpu", "T1200")  # what is nowhere is not known


def test_the_page_names_every_card():
    (row,) = re.findall(r"^\| `--gpu` .* are ignored\):(.*)", PAGE, re.M)
    named = [cards.gpu(name) for name in re.findall("`(.*?)`", row)]
    assert {card and card.name for card in named} == {card.name for card in cards.GPUS}


def test_cards_are_named_as_people_do():
    names = ("rtx 3090", "Tesla T4", "NVIDIA A100-SXM4-40GB")
    assert [place_of(name).name for name in names] == ["GeForce RTX 3090", "T4", "A100 40GB SXM"]
    assert "did you mean 'a6000'?" in refused("--gpu", "a600")
    assert "did you mean 'rtx3090'?" in refused("--gpu", "rtx3099")
    assert "no GPU is known as 'a6000 h100'; pass auto, cpu, or one of" in refused("--gpu", "a6000 h100")


def test_the_budget_is_shared_and_what_is_left_out_is_told(worker, monkeypatch):
    listed_cards(monkeypatch, "NVIDIA RTX A6000")
    clock = itertools.count()
    monkeypatch.setattr("time.monotonic", lambda: float(next(clock)))
    result = run("--dim", "16,64", "--budget", "10s")
    assert re.search("the budget is spent: [1-5] of 6 problems were not begun", result.stderr)
    assert " ms ±" in result.stdout


def test_where_nothing_is_named_a_grid_is_tuned_the_most_valuable_first(monkeypatch):
    listed_cards(monkeypatch, "NVIDIA RTX A6000")
    tasks = json.loads(run("--gpu", "auto", "--dry-run", "--json").stdout)
    assert [(t["reduction"], t["dimension"], t["n_octave"]) for t in tasks[:3]] == [
        ("mean", 16, 15),
        ("log_sum", 16, 15),
        ("laplace", 16, 15),
    ]
    sizes = [t["n_octave"] for t in tasks]
    assert sizes == sorted(sizes, key=(15, 17, 13, 20).index)


@pytest.mark.slow
def test_ctrl_c_keeps_what_was_tried(worker, monkeypatch, tmp_path):
    listed_cards(monkeypatch, "NVIDIA RTX A6000")
    count = itertools.count()

    def interrupted(config):
        if next(count) == 25:
            raise KeyboardInterrupt
        return ms(config)

    worker.answer = interrupted
    result = run("--dim", "16", "--trials", 20, code=130)
    assert "stopped: what was tried is kept, and the same command goes on from there" in result.stderr
    assert "Traceback" not in result.output
    assert re.search(r"sum +mean", result.stdout)
    with Store(tmp_path / "tuning.sqlite") as store:
        assert len(store.trials()) == 25
        assert len(store.best()) == 2
    worker.answer = None
    told = json.loads(run("--dim", "16", "--trials", 20, "--json").stdout)
    assert [task["tried"] for task in told["tasks"]] == [0, 15, 20]


def test_when_nothing_runs_the_reason_is_told(compiled, monkeypatch):
    monkeypatch.setattr(type(HILLS), "too_much", lambda *arguments: "spills 512 bytes")
    result = run("--gpu", "a6000", *ONE)
    assert re.search(r" - +- +- +16 +0 +16 +spills 512 bytes$", result.stdout, re.M)


def test_what_could_be_tuned_is_named_with_what_installs_it(monkeypatch):
    absent = replace(STRANGER, install="pip install stranger")
    records = [registry.Record(i.name, "missing", "needs x", "x", "1", "x:INFO", i) for i in (PLAIN, absent)]
    monkeypatch.setattr(registry, "records", lambda: tuple(records))
    told = refused("--gpu", "a6000", *ONE)
    assert told.endswith("no installed backend can be tuned; install one: pip install stranger")


def test_weights(worker, monkeypatch):
    """Backends that take them; the default grid has them where other kernels run them."""
    monkeypatch.setattr(type(HILLS), "kernels", lambda self, p: ("weighted",) if "weights" in p.requires else ("sum",))
    listed_cards(monkeypatch, "NVIDIA RTX A6000")
    assert "stranger: lacks weights" in refused(*ONE, "--weights", "--dry-run")
    able = replace(STRANGER, features=frozenset({"weights"}))
    record = registry.Record("stranger", "ok", "installed", "x", "1", "x:INFO", able)
    monkeypatch.setattr(registry, "records", lambda: (record,))
    (row,) = json.loads(run(*ONE, "--weights", "--dry-run", "--json").stdout)
    assert (row["requires"], row["m_octave"]) == ("weights", 12)
    rows = json.loads(run("--dry-run", "--json").stdout)
    assert {(row["kernel"], row["requires"]) for row in rows} == {("sum", ""), ("weighted", "weights")}
    assert {row["n_octave"] for row in rows if row["requires"]} == {15}
    plain = [not row["requires"] for row in rows]
    assert plain == sorted(plain, reverse=True)  # the odd ones last


# --- what is known ---------------------------------------------------------------------------------------------------


@pytest.fixture
def tuned(worker, monkeypatch):
    """A tuned database: log_sum and mean in 16 dimensions."""
    listed_cards(monkeypatch, "NVIDIA RTX A6000")
    run("--reduction", "log_sum,mean", "--dim", "16", "--trials", "10")
    listed_cards(monkeypatch)


def test_show(tuned):
    output = run("show").stdout
    assert len(output.splitlines()) == 3
    assert "RTX A6000" in output
    assert "measured" in output
    assert len(run("show", "--reduction", "mean", "--gpu", "a6000").stdout.splitlines()) == 2
    assert run("show", "--gpu", "h100").stdout == "nothing matches\n"
    assert run("show", "--source", "predicted").stdout == "nothing matches\n"
    rows = json.loads(run("show", "--json", "--dim", "16", "--precision", "fast").stdout)
    assert {row["reduction"] for row in rows} == {"log_sum", "mean"}
    assert set(rows[0]["config"]) == set(HILLS.values)
    trials = run("show", "--trials", "--reduction", "mean", "--backend", "stranger", "--kernel", "sum").stdout
    assert len(trials.splitlines()) == 11
    assert len(json.loads(run("show", "--trials", "--json").stdout)) == 20


@pytest.mark.filterwarnings("default::sdkde_core.SdkdeWarning")
def test_a_file_that_is_not_ours_is_refused_by_every_command(tmp_path, monkeypatch, untold):
    path = tmp_path / "novel"
    path.write_text("my novel, chapter one\n" * 99)
    listed_cards(monkeypatch, "NVIDIA RTX A6000")
    for words in ("show",), ("show", "--trials"), ("export", "out.json"), ("--again",), (*ONE, "--trials", "1"):
        assert "is no database of the tuner, and is left alone" in refused(*words, "--db", path)
    told = run("explain", *ONE, "--db", path)
    assert re.search(r"^Warning: .*novel is not used: .*$", told.stderr, re.M)
    assert "heuristic" in told.stdout
    assert [*tmp_path.iterdir()] == [path]


def test_reading_writes_nothing(tuned, tmp_path, monkeypatch):
    db = tmp_path / "tuning.sqlite"
    db.chmod(0o444)
    before = db.read_bytes()
    for words in ("show",), ("show", "--trials"), ("export", "-"), ("export", "--winners", "-"):
        run(*words)
    assert "exact" in run("explain", "--gpu", "a6000", *ONE).stdout
    assert db.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["tuning.sqlite"]


def test_explain(tuned, monkeypatch):
    arguments = ("explain", "--gpu", "a6000", "--reduction", "log_sum")
    exact = r"exact +block_m=.* measured; 2\d\d\d-"
    assert re.search(exact, run(*arguments, "--dim", 16).stdout)
    other = run(*arguments, "--dim", 16, "--n-train", 131072).stdout
    assert re.search(r" near .* measured; n 2\^15; m 2\^12; 2\d\d\d-", other)
    assert re.search(r"heuristic .*the backend's default", run(*arguments, "--dim", 64).stdout)
    (row,) = json.loads(run(*arguments, "--dim", 16, "--json").stdout)
    assert row["rung"] == "exact"

    winner = row["config"]
    limit = type(HILLS).limit

    def refuse(self, kernel, config, *rest):
        return "too large" if config == winner else limit(self, kernel, config, *rest)

    monkeypatch.setattr(type(HILLS), "limit", refuse)
    assert re.search(r" exact +block_m=.* not used: too large\n.* heuristic ", run(*arguments, "--dim", 16).stdout)


def test_explain_says_what_has_changed(tmp_path):
    (task, *_) = tasks(problems(["log_sum"], [16]), place_of("a6000"))
    with Store(tmp_path / "there.sqlite") as store:
        add(store, task.key, BEST, ok(1.0), "measured", {"source": "a", "sdkde": "0.0"})
    output = run("explain", "--gpu", "a6000", *ONE, "--db", "there.sqlite").stdout
    assert re.search(r"exact .*measured; .*sdkde was 0.0, now ", output)
    assert "there" not in os.environ["SDKDE_DB"]
    assert "heuristic" in run("explain", "--gpu", "a6000", *ONE).stdout


def test_export_and_import(tuned, tmp_path):
    assert "out.json: 20 trials, 2 winners" in run("export", "out.json").stderr
    assert json.loads(run("export", "-", "--reduction", "mean").stdout)["trial"][0]["reduction"] == "mean"
    assert "20 new rows" in run("import", "out.json", "--db", "new.sqlite").stdout
    assert " 0 new rows" in run("import", "out.json", "--db", "new.sqlite").stdout
    assert "20 new rows" in run("import", "tuning.sqlite", "--db", "newer.sqlite").stdout
    assert "winners.json: 4 trials, 2 winners" in run("export", "--winners", "winners.json").stderr
    assert "4 new rows" in run("import", "winners.json", "--db", "winners.sqlite").stdout
    mine, theirs = (json.loads(run("show", "--json", *words).stdout) for words in ((), ("--db", "winners.sqlite")))
    assert [{**row, "source": "measured"} for row in theirs] == mine
    assert None not in [row["default_ms"] for row in mine]
    output = run("show", "--db", "new.sqlite").stdout
    assert output.count("imported") == 2
    before = Path("tuning.sqlite").read_bytes()
    assert "FILE and the database are one file" in refused("export", tmp_path / "tuning.sqlite")
    assert "new.sqlite is there, and is no export" in refused("export", "new.sqlite")
    assert "out.json: 20 trials" in run("export", "out.json").stderr
    assert Path("tuning.sqlite").read_bytes() == before


@pytest.mark.slow
def test_a_card_that_is_not_here_end_to_end(tmp_path, monkeypatch):
    """As users run it: the cost model ranks, Triton compiles, the file keeps, and a look-up on that card finds it."""
    pytest.importorskip("triton")
    from sdkde_triton.compiled import configuration

    db = tmp_path / "tuning.sqlite"
    command = [sys.executable, "-c", "from sdkde_autotune.cli import main; main()", "--gpu", "a6000", "--db", str(db)]
    command += ["--backend", "triton", "--dim", "64", "--reduction", "log_sum", "--trials", "3", "--json"]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert "no RTX A6000 here: nothing is measured" in done.stderr
    with Store(db) as store:
        (best,) = store.best(source=("predicted",))
        statuses = {trial.status for trial in store.trials()}
    assert "ok" in statuses <= {"ok", "compile_error"}
    assert best.key.architecture == "sm_86"
    assert best.ms is None
    assert best.rank >= 1
    monkeypatch.setenv("SDKDE_DB", str(db))
    lookup.forget()
    problem = Problem(Reduction.LOG_SUM, 4096, 32768, 64, precision="fast", device="cuda:0", extent=15.0)
    card = grids.Card(84, 86, 1 << 16, 100 << 10, 1536, "RTX A6000")
    assert configuration("log_sum", problem, 64, card)._asdict() == best.config
    lookup.forget()


@pytest.mark.slow
def test_winners_are_measured_again(worker, tmp_path, monkeypatch):
    listed_cards(monkeypatch, "NVIDIA RTX A6000")
    run("--gpu", "auto", *ONE, "--trials", 30)
    with Store(tmp_path / "tuning.sqlite") as store:
        (before,) = store.best()
    again = run("--again", "--dim", "16,64")
    assert "problems: 1;" in again.stderr
    assert before.config in worker[-1].ran  # alone first, then beside the default
    assert before.config in worker[-1].final
    assert len(worker[-1].ran) <= 6
    worker.answer = lambda config: failed("wrong", "off") if config == before.config else ms(config)
    assert re.search(" 1 +off$", run("--again").stdout, re.M)
    with Store(tmp_path / "tuning.sqlite") as store:
        (after,) = store.best()
    assert after.config != before.config
    assert "there is no H200 SXM here; pass --again where" in refused("--again", "--gpu", "h200")


def test_a_cpu_is_tuned(worker, monkeypatch, tmp_path):
    """By its backends; on `--gpu cpu` nothing looks for a card."""
    able = replace(STRANGER, devices=("cpu",))
    monkeypatch.setattr(registry, "records", lambda: (registry.Record("stranger", "ok", "", "x", "1", "x:I", able),))
    result = run("--gpu", "cpu", *ONE, "--trials", "5")
    name, architecture = tuning.this_cpu()
    assert f"measured for {name}" in result.stdout
    assert worker[0].device == "cpu"
    with Store(tmp_path / "tuning.sqlite") as store:
        (best,) = store.best()
    assert (best.key.gpu, best.key.architecture) == (name, architecture)
    assert "exact" in run("explain", "--gpu", "cpu", *ONE).stdout
    assert len(run("show", "--gpu", "cpu").stdout.splitlines()) == 2


@pytest.mark.slow
def test_numba_is_tuned_end_to_end(tmp_path, monkeypatch):
    """Measured in another process, and what is kept is what an estimate runs with."""
    pytest.importorskip("numba")
    monkeypatch.undo()
    db = tmp_path / "tuning.sqlite"
    command = [sys.executable, "-c", "from sdkde_autotune.cli import main; main()", "--gpu", "cpu", "--db", str(db)]
    command += ["--reduction", "log_sum", "--dim", "3", "--n-train", "1024", "--trials", "4", "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)["tasks"]
    assert row["counts"] == {"ok": 4}
    monkeypatch.setenv("SDKDE_DB", str(db))
    lookup.forget()
    x = np.random.default_rng(0).normal(size=(1024, 3)).astype("float32")
    expected = sdkde_core.estimate(x, method="kde", bandwidth=0.5, backend="numpy", precision="float64")
    found = sdkde_core.estimate(x, method="kde", bandwidth=0.5, backend="numba", precision="fast")
    np.testing.assert_allclose(found, expected, rtol=5e-4)
    lookup.forget()
