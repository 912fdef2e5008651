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
    """Return an option that takes several values, separated by commas or repeated."""

    def split(ctx: click.Context, param: click.Parameter, given: Sequence[str]) -> tuple[Any, ...]:
        words = [word.strip() for text in given for word in text.split(",") if word.strip()]
        return tuple(dict.fromkeys(kind.convert(word, param, ctx) for word in words))

    return click.option(name, multiple=True, callback=split, metavar=metavar, help=help)


_positive, _precisions = click.IntRange(min=1), Choice(PRECISIONS)
_reductions = Choice([str(reduction) for reduction in Reduction])

db_option = click.option(
    "--db",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The tuner's database. Default: the one that SDKDE_DB names, else tuning.sqlite in the user's cache folder.",
)
problem_options = together(
    click.option(
        "--gpu",
        metavar="NAME",
        default="auto",
        show_default=True,
        help="A GPU's name or alias; auto: the first one here; cpu: no GPU, but this CPU.",
    ),
    click.option("--backend", help="A backend's name. Default: all that can be tuned."),
    _several("--reduction", _reductions, "NAMES", "log_sum, mean, laplace; by commas, or repeated. Default: all."),
    _several("--dim", _positive, "D", "Dimensions, also several. Default: 2,16,64."),
    _several("--n-train", _positive, "N", "Training points, also several. Default: 32768."),
    _several("--n-query", _positive, "M", "Query points, also several; not for mean. Default: an eighth of N."),
    _several("--precision", _precisions, "PRECISIONS", f"{', '.join(PRECISIONS)}, also several. Default: fast."),
    click.option("--weights", is_flag=True, help="Problems with weights."),
    click.option("--leave-one-out", is_flag=True, help="Problems in which each point is left out of its own density."),
)
search_options = together(
    click.option(
        "--trials",
        type=_positive,
        help="Configurations to try for a problem. Default: 60; with grid all; if nothing is measured, 16 at most.",
    ),
    click.option(
        "--budget",
        type=_Duration(),
        help="Time for the whole run: 90s, 10m, 1h. Default: no limit; if no problem is named, 10m.",
    ),
    click.option(
        "--sampler",
        type=Choice(("tpe", "random", "grid")),
        default="tpe",
        show_default=True,
        help="Optuna's sampler that chooses the next configuration; without the GPU the cost model's order is taken.",
    ),
    click.option("--again", is_flag=True, help="Only measure stored winners, other finalists and defaults again."),
    click.option("--dry-run", is_flag=True, help="Print the problems and their configurations; run nothing."),
)
filter_options = together(
    click.option("--gpu", metavar="NAME", help="Only results of this GPU; cpu: of this CPU."),
    click.option("--backend", help="Only results of this backend."),
    click.option("--kernel", help="Only results of this kernel."),
    _several("--reduction", _reductions, "NAMES", "Only results of these reductions."),
    _several("--dim", _positive, "D", "Only results of these dimensions."),
    _several("--precision", _precisions, "PRECISIONS", "Only results of these precisions."),
    _several("--source", Choice(SOURCES), "NAMES", f"Only results that were {', '.join(SOURCES)}."),
)


def problems_of(what: Mapping[str, Any], place: Place, grid: bool = False) -> tuple[list[Problem], bool]:
    """Return the problems that the options describe, and whether they are the grid, as none describes any."""
    given = {name: what[name] for name in (*GRID, "n_query") if what[name]}
    features = [name for name, option in (("weights", "weights"), ("exclude_self", "leave_one_out")) if what[option]]
    grid = grid and not given and not features
    if grid:
        given = {**GRID, **({} if place.card else {"n_train": (32768, 4096)})}  # a CPU takes minutes for a million
    return problems(**given, requires=features, device="cuda:0" if place.card else "cpu"), grid


def columns(filters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the filters by the names of the store's columns."""
    wanted = {{"dim": "d"}.get(name, name): value for name, value in filters.items() if value}
    if wanted.get("gpu", "").lower() == "cpu":
        wanted["gpu"] = this_cpu()[0]
    elif "gpu" in wanted:
        card = hardware.card_called(wanted["gpu"])
        wanted["gpu"] = card.name if card else cards.card_name(wanted["gpu"])
    return wanted
