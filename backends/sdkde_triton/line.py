"""What bandwidths say of one column: sums over near bins, for :mod:`sdkde_core.bandwidth.line`, which has the formulas.

Masses in bins are integers, and all samples together have a mass of 2⁶⁰. So a sum does not depend on the order in which
a GPU adds. A row has LENGTH bins; the samples are in those before the row's end.

``of`` are the first row's bandwidth and the log of what each is to the one before; those of sums are in bins. There are
``cycle`` ends, and masses: row r has number r % cycle of them. Kernels find what to look at next: the host reads
once. It reads ``found``, whose order is that of :class:`sdkde_core.protocol.CriteriaBackend`: three steps, nine numbers
about the samples from 3 on, how many are in each fold from 12 on, and sums from 20 on.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import torch
import triton
import triton.language as tl

from sdkde_core.plugin import launches, on_device

from . import moves
from .compiled import bits, rehearse
from .criteria import kept
from .kernels import f64, number, sized, wide
from .space import Config

LENGTH, TILE, SPAN = 1 << 15, 256, 4096  # bins of a row, and of a program; samples of a program
TILES, UNIT, ROOT = tl.constexpr(LENGTH // TILE), tl.constexpr(2.0**-60), tl.constexpr(6.283185307179586**0.5)
NONE = tl.constexpr(1e300)  # a loss that is not looked at


@triton.jit
def _bandwidth(of, row):
    return tl.load(of) * tl.exp(tl.load(of + 1) * row)


@triton.jit
def _gaps(u, i, n):
    """The differences of sorted samples from the ones before."""
    return tl.load(u + i, mask=i < n, other=0.0) - tl.load(u + tl.maximum(i - 1, 0), mask=i < n, other=0.0)


@sized
def values_kernel(u, values, begins, found, n, BLOCK: tl.constexpr):
    """Number the distinct values of samples in order. Sample i has number ``values[i]``.

    Value v begins with sample ``begins[v]``; behind the last one's is n. What :func:`folds_kernel` adds to is set to 0.
    """
    i, extent = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.load(u + n - 1) - tl.load(u)
    new, close, odd = tl.zeros((BLOCK,), tl.int32), tl.zeros((BLOCK,), tl.int32), tl.zeros((BLOCK,), tl.int32)
    for start in range(0, (tl.program_id(0) + 1) * BLOCK, BLOCK):
        gaps = _gaps(u, start + tl.arange(0, BLOCK), n)
        new += (gaps > 0.0).to(tl.int32)
        close += ((gaps > 1e-12 * extent) & (gaps * (100.0 * n + 1000.0) <= extent)).to(tl.int32)  # see units_of
        odd += ((gaps > 0.0) & (gaps < 1e-15 * extent)).to(tl.int32)
    mine = (_gaps(u, i, n) > 0.0).to(tl.int32)
    value = tl.sum(new, 0) - tl.sum(mine, 0) + tl.cumsum(mine, 0)
    tl.store(values + i, value, mask=i < n)
    tl.store(begins + value, i, mask=(mine > 0) | (i == 0))
    if tl.program_id(0) == tl.num_programs(0) - 1:
        tl.store(begins + tl.sum(new, 0) + 1, n)
        tl.store(found + 8, tl.sum(close, 0).to(tl.float64))
        tl.store(found + 9, tl.sum(odd, 0).to(tl.float64))
        tl.store(found + 10, tl.sum(new, 0) + f64(1.0))
        tl.store(found + 11 + tl.arange(0, 16), tl.zeros((16,), tl.float64), mask=tl.arange(0, 16) < 9)


@sized
def slots_kernel(index, found, slots, n, splits, BLOCK: tl.constexpr):
    """Find the folds of k values: the i-th has the i-th number below k of the permutation ``index``, modulo splits."""
    i, count = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.load(found + 10)
    before = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, tl.program_id(0) * BLOCK, BLOCK):
        before += (tl.load(index + start + tl.arange(0, BLOCK)) < count).to(tl.int32)
    number = tl.load(index + i, mask=i < n, other=n)
    there = (number < count).to(tl.int32)
    tl.store(slots + tl.sum(before, 0) + tl.cumsum(there, 0) - 1, number % splits, mask=there > 0)


@sized
def folds_kernel(u, values, begins, slots, folds, found, copies, n, most, BLOCK: tl.constexpr):
    """Find the fold of each sample, by its value's, and count. The first ``most`` samples are copied."""
    i, k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, 8)
    value = tl.load(values + i, mask=i < n, other=0)
    fold = tl.load(slots + value, mask=i < n, other=-1)
    often = tl.load(begins + value + 1, mask=i < n, other=0) - tl.load(begins + value, mask=i < n, other=0)
    tl.store(folds + i, fold, mask=i < n)
    tl.atomic_add(found + 11, tl.sum(often.to(tl.float64), 0))  # of integers: their order does not matter
    tl.atomic_add(found + 12 + k, tl.sum((fold[:, None] == k[None, :]).to(tl.float64), 0))
    tl.store(copies + i, tl.load(u + i, mask=i < most, other=0.0), mask=i < most)


