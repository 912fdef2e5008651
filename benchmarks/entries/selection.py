"""Which of many embeddings to keep: rare kinds as well as common ones, and little noise, by their density.

The benchmark makes embeddings of 384 dimensions: topics of very different sizes, near-duplicates, noise. Or those of
yours, an array (n, d) saved by NumPy; the rows that are kept go to a file:

    python -m benchmarks run selection --set embeddings=mine.npy --set keep=1000 --set out=kept.npy

A row is drawn with a probability that falls with its log density, exp(−z) of the standardised logs; the least dense
hundredth is left out as noise. Densities are of the embeddings as they are, or of their first 16 principal components.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import sdkde_core

from ..registry import REGISTRY, Benchmark, Case, Setting
from ..report import Table
from ..timing import seconds_of

Array = NDArray[Any]

TOPICS, NOISE, COPIES, D = 40, 0.01, 0.2, 384
LEFT_OUT = 0.01


@functools.lru_cache(maxsize=1)
def made(n: int, d: int = D) -> tuple[Array, Array]:
    """Unit vectors (n, d) and their topics, −1 for noise: sizes fall as 1/rank; some are near-copies of others."""
    rng = np.random.default_rng(0)
    centres, shares = rng.normal(size=(TOPICS, d)), 1 / np.arange(1, TOPICS + 1)
    topics = rng.choice(TOPICS, n, p=shares / shares.sum())
    basis = rng.normal(size=(TOPICS, 12, d)) / np.sqrt(12)  # a topic varies in few directions
    x = centres[topics] + 0.1 * rng.normal(size=(n, d))
    for topic in range(TOPICS):
        rows = np.flatnonzero(topics == topic)
        x[rows] += 0.5 * rng.normal(size=(len(rows), 12)) @ basis[topic]
    copies = rng.choice(n, int(COPIES * n), replace=False)
    source = rng.integers(0, n, len(copies))
    x[copies], topics[copies] = x[source] + 0.01 * rng.normal(size=(len(copies), d)), topics[source]
    noise = rng.choice(n, int(NOISE * n), replace=False)
    x[noise], topics[noise] = 2 * rng.normal(size=(len(noise), d)), -1
    return (x / np.linalg.norm(x, axis=1, keepdims=True)).astype("float32"), topics


def cases(setting: Setting) -> Iterator[Case]:
    name = setting.option("embeddings")
    size = {"embeddings": Path(name).name} if name else {"embeddings": "made", "n": setting.at(400, 8000, 100_000)}
    yield size | {"subject": "at random", "columns": "all"}
    for columns in ("all", "16"):
        yield from (size | {"subject": method, "columns": columns} for method in ("kde", "sdkde", "laplace"))


def measure(setting: Setting, case: Case) -> dict[str, Any]:
    name = setting.option("embeddings")
    x, topics = (np.load(name), None) if name else made(case["n"])
    keep, rng = int(setting.option("keep", str(len(x) // 10))), np.random.default_rng(1)
    z = x if case["columns"] == "all" else components(x, int(case["columns"]))
    weights(z + 0.01, case["subject"], setting.device)  # compiles
    seconds, odds = seconds_of(lambda: weights(z, case["subject"], setting.device), setting.device)
    kept = rng.choice(len(x), keep, replace=False, p=odds)
    if out := setting.option("out"):
        np.save(Path(out).with_stem(f"{Path(out).stem}-{case['subject'].replace(' ', '-')}-{case['columns']}"), kept)
    found = {"kept": keep, "n": len(x), "d": z.shape[1], "ms": 1e3 * seconds, "away": away(x, kept)}
    if topics is None:
        return found
    counts = np.bincount(topics[kept][topics[kept] >= 0], minlength=TOPICS) / keep
    entropy = -float((counts[counts > 0] * np.log(counts[counts > 0])).sum())
    return found | {
        "topics": int((counts > 0).sum()),
        "balance": np.exp(entropy),
        "noise": float((topics[kept] < 0).mean()),
    }


def weights(z: Array, subject: str, device: str) -> Array:
    """The probability of each row."""
    if subject == "at random":
        return np.full(len(z), 1 / len(z))
    how: dict[str, Any] = {"method": subject, "bandwidth": "silverman-iso", "device": device}
    logs = np.asarray(sdkde_core.estimate(z, log=True, **how), dtype=np.float64)
    logs = np.where(np.isnan(logs), np.nanmin(logs), logs)  # Laplace is negative: as rare as the rarest
    odds = np.exp(-(logs - logs.mean()) / max(logs.std(), 1e-12))
    odds[logs < np.quantile(logs, LEFT_OUT)] = 0.0
    return odds / odds.sum()


def components(x: Array, count: int) -> Array:
    """The first principal components."""
    centred = x - x.mean(axis=0)
    _, vectors = np.linalg.eigh(centred.T @ centred)
    return np.ascontiguousarray(centred @ vectors[:, -count:])


def away(x: Array, kept: Array, most: int = 2000) -> float:
    """The mean distance of (some of) the rows to the nearest one that is kept."""
    some, norms = x[np.linspace(0, len(x) - 1, min(most, len(x))).astype(int)], (x[kept] ** 2).sum(1)
    squares = norms - 2 * some @ x[kept].T + (some**2).sum(1)[:, None]
    return float(np.sqrt(np.maximum(squares.min(1), 0)).mean())


REGISTRY.add(
    Benchmark(
        "selection",
        "data",
        "Selection of a tenth of many embeddings (d = 384, or your own) by their density.",
        cases,
        measure,
        (
            Table(
                "What is kept: topics of 40, their effective number, the share of noise, the mean distance to it",
                ("subject", "columns", "n", "kept"),
                {"topics": "topics", "effective": "balance", "noise": "noise", "distance": "away", "ms": "ms"},
            ),
        ),
        gpu=True,
    )
)
