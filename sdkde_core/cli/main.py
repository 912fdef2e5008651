"""The command ``sdkde``; imported by the console script only."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import click
import numpy as np

from .. import __version__, api
from ..arrays import Argument as Given
from ..bandwidth.rules import RULES
from ..estimator.batches import Advance, answered, batch_rows, watched
from ..estimator.density import undefined
from ..estimator.explanation import explained
from ..estimator.prepared import fit
from ..estimator.request import ALL_METHODS, NEGATIVE, Goal, Request
from ..files import EXTENSIONS, FileError, Source, about, check_apart, check_order, source, writing
from ..messages import did_you_mean
from ..protocol import KERNELS, PRECISIONS
from ..scale import job as job_of
from .console import Argument, Choice, Group, json_option, table, together
from .doctor import sections


def _one_of(name: str, known: Sequence[str], default: str, help: str) -> Callable[[Any], Any]:
    return click.option(name, type=Choice(known), default=default, show_default=True, help=help)


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
            raise click.BadParameter(
                f"{text!r} is none; pass such as age:0, or share:0,1 or angle:circular,360"
            ) from None
        found[int(column) if column.isdigit() else column] = ("circular", pair[0]) if len(pair) == 1 else tuple(pair)
    return found or None


_backend = click.option("--backend", default="auto", show_default=True, help="A backend's name, or auto.")
_estimator = together(
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
    _backend,
    click.option(
        "--device",
        callback=lambda context, option, value: value.split(",") if value and "," in value else value,
        help="Where to compute: cpu, cuda, cuda:0; several GPUs: cuda:0,cuda:1 or cuda:all. Default: the fastest.",
    ),
)


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"]}, invoke_without_command=True)
@click.version_option(__version__, prog_name="sdkde")
@click.pass_context
def main(ctx: click.Context) -> None:
    """Score-debiased kernel density estimation."""
    ctx.with_resource(np.errstate(all="ignore"))  # as within the functions of the package
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


@main.command()
@click.argument("train", cls=Argument, help=f"A file of samples, a row each: {', '.join(EXTENSIONS)}.")
@click.argument("query", cls=Argument, required=False, help="A file of points. Default: the training points.")
@click.option(
    "-o",
    "--output",
    metavar="OUT",
    required=True,
    help="Where to write one density per row; the format follows from the extension. A file is replaced; a "
    "folder only if it is a zarr array that sdkde wrote.",
)
@_estimator
@click.option("--log", is_flag=True, help="Write log densities.")
@click.option(
    "--memory",
    metavar="SIZE",
    help="Bytes to stay within, such as 1.5GB: samples are read part by part. Default: TRAIN is read whole, but for "
    "zarr arrays, for which it is 1GB beyond what the program has.",
)
@click.option("--checkpoint", metavar="FOLDER", help="Keep what is done there; samples are read part by part too.")
@click.option("--resume", is_flag=True, help="Go on with what the checkpoint has.")
@click.option("-q", "--quiet", is_flag=True, help="No progress bar, and no line at the end.")
def estimate(
    train: str, query: str | None, output: str, bandwidth: str, weights: str | None, quiet: bool, **options: Any
) -> None:
    """Estimate the density of the samples in TRAIN at the points in QUERY.

    Queries are read, and results written, in batches: neither need fit in memory. With --memory or --checkpoint, and of
    a zarr array, TRAIN need not either.
    """
    start = time.perf_counter()
    how = {name: options.pop(name) for name in ("memory", "checkpoint", "resume")}
    files, log = _files(train, query, bandwidth, weights), options.pop("log")
    check_apart(output, how["checkpoint"], **files)
    given = source(train), source(query) if query else None
    options["bandwidth"] = _bandwidth(bandwidth)
    by_shards = any(how.values()) or train.lower().endswith(".zarr")
    options["weights"] = (source if by_shards else _weights)(weights) if weights else None
    with about(**files):
        request = Request(Goal.DENSITY, **options, calls=1)
        if by_shards:
            rows, below, where = _by_shards(request, *given, output, log, quiet, **how)
        else:
            rows, below, where = _by_batches(request, *given, output, log, quiet)
    if below:
        click.echo(
            f"Warning: the Laplace estimate is negative at {below} of {rows} points, where its log is NaN; leave out "
            "--log for the signed values, or use --negative clip, or --method sdkde, never negative",
            err=True,
        )
    if not quiet:
        click.echo(f"{output}: {rows} rows, {where}, {time.perf_counter() - start:.2f} s", err=True)


def _by_batches(
    request: Request, train: Source, query: Source | None, output: str, log: bool, quiet: bool
) -> tuple[int, int, str]:
    """Estimate, queries read and results written by batches; return the rows, how many are negative, and where."""
    points = query or train
    check_order(train, points)
    x = Given.of("train", train.read())._replace(names=train.names)
    y = points.shaped("query")
    dtype, negative, done = max(x.dtype, y.dtype), 0, 0  # "float64" > "float32"
    points = query or Source.of(train.name, x.array)
    with (
        writing(output, (points.rows,), dtype, "log_density" if log else "density") as write,
        _progress(points.rows + (train.rows if request.passes[0].moves else 0), hidden=quiet) as advance,
    ):
        ready = fit(request, x, y, advance)._fitted
        for rows in points.batches(batch_rows(points.rows, ready.problem, ready.choice.info)):
            batch = Given.of("query", rows)._replace(first=done)
            part = answered(ready, batch, "log" if log else "density")
            if advance is not None:
                advance(len(rows))
            negative += undefined(request, part, log)
            write(part.astype(dtype))
            done += len(rows)
    return points.rows, negative, f"{ready.choice.name} on {ready.choice.where}"


def _by_shards(
    request: Request, train: Source, query: Source | None, output: str, log: bool, quiet: bool, **how: Any
) -> tuple[int, int, str]:
    with ExitStack() as kept:
        job = job_of(kept, request, train, query, log=log, **how)
        plan, rows = job.plan, job.plan.last.m
        write = kept.enter_context(writing(output, (rows,), plan.shape.dtype, "log_density" if log else "density"))
        with _progress(job.rows, hidden=quiet) as advance:
            job.run(advance)
        return rows, job.deliver(write), f"{plan.backend} on {', '.join(plan.devices) or plan.device}"


@main.command()
@click.argument("train", cls=Argument, help="A file of samples, or its shape, such as 100000x16.")
@click.argument("query", cls=Argument, required=False, help="The same for the points. Default: the training points.")
@_estimator
@click.option("--measure", is_flag=True, help="Compute it too, and report the time of each pass. Needs files.")
@json_option
def explain(train: str, query: str | None, bandwidth: str, weights: str | None, as_json: bool, **options: Any) -> None:
    """Explain an estimate without computing it: its passes, each backend's predicted time, and which is chosen and why.

    With shapes instead of files no data is read.
    """
    given = [_shape(x) or source(x) for x in (train, query) if x is not None]
    check_order(*(x for x in given if isinstance(x, Source)))
    data = [Given.of("data", x.read())._replace(names=x.names) if isinstance(x, Source) else x for x in given]
    options |= {"bandwidth": _bandwidth(bandwidth), "weights": _weights(weights)}
    with about(**_files(train, query, bandwidth, weights)):
        measure = options.pop("measure")
        explanation = explained(Request(Goal.DENSITY, **options, calls=1), *data, measure=measure)
    click.echo(json.dumps(explanation.to_dict(), indent=2) if as_json else str(explanation))


@main.command()
@json_option
def backends(as_json: bool) -> None:
    """List the backends: what is installed, what each can do, and what is missing."""
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
    """Report the environment, versions, devices, and a probe of each backend.

    A backend that is not installed is reported as such; the exit status is 0 all the same.
    """
    for title, rows in sections():
        click.echo(f"{title}\n{table(rows, indent='  ')}\n")


@main.command()
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("sdkde-demo.png"),
    show_default=True,
    help="Where to write the plot.",
)
@_backend
def demo(output: Path, backend: str) -> None:
    """What debiasing buys: a known density, and scikit-learn's handwritten digits.

    Fits kde, sdkde and laplace, each at its own bandwidth: to samples of two normals, with the errors, and to the
    digits in 16 principal dimensions, with held-out log-likelihoods over a grid of bandwidths, the backend chosen and
    why, and the time of each pass. Writes a plot.
    """
    from .demo import run_demo

    run_demo(output, backend, click.echo)


# --- arguments --------------------------------------------------------------------------------------------------


def _bandwidth(text: str) -> Any:
    """Return a rule's name, a number or several, or the numbers in a file."""
    if text in RULES:
        return text
    try:
        numbers = [float(part) for part in text.split(",")]
        return numbers if len(numbers) > 1 else numbers[0]
    except ValueError:  # a file, or neither, which is said below
        pass
    if not _is_file(text):
        hint = did_you_mean(text, RULES)
        raise ValueError(f"bandwidth is {text!r}; pass one of {', '.join(RULES)}, numbers, or a file{hint}")
    h = source(text).read()
    return h.ravel() if 1 in h.shape else h  # a row or a column of numbers, one per dimension; else a matrix


