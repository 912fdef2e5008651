"""Real sets that scikit-learn bundles, for held-out likelihoods."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["REAL", "split"]

REAL = ("digits", "iris", "wine", "breast_cancer", "diabetes")
COMPONENTS = 16  # of the digits' 61 pixels that vary

Array = NDArray[Any]


def split(name: str, rng: np.random.Generator) -> tuple[Array, Array]:
    """Return a random four fifths and the rest, (n, d) and (m, d), in units of the former's standard deviations.

    Columns that are constant there are dropped; digits are in their first principal components.
    """
    from sklearn import datasets
    from sklearn.decomposition import PCA

    values = getattr(datasets, f"load_{name}")().data
    order = rng.permutation(len(values))
    train, test = np.split(values[order], [len(values) * 4 // 5])
    kept = np.ptp(train, axis=0) > 0
    mean, std = train[:, kept].mean(0), train[:, kept].std(0)
    train, test = (train[:, kept] - mean) / std, (test[:, kept] - mean) / std
    if train.shape[1] > 2 * COMPONENTS:
        project = PCA(COMPONENTS).fit(train)
        train, test = project.transform(train), project.transform(test)
    return train, test
