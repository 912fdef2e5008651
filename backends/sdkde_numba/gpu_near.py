"""Only the pairs that matter (:mod:`sdkde_core.nearby`): for every tile of rows, the tiles of columns to sum over.

A tile of rows is what a block has, a tile of columns what is in shared memory at a time; both are neighbours in order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from sdkde_core.nearby import Index, Lists, index, lists
from sdkde_core.protocol import Problem

from .gpu_launch import height_of
from .gpu_space import LaunchConfig

__all__ = ["Near", "find", "order_columns", "rows_at_once", "takes"]

#: Rows that are first looked at together, the fewest of a slab, and pairs of tiles that are looked at in one go: these
#: take some 200 bytes each, but for those that are far from all rows of a group.
GROUP, LOOKED = 256, 1 << 25

#: Dimensions up to which leaving tiles out can pay.
MOST = 16


class Near(NamedTuple):
    """Columns in order."""

    tiles: Index
    points: torch.Tensor  # (n, d)
    log_weights: torch.Tensor  # (n,)

    def tensors(self) -> list[torch.Tensor]:
        """Return what is on the device."""
        tiles = (*self.tiles.fine, *self.tiles.coarse)
        return [self.tiles.order, self.points, self.log_weights, *tiles]


def takes(problem: Problem, columns: bool) -> bool:
    """Whether tiles are left out of a problem, of all its rows; ``columns``: these are the columns."""
    known = columns or "exclude_self" not in problem.requires  # where a row's own column is
    # In other dimensions it does not pay, and lists are read back.
    return known and 2 <= problem.d <= MOST


def order_columns(points: torch.Tensor, log_weights: torch.Tensor, size: int) -> Near | None:
    """Put columns in order, in tiles of ``size``; None where a coordinate or weight is not finite."""
    if not bool(torch.isfinite(points).all() & torch.isfinite(log_weights).all()):
        return None
    found = index(points, log_weights, size)
    return Near(found, points[found.order], log_weights[found.order])


def rows_at_once(near: Near, height: int) -> int:
    """Return for how many rows to make lists at a time: whole groups, and halves of them are too."""
    groups = LOOKED * height // (GROUP * near.tiles.fine.log_weight.shape[0])
    return GROUP << max(0, groups.bit_length() - 1)


def find(problem: Problem, near: Near, rows: torch.Tensor, config: LaunchConfig) -> Lists:
    """Return the lists of some rows in order, (m, d), tile by tile."""
    return lists(problem, near.tiles, rows, height_of(config, problem.d), GROUP)
