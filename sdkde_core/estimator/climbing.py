"""Modes of a fitted density, and the mode that each point climbs to.

Modes are found by mean shift (Comaniciu and Meer, "Mean shift: a robust approach toward feature space analysis", 2002):
a row moves to the mean of the samples under its kernel weights, which never lowers a density of normal kernels. Of
kernels of several widths each counts by its share over its squared width.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from ..arrays import Argument, Array, to_host
from ..engine.groups import Group
from ..protocol import Columns
from .fitted import loaded
from .mapped import unwrapped
from .mixture import check_positive, local, places


def modes(fitted: Any, starts: Array | None = None) -> Array:
    """The local maxima that are reached (k, d), highest first, from ``starts`` (m, d), or 512 kernels' places."""
    check_positive(fitted, "mean shift may lower it")
    fitted = unwrapped(fitted)
    kernels = places(fitted, 512, np.random.default_rng(0))
    return climb(fitted, kernels if starts is None else starts, np.ptp(kernels, axis=0))[0]


def climb(fitted: Any, starts: Array, scale: Array, together: bool = False) -> tuple[Array, Array]:
    """Modes (k, d), highest first, and for each of ``starts`` (m, d) the index of its mode (m,), −1 without one.

    Steps are the mean shift's, times Barzilai and Borwein's factor ("Two-point step size gradient methods", 1988) where
    that is below half a bandwidth. ``together``: rows that meet within a quarter of a kernel's width go on as one, and
    the factor is at most 64 and doubles with every step.
    """
    rows, scale = np.array(starts, dtype=float), np.where(scale == 0.0, 1.0, scale)  # squares of data units overflow
    log, slope, unit = local(fitted, Argument.of("query", rows), scale)
    going = np.flatnonzero(np.isfinite(log))  # where the density is 0 there is no way up
    leader, which, longer = np.arange(len(rows)), np.full(len(rows), -1), np.ones(len(rows))
    most, least, apart = (64.0, 1e-5, 1e-2) if together else (1e3, 1e-7, 1e-4)
    within, shortest, been, before = (lambda x: x), (lambda x: x), rows.copy(), np.zeros_like(rows)
    if fitted.coordinates is not None:
        within, shortest = fitted.coordinates.within, fitted.coordinates.shortest
    for _ in range(300 if together else 5000):
        if not going.size:
            break
        step = np.linalg.solve(unit[going], slope[going][:, :, None])[:, :, 0]
        lengths = np.sqrt(np.einsum("mi,mij,mj->m", step, unit[going], step))  # in bandwidths
        if not together:
            gone = (rows[going] - been[going]) / scale
            bent, square = (np.einsum("mi,mij,mj->m", gone, unit[going], v) for v in (before[going] - step, gone))
            factor = np.where(bent > 0.0, np.clip(square / bent, 0.1, most), 4.0 * np.maximum(longer[going], 1.0))
            longer[going] = np.where(square > 0.0, np.minimum(factor, most), longer[going])
            been[going], before[going] = rows[going], step
        longer[going] = np.minimum(longer[going], np.maximum(0.5 / (lengths + 1e-9), 1.0))
        tried = within(rows[going] + longer[going, None] * step * scale)
        step = (within(rows[going] + step * scale) - rows[going]) / scale
        still = np.sqrt(np.einsum("mi,mij,mj->m", step, unit[going], step)) > least
        there = local(fitted, Argument.of("query", tried), scale)
        better = there[0] >= log[going] - 1e-12 * (1.0 + abs(log[going]))
        longer[going] *= np.where(better, 2.0 if together else 1.0, 0.5)
        longer[going] = np.minimum(longer[going], most)
        moved = going[better]
        rows[moved], log[moved], slope[moved], unit[moved] = (x[better] for x in (tried, *there))
        going = going[still & (longer[going] > 1e-9)]
        if together and going.size:
            here = cells(fitted, rows[going], 0.25)[0]
            _, first, met = np.unique(here, axis=0, return_index=True, return_inverse=True)
            leader[going] = going[first[met.reshape(-1)]]
            going = going[first]
    while (leader != leader[leader]).any():
        leader = leader[leader]
    arrived = np.unique(leader[np.isfinite(log)])
    if not together and len(going) < len(arrived):  # rows that are still on their way are at no maximum
        arrived = np.setdiff1d(arrived, going)
    if fitted.coordinates is not None:  # of circles, that went round
        rows = fitted.coordinates.inverse(fitted.coordinates.forward(rows))
    kept: list[int] = []
    order = np.argsort(-log[arrived], kind="stable")
    if together:  # modes of one height are in the order of their places, whatever rounding says
        order = np.lexsort((*rows[arrived].T[::-1], -np.round(log[arrived], 4)))
    for i in arrived[order]:
        away = (shortest(rows[i] - rows[k]) / scale for k in kept)
        same = next((place for place, v in enumerate(away) if v @ unit[i] @ v <= apart), len(kept))
        which[i] = same
        kept += [int(i)] * (same == len(kept))
    return rows[kept], which[leader]


