"""Points, weights, bandwidths and saved densities from the files that a command names, and results to where it says."""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np

from ..archive import is_ours, load
from ..arrays import Argument, Array, listed
from ..bandwidth.rules import RULES
from ..estimator.batches import Advance, answered, batch_rows, watched
from ..estimator.density import undefined
from ..estimator.prepared import Prepared, fit
from ..estimator.request import Goal, Request
from ..files import EXTENSIONS, FileError, Pick, Source, Write, about, check_folder, is_stdout, naming, source, writing
from ..interop.plots import STYLE
from ..messages import did_you_mean, optional
from ..storage import write_atomically

Names = Sequence[str]


def opened(text: str, columns: Names, known: Names | None = None) -> Source:
    """Open a file of points; ``-`` is standard input, kept in a temporary file until the command ends."""
    pick = picking(columns, known)
    if text != "-":
        return source(text, pick)
    path = Path(click.get_current_context().with_resource(tempfile.TemporaryDirectory(prefix="sdkde-")), "stdin")
    with path.open("w+b") as file:
        shutil.copyfileobj(sys.stdin.buffer, file)
        file.seek(0)
        begins = file.readline(1 << 16)
    known_by = {b"\x93NUMPY": ".npy", b"PK\x03\x04": ".npz", b"PAR1": ".parquet"}
    text = ".tsv" if b"\t" in begins and b"," not in begins else ".csv"
    extension = next((e for start, e in known_by.items() if begins.startswith(start)), text)
    return source(str(path.rename(path.with_suffix(extension))), pick, "standard input")


