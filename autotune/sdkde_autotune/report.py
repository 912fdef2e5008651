"""The tuner's output: tables, JSON, the reasons for a configuration, and a plot."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sdkde_core.cli.console import table
from sdkde_core.plugin import write_atomically
from sdkde_core.tuning import Config

from . import lookup, provenance
from .calibrate import Calibrated
from .key import Key
from .problems import Tunable
from .records import Best, Trial
from .search import Result, candidates, size
from .verify import Verdict

__all__ = [
    "calibration_table",
    "config_text",
    "explanation",
    "explanation_table",
    "plan",
    "plan_table",
    "plot",
    "result_row",
    "simulation_table",
    "summary",
    "trial_table",
    "winner_table",
]

_HEADER = ("backend", "kernel", "reduction", "precision", "d", "n", "m")


def config_text(config: Config | None) -> str:
    """Return a configuration as ``block_m=64 num_warps=4``."""
    return " ".join(f"{name}={value}" for name, value in config.items()) if config else "-"


def _task(key: Key) -> tuple[str, ...]:
    sizes = f"2^{key.n_octave}", f"2^{key.m_octave}"
    return key.backend, key.kernel, key.reduction, key.precision, str(key.dimension), *sizes


def _ms(ms: float | None) -> str:
    return "-" if ms is None or not math.isfinite(ms) else f"{ms:.4g}"


# --- tune ------------------------------------------------------------------------------------------------------------


def plan(tasks: Sequence[Tunable], trials: int | None) -> list[dict[str, Any]]:
    """Return for each task the number of configurations: in its space, that can run, and that would be tried."""
    found = []
    for task, space in tasks:
        left = len(candidates(task, space))
        key = Key.of(task.query, task.problem)
        would = left if trials is None else min(left, trials)
        found.append({**key._asdict(), "configurations": size(task, space), "can_run": left, "would_try": would})
    return found


def plan_table(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return :func:`plan` as a table."""
    names = ("configurations", "can_run", "would_try")
    cells = [(*_task(_key(row)), *(str(row[name]) for name in names)) for row in rows]
    return table([(*_HEADER, "configurations", "can run", "would try"), *cells])


def result_row(result: Result) -> dict[str, Any]:
    """Return a result as values for JSON."""
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


def summary(results: Sequence[Result]) -> str:
    """Return results as a table; where no configuration ran, a line below it gives the most frequent reason."""
    header = (*_HEADER, "default ms", "best ms", "best configuration", "tried", "known", "rejected")
    rows = [
        (
            *_task(result.key),
            _ms(result.default.median if result.default else None),
            _ms(result.outcome.median if result.outcome else None),
            config_text(result.best),
            *(str(count) for count in (result.tried, result.replayed, result.rejected)),
        )
        for result in results
    ]
    notes = [
        f"{result.key.kernel}, d {result.key.dimension}: nothing ran; most often: {result.reason or 'nothing can'}"
        for result in results
        if result.best is None
    ]
    return "\n".join([table([header, *rows]), *notes])


