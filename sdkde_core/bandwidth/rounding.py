"""Rounded columns: their unit, and values spread within it, as a bandwidth is chosen for what was rounded."""

from __future__ import annotations

import numpy as np

from ..arrays import Array


def units_of(ordered: Array) -> Array:
    """The unit of every column of sorted values (n, d): what all differences are multiples of; 0 where there is none.

    One that is so fine that hardly any values could be equal is none.
    """
    gaps, ranges, n = np.diff(ordered, axis=0), ordered[-1] - ordered[0], len(ordered)
    apart = gaps > 1e-12 * ranges
    fine = ranges / (100.0 * n + 1000.0)
    result = np.zeros(len(ranges))
    for j in np.flatnonzero(~(apart & (gaps <= fine)).any(axis=0) & (ranges > 0.0) & (ranges < np.inf)):
        steps = np.unique(gaps[apart[:, j], j])
        unit = steps[0] if n > 2 else 0.0
        while unit > fine[j]:  # Euclid's algorithm, with differences rounded as those of float32 are
            over = np.abs(steps - unit * np.round(steps / unit))
            over = over[over > 2e-3 * unit]
            if not over.size:
                result[j] = ranges[j] / round(ranges[j] / unit)
                break
            unit = over.min()
    return result


def spread_within(x: Array, units: Array, weights: Array | None) -> Array:
    """Values (n, d) of rounded columns spread evenly within their unit, in an order that all rows decide."""
    rounded, result = np.flatnonzero(units), x.copy()
    low = x[:, rounded].min(axis=0)
    cells = x.copy()
    cells[:, rounded] = np.round((x[:, rounded] - low) / units[rounded])
    share = np.ones(len(x)) if weights is None else weights
    order = np.lexsort([share, *cells.T])
    for j in rounded:
        scattered = np.random.default_rng(int(j)).random(len(x))
        place = order[np.lexsort([scattered, cells[order, j]])]
        reached = np.cumsum(share[place])
        first = np.flatnonzero(np.diff(cells[place, j], prepend=-1.0))
        count = np.diff(np.append(first, len(x)))
        total = np.add.reduceat(share[place], first)
        before = np.repeat(reached[first] - share[place][first], count)
        result[place, j] += units[j] * ((reached - 0.5 * share[place] - before) / np.repeat(total, count) - 0.5)
    return result
