"""Ways to the exponents t_ij = −½‖u_i − x_j‖² + log w_j of a tile.

A formula packs points as float64 on whatever device they are into rows and columns on the device that computes, and
turns a slice of either into a tile. :func:`make` takes what ``bounds.formula`` names.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sdkde_core.protocol import Problem

from .bounds import grid

__all__ = [
    "CLAMP",
    "NOTHING",
    "Direct",
    "Expanded",
    "Formula",
    "Packed",
    "Pairs",
    "Split",
    "difference",
    "exponential",
    "high_low",
    "make",
    "norms",
]

#: Log weight of a column that is to add nothing, and the exponent of an entry left out: finite, since −inf − −inf would
#: be NaN.
NOTHING = {torch.float32: -1e30, torch.float64: -1e300}


#: exp of less is several times slower on a CPU.
CLAMP = {torch.float32: -87.0, torch.float64: -700.0}

#: Dimensions that are summed by themselves: sums of many terms lose digits.
BLOCK = 32


class Packed(NamedTuple):
    """Points on the device that computes: ``left`` of a first, ``right`` of a second product or what replaces them."""

    left: Tensor
    right: Tensor | None = None

    def at(self, which: slice | Tensor) -> Packed:
        """Some of the points."""
        if isinstance(which, slice):
            return Packed(self.left[which], None if self.right is None else self.right[which])
        return Packed(
            self.left.index_select(0, which), None if self.right is None else self.right.index_select(0, which)
        )


class Formula:
    """One way of computing exponents; ``dtype`` is a tile's."""

    dtype: torch.dtype
    device: torch.device

    def rows(self, points: Tensor) -> Packed:
        """Pack rows, (m, d) float64."""
        raise NotImplementedError

    def columns(self, points: Tensor, log_weights: Tensor | None) -> Packed:
        """Pack columns, (n, d) float64, and what is added to their exponents, (n,) float64."""
        raise NotImplementedError

    def exponents(self, rows: Packed, columns: Packed, out: Tensor | None = None) -> Tensor:
        """Return a tile of exponents."""
        raise NotImplementedError

    def peaks(self, rows: Packed, columns: Packed, own: Tensor | None, out: Tensor | None = None) -> Tensor:
        """Return every row's base in a tile, (m, 1): the base of all tiles is their largest. ``own`` masks entries."""
        tile = _masked(self.exponents(rows, columns, out), own)
        return tile.amax(1, keepdim=True)

    def relative(self, rows: Packed, columns: Packed, base: Tensor, out: Tensor | None = None) -> Tensor:
        """Return a tile of exponents less their row's base, (m, 1): with more digits where the formula has them."""
        return self.exponents(rows, columns, out).sub_(base)

    def _place(self, *parts: Tensor) -> Tensor:
        """Columns side by side, rounded where they were (float64 may be missing where they go) and moved."""
        return torch.cat([p if p.ndim == 2 else p[:, None] for p in parts], 1).to(self.dtype).to(self.device)


class Expanded(Formula):
    """One matrix product: rows [u, 1, −½‖u‖²] by columns [x, −½‖x‖² + log w, 1]."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device

    def rows(self, points: Tensor) -> Packed:
        return Packed(self._place(points, torch.ones_like(points[:, :1]), norms(points)))

    def columns(self, points: Tensor, log_weights: Tensor | None) -> Packed:
        constant = norms(points) if log_weights is None else norms(points) + log_weights
        return Packed(self._place(points, constant, torch.ones_like(points[:, :1])))

    def exponents(self, rows: Packed, columns: Packed, out: Tensor | None = None) -> Tensor:
        return torch.mm(rows.left, columns.left.T, out=out)


class Split(Formula):
    """Every coordinate as u = a + b, a on a grid so coarse that the products of the a's are summed without error.

    A first product, rows [a, 1, −½‖a‖²] by columns [a, c, 1], is exact in whatever order it is summed, and so is its
    difference from its row's largest. c is −½‖a‖² and the log weight's multiple of the grid. The second product adds
    what is left, a_i·b_j + b_i·x_j and the rest of norms and log weights, smaller by 2⁻¹⁰ in float32.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, extent: float, span: float) -> None:
        self.dtype, self.device = dtype, device
        self.step = grid(extent, str(dtype).removeprefix("torch."), span)

    def rows(self, points: Tensor) -> Packed:
        a, b, one = *self._parts(points), torch.ones_like(points[:, :1])
        return Packed(self._place(a, one, norms(a)), self._place(a, b, one, _norm_rest(a, b)))

    def columns(self, points: Tensor, log_weights: Tensor | None) -> Packed:
        a, b, one = *self._parts(points), torch.ones_like(points[:, :1])
        coarse, rest = norms(a), _norm_rest(a, b)
        if log_weights is not None:
            unit = 0.5 * self.step**2
            leading = (log_weights / unit).round() * unit
            coarse, rest = coarse + leading, rest + (log_weights - leading)
        return Packed(self._place(a, coarse, one), self._place(b, points, rest, one))

    def exponents(self, rows: Packed, columns: Packed, out: Tensor | None = None) -> Tensor:
        tile = torch.mm(rows.left, columns.left.T, out=out)
        return self._second(tile, rows, columns)

    def peaks(self, rows: Packed, columns: Packed, own: Tensor | None, out: Tensor | None = None) -> Tensor:
        return _masked(torch.mm(rows.left, columns.left.T, out=out), own).amax(1, keepdim=True)

    def relative(self, rows: Packed, columns: Packed, base: Tensor, out: Tensor | None = None) -> Tensor:
        tile = torch.mm(rows.left, columns.left.T, out=out).sub_(base)
        return self._second(tile, rows, columns)

    @staticmethod
    def _second(tile: Tensor, rows: Packed, columns: Packed) -> Tensor:
        assert rows.right is not None and columns.right is not None  # as packed above
        return tile.addmm_(rows.right, columns.right.T)

    def _parts(self, points: Tensor) -> tuple[Tensor, Tensor]:
        coarse = (points / self.step).round() * self.step
        return coarse, points - coarse


