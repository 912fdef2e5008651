"""The command ``sdkde-autotune``; imported by the console script only."""

from __future__ import annotations

import functools
import json
import math
import re
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click import Choice

from sdkde_core import __version__
from sdkde_core.choice import cards, hardware
from sdkde_core.cli.console import Argument, Group, json_option, raise_again, together
from sdkde_core.messages import did_you_mean, switched_off
from sdkde_core.plugin import write_atomically
from sdkde_core.protocol import PRECISIONS, Problem, Reduction
from sdkde_core.tuning import this_cpu

from . import measure, report
from .lookup import database
from .problems import GRID, Place, place_of, problems, tasks
from .records import SOURCES, Result, Task

if TYPE_CHECKING:
    from .store import Store

try:
    from click_default_group import DefaultGroup
except ImportError:
    click.echo("Error: the tuner needs more packages: pip install 'sdkde-core[autotune]'", err=True)
    raise SystemExit(2) from None


class _Commands(Group, DefaultGroup):
    """Options without a command are those of ``tune``; an unknown command is an error with a suggestion."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> Any:
        if cmd_name not in self.commands and not cmd_name.startswith("-"):
            gpu = f"; did you mean --gpu {cmd_name}?" if cards.gpu(cmd_name) else ""
            hint = gpu or did_you_mean(cmd_name, self.commands)
            raise click.UsageError(f"there is no command {cmd_name!r}; pass one of {', '.join(self.commands)}{hint}")
        return super().get_command(ctx, cmd_name)


def _seconds(ctx: click.Context, param: click.Parameter, value: str | None) -> float | None:
    if value is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|m|h)?", value.strip())
    if not found or not float(found[1]):
        raise click.BadParameter(f"{value!r} is no time; pass one such as 90s, 10m or 1h")
    return float(found[1]) * {"s": 1, "m": 60, "h": 3600}[found[2] or "s"]


def _several(name: str, kind: click.ParamType, metavar: str, help: str) -> Callable[[Any], Any]:
    """An option that takes several values, separated by commas or repeated."""

    def split(ctx: click.Context, param: click.Parameter, given: Sequence[str]) -> tuple[Any, ...]:
        words = [word.strip() for text in given for word in text.split(",") if word.strip()]
        return tuple(dict.fromkeys(kind.convert(word, param, ctx) for word in words))

    return click.option(name, multiple=True, callback=split, metavar=f"{metavar},…", help=help)


_positive = click.IntRange(min=1)
_db = click.option(
    "--db",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The tuner's database. Default: the one that SDKDE_DB names, else tuning.sqlite in the user's cache folder.",
)
_kinds = together(
    click.option("--backend", help="A backend's name. Default: all."),
    _several("--reduction", Choice(list(map(str, Reduction))), "NAMES", "log_sum, mean, laplace. Default: all."),
    _several("--dim", _positive, "D", "Dimensions. Default: 2,16,64; of results all."),
    _several("--precision", Choice(PRECISIONS), "NAMES", f"{', '.join(PRECISIONS)}. Default: fast; of results all."),
)
_problem_options = together(
    click.option("--gpu", metavar="NAME", default="auto", show_default=True, help="A GPU's name; auto; or cpu."),
    _kinds,
    _several("--n-train", _positive, "N", "Training points. Default: 32768."),
    _several("--n-query", _positive, "M", "Query points; not for mean. Default: an eighth of N."),
    click.option("--weights", is_flag=True, help="Problems with weights."),
    _db,
    json_option,
)
_filter_options = together(
    click.option("--gpu", metavar="NAME", help="Only results of this GPU; cpu: of this CPU."),
    click.option("--kernel", help="A kernel's name. Default: all."),
    _kinds,
    _several("--source", Choice(SOURCES), "NAMES", f"Only results that were {', '.join(SOURCES)}."),
    _db,
)


def _problems(what: Mapping[str, Any], place: Place, grid: bool = False) -> list[Problem]:
    """Return the problems that the options describe; or the grid, with weights last."""
    make: Callable[..., list[Problem]] = functools.partial(problems, device="cuda:0" if place.card else "cpu")
    if grid:
        given = {**GRID, **({} if place.card else {"n_train": (32768, 4096)})}  # a CPU takes minutes for a million
        return make(**given) + make(**{**given, "n_train": GRID["n_train"][:1]}, requires=["weights"])
    given = {name: what[name] for name in (*GRID, "n_query") if what[name]}
    return make(**given, requires=["weights"] * what["weights"])


def _columns(filters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the filters by the names of the store's columns."""
    wanted = {{"dim": "d"}.get(name, name): value for name, value in filters.items() if value}
    if gpu := wanted.get("gpu"):
        card = hardware.card_called(gpu)
        wanted["gpu"] = this_cpu()[0] if gpu.lower() == "cpu" else card.name if card else cards.card_name(gpu)
    return wanted