@triton.jit
def _quartile(every, n, part):
    """A quartile of sorted samples, of type 7."""
    at = (wide(n) - 1) * part
    low = tl.load(every + at // 4)
    return low + (at % 4) * 0.25 * (tl.load(every + (at + 3) // 4) - low)


@sized
def first_kernel(every, std, found, of, n, unit, GROWTH: tl.constexpr):
    """Measure all samples, and begin the search at the bandwidth with the bits ``unit``, in spreads."""
    deviation, low = tl.load(std), _quartile(every, n, 1)
    between = _quartile(every, n, 3) - low
    scaled = between / 1.34
    spread = tl.where(scaled > 1e-12 * deviation, tl.minimum(deviation, scaled), deviation)
    tl.store(of, spread * number(unit))
    tl.store(of + 1, f64(-3.0 * GROWTH))
    tl.store(found + 3, tl.load(every))
    tl.store(found + 4, tl.load(every + n - 1))
    tl.store(found + 5, deviation)
    tl.store(found + 6, low)
    tl.store(found + 7, between)


@sized
def places_kernel(u, of, places, ends, n, kind, BLOCK: tl.constexpr):
    """The samples' places in bins, 6 ``kind`` to a bandwidth in the unit of u; gaps become 10 ``kind`` bins at most."""
    k, i, first = tl.program_id(1), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), 30 * kind * kind
    width, less = _bandwidth(of, k) / (6 * kind), tl.zeros((BLOCK,), tl.float64)
    for start in range(0, tl.program_id(0) * BLOCK, BLOCK):
        less += tl.maximum(_gaps(u, start + tl.arange(0, BLOCK), n) - 2 * first * width, 0.0)
    over, here = tl.maximum(_gaps(u, i, n) - 2 * first * width, 0.0), tl.load(u + i, mask=i < n, other=0.0)
    place = (here - tl.load(u) - tl.sum(less, 0) - tl.cumsum(over, 0)) / width + first
    tl.store(places + k * n + i, place, mask=i < n)
    tl.store(ends + k + 0 * i, place + first, mask=i == n - 1)


@sized
def clear_kernel(mass, ends, length, cycle, BLOCK: tl.constexpr):
    """Set masses of rows to 0, up to a tile beyond the end: sums look less far, as bandwidths are at most 24 bins."""
    row, j = tl.program_id(1), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if (tl.program_id(0) - 1) * BLOCK < tl.load(ends + row % cycle):
        tl.store(mass + row * length + j, wide(0) * j)


@sized
def bins_kernel(places, folds, mass, n, length, splits, BLOCK: tl.constexpr):
    """Share samples between the bins around them: in rows of folds, if there are splits, and one of all.

    Lanes have samples that are far apart, as additions to one bin wait for each other.
    """
    k, i = tl.program_id(1), tl.arange(0, BLOCK) * tl.num_programs(0) + tl.program_id(0)
    place, whole = tl.load(places + k * n + i, mask=i < n, other=0.0), ((wide(0) + 1) << 60) // n
    low, fold = tl.floor(place), tl.load(folds + i, mask=i < tl.where(splits > 0, n, 0), other=0).to(tl.int32)
    share, at = (whole.to(tl.float64) * (place - low)).to(tl.int64), low.to(tl.int32)
    inside = (i < n) & (low >= 0.0) & (low < length - 1)
    mass += k * length + at
    for row in tl.static_range(2):
        to = mass + (splits if row else fold) * tl.num_programs(1) * length
        some = inside & ((row == 1) | (splits > 0))
        tl.atomic_add(to, whole - share, mask=some)
        tl.atomic_add(to + 1, share, mask=some)


@sized
def rest_kernel(mass, held, left, ends, n, length, cycle, splits, BLOCK: tl.constexpr):
    """Masses without each fold, which has ``held`` of n samples; the ends of these rows follow the ends so far."""
    row, j = tl.program_id(1), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    end, share = tl.load(ends + row % cycle), 1.0 - tl.load(held + row // cycle) / n
    tl.store(ends + cycle + row, end)
    if (tl.program_id(0) - 1) * BLOCK < end:
        whole = tl.load(mass + (splits * cycle + row % cycle) * length + j) - tl.load(mass + row * length + j)
        tl.store(left + row * length + j, (whole.to(tl.float64) / share).to(tl.int64))


@triton.jit
def _near(mass, at, length):
    return tl.load(mass + at, mask=(at >= 0) & (at < length), other=0).to(tl.float64)


@sized
def shifts_kernel(mass, ends, of, shifts, parts, length, cycle, kind, factor, BLOCK: tl.constexpr):
    """Shifts of bins, in bandwidths, by the score at ``factor`` of them, and parts of sums for :func:`moved_kernel`.

    ``kind``: how often masses have been shared between bins.
    """
    row, j, c = tl.program_id(1), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), f64(0.0) + factor
    mass += row % cycle * length
    h = _bandwidth(of, row)
    if tl.program_id(0) * BLOCK < tl.load(ends + row % cycle):
        variance, here = c * c * h * h - kind / f64(6.0), _near(mass, j, length)
        density, slope, norm = here, tl.zeros((BLOCK,), tl.float64), 1.0 / (ROOT * tl.sqrt(variance))
        g, ratio = f64(1.0), tl.exp(-0.5 / variance)
        less = ratio * ratio
        for t in range(1, tl.sqrt(72.0 * variance).to(tl.int32) + 1):
            before, after = _near(mass, j - t, length), _near(mass, j + t, length)
            g, ratio = g * ratio, ratio * less  # exp(−t² / 2v), in a tenth of the time
            density += (before + after) * g
            slope += (after - before) * (g * t)
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
    mass, ends, of, shifts, parts, moved, steps, length, cycle, factor,
    MOMENTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Move masses by half a step, or by "moments"."""
    row, j, tile = tl.program_id(1), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, TILES)
    end = tl.load(ends + row % cycle)
    if tl.program_id(0) * BLOCK < end:
        step = f64(0.5)
        if MOMENTS:
            step = _step(parts + (row * TILES + tile) * 5, tile * BLOCK < end, f64(0.0) + factor)
        whole = tl.load(mass + row % cycle * length + j)
        place = j + _bandwidth(of, row) * step * tl.load(shifts + row * length + j)
        place = tl.minimum(tl.maximum(place, 0.0), tl.minimum(end, length) - 1.5)
        low = tl.floor(place)
        to, share = moved + row * length + low.to(tl.int32), (whole.to(tl.float64) * (place - low)).to(tl.int64)
        tl.atomic_add(to, whole - share, mask=whole > 0)
        tl.atomic_add(to + 1, share, mask=whole > 0)
        tl.store(steps + row, step)  # every program has the same


@sized
def sums_kernel(
    mass, own, ends, of, out, estimate, length, cycle, most, kind, asked,
    LAPLACE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Σ p̂², Σ p̂^(5/4), and Σ of other masses times p̂, p̂^(1/4) and log p̂, for the estimate p̂ from ``most`` masses.

    Sums are by tiles, (rows, TILES, 5); NaN where a row's end is beyond its length. ``kind``: how often the masses have
    been shared between bins (the others ``asked`` times), which p̂ makes up for. ``estimate`` gets the masses of p̂.
    """
    row, j = tl.program_id(1), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    end, h = tl.load(ends + row % cycle), _bandwidth(of, row)
    variance = h * h - kind / f64(6.0)
    less = variance - asked / f64(6.0)
    p, cross = tl.zeros((BLOCK,), tl.float64), tl.zeros((BLOCK,), tl.float64)
    reach = tl.where(tl.program_id(0) * BLOCK < end, tl.sqrt(72.0 * variance).to(tl.int32), -1)
    mass += row % most * length
    g, other, g_ratio, other_ratio = f64(1.0), f64(1.0), tl.exp(-0.5 / variance), tl.exp(-0.5 / less)
    g_less, other_less = g_ratio * g_ratio, other_ratio * other_ratio
    for t in range(reach + 1):
        near = (_near(mass, j - t, length) + _near(mass, j + t, length)) * tl.where(t == 0, 0.5, 1.0)
        if LAPLACE:
            square = t * t + f64(0.0)
            p += near * (g * (1.0 + 0.5 * h * h * (1.0 - square / variance) / variance))
            cross += near * (other * (1.0 + 0.5 * h * h * (1.0 - square / less) / less))
        else:
            p += near * g
            cross += near * other
        g, other = g * g_ratio, other * other_ratio  # exp(−t² / 2v), in a tenth of the time
        g_ratio, other_ratio = g_ratio * g_less, other_ratio * other_less
    scale, to = tl.where(end > length, float("nan"), f64(UNIT / ROOT)), out + (row * TILES + tl.program_id(0)) * 5
    p *= scale / tl.sqrt(variance)
    mine = _near(own + row % cycle * length, tl.where(j < end, j, -1), length) * UNIT
    high = tl.where(end > length, scale, tl.maximum(p, 1e-15))  # the maximum with NaN is none
    root = tl.sqrt(tl.sqrt(high))
    tl.store(to, tl.sum(p * p, 0))
    tl.store(to + 1, tl.sum(mine * cross, 0) * (scale / tl.sqrt(less)))
    tl.store(to + 2, tl.sum(high * root, 0))
    tl.store(to + 3, tl.sum(mine * root, 0))
    tl.store(to + 4, tl.sum(mine * tl.log(high), 0))
    tl.store(estimate + row * length + j, (tl.maximum(p, 0.0) / UNIT).to(tl.int64))


@sized
def total_kernel(out, steps, found, MOVED: tl.constexpr):
    """Sums of rows over tiles, and the step: (rows, 6)."""
    row, tile, k, step = tl.program_id(0), tl.arange(0, TILES)[:, None], tl.arange(0, 8), f64(0.5)
    sums = tl.sum(tl.load(out + (row * TILES + tile) * 5 + k[None, :], mask=k[None, :] < 5, other=0.0), 0)
    if MOVED:
        step = tl.load(steps + row)
    tl.store(found + row * 6 + k, tl.where(k < 5, sums, step), mask=k < 6)


@triton.jit
def _losses(found, samples, of, n, splits, count, kind):
    """A criterion (0 power, 1 least squares, 2 likelihood) at ``count`` bandwidths, (16,); NONE where it has none."""
    fold, i = tl.arange(0, 8)[:, None], tl.arange(0, 16)
    inside, at = (fold < splits) & (i < count)[None, :], found + (fold * count + i[None, :]) * 6
    held, unit = tl.load(samples + fold, mask=fold < splits, other=0.0) / n, 6.0 / _bandwidth(of, i)
    whole = tl.sum(tl.load(at + tl.where(kind == 0, 2, 0), mask=inside, other=0.0) * held, 0)
    part = tl.sum(tl.load(at + tl.where(kind == 0, 3, tl.where(kind == 1, 1, 4)), mask=inside, other=0.0), 0)
    loss = tl.where(kind == 0, tl.sqrt(tl.sqrt(unit)) * (whole - 5.0 * part), unit * (whole - 2.0 * part))
    loss = tl.where(kind == 2, -part - tl.log(unit), loss)
    return tl.where((i < count) & (loss == loss), loss, NONE)


@triton.jit
def _of(losses, k):
    return tl.sum(tl.where(tl.arange(0, 16) == k, losses, 0.0), 0)


@triton.jit
def _lowest(losses):
    """The place of a local minimum of losses (16,) less their middle, NONE at the ends: as ``descend`` in the core."""
    at, found = tl.full((), 8, tl.int32), f64(0.0)
    for _ in range(8):
        low, here, high = _of(losses, at - 1), _of(losses, at), _of(losses, at + 1)
        less, more = (low <= here) & (low <= high) & (low < NONE), (high < here) & (high < low)
        curvature = low - 2.0 * here + high
        inside = (low < NONE) & (high < NONE) & (curvature > 0.0)
        found = at - 8.0 + tl.where(inside, 0.5 * (low - high) / tl.where(inside, curvature, 1.0), 0.0)
        at += more.to(tl.int32) - less.to(tl.int32)
    return found


@sized
def next_kernel(
    found, of, n, splits, length, asked, kind, first, top,
    MOVED: tl.constexpr, LAPLACE: tl.constexpr, SCORE: tl.constexpr, GROWTH: tl.constexpr,
):  # fmt: skip
    """Find the next bandwidths, write them to ``of``, and the first result of :func:`line_search`.

    ``asked`` 0: the bandwidths near the best one so far; 1 and 2: pilots.
    """
    p, held = tl.arange(0, 16) - 8, found + 12
    sums = held + 8
    near = sums + splits * length * 6
    if asked < 2:
        thirds = _losses(sums, held, of, n, splits, length, kind)
        best = tl.argmin(thirds, 0)
        middle, h = first - 3 * best, _bandwidth(of, best)
        if asked == 0:
            tl.store(found, middle + f64(0.0))
            tl.store(of + 2, h * tl.exp(f64(-2.0 * GROWTH)))
            tl.store(of + 3, f64(GROWTH))
        else:
            losses = _losses(near, held, of + 2, n, splits, 5, kind)
            losses = tl.gather(losses, tl.minimum(tl.maximum(p + 2, 0), 15), 0)  # those five about the middle
            losses = tl.where(p == 3, tl.where(best > 0, _of(thirds, best - 1), NONE), losses)
            losses = tl.where(p == -3, _of(thirds, best + 1), losses)
            looked = (p >= -3) & (middle + p >= -31) & (middle + p <= top)
            away = tl.floor(_lowest(tl.where(looked, losses, NONE)) + 0.5)
            tl.store(found + 1, middle + away)
            tl.store(of + 4, h * tl.exp(away * GROWTH))
            tl.store(of + 5, f64(0.0))
    else:
        pilot, row = tl.load(found + 1), near + splits * 30 + (p + 5) * 6
        there = (p >= -4) & (p <= 4) & (pilot + p <= top)
        square, step = tl.load(row, mask=there, other=0.0), tl.load(row + 5, mask=there, other=0.0)
        bias = square - 2.0 * tl.load(row + 1, mask=there, other=0.0) + tl.load(near + splits * 30)
        rough = f64(1.6875 if LAPLACE else 1.0)
        if MOVED:
            v = f64(1.0 + SCORE * SCORE)
            rough += 2.0 * step / (1.0 + v) * tl.sqrt(2.0 / (1.0 + v)) + 0.75 * step * step / (v * v * tl.sqrt(v))
        error = (
            bias
            + (rough / (12.0 * ROOT * 2.0**0.5 * tl.exp(GROWTH * (p + f64(0.0)))) - square)
            * tl.load(found + 11)
            / n
            / n
        )
        further = tl.floor(_lowest(tl.where(there & (error == error), error, NONE)) + 0.5)
        tl.store(found + 2, pilot + further)
        tl.store(of + 6, tl.load(of + 4) * tl.exp(further * GROWTH))
        tl.store(of + 7, f64(0.0))


def _summed(
    mass: Any, own: Any, ends: Any, found: Any, room: Any, of: Any, binned: int, asked: int, method: str, score: Any
) -> Any:
    """Write sums of rows, and steps, to ``found`` (k, 6); return masses of the estimate. Moved ones go to ``room``."""
    k, rows, moved = len(found), len(ends), method == "sdkde"
    grid, c, estimate = (LENGTH // TILE, k), float(score or 1.0), mass.new_empty(k, LENGTH)
    parts, out, shifts, steps = (ends.new_empty(k, x) for x in (5 * grid[0], 5 * grid[0], LENGTH, 1))
    if moved:
        kept(shifts_kernel, grid, (LENGTH, rows, binned, c), (TILE,))(mass, ends, of, shifts, parts)
        launch = kept(moved_kernel, grid, (LENGTH, rows, c), (score is not None, TILE))
        launch(mass, ends, of, shifts, parts, room, steps)
        mass = room
    numbers = LENGTH, rows, len(mass), binned + moved, asked
    kept(sums_kernel, grid, numbers, (method == "laplace", TILE))(mass, own, ends, of, out, estimate)
    kept(total_kernel, (k, 1), (), (moved,))(out, steps, found)
    return estimate


def _binned(u: Any, folds: Any, of: Any, k: int, splits: int, finer: int, more: int) -> tuple[Any, ...]:
    """Masses of each fold and of all, (splits + 1, k) rows; more rows, of zeros; ends of k rows, with room for all."""
    n, rows = len(u), (splits + 1) * k
    mass = torch.empty(rows + more, LENGTH, dtype=torch.int64, device=u.device)
    places, ends = u.new_empty(k * n), u.new_empty(k * (splits + 1))
    kept(places_kernel, (-(-n // SPAN), k), (n, finer), (SPAN,), Config(1, 1, 8, 1))(u, of, places, ends)
    kept(clear_kernel, (LENGTH // TILE, rows + more), (LENGTH, k), (TILE,))(mass, ends)
    given = places, mass if folds is None else folds, mass
    kept(bins_kernel, (-(-n // 256), k), (n, LENGTH, splits), (256,))(*given)
    return mass[:rows], mass[rows:], ends


@functools.cache
@launches.aside
def _begin(device: Any, growth: float, method: str, score: Any) -> Any:
    """Pairs of numbers for rows in bins; the first time all kernels begin to compile, and those of an estimate."""
    if device.type == "cuda":
        one, many = (torch.ones(1, dtype=x, device="cpu") for x in (torch.float64, torch.int64))
        rehearse(line_search, one, one, many, (1.0, growth), range(1), 0, 1, 0, method, score)
        moves.begin(1)
    pairs = [[6.0, 0.0], [12.0, 0.0], [12.0 * math.exp(-4.0 * growth), growth]]
    return torch.tensor(pairs, dtype=torch.float64).to(device)


def line_search(
    every: Any, std: Any, index: Any, bandwidths: tuple[float, float], steps: range, top: int, splits: int,
    criterion: int, method: str, score: Any, some: Any = None,
) -> Any:  # fmt: skip
    """See :class:`sdkde_core.protocol.CriteriaBackend`."""
    (first, growth), count, moved, u = bandwidths, len(steps), method == "sdkde", every if some is None else some
    pilots, n = 0 if criterion else 1 if method == "laplace" else 2, len(u)
    sizes = splits * count * 6, splits * 30, *[60] * pilots, n * (n <= 2048)
    begins = list(itertools.accumulate(sizes, initial=20))
    with on_device(u):
        bins = _begin(u.device, growth, method, score)
        found, of = u.new_empty(begins[-1]), u.new_empty(8)
        *parts, copies = (found[i:j] for i, j in itertools.pairwise(begins))
        folds, slots, values, starts = (index.new_empty(n + k) for k in (0, 0, 0, 1))
        grid, config = (-(-n // SPAN), 1), Config(1, 1, 8, 1)
        kept(values_kernel, grid, (n,), (SPAN,), config)(u, values, starts, found)
        kept(slots_kernel, grid, (n, splits), (SPAN,), config)(index, found, slots)
        launch = kept(folds_kernel, grid, (n, len(copies)), (SPAN,), config)
        launch(u, values, starts, slots, folds, found, copies)
        kept(first_kernel, (1, 1), (len(every),), (growth,))(every, std, found, of, last=(bits(first),))
        flags = moved, method == "laplace", float(score or 1.0), growth
        for stage in range(2 + pilots):
            pair = of[2 * stage : 2 * stage + 2]
            if stage:
                numbers = n, splits, count, stage - 1, criterion, steps[0], top
                kept(next_kernel, (1, 1), numbers, flags)(found, of)
            if stage < 2:  # samples that are left out
                into = parts[stage].view(splits, -1, 6)
                k = into.shape[1]
                rows = splits * k
                mass, room, ends = _binned(u, folds, pair, k, splits, 1, rows * moved)
                rest = torch.empty_like(mass[k:])
                numbers = n, LENGTH, k, splits
                kept(rest_kernel, (LENGTH // TILE, rows), numbers, (TILE,))(mass, found[12:20], rest, ends)
                _summed(rest, mass, ends[k:], into.view(rows, 6), room, bins[0], 1, 1, method, score)
            else:  # the estimate at the pilot, and what bandwidths say if it were the density
                into = parts[stage].view(10, 6)
                mass, room, ends = _binned(u, None, pair, 1, 0, 2, 10)
                density = _summed(mass, mass, ends, into[:1], room[:1], bins[1], 1, 0, "sdkde", score)
                _summed(density, density, ends, into[1:], room[1:], bins[2], 0, 0, method, score)
        return found
