"""Tables in Markdown and plots of a folder of records."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from sdkde_core.protocol import PRECISIONS

from .records import Record, read
from .registry import REGISTRY, Benchmark

__all__ = ["COMPARED", "Plot", "Table", "error_against_time", "number", "percent", "problem", "write"]

Row = dict[str, Any]
Value = str | Callable[[Row], Any]  # a field, or a function of a row


@dataclass(frozen=True)
class Table:
    """A table: ``rows`` are the fields that name a row, ``cells`` its figures by heading.

    With ``columns``, a field, every value of it has a column for each cell.
    """

    title: str
    rows: tuple[str, ...]
    cells: Mapping[str, Value]
    columns: str | None = None
    keep: Callable[[Row], bool] = field(default=lambda row: True)
    note: str = ""


@dataclass(frozen=True)
class Plot:
    """A plot: a line for every value of ``lines``, a panel for every value of ``panels``.

    ``published``: points by label, drawn beside ours; ``levels``: horizontal lines by label. ``draw`` draws a panel
    itself, given the axes and the rows.
    """

    title: str
    name: str  # of the file
    x: str = "n"
    y: Value = "ms"
    lines: Value = "subject"
    panels: Value | None = None
    labels: tuple[str, str] = ("samples", "milliseconds")
    keep: Callable[[Row], bool] = field(default=lambda row: True)
    published: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)
    levels: Mapping[str, float] = field(default_factory=dict)
    draw: Callable[[Any, list[Row]], None] | None = None


# --- figures as text ------------------------------------------------------------------------------------------------


def number(value: Any) -> str:
    """Three digits; small and very large ones with an exponent."""
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, dict):
        return ", ".join(f"{name} {each}" for name, each in value.items())
    if isinstance(value, int):
        return str(value)
    return f"{float(f'{value:.3g}'):g}" if value == 0 or 1e-3 <= abs(value) < 1e5 else f"{value:.1e}"


def percent(name: str) -> Callable[[Row], str]:
    return lambda row: "" if row.get(name) is None else f"{number(100 * row[name])} %"


def spread(row: Row) -> str:
    return "" if "ms_low" not in row else f"{number(row['ms_low'])}–{number(row['ms_high'])}"


def problem(row: Row) -> str:
    """What is estimated, in words."""
    return f"{row['method']} {row['n']} × {row['m']}, d = {row['d']}"


#: The columns of a comparison of subjects.
COMPARED: dict[str, Value] = {
    "ms": "ms",
    "20–80 %": spread,
    "worst row": "worst",
    "beyond": percent("beyond"),
    "relative L2": "l2",
    "MHz": "mhz",
    "exp limit": percent("of_exp_limit"),
    "setting": "setting",
}


# --- a folder -------------------------------------------------------------------------------------------------------


def write(folder: Path, to: Path, plots: bool = True) -> str:
    """Write report.md and the plots of all records in ``folder`` and below; return what was written.

    Raises
    ------
    FileNotFoundError
        There are none.
    """
    files = {path: read(path) for path in sorted(folder.rglob("*.jsonl"))}
    known = {b.name: b for b in REGISTRY}
    files = {path: records for path, records in files.items() if path.stem in known and records}
    if not files:
        raise FileNotFoundError(f"no records of benchmarks in {folder}; python -m benchmarks run NAME --to {folder}")
    to.mkdir(parents=True, exist_ok=True)
    order = list(known)
    text = [f"# Records: {folder.resolve().name}"]
    for path, records in sorted(files.items(), key=lambda item: order.index(item[0].stem)):
        prefix = "-".join(path.relative_to(folder).with_suffix("").parts)
        text += section(known[path.stem], records, to if plots else None, prefix)
    (to / "report.md").write_text("\n\n".join(text) + "\n", encoding="utf-8")
    return f"{to / 'report.md'}: {len(files)} benchmarks, {sum(map(len, files.values()))} records"


def section(benchmark: Benchmark, records: Sequence[Record], to: Path | None, prefix: str) -> list[str]:
    """The paragraphs about one benchmark; plots go to the folder ``to``, if there is one."""
    rows = [record.row for record in records if record.ok]
    text = [f"## {benchmark.name}", benchmark.about]
    text += ["<details>", "<summary>Machine and versions</summary>", where(records[-1].about), "</details>"]
    views = benchmark.views(rows) if callable(benchmark.views) else benchmark.views
    for view in views:
        kept = [row for row in rows if view.keep(row)]
        if not kept:
            continue
        if isinstance(view, Table):
            text += ["<details>", f"<summary>{view.title}</summary>", table(view, kept), "</details>"]
            text += filter(None, [view.note])
        elif to is not None:
            path = to / f"{prefix}-{view.name}.png"
            draw(view, kept, path)
            text.append(f"![{view.title}]({path.name})")
    return text + missing(records)


def where(about: Row) -> str:
    """The machine and the versions."""
    device = f"{about['gpu']}, driver {about.get('driver', '?')}; " if about.get("gpu") else ""
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    return (
        f"{device}{about['cpu']} ({about['widest instructions']}), {about['cores']} cores; Python {about['python']}, "
        f"{versions}; {about['when']}, scale {about['scale']}.{' ' + about['note'] + '.' if 'note' in about else ''}"
    )


def missing(records: Iterable[Record]) -> list[str]:
    """What was not measured, and why."""
    found: dict[str, dict[str, None]] = {}
    for record in records:
        if not record.ok:
            why = record.result.get("skipped") or f"failed: {record.result['failed']}"
            found.setdefault(why, {})[str(record.case.get("subject", "some cases"))] = None
    return (
        ["Not measured:\n\n" + "\n".join(f"- {', '.join(who)}: {why}" for why, who in found.items())] if found else []
    )


def value_of(row: Row, value: Value) -> Any:
    return value(row) if callable(value) else row.get(value)


def ordered(rows: Sequence[Row], names: Sequence[str]) -> list[Row]:
    """Rows by fields: numbers by size, words in the order in which they come; nothing else changes their order."""

    def rank(name: str) -> Callable[[Any], float]:
        words = dict.fromkeys(row.get(name) for row in rows if isinstance(row.get(name), str))
        known = {word: place for place, word in enumerate(words)}
        return lambda value: value if type(value) is int else known[value] if isinstance(value, str) else 0

    ranks = [(name, rank(name)) for name in names]
    return sorted(rows, key=lambda row: [of(row.get(name)) for name, of in ranks])


def table(view: Table, rows: Sequence[Row]) -> str:
    """The table in Markdown; columns without any figure are left out."""
    columns = [""]
    if view.columns:
        columns = list(dict.fromkeys(str(row[view.columns]) for row in ordered(rows, [view.columns])))
    rows = ordered(rows, view.rows)
    heads = [(c, name) for c in columns for name in view.cells]
    lines: dict[tuple[str, ...], dict[tuple[str, str], str]] = {}
    for row in rows:
        line = lines.setdefault(tuple(number(row.get(name)) for name in view.rows), {})
        column = str(row[view.columns]) if view.columns else ""
        line |= {(column, name): number(value_of(row, cell)) for name, cell in view.cells.items()}
    heads = [head for head in heads if any(line.get(head) for line in lines.values())]
    titles = [*view.rows, *(", ".join(filter(None, head)) for head in heads)]
    rule = ["---"] * len(view.rows) + ["---:"] * len(heads)
    body = [[*key, *(line.get(head, "") for head in heads)] for key, line in lines.items()]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (titles, rule, *body))


# --- plots ----------------------------------------------------------------------------------------------------------


def draw(view: Plot, rows: list[Row], path: Path) -> None:
    """Draw a plot into a file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    from sdkde_core.interop.plots import STYLE

    panels = list(dict.fromkeys(value_of(row, view.panels) for row in rows)) if view.panels else [None]
    with plt.rc_context(STYLE):
        size = 5.6 * len(panels), 4.4
        figure, axes = plt.subplots(1, len(panels), figsize=size, squeeze=False, layout="constrained")
        for panel, ax in zip(panels, axes[0]):
            here = [row for row in rows if view.panels is None or value_of(row, view.panels) == panel]
            (view.draw or functools.partial(_lines, view))(ax, here)
            ax.set_title(view.title if panel is None else str(panel), loc="left", fontweight="bold", fontsize=10)
        figure.savefig(path, dpi=110)
        plt.close(figure)


