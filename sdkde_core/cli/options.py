"""What the commands that read samples share: the options of an estimate, and of where results go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import click

from ..bandwidth.rules import RULES
from ..estimator.request import ALL_METHODS, NEGATIVE
from ..protocol import KERNELS, PRECISIONS
from .console import Argument, together


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
