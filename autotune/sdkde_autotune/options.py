"""Options of the commands, and what their values stand for."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from sdkde_core.choice import cards, hardware, registry
from sdkde_core.choice.cards import GPU
from sdkde_core.cli.console import Choice, together
from sdkde_core.messages import did_you_mean
from sdkde_core.protocol import PRECISIONS, BackendInfo, BackendUnavailable, Problem, Reduction

from . import lookup
from .problems import GRID, card_named, problems
from .runner import SOURCES

__all__ = [
    "POSITIVE",
    "Duration",
    "absent",
    "another_file",
    "card_here",
    "columns",
    "db_option",
    "filter_options",
    "places",
    "problem_options",
    "problems_of",
    "several",
    "there",
    "whole_grid",
]


class Duration(click.ParamType):
    """Seconds, from ``90s``, ``10m``, ``1h`` or a number of seconds."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|m|h)?", str(value).strip())
        if not found or not float(found[1]):
            self.fail(f"{value!r} is no time; pass one such as 90s, 10m or 1h", param, ctx)
        return float(found[1]) * {"s": 1, "m": 60, "h": 3600}[found[2] or "s"]


def several(name: str, kind: click.ParamType, **extra: Any) -> Callable[[Any], Any]:
    """Return an option that takes several values, separated by commas or repeated."""

    def split(ctx: click.Context, param: click.Parameter, given: Sequence[str]) -> tuple[Any, ...]:
        words = [word.strip() for text in given for word in text.split(",") if word.strip()]
        return tuple(dict.fromkeys(kind.convert(word, param, ctx) for word in words))

    return click.option(name, multiple=True, callback=split, **extra)


REDUCTIONS, POSITIVE = Choice([str(reduction) for reduction in Reduction]), click.IntRange(min=1)

db_option = click.option(
    "--db",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The tuner's database. Default: the one that SDKDE_DB names, else tuning.sqlite in the user's cache folder.",
)
_gpu = click.option(
    "--gpu",
    metavar="NAME",
    default="auto",
    show_default=True,
    help="A GPU's name or alias; auto: the first one here.",
)
problem_options = together(
    _gpu,
    click.option("--backend", help="A backend's name. Default: all that can be tuned."),
    several(
        "--reduction",
        REDUCTIONS,
        metavar="NAMES",
        help="log_sum, mean, laplace; several separated by commas, or repeated. Default: all.",
    ),
    several("--dim", POSITIVE, metavar="D", help="Dimensions, likewise. Default: 2,16,64."),
    several("--n-train", POSITIVE, metavar="N", help="Training points, likewise. Default: 32768."),
    several("--n-query", POSITIVE, metavar="M", help="Query points, likewise; not for mean. Default: an eighth of N."),
    several(
        "--precision",
        Choice(PRECISIONS),
        metavar="PRECISIONS",
        help=f"{', '.join(PRECISIONS)}, likewise. Default: fast.",
    ),
    click.option("--weights", is_flag=True, help="Of training points whose weights differ."),
    click.option("--leave-one-out", is_flag=True, help="Of training points, each of which its own density leaves out."),
)
filter_options = together(
    click.option("--gpu", metavar="NAME", help="Only results of this GPU."),
    click.option("--backend", help="Only results of this backend."),
    click.option("--kernel", help="Only results of this kernel."),
    several("--reduction", REDUCTIONS, metavar="NAMES", help="Only results of these reductions."),
    several("--dim", POSITIVE, metavar="D", help="Only results of these dimensions."),
    several("--precision", Choice(PRECISIONS), metavar="PRECISIONS", help="Only results of these precisions."),
    several("--source", Choice(SOURCES), metavar="NAMES", help=f"Only results that were {', '.join(SOURCES)}."),
)


# --- what their values stand for -------------------------------------------------------------------------------------


