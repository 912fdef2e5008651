"""The command ``sdkde-autotune``; imported by the console script only."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

import click

from sdkde_core import __version__
from sdkde_core.choice import cards, hardware
from sdkde_core.choice.calibration import machine_of, tuning_is_off
from sdkde_core.cli.console import Argument, Choice, json_option, table
from sdkde_core.cli.console import Group as OneLine
from sdkde_core.messages import did_you_mean
from sdkde_core.plugin import write_atomically

from . import lookup, options, provenance
from .problems import by_value, tunables
from .search import SAMPLERS, Result
from .search import tune as search_all

if TYPE_CHECKING:
    from .store import Store
    from .worker import MeasuringRunner

try:
    from click_default_group import DefaultGroup
    from tqdm import tqdm
except ImportError:
    click.echo("Error: the tuner needs more packages: pip install 'sdkde-core[autotune]'", err=True)
    raise SystemExit(2) from None

__all__ = ["main"]

#: Configurations to try for each problem when measuring, and to compile for each at most when predicting.
TRIALS, PREDICTED = 60, 16

#: Seconds for a run whose command names no problem.
BUDGET = 600.0

#: Of progress: it shows on a terminal only.
_BAR: dict[str, Any] = {"leave": False, "unit": "", "disable": None}

#: Percent of its time that a card is busy before we use it, from which times are unreliable.
BUSY = 5


class _Commands(OneLine, DefaultGroup):
    """Options without a command are those of ``tune``; an unknown command is an error with a suggestion."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> Any:
        if cmd_name not in self.commands and not cmd_name.startswith("-"):
            hint = did_you_mean(cmd_name, self.commands)
            if cards.gpu(cmd_name):
                hint = f"; did you mean --gpu {cmd_name}?"
            raise click.UsageError(f"there is no command {cmd_name!r}; pass one of {', '.join(self.commands)}{hint}")
        return super().get_command(ctx, cmd_name)