def _store(path: Path | None, write: bool = True) -> Store:
    from .store import Store  # sqlite-utils takes a while to import

    return Store(path, write=write)


@click.group(
    cls=_Commands, default="tune", invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]}
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
@_problem_options
@click.option("--trials", type=_positive, help="Configurations a problem. Default: 60; predicted: 16.")
@click.option("--budget", metavar="TIME", callback=_seconds, help="For all problems: 90s, 10m. Default: grid: 10m.")
@click.option("--again", is_flag=True, help="Only measure stored winners, other finalists and defaults again.")
@click.option("--dry-run", is_flag=True, help="Print the problems and their configurations; run nothing.")
@click.pass_context
def tune(ctx: click.Context, gpu: str, db: Path | None, again: bool, dry_run: bool, as_json: bool, **what: Any) -> None:
    """Search launch configurations for a GPU, or for this CPU, and store the best.

    If the GPU is here, configurations are measured on it. If not, they are ranked by the cost model, the first that
    compiles cleanly for its architecture is taken, and the result is stored as predicted.

    After Ctrl-C nothing tried is lost: the same command goes on where it ended.
    """
    place = place_of(gpu)
    grid = not any(what[name] for name in (*GRID, "n_query", "weights"))
    todo = tasks(_problems(what, place, grid), place, what["backend"])
    if place.device is None and place.card:
        todo = [task for task in todo if task.seconds(task.default(), place.card)]
        if not todo:
            raise ValueError(f"these kernels have no cost model to predict by; run this where the {place.name} is")
    trials = what["trials"] or (60 if place.device else 16)
    budget = what["budget"] or (600.0 if grid else math.inf)
    limit = "no time limit" if math.isinf(budget) else f"{budget:g} s at most"
    predicted = f"nothing is measured; ranking by the cost model and compiling for {place.architecture}"
    doing = f"measuring on {place.device}" if place.device else f"no {place.name} here: {predicted}"
    if again and place.device is None:
        raise ValueError(f"there is no {place.name} here; pass --again where its winners were measured")
    if dry_run:
        from .search import candidates  # imports Optuna

        click.echo(doing, err=True)
        rows = [{**task.key._asdict(), "configurations": len(candidates(task))} for task in todo]
        report.show(rows, as_json, "configurations")
        return
    results: list[Result] = []
    start, stopped = time.monotonic(), ""
    try:
        with _store(db) as store:
            if again:
                stored = {trial.key for trial in store.trials(gpu=place.name)}
                todo = [task for task in todo if task.key in stored]
            each = "" if again else f", {trials} trials each at most (--trials)"
            click.echo(f"{doing}; problems: {len(todo)}{each}; {limit} (--budget)", err=True)
            how, progress = {"trials": trials, "again": again}, report.Progress(todo, budget)
            for found in _results(todo, place, store, budget, not grid, progress, how):
                results.append(found)  # after Ctrl-C the finished ones are reported
                progress.finished(found)
        if len(results) < len(todo):
            stopped = f"the budget is spent: {len(todo) - len(results)} of {len(todo)} problems were not begun"
    except KeyboardInterrupt:
        raise_again(0.0)
        stopped = "stopped: what was tried is kept, and the same command goes on from there"
    source, where = "measured" if place.device else "predicted", db or database()
    rows = list(map(report.result_row, results))
    if as_json:
        click.echo(json.dumps({"gpu": place.name, "source": source, "db": str(where), "tasks": rows}, indent=2))
    else:
        report.show(rows, False, "default", "best", "config", "tried", "known before", "rejected", "most often")
        click.echo(f"{source} for {place.name} in {time.monotonic() - start:.0f} s; kept in {where}")
    if stopped:
        click.echo(stopped, err=True)
    if stopped.startswith("stopped"):
        ctx.exit(130)


