"""The tuner's output: tables, JSON, the reasons for a configuration, and a plot."""

from __future__ import annotations

import math
import statistics
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sdkde_core.cli.console import table
from sdkde_core.plugin import write_atomically

from . import lookup, provenance
from .calibrate import Calibrated
from .key import Key
from .problems import Tunable
from .records import Best, Trial
from .search import Result, candidates, size
from .verify import Verdict

__all__ = [
    "best_row",
    "calibrated_row",
    "config_text",
    "explained",
    "listing",
    "plan",
    "plot",
    "result_row",
    "verdict_row",
]

#: Columns that name a problem, in every table.
PROBLEM = ("backend", "kernel", "reduction", "precision", "d", "n_octave", "m_octave", "requires")

_HEADINGS = {
    "n_octave": "n",
    "m_octave": "m",
    "requires": "features",
    "ms": "best ms",
    "q50": "ms",
    "created": "UTC",
    "config": "configuration",
}


def listing(rows: Iterable[Mapping[str, Any]], *columns: str) -> str:
    """Return columns of rows as a table, those that name the problem first; a cell that is absent is empty."""
    rows, names = list(rows), (*PROBLEM, *columns)
    if not any(row.get("requires") for row in rows):
        names = tuple(name for name in names if name != "requires")
    headings = [_HEADINGS.get(name, name.replace("_", " ")) for name in names]
    return table([headings, *([_cell(name, row.get(name, "")) for name in names] for row in rows)])


def config_text(config: Mapping[str, Any]) -> str:
    """Return a configuration as ``block_m=64 num_warps=4``."""
    return " ".join(f"{name}={value}" for name, value in config.items())


def _cell(name: str, value: Any) -> str:
    if name.endswith("_octave"):
        return f"2^{value}"
    if name.endswith("loss") or name == "noise":
        return f"{value:.1%}"
    if name == "created":
        return str(value)[:16].replace("T", " ")
    if isinstance(value, Mapping):
        return config_text(value)
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


# --- rows -------------------------------------------------------------------------------------------------------------


def plan(tasks: Sequence[Tunable], trials: int | None) -> list[dict[str, Any]]:
    """Return for each task the number of configurations: in its space, that can run, and that would be tried."""
    found = []
    for task, space in tasks:
        left = len(candidates(task, space))
        would = left if trials is None else min(left, trials)
        counts = {"configurations": size(task, space), "can_run": left, "would_try": would}
        found.append({**Key.of(task.query, task.problem)._asdict(), **counts})
    return found


def result_row(result: Result) -> dict[str, Any]:
    """Return a search's result as values for JSON."""
    return {
        **result.key._asdict(),
        "config": result.best,
        "ms": result.outcome.median if result.outcome else None,
        "default_ms": result.default.median if result.default and result.default.ms else None,
        "counts": dict(result.counts),
        "tried": result.tried,
        "replayed": result.replayed,
        "rejected": result.rejected,
        "reason": result.reason,
        "seconds": round(result.seconds, 3),
    }


def best_row(best: Best) -> dict[str, Any]:
    """Return a winner as values for JSON."""
    names = ("config", "ms", "default_config", "default_ms", "noise", "source", "provenance", "created")
    return {**best.key._asdict(), **{name: getattr(best, name) for name in names}}


def verdict_row(found: Verdict | tuple[Best, str]) -> dict[str, Any]:
    """Return what became of a winner that was measured again, or why it was not."""
    if isinstance(found, tuple):
        return {**best_row(found[0]), "stored_ms": found[0].ms, "default_ms": "", "verdict": found[1]}
    times = {"stored_ms": found.before.ms, "now_ms": found.now.median, "default_ms": found.default.median}
    return {**best_row(found.before), **times, "verdict": found.reason}


def calibrated_row(done: Calibrated) -> tuple[str, ...]:
    """Return a calibration as cells; the factors are measured over predicted times."""
    factors, cells = [value for name, value in done.values.items() if " " in name], ["-"] * 4
    if done.values:
        cells[:2] = f"{done.values['startup']:.3g}", f"{1e3 * done.values['overhead']:.3g}"
    if factors:
        cells[2:] = f"{min(factors):.2g} to {max(factors):.2g}", f"{statistics.median(factors):.2g}"
    return (done.backend, done.device, *cells, done.declined)