def simulation_table(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return the losses of samplers as a table."""
    cells = [
        (
            *_task(_key(row)),
            *(str(row[name]) for name in ("recorded", "sampler", "trials", "repeats")),
            *(f"{row[name]:.1%}" for name in ("mean_loss", "worst_loss")),
        )
        for row in rows
    ]
    return table([(*_HEADER, "recorded", "sampler", "trials", "repeats", "mean loss", "worst loss"), *cells])


# --- calibrate -------------------------------------------------------------------------------------------------------


def calibration_table(found: Sequence[Calibrated]) -> str:
    """Return calibrations as a table; the factors are measured over predicted times."""
    rows: list[tuple[str, ...]] = [("backend", "device", "start-up s", "pass ms", "factors", "median", "")]
    for done in found:
        factors = [value for name, value in done.values.items() if " " in name]
        cells = ["-"] * 4
        if done.values:
            cells[:2] = f"{done.values['startup']:.3g}", f"{1e3 * done.values['overhead']:.3g}"
        if factors:
            cells[2:] = f"{min(factors):.2g} to {max(factors):.2g}", f"{statistics.median(factors):.2g}"
        rows.append((done.backend, done.device, *cells, done.declined))
    return table(rows)


# --- show ------------------------------------------------------------------------------------------------------------


def winner_table(winners: Sequence[Best]) -> str:
    """Return winners as a table."""
    rows = [
        (
            row.key.gpu,
            *_task(row.key),
            _ms(row.default_ms),
            _ms(row.ms),
            f"{row.noise:.1%}",
            row.source,
            row.created[:10],
            config_text(row.config),
        )
        for row in winners
    ]
    return table([("gpu", *_HEADER, "default ms", "best ms", "noise", "source", "day", "configuration"), *rows])


def verdict_table(found: Sequence[Verdict | tuple[Best, str]]) -> str:
    """Return the verdicts on winners that were measured again as a table."""
    rows = []
    for verdict in found:
        if isinstance(verdict, tuple):
            best, reason = verdict
            rows.append((*_task(best.key), _ms(best.ms), "", "", reason, config_text(best.config)))
        else:
            best, now, default = verdict.before, verdict.now.median, verdict.default.median
            rows.append(
                (*_task(best.key), _ms(best.ms), _ms(now), _ms(default), verdict.reason, config_text(best.config))
            )
    return table([(*_HEADER, "stored ms", "now ms", "default ms", "", "configuration"), *rows])


def trial_table(trials: Sequence[Trial]) -> str:
    """Return trials as a table."""
    rows = [
        (
            trial.key.gpu,
            *_task(trial.key),
            trial.outcome.status,
            _ms(trial.outcome.median),
            trial.source,
            trial.created[:19],
            config_text(trial.config),
            trial.outcome.error,
        )
        for trial in trials
    ]
    return table([("gpu", *_HEADER, "status", "ms", "source", "UTC", "configuration", "error"), *rows])


# --- explain ---------------------------------------------------------------------------------------------------------

_WHY = {
    "exact": "tuned for this problem under these versions",
    "provenance": "tuned for this problem under other versions",
    "sizes": "tuned on this card for other sizes",
    "architecture": "tuned on another card of this architecture",
    "shipped": "from a table that comes with sdkde",
    "predicted": "not measured: the cost model's choice, compiled for this architecture",
    "heuristic": "nothing is stored: the backend's default",
}


def explanation(tunable: Tunable, winners: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a problem's configuration, its rung and the reason, and the configurations that cannot run on the card.

    Parameters
    ----------
    tunable : Tunable
    winners : iterable of mapping
        Rows of ``best`` as :meth:`sdkde_autotune.store.Store.dump` returns them, which tell a configuration's origin.
    """
    query, problem, space = tunable.task.query, tunable.task.problem, tunable.space
    key = Key.of(query, problem)
    passed = []
    for config, rung in lookup.candidates(query, problem):
        limit = space.limit(query.kernel, config, problem, query.architecture)
        if limit is None:
            found = {"rung": rung, "config": dict(config), "why": _why(rung, config, key, winners)}
            break
        passed.append({"rung": rung, "config": dict(config), "why": limit})
    else:
        default = dict(space.default(query.kernel, problem, query.architecture))
        found = {"rung": "heuristic", "config": default, "why": _WHY["heuristic"]}
    return {**key._asdict(), **found, "passed_over": passed}


def explanation_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return explanations as a table, with a line below it for each configuration that cannot run."""
    cells = [(*_task(_key(row)), row["rung"], config_text(row["config"]), row["why"]) for row in rows]
    notes = [
        f"{row['kernel']}, d {row['dimension']}: not {over['rung']} ({config_text(over['config'])}): {over['why']}"
        for row in rows
        for over in row["passed_over"]
    ]
    return "\n".join([table([(*_HEADER, "rung", "configuration", "why"), *cells]), *notes])


def _why(rung: str, config: Config, key: Key, winners: Iterable[Mapping[str, Any]]) -> str:
    """Return the rung in words, and from which winner the configuration comes."""
    near = [row for row in winners if _key(row).family == key.family and row["config"] == config]
    if rung == "shipped" or not near:
        return _WHY[rung]
    row = min(near, key=lambda row: key.distance(_key(row)))
    origin, parts = _key(row), [_WHY[rung]]
    if origin.gpu != key.gpu:
        parts.append(f"the {origin.gpu}")
    if (origin.n_octave, origin.m_octave) != (key.n_octave, key.m_octave):
        parts.append(f"n 2^{origin.n_octave}, m 2^{origin.m_octave}")
    if rung == "provenance":
        then, now = row["provenance"], provenance.current(key.backend)
        changed = [name for name in provenance.NAMES if then.get(name) != now.get(name)]
        parts += [f"{name} {then.get(name) or 'none'}, now {now.get(name) or 'none'}" for name in changed]
    return "; ".join([*parts, row["created"][:10]])


def _key(row: Mapping[str, Any]) -> Key:
    return Key._make(row[name] for name in Key._fields)


# --- plot ------------------------------------------------------------------------------------------------------------


def plot(trials: Sequence[Trial], path: Path, x: str | None = None, y: str | None = None) -> None:
    """Plot the best time over two parameters, and the times in the order of the search.

    Parameters
    ----------
    trials : sequence of Trial
        Of one key.
    path : path
        The format follows from the extension.
    x, y : str, optional
        Parameters; by default the two with the most values.

    Raises
    ------
    ValueError
        A parameter is not known, there are fewer than two, or nothing ran.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("a plot needs matplotlib: pip install 'sdkde-core[plot]'") from error

    ran = [trial for trial in trials if trial.outcome.status == "ok" and trial.outcome.ms]
    if not ran:
        raise ValueError("no configuration that was tried ran: there is no time to plot")
    values: dict[str, set[Any]] = {}
    for trial in trials:
        for name, value in trial.config.items():
            values.setdefault(name, set()).add(value)
    for name in filter(None, (x, y)):
        if name not in values:
            raise ValueError(f"{name!r} is no parameter; pass one of {', '.join(values)}")
    chosen = [name for name in (x, y) if name]
    chosen += sorted(values.keys() - {x, y}, key=lambda name: (-len(values[name]), name))[: 2 - len(chosen)]
    if len(set(chosen)) < 2:
        raise ValueError("a plot needs two different parameters; pass others as -x and -y")
    x, y = chosen
    ticks = {name: sorted(values[name], key=lambda value: (str(type(value)), value)) for name in chosen}
    best: dict[tuple[Any, Any], float] = {}
    for trial in ran:
        place = trial.config.get(y), trial.config.get(x)
        best[place] = min(best.get(place, math.inf), trial.outcome.median)
    grid = [[best.get((row, column), math.nan) for column in ticks[x]] for row in ticks[y]]

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    canvas = FigureCanvasAgg(figure)
    kind = path.suffix.lstrip(".").lower() or "png"
    if kind not in canvas.get_supported_filetypes():
        raise ValueError(f"{path}: unknown extension {path.suffix!r}; pass one of .png, .pdf, .svg")
    left, right = figure.subplots(1, 2)
    image = left.imshow(grid, origin="lower", aspect="auto", cmap="viridis_r")
    left.set_xticks(range(len(ticks[x])), [str(value) for value in ticks[x]])
    left.set_yticks(range(len(ticks[y])), [str(value) for value in ticks[y]])
    left.set_xlabel(x)
    left.set_ylabel(y)
    left.set_title("best time over the other parameters")
    dark = 0.5 * (min(best.values()) + max(best.values()))
    for (row, column), ms in best.items():
        style = {"ha": "center", "va": "center", "fontsize": 7, "color": "white" if ms > dark else "black"}
        left.text(ticks[x].index(column), ticks[y].index(row), _ms(ms), **style)
    source = ran[0].source
    figure.colorbar(image, ax=left, label=f"{source} ms")

    times = [trial.outcome.median for trial in trials]
    running, so_far = [], math.inf
    for ms in times:
        so_far = min(so_far, ms)
        running.append(so_far if math.isfinite(so_far) else math.nan)
    tried = [(i, ms) for i, ms in enumerate(times, 1) if math.isfinite(ms)]
    right.plot(*zip(*tried), ".", color="0.5", label="a configuration")
    failed = [i for i, ms in enumerate(times, 1) if not math.isfinite(ms)]
    if failed:
        right.plot(failed, [max(ms for _, ms in tried)] * len(failed), "x", color="tab:red", label="rejected")
    right.step(range(1, len(times) + 1), running, where="post", color="tab:blue", label="best so far")
    right.set_xlabel("configurations, in order")
    right.set_ylabel(f"{source} ms")
    right.legend()
    key = ran[0].key
    figure.suptitle(
        f"{key.backend} {key.kernel}, {key.reduction}, d {key.dimension}, n 2^{key.n_octave}, m 2^{key.m_octave}, "
        f"{key.precision}, {key.gpu}"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    with write_atomically(path) as temporary, temporary.open("wb") as file:
        canvas.print_figure(file, format=kind)
