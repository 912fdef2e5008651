"""A row whose near columns weigh next to nothing beside one that is taken off as an outlier, and matters as much."""

import math

import numpy as np

from sdkde_core.protocol import TOLERANCES, Reduction
from sdkde_core.testing.problems import Case

#: Near columns that make up their sum, all where the row is.
HEAVY = 128


def some_of_all(limit: float, leaf: int, share: float, precision: str = "fast", away: float = 40.0) -> Case:
    """Make the case, in two dimensions.

    Leaves of columns one bandwidth from the row add ``share`` of the shift's tolerance to the near sum: as much as may
    be left out if the near columns were all. But they are ``away`` / 2 bandwidths from the mean of all columns, so
    leaving them out moves that by ``away`` / 4 times the share.

    Parameters
    ----------
    limit : float
        Beyond this extent the core takes columns off.
    leaf : int
        Columns that a backend leaves out together.
    share : float
    precision : str
    away : float
        Distance of the outlier.
    """
    at, leaves, tolerance = np.array([limit - 1.0, 0.0]), 50, TOLERANCES[precision][Reduction.MEAN].absolute
    points = np.repeat(at + np.array([[0.0, 0.0], [-1.0, 0.0], [away, 0.0]]), [HEAVY, leaves * leaf, 1], axis=0)
    log_w = np.repeat(
        [0.0, math.log(HEAVY * share * tolerance / (leaves * leaf)) + 0.5, math.log(HEAVY) + 0.5 * away**2],
        [HEAVY, leaves * leaf, 1],
    )
    mixed = np.random.default_rng(0).permutation(len(points))
    return Case("some of all", points[mixed], np.repeat(at[None], 64, axis=0), (log_w - log_w[-1])[mixed])