def _results(
    todo: list[Task], place: Place, store: Store, budget: float, shared: bool, progress: report.Progress, how: Any
) -> Generator[Result, None, None]:
    """Search or predict in turn until the budget is spent; if it is shared, a search gets a part of what is left."""
    from .search import predict, search  # imports Optuna

    if place.device is None:
        assert place.card is not None
        yield from predict(todo, place.card, store, jobs=hardware.cpu_threads(), trials=how["trials"], budget=budget)
        return
    start, runner = time.monotonic(), measure.MeasuringRunner(place.device, hardware.cpu_threads())
    with closing(runner):
        for i, task in enumerate(todo):
            left = budget - (time.monotonic() - start)
            if left <= 0:
                return
            during, left = functools.partial(progress.during, task), left / (len(todo) - i) if shared else left
            yield search(task, runner, store, card=place.card, budget=left, progress=during, **how)


@main.command()
@_filter_options
@click.option("--trials", is_flag=True, help="List every configuration that was tried, not only the best.")
@json_option
def show(trials: bool, db: Path | None, as_json: bool, **filters: Any) -> None:
    """List the best configurations."""
    wanted = _columns(filters)
    with _store(db, write=False) as store:
        if trials:
            rows = [{**row, "ms": row["q50"]} for row in store.dump(**wanted)["trial"]]
            columns = ["status", "ms", "rank", "source", "created", "config", "error"]
        else:
            rows = [report.row(best.key, best) for best in store.best(**wanted)]
            columns = ["default", "best", "source", "created", "config"]
    report.show(rows, as_json, "gpu", *columns)


@main.command()
@_problem_options
def explain(gpu: str, db: Path | None, as_json: bool, **what: Any) -> None:
    """Say which configuration each kernel of a problem gets, and why: the last one of a problem."""
    place = place_of(gpu)
    if switched_off("SDKDE_TUNING"):
        click.echo("SDKDE_TUNING is off: until it is unset, backends use their defaults", err=True)
    todo = tasks(_problems(what, place), place, what["backend"])
    report.show([row for task in todo for row in report.explained(task, db)], as_json, "rung", "config", "why")


@main.command()
@click.argument("file", cls=Argument, help="Where to write JSON; - is standard output.")
@click.option("--winners", is_flag=True, help="Only the winners and the defaults, as in the tables of sdkde.")
@_filter_options
def export(file: str, winners: bool, db: Path | None, **filters: Any) -> None:
    """Write trials as JSON, to be imported elsewhere."""
    wanted = _columns(filters)
    with _store(db, write=False) as store:
        if Path(file).exists() and Path(file).samefile(store.path):
            raise ValueError(f"FILE and the database are one file, {file}; pass another FILE")
        begins = Path(file).read_bytes()[:99] if file != "-" and Path(file).is_file() else b""
        if begins and b'"format": "sdkde-tuning"' not in begins:
            raise ValueError(f"{file} is there, and is no export; name another file, or remove it first")
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
@_db
def import_(file: str, db: Path | None) -> None:
    """Add results of another machine to the database."""
    with _store(db) as store:
        click.echo(f"{file}: {store.load(Path(file))} new rows in {store.path}")
