"""Sums of a block of rows over all columns, tile by tile.

A tile is a block of rows by :data:`bounds.CHUNK` columns. Nearly every row has a column near it, so exponents are first
taken as they are, without a pass for their largest: rows whose sum is too small to have kept its digits are then summed
again relative to their largest exponent.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sdkde_core.plugin import checkpoint, cpu_threads, exponents
from sdkde_core.protocol import Problem, Reduction

from .bounds import CHUNK, terms_at_once
from .formulas import CLAMP, NOTHING, Tensors, exponential, high_low

Formula = exponents.Formula
Packed = exponents.Packed


class Summed(NamedTuple):
    """Sums of rows, float64: all relative to exp(log_scale)."""

    total: Tensor  # (m,) Σ w φ
    moment: Tensor | None  # (m,) LAPLACE: Σ w φ (−½ r²)
    mean: Tensor | None  # (m, d) MEAN: Σ w φ x / Σ w φ, or the shift itself where it is summed by differences
    log_scale: Tensor  # (m,)


@dataclass(frozen=True)
class Prepared:
    """Columns packed on the device that computes, for one reduction."""

    problem: Problem  # as given to ``prepare``
    formula: Formula
    library: Tensors
    columns: Packed
    right: Tensor | None  # (n, k) what φ is multiplied by, of the tile's dtype: points and a one. None: a one alone
    log_weights: Tensor | None  # (n,) of the tile's dtype; LAPLACE alone, whose exponents come without them
    pairs: Packed | None  # points as pairs, for a shift's second pass
    double: bool  # the device adds up in float64
    memory: int  # bytes that temporaries may take

    def height(self, m: int) -> int:
        """Rows of a block, of m; it follows from the problem, the options and the number of threads."""
        laplace = self.problem.reduction is Reduction.LAPLACE
        buffers = 1 + laplace * (1 + (self.log_weights is not None)) + 2 * isinstance(self.formula, exponents.Direct)
        buffers += self.right is not None and self.part < CHUNK  # what parts add up to
        elements = self.memory // (buffers * torch.finfo(self.library.dtype).bits // 8)
        if self.library.device.type == "cpu":
            elements //= cpu_threads()
        most = max(1, elements // min(self.count, CHUNK))
        if self.library.device.type != "cpu":
            return most
        return min(most, (1 << 18) // CHUNK, max(64, -(-m // 64)))  # a tile fits a core's cache; for 64 blocks

    @functools.cached_property
    def part(self) -> int:
        """Terms of a shift that are added one after another, see :func:`bounds.terms_at_once`."""
        return terms_at_once(self.problem, str(self.library.dtype).removeprefix("torch."))

    @property
    def count(self) -> int:
        return len(self.columns.left)

    def sums(self, points: Tensor, has_own_term: bool) -> Summed:
        """Sum a block of rows, (b, d) float64.

        With ``has_own_term`` every row is a column too, and all weights are equal: then no sum is small.
        """
        rows = self.formula.rows(points)
        if self.pairs is not None:
            return self._relative(rows)
        sums = self._add_up(rows)
        result = self._summed(sums, torch.zeros_like(sums[:, 0]), torch.zeros_like(sums[:, 0]))
        if has_own_term:
            return result
        # Rows with a smaller sum are summed again. Terms that underflow, or are clamped at exp(−87) = 1.6e-38 or
        # exp(−700) = 1e-304, are below 2e-7 or 1e-14 of a larger sum. MEAN multiplies them by coordinates, as large as
        # the extent: its threshold is as many times higher.
        mean = self.problem.reduction is Reduction.MEAN
        least = self.count * (1e-31 if self.library.dtype == torch.float32 else 1e-290)
        least *= max(1.0, self.problem.extent) if mean else 1.0
        if mean and isinstance(self.formula, exponents.Split):
            least = max(least, 1e-8)  # its exponents are rounded in proportion to themselves, which moves a shift
        small = result.total < least
        again = small.nonzero()[:, 0]
        if not len(again):
            return result
        better = self._relative(rows.at(again.to(self.library.device)))
        for mine, other in zip(result, better):
            if mine is not None and other is not None:
                mine.index_copy_(0, again, other)
        return result

    def _relative(self, rows: Packed) -> Summed:
        """As :meth:`sums`, relative to each row's largest exponent, which two passes find before the sums."""
        base = self._largest(rows)
        top = None
        if self.log_weights is not None or isinstance(self.formula, exponents.Split):
            top = self._largest(rows, base)
        sums = self._add_up(rows, base, top)
        at_base = self._to_result(base[:, 0])
        log_scale = at_base if top is None else at_base + self._to_result(top[:, 0])
        result = self._summed(sums, at_base, log_scale)
        return result if self.pairs is None else self._refined(result, rows, base, top)

    def _largest(self, rows: Packed, base: Tensor | None = None) -> Tensor:
        """Each row's largest exponent, (m, 1): of the first products, or less the base, all of it."""
        m = len(rows.left)
        largest = torch.full((m, 1), NOTHING[self.library.dtype], dtype=self.library.dtype, device=self.library.device)
        for some, out in self._tiles(m):
            if base is None:
                tile = self.formula.first(rows, self.columns.at(some), out)
            else:
                tile = _relative(self.formula, rows, self.columns.at(some), base, out)
                tile = tile if self.log_weights is None else tile.add_(self.log_weights[some])
            largest = torch.maximum(largest, tile.amax(1, keepdim=True))
        return largest

    def _tiles(self, m: int) -> Iterator[tuple[slice, Tensor]]:
        """Columns and buffer of every tile."""
        width = min(self.count, CHUNK)
        buffer = torch.empty(m * width, dtype=self.library.dtype, device=self.library.device)
        for start in range(0, self.count, width):
            checkpoint()
            some = slice(start, min(start + width, self.count))
            yield some, buffer[: m * (some.stop - start)].view(m, some.stop - start)

    def _add_up(self, rows: Packed, base: Any = None, top: Any = None) -> Tensor:
        """Return the sums over all columns, (m, k), as :meth:`_to_result` has them."""
        total = _Total(self.double)
        for some, out in self._tiles(len(rows.left)):
            total.add(self._tile_sums(rows, some, base, top, out))
        return self._to_result(total.result())

    def _tile_sums(self, rows: Packed, some: slice, base: Any, top: Any, out: Tensor) -> Tensor:
        """Return the sums of a tile, (rows, k): Σφ times ``right``; LAPLACE: Σφ and Σφ (−½ r² − base).

        φ is exp(exponent − base − top), both (rows, 1). By differences MEAN has Σφ (x − u), dimension by dimension,
        before Σφ. ``out`` is a buffer.
        """
        laplace, columns = self.problem.reduction is Reduction.LAPLACE, self.columns.at(some)
        tile = _relative(self.formula, rows, columns, base, out)
        terms = tile if self.log_weights is None else tile + self.log_weights[some]
        if top is not None:
            terms = terms - top if laplace and terms is tile else terms.sub_(top)
        phi = exponential(terms, in_place=not laplace or terms is not tile)
        if laplace:
            if tile.device.type == "cpu":  # what was clamped is next to nothing, but not times any exponent
                phi = torch.nn.functional.threshold(phi, 1.001 * math.exp(CLAMP[tile.dtype]), 0.0)
            return torch.stack([phi.sum(1), phi.mul_(tile).sum(1)], 1)
        if self.right is not None:
            return _in_parts(phi, self.right[some], self.part)
        sums = phi.sum(1, keepdim=True)
        if self.problem.reduction is Reduction.MEAN:
            moved = exponents.displacement(self.library, phi, rows, columns)
            sums = torch.cat([moved, sums], 1)
        return sums

    def _summed(self, sums: Tensor, base: Tensor, log_scale: Tensor) -> Summed:
        """Take the columns of ``sums`` apart: points, one; LAPLACE: one, moment."""
        if self.problem.reduction is Reduction.LAPLACE:
            total = sums[:, 0].clone()
            return Summed(total, sums[:, 1] + base * total, None, log_scale)
        total, mean = sums[:, -1].clone(), None
        if self.problem.reduction is Reduction.MEAN:
            mean = sums[:, :-1] / torch.where(total > 0, total, 1.0)[:, None]
        return Summed(total, None, mean, log_scale)

    def _refined(self, first: Summed, rows: Packed, base: Tensor, top: Any) -> Summed:
        """Add Σφ (x − mean) / Σφ to the mean: these differences are small, so float32 keeps their digits."""
        assert self.pairs is not None and first.mean is not None
        anchors = Packed(self.library.place(*high_low(first.mean)))
        total = _Total(self.double)
        for some, out in self._tiles(len(rows.left)):
            phi = _relative(self.formula, rows, self.columns.at(some), base, out).sub_(top)
            phi = exponential(phi, in_place=True)
            total.add(exponents.displacement(self.library, phi, anchors, self.pairs.at(some), pieces=2))
        correction = self._to_result(total.result()) / first.total[:, None]
        return first._replace(mean=first.mean + correction)

    def _to_result(self, x: Tensor) -> Tensor:
        """Return x in float64: on the device, or on the host where the device has no float64."""
        return x.double() if self.double else x.cpu().double()


class _Total:
    """A running total in float64, or in two float32 numbers where the device has no float64."""

    def __init__(self, double: bool) -> None:
        self.double = double
        self.high: Any = None
        self.low: Any = None

    def add(self, x: Tensor) -> None:
        if self.high is None:
            self.high, self.low = (x.double(), None) if self.double else (x, torch.zeros_like(x))
        elif self.double:
            self.high.add_(x)
        else:
            total = self.high + x  # the rounding error of a sum is a float32 number too
            back = total - self.high
            self.low = self.low + ((self.high - (total - back)) + (x - back))
            self.high = total

    def result(self) -> Any:  # there is at least one column
        return self.high if self.double else self.high.cpu().double() + self.low.cpu().double()


def _relative(formula: Formula, rows: Packed, columns: Packed, base: Tensor | None, out: Tensor) -> Tensor:
    """A tile of exponents less their row's base, (m, 1), if any: with more digits where the formula has them."""
    tile = formula.first(rows, columns, out)
    return formula.second(tile if base is None else tile.sub_(base), rows, columns)


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