class Direct(Formula):
    """Differences first, one dimension at a time, in float64: right to rounding of r² at any extent."""

    pieces = 1  # numbers that a coordinate is

    def __init__(self, device: torch.device) -> None:
        self.dtype, self.device = torch.float64, device

    def rows(self, points: Tensor) -> Packed:
        return Packed(self._place(points))

    def columns(self, points: Tensor, log_weights: Tensor | None) -> Packed:
        return Packed(self.rows(points).left, None if log_weights is None else self._place(log_weights))

    def exponents(self, rows: Packed, columns: Packed, out: Tensor | None = None) -> Tensor:
        if out is None:
            out = rows.left.new_empty(len(rows.left), len(columns.left))
        out.zero_() if columns.right is None else out.copy_(columns.right[:, 0].expand_as(out))
        d = rows.left.shape[1] // self.pieces
        away: Tensor | None = None
        part = out if d <= BLOCK else torch.empty_like(out)
        for start in range(0, d, BLOCK):
            if part is not out:
                part.zero_()
            for k in range(start, min(start + BLOCK, d)):
                away = difference(rows, columns, k, away, d * (self.pieces - 1))
                part.addcmul_(away, away, value=-0.5)
            if part is not out:
                out.add_(part)
        return out


class Pairs(Direct):
    """As :class:`Direct`, of coordinates that are two float32 numbers each, for devices without float64.

    The difference of the first numbers is right to rounding of itself, that of the second is added: r² is right to some
    ε of itself, at any extent.
    """

    pieces = 2

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.dtype = torch.float32

    def rows(self, points: Tensor) -> Packed:
        return Packed(self._place(*high_low(points)))


def make(name: str, problem: Problem, device: torch.device, span: float) -> Formula:
    """Return the formula that ``bounds.formula`` named."""
    kind, _, dtype = name.partition(" ")
    if kind == "expanded":
        return Expanded(getattr(torch, dtype), device)
    if kind == "split":
        return Split(getattr(torch, dtype), device, problem.extent, span)
    return Pairs(device) if dtype == "pairs" else Direct(device)


def difference(rows: Packed, columns: Packed, k: int, out: Tensor | None, low: int = 0) -> Tensor:
    """Return x_jk − u_ik, (rows, columns); with ``low``, coordinate k + low is what the first number left of it."""
    out = torch.sub(columns.left[:, k], rows.left[:, k, None], out=out)
    if low:
        out.add_(columns.left[:, k + low]).sub_(rows.left[:, k + low, None])
    return out


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


def norms(points: Tensor) -> Tensor:
    """−½‖u‖², (n,)."""
    return -0.5 * (points * points).sum(1)


def _norm_rest(a: Tensor, b: Tensor) -> Tensor:
    """−½(‖a + b‖² − ‖a‖²), (n,)."""
    return -((a + 0.5 * b) * b).sum(1)


def _masked(tile: Tensor, own: Tensor | None) -> Tensor:
    return tile if own is None else tile.masked_fill_(own, NOTHING[tile.dtype])