def _files(train: str, query: str | None, bandwidth: str, weights: str | None) -> dict[str, str | None]:
    """Return file names by argument of :func:`sdkde_core.estimate`; None for an argument that is no file."""
    files = {"train": train, "query": query or train, "weights": weights, "bandwidth": bandwidth}
    return {name: text if text and _is_file(text) else None for name, text in files.items()}


def _is_file(text: str) -> bool:
    return any(extension in text.lower() for extension in EXTENSIONS)


def _weights(text: str | None) -> Any:
    if text is None:
        return None
    weights = source(text)
    if weights.columns != 1:
        raise FileError(f"{text}: weights have {weights.columns} columns; pass one column")
    return weights.read()[:, 0]


def _shape(text: str) -> tuple[int, ...] | None:
    return tuple(map(int, re.split("[x×]", text))) if re.fullmatch(r"\d+([x×]\d+)*", text) else None


# --- output -----------------------------------------------------------------------------------------------------


@contextmanager
def _progress(steps: int, *, hidden: bool) -> Iterator[Advance | None]:
    """Yield a function to call with every number of rows done: on a terminal, after a second it draws a bar."""
    start, shown, bars = time.perf_counter(), not hidden and sys.stderr.isatty(), list[Any]()

    def show(done: int, rows: int) -> None:
        if shown and not bars and time.perf_counter() - start > 1:
            made = click.progressbar(length=rows, label="sdkde", file=sys.stderr, show_pos=True)
            bars.append(stack.enter_context(made))
        for bar in bars:
            bar.update(done - bar.pos)

    with ExitStack() as stack, watched(show, steps) as advance:
        yield advance
