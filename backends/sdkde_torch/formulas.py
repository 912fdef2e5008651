"""The formulas of exponents (:mod:`sdkde_core.engine.exponents`) with PyTorch's operations on tiles."""

from __future__ import annotations

import torch
from torch import Tensor

#: Log weight of a column that is to add nothing, and the exponent of an entry left out: finite, since −inf − −inf would
#: be NaN.
NOTHING = {torch.float32: -1e30, torch.float64: -1e300}

#: exp of less is several times slower on a CPU.
CLAMP = {torch.float32: -87.0, torch.float64: -700.0}


class Tensors:
    """Operations on tiles of one dtype on one device; see :class:`sdkde_core.engine.exponents.Library`."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device

    def place(self, first: Tensor, *others: Tensor | float) -> Tensor:
        """Rounded where they were (float64 may be missing where they go), and moved."""
        n = len(first)
        parts = [first, *(first.new_full((n,), p) if isinstance(p, float) else p for p in others)]
        return torch.cat([p if p.ndim == 2 else p[:, None] for p in parts], 1).to(self.dtype).to(self.device)

    def product(self, a: Tensor, b: Tensor, out: Tensor | None) -> Tensor:
        return torch.mm(a, b, out=out)

    def add_product(self, tile: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return tile.addmm_(a, b.T)

    def empty(self, rows: Tensor, columns: Tensor) -> Tensor:
        return rows.new_empty(len(rows), len(columns))

    def subtract(self, x: Tensor, u: Tensor, out: Tensor | None) -> Tensor:
        return torch.sub(x, u[:, None], out=out)

    def add_square(self, tile: Tensor, away: Tensor) -> None:
        tile.addcmul_(away, away)

    def dot(self, phi: Tensor, away: Tensor) -> Tensor:
        return away.mul_(phi).sum(1)


def exponential(tile: Tensor, in_place: bool) -> Tensor:
    """Return exp of a tile; of less than :data:`CLAMP` on a CPU what it is there: next to nothing, and not slow."""
    if tile.device.type != "cpu":
        return tile.exp_() if in_place else tile.exp()
    clamped = tile.clamp_(min=CLAMP[tile.dtype]) if in_place else tile.clamp(min=CLAMP[tile.dtype])
    return clamped.exp_()


def high_low(points: Tensor) -> tuple[Tensor, Tensor]:
    """float64 numbers as float32 ones and what these leave, both still float64."""
    high = points.float().double()
    return high, points - high
