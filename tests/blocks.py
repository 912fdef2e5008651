"""The NumPy backend with the feature "pairs": it reduces one side of a block, then the other."""

from dataclasses import replace

import numpy as np
from sdkde_numpy import backend, info

from sdkde_core.protocol import Columns

INFO = replace(info.INFO, features=info.INFO.features | {"pairs"})


class NumpyBackend(backend.NumpyBackend):
    def reduce_pairs(self, problem, state, rows, columns):
        points, logs = state.points, state.log_weights
        logs = np.full(problem.n, state.uniform) if logs is None else logs
        pairs = (slice(*rows), slice(*columns)), (slice(*columns), slice(*rows))
        states = [self.prepare(problem, Columns(points[over], logs[over])) for _, over in pairs]
        return tuple(backend.NumpyBackend.reduce(self, problem, points[some], s) for (some, _), s in zip(pairs, states))
