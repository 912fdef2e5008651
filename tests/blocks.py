"""The NumPy backend with the feature "pairs": it reduces one side of a block, then the other."""

from dataclasses import replace

import numpy as np
from sdkde_numpy import backend, info

from sdkde_core.protocol import Columns

INFO = replace(info.INFO, features=info.INFO.features | {"pairs"})


class NumpyBackend(backend.NumpyBackend):
    def reduce_pairs(self, problem, state, rows, columns):
        logs = np.full(problem.n, state.uniform) if state.log_weights is None else state.log_weights
        first, other = (
            backend.NumpyBackend.reduce(
                self,
                replace(problem, m=some[1] - some[0], n=over[1] - over[0], same=False),
                state.points[slice(*some)],
                self.prepare(problem, Columns(state.points[slice(*over)], logs[slice(*over)])),
            )
            for some, over in ((rows, columns), (columns, rows))
        )
        return first, first if rows == columns else other
