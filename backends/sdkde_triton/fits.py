"""The search for a bandwidth's shape: steps of EM by matrices of several kinds, side by side, without the host.

The formulas are those of :mod:`sdkde_core.bandwidth.shapes`. Kernels N(0, H) have the **inverse** factor W, H⁻¹ = WᵀW.
``state`` is float64: log weights and shares in the likelihood, (MOST,) each, the fits, :data:`FITS`, and the samples'
covariance, (DIM, DIM). Of each fit it has W and its moment, (DIM, DIM) each, 8 numbers, and log Σ_j w_j φ_ij of every
sample, (MOST,). The numbers are log det W; whether it may change; of fit 4 log det of the correlation's root, and the
trace of the correlation's inverse; of fit 6 the fit it goes on from. ``turned`` has W u of each, (DIM, MOST) float64:
samples may lie close together, far from the origin. What follows from their distances is float32.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from sdkde_core.plugin import launches, on_device

from . import criteria
from .compiled import rehearse
from .criteria import kept
from .kernels import f64, sized
from .space import Config

#: Samples at most.
MOST = tl.constexpr(512)

#: Fits 0 and 1 are of one scale, with few and with more steps; 2 and 3, from 0 on, of a scale per column; 4 and 5 of
#: the samples' correlation; 6 is of a matrix, from the likelier one of 2 and 4 on.
FITS = 7


@triton.jit
def _at(state, fit, DIM: tl.constexpr):
    """The address of a fit's numbers in ``state``."""
    return state + 2 * MOST + fit * (2 * DIM * DIM + 8 + MOST)


@triton.jit
def _root(a, d, DIM: tl.constexpr):
    """K⁻¹ and log det K of a matrix a = K Kᵀ, by Gauss's elimination; masks pick rows and columns."""
    i = tl.arange(0, DIM)
    inverse = tl.where(i[:, None] == i[None, :], f64(1.0), f64(0.0))
    pivots = tl.full((DIM,), 1.0, tl.float64)
    for k in range(d):
        column = tl.sum(tl.where(i[None, :] == k, a, 0.0), 1)
        row, below = tl.sum(tl.where(i[:, None] == k, a, 0.0), 0), tl.sum(tl.where(i[:, None] == k, inverse, 0.0), 0)
        pivot = tl.maximum(tl.sum(tl.where(i == k, row, 0.0), 0), 1e-12)
        times = tl.where(i > k, column / pivot, 0.0)[:, None]
        a -= times * row[None, :]
        inverse -= times * below[None, :]
        pivots = tl.where(i == k, pivot, pivots)
    return inverse / tl.sqrt(pivots)[:, None], 0.5 * tl.sum(tl.log(pivots), 0)


