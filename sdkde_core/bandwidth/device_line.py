"""One column on a CUDA device: its samples are put in order there, and a backend's kernels say what bandwidths do."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from ..arrays import Array, to_host
from ..engine.devices import on_device
from ..engine.launches import Lists, Varying
from .line import FOLDS, RULES, STEP, LeftOut, Line, Looks
from .normal import reference
from .rounding import units_of
from .sample import SEED, Sample, drawn, most_of

_lists = Lists(False)

TOO_MANY = "the samples take more bins than a device's kernels have"


class DeviceLine(Line):
    """As :class:`.Line`, by a backend's kernels: of all values of one column, where equal ones are in one fold.

    All sums that :class:`.Looks` needs are read at once, with the ends and quartiles, which the sample gets. ``good``:
    the column needs no preparation on the host, as a rounded one does.
    """

    good = False

    def __init__(self, sample: Sample, rule: str) -> None:
        given = sample.given[:, 0]
        taken, self._index = _once(sample.n, given.device)
        some = () if taken is None else (given[taken].sort().values,)
        self._given = given.sort().values, given.std(correction=0), *some
        self.method, self.score, self._kernels = sample.method, sample.moves[1], sample.kernels
        self._criterion, self._last = RULES.index(rule), 0 if rule == "auto" else 5
        n = len(self._index)
        low, high, std, quartile, between, close, odd, distinct, squares = self._ask(reference(self.method, n))
        sample.ends, self.n, self.n_eff = np.array([[low], [high], [quartile]]), int(distinct), n**2 / squares
        if 1e-140 < std < 1e140:  # else squares of the data are none
            sample.measured = np.array([[std], [0.0], [between]]) / sample.unit
            self.unit = float(sample.spread()[0])
            exact = close or (n <= 1000 and not units_of(self._values()[:, None]).any())
            # The host takes values for equal that differ by less than its rounding.
            self.good = bool(self.n >= FOLDS and exact and not odd)

    def samples(self) -> tuple[Array, Array]:
        return self._values() / self.unit, np.full(len(self._index), 1.0 / len(self._index))

    def left_out(self, looks: Looks, k: int) -> LeftOut:
        if looks.unit != self._asked:  # many samples are equal, so the unit is another
            self._ask(looks.unit)
        if k not in self._sums:  # the kernels searched on where the host's search ended: end theirs there too
            self._ask(looks.unit, min(j for j in looks.known if (looks.last - j) % 3 == 0))
        if np.isnan(self._sums[k]).any():
            raise RuntimeError(TOO_MANY)
        return self.said(looks.width(k), *self._sums[k].T[:5])

    def deviations(self, looks: Looks, pilot: int) -> Callable[[int], tuple[float, ...]]:
        own, *rows = self._expected[pilot]
        if np.isnan(rows).any():
            raise RuntimeError(TOO_MANY)
        found = {pilot + k: (x[0] - 2.0 * x[1] + own[0], x[0], x[5]) for k, x in enumerate(rows, -4)}
        return found.__getitem__

    def _values(self) -> Array:
        """The samples in order, in data units."""
        return self._few if len(self._few) else to_host(self._given[2 if len(self._given) > 2 else 0])

    def _ask(self, unit: float, end: int = -31) -> Array:
        """Ask what :class:`Looks` looks at, in its first search down to ``end``; return statistics of the samples."""
        if end == -31:
            self._asked, self._sums, self._expected = unit, dict[int, Array](), dict[int, Array]()
        steps, search = range(self._last, end - 1, -3), self._kernels.line_search
        how = steps, self._last, FOLDS, self._criterion, self.method, self.score
        every, std, *some = self._given
        first = Varying.of(unit * math.exp(STEP * self._last), len(self._given))

        def launch() -> tuple[Any, bool]:
            return search(every, std, self._index, (first, STEP), *how, *some), True

        with on_device(every):
            key = search, len(every), *how
            found = to_host(_lists.serve(key, (*self._given, first), launch, lambda read: True))
        pilots = 0 if self._criterion else 1 if self.method == "laplace" else 2
        sizes = 3, 9, FOLDS, 6 * FOLDS * len(steps), 30 * FOLDS, 60 * pilots
        picks, statistics, held, thirds, near, expected, self._few = np.split(found, np.cumsum(sizes))
        self.held = held / len(self._index)
        for of, sums in ((steps, thirds), (range(int(picks[0]) - 2, int(picks[0]) + 3), near)):
            self._sums = dict(zip(of, sums.reshape(FOLDS, -1, 6).swapaxes(0, 1))) | self._sums
        self._expected |= {int(j): rows for j, rows in zip(picks[1:], expected.reshape(-1, 10, 6))}
        return statistics


@functools.lru_cache(4)
def _once(n: int, place: Any) -> tuple[Any, Any]:
    """Which of n samples are looked at, None: all; and a permutation, as of :func:`.selection.distinct`."""
    rng, most, torch = np.random.default_rng(SEED), most_of(1), sys.modules["torch"]
    taken = torch.from_numpy(drawn(n, most, rng)).to(place) if n > most else None
    return taken, torch.from_numpy(rng.permutation(min(n, most))).to(place)