def clusters(fitted: Any, points: Array) -> tuple[Array, Array]:
    """Modes (k, d), highest first, and for each of the points (m, d) the index of its mode (m,), −1 without one.

    In up to four dimensions points of one cell of half a kernel's width go from its middle, and the way up is by the
    samples of such cells at their mean; only the last part, from where they arrive, is by all samples.
    """
    check_positive(fitted, "mean shift may lower it")
    fitted = unwrapped(fitted)
    scale = np.ptp(places(fitted, 512, np.random.default_rng(0)), axis=0)
    labels, few = np.full(len(points), -1), points.shape[1] <= 4
    lattice, size = cells(fitted, points, 0.5)
    inside = np.isfinite(lattice).all(axis=1)
    starts, which = points[inside], np.arange(np.count_nonzero(inside))
    if few:
        taken, which = np.unique(lattice[inside], axis=0, return_inverse=True)
        starts = to_host(fitted.centre) + fitted.bandwidth.stretch(size * (taken + 0.5))
        if fitted.coordinates is not None:
            ends = fitted.coordinates.ends
            starts = fitted.coordinates.inverse(starts if ends is None else np.clip(starts, *ends))
    found, reached = climb(_for_rows(fitted, few), starts, scale, together=True)
    if few:
        found, last = climb(_for_rows(fitted), found, scale, together=True)
        reached = np.append(last, -1)[reached]
    labels[inside] = reached[which.reshape(-1)]
    return found, labels


def cells(fitted: Any, points: Array, size: float) -> tuple[Array, float]:
    """The cells (m, d) that points (m, d) lie in, and their size in bandwidths; ``size`` is in narrowest kernels."""
    inner = fitted if fitted.coordinates is None else fitted.first.current
    size *= min((group.scale for group in inner.groups), default=1.0)
    z = points if fitted.coordinates is None else fitted.coordinates.forward(points)
    return np.floor(fitted.bandwidth.whiten(z, to_host(fitted.centre)) / size), size


def _for_rows(fitted: Any, binned: bool = False) -> Any:
    """The density with the best backend for a thousand rows a hundred times; ``binned``: see :func:`_binned`."""
    if fitted.coordinates is not None:
        return type(fitted)(_for_rows(fitted.first.current, binned), fitted.coordinates, fitted.problem.n)
    if fitted.parts:
        return fitted.each([_for_rows(part.fitted, binned) for part in fitted.parts])
    request, bandwidth, problem, _, centre, groups, names = fitted.state("auto")
    if binned:
        groups = tuple(group._replace(columns=_binned(group)) for group in groups)
        problem = replace(problem, requires=problem.requires | {"weights"})
    asked = replace(problem, n=groups[0].n, m=min(problem.m, 1000))
    return loaded(replace(request, calls=100), bandwidth, asked, "auto", centre, groups, names)


def _binned(group: Group) -> Columns:
    """The columns of a group, those in cells of half a kernel's width as one, at their mean."""
    points, weights = group.columns.points, np.exp(group.columns.log_weights)
    points, weights = points[weights > 0.0], weights[weights > 0.0]
    which = np.unique(np.floor(2.0 / group.scale * points), axis=0, return_inverse=True)[1].reshape(-1)
    mass = np.bincount(which, weights)
    means = np.stack([np.bincount(which, weights * column) / mass for column in points.T], axis=1)
    return Columns(means, np.log(mass))