@triton.jit
def _quantile(values, n, first, share):
    """The quantile of n values, a ``share`` of the way from the order statistic ``first`` to the next one.

    A bitonic sort (Batcher 1968) in one loop: tl.sort unrolls it, and takes a second to compile.
    """
    i = tl.arange(0, MOST)
    values, size, stride = tl.where(i < n, values, 1e300), 2, 1
    while size <= MOST:
        other = tl.gather(values, i ^ stride, 0)
        less = ((i & stride) == 0) == ((i & size) == 0)
        values = tl.where(less, tl.minimum(values, other), tl.maximum(values, other))
        size, stride = tl.where(stride == 1, 2 * size, size), tl.where(stride == 1, size, stride // 2)
    least = tl.sum(tl.where(i == first, values, 0.0), 0)
    return least + share * (tl.sum(tl.where(i == first + 1, values, 0.0), 0) - least)


@triton.jit
def _distance(a, diagonal):
    """The Frobenius norm of a less the identity: no eigenvalue is further from 1."""
    away = a - tl.where(diagonal, 1.0, 0.0)
    return tl.sqrt(tl.sum(tl.sum(away * away, 1), 0))


@triton.jit
def _turn(u, v, at, n, d, across, along, DIM: tl.constexpr):
    """Write W u of n samples of d dimensions; ``across`` and ``along`` are strides, and W is stored ``at`` there."""
    BLOCK: tl.constexpr = MOST if MOST < 2048 // DIM else 2048 // DIM
    k = tl.arange(0, DIM)
    tl.debug_barrier()
    for start in range(0, n, BLOCK):
        j = start + tl.arange(0, BLOCK)
        here, inside = k[:, None] * across + j[None, :] * along, (k < d)[:, None] & (j < n)[None, :]
        value = tl.load(u + here, mask=inside, other=0.0)
        found = tl.dot(tl.load(at + k[:, None] * DIM + k[None, :]), value, out_dtype=tl.float64)
        tl.store(v + here, found, mask=inside)


@triton.jit
def _step(
    u, at, v, parts, apart, programs, d, kind, asked, length, other, least, FULL: tl.constexpr, DIM: tl.constexpr
):  # fmt: skip
    """Sum all programs' parts of a fit's moment, and take a step of EM that is ``length`` times as long; 0: none.

    ``kind`` is what the step changes. 0: one scale, 1: a scale per column, 2: a matrix (only if FULL, by lengths that
    are whole numbers), 3: one scale, by a step of the length ``other``.
    """
    k = tl.arange(0, DIM)
    DD: tl.constexpr = DIM * DIM
    diagonal, here = k[:, None] == k[None, :], k[:, None] * DIM + k[None, :]
    length = tl.where(kind == 3, other, length) * tl.load(at + 2 * DD + 1)
    inverse, log = tl.load(at + here), tl.load(at + 2 * DD)
    if asked < 2:
        p, inside = tl.arange(0, 64)[:, None], (k < d)[None, :]
        values = tl.load(parts + p * apart + asked * (DIM + 1) * k[None, :], mask=(p < programs) & inside, other=0.0)
        values = tl.sum(values.to(tl.float64), 0)
        tl.store(at + DD + k * (DIM + 1), values)
        values /= tl.where(asked == 0, d, 1)
        values = tl.where(k < d, tl.maximum(values, least), 1.0)
        stretch = -0.5 * tl.minimum(tl.maximum(length * tl.log(values), f64(-5.0)), f64(5.0))
        inverse *= tl.exp(stretch)[:, None]
        log += tl.sum(tl.where(k < d, stretch, 0.0), 0)
    elif FULL:
        each: tl.constexpr = 8192 // DD
        moments = tl.zeros((each, DD), tl.float64)
        for start in range(0, programs, each):
            p = start + tl.arange(0, each)[:, None]
            moments += tl.load(parts + p * apart + tl.arange(0, DD)[None, :], mask=p < programs, other=0.0)
        moment = tl.reshape(tl.sum(moments, 0), (DIM, DIM))
        tl.store(at + DD + here, moment)
        if length > 0.0:
            moment += tl.where(diagonal, tl.where(k < d, least, 1.0)[:, None], 0.0)
            root, logs = _root(moment, d, DIM)
            root = root.to(tl.float32)
            back = tl.dot(tl.trans(root), root, input_precision="ieee")  # the moment's inverse
            most = tl.maximum(_distance(moment.to(tl.float32), diagonal), _distance(back, diagonal))
            times = tl.where(length * tl.log(1.0 + most) <= 5.0, length, 1.0).to(tl.int32)
            longer = inverse.to(tl.float32)
            for _ in range(times):
                longer = tl.dot(root, longer, input_precision="ieee")
                root = tl.trans(root)
            inverse = longer.to(tl.float64)
            log -= times * logs
    if length > 0.0:
        tl.store(at + here, inverse)
        tl.store(at + 2 * DD, log)
        _turn(u, v, at, MOST, DIM, MOST, 1, DIM)


@sized
def step_kernel(
    u, state, turned, scratch, counts, n, d, first, kind, asked, length, other, least,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, FULL: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Left-out log densities of a program's rows by a fit; the fit's last program then takes a step of EM.

    ``first`` packs the numbers of the fits, four bits each. ``asked`` packs what is summed, two bits each: 0 the
    moment's trace, 1 its diagonal, 2 all of it, if FULL. ``kind``, two bits each, and lengths are for :func:`_step`.
    ``scratch`` has float32 (ROWS, MOST) and (DIM, DIM) for each program: its rows' shares, and its part of the moment.
    ``counts`` has the number of programs that are done, for each fit: 0 before and after.
    """
    chain, j, k, DD = tl.program_id(1), tl.arange(0, MOST), tl.arange(0, DIM), DIM * DIM
    fit, i = (first >> (4 * chain)) & 15, tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    v, at, programs = turned + fit * DIM * MOST, _at(state, fit, DIM), tl.num_programs(0)
    mine = scratch + (chain * programs + tl.program_id(0)) * (ROWS * MOST + DD)
    q = tl.zeros((ROWS, MOST), tl.float32)
    for column in tl.range(0, d, loop_unroll_factor=4):
        away = (tl.load(v + column * MOST + i)[:, None] - tl.load(v + column * MOST + j)[None, :]).to(tl.float32)
        q += away * away
    logs = tl.load(state + j).to(tl.float32)[None, :] - 0.5 * q
    logs = tl.where((i[:, None] != j[None, :]) & (j < n)[None, :], logs, -1e30)
    top = tl.max(logs, 1)
    shares = tl.exp(logs - top[:, None])
    total = tl.sum(shares, 1)
    tl.store(at + 2 * DD + 8 + i, (top + tl.log(total)).to(tl.float64), mask=i < n)
    shares *= (tl.load(state + MOST + i, mask=i < n, other=0.0).to(tl.float32) / total)[:, None]
    asked, part = (asked >> (2 * chain)) & 3, mine + ROWS * MOST
    if asked == 0:
        tl.store(part, tl.sum(tl.sum(shares * q, 1), 0))
    else:
        tl.store(mine + tl.arange(0, ROWS)[:, None] * MOST + j[None, :], shares)
        tl.debug_barrier()
        # Σ s (p − q)(p − q)ᵀ, p the rows and q all samples, seen from the first row, by products of float64.
        own = tl.program_id(0) * ROWS
        origin, sums = tl.load(v + k * MOST + own), tl.sum(shares.to(tl.float64), 1)
        p = tl.load(v + k[None, :] * MOST + i[:, None]) - origin[None, :]
        spread, moment = tl.zeros((DIM, BLOCK), tl.float64), tl.zeros((DIM, DIM), tl.float64)
        for start in range(0, MOST, BLOCK):
            others = start + tl.arange(0, BLOCK)
            away = tl.load(v + k[:, None] * MOST + others[None, :]) - origin[:, None]
            summed, drawn = tl.zeros((BLOCK,), tl.float64), tl.zeros((DIM, BLOCK), tl.float64)
            for row in tl.static_range(ROWS):
                share = tl.load(mine + row * MOST + others).to(tl.float64)
                summed += share
                drawn += share[None, :] * (tl.load(v + k * MOST + own + row) - origin)[:, None]
            rest = 0.5 * summed[None, :] * away - drawn
            if asked == 1:
                spread += rest * away
            elif FULL:
                moment = tl.dot(rest, tl.trans(away), moment, out_dtype=tl.float64)
        if asked == 1:
            tl.store(part + k * (DIM + 1), 2.0 * tl.sum(spread, 1) + tl.sum(sums[:, None] * p * p, 0))
        elif FULL:
            moment += tl.trans(moment)
            for row in range(ROWS):
                heavy = tl.sum(tl.where(tl.arange(0, ROWS) == row, sums, 0.0), 0)
                there = tl.load(v + k * MOST + own + row) - origin
                moment += heavy * there[:, None] * there[None, :]
            tl.store(part + k[:, None] * DIM + k[None, :], moment)
    tl.debug_barrier()
    if tl.atomic_add(counts + fit, 1) == programs - 1:
        tl.store(counts + fit, 0)
        tl.debug_barrier()
        _step(
            u, at, v, scratch + chain * programs * (ROWS * MOST + DD) + ROWS * MOST, ROWS * MOST + DD, programs, d,
            (kind >> (2 * chain)) & 3, asked, length, other, least, FULL, DIM,
        )  # fmt: skip


@sized
def rows_kernel(state, n, first, share, DIM: tl.constexpr):
    """The samples' weights in the likelihood, by the first fit: those below a quantile of its logs count less."""
    i = tl.arange(0, MOST)
    found, weights = _at(state, 0, DIM) + 2 * DIM * DIM + 8, tl.where(i < n, tl.exp(tl.load(state + i)), 0.0)
    logs = tl.load(found + i, mask=i < n, other=0.0) - tl.log(1.0 - weights)
    least = _quantile(logs, n, first, share)
    shares = tl.where(i < n, weights * tl.exp(tl.minimum(logs - least, 0.0)), 0.0)
    tl.store(state + MOST + i, shares / tl.sum(shares, 0))


@sized
def begin_kernel(x, weights, counts, u, state, turned, n, d, m, kind, unit, constant, DIM: tl.constexpr):
    """Begin fits. ``kind`` 0: the first, with the scale ``unit``; 1: fits 1, 2 and 4; 2: fits 3, 5 and 6.

    The first reads samples x (m, d) and their weights. It writes the first n samples as u, (DIM, MOST), the numbers
    that all fits share, and counts of 0.
    """
    chain, k, DD = tl.program_id(0), tl.arange(0, DIM), DIM * DIM
    here, diagonal, i = k[:, None] * DIM + k[None, :], k[:, None] == k[None, :], tl.arange(0, MOST)
    target = tl.where(kind == 1, 1 + chain + chain // 2, tl.where(kind == 2, 3 + chain + (chain + 1) // 2, 0))
    source = tl.where(kind == 2, tl.where(chain == 0, 2, 4), 0)
    from_, at = _at(state, source, DIM), _at(state, target, DIM)
    going = f64(1.0)
    if kind == 0:
        inverse = tl.where(diagonal, 1.0 / unit + f64(0.0), f64(0.0))
        log = -d * tl.log(unit + f64(0.0))
        for column in range(DIM):
            inside = (i < n) & (column + 0 * i < d)
            tl.store(u + column * MOST + i, tl.load(x + i * d + column, mask=inside, other=0.0))
        w = tl.load(weights + i, mask=i < n, other=0.0)
        w /= tl.sum(w, 0)
        tl.store(state + i, tl.log(tl.where(i < n, w, 1.0)))
        tl.store(state + MOST + i, w)
        tl.store(counts + tl.arange(0, 8), tl.zeros((8,), tl.int32))
        total, drawn, squares = f64(0.0), tl.zeros((DIM,), tl.float64), tl.zeros((DIM, DIM), tl.float64)
        BLOCK: tl.constexpr = 128 if DIM == 16 else 64
        for start in range(0, m, BLOCK):  # their mean is at most some spreads from 0
            j = start + tl.arange(0, BLOCK)
            heavy, inside = tl.load(weights + j, mask=j < m, other=0.0), (k < d)[:, None] & (j < m)[None, :]
            value = tl.load(x + k[:, None] + j[None, :] * d, mask=inside, other=0.0)
            weighed = value * heavy[None, :]
            total, drawn = total + tl.sum(heavy, 0), drawn + tl.sum(weighed, 1)
            squares = tl.dot(weighed, tl.trans(value), squares, out_dtype=tl.float64)
        drawn /= total
        tl.store(_at(state, 7, DIM) + here, squares / total - drawn[:, None] * drawn[None, :])
    else:
        shares = tl.load(state + MOST + i)
        share = tl.sum(shares * shares, 0)
        inverse, log = tl.load(from_ + here), tl.load(from_ + 2 * DD)
        if (kind == 1) & (chain == 1):  # a scale per column, where that may pay
            values = tl.load(from_ + DD + k * (DIM + 1))
            logs = tl.where(k < d, tl.log(tl.where(k < d, tl.maximum(values, 1e-6), 1.0)), 0.0)
            away = tl.where(k < d, logs - tl.sum(logs, 0) / d, 0.0)
            going = tl.where(tl.sum(away * away, 0) > 0.2 * (d - 1) * share, going, 0.0)
        if (kind == 1) & (chain == 2):  # the samples' correlation, as large as the first
            covariance = _at(state, 7, DIM)
            size = tl.sqrt(tl.where(k < d, tl.load(covariance + k * (DIM + 1)), 1.0))
            given = tl.load(covariance + here) / size[:, None] / size[None, :]
            given = tl.where((k >= d)[:, None] & diagonal, 1.0, given)
            root, logs = _root(given, d, DIM)
            inverse = root * tl.exp((log + logs) / d)
            tl.store(at + 2 * DD + 2, logs)
            tl.store(at + 2 * DD + 3, tl.sum(tl.sum(root * root, 1), 0) - (DIM - d))
        if (kind == 2) & (chain == 2):  # the likelier of two
            other, better = _at(state, 2, DIM), 4
            rest = tl.load(from_ + 2 * DD + 8 + i, mask=i < n, other=0.0)
            rest -= tl.load(other + 2 * DD + 8 + i, mask=i < n, other=0.0)
            rest = tl.sum(rest * shares, 0) + log - tl.load(other + 2 * DD)
            if (rest <= 0.0) | (-tl.load(from_ + 2 * DD + 2) <= constant):
                inverse, log, better = tl.load(other + here), tl.load(other + 2 * DD), 2
            tl.store(at + 2 * DD + 4, better + f64(0.0))
    tl.store(at + here, inverse)
    tl.store(at + 2 * DD, log)
    tl.store(at + 2 * DD + 1, going)
    _turn(u, turned + target * DIM * MOST, at, MOST, DIM, MOST, 1, DIM)


@sized
def shape_kernel(x, state, shape, out, n, d, m, asked, least, constant, FULL: tl.constexpr, DIM: tl.constexpr):
    """Compare the fits, as :func:`sdkde_core.bandwidth.shapes.find_shape` does; ``asked`` 0: only those of scales.

    ``shape`` (2 + d²,) gets half the number of the fit that is taken, the median gain in log density by it, and its W
    at the shape's size. ``out`` gets W x of the samples x (m, d).
    """
    i, k, DD = tl.arange(0, MOST), tl.arange(0, DIM), DIM * DIM
    here, diagonal, correlated = k[:, None] * DIM + k[None, :], k[:, None] == k[None, :], _at(state, 4, DIM)
    shares = tl.load(state + MOST + i)
    share, root_log = tl.sum(shares * shares, 0), tl.load(correlated + 2 * DD + 2, mask=asked > 0, other=0.0)
    mixed = (asked > 0) & (tl.load(correlated + 2 * DD + 3, mask=asked > 0, other=0.0) < 1.0 / least)
    oriented, full = mixed & (-root_log > constant), asked < 0
    if FULL:
        begun = _at(state, tl.load(_at(state, 6, DIM) + 2 * DD + 4).to(tl.int32), DIM) + DD
        moment = tl.load(begun + here) + tl.where(diagonal & (k < d)[:, None], least, 0.0)
        moment = tl.where(diagonal & (k >= d)[:, None], 1.0, moment)
        _, logs = _root(moment, d, DIM)
        trace = tl.sum(tl.sum(tl.where(diagonal, moment, 0.0), 1), 0) - (DIM - d)
        away = 2.0 * d * tl.log(trace / d) - 4.0 * logs  # to second order the logs' squares about their mean
        single = tl.load(_at(state, 6, DIM) + here).to(tl.float32)
        square = tl.dot(tl.trans(single), single, input_precision="ieee").to(tl.float64)  # of the matrix the inverse
        root, _ = _root(square, d, DIM)
        products = tl.sum(root * root, 0) * tl.sum(tl.where(diagonal, square, 0.0), 0)
        near = away <= 0.2 * (0.5 * d * (d + 1) - 1.0) * share  # not where rounding leaves no positive moment
        full = mixed & (near == 0) & (tl.sum(tl.where(k < d, products, 0.0), 0) < 1.0 / least)
    taken, good, middle = tl.full((), 0, tl.int32), asked < 0, f64(0.0)
    for step in range(7):
        fit, other = tl.where(step < 6, step // 2 * 2 + 2, taken), tl.where(step < 6, taken + step % 2, 0)
        allowed = (fit == 2) | ((fit == 4) & oriented) | ((fit == 6) & full)
        fit = tl.where(allowed, fit, 0)  # others may not have been made
        one, two = _at(state, fit, DIM) + 2 * DD, _at(state, other, DIM) + 2 * DD
        rest = tl.load(one + 8 + i, mask=i < n, other=0.0) - tl.load(two + 8 + i, mask=i < n, other=0.0)
        rest += tl.load(one) - tl.load(two)
        middle = _quantile(rest, n, (n - 1) // 2, 0.5 * (1 - n % 2))
        rest = tl.minimum(tl.maximum(rest, middle - 2.0), middle + 2.0)
        mean = tl.sum(rest * shares, 0)
        rest = shares * (rest - mean)
        error = tl.sqrt(tl.sum(rest * rest, 0))
        more = tl.where(fit == 2, d - 1.0, tl.where(fit == 4, 0.0, 0.5 * d * (d - 1) + tl.where(taken == 2, 0, d - 1)))
        errors = tl.where(fit == 4, tl.maximum(-1.5, 1.0 + 5.0 * root_log / d), 2.0)
        score = tl.where(error > 0.0, (mean - more * share) / error, 0.0)
        good = (score > errors) & (good | (step % 2 == 0))
        taken = tl.where(good & allowed & (step % 2 == 1) & (step < 6), fit, taken)
    at = _at(state, taken, DIM)
    times = tl.exp((tl.where(taken > 2, -root_log, 0.0) - tl.load(at + 2 * DD)) / d)
    inverse = tl.where(taken == 0, tl.where(diagonal, 1.0, 0.0), tl.load(at + here) * times)
    tl.debug_barrier()
    tl.store(at + here, inverse)
    tl.store(shape, taken / 2 + f64(0.0))
    tl.store(shape + 1, middle)
    tl.store(shape + 2 + k[:, None] * d + k[None, :], inverse, mask=(k < d)[:, None] & (k < d)[None, :])
    _turn(x, out, at, m, d, 1, d, DIM)


@functools.cache
@launches.aside
def begin(device: torch.device, d: int, full: bool) -> None:
    """The first time, let all kernels of a choice compile side by side."""
    if device.type == "cuda":
        few, weights = (torch.full(k, 0.5, dtype=torch.float64, device="cpu") for k in ((2, d), (2,)))
        if d <= 32:  # of more columns no shape is chosen
            rehearse(shaped, few, weights, 2, True, 1.0, (1.0,), (1,), 1.0, 0.0, full)
        criteria.begin(device, "sdkde")


def shaped(
    u: Any, weights: Any, n: int, mixed: bool, scale: float, first: Sequence[float], lengths: Sequence[int],
    least: float, chance: float, full: bool,
) -> tuple[Any, Any]:  # fmt: skip
    """See :class:`sdkde_core.protocol.CriteriaBackend`."""
    (m, d), rows, most, full = u.shape, 8, int(MOST.value), mixed and full
    dim, programs = max(16, 1 << (d - 1).bit_length()), -(-n // rows)
    size = 2 * dim * dim + 8 + most  # of a fit
    with on_device(u):
        begin(u.device, d, full)
        room, block = 3 * programs * (rows * most + dim * dim), 1024 // dim
        sizes = dim * most, 2 * most + FITS * size + dim * dim, FITS * dim * most
        given = tuple(torch.empty(k, dtype=torch.float64, device=u.device) for k in sizes)
        scratch = torch.empty(room, dtype=torch.float32, device=u.device)
        counts = torch.empty(8, dtype=torch.int32, device=u.device)

        def climb(begun: int, fits: Sequence[int], kinds: Sequence[int], last: Sequence[int]) -> None:
            numbers, kind, asked, in_the_end = (
                sum(x << (bits * i) for i, x in enumerate(xs[: len(fits)]))
                for xs, bits in ((fits, 4), (kinds, 2), ([x % 3 for x in kinds], 2), (last, 2))
            )
            begin = kept(begin_kernel, (len(fits), 1), (), (dim,), eight)
            begin(u, weights, counts, *given, last=(n, d, m, begun, scale, chance))
            step = kept(step_kernel, (programs, len(fits)), (), (rows, block, full, dim), eight)
            lengths_of = [*itertools.zip_longest(lengths if begun else (), first, fillvalue=0), (0, 0)]
            for i, (length, other) in enumerate(lengths_of if begun else [(0, 0), *lengths_of]):
                what = asked if length or other else in_the_end
                numbers_of = n, d, numbers, kind, what, float(length), float(other), least
                step(*given, scratch, counts, last=numbers_of)
                if not begun and not i:
                    kept(rows_kernel, (1, 1), (), (dim,), eight)(given[1], last=(n, int(place), place % 1.0))

        place, eight = 0.03 * (n - 1), Config(1, 1, 8, 1)
        climb(0, [0], [3], [1 + full])
        climb(1, [1, 2, 4][: 2 + mixed], [0, 1, 3], [0, 1 + full, 1 + full])
        climb(2, [3, 5, 6][: 1 + mixed + full], [1, 0, 2], [0, 0, 0])
        shape, out = (torch.empty(k, dtype=torch.float64, device=u.device) for k in (2 + d * d, (m, d)))
        compare = kept(shape_kernel, (1, 1), (), (full, dim), eight)
        compare(u, given[1], shape, out, last=(n, d, m, int(mixed), least, chance))
    return out, shape
