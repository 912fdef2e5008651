"""Sums of a block of rows over all columns, tile by tile.

A tile is a block of rows by :data:`bounds.CHUNK` columns. Nearly every row has a column near it, so exponents are first
taken as they are, without a pass for their largest: rows whose sum is too small to have kept its digits are then summed
again relative to their largest exponent.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from sdkde_core.plugin import checkpoint, cpu_threads, exponents, put
from sdkde_core.protocol import Columns, Partial, Problem, Reduction

from .bounds import CHUNK, formula, refines, terms_at_once
from .devices import Place

Packed = exponents.Packed

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
        parts = [first, *(first.new_full((len(first),), p) if isinstance(p, float) else p for p in others)]
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


class Prepared:
    """Columns packed for the fastest formula that keeps the precision, on the device that computes.

    ``single``: whether products of float32 are exact there.
    """

    def __init__(self, problem: Problem, columns: Columns, where: Place, single: bool, memory: int) -> None:
        points, log_weights = columns.points.detach(), columns.log_weights.detach()
        self.problem, self.given, self.place, self.single, self.memory = problem, columns, where, single, memory
        self.laplace, self.mean = (problem.reduction is r for r in (Reduction.LAPLACE, Reduction.MEAN))
        weighted, span = "weights" in problem.requires, 0.0
        if weighted:
            carries = log_weights > NOTHING[torch.float32]  # with "grad" some are −inf
            span = float(-torch.where(carries, log_weights, 0.0).min())
        device, self.double = where
        name = formula(problem, span, single=single, double=self.double)
        if not name:  # beyond float32: the points are on the host, as float64
            device, self.double = points.device, True
            name = formula(problem, span, single=single, double=True)
        kind, _, dtype_name = name.partition(" ")
        dtype, direct = getattr(torch, dtype_name), kind == "direct"
        self.library = Tensors(dtype, device)
        self.formula: exponents.Formula = (exponents.Direct if direct else exponents.Expanded)(self.library)
        if kind == "split":
            step = exponents.grid(problem.extent, 24 if dtype == torch.float32 else 53, span)
            self.formula = exponents.Split(self.library, step)
        # Direct differences hold so far from every column that exponents are below float32's −1e30; split squares
        # divide by their grid, and −1e300 would overflow.
        added = log_weights.clamp(min=NOTHING[dtype if direct else torch.float32]) if weighted else None
        self.uniform = 0.0 if weighted else log_weights[0]
        self.n, self.columns = len(points), self.formula.columns(points, None if self.laplace else added)
        # (n, d + 1) what φ is multiplied by, of the tile's dtype: points and a one. None: a one alone
        self.right = self.library.place(points, 1.0) if self.mean and not direct else None
        # (n,) of the tile's dtype; LAPLACE alone, whose exponents come without them
        self.log_weights = self.library.place(added)[:, 0] if self.laplace and added is not None else None
        in_pairs = dtype == torch.float32 and refines(problem)
        self.pairs = Packed(self.library.place(*high_low(points))) if in_pairs else None  # for a shift's second pass
        #: Terms of a shift that are added one after another.
        self.part = terms_at_once(problem, dtype_name)

    def height(self, m: int) -> int:
        """Rows of a block, of m; it follows from the problem, the options and the number of threads."""
        buffers = 1 + self.laplace * (1 + (self.log_weights is not None))
        buffers += 2 * isinstance(self.formula, exponents.Direct)
        buffers += self.right is not None and self.part < CHUNK  # what parts add up to
        elements, on_cpu = self.memory // (buffers * self.library.dtype.itemsize), self.library.device.type == "cpu"
        most = max(1, elements // (cpu_threads() if on_cpu else 1) // min(self.n, CHUNK))
        # On a CPU a tile fits a core's cache, and there are 64 blocks.
        return min(most, (1 << 18) // CHUNK, max(64, -(-m // 64))) if on_cpu else most

    def sums(self, points: Tensor, has_own_term: bool) -> Partial:
        """Sum a block of rows, (b, d) float64.

        With ``has_own_term`` every row is a column too, and all weights are equal: then no sum is small.
        """
        rows = self.formula.rows(points)
        if self.pairs is not None:
            return self._relative(points, rows)
        sums = self._add_up(self._tile_sums(rows, *tile) for tile in self._tiles(len(points)))
        total, result = self._result(points, sums, torch.zeros_like(sums[:, 0]), 0.0)
        if has_own_term:
            return result
        # Rows with a smaller sum are summed again. Terms that underflow, or are clamped at exp(−87) = 1.6e-38 or
        # exp(−700) = 1e-304, are below 2e-7 or 1e-14 of a larger sum. MEAN multiplies them by coordinates, as large as
        # the extent: its threshold is as many times higher.
        least = self.n * (1e-31 if self.library.dtype == torch.float32 else 1e-290)
        least *= max(1.0, self.problem.extent) if self.mean else 1.0
        if self.mean and isinstance(self.formula, exponents.Split):
            least = max(least, 1e-8)  # its exponents are rounded in proportion to themselves, which moves a shift
        again = (total < least).nonzero()[:, 0]
        if len(again):
            put(result, again, self._relative(points[again], rows.at(again.to(self.library.device))))
        return result

    def _relative(self, points: Tensor, rows: Packed) -> Partial:
        """As :meth:`sums`, relative to each row's largest exponent, which two passes find before the sums."""
        m, base, top = len(points), self._largest(rows), None
        if self.log_weights is not None or isinstance(self.formula, exponents.Split):
            top = self._largest(rows, base)
        sums = self._add_up(self._tile_sums(rows, *tile, base, top) for tile in self._tiles(m))
        at_base = self._to_result(base[:, 0])
        total, result = self._result(points, sums, at_base, 0.0 if top is None else self._to_result(top[:, 0]))
        pairs = self.pairs
        if pairs is None:
            return result
        # Add Σφ (x − mean) / Σφ to the mean: these differences are small, so float32 keeps their digits.
        anchors = Packed(self.library.place(*high_low(points + result.shift)))

        def moved(some: slice, out: Tensor) -> Tensor:
            phi = exponential(self._exponents(rows, some, out, base).sub_(top), in_place=True)
            return exponents.displacement(self.library, phi, anchors, pairs.at(some), pieces=2)

        correction = self._add_up(moved(*tile) for tile in self._tiles(m)) / total[:, None]
        return Partial(result.log_sum, shift=result.shift + correction)

    def _largest(self, rows: Packed, base: Tensor | None = None) -> Tensor:
        """Each row's largest exponent, (m, 1): of the first products, or less the base, all of it."""
        largest = rows.left.new_full((len(rows.left), 1), NOTHING[self.library.dtype])
        for some, out in self._tiles(len(rows.left)):
            if base is None:
                tile = self.formula.first(rows, self.columns.at(some), out)
            else:
                tile = self._exponents(rows, some, out, base)
                tile = tile if self.log_weights is None else tile.add_(self.log_weights[some])
            largest = torch.maximum(largest, tile.amax(1, keepdim=True))
        return largest

    def _tiles(self, m: int) -> Iterator[tuple[slice, Tensor]]:
        """Columns and buffer of every tile."""
        width = min(self.n, CHUNK)
        buffer = torch.empty(m * width, dtype=self.library.dtype, device=self.library.device)
        for start in range(0, self.n, width):
            checkpoint()
            some = slice(start, min(start + width, self.n))
            yield some, buffer[: m * (some.stop - start)].view(m, some.stop - start)

    def _exponents(self, rows: Packed, some: slice, out: Tensor, base: Tensor | None) -> Tensor:
        """A tile of exponents less their row's base, (m, 1), if any: with more digits where the formula has them."""
        columns = self.columns.at(some)
        tile = self.formula.first(rows, columns, out)
        return self.formula.second(tile if base is None else tile.sub_(base), rows, columns)

    def _tile_sums(self, rows: Packed, some: slice, out: Tensor, base: Any = None, top: Any = None) -> Tensor:
        """Return the sums of a tile, (rows, k): Σφ times ``right``; LAPLACE: Σφ and Σφ (−½ r² − base).

        φ is exp(exponent − base − top), both (rows, 1). By differences MEAN has Σφ (x − u), dimension by dimension,
        before Σφ. ``out`` is a buffer.
        """
        tile = self._exponents(rows, some, out, base)
        terms = tile if self.log_weights is None else tile + self.log_weights[some]
        if top is not None:
            terms = terms - top if self.laplace and terms is tile else terms.sub_(top)
        phi = exponential(terms, in_place=not self.laplace or terms is not tile)
        if self.laplace:
            if tile.device.type == "cpu":  # what was clamped is next to nothing, but not times any exponent
                phi = torch.nn.functional.threshold(phi, 1.001 * math.exp(CLAMP[tile.dtype]), 0.0)
            return torch.stack([phi.sum(1), phi.mul_(tile).sum(1)], 1)
        if self.right is not None:
            return _in_parts(phi, self.right[some], self.part)
        sums = phi.sum(1, keepdim=True)
        if self.mean:
            sums = torch.cat([exponents.displacement(self.library, phi, rows, self.columns.at(some)), sums], 1)
        return sums

    def _add_up(self, tiles: Iterator[Tensor]) -> Tensor:
        """Add the sums of one or more tiles, as :meth:`_to_result` has them."""
        high = next(tiles)
        if self.double:
            high = high.double()
            for x in tiles:
                high.add_(x)
            return high
        low = torch.zeros_like(high)
        for x in tiles:
            total = high + x  # the rounding error of a sum is a float32 number too
            back = total - high
            low = low + ((high - (total - back)) + (x - back))
            high = total
        return high.cpu().double() + low.cpu().double()

    def _to_result(self, x: Tensor) -> Tensor:
        """Return x in float64: on the device, or on the host where the device has no float64."""
        return x.double() if self.double else x.cpu().double()

    def _result(self, points: Tensor, sums: Tensor, base: Tensor, top: Tensor | float) -> tuple[Tensor, Partial]:
        """Return Σφ and the log-domain results; both and ``sums`` are relative to exp(base + top)."""
        log_scale = base + top + self.uniform
        if self.laplace:
            total = sums[:, 0]
            return total, exponents.laplace(self.problem.d, total, sums[:, 1] + base * total, log_scale)
        total, shift = sums[:, -1], None
        if self.mean:
            shift = sums[:, :-1] / torch.where(total > 0, total, 1.0)[:, None]
            if not isinstance(self.formula, exponents.Direct):
                # As the means were rounded, where they were: a point's own term cancels.
                exact = self.pairs is not None or self.library.dtype == torch.float64
                shift = shift - (points if exact else points.to(self.library.dtype).double())
        return total, Partial(total.log() + log_scale, shift=shift)


def _in_parts(phi: Tensor, right: Tensor, part: int) -> Tensor:
    """Return φ times ``right``, with no more than ``part`` terms added one after another."""
    if len(right) <= part:
        return phi @ right
    if right.shape[1] > part:  # parts side by side would take more memory than φ
        total = phi[:, :part] @ right[:part]
        for start in range(part, len(right), part):
            total = torch.addmm(total, phi[:, start : start + part], right[start : start + part])
        return total
    whole = len(right) // part * part
    parts = phi[:, :whole].unflatten(1, (-1, part)).transpose(0, 1) @ right[:whole].unflatten(0, (-1, part))
    total = parts.sum(0)
    return total if whole == len(right) else total + phi[:, whole:] @ right[whole:]
