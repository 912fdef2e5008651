"""Options of the commands, and what their values stand for."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from sdkde_core.choice import cards, hardware
from sdkde_core.cli.console import Choice, together
from sdkde_core.protocol import PRECISIONS, Problem, Reduction
from sdkde_core.tuning import this_cpu

from .problems import GRID, Place, problems
from .records import SOURCES


class _Duration(click.ParamType):
    """Seconds, from ``90s``, ``10m``, ``1h`` or a number of seconds."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|m|h)?", str(value).strip())
        if not found or not float(found[1]):
            self.fail(f"{value!r} is no time; pass one such as 90s, 10m or 1h", param, ctx)
        return float(found[1]) * {"s": 1, "m": 60, "h": 3600}[found[2] or "s"]


def _several(name: str, kind: click.ParamType, metavar: str, help: str) -> Callable[[Any], Any]:
    """Return an option that takes several values, separated by commas or repeated, as its help says."""

    def split(ctx: click.Context, param: click.Parameter, given: Sequence[str]) -> tuple[Any, ...]:
        words = [word.strip() for text in given for word in text.split(",") if word.strip()]
        return tuple(dict.fromkeys(kind.convert(word, param, ctx) for word in words))

    return click.option(name, multiple=True, callback=split, metavar=f"{metavar},…", help=help)


_positive = click.IntRange(min=1)

db_option = click.option(
    "--db",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The tuner's database. Default: the one that SDKDE_DB names, else tuning.sqlite in the user's cache folder.",
)
_backend = click.option("--backend", help="A backend's name. Default: all.")
_kinds = together(
    _several("--reduction", Choice(list(map(str, Reduction))), "NAMES", "log_sum, mean, laplace. Default: all."),
    _several("--dim", _positive, "D", "Dimensions. Default: 2,16,64; of results all."),
    _several("--precision", Choice(PRECISIONS), "NAMES", f"{', '.join(PRECISIONS)}. Default: fast; of results all."),
)
problem_options = together(
    click.option("--gpu", metavar="NAME", default="auto", show_default=True, help="A GPU's name; auto; or cpu."),
    _backend,
    _kinds,
    _several("--n-train", _positive, "N", "Training points. Default: 32768."),
    _several("--n-query", _positive, "M", "Query points; not for mean. Default: an eighth of N."),
    click.option("--weights", is_flag=True, help="Problems with weights."),
)
_samplers = Choice(("tpe", "random", "grid"))
search_options = together(
    click.option("--trials", type=_positive, help="Configurations a problem. Default: 60; grid: all; predicted: 16."),
    click.option("--budget", type=_Duration(), help="Time for all problems: 90s, 10m. Default: none; of the grid 10m."),
    click.option("--sampler", type=_samplers, default="tpe", show_default=True, help="Optuna's sampler, if measured."),
    click.option("--again", is_flag=True, help="Only measure stored winners, other finalists and defaults again."),
    click.option("--dry-run", is_flag=True, help="Print the problems and their configurations; run nothing."),
)
filter_options = together(
    click.option("--gpu", metavar="NAME", help="Only results of this GPU; cpu: of this CPU."),
    _backend,
    click.option("--kernel", help="A kernel's name. Default: all."),
    _kinds,
    _several("--source", Choice(SOURCES), "NAMES", f"Only results that were {', '.join(SOURCES)}."),
)


def problems_of(what: Mapping[str, Any], place: Place, grid: bool = False) -> tuple[list[Problem], bool]:
    """Return the problems that the options describe, and whether they are the grid, as none describes any."""
    given = {name: what[name] for name in (*GRID, "n_query") if what[name]}
    features = ["weights"] if what["weights"] else []
    grid = grid and not given and not features
    if grid:
        given = {**GRID, **({} if place.card else {"n_train": (32768, 4096)})}  # a CPU takes minutes for a million
    return problems(**given, requires=features, device="cuda:0" if place.card else "cpu"), grid


def columns(filters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the filters by the names of the store's columns."""
    wanted = {{"dim": "d"}.get(name, name): value for name, value in filters.items() if value}
    if gpu := wanted.get("gpu"):
        card = hardware.card_called(gpu)
        wanted["gpu"] = this_cpu()[0] if gpu.lower() == "cpu" else card.name if card else cards.card_name(gpu)
    return wanted