def _first(here: Sequence[GPU | None]) -> GPU:
    if not here:
        raise ValueError("no NVIDIA GPU is visible here; name one to predict for, such as --gpu a6000")
    if here[0] is None:
        raise ValueError(
            f"the rates of {hardware.visible_gpus()[0].name!r} are not known, as NVML does not answer, or the card is "
            "older than compute capability 7.0; name one to predict for, such as --gpu a6000"
        )
    return here[0]


def card_here(name: str) -> tuple[GPU, str | None]:
    """Return the GPU that is named, and its device; None if it is not here."""
    here = hardware.local_cards()
    card = _first(here) if name.lower() == "auto" else card_named(name)
    matches = [i for i, found in enumerate(here) if found is not None and found.name == card.name]
    if len(matches) > 1:
        click.echo(f"{len(matches)} GPUs here are {card.name}: taking the first, cuda:{matches[0]}", err=True)
    return card, f"cuda:{matches[0]}" if matches else None


_SETS = {
    "reduction": "reductions",
    "dim": "dims",
    "n_train": "n_train",
    "n_query": "n_query",
    "precision": "precisions",
}
_FEATURES = {"weights": "weights", "leave_one_out": "exclude_self"}


def problems_of(what: Mapping[str, Any], device: str | None) -> list[Problem]:
    """Return the problems that the options describe."""
    given = {_SETS[name]: values for name, values in what.items() if name in _SETS and values}
    features = [feature for name, feature in _FEATURES.items() if what[name]]
    return problems(**given, requires=features, device=device or "cuda:0")


def whole_grid(what: Mapping[str, Any], device: str | None) -> list[Problem]:
    """Return the problems of :data:`~sdkde_autotune.problems.GRID` if no option describes a problem; otherwise none."""
    named = any(what[name] for name in (*_SETS, *_FEATURES))
    return [] if named else problems(**GRID, device=device or "cuda:0")


def columns(filters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the filters by the names of the store's columns."""
    wanted = {{"dim": "d"}.get(name, name): value for name, value in filters.items() if value}
    if "gpu" in wanted:
        card = hardware.card_called(wanted["gpu"])
        wanted["gpu"] = card.name if card else cards.card_name(wanted["gpu"])
    return wanted


def places(backends: Sequence[str], devices: Sequence[str]) -> list[tuple[BackendInfo, str]]:
    """Return each backend with each device that it runs on, if the device is here and its rates are known."""
    here = ["cpu"] + ["cuda:0"] * bool(hardware.visible_gpus())
    for device in devices:
        if hardware.processor(device) is None:
            raise ValueError(
                f"device {device!r} is not here, or its rates are not known; pass one of {', '.join(here)}"
            )
    for name in backends:
        record = registry.find(name)
        if record is None or not record.ok:
            known = [r.name for r in registry.records()]
            why = f"{record.status}: {record.reason}" if record else f"unknown{did_you_mean(name, known)}"
            raise BackendUnavailable(f"backend {name!r} is {why}")
    found = [
        (record.info, device)
        for record in registry.records()
        if record.ok and record.info is not None and record.name in (backends or (record.name,))
        for device in devices or here
        if device.partition(":")[0] in record.info.devices and hardware.processor(device) is not None
    ]
    if not found:
        raise ValueError("nothing to measure: no --backend named runs on a --device named; name others")
    return found


def another_file(argument: str, output: Path | str, database: Path) -> None:
    """Raise if what is to be written is the database."""
    if Path(output).exists() and Path(output).samefile(database):
        raise ValueError(f"{argument} and the database are one file, {output}; pass another {argument}")


def absent(path: Path | str) -> bool:
    """Return whether there is no file of that name; OSError for a loop of symbolic links, and what is hidden."""
    try:
        os.stat(path)
    except FileNotFoundError:
        return True
    return False


def there(db: Path | None) -> Path:
    """Return the path of the database, which must exist."""
    where = db or lookup.database()
    if absent(where):
        raise ValueError(
            f"nothing is tuned yet: there is no {where}; run sdkde-autotune --gpu auto, or name another --db"
        )
    return where
