"""Several groups of columns at once, each with rows of its own: by the kernels that go through lists.

The groups stand one after another, each filled up to whole SIZEs, and so do the tiles of their rows: the list of a tile
names all leaves of its group.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from sdkde_core.plugin import PerStream, concatenate
from sdkde_core.protocol import Columns, Partial, Problem

from . import launch, near
from .bounds import packed_dimensions
from .space import HEIGHT, LEAF, LISTED


@dataclass(frozen=True, eq=False)
class Groups:
    """Columns of several groups, and where each begins, in SIZEs; then the end."""

    points: torch.Tensor  # (n, d) float64
    log_weights: torch.Tensor  # (n,)
    begins: tuple[int, ...]
    span: float  # largest magnitude of a log weight, nats, rounded up
    made: PerStream = field(default_factory=PerStream)


def gathered(groups: Sequence[Columns]) -> Groups:
    """Put groups one after another."""
    begins = (0, *itertools.accumulate(-(-g.points.shape[0] // LISTED) for g in groups))
    first, size = groups[0].points, begins[-1] * LISTED
    points = first.new_zeros((size, first.shape[1]))
    log_weights = first.new_full((size,), -60000.0 * math.log(2.0))  # 2^−60000: no column, as padding is
    for group, begin in zip(groups, begins):
        here = slice(begin * LISTED, begin * LISTED + group.points.shape[0])
        points[here], log_weights[here] = group.points, group.log_weights
    least = float(torch.stack([g.log_weights.min() for g in groups]).min())
    return Groups(points, log_weights, begins, float(math.ceil(max(0.0, -least))))


def reduce(problem: Problem, rows: torch.Tensor, groups: Groups, step: float, form: int, pieces: int) -> Partial:
    """Reduce rows (k, m, d), each group's over its columns: log sums (k, m), and shifts (k, m, d)."""
    (k, m, d), points, log_weights = rows.shape, groups.points, groups.log_weights
    high = -(-m // HEIGHT)  # tiles of a group
    rows = torch.nn.functional.pad(rows, (0, 0, 0, high * HEIGHT - m)).reshape(-1, d)
    scaled = near.scaled(problem)

    def pack(points: torch.Tensor, **more: Any) -> launch.Packed:
        return launch.pack(problem, points, step, log_weights, pieces, scaled=scaled, **more)

    columns = groups.made.get((step, pieces, scaled), lambda: pack(points, columns=True), points)
    packed = pack(rows)
    # Lists are not looked for: of Near only points and weights count.
    way = near.Pass(problem, near.Near(points, points, log_weights, points, points, 0.0), columns, step, form)
    lists = groups.made.get((problem.reduction, m), lambda: _lists(way, groups, k, high), points)
    whole = concatenate([way.sum(rows[a * HEIGHT : b * HEIGHT], packed, over) for a, b, over in lists])
    shift = None if whole.shift is None else whole.shift.reshape(k, -1, d)[:, :m]
    return Partial(whole.log_sum.reshape(k, -1)[:, :m], shift)


def _lists(way: near.Pass, groups: Groups, k: int, high: int) -> list[tuple[int, int, near.Lists]]:
    """All leaves of its group for every tile of rows: some tiles at a time, from the first up to the last."""
    device, together = groups.points.device, LISTED // LEAF
    sizes = torch.tensor([b - a for a, b in itertools.pairwise(groups.begins)])
    counts, starts = sizes.repeat_interleave(high), torch.tensor(groups.begins[:k]).repeat_interleave(high)
    found = []
    lasts, length = near.planned(counts.numpy(), device, 4 * (packed_dimensions(way.problem.d) + 1), way.longest)
    for first, last in zip((0, *lasts), lasts):
        here = counts[first:last]
        ends = torch.nn.functional.pad(here.cumsum(0), (1, 0))
        tile = torch.arange(len(here)).repeat_interleave(here * together).to(device)
        place = torch.arange(len(tile), device=device) + ((starts[first:last] - ends[:-1]) * together).to(device)[tile]
        which = here.argsort(descending=True, stable=True).to(torch.int32).to(device)
        parts = max(1, -(-int(here.max()) // length))
        found.append((first, last, near.Lists(place.int(), ends.int().to(device), which, first, length, parts)))
    return found