def error_against_time(ax: Any, rows: list[Row]) -> None:
    """Every subject as a point: milliseconds, and the worst row's error."""
    for row in rows:
        if row.get("worst"):
            ours = row["subject"].split(", ")[-1] in PRECISIONS
            ax.plot(row["ms"], row["worst"], "o", color="#00798c" if ours else "#8d99ae")
            ax.annotate(
                row["subject"], (row["ms"], row["worst"]), xytext=(3, 3), textcoords="offset points", fontsize=7
            )
    ax.set(xscale="log", yscale="log", xlabel="milliseconds", ylabel="worst row's error")


def _lines(view: Plot, ax: Any, rows: list[Row]) -> None:
    from matplotlib import colormaps
    from matplotlib.ticker import NullLocator

    def label(row: Row) -> str:
        return str(value_of(row, view.lines))

    colours = colormaps["tab20"].colors  # type: ignore[attr-defined]
    for i, (name, group) in enumerate(groupby(sorted(rows, key=label), key=label)):
        points = sorted((row for row in group if value_of(row, view.y) is not None), key=lambda row: row[view.x])
        x, y = [row[view.x] for row in points], [value_of(row, view.y) for row in points]
        colour = colours[i % len(colours)]
        ax.plot(x, y, "o-", color=colour, ms=4, lw=1.4, label=name)
        if view.y == "ms":
            ax.fill_between(x, [r["ms_low"] for r in points], [r["ms_high"] for r in points], color=colour, alpha=0.2)
    for i, (name, known) in enumerate(view.published.items()):
        marker = "Xs^vDP*h"[i % 8]
        ax.plot(*zip(*known), marker, color="#555555", mfc="none", ls=":", lw=1, ms=6, label=f"{name} (published)")
    for name, level in view.levels.items():
        ax.axhline(level, color="#555555", ls="--", lw=1, label=name)
    ax.set(xscale="log", yscale="log", xlabel=view.labels[0], ylabel=view.labels[1])
    at: list[float] = []  # the values that were measured, less those whose numbers would touch
    for value in sorted({row[view.x] for row in rows}):
        if not at or value >= 1.4 * at[-1]:
            at.append(value)
    ax.set_xticks(at, [f"{value:,}" for value in at], fontsize=8, rotation=30 if max(at) >= 1000 else 0)
    ax.xaxis.set_minor_locator(NullLocator())
    many = len(ax.get_legend_handles_labels()[0]) > 6
    ax.legend(frameon=False, fontsize=7, **({"loc": "upper left", "bbox_to_anchor": (1.0, 1.0)} if many else {}))
