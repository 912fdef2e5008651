"""Real sets that scikit-learn bundles, for held-out likelihoods."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["REAL", "split"]

REAL = ("digits", "iris", "wine", "breast_cancer", "diabetes")
COMPONENTS = 16  # of the digits' pixels

Array = NDArray[Any]


def split(name: str, rng: np.random.Generator) -> tuple[Array, Array]:
    """Return a random four fifths and the rest, (n, d) and (m, d).

    Columns are in units of the former's standard deviations, and dropped where they are constant there. Digits are in
    their first principal components: pixels share a unit, and some are hardly ever inked.
    """
    from sklearn import datasets
    from sklearn.decomposition import PCA

    values = getattr(datasets, f"load_{name}")().data
    train, test = np.split(values[rng.permutation(len(values))], [len(values) * 4 // 5])
    if name == "digits":
        project = PCA(COMPONENTS).fit(train)
        return project.transform(train), project.transform(test)
    kept = np.ptp(train, axis=0) > 0
    mean, std = train[:, kept].mean(0), train[:, kept].std(0)
    return (train[:, kept] - mean) / std, (test[:, kept] - mean) / std
