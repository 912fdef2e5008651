"""What bandwidths say of one column: sums over near bins, for :mod:`sdkde_core.bandwidth.line`, which has the formulas.

Masses in bins are integers, and all samples together have a mass of 2⁶⁰. So a sum does not depend on the order in which
a GPU adds. A row has LENGTH bins; the samples are in those before the row's end. Bandwidths of rows are in bins.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from sdkde_core.plugin import launches, on_device

from . import moves
from .compiled import bits, rehearse
from .criteria import kept
from .kernels import f64, number, sized

LENGTH, TILE = 1 << 15, 256
TILES, UNIT, ROOT = tl.constexpr(LENGTH // TILE), tl.constexpr(2.0**-60), tl.constexpr(6.283185307179586**0.5)


@sized
def places_kernel(u, widths, places, ends, n, first, most, unit, BLOCK: tl.constexpr):
    """Where samples are in bins, the first one at ``first``; gaps are shortened to ``most`` bins.

    Bins are as wide as ``widths`` says, in a unit whose bits are ``unit``.
    """
    k, less, end = tl.program_id(0), f64(0.0), f64(0.0)
    width, origin = tl.load(widths + k) * number(unit), tl.load(u)
    for start in range(0, n, BLOCK):
        i = start + tl.arange(0, BLOCK)
        here, before = tl.load(u + i, mask=i < n, other=0.0), tl.load(u + tl.maximum(i - 1, 0), mask=i < n, other=0.0)
        over = tl.where(i < n, tl.maximum((here - before) / width - most, 0.0), 0.0)
        place = (here - origin) / width - (less + tl.cumsum(over, 0)) + first
        less += tl.sum(over, 0)
        end = tl.maximum(end, tl.max(tl.where(i < n, place, 0.0), 0))
        tl.store(places + k * n + i, place, mask=i < n)
    tl.store(ends + k, end + first)


@sized
def bins_kernel(places, counts, folds, mass, n, length, splits, unit, BLOCK: tl.constexpr):
    """Share samples, of ``unit`` times their counts, between the bins around them: in rows of folds, and one of all.

    Lanes have samples that are far apart, as additions to one bin wait for each other.
    """
    k, i = tl.program_id(1), tl.arange(0, BLOCK) * tl.num_programs(0) + tl.program_id(0)
    place, whole = tl.load(places + k * n + i, mask=i < n, other=0.0), tl.load(counts + i, mask=i < n, other=0) * unit
    low = tl.floor(place)
    share, at = (whole.to(tl.float64) * (place - low)).to(tl.int64), low.to(tl.int32)
    inside, fold = (i < n) & (low >= 0.0) & (low < length - 1), tl.load(folds + i, mask=i < n, other=0).to(tl.int32)
    mass += k * length + at
    for row in tl.static_range(2):
        to = mass + (splits if row else fold) * tl.num_programs(1) * length
        some = inside & ((row == 1) | (splits > 0))
        tl.atomic_add(to, whole - share, mask=some)
        tl.atomic_add(to + 1, share, mask=some)


@triton.jit
def _near(mass, at, length):
    return tl.load(mass + at, mask=(at >= 0) & (at < length), other=0).to(tl.float64)


@sized
def shifts_kernel(mass, ends, wide, shifts, parts, length, kind, factor, BLOCK: tl.constexpr):
    """Shifts of bins, in bandwidths, by the score at ``factor`` of them, and parts of sums for :func:`moved_kernel`.

    ``kind``: how often masses have been shared between bins.
    """
    row, j, c = tl.program_id(1), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), f64(0.0) + factor
    mass += row * length
    h = tl.load(wide + row)
    if tl.program_id(0) * BLOCK < tl.load(ends + row):
        variance = c * c * h * h - kind / 6.0
        density, slope = tl.zeros((BLOCK,), tl.float64), tl.zeros((BLOCK,), tl.float64)
        reach = tl.sqrt(72.0 * variance).to(tl.int32)
        for t in range(-reach, reach + 1):
            near = _near(mass, j + t, length) * tl.exp(-0.5 * t * t / variance)
            density += near
            slope += near * t
        here, norm = _near(mass, j, length), 1.0 / (ROOT * tl.sqrt(variance))
        density = tl.maximum(density * norm, tl.maximum(here * (0.3 / (c * h)), 1e-15 / UNIT))
        s = tl.minimum(tl.maximum(slope * (norm * h / variance) / density, -8.0), 8.0)
        tl.store(shifts + row * length + j, s)
        to, weighted, u = parts + (row * TILES + tl.program_id(0)) * 5, here * s, j / h
        tl.store(to, tl.sum(here, 0))
        tl.store(to + 1, tl.sum(weighted, 0))
        tl.store(to + 2, tl.sum(here * u, 0))
        tl.store(to + 3, tl.sum(weighted * u, 0))
        tl.store(to + 4, tl.sum(weighted * s, 0))


@triton.jit
def _step(parts, inside, c):
    """The step "moments": sdkde_core/estimator/moving.py."""
    total = tl.sum(tl.load(parts, mask=inside, other=0.0), 0)
    shift = tl.sum(tl.load(parts + 1, mask=inside, other=0.0), 0) / total
    places = tl.sum(tl.load(parts + 2, mask=inside, other=0.0), 0)
    towards = (places * shift - tl.sum(tl.load(parts + 3, mask=inside, other=0.0), 0)) / total
    squares = tl.maximum(tl.sum(tl.load(parts + 4, mask=inside, other=0.0), 0) / total - shift * shift, 1e-300)
    rest = towards * towards - squares
    root = tl.where(rest > 0.0, 1.0 / (towards + tl.sqrt(tl.maximum(rest, 0.0))), towards / squares)
    step = tl.where(towards > 1e-100, root, 0.5)
    return tl.minimum(tl.maximum(step, tl.where(c == 1.0, 0.5, 0.0)), 1.2 * c * c)


@sized
def moved_kernel(
    mass, ends, wide, shifts, parts, moved, steps, length, factor, MOMENTS: tl.constexpr, BLOCK: tl.constexpr
):
    """Move masses by half a step, or by "moments"."""
    row, j, tile = tl.program_id(1), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, TILES)
    end = tl.load(ends + row)
    if tl.program_id(0) * BLOCK < end:
        step = f64(0.5)
        if MOMENTS:
            step = _step(parts + (row * TILES + tile) * 5, tile * BLOCK < end, f64(0.0) + factor)
        whole = tl.load(mass + row * length + j)
        place = j + tl.load(wide + row) * step * tl.load(shifts + row * length + j)
        place = tl.minimum(tl.maximum(place, 0.0), tl.minimum(end, length) - 1.5)
        low = tl.floor(place)
        to, share = moved + row * length + low.to(tl.int32), (whole.to(tl.float64) * (place - low)).to(tl.int64)
        tl.atomic_add(to, whole - share, mask=whole > 0)
        tl.atomic_add(to + 1, share, mask=whole > 0)
        tl.store(steps + row, step)  # every program has the same


@sized
def sums_kernel(mass, own, ends, wide, out, estimate, length, kind, asked, LAPLACE: tl.constexpr, BLOCK: tl.constexpr):
    """Of the estimate p̂ by masses Σ p̂², and Σ p̂^(5/4), and those of other masses times p̂, p̂^(1/4) and log p̂.

    By tiles, (rows, TILES, 5); NaN where a row's end is beyond its length. ``kind``: how often the masses have been
    shared between bins, the others ``asked`` times; p̂ there is as if they had not been. ``estimate``: masses of p̂.
    """
    row, j = tl.program_id(1), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    end, h = tl.load(ends + row), tl.load(wide + row)
    variance = h * h - kind / 6.0
    less = variance - asked / 6.0
    p, cross = tl.zeros((BLOCK,), tl.float64), tl.zeros((BLOCK,), tl.float64)
    reach = tl.where(tl.program_id(0) * BLOCK < end, tl.sqrt(72.0 * variance).to(tl.int32), -1)
    for t in range(-reach, reach + 1):
        near, square = _near(mass + row * length, j + t, length), t * t + f64(0.0)
        g, other = tl.exp(-0.5 * square / variance), tl.exp(-0.5 * square / less)
        if LAPLACE:
            g *= 1.0 + 0.5 * h * h * (1.0 - square / variance) / variance
            other *= 1.0 + 0.5 * h * h * (1.0 - square / less) / less
        p += near * g
        cross += near * other
    scale, to = tl.where(end > length, float("nan"), f64(UNIT / ROOT)), out + (row * TILES + tl.program_id(0)) * 5
    p *= scale / tl.sqrt(variance)
    mine, high = tl.load(own + row * length + j).to(tl.float64) * UNIT, tl.maximum(p, 1e-15)
    root = tl.sqrt(tl.sqrt(high))
    tl.store(to, tl.sum(p * p, 0))
    tl.store(to + 1, tl.sum(mine * cross, 0) * (scale / tl.sqrt(less)))
    tl.store(to + 2, tl.sum(high * root, 0))
    tl.store(to + 3, tl.sum(mine * root, 0))
    tl.store(to + 4, tl.sum(mine * tl.log(high), 0))
    tl.store(estimate + row * length + j, (tl.maximum(p, 0.0) / UNIT).to(tl.int64))


def _summed(mass: Any, own: Any, ends: Any, wide: Any, binned: int, asked: int, method: str, score: Any) -> Any:
    """Sums (rows, 5), steps (rows,), and masses of the estimate (rows, LENGTH)."""
    rows, moved = len(mass), method == "sdkde"
    grid, c, estimate = (LENGTH // TILE, rows), float(score or 1.0), torch.empty_like(mass)
    parts, out, steps = wide.new_empty(rows, grid[0], 5), wide.new_empty(rows, grid[0], 5), wide.new_full((rows,), 0.5)
    if moved:
        shifts, found = wide.new_empty(rows, LENGTH), torch.zeros_like(mass)
        kept(shifts_kernel, grid, (LENGTH, binned, c), (TILE,))(mass, ends, wide, shifts, parts)
        given = mass, ends, wide, shifts, parts, found, steps
        kept(moved_kernel, grid, (LENGTH, c), (score is not None, TILE))(*given)
        mass = found
    kernel = kept(sums_kernel, grid, (LENGTH, binned + moved, asked), (method == "laplace", TILE))
    kernel(mass, own, ends, wide, out, estimate)
    return out.sum(1), steps, estimate


def _binned(u: Any, counts: Any, folds: Any, widths: Any, unit: float, total: int, splits: int, finer: int) -> Any:
    """Masses of each fold and of all, (splits + 1, widths, LENGTH), and the ends of rows."""
    n, k = len(u), len(widths)
    mass, places, ends = counts.new_zeros(splits + 1, k, LENGTH), u.new_empty(k, n), u.new_empty(k)
    launch = kept(places_kernel, (k, 1), (n, 30 * finer**2, 60 * finer**2), (1024,))
    launch(u, widths, places, ends, last=(bits(unit),))
    numbers = n, LENGTH, splits, (1 << 60) // total
    kept(bins_kernel, (-(-n // 256), k), numbers, (256,))(places, counts, folds, mass)
    return mass, ends


@functools.lru_cache(64)
@launches.aside
def _there(numbers: tuple[float, ...], device: Any) -> Any:
    """Numbers that are the same in every call for samples of one shape, on a device."""
    return torch.tensor(numbers, dtype=torch.float64).to(device)


@functools.cache
def _begin(device: Any, method: str, score: Any) -> None:
    """The first time, let all kernels compile side by side, and those that an estimate launches next."""
    if device.type == "cuda":
        one, many = (torch.ones(1, dtype=x, device="cpu") for x in (torch.float64, torch.int64))
        rehearse(line_left_out, one, many, many, 0.5 * one, 1, [1.0], 1.0, method, score)
        rehearse(line_deviations, one, many, 1, 1.0, [1.0], method, score)
        moves.begin(1)


def line_left_out(
    u: Any, counts: Any, folds: Any, others: Any, total: int, bandwidths: Sequence[float], unit: float, method: str,
    score: Any,
) -> Any:  # fmt: skip
    """See :class:`sdkde_core.protocol.CriteriaBackend`."""
    k, splits = len(bandwidths), len(others)
    with on_device(u):
        _begin(u.device, method, score)
        widths, wide = (_there(x, u.device) for x in (tuple(bandwidths), (6.0,) * (k * splits)))
        mass, ends = _binned(u, counts, folds, widths, unit / 6.0, total, splits, 1)
        rest = ((mass[-1:] - mass[:-1]) / others[:, None, None]).long().view(-1, LENGTH)
        sums, *_ = _summed(rest, mass, ends.repeat(splits), wide, 1, 1, method, score)
        return sums.view(splits, k, 5)


def line_deviations(
    u: Any, counts: Any, total: int, pilot: float, widths: Sequence[float], method: str, score: Any
) -> Any:
    """See :class:`sdkde_core.protocol.CriteriaBackend`."""
    k = len(widths)
    with on_device(u):
        mass, ends = _binned(u, counts, counts, _there((1.0,), u.device), pilot / 12.0, total, 0, 2)
        own, _, density = _summed(mass[0], mass[0], ends, _there((12.0,), u.device), 1, 0, "sdkde", score)
        wide, density = torch.tensor(widths, dtype=torch.float64).to(u.device), density.repeat(k, 1)
        sums, steps, _ = _summed(density, density, ends.repeat(k), wide, 0, 0, method, score)
        return torch.stack([sums[:, 0] - 2.0 * sums[:, 1] + own[:, 0], sums[:, 0], steps], 1)