def samples_of(text: str, columns: Names) -> Source:
    """Open samples; warn of a column of few distinct integers among others, a label or a target that was left in."""
    x = opened(text, columns)
    first = np.empty((0, 0)) if columns else next(x.batches(), np.empty((0, 0)))
    rows = first[:50]
    if len(rows) > 2 and not x.names and x.whole is not None and x.whole.dtype.kind == "U":
        fractions = (rows[1:] != np.rint(rows[1:])).mean(axis=0)
        if (rows[0] == np.rint(rows[0])).all() and (fractions > 0.8).all():
            what = f"its first line, {', '.join(f'{v:g}' for v in rows[0])}, is taken as a sample: a header?"
            click.echo(f"Warning: {x.name}: {what} Then write names with a letter, or leave it out", err=True)
    whole = [j for j, column in enumerate(first.T) if (column == np.rint(column)).all()]
    few = [j for j in whole if 1 < len(np.unique(first[:, j])) <= min(10, len(first) // 10)]
    if few and len(few) < x.columns:
        names = x.names or [str(j) for j in range(x.columns)]
        rest = ",".join(name for j, name in enumerate(names) if j not in few)
        what = f"column {', '.join(names[j] for j in few)} has at most ten distinct values, all integers: a label?"
        left = f"To leave it out: --columns {rest if len(rest) < 200 else '…'}"
        click.echo(f"Warning: {x.name}: {what} {left}", err=True)
    return x


def queries_of(text: str, columns: Names, known: Names, train: str, by_name: bool = True) -> Source:
    """Open queries of samples that have the names ``known``; warn where other columns are taken for them.

    ``columns`` are those of the samples' file, or without ``by_name`` those of the queries' own.
    """
    if text == train == "-":
        raise ValueError("TRAIN and QUERY are both standard input, which is read once; name a file for one of them")
    y = opened(text, columns, known if by_name else ())
    lacking = [name for name in known if name not in y.names] if y.names else []
    if lacking and len(y.names) != len(known):
        rest = ",".join(name for name in known if name in y.names)
        instead = f", as by --columns {rest if len(rest) < 200 else '…'}" if rest and not is_saved(train) else ""
        raise FileError(f"{y.name}: lacks {listed(lacking)} of {train}; pass the same columns{instead}")
    if y.names and known and y.names != tuple(known) and len(y.names) == len(known):
        what = f"{y.name} has the columns {listed(y.names)} for {listed(known)} of {train}"
        click.echo(f"Warning: {what}: they are matched by position", err=True)
    return y


def picking(columns: Names, known: Names | None = None) -> Pick:
    """Pick columns as the user says, of queries by the names ``known`` of the samples' where the file has them."""

    def place(column: str, names: Names, width: int) -> int:
        if names.count(column) == 1:
            return names.index(column)
        if column.isdecimal() and int(column) < width and column not in names:
            return int(column)
        have = f"two columns are {column!r}" if column in names else f"there is no column {column!r}"
        listed = ", ".join(names[:20]) + ", …" * (len(names) > 20) + "; or pass" if names else "without names; pass"
        hint = did_you_mean(column, names)
        raise ValueError(f"--columns: {have}; its columns are {listed} numbers from 0 to {width - 1}{hint}")

    def pick(names: tuple[str, ...], width: int) -> Sequence[int]:
        if known and all(names.count(name) == 1 for name in known):
            return [names.index(name) for name in known]
        numbers = all(column.isdecimal() and int(column) < width for column in columns)
        alone = known is not None and not names and width == len(columns)  # the query's file has no other columns
        if not columns or (alone and not numbers):
            return range(width)
        wanted = [place(column, names, width) for column in columns]
        if len(set(wanted)) < len(wanted):
            raise ValueError(f"--columns has a column twice: {', '.join(columns)}")
        return wanted

    return pick


def request_of(options: dict[str, Any], weights_as: Callable[[str], Any] | None = None, **more: Any) -> Request:
    """Make a request of a command's options; the files of bandwidths and weights are read."""
    bandwidth, weights = _bandwidth(options.pop("bandwidth")), options.pop("weights")
    weights = weights and (weights_as or _weights)(weights)
    return Request(Goal.DENSITY, bandwidth=bandwidth, weights=weights, **options, **more)


def files_of(train: str, query: str | None, options: dict[str, Any]) -> dict[str, str | None]:
    """Return file names by argument of :func:`sdkde_core.estimate`; None for an argument that is no file."""
    files = {"train": train, "query": query or train} | {name: options[name] for name in ("weights", "bandwidth")}
    return {name: text if text and _is_file(text) else None for name, text in files.items()}


def _is_file(text: str) -> bool:
    return any(extension in text.lower() for extension in (*EXTENSIONS, ".sdkde"))


def _bandwidth(text: str) -> Any:
    """Return a rule's name, a number or several, or the numbers in a file."""
    if text in RULES:
        return text
    with suppress(ValueError):  # a file, or neither, which is said below
        numbers = [float(part) for part in text.split(",")]
        return numbers if len(numbers) > 1 else numbers[0]
    if not _is_file(text):
        hint = did_you_mean(text, RULES)
        raise ValueError(f"bandwidth is {text!r}; pass one of {', '.join(RULES)}, numbers, or a file{hint}")
    h = source(text).read()
    return h.ravel() if 1 in h.shape else h  # a row or a column of numbers, one per dimension; else a matrix


def _weights(text: str) -> Any:
    weights = source(text)
    if weights.columns != 1:
        raise FileError(f"{text}: weights have {weights.columns} columns; pass one column")
    return weights.read()[:, 0]


def is_saved(text: str) -> bool:
    """Whether a file holds a density, by its name or by what is in it."""
    with naming(text):
        return text.lower().endswith(".sdkde") or (Path(text).is_file() and is_ours(text))


def density_of(text: str, columns: Names, marginal: bool = False) -> tuple[Prepared, Array | None]:
    """Load a density, whatever was saved; or fit one to samples, with the defaults, and return these too."""
    if not is_saved(text):
        return fitted(text, columns, {"bandwidth": "auto", "weights": None})
    found = load(text)
    prepared = getattr(found, "density_", getattr(found, "prepared", found))
    if marginal and columns:
        prepared = prepared.marginal(list(picking(columns)(prepared._fitted.names, prepared.n_dimensions)))
    return prepared, None


def fitted(text: str, columns: Names, options: dict[str, Any], quiet: bool = False) -> tuple[Prepared, Array]:
    """Fit a density to samples, and return these too."""
    x, files = samples_of(text, columns), files_of(text, None, options)
    with about(**files):
        request, train = request_of(options), Argument.of("train", x.read())._replace(names=x.names)
        with Results("", False, quiet=quiet).progress(x.rows if request.passes[0].moves else 0) as advance:
            return fit(request, train, advance=advance), train.array


class Results(NamedTuple):
    """Where densities go, and how they are written."""

    output: str | None  # None: nowhere
    log: bool
    keep: bool = False
    quiet: bool = False

    def written(
        self, fitted: Callable[[Any], Prepared], points: Source, dtype: str, moved: int = 0, also: Any = len
    ) -> tuple[int, str]:
        """Write densities by batches, and pass them to ``also``; return how many are negative, and what computed it."""
        asked, below, done = points.shaped("query"), 0, 0
        dtype = max(dtype, asked.dtype)  # "float64" > "float32"
        with self.opened(points, dtype) as write, self.progress(points.rows + moved) as advance:
            prepared = fitted(advance)
            ready = prepared._fitted
            ready.asked(asked)
            for rows in points.batches(batch_rows(points.rows, ready.problem, ready.choice.info)):
                batch = Argument.of("query", rows)._replace(first=done)
                part = answered(ready, batch, "log" if self.log else "density").astype(dtype)
                if advance is not None:
                    advance(len(rows))
                below, done = below + undefined(ready.request, part, self.log), done + len(rows)
                write(part), also(part)
            points.check()  # before the output takes its place
        return below, f"{prepared.backend} on {prepared.device}"

    @contextmanager
    def opened(self, points: Source, dtype: Any) -> Iterator[Write]:
        """Open the output for a number per point, after the columns of the points' file if they are to be kept."""
        name, output = "log_density" if self.log else "density", self.output or ""
        as_text = output == "-" or any(extension in output.lower() for extension in (".csv", ".tsv"))
        whole = points.whole or points
        kept = whole if as_text else points
        names, width = kept.names or tuple(f"x{j}" for j in range(kept.columns)), kept.columns + 1
        if self.keep and name in names:
            raise FileError(f"{points.name}: has a column {name!r} already; rename that, or leave out --keep")
        if self.keep and kept.columns < whole.columns:
            raise FileError(f"{output}: --keep writes columns that are no points' to .csv and .tsv only")
        rows = (row for batch in kept.batches() for row in batch)

        def beside(part: Array) -> None:
            joined: Any = [(*row, value) for row, value in zip(islice(rows, len(part)), part)]
            write(joined if as_text else np.reshape(joined, (len(part), width)).astype(dtype))

        if not output:
            yield len
            return
        shape = (points.rows, width) if self.keep else (points.rows,)
        with writing(output, shape, dtype, name, (*names, name) if self.keep else ()) as write:
            yield beside if self.keep else write

    @contextmanager
    def progress(self, steps: int) -> Iterator[Advance | None]:
        """Yield a function to call with every number of rows done: on a terminal, after a second it draws a bar."""
        among = is_stdout(self.output or "") and sys.stdout and sys.stdout.isatty()  # the densities
        shown = not (self.quiet or among) and sys.stderr and sys.stderr.isatty()
        start, bars = time.perf_counter(), list[Any]()

        def show(done: int, rows: int) -> None:
            if shown and not bars and time.perf_counter() - start > 1:
                made = click.progressbar(length=rows, label="sdkde", file=sys.stderr, show_pos=True)
                bars.append(stack.enter_context(made))
            for bar in bars:
                bar.update(done - bar.pos)

        with ExitStack() as stack, watched(show, steps) as advance:
            yield advance


@contextmanager
def picture(output: Path, needs: tuple[str, str], dpi: int) -> Iterator[Any]:
    """Yield pyplot, and write the figure that is drawn with it; ``needs``: as for :func:`.optional`."""
    optional("matplotlib", *needs).use("Agg")
    from matplotlib import pyplot
    from matplotlib.backend_bases import FigureCanvasBase

    check_folder(output)
    kind = output.suffix.lstrip(".").lower()
    if kind not in FigureCanvasBase.filetypes:
        raise FileError(f"{output}: unknown extension {output.suffix!r}; pass one of .png, .pdf, .svg")
    with pyplot.rc_context(STYLE):
        yield pyplot
        with write_atomically(output) as temporary, temporary.open("wb") as file:
            pyplot.gcf().savefig(file, format=kind, dpi=dpi)
        pyplot.close()
