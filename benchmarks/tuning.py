"""What tuning gives, what pruning costs, and how well the cost model ranks.

    python benchmarks/tuning.py compare                  # on a GPU: tuned, default and the paper's configuration
    python benchmarks/tuning.py record --db space.sqlite # on a GPU: whole spaces, what is pruned included
    python benchmarks/tuning.py judge space.json         # anywhere: of such a record, after `sdkde-autotune export`
    python benchmarks/tuning.py predict benchmarks/recorded/h200.json  # anywhere: predictions against what was measured
    python benchmarks/tuning.py samplers benchmarks/recorded/h200.json # anywhere: the rows of notes/tuning.md

``compare`` checks every configuration against float64 before it is timed; times are in turns, 25 rounds, CUDA graphs,
caches flushed, with the 20 % and 80 % quantiles. ``judge --write FILE`` keeps what ``simulate`` needs: the
configurations that are not pruned.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, geometric_mean
from tempfile import TemporaryDirectory
from typing import Any

from sdkde_autotune import offline
from sdkde_autotune.key import Key, canonical
from sdkde_autotune.problems import Tunable, problems, task_of, tunables
from sdkde_autotune.provenance import clocks
from sdkde_autotune.runner import Outcome, Task
from sdkde_autotune.search import PAPER, candidates
from sdkde_autotune.simulate import recorded, simulate
from sdkde_autotune.store import Store
from sdkde_autotune.worker import ROUNDS, MeasuringRunner, quantiles

from sdkde_core import tuning
from sdkde_core.choice import cards, hardware
from sdkde_core.protocol import Reduction

DEVICE, PATIENCE = "cuda:0", 60.0

#: Problems whose whole spaces are recorded: reductions, dimensions, training points, precision.
RECORDED = {
    "triton": [
        (("mean",), (2, 16, 64), (32768,), ("fast",)),
        (("mean",), (16,), (32768,), ("high",)),
        (("log_sum",), (16, 64), (32768,), ("fast",)),
        (("laplace",), (32,), (32768,), ("fast",)),
    ],
    "numba-cuda": [
        (("log_sum",), (128,), (32768,), ("high",)),
        (("mean",), (128,), (32768,), ("fast",)),
        (("mean",), (16,), (32768,), ("fast",)),
        (("log_sum",), (2,), (32768,), ("fast",)),
    ],
}

#: Of what ``samplers`` compares: samplers, numbers of trials, searches of those that draw at random.
SAMPLERS, TRIALS, REPEATS = ("priced", "random", "tpe"), (16, 60), 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    compare_parser = commands.add_parser("compare")
    compare_parser.add_argument("--jobs", type=int, default=hardware.cpu_threads())
    paper_parser = commands.add_parser("paper", help="used by compare")
    for name in ("reduction", "d", "n"):
        paper_parser.add_argument(name)
    pruned_parser = commands.add_parser("pruned", help="used by record")
    for name in ("reduction", "d", "n", "precision"):
        pruned_parser.add_argument(name)
    record_parser = commands.add_parser("record")
    record_parser.add_argument("--db", type=Path, required=True)
    record_parser.add_argument("--backend", choices=RECORDED, default="triton")
    record_parser.add_argument("--jobs", type=int, default=hardware.cpu_threads())
    judge_parser = commands.add_parser("judge")
    judge_parser.add_argument("file", type=Path)
    judge_parser.add_argument("--write", type=Path)
    for name in ("predict", "samplers"):
        commands.add_parser(name).add_argument("files", type=Path, nargs="+")
    arguments = vars(parser.parse_args())
    calls = {"compare": compare, "paper": paper, "record": record, "pruned": pruned, "judge": judge}
    calls |= {"predict": predict, "samplers": samplers}
    calls[arguments.pop("command")](**arguments)


def card() -> cards.GPU:
    found = hardware.card(DEVICE)
    assert found is not None, "a GPU that nobody knows"
    return found


def of(reductions: Any, dims: Any, n_train: Any, precisions: Any = ("fast",)) -> Tunable:
    """The kernel that takes longest of a problem."""
    return next(iter(tunables(problems(reductions, dims, n_train, (), precisions), card())))


# --- tuned, default, the paper's -------------------------------------------------------------------------------------


def compare(jobs: int) -> None:
    print(card().name, clocks(DEVICE))
    print(f"{'':34}default ms              tuned ms                ratio  rung       paper's configuration")
    runner = MeasuringRunner(DEVICE, jobs)
    try:
        for reduction, d, n in itertools.product(Reduction, (2, 16, 64), (8192, 32768, 131072)):
            print(line(runner, reduction, d, n), flush=True)
    finally:
        runner.close()


def line(runner: MeasuringRunner, reduction: Reduction, d: int, n: int) -> str:
    task, space = of((reduction,), (d,), (n,))
    default = dict(space.default(task.query.kernel, task.problem, task.query.architecture))
    found = tuning.tuned(task.query, task.problem)
    tuned = dict(found.config) if found else default
    configs = [default] + ([tuned] if tuned != default else [])
    runner.prepare(task, configs)
    first = [runner.run(task, config, math.inf) for config in configs]
    bad = [outcome for outcome in first if outcome.status != "ok"]
    what = f"{reduction:8}d = {d:<3} n = {n:<7} "
    if bad:
        return f"{what}{bad[0].status}: {bad[0].error}"
    times = runner.finals(task, configs)
    cells = [f"{o.ms[1]:.4f} ({o.ms[0]:.4f}–{o.ms[2]:.4f})" for o in times if o.ms]
    ratio = times[-1].median / times[0].median
    rung = found.rung if found else "heuristic"
    same = "" if tuned != default else " = default"
    text = f"{cells[0]:24}{cells[-1]:24}{ratio:.3f}  {rung}{same}"
    return f"{what}{text:60}  {_paper(reduction, d, n) if n == 32768 else ''}".rstrip()


def _paper(reduction: Reduction, d: int, n: int) -> str:
    """The paper's configuration beside the default, in a process of its own: it is not in our space."""
    command = [sys.executable, __file__, "paper", str(reduction), str(d), str(n)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        return f"no result within {PATIENCE:g} s"
    return (done.stdout.strip() or done.stderr.strip() or "?").splitlines()[-1][:150]


def paper(reduction: str, d: str, n: str) -> None:
    from sdkde_autotune.bench import Bench

    task, space = of((reduction,), (int(d),), (int(n),))
    bench = Bench(task, DEVICE)
    take_anything()
    default = dict(space.default(task.query.kernel, task.problem, task.query.architecture))
    worst = bench.check(PAPER)
    times: list[list[float]] = [[], []]
    for _ in range(ROUNDS):
        for config, mine in zip((default, PAPER), times):
            mine.append(bench.time(dict(config)))
    ours, theirs = (quantiles(mine) for mine in times)
    print(f"{theirs[1]:.4f} ms, {theirs[1] / ours[1]:.2f} of the default, worst row {worst:.2g} of the tolerance")


def take_anything() -> None:
    """Let the backend launch what it would not: in this process only."""
    from sdkde_triton import compiled, space

    space.SPACE = {name: (*values, PAPER[name]) for name, values in space.SPACE.items()}
    compiled.fits = lambda *arguments: True


# --- whole spaces ----------------------------------------------------------------------------------------------------


def whole(task: Task, space: tuning.Space) -> Iterator[dict[str, Any]]:
    parameters = space.parameters(task.query.kernel)
    for values in itertools.product(*parameters.values()):
        yield dict(zip(parameters, values))


def record(db: Path, backend: str, jobs: int) -> None:
    """Run everything; of Triton what the parameters alone rule out, too. What is in the file is not run again.

    In random order, so that of a search that was stopped a fair sample is there.
    """
    runner = MeasuringRunner(DEVICE, jobs)
    try:
        with Store(db) as store:
            for reductions, dims, sizes, precisions in RECORDED[backend]:
                for task, space in tunables(problems(reductions, dims, sizes, (), precisions), card(), backend):
                    _recorded(runner, store, task, space)
    except KeyboardInterrupt:
        print("stopped: the same command goes on from there")
    finally:
        runner.close()


def _recorded(runner: MeasuringRunner, store: Store, task: Task, space: tuning.Space) -> None:
    key, best, start = Key.of(task.query, task.problem), math.inf, time.monotonic()
    known = [dict(trial.config) for trial in store.trials(key)]
    left = [config for config in candidates(task, space) if config not in known]
    random.Random(0).shuffle(left)
    default = dict(space.default(task.query.kernel, task.problem, task.query.architecture))
    runner.prepare(task, left)
    for config in left:
        outcome = runner.run(task, config, best)
        best = min(best, outcome.median)
        store.add(key, config, outcome, "measured", runner.provenance(task), is_default=config == default)
    rest = [c for c in whole(task, space) if c not in left and c not in known] if key.backend == "triton" else []
    runner.prepare(task, rest)
    for config, outcome in zip(rest, _pruned(runner, task, space, rest) if rest else ()):
        store.add(key, config, outcome, "measured", runner.provenance(task))
    seconds = time.monotonic() - start
    print(key.kernel, key.reduction, key.precision, key.dimension, key.n_octave, len(left), best, f"{seconds:.0f} s")


def _pruned(runner: MeasuringRunner, task: Task, space: tuning.Space, configs: list[Any]) -> list[Outcome]:
    """What pruned configurations take, if the card runs them at all: in a process without the limits."""
    problem, able, outcomes = task.problem, [], {}
    for i, config in enumerate(configs):
        compiled = runner._compilers.resources(task, config)
        if isinstance(compiled, Outcome):
            outcomes[i] = compiled
        elif compiled[0].shared > 232448:
            outcomes[i] = Outcome("compile_error", error=f"takes {compiled[0].shared} bytes of shared memory")
        else:
            able.append(i)
    which = [str(x) for x in (problem.reduction, problem.d, problem.n, problem.precision)]
    command = [sys.executable, __file__, "pruned", *which]
    given = json.dumps([configs[i] for i in able])
    done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=300)
    for i, line in itertools.zip_longest(able, done.stdout.splitlines()):
        told = json.loads(line) if line else {"status": "crash", "error": done.stderr[-200:]}
        outcomes[i] = Outcome(told["status"], told.get("ms") and tuple(told["ms"]), told.get("error", ""))
    return [outcomes[i] for i in range(len(configs))]


