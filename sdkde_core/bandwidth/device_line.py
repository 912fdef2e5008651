"""One column on a CUDA device: its samples are put in order there, and a backend's kernels say what bandwidths do."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from ..arrays import Array, to_host
from ..engine.devices import on_device
from ..engine.launches import Lists, Varying
from .line import FOLDS, STEP, LeftOut, Line, Looks
from .rounding import units_of
from .sample import SEED, Sample, drawn, most_of

_lists = Lists(False)

TOO_MANY = "the samples take more bins than a device's kernels have"


class DeviceLine(Line):
    """As :class:`.Line`, by a backend's kernels: of all values of one column, where equal ones are in one fold.

    ``good``: the column needs no preparation on the host, as a rounded one does. The sample is told its ends and
    quartiles. Bandwidths are in ``unit``, data units.
    """

    def __init__(self, sample: Sample) -> None:
        torch, n, given = sys.modules["torch"], sample.n, sample.given[:, 0]
        self.kernels, self.method, self.unit = sample.kernels, sample.method, 1.0
        self._sums, self._expected = dict[int, Array](), dict[int, Array]()
        every, places = given.sort().values, [0.25 * (n - 1), 0.75 * (n - 1)]
        taken, index, split = _once(n, given.device)
        x = every if taken is None else given[taken].sort().values
        gaps, k = x.diff(), len(x)
        parts = gaps / (x[-1] - x[0])
        close = (parts > 1e-12) & (parts <= 1.0 / (100.0 * k + 1000.0))  # see units_of
        counted = torch.stack([close, gaps == 0.0, parts < 1e-15]).sum(1, dtype=x.dtype)
        ranks = [i for place in places for i in (int(place), min(int(place) + 1, n - 1))]
        found = given.std(correction=0), given[0], *(every[i] for i in (0, -1, *ranks))
        near, equal, alike, std, first, low, high, *at = torch.cat([counted, torch.stack(found)]).tolist()
        sample.ends = np.array([[low], [high], [first]])
        if 1e-140 < std < 1e140:  # else squares of the data are none
            quartiles = [a + place % 1.0 * (b - a) - first for place, a, b in zip(places, at[::2], at[1::2])]
            sample.measured = np.array([std, *quartiles])[:, None] / sample.unit
        if equal:
            split = _split(index, (x.diff(prepend=x[:1]) != 0.0).cumsum(0))
        self.values, self.n, (self.folds, self.others, self.held, self.n_eff) = x, k - int(equal), split
        exact = near or (n <= 1000 and not units_of(to_host(x)[:, None]).any())
        # The host takes values for equal that differ by less than its rounding.
        self.good = bool(self.n >= FOLDS and exact and alike == equal and 1e-140 < std < 1e140)

    def samples(self) -> tuple[Array, Array]:
        return to_host(self.values) / self.unit, np.full(len(self.values), 1.0 / len(self.values))

    def left_out(self, looks: Looks, k: int) -> LeftOut:
        if k not in self._sums:  # not yet, or it would go on where the host's search has ended: then that is cut short
            self._search(looks, min((j for j in looks.known if (looks.last - j) % 3 == 0), default=-31))
        if np.isnan(self._sums[k]).any():
            raise RuntimeError(TOO_MANY)
        return self.said(looks.width(k), *self._sums[k].T[:5])

    def deviations(self, looks: Looks, pilot: int) -> Callable[[int], tuple[float, ...]]:
        own, *rows = self._expected[pilot]
        if np.isnan(rows).any():
            raise RuntimeError(TOO_MANY)
        found = {pilot + k: (x[0] - 2.0 * x[1] + own[0], x[0], x[5]) for k, x in enumerate(rows, -4)}
        return found.__getitem__

    def _search(self, looks: Looks, end: int) -> None:
        """Ask what :class:`Looks` looks at, if its first search goes down to the step ``end``, and read it at once."""
        steps = range(looks.last, end - 1, -3)
        search, folds = self.kernels.line_search, len(self.held)
        how = steps, looks.last, LeftOut._fields.index(looks.criterion), self.method, self.score
        given = self.values, self.folds, self.others, looks.width(steps[0]) * self.unit, self.n_eff

        def launch() -> tuple[Any, bool]:
            *arrays, h, n_eff = (Varying.of(x, i) if isinstance(x, float) else x for i, x in enumerate(given))
            return search(*arrays, (h, STEP), n_eff, *how), True

        with on_device(self.values):
            read = _lists.serve((search, len(self.values), folds, *how), given, launch, lambda read: True)
        found, a, b = to_host(read), 6 * folds * len(steps), 6 * folds * (len(steps) + 5)
        for of, sums in ((steps, found[:a]), (range(int(found[-3]) - 2, int(found[-3]) + 3), found[a:b])):
            self._sums = dict(zip(of, sums.reshape(folds, -1, 6).swapaxes(0, 1))) | self._sums
        self._expected |= {int(j): rows for j, rows in zip(found[-2:], found[b:-3].reshape(-1, 10, 6))}


@functools.lru_cache(4)
def _once(n: int, place: Any) -> tuple[Any, ...]:
    """Which of n samples are looked at, None: all; a permutation, as of :func:`.selection.distinct`; their split."""
    rng, most, torch = np.random.default_rng(SEED), most_of(1), sys.modules["torch"]
    taken = torch.from_numpy(drawn(n, most, rng)).to(place) if n > most else None
    index = torch.from_numpy(rng.permutation(min(n, most))).to(place)
    return taken, index, _split(index, torch.arange(len(index), device=place))


def _split(index: Any, value: Any) -> tuple[Any, ...]:
    """Samples' folds, by the number of their value (n,), the others' shares; on the host folds' shares, and n_eff.

    The i-th of k values is in the fold of the i-th number below k in the permutation ``index``.
    """
    torch, n, there = sys.modules["torch"], len(index), index <= value[-1]
    # Numbers that are not below k go to the first place, which nothing is read from.
    folds = index.new_empty(n + 1).scatter_(0, there.cumsum(0) * there, index % FOLDS)[1:][value]
    shares = (folds[:, None] == torch.arange(FOLDS, device=index.device)).mean(0, dtype=torch.float64)
    others = 1.0 - shares  # before the host waits: kept for other streams
    often = torch.zeros_like(value).index_add_(0, value, torch.ones_like(value)).double()
    *held, squares = torch.cat([shares, often.dot(often)[None]]).tolist()
    return folds, others, np.array(held), n**2 / squares
