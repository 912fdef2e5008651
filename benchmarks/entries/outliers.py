"""Outliers in real data: how well each method ranks them, beside scikit-learn's detectors.

The sets that scikit-learn bundles, one class as what is usual and a tenth as many of another thrown in; or a table of
yours, of which a column says what is an outlier (1) and what is not (0):

    python -m benchmarks run outliers --set table=mine.csv --set label=column

A table has names in its first line; rows with missing values are left out.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import sdkde_core

from ..registry import REGISTRY, Benchmark, Case, Setting, Skipped
from ..report import Table

Array = NDArray[Any]

#: Bundled sets: the classes that are usual, and the one that is not.
SETS = {"breast_cancer": ((1,), 0), "wine": ((0, 1), 2), "iris": ((0, 1), 2), "digits": ((1, 3, 5, 7), 8)}
COMPONENTS = 16  # principal components of the digits: pixels share a unit, and some are hardly ever inked
SHARE = 0.1  # outliers over the others


def ours(method: str, rule: str) -> Callable[[Array, Array], Array]:
    def score(train: Array, test: Array) -> Array:
        log = method != "laplace"  # negative densities are the most unusual
        return -sdkde_core.estimate(train, test, method=method, bandwidth=rule, log=log)

    return score


def sklearn_kde(train: Array, test: Array) -> Array:
    from sklearn.neighbors import KernelDensity

    return -KernelDensity(bandwidth="silverman").fit(train).score_samples(test)


def forest(train: Array, test: Array) -> Array:
    from sklearn.ensemble import IsolationForest

    return -IsolationForest(random_state=0).fit(train).score_samples(test)


def neighbours(train: Array, test: Array) -> Array:
    from sklearn.neighbors import LocalOutlierFactor

    return -LocalOutlierFactor(novelty=True).fit(train).score_samples(test)


DETECTORS: dict[str, Callable[[Array, Array], Array]] = {
    **{method: ours(method, "auto") for method in ("kde", "sdkde", "laplace")},
    "sdkde, silverman": ours("sdkde", "silverman"),
    "scikit-learn KDE": sklearn_kde,
    "IsolationForest": forest,
    "LOF": neighbours,
}


def cases(setting: Setting) -> Iterator[Case]:
    names = [setting.option("table")] if setting.option("table") else setting.at(["iris"], [*SETS], [*SETS])
    for name in names:
        for way in ("clean", "contaminated"):
            yield from ({"data": Path(name).name, "training": way, "subject": subject} for subject in DETECTORS)


def load(name: str, setting: Setting) -> tuple[Array, Array]:
    """Points (n, d) and which are outliers (n,)."""
    if name not in SETS:
        return read_table(Path(setting.option("table", name)), setting.option("label", "label"))
    from sklearn import datasets

    found = getattr(datasets, f"load_{name}")()
    usual, other = SETS[name]
    keep = np.isin(found.target, (*usual, other))
    return found.data[keep], found.target[keep] == other


def read_table(path: Path, label: str) -> tuple[Array, Array]:
    """A file of comma-separated numbers with names in its first line."""
    table = np.genfromtxt(path, delimiter=",", names=True)
    names = [name for name in table.dtype.names or () if name != label]
    if len(names) == len(table.dtype.names or ()):
        raise ValueError(f"{path} has no column {label!r}; name that of the outliers with --set label=…")
    values = np.stack([table[name] for name in [*names, label]], axis=1)
    values = values[~np.isnan(values).any(axis=1)]
    return values[:, :-1], values[:, -1] > 0


def split(x: Array, odd: Array, way: str, rng: np.random.Generator, share: float) -> tuple[Array, Array, Array]:
    """Training points, test points, and which of those are outliers.

    "clean": seven tenths of what is usual, and the rest with the outliers; "contaminated": all for both. ``share`` is
    that of outliers, over the others, of which so many are drawn at most.
    """
    usual, others = rng.permutation(np.flatnonzero(~odd)), rng.permutation(np.flatnonzero(odd))
    others = others[: max(3, math.ceil(share * len(usual)))]
    cut = 7 * len(usual) // 10 if way == "clean" else 0
    test = np.concatenate([usual[cut:], others])
    train = usual[:cut] if way == "clean" else test
    return x[train], x[test], odd[test]


def standardised(train: Array, test: Array, name: str) -> tuple[Array, Array]:
    """In units of the training points' standard deviations, columns that are constant there dropped."""
    if name == "digits":
        from sklearn.decomposition import PCA

        pca = PCA(COMPONENTS).fit(train)
        train, test = pca.transform(train), pca.transform(test)
        unit = train.std(axis=0).mean()  # one for all: scikit-learn's rules for a bandwidth do not look at units
        return train / unit, test / unit
    kept = train.std(axis=0) > 0
    mean, std = train[:, kept].mean(0), train[:, kept].std(0)
    return (train[:, kept] - mean) / std, (test[:, kept] - mean) / std


def measure(setting: Setting, case: Case) -> dict[str, Any]:
    """ROC-AUC over several random splits: mean and standard deviation; milliseconds of a fit and its scores."""
    try:
        from sklearn.metrics import roc_auc_score
    except ImportError:
        raise Skipped("sklearn is missing: pip install scikit-learn") from None
    x, odd = load(case["data"], setting)
    rng, aucs, times = np.random.default_rng(0), [], []
    for _ in range(setting.at(2, 10, 20)):
        train, test, labels = split(x, odd, case["training"], rng, SHARE if case["data"] in SETS else 1.0)
        train, test = standardised(train, test, case["data"])
        start = time.perf_counter()
        scores = DETECTORS[case["subject"]](train, test)
        times.append(1e3 * (time.perf_counter() - start))
        aucs.append(float(roc_auc_score(labels, scores)))
    about = {"n": len(train), "m": len(test), "d": train.shape[1], "outliers": int(labels.sum())}
    return about | {"auc": float(np.mean(aucs)), "auc_std": float(np.std(aucs)), "ms": float(np.median(times))}


REGISTRY.add(
    Benchmark(
        "outliers",
        "data",
        "Outlier detection on scikit-learn's data sets or your own table: ROC-AUC beside KernelDensity, forests, LOF.",
        cases,
        measure,
        (
            Table(
                "ROC-AUC, mean ± standard deviation over random splits",
                ("data", "training", "n", "d", "outliers"),
                {"": lambda row: f"{row['auc']:.3f} ± {row['auc_std']:.3f}"},
                "subject",
            ),
            Table("Milliseconds of a fit and its scores", ("data", "training"), {"": "ms"}, "subject"),
        ),
    )
)