def pruned(reduction: str, d: str, n: str, precision: str) -> None:
    from sdkde_autotune.bench import Bench
    from sdkde_autotune.worker import _run

    configs = json.load(sys.stdin)
    task, _ = of((reduction,), (int(d),), (int(n),), (precision,))
    bench = Bench(task, DEVICE)
    take_anything()
    for config in configs:
        (outcome,), lost = _run(bench, config, 0.0)  # hopeless after five timings, unless they are the best
        print(json.dumps({"status": outcome.status, "ms": outcome.ms, "error": outcome.error}), flush=True)
        if lost:
            break


def judge(file: Path, write: Path | None) -> None:
    """Print what pruning removes and how the cost model ranks; of ``record``'s file, or what export made of it."""
    from scipy.stats import spearmanr

    dump = json.loads(file.read_text())
    by_key: dict[Key, list[dict[str, Any]]] = {}
    for row in dump["trial"]:
        by_key.setdefault(Key._make(row[name] for name in Key._fields), []).append(row)
    kept: list[dict[str, Any]] = []
    print(
        "kernel       reduction precision d    n     all pruned  of these ran  best ms  best pruned  rank corr. best 16"
    )
    for key, rows in by_key.items():
        task = task_of(key)
        space = offline.space_for(task)
        left = {json.dumps(config, sort_keys=True) for config in candidates(task, space)}
        ours = [row for row in rows if json.dumps(_config(row), sort_keys=True) in left]
        pruned = [row for row in rows if json.dumps(_config(row), sort_keys=True) not in left]
        kept += ours
        best = min(row["q50"] for row in ours if row["status"] == "ok")
        ran = [row["q50"] for row in pruned if row["status"] == "ok"]
        timed = [row for row in ours if row["status"] == "ok"]
        on = cards.gpu(key.gpu)
        assert on is not None
        priced = [space.seconds(key.kernel, _config(row), task.problem, on) for row in timed]
        order = sorted(range(len(timed)), key=lambda i: priced[i])
        loss = min(timed[i]["q50"] for i in order[:16]) / best - 1
        print(
            f"{key.kernel:13}{key.reduction:10}{key.precision:6}{key.dimension:<5}2^{key.n_octave:<4}{len(rows):4}"
            f"{len(pruned):7}{len(ran):14}{best:9.4f}{(f'{min(ran) / best:.2f} ×' if ran else '-'):>13}"
            f"{spearmanr(priced, [row['q50'] for row in timed])[0]:12.2f}{loss:9.1%}"
        )
    if write:
        for row in kept:
            row |= {"phases": {}, "provenance": {}}
        write.write_text(json.dumps({**dump, "trial": kept, "calibration": []}) + "\n")


