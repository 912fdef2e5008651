"""What bandwidths say of samples that are left out: criteria at all bandwidths at once, and steps of EM.

The formulas are those of :mod:`sdkde_core.bandwidth.pairs` and :mod:`sdkde_core.bandwidth.shapes`. Samples are few, and
come from the host in one piece, float64: HEAD numbers, then arrays whose rows are padded.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import triton.language as tl

from sdkde_core.plugin import on_device

from .compiled import Launch, rehearse
from .kernels import f64, sized

HEAD = tl.constexpr(64)

#: A squared distance that stands for none: of a sample to itself, and to padding. Its products stay finite.
FAR = tl.constexpr(1e25)


@sized
def squares_kernel(given, squares, n, d, padded, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Squared distances in float64, rounded, (padded, padded) float32; behind them each row's least, and the samples.

    ``given``: the head, weights, and samples (d, padded).
    """
    i, size = tl.program_id(0) * ROWS + tl.arange(0, ROWS), padded // BLOCK * BLOCK  # which says what divides it
    points, nearest = given + HEAD + size, squares + size * size
    single = nearest + size
    least = tl.full((ROWS,), FAR, tl.float32)
    for first in range(0, size, BLOCK):
        j = first + tl.arange(0, BLOCK)
        found = tl.zeros((ROWS, BLOCK), tl.float64)
        for k in range(d):
            away = tl.load(points + k * size + i)[:, None] - tl.load(points + k * size + j)[None, :]
            found += away * away
        others = (i[:, None] != j[None, :]) & (i < n)[:, None] & (j < n)[None, :]
        rounded = tl.where(others, found.to(tl.float32), FAR)
        tl.store(squares + i[:, None] * size + j[None, :], rounded)
        least = tl.minimum(least, tl.min(rounded, 1))
    tl.store(nearest + i, least)
    for k in range(d):
        tl.store(single + k * size + i, tl.load(points + k * size + i).to(tl.float32))


