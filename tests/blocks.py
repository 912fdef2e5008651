"""The NumPy backend with the feature "pairs": it reduces one side of a block, then the other."""

from dataclasses import replace

import numpy as np
from sdkde_numpy import backend, info

from sdkde_core.protocol import Columns

INFO = replace(info.INFO, features=info.INFO.features | {"pairs"})


class NumpyBackend(backend.NumpyBackend):
    def reduce_pairs(self, problem, state, rows, columns):
        weights = np.full(len(state.points), state.uniform) if state.log_weights is None else state.log_weights

        def side(some, over):
            block = Columns(state.points[slice(*over)], weights[slice(*over)])
            asked = replace(problem, m=some[1] - some[0], n=over[1] - over[0], same=False)
            packed = backend.NumpyBackend.prepare(self, asked, block)  # not a subclass's, whose states differ
            return backend.NumpyBackend.reduce(self, asked, state.points[slice(*some)], packed, some[0] - over[0])

        first = side(rows, columns)
        return first, first if rows == columns else side(columns, rows)
