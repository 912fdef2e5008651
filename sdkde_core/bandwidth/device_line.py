"""One column on a CUDA device: its samples are put in order there, and a backend's kernels say what bandwidths do."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..arrays import Array, to_host
from .line import FOLDS, TOO_MANY, LeftOut, Line
from .rounding import units_of
from .sample import SEED, Sample, drawn, most_of


class DeviceLine(Line):
    """As :class:`.Line`, by a backend's kernels: of the distinct values of one column, and how often each occurs.

    ``good``: the column needs no preparation on the host, as a rounded one does. The sample is told its ends and
    quartiles. Bandwidths are in ``unit``, data units.
    """

    together, unit = 9, 1.0

    def __init__(self, sample: Sample) -> None:
        torch, n, given = sys.modules["torch"], sample.n, sample.given[:, 0]
        self.kernels, self.method = sample.kernels, sample.method
        every, places = given.sort().values, [0.25 * (n - 1), 0.75 * (n - 1)]
        x = every if n <= most_of(1) else given[_taken(n, given.device)].sort().values
        gaps, length = x.diff(), x[-1] - x[0]
        close = (gaps > 1e-12 * length) & (gaps <= length / (100.0 * len(x) + 1000.0))  # see units_of
        ranks = [k for place in places for k in (int(place), min(int(place) + 1, n - 1))]
        found = close.any(), (gaps == 0.0).sum(), (gaps < 1e-15 * length).sum(), given.std(correction=0), given[0]
        numbers = torch.stack([*found, *(every[k] for k in (0, -1, *ranks))]).tolist()
        near, equal, alike, std, first, low, high, *at = numbers
        sample.ends = np.array([[low], [high], [first]])
        if 1e-140 < std < 1e140:  # else squares of the data are none
            quartiles = [a + place % 1.0 * (b - a) - first for place, a, b in zip(places, at[::2], at[1::2])]
            sample.measured = np.array([std, *quartiles])[:, None] / sample.unit
        if equal:
            self.values, self.counts = torch.unique_consecutive(x, return_counts=True)
        else:
            self.values, self.counts = x, torch.ones_like(x, dtype=torch.int64)
        self.n, self.total = len(self.values), len(x)
        exact = near or (n <= 1000 and not units_of(to_host(x)[:, None]).any())
        # The host takes values for equal that differ by less than its rounding.
        self.good = bool(self.n >= 5 and exact and alike == equal and 1e-140 < std < 1e140)
        folds, self.folds = _folds(n, self.n, x.device)
        often = to_host(self.counts) if equal else None
        self.n_eff = self.total**2 / float(self.n if often is None else often @ often)
        self.held = np.bincount(folds, often) / self.total
        self.others = torch.from_numpy(1.0 - self.held).to(x.device)

    def samples(self) -> tuple[Array, Array]:
        return to_host(self.values) / self.unit, to_host(self.counts) / self.total

    def left_out(self, bandwidths: Sequence[float]) -> list[LeftOut]:
        given = self.values, self.counts, self.folds, self.others, self.total, bandwidths, self.unit
        found = to_host(self.kernels.line_left_out(*given, self.method, self.score))
        return [self.said(h, *sums.T) for h, sums in zip(bandwidths, found.swapaxes(0, 1))]

    def pilot(self, h: float) -> float:
        return h * self.unit

    def deviations(self, pilot: float, widths: Sequence[float]) -> list[tuple[float, ...]]:
        given = self.values, self.counts, self.total, pilot, widths
        found = to_host(self.kernels.line_deviations(*given, self.method, self.score))
        if np.isnan(found).any():
            raise RuntimeError(TOO_MANY)
        return list(map(tuple, found))


@functools.lru_cache(4)
def _taken(n: int, place: Any) -> Any:
    return sys.modules["torch"].from_numpy(drawn(n, most_of(1), np.random.default_rng(SEED))).to(place)


@functools.lru_cache(4)
def _folds(n: int, distinct: int, place: Any) -> tuple[Any, Any]:
    """The fold of each of so many distinct samples, as of :func:`.selection.distinct`, on the host and there."""
    rng = np.random.default_rng(SEED)
    if n > most_of(1):
        drawn(n, most_of(1), rng)
    folds = rng.permutation(distinct) % min(FOLDS, distinct)
    return folds, sys.modules["torch"].from_numpy(folds).to(place)
