"""What tuning gives, how well the search does on recorded spaces, and how well the cost model ranks.

    python benchmarks/tuning.py compare --gpu auto                    # tuned and default, in turns; or --gpu cpu
    python benchmarks/tuning.py record --db space.sqlite              # on a GPU: all that can run of some spaces
    python benchmarks/tuning.py replay benchmarks/recorded/h200.json  # anywhere: searches and predictions in records

``compare`` checks every configuration against float64 before it is timed. ``replay`` reads a database, or what
``sdkde-autotune export`` made of it.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

from sdkde_autotune.measure import MeasuringRunner
from sdkde_autotune.problems import place_of, problems, tasks
from sdkde_autotune.records import Task, Trial, canonical
from sdkde_autotune.search import ranking, search
from sdkde_autotune.store import Store

from sdkde_core import tuning
from sdkde_core.choice import hardware
from sdkde_core.protocol import Reduction


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("compare").add_argument("--gpu", default="auto")
    record_parser = commands.add_parser("record")
    record_parser.add_argument("--db", type=Path, required=True)
    record_parser.add_argument("--backend", default="triton")
    commands.add_parser("replay").add_argument("files", type=Path, nargs="+")
    arguments = vars(parser.parse_args())
    {"compare": compare, "record": record, "replay": replay}[arguments.pop("command")](**arguments)


def compare(gpu: str) -> None:
    """Print the times of the default and of the tuned configuration, and their ratio."""
    place = place_of(gpu)
    assert place.device is not None, "it is not here"
    runner = MeasuringRunner(place.device, hardware.cpu_threads())
    sizes = (8192, 32768, 131072) if place.card else (4096, 32768)
    print(place.name)
    try:
        for reduction, d, n in itertools.product(Reduction, (2, 16, 64), sizes):
            wanted = problems((reduction,), (d,), (n,), device="cuda:0" if place.card else "cpu")
            task = tasks(wanted, place)[0]
            default = task.default()
            found = tuning.tuned(task.query, task.problem)
            configs = [default, dict(found.config) if found else default]
            runner.prepare(task, configs)
            alone = [runner.run(task, config, lambda timings, median: False) for config in configs]
            times = runner.finals(task, configs) if all(o.status == "ok" for o in alone) else alone
            cells = [f"{o.ms[1]:.4f} ({o.ms[0]:.4f}-{o.ms[2]:.4f})" if o.ms else o.error for o in times]
            ratio = times[1].median / times[0].median
            what = f"{task.query.backend} {reduction} d = {d} n = {n}"
            print(f"{what:36} {cells[0]:28} {cells[1]:28} {ratio:.3f} {found.rung if found else '-'}", flush=True)
    finally:
        runner.close()


def record(db: Path, backend: str) -> None:
    """Run everything that can run of some problems; what is in the file is not run again."""
    place = place_of("auto")
    runner = MeasuringRunner(str(place.device), hardware.cpu_threads())
    try:
        with Store(db) as store:
            for reduction, d, precision in (("mean", 16, "fast"), ("log_sum", 64, "fast"), ("laplace", 32, "high")):
                for task in tasks(problems((reduction,), (d,), precision=(precision,)), place, backend):
                    search(task, runner, store, trials=10**6)
    finally:
        runner.close()


def replay(files: list[Path]) -> None:
    """Print the loss of searches, in percent over the best recorded time, and that of the cost model's choice."""
    print("problem, configurations: 16 trials; 60 trials; default; predicted")
    for file in files:
        for task, times in recorded(file):
            best, kernel, default = min(times.values()), task.query.kernel, canonical(task.default())
            cells = [f"{_loss(task, times, trials):.1f}" for trials in (16, 60)]
            card = hardware.card_called(task.query.gpu)
            assert card is not None
            chosen = next(name for name in map(canonical, ranking(task, card)) if name in times)
            ends = (100 * (times[name] / best - 1) for name in (default, chosen))
            print(f"{kernel} {task.problem.reduction} d = {task.problem.d}, {len(times)}:", *cells,
                  *(f"{end:.1f}" for end in ends), flush=True)  # fmt: skip


def recorded(path: Path) -> Iterator[tuple[Task, dict[str, float]]]:
    """Yield the spaces in an export or a database: milliseconds by configuration."""
    with TemporaryDirectory() as folder, Store(Path(folder) / "recorded.sqlite") as store:
        store.load(path)
        for best in store.best():
            ran = [trial for trial in store.trials(best.key) if trial.ms]
            key, sizes = best.key, ([2**best.key.n_octave], [2**best.key.m_octave])
            wanted = problems([key.reduction], [key.d], *sizes, [key.precision], filter(None, key.requires.split(",")))
            (task,) = (task for task in tasks(wanted, place_of(key.gpu), key.backend) if task.key == key)
            yield task, {trial.name: trial.median for trial in ran}


def _loss(task: Task, times: Mapping[str, float], trials: int) -> float:
    """Search recorded times; one that was not recorded does not run."""

    def run(task: Task, config: Any, slow: Any) -> Trial:
        ms = times.get(canonical(config))
        return Trial(task.key, config, ms=(ms, ms, ms)) if ms else Trial(task.key, config, "crash", "not recorded")

    runner: Any = SimpleNamespace(run=run, prepare=lambda *_: None)
    runner.finals = lambda task, configs: [run(task, config, None) for config in configs]
    card = hardware.card_called(task.query.gpu)
    with TemporaryDirectory() as folder, Store(Path(folder) / "replay.sqlite") as store:
        found = search(task, runner, store, card=card, trials=trials)
        assert found.best is not None
        return 100 * (found.best.median / min(times.values()) - 1)


if __name__ == "__main__":
    main()
