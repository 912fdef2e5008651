"""The NumPy backend with the feature "pairs": it reduces one side of a block, then the other."""

from dataclasses import replace

from sdkde_numpy import backend, info

INFO = replace(info.INFO, features=info.INFO.features | {"pairs"})


class NumpyBackend(backend.NumpyBackend):
    def reduce_pairs(self, problem, state, rows, columns):
        first, other = (
            self._sums(problem, state.points[slice(*some)], state, some[0], over)
            for some, over in ((rows, columns), (columns, rows))
        )
        return first, first if rows == columns else other