def _named(key: Key) -> cards.GPU:
    found = cards.gpu(key.gpu)
    assert found is not None
    return found


def predict(files: list[Path]) -> None:
    """Print what predictions would take, of what was measured: without the margin, with it, and the default."""
    print("kernel       reduction precision d     default  predicted  with margin   over the best")
    means: dict[str, list[float]] = {}
    for key, records, task, space in (found for file in files for found in recorded(file)):
        times = {canonical(config): ms for config, ms in records}
        best, ratios = min(times.values()), {"default": times[canonical(space.start)]}
        for name, margin in (("predicted", 0.0), ("with margin", offline.MARGIN)):
            offline.MARGIN, before = margin, offline.MARGIN
            with TemporaryDirectory() as folder, Store(Path(folder) / "one.sqlite") as store:
                asked = [(task, offline.space_for(task))]
                (result,) = offline.predict(asked, _named(key), store, check=False)
            offline.MARGIN = before
            ratios[name] = times[canonical(result.best or {})]
        for name, ms in ratios.items():
            means.setdefault(name, []).append(ms / best)
        cells = "".join(f"{ms / best:11.3f}" for ms in ratios.values())
        print(f"{key.kernel:13}{key.reduction:10}{key.precision:6}{key.dimension:<5}{cells}", flush=True)
    print("geometric means " + ", ".join(f"{name} {geometric_mean(x):.3f}" for name, x in means.items()))


def samplers(files: list[Path]) -> None:
    """Print a row of notes/tuning.md for each recorded space: the mean and the worst loss of each sampler."""
    for key, records, task, space in (found for file in files for found in recorded(file)):
        cells = []
        for trials, sampler in itertools.product(TRIALS, SAMPLERS):
            seeds = range(1 if sampler == "priced" else REPEATS)
            losses = [100 * simulate(records, task, space, sampler, trials, seed) for seed in seeds]
            cells.append(f"{fmean(losses):.1f}" if len(losses) == 1 else f"{fmean(losses):.1f}, {max(losses):.1f}")
        what = f"{key.backend} {key.kernel}, {key.reduction}, d = {key.dimension}, {key.precision}"
        print(f"| {what} | {len(records)} | {' | '.join(cells)} |", flush=True)


def _config(row: dict[str, Any]) -> dict[str, Any]:
    return row["config"] if isinstance(row["config"], dict) else json.loads(row["config"])


if __name__ == "__main__":
    main()