@sized
def moves_kernel(given, squares, moves, n, d, padded, splits, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """S_j / D_j, 16 dimensions of it, and D_j, at one bandwidth: (d + 1, padded) float32 for each."""
    i, size = tl.program_id(0) * ROWS + tl.arange(0, ROWS), padded // BLOCK * BLOCK
    k = tl.program_id(1) % splits * 16 + tl.arange(0, 16)
    bandwidth = tl.program_id(1) // splits
    weights, points, nearest = given + HEAD, given + HEAD + size, squares + size * size
    c = tl.load(given + bandwidth)
    near, rate = tl.load(nearest + i), c.to(tl.float32)
    sums = tl.zeros((ROWS,), tl.float32)
    means = tl.zeros((ROWS, 16), tl.float32)
    for first in range(0, size, BLOCK):
        j = first + tl.arange(0, BLOCK)
        apart = tl.load(squares + i[:, None] * size + j[None, :])
        phi = tl.exp((near[:, None] - apart) * rate) * tl.load(weights + j).to(tl.float32)[None, :]
        others = tl.load(nearest + size + k[None, :] * size + j[:, None], mask=k[None, :] < d, other=0.0)
        sums += tl.sum(phi, 1)
        means = tl.dot(phi, others, means, input_precision="ieee")
    # A nearest sample that is less close, relative to the least weight, is nothing to sums of float32.
    scale = tl.exp(-c * near.to(tl.float64))
    scale = tl.where(scale < tl.load(given + HEAD - 1), 0.0, scale)
    total = tl.where(i < n, tl.load(weights + i) + scale * sums.to(tl.float64), 1.0)
    own = tl.load(points + k[None, :] * size + i[:, None], mask=k[None, :] < d, other=0.0)
    pull = (scale / total)[:, None] * (means.to(tl.float64) - sums.to(tl.float64)[:, None] * own)
    moves += bandwidth * (d + 1) * size
    tl.store(moves + k[None, :] * size + i[:, None], pull.to(tl.float32), mask=k[None, :] < d)
    if tl.program_id(1) % splits == 0:
        tl.store(moves + d * size + i, total.to(tl.float32))


@sized
def criteria_kernel(
    given, squares, moves, out,
    n, d, padded, length,
    MOVED: tl.constexpr, LAPLACE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """At one bandwidth log |p̂₋ᵢ|, its sign for laplace, and a program's part of ∫p̂², without what is the host's.

    ``length`` numbers of each bandwidth.
    """
    i, size = tl.program_id(0) * ROWS + tl.arange(0, ROWS), padded // BLOCK * BLOCK
    bandwidth = tl.program_id(1)
    weights, nearest = given + HEAD, squares + size * size
    single = nearest + size
    moves += bandwidth * (d + 1) * size
    c = tl.load(given + bandwidth)
    rate, near = c.to(tl.float32), tl.load(nearest + i)
    own = tl.load(weights + i).to(tl.float32)
    sums = tl.zeros((ROWS,), tl.float32)
    square = tl.zeros((ROWS,), tl.float32)
    if MOVED:
        near = tl.full((ROWS,), FAR, tl.float32)  # the least so far
    for first in range(0, size, BLOCK):
        j = first + tl.arange(0, BLOCK)
        apart = tl.load(squares + i[:, None] * size + j[None, :])
        w = tl.load(weights + j).to(tl.float32)[None, :]
        others = apart < 0.1 * FAR
        if MOVED:
            along = tl.zeros((ROWS, BLOCK), tl.float32)
            moved = tl.zeros((ROWS, BLOCK), tl.float32)
            pulls = tl.zeros((BLOCK,), tl.float32)
            for k in range(d):
                pull = tl.load(moves + k * size + j)
                away = tl.load(single + k * size + i)[:, None] - tl.load(single + k * size + j)[None, :]
                along += away * pull[None, :]
                pulls += pull * pull
                away += 0.5 * (tl.load(moves + k * size + i)[:, None] - pull[None, :])
                moved += away * away
            everyone = tl.load(moves + d * size + j)[None, :]
            rest = everyone - own[:, None] * tl.exp(-rate * apart)
            # Sample j itself stays: less than its weight is rounding. A square of 1e8 does not overflow.
            t = tl.minimum(0.5 * everyone / tl.maximum(rest, tl.maximum(w, 1e-30)), 1e8)
            p = t + 0.5
            far = tl.maximum(p * (p * apart - 2.0 * t * along) + t * t * pulls[None, :], 0.0)  # less is rounding
            far = tl.where(others, far, FAR)
            least = tl.minimum(near, tl.min(far, 1))
            sums = sums * tl.exp((least - near) * rate) + tl.sum(tl.exp((least[:, None] - far) * rate) * w, 1)
            near, apart = least, moved
        else:
            terms = tl.exp((near[:, None] - apart) * rate) * w
            if LAPLACE:
                terms *= 1.0 + 0.5 * d - apart * rate
            sums += tl.sum(terms, 1)
        q = tl.where(others, tl.minimum(apart * rate, 1e4), 1e4)
        terms = tl.exp(-0.5 * q) * w
        if LAPLACE:
            terms *= 1.0 + 0.5 * d - 0.5 * q + (q * (q - 2.0 * (d + 2)) + d * (d + 2)) / 16.0
        square += tl.sum(terms, 1)
    if LAPLACE:
        own *= 1.0 + 0.5 * d + d * (d + 2) / 16.0
    out += bandwidth * length
    log = tl.log(tl.abs(sums).to(tl.float64)) - c * near.to(tl.float64)
    tl.store(out + i, log, mask=i < n)
    if LAPLACE:
        tl.store(out + n + i, tl.where(sums > 0, 1.0, tl.where(sums < 0, -1.0, 0.0)), mask=i < n)
    parts = tl.load(weights + i) * (square + own).to(tl.float64)
    tl.store(out + length - tl.num_programs(0) + tl.program_id(0), tl.sum(parts, 0))


@functools.cache
def _begin(device: torch.device, method: str) -> None:
    """The first time, let all kernels of a choice by this method compile side by side."""
    if device.type == "cuda":
        few, weights = np.zeros((2, 1)), np.full(2, 0.5)
        with np.errstate(all="ignore"):  # nothing is launched, so what is read is arbitrary
            rehearse(climb, few, weights, weights, (1.0,), 0.0, True, "cpu")
            rehearse(left_out, few, weights, (1.0,), method, "cpu")


def left_out(
    u: Any, weights: Any, bandwidths: Sequence[float], method: str, device: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """See :class:`sdkde_core.protocol.CriteriaBackend`."""
    (n, d), count, rows = u.shape, len(bandwidths), 16
    padded, programs, moved, laplace = -(-n // 128) * 128, -(-n // rows), method == "sdkde", method == "laplace"
    sizes, length = (n, d, padded), n * (1 + laplace) + programs
    head: int = HEAD.value
    given = np.zeros(head + padded * (1 + d))
    given[:count], given[head - 1] = 0.5 / np.square(bandwidths), 1e-9 * weights.min()
    given[head : head + n] = weights
    given[head + padded :].reshape(d, padded)[:, :n] = u.T
    there = torch.from_numpy(given).to(device)
    single = {"dtype": torch.float32, "device": there.device}
    with on_device(there):
        _begin(there.device, method)
        squares = torch.empty(padded * (padded + 1 + d), **single)
        moves = torch.empty(count * (d + 1) * padded if moved else 1, **single)
        out = torch.empty((count, length), dtype=torch.float64, device=there.device)
        Launch(squares_kernel, (padded // 8, 1), (), (8, 128))(there, squares, *sizes)
        if moved:
            splits = -(-d // 16)
            grid = padded // 32, count * splits
            Launch(moves_kernel, grid, (), (32, 64))(there, squares, moves, *sizes, splits)
        run = Launch(criteria_kernel, (programs, count), (*sizes, length), (moved, laplace, rows, 128))
        run(there, squares, moves, out)
        found = out.cpu().numpy()
    signs = found[:, n : 2 * n] if laplace else np.ones((count, n))
    dimensions = d * np.log(bandwidths)
    logs = found[:, :n] - np.log1p(-weights) - dimensions[:, None]
    squared = np.log(np.maximum(found[:, -programs:].sum(1), 1e-300)) - dimensions - 0.5 * d * np.log(2.0)
    return logs, signs, squared


@sized
def climb_kernel(given, out, partial, n, d, kind, ROWS: tl.constexpr, MOST: tl.constexpr):
    """A program's share in the moment (d, d) of kernels with the precisions that ``out`` begins with, float64.

    Kind 0: its trace; 1: its diagonal, an element a program; 2: all of it, a row a program, and log Σ_j w_j φ_ij, which
    follows the moment in ``out``. 1 and 2 are without the precisions. ``given``: the head, log weights, shares, and
    samples (d, MOST).
    """
    i, j, row = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, MOST), tl.program_id(1)
    points = given + HEAD + 2 * MOST
    q = tl.zeros((ROWS, MOST), tl.float64)
    for k in range(d):
        away = tl.load(points + k * MOST + i)[:, None] - tl.load(points + k * MOST + j)[None, :]
        q += tl.load(out + k) * away * away
    logs = tl.load(given + HEAD + j)[None, :] - 0.5 * q
    logs = tl.where((i[:, None] != j[None, :]) & (j < n)[None, :], logs, -1e300)
    most = tl.max(logs, 1)
    near = tl.exp(logs - most[:, None])
    sums = tl.sum(near, 1)
    near *= (tl.load(given + HEAD + MOST + i) / sums)[:, None]
    partial += (tl.program_id(0) * d + row) * d
    if kind == 0:
        tl.store(partial, tl.sum(tl.sum(near * q, 1), 0))
    else:
        near *= tl.load(points + row * MOST + i)[:, None] - tl.load(points + row * MOST + j)[None, :]
        for k in range(tl.where(kind == 1, row, 0), tl.where(kind == 1, row + 1, d)):
            away = tl.load(points + k * MOST + i)[:, None] - tl.load(points + k * MOST + j)[None, :]
            tl.store(partial + k, tl.sum(tl.sum(near * away, 1), 0))
        stored = tl.where(kind == 2, tl.where(row == 0, n, 0), 0)
        tl.store(out + d + d * d + i, most + tl.log(sums), mask=i < stored)


@sized
def step_kernel(given, out, partial, n, d, first, kind, MOST: tl.constexpr):
    """Sum the shares of ``n`` programs: kind 2 keeps the moment, with others precisions go the step ``first`` on."""
    k, i = tl.program_id(0), tl.arange(0, MOST)
    element = tl.where(kind == 2, k, kind * k * (d + 1))
    total = tl.sum(tl.load(partial + i * d * d + element, mask=i < n, other=0.0), 0)
    if kind == 2:
        tl.store(out + d + k, total)
    else:
        rate = tl.load(out + k)
        mean = tl.maximum(tl.where(kind == 1, rate * total, total / d), tl.load(given + HEAD - 1))
        stretch = tl.minimum(tl.maximum(tl.load(given + first) * tl.log(mean), f64(-5.0)), f64(5.0))
        tl.store(out + k, rate * tl.exp(-stretch))


#: Launches are kept, with their compiled code: to look for that takes as long as to launch.
_climbing = functools.lru_cache(256)(functools.partial(Launch, climb_kernel))
_stepping = functools.lru_cache(256)(functools.partial(Launch, step_kernel))


def climb(
    u: Any, weights: Any, shares: Any, lengths: Sequence[float], least: float, common: bool, device: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """See :class:`sdkde_core.protocol.CriteriaBackend`."""
    (n, d), rows = u.shape, 4
    most = max(512, 1 << (n - 1).bit_length())
    programs, head = -(-n // rows), int(HEAD.value)
    size = head + most * (2 + d)
    given = np.zeros(size + d + d * d + n)
    given[: len(lengths)], given[head - 1] = lengths, least
    given[head : head + n], given[head + most : head + most + n] = np.log(weights), shares
    given[head + 2 * most : size].reshape(d, most)[:, :n], given[size : size + d] = u.T, 1.0
    there = torch.from_numpy(given).to(device)
    with on_device(there):
        _begin(there.device, "sdkde")
        out = there[size:]  # as aligned as that
        partial = torch.empty(programs * d * d, dtype=torch.float64, device=there.device)
        for step, kind in [*enumerate([0 if common else 1] * len(lengths)), (0, 2)]:
            grid = programs, 1 if kind == 0 else d
            _climbing(grid, (), (rows, most))(there, out, partial, n, d, kind)
            grid = d * d if kind == 2 else d, 1
            _stepping(grid, (), (most,))(there, out, partial, programs, d, step, kind)
        found = out.cpu().numpy()
    rates, moment, logs = found[:d], found[d : d + d * d].reshape(d, d), found[d + d * d :]
    return rates, moment * np.sqrt(rates[:, None] * rates), logs