@click.group(
    cls=_Commands,
    default="tune",
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(__version__, prog_name="sdkde-autotune")
@click.pass_context
def main(ctx: click.Context) -> None:
    """Find fast launch configurations for backends, and store them.

    Options without a command are those of tune: sdkde-autotune --gpu a6000
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


@main.command()
@options.problem_options
@click.option(
    "--trials",
    type=options.POSITIVE,
    help=f"Configurations to try for a problem. Default: {TRIALS}; with grid all; without the GPU at most {PREDICTED}.",
)
@click.option(
    "--budget",
    type=options.Duration(),
    help="Time for the whole run: 90s, 10m, 1h. Default: no limit; if no problem is named, 10m.",
)
@click.option(
    "--sampler",
    type=Choice(SAMPLERS),
    default="tpe",
    show_default=True,
    help="What chooses the next configuration; without the GPU always priced, by predicted time.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the sampler's random numbers.")
@click.option("--jobs", type=options.POSITIVE, help="Compilers side by side. Default: one per core.")
@click.option(
    "--check/--no-check",
    default=True,
    show_default=True,
    help="Without the GPU: check what is chosen on a small problem, where its kernels can be interpreted.",
)
@options.db_option
@click.option("--dry-run", is_flag=True, help="Print the problems and their configurations; run nothing.")
@json_option
@click.pass_context
def tune(
    ctx: click.Context,
    gpu: str,
    trials: int | None,
    budget: float | None,
    sampler: str,
    seed: int,
    jobs: int | None,
    check: bool,
    db: Path | None,
    dry_run: bool,
    as_json: bool,
    **what: Any,
) -> None:
    """Search launch configurations for a GPU, and store the best.

    If the GPU is here, configurations are measured on it. If not, they are ranked by the cost model, the first that
    compiles cleanly for its architecture is taken, and the result is stored as predicted.

    After Ctrl-C nothing tried is lost: the same command goes on where it ended.
    """
    from . import report

    card, device = options.card_here(gpu)
    grid = options.whole_grid(what, device)
    wanted = tunables(grid or options.problems_of(what, device), card, what["backend"], varied=bool(grid))
    tasks = by_value(wanted, card)
    if grid and budget is None:
        budget = BUDGET
    if device is None:
        trials = trials or PREDICTED
        doing = f"ranking by the cost model and compiling for {card.architecture}"
        click.echo(f"no {card.name} here: nothing is measured; {doing}", err=True)
    elif trials is None and sampler != "grid":
        trials = TRIALS
    if dry_run:
        rows = report.plan(tasks, trials)
        columns = ("configurations", "can_run", "would_try")
        click.echo(json.dumps(rows, indent=2) if as_json else report.listing(rows, *columns))
        return
    results: list[Result] = []
    start, stopped, jobs = time.monotonic(), "", jobs or hardware.cpu_threads()
    try:
        with _store(db) as store, ExitStack() as ending:
            searches: Iterator[Result]
            if device is None:
                from .offline import predict

                searches = predict(
                    tasks, card, store, jobs=jobs, trials=trials or PREDICTED, check=check, budget=budget
                )
                ending.enter_context(closing(searches))
                searches = tqdm(searches, total=len(tasks), **_BAR)
            else:
                runner = ending.enter_context(closing(_runner(device, jobs)))
                how: dict[str, Any] = {"sampler": sampler, "trials": trials, "seed": seed, "progress": _progress}
                searches = search_all(tasks, runner, store, budget=budget, shared=not grid, **how)
            for found in searches:  # one by one, so that after Ctrl-C the finished ones are reported
                results.append(found)
        if len(results) < len(tasks):
            stopped = f"the budget is spent: {len(tasks) - len(results)} of {len(tasks)} problems were not begun"
    except KeyboardInterrupt:
        stopped = "stopped: what was tried is kept, and the same command goes on from there"
    source, where = "measured" if device else "predicted", db or lookup.database()
    rows = [report.result_row(result) for result in results]
    if as_json:
        told = {"gpu": card.name, "source": source, "db": str(where)}
        click.echo(json.dumps({**told, "tasks": rows}, indent=2))
    elif results:
        click.echo(report.listing(rows, "default_ms", "ms", "config", "tried", "replayed", "rejected"))
        for row in rows:
            if row["config"] is None:
                why = row["reason"] or "nothing can"
                click.echo(f"{row['kernel']}, d {row['d']}: nothing ran; most often: {why}")
        click.echo(f"{source} for {card.name} in {time.monotonic() - start:.0f} s; kept in {where}")
    if stopped:
        click.echo(stopped, err=True)
    if stopped.startswith("stopped"):
        ctx.exit(130)


@main.command()
@options.filter_options
@click.option("--jobs", type=options.POSITIVE, help="Compilers side by side. Default: one per core.")
@options.db_option
@click.pass_context
def verify(ctx: click.Context, jobs: int | None, db: Path | None, **filters: Any) -> None:
    """Measure stored winners and the defaults again, on the GPU that is here.

    A winner that does not run, is wrong, or is slower than the default is replaced by the next best configuration. The
    exit status is 1 if any was replaced.
    """
    from . import report
    from .verify import verify as measured_again

    card, device = options.card_here(filters["gpu"] or "auto")
    if device is None:
        raise ValueError(f"there is no {card.name} here; winners are measured again where they run")
    wanted, where = options.columns({**filters, "gpu": card.name}), options.there(db)
    rows: list[Any] = []
    with closing(_runner(device, jobs or hardware.cpu_threads())) as runner, _store(where) as store:
        rows.extend(measured_again(store.best(**wanted), runner, store))
    held = all(isinstance(row, tuple) or row.holds for row in rows)
    columns = ("stored_ms", "now_ms", "default_ms", "verdict", "config")
    click.echo(report.listing(map(report.verdict_row, rows), *columns) if rows else "nothing matches")
    ctx.exit(0 if held else 1)


@main.command()
@options.several("--backend", click.STRING, metavar="NAMES", help="Separated by commas, or repeated. Default: all.")
@options.several(
    "--device",
    click.STRING,
    metavar="NAMES",
    help="Likewise: cpu, cuda:0. Default: the CPU and a GPU.",
)
@options.db_option
@json_option
def calibrate(backend: tuple[str, ...], device: tuple[str, ...], db: Path | None, as_json: bool) -> None:
    """Measure backends on this machine, so that backend="auto" predicts their times as they are here.

    Measures every backend, reduction and precision in six dimensions, and the start-up in a fresh process, in minutes.
    """
    from . import report
    from .calibrate import calibrate as measured

    todo = options.places(backend, device)
    found = []
    try:
        with _store(db) as store, tqdm(**{**_BAR, "bar_format": "{desc}"}) as line:
            for info, place in todo:
                done = measured(info, place, line.set_description_str)
                on = hardware.processor(place)
                if done.values and on is not None:
                    store.calibrate(machine_of(on), info.name, done.values)
                found.append(done)
    finally:
        lookup.forget()
    if as_json:
        click.echo(json.dumps([done._asdict() for done in found], indent=2))
    else:
        headings = ("backend", "device", "start-up s", "pass ms", "factors", "median", "")
        click.echo(table([headings, *map(report.calibrated_row, found)]))
        click.echo(f"kept in {db or lookup.database()}")


@main.command()
@options.filter_options
@click.option("--trials", is_flag=True, help="List every configuration that was tried, not only the best.")
@options.db_option
@json_option
def show(trials: bool, db: Path | None, as_json: bool, **filters: Any) -> None:
    """List the best configurations."""
    from . import report

    where = db or lookup.database()
    if options.absent(where):
        click.echo("[]" if as_json else f"nothing is tuned yet: there is no {where}")
        return
    with _store(where, write=False) as store:
        if trials:
            rows = store.dump(**options.columns(filters))["trial"]
            columns = ("status", "q50", "source", "created", "config", "error")
        else:
            rows = list(map(report.best_row, store.best(**options.columns(filters))))
            columns = ("default_ms", "ms", "noise", "source", "created", "config")
    if as_json:
        click.echo(json.dumps(rows, indent=2))
    else:
        click.echo(report.listing(rows, "gpu", *columns) if rows else "nothing matches")


@main.command()
@options.problem_options
@options.db_option
@json_option
def explain(gpu: str, db: Path | None, as_json: bool, **what: Any) -> None:
    """Say which configuration each kernel of a problem gets, and why."""
    from . import report

    card, device = options.card_here(gpu)
    tasks = tunables(options.problems_of(what, device), card, what["backend"])
    if tuning_is_off():
        click.echo("SDKDE_TUNING is off: until it is unset, backends use their defaults", err=True)
    rows = [report.explained(tunable, db) for tunable in tasks]
    click.echo(json.dumps(rows, indent=2) if as_json else report.listing(rows, "rung", "config", "why"))
    for row in rows if not as_json else ():
        for over in row["passed_over"]:
            config = report.config_text(over["config"])
            click.echo(f"{row['kernel']}, d {row['d']}: not {over['rung']} ({config}): {over['why']}")


@main.command()
@click.argument("file", cls=Argument, help="Where to write JSON; - is standard output.")
@click.option(
    "--winners",
    is_flag=True,
    help="Only the winners and the defaults, as in the tables that ship with sdkde; no calibration.",
)
@options.filter_options
@options.db_option
def export(file: str, winners: bool, db: Path | None, **filters: Any) -> None:
    """Write trials, winners and calibration as JSON, to be imported elsewhere."""
    database = options.there(db)
    options.another_file("FILE", file, database)
    wanted = options.columns(filters)
    with _store(database, write=False) as store:
        dump, best = store.dump(only_winners=winners, **wanted), store.best(**wanted)
    text = json.dumps(dump, indent=1)
    if file == "-":
        click.echo(text)
        return
    with write_atomically(file) as temporary:
        temporary.write_text(text + "\n", encoding="utf-8")
    click.echo(f"{file}: {len(dump['trial'])} trials, {len(best)} winners", err=True)


@main.command("import")
@click.argument("file", cls=Argument, help="A file that export wrote, or another database of the tuner.")
@options.db_option
def import_(file: str, db: Path | None) -> None:
    """Add results of another machine to the database, or what is left in one that is corrupt."""
    if options.absent(file):
        raise ValueError(f"there is no file {file}; pass one that `sdkde-autotune export` wrote, or another database")
    with _store(db) as store:
        click.echo(f"{file}: {store.load(Path(file))} new rows in {store.path}")


@main.command()
@click.argument("file", cls=Argument, help="A file that export wrote, or a database.")
@options.several("--sampler", Choice(SAMPLERS), metavar="NAMES", help=f"{', '.join(SAMPLERS)}. Default: all but grid.")
@click.option(
    "--trials", type=options.POSITIVE, default=TRIALS, show_default=True, help="Configurations that a search tries."
)
@click.option(
    "--repeats",
    type=options.POSITIVE,
    default=20,
    show_default=True,
    help="Searches by each sampler, each from another seed.",
)
@json_option
def simulate(file: str, sampler: tuple[str, ...], trials: int, repeats: int, as_json: bool) -> None:
    """Compare samplers on recorded times, without a GPU.

    The loss of a search is how much slower the best configuration that it found is than the best recorded one.
    """
    from . import report
    from .simulate import recorded
    from .simulate import simulate as replay

    if not Path(file).is_file():
        raise ValueError(f"there is no file {file}; pass one that `sdkde-autotune export` wrote, or a database")
    found = []
    for key, records, task, space in recorded(Path(file)):
        for name in sampler or ("tpe", "random", *(["priced"] if space.prices else [])):
            losses = [replay(records, task, space, name, trials, seed) for seed in range(repeats)]
            told = {"recorded": len(records), "sampler": name, "trials": trials, "repeats": repeats}
            found.append({**key._asdict(), **told, "mean_loss": mean(losses), "worst_loss": max(losses)})
    if not found:
        raise ValueError(f"no configuration in {file} ran: there is nothing to search again; pass another file")
    columns = ("recorded", "sampler", "trials", "repeats", "mean_loss", "worst_loss")
    click.echo(json.dumps(found, indent=2) if as_json else report.listing(found, *columns))


@main.command()
@options.filter_options
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("sdkde-tuning.png"),
    show_default=True,
    help="Where to write the picture.",
)
@options.db_option
def plot(output: Path, db: Path | None, **filters: Any) -> None:
    """Plot one problem's search: times over each parameter, coloured in the order of the search.

    If several problems match, the one with the most trials is plotted.
    """
    from . import report

    database = options.there(db)
    options.another_file("--output", output, database)
    with _store(database, write=False) as store:
        trials = store.all_trials(**options.columns(filters))
    by_search: dict[Any, list[Any]] = {}
    for trial in trials:
        by_search.setdefault((trial.key, trial.source), []).append(trial)
    if not by_search:
        raise ValueError("nothing that was tried matches these filters; `sdkde-autotune show --trials` lists what was")
    (key, source), chosen = max(by_search.items(), key=lambda item: len(item[1]))
    report.plot(chosen, output)
    rest = f", the largest of {len(by_search)} searches that match" if len(by_search) > 1 else ""
    what = f"{key.kernel}, {key.reduction}, d {key.d}, {key.gpu}, {source}"
    click.echo(f"{output}: {len(chosen)} configurations of {what}{rest}")


# --- resources -------------------------------------------------------------------------------------------------------


def _store(path: Path | None, write: bool = True) -> Store:
    from .store import Store  # sqlite-utils takes a while to import

    return Store(path, write=write)


def _runner(device: str, jobs: int) -> MeasuringRunner:
    from .worker import MeasuringRunner

    load = provenance.clocks(device).get("load_percent", 0)
    if load >= BUSY:
        click.echo(f"{device} is busy ({load:.0f} % of its time): times measured meanwhile are unreliable", err=True)
    return MeasuringRunner(device, jobs)


@contextmanager
def _progress(label: str) -> Iterator[Callable[[int, int, float], None]]:
    """Yield what draws a bar with the best time so far."""
    with tqdm(desc=label, **_BAR) as bar:

        def advance(known: int, expected: int, best: float) -> None:
            bar.total, bar.n = expected, known
            bar.set_postfix_str(f"best {best:.4g} ms")

        yield advance
