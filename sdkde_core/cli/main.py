"""The command ``sdkde``: the options that its commands share, and the commands. The console script alone imports it."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np
from click.core import Context, ParameterSource

from .. import __version__, api
from ..archive import check_replaced
from ..arrays import Argument as Given
from ..arrays import Array, to_host
from ..bandwidth.rules import RULES
from ..estimator.explanation import explained
from ..estimator.prepared import Prepared, fit
from ..estimator.request import ALL_METHODS, NEGATIVE, Request
from ..files import EXTENSIONS, FileError, Source, about, check_apart, check_folder, is_stdout, source, writing
from ..protocol import KERNELS, PRECISIONS
from ..scale import job as job_of
from . import data
from .console import Argument, Group, json_option, table, together
from .doctor import sections


def _one_of(name: str, known: Sequence[str], default: str, help: str) -> Callable[[Any], Any]:
    return click.option(name, type=click.Choice(known), default=default, show_default=True, help=help)


def _number_or(*words: str) -> Any:
    def read(context: click.Context, option: click.Parameter, value: str | None) -> float | str | None:
        try:
            return value if value is None or value in words else float(value)
        except ValueError:
            raise click.BadParameter(f"{value!r} is no number; pass one, or {' or '.join(words)}") from None

    return read


def _coordinates(context: click.Context, option: click.Parameter, value: Sequence[str]) -> Any:
    if len(value) == 1 and ":" not in value[0]:
        return value[0]
    pairs = [text.rpartition(":")[::2] for text in value]
    return {int(column) if column.isdigit() else column: name for column, name in pairs} or None


def _support(context: click.Context, option: click.Parameter, value: Sequence[str]) -> Any:
    """By column the ends of its values: age:0, for those above 0, share:0,1, and angle:circular,360."""
    found: dict[int | str, Any] = {}
    for text in value:
        column, _, ends = text.rpartition(":")
        try:
            low, high = (end.strip() for end in ends.split(","))
            pair = [float(x) if x else None for x in (low, high) if x != "circular"]
        except ValueError:
            instead = "pass such as age:0, or share:0,1 or angle:circular,360"
            raise click.BadParameter(f"{text!r} is none; {instead}") from None
        found[int(column) if column.isdigit() else column] = ("circular", pair[0]) if len(pair) == 1 else tuple(pair)
    return found or None


backend_option = click.option("--backend", default="auto", show_default=True, help="A backend's name, or auto.")
estimator_options = together(
    _one_of("--method", ALL_METHODS, "sdkde", "Which density estimate."),
    click.option(
        "--bandwidth",
        default="auto",
        show_default=True,
        help=f"A rule ({', '.join(RULES)}); a number; a number per column, separated by commas; or a file with (d,) "
        "numbers or a (d, d) covariance matrix.",
    ),
    click.option(
        "--step",
        callback=_number_or("moments"),
        help="How far samples move, a multiple of H times the score, or moments: the one that keeps the variance. "
        "Default: 1/2. For --method sdkde.",
    ),
    click.option("--score-bandwidth", type=float, help="The score's, in bandwidths. Default: 1. For --method sdkde."),
    click.option("--adaptive", type=float, help="The exponent of kernels that are wider where samples are rare."),
    click.option(
        "--tails", callback=_number_or("guard", "plain"), help="guard, plain, or a guard's part of the weight."
    ),
    click.option(
        "--coordinates",
        multiple=True,
        callback=_coordinates,
        help="log, logit, asinh or normal-scores of all columns, or price:log and 1:logit of some, by name or number.",
    ),
    click.option(
        "--support",
        multiple=True,
        callback=_support,
        help="Where a column ends: age:0, (not below 0), share:0,1 or angle:circular,360, by name or number.",
    ),
    _one_of(
        *("--kernel", tuple(KERNELS), "gaussian"),
        "Kernels other than the Gaussian need --method kde, and a bandwidth in numbers.",
    ),
    _one_of(
        *("--negative", NEGATIVE, "keep"),
        "Values of the Laplace estimate below zero: kept, zero, or zero and the others divided by their integral.",
    ),
    click.option("--weights", metavar="FILE", help="A file with one weight per training point. Default: all equal."),
    _one_of(
        *("--precision", ("auto", *PRECISIONS), "auto"),
        "Bound on the error of every row; auto: fast for float32 files, else high.",
    ),
    backend_option,
    click.option(
        "--device",
        callback=lambda context, option, value: value.split(",") if value and "," in value else value,
        help="Where to compute: cpu, cuda, cuda:0; several GPUs: cuda:0,cuda:1 or cuda:all. Default: the fastest.",
    ),
)


def output_option(what: str, **more: Any) -> Callable[[Any], Any]:
    return click.option("-o", "--output", metavar="OUT", help=f"Where to write {what}", **more)


columns_option = click.option(
    "--columns",
    metavar="A,B,…",
    multiple=True,
    callback=lambda context, option, value: [name.strip() for some in value for name in some.split(",")],
    help="Which columns are the points', by name or by number from 0. Default: all.",
)
quiet_option = click.option("-q", "--quiet", is_flag=True, help="No progress bar, and no line at the end.")
density_argument = click.argument(
    "density", cls=Argument, help="A file that sdkde fit wrote, or samples, which are fitted with the defaults."
)


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"]}, invoke_without_command=True)
@click.version_option(__version__, prog_name="sdkde")
@click.pass_context
def main(ctx: Context) -> None:
    """Density estimates of the samples in a file, by score-debiased kernel density estimation.

    \b
      sdkde estimate samples.csv points.csv          a density for every point
      sdkde fit samples.csv -o density.sdkde         fit once, for
      sdkde score density.sdkde held-out.csv         the mean log density of other samples,
      sdkde sample density.sdkde -n 1000             draws, and
      sdkde plot density.sdkde -o density.png        a picture
    """
    ctx.with_resource(np.errstate(all="ignore"))  # as within the functions of the package
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


@main.command()
@click.argument(
    "train",
    cls=Argument,
    help=f"A file of samples, a row each ({', '.join(EXTENSIONS)}; - is standard input), or a saved density.",
)
@click.argument("query", cls=Argument, required=False, help="A file of points. Default: the training points.")
@output_option(
    "one density per row; the format follows from the extension. A file is replaced; a folder only if it is a zarr "
    "array that sdkde wrote. Default: standard output, as .csv.",
    default="-",
)
@columns_option
@click.option("--keep", is_flag=True, help="Write the columns of QUERY too, before the density.")
@estimator_options
@click.option("--log", is_flag=True, help="Write log densities.")
@click.option(
    "--memory",
    metavar="SIZE",
    help="Bytes to stay within, such as 1.5GB: samples are read part by part. Default: TRAIN is read whole, but for "
    "zarr arrays, for which it is 1GB beyond what the program has.",
)
@click.option("--checkpoint", metavar="FOLDER", help="Keep what is done there; samples are read part by part too.")
@click.option("--resume", is_flag=True, help="Go on with what the checkpoint has.")
@quiet_option
@click.pass_context
def estimate(ctx: Context, train: str, query: str | None, columns: list[str], quiet: bool, **options: Any) -> None:
    """Estimate the density of samples at other points.

    Queries are read, and results written, in batches: neither need fit in memory. With --memory or --checkpoint, and of
    a zarr array, TRAIN need not either.
    """
    start = time.perf_counter()
    how = {name: options.pop(name) for name in ("memory", "checkpoint", "resume")}
    results = data.Results(output := options.pop("output"), options.pop("log"), options.pop("keep"), quiet)
    files = data.files_of(train, query, options)
    check_apart(None if is_stdout(output) else output, how["checkpoint"], **files)
    with about(**files):
        if data.is_saved(train):
            prepared = _loaded(ctx, train, query)
            points = data.queries_of(query or "", columns, prepared._fitted.names, train, not columns)
            below, where = results.written(lambda advance: prepared, points, prepared._dtype)
        else:
            x = data.samples_of(train, columns)
            y = None if query is None else data.queries_of(query, columns, x.names, train)
            points, by_shards = y or x, any(how.values()) or train.lower().endswith(".zarr")
            given = data.request_of(options, source if by_shards else None, calls=1), x, y, results
            below, where = _by_shards(*given, **how) if by_shards else _by_batches(*given)
    if below:
        what = f"negative at {below} of {points.rows} points, where its log is NaN"
        instead = "leave out --log for the signed values, or use --negative clip, or --method sdkde, never negative"
        click.echo(f"Warning: the Laplace estimate is {what}; {instead}", err=True)
    if not quiet and not is_stdout(output):
        click.echo(f"{output}: {points.rows} rows, {where}, {time.perf_counter() - start:.2f} s", err=True)


def _loaded(ctx: Context, train: str, query: str | None) -> Prepared:
    """Load a density, for which the options of the estimate come too late."""
    for option in ctx.command.params:
        ours = option.name in ("train", "query", "output", "columns", "keep", "log", "quiet")
        if not ours and ctx.get_parameter_source(str(option.name)) is ParameterSource.COMMANDLINE:
            raise ValueError(f"{option.opts[-1]} comes too late for {train}, which is fitted; pass it to sdkde fit")
    if query is None:
        raise ValueError(f"{train} is a density, without its training points; pass QUERY")
    return data.density_of(train, ())[0]


def _by_batches(request: Request, train: Source, query: Source | None, results: data.Results) -> tuple[int, str]:
    x, y = Given.of("train", train.read())._replace(names=train.names), (query or train).shaped("query")
    points = query or replace(Source.of(train.name, x.array), whole=train.whole)
    moved = train.rows if request.passes[0].moves else 0
    return results.written(lambda advance: fit(request, x, y, advance), points, x.dtype, moved)


def _by_shards(
    request: Request, train: Source, query: Source | None, results: data.Results, **how: Any
) -> tuple[int, str]:
    with ExitStack() as kept:
        job = job_of(kept, request, train, query, log=results.log, **how)
        plan, write = job.plan, kept.enter_context(results.opened(query or train, job.plan.shape.dtype))
        with results.progress(job.rows) as advance:
            job.run(advance)
        return job.deliver(write), f"{plan.backend} on {', '.join(plan.devices) or plan.device}"


@main.command("fit")
@click.argument("train", cls=Argument, help="A file of samples, a row each, as for estimate.")
@output_option("the density, such as density.sdkde. A file is replaced if it holds a density.", required=True)
@columns_option
@estimator_options
@quiet_option
def fit_command(train: str, output: str, columns: list[str], quiet: bool, **options: Any) -> None:
    """Fit a density to the samples in TRAIN and keep it.

    The file is for estimate, score, sample, plot and sdkde_core.load; it has the names of the columns too.
    """
    start = time.perf_counter()
    check_apart(output, None, **data.files_of(train, None, options))
    check_folder(path := Path(output))
    if is_stdout(output) or path.suffix.lower() in set(EXTENSIONS) - {".npz"}:
        raise FileError(f"{output}: a density is no table; pass such as -o density.sdkde")
    check_replaced(path)
    prepared, _ = data.fitted(train, columns, options, quiet)
    prepared.save(output)
    if not quiet:
        click.echo(f"{output}: {prepared}, {time.perf_counter() - start:.2f} s", err=True)


@main.command()
@density_argument
@click.argument("query", cls=Argument, help="A file of other samples of the same columns.")
@output_option("the log density of every row. Default: nowhere.")
@columns_option
@json_option
def score(density: str, query: str, output: str | None, columns: list[str], as_json: bool) -> None:
    """Score a density by its mean logarithm at other samples.

    The mean is in nats; the higher, the better the density fits samples that it was not fitted to.
    """
    to_stdout = output is not None and is_stdout(output)
    check_apart(None if to_stdout else output, None, density=density, query=query)
    prepared, samples = data.density_of(density, columns)
    points = data.queries_of(query, columns, prepared._fitted.names, density, not columns or samples is not None)
    parts = list[Array]()
    with about(query=query):
        results = data.Results(output, log=True)
        below, _ = results.written(lambda advance: prepared, points, prepared._dtype, also=parts.append)
    if not points.rows:
        raise FileError(f"{query}: has no rows; pass at least one")
    logs = np.concatenate(parts).astype(np.float64)
    error = float(logs.std(ddof=1) / math.sqrt(len(logs))) if len(logs) > 1 else math.nan
    found = {"mean_log_density": float(logs.mean()), "standard_error": error, "points": len(logs)}
    odd = {"points_of_density_0": int(np.isneginf(logs).sum()), "points_of_negative_density": below}
    found |= {name: count for name, count in odd.items() if count}
    text = ", ".join(f"{k.replace('_', ' ')} {v if isinstance(v, int) else f'{v:.6g}'}" for k, v in found.items())
    if as_json:
        text = json.dumps({k: v if math.isfinite(v) else None for k, v in found.items()}, indent=2)
    click.echo(text, err=to_stdout)


@main.command()
@density_argument
@click.option("-n", "number", type=click.IntRange(min=1), default=1, show_default=True, help="How many draws.")
@click.option("--seed", type=click.IntRange(min=0), help="Makes the draws repeatable. Default: others each time.")
@output_option("one draw per row. Default: standard output, as .csv.", default="-")
@columns_option
def sample(density: str, number: int, seed: int | None, output: str, columns: list[str]) -> None:
    """Draw new points from a density."""
    check_apart(None if is_stdout(output) else output, None, density=density)
    prepared, _ = data.density_of(density, columns, marginal=True)
    shape = number, prepared.n_dimensions
    names = prepared._fitted.names or [f"x{j}" for j in range(shape[1])]
    with writing(output, shape, prepared._dtype, "samples", names) as write:
        write(to_host(prepared.sample(number, seed)).astype(prepared._dtype, copy=False))


@main.command()
@density_argument
@output_option("the picture: .png, .pdf or .svg. A file is replaced.", required=True)
@columns_option
def plot(density: str, output: str, columns: list[str]) -> None:
    """Draw a picture of a density.

    A curve in one dimension, contours in two, and of up to eight columns every pair. With --columns the marginal
    density of these columns of a saved one. Samples are drawn too.
    """
    check_apart(output, None, density=density)
    with data.picture(Path(output), ("plots need matplotlib", "plot"), dpi=150):
        prepared, points = data.density_of(density, columns, marginal=True)
        if prepared.n_dimensions > 8:
            what = f"has {prepared.n_dimensions} columns, too many for all pairs of them"
            raise FileError(f"{density}: {what}; pass up to 8 as --columns")
        prepared.plot(points)


@main.command()
@click.argument("train", cls=Argument, help="A file of samples, or its shape, such as 100000x16.")
@click.argument("query", cls=Argument, required=False, help="The same for the points. Default: the training points.")
@columns_option
@estimator_options
@click.option("--measure", is_flag=True, help="Compute it too, and report the time of each pass. Needs files.")
@json_option
def explain(train: str, query: str | None, columns: list[str], measure: bool, as_json: bool, **options: Any) -> None:
    """Explain an estimate without computing it.

    Its passes, each backend's predicted time, which is chosen and why. With shapes instead of files no data is read.
    """
    x: Any = _shape(train) or data.samples_of(train, columns)
    y: Any = query and (_shape(query) or data.queries_of(query, columns, getattr(x, "names", ()), train))
    with about(**data.files_of(train, query, options)):
        given = [Given.of("data", x.read()) if isinstance(x, Source) else x for x in (x, y)]
        given[0] = given[0]._replace(names=x.names) if isinstance(x, Source) else x
        explanation = explained(data.request_of(options, calls=1), *given, measure=measure)
    click.echo(json.dumps(explanation.to_dict(), indent=2) if as_json else str(explanation))


def _shape(text: str) -> tuple[int, ...] | None:
    return tuple(map(int, re.split("[x×]", text))) if re.fullmatch(r"\d+([x×]\d+)*", text) else None


@main.command()
@json_option
def backends(as_json: bool) -> None:
    """List the backends, what each can do, and what is missing."""
    rows, cells = [], [["name", "status", "devices", "precisions", "features", "from", "reason"]]
    for record in api.backends():
        lists = {name: list(getattr(record.info, name, ())) for name in ("devices", "precisions")}
        lists["features"] = sorted(getattr(record.info, "features", ()))
        more = {name: getattr(record, name) for name in ("distribution", "version", "reason")}
        rows.append({"name": record.name, "status": record.status, **lists, **more})
        shown = [", ".join(found) or "-" for found in lists.values()]
        cells.append([record.name, record.status, *shown, f"{record.distribution} {record.version}", record.reason])
    click.echo(json.dumps(rows, indent=2) if as_json else table(cells))


@main.command()
def doctor() -> None:
    """Report versions and devices, and probe each backend.

    A backend that is not installed is reported as such; the exit status is 0 all the same.
    """
    for title, rows in sections():
        click.echo(f"{title}\n{table(rows, indent='  ')}\n")


@main.command()
@output_option(
    "the plot.", default="sdkde-demo.png", show_default=True, type=click.Path(dir_okay=False, path_type=Path)
)
@backend_option
def demo(output: Path, backend: str) -> None:
    """Show what debiasing buys, on known and on real data.

    Fits kde, sdkde and laplace, each at its own bandwidth: to samples of two normals, with the errors, and to the
    digits in 16 principal dimensions, with held-out log-likelihoods over a grid of bandwidths, the backend chosen and
    why, and the time of each pass. Writes a plot.
    """
    from .demo import run_demo

    run_demo(output, backend, click.echo)