# --- explain ----------------------------------------------------------------------------------------------------------

_WHY = {
    "exact": "tuned for this problem under these versions",
    "provenance": "tuned for this problem under other versions",
    "shipped": "tuned for this problem",
    "sizes": "tuned on this card for other sizes",
    "near": "tuned on this card for a similar problem",
    "architecture": "tuned on another card of this architecture",
    "predicted": "not measured: the cost model's choice, compiled for this architecture",
}


def explained(tunable: Tunable, db: Path | None = None) -> dict[str, Any]:
    """Return a problem's configuration, its rung and the reason, and the configurations that cannot run on the card."""
    query, problem, space = tunable.task.query, tunable.task.problem, tunable.space
    key, passed = Key.of(query, problem), []
    for found in lookup.candidates(query, problem, db):
        limit = space.limit(query.kernel, found.config, problem, query.architecture)
        told = {"rung": found.rung, "config": dict(found.config), "why": limit or _why(found, key)}
        if limit is None:
            break
        passed.append(told)
    else:
        default = dict(space.default(query.kernel, problem, query.architecture))
        told = {"rung": "heuristic", "config": default, "why": "nothing is stored: the backend's default"}
    return {**key._asdict(), **told, "passed_over": passed}


def _why(found: lookup.Found, key: Key) -> str:
    """Return the rung in words, and in what the configuration's problem differs."""
    origin, parts = found.best.key, [_WHY[found.rung]]
    if origin.gpu != key.gpu:
        parts.append(f"the {origin.gpu}")
    if origin.features != key.features:
        parts.append(f"with {' and '.join(sorted(origin.features))}" if origin.features else "without features")
    if origin.dimension != key.dimension:
        parts.append(f"d {origin.d}")
    if (origin.n_octave, origin.m_octave) != (key.n_octave, key.m_octave):
        parts.append(f"n 2^{origin.n_octave}, m 2^{origin.m_octave}")
    if found.rung == "provenance":
        then, now = found.best.provenance, provenance.current(key.backend)
        changed = [name for name in provenance.NAMES if then.get(name) != now.get(name)]
        parts += [f"{name} {then.get(name) or 'none'}, now {now.get(name) or 'none'}" for name in changed]
    if found.shipped:
        parts.append("from a table that comes with sdkde")
    return "; ".join([*parts, found.best.created[:10]])


# --- plot -------------------------------------------------------------------------------------------------------------


def plot(trials: Sequence[Trial], path: Path) -> None:
    """Plot a key's times over each parameter, coloured in the order of the search; Optuna draws.

    Raises
    ------
    ValueError
        Nothing ran, or the extension is that of no picture.
    """
    try:
        import matplotlib
        import optuna
    except ImportError as error:
        raise ImportError("a plot needs matplotlib: pip install 'sdkde-core[plot]'") from error
    ran = [trial for trial in trials if trial.outcome.ms]
    if not ran:
        raise ValueError("no configuration that was tried ran: there is no time to plot")
    matplotlib.use("Agg")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    ran = [trial for trial in ran if trial.config.keys() == ran[0].config.keys()]
    values = {name: {trial.config[name] for trial in ran} for name in ran[0].config}
    order = {name: sorted(found, key=lambda value: (isinstance(value, str), value)) for name, found in values.items()}
    kinds = {name: optuna.distributions.CategoricalDistribution(found) for name, found in order.items()}
    study = optuna.create_study()
    for trial in ran:
        config = dict(trial.config)
        study.add_trial(optuna.create_trial(params=config, distributions=kinds, value=trial.outcome.median))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Optuna calls its plots experimental
        axes = optuna.visualization.matplotlib.plot_slice(study, target_name=f"{ran[0].source} ms")
    figure = np.ravel(axes)[0].figure
    figure.suptitle(" ".join(f"{name}={_cell(name, getattr(ran[0].key, name))}" for name in (*PROBLEM, "gpu")))
    kind = path.suffix.lstrip(".").lower() or "png"
    if kind not in figure.canvas.get_supported_filetypes():
        raise ValueError(f"{path}: unknown extension {path.suffix!r}; pass one of .png, .pdf, .svg")
    path.parent.mkdir(parents=True, exist_ok=True)
    with write_atomically(path) as temporary, temporary.open("wb") as file:
        figure.savefig(file, format=kind)
