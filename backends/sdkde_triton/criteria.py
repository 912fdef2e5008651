"""What bandwidths say of samples that are left out: criteria at all bandwidths at once.

The formulas are those of :mod:`sdkde_core.bandwidth.pairs`. Samples ``u`` (n, d), their weights (n,), and the rates
½h⁻² of the bandwidths are float64.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from sdkde_core.plugin import launches, on_device

from .compiled import Launch, rehearse
from .kernels import sized
from .space import Config

#: A squared distance that stands for none: of a sample to itself, and to padding. Its products stay finite.
FAR = tl.constexpr(1e25)

#: Launches are kept, with their compiled code: to look for that takes as long as to launch.
kept = functools.lru_cache(256)(Launch)


@sized
def squares_kernel(u, squares, n, d, padded, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Squared distances in float64, rounded, (padded, padded) float32; behind them each row's least, and the samples,
    (d, padded).
    """
    i, size = tl.program_id(0) * ROWS + tl.arange(0, ROWS), padded // BLOCK * BLOCK  # which says what divides it
    nearest = squares + size * size
    single = nearest + size
    least = tl.full((ROWS,), FAR, tl.float32)
    for first in range(0, size, BLOCK):
        j = first + tl.arange(0, BLOCK)
        found = tl.zeros((ROWS, BLOCK), tl.float64)
        for k in tl.range(0, d, loop_unroll_factor=4):
            own = tl.load(u + i * d + k, mask=i < n, other=0.0)
            away = own[:, None] - tl.load(u + j * d + k, mask=j < n, other=0.0)[None, :]
            found += away * away
        others = (i[:, None] != j[None, :]) & (i < n)[:, None] & (j < n)[None, :]
        rounded = tl.where(others, found.to(tl.float32), FAR)
        tl.store(squares + i[:, None] * size + j[None, :], rounded)
        least = tl.minimum(least, tl.min(rounded, 1))
    tl.store(nearest + i, least)
    for k in range(d):
        tl.store(single + k * size + i, tl.load(u + i * d + k, mask=i < n, other=0.0).to(tl.float32))


@sized
def moves_kernel(u, weights, rates, squares, moves, n, d, padded, splits, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """S_j / D_j (16 of its dimensions) and D_j at one bandwidth: (d + 1, padded) float32 for each bandwidth.

    This kernel and the next ones skip bandwidths whose rate is negative.
    """
    i, size = tl.program_id(0) * ROWS + tl.arange(0, ROWS), padded // BLOCK * BLOCK
    k = tl.program_id(1) % splits * 16 + tl.arange(0, 16)
    bandwidth = tl.program_id(1) // splits
    nearest = squares + size * size
    c = tl.load(rates + bandwidth)
    near, rate = tl.load(nearest + i), c.to(tl.float32)
    lightest = tl.full((), 1.0, tl.float64)
    sums = tl.zeros((ROWS,), tl.float32)
    means = tl.zeros((ROWS, 16), tl.float32)
    for first in range(0, tl.where(c > 0.0, size, 0), BLOCK):
        j = first + tl.arange(0, BLOCK)
        apart = tl.load(squares + i[:, None] * size + j[None, :])
        w = tl.load(weights + j, mask=j < n, other=0.0)
        lightest = tl.minimum(lightest, tl.min(tl.where(j < n, w, 1.0), 0))
        phi = tl.exp((near[:, None] - apart) * rate) * w.to(tl.float32)[None, :]
        others = tl.load(nearest + size + k[None, :] * size + j[:, None], mask=k[None, :] < d, other=0.0)
        sums += tl.sum(phi, 1)
        means = tl.dot(phi, others, means, input_precision="tf32x3")
    # A nearest sample that is less close, relative to the least weight, is nothing to sums of float32.
    scale = tl.exp(-c * near.to(tl.float64))
    scale = tl.where(scale < 1e-9 * lightest, 0.0, scale)
    total = tl.where(i < n, tl.load(weights + i, mask=i < n, other=0.0) + scale * sums.to(tl.float64), 1.0)
    own = tl.load(u + i[:, None] * d + k[None, :], mask=(i < n)[:, None] & (k < d)[None, :], other=0.0)
    pull = (scale / total)[:, None] * (means.to(tl.float64) - sums.to(tl.float64)[:, None] * own)
    moves += bandwidth * (d + 1) * size
    tl.store(moves + k[None, :] * size + i[:, None], pull.to(tl.float32), mask=k[None, :] < d)
    if tl.program_id(1) % splits == 0:
        tl.store(moves + d * size + i, total.to(tl.float32))


@sized
def criteria_kernel(
    weights, rates, squares, moves, out,
    n, d, padded, length,
    MOVED: tl.constexpr, LAPLACE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """At one bandwidth log |p̂₋ᵢ|, its sign for laplace, and a program's part of ∫p̂² h^d.

    ``out`` has ``length`` numbers for each bandwidth.
    """
    i, size = tl.program_id(0) * ROWS + tl.arange(0, ROWS), padded // BLOCK * BLOCK
    bandwidth = tl.program_id(1)
    nearest = squares + size * size
    single = nearest + size
    moves += bandwidth * (d + 1) * size
    c = tl.load(rates + bandwidth)
    rate, near = c.to(tl.float32), tl.load(nearest + i)
    weight = tl.load(weights + i, mask=i < n, other=0.0)
    own = weight.to(tl.float32)
    sums = tl.zeros((ROWS,), tl.float32)
    square = tl.zeros((ROWS,), tl.float32)
    if MOVED:
        near = tl.full((ROWS,), FAR, tl.float32)  # the least so far
    for first in range(0, tl.where(c > 0.0, size, 0), BLOCK):
        j = first + tl.arange(0, BLOCK)
        apart = tl.load(squares + i[:, None] * size + j[None, :])
        w = tl.load(weights + j, mask=j < n, other=0.0).to(tl.float32)[None, :]
        others = apart < 0.1 * FAR
        if MOVED:
            along = tl.zeros((ROWS, BLOCK), tl.float32)
            moved = tl.zeros((ROWS, BLOCK), tl.float32)
            pulls = tl.zeros((BLOCK,), tl.float32)
            for k in tl.range(0, d, loop_unroll_factor=4):
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
    log = tl.log(tl.abs(sums).to(tl.float64) / (1.0 - weight)) - c * near.to(tl.float64) + 0.5 * d * tl.log(2.0 * c)
    tl.store(out + i, log, mask=i < n)
    if LAPLACE:
        tl.store(out + n + i, tl.where(sums > 0, 1.0, tl.where(sums < 0, -1.0, 0.0)), mask=i < n)
    parts = weight * (square + own).to(tl.float64)
    tl.store(out + length - tl.num_programs(0) + tl.program_id(0), tl.sum(parts, 0))


@triton.jit
def _scores(loss, unit, w, row, b, n_eff):
    """The plausibility of each row of losses beside the best row: _plausible of sdkde_core.bandwidth.selection."""
    means = tl.where(row, unit * tl.sum(loss * w, 0), float("inf"))
    best = b == tl.argmin(means, 0)
    own = tl.sum(tl.where(best, unit, 0.0), 0)
    larger = tl.maximum(unit, own)
    away = loss * (unit / larger).to(tl.float32)[None, :]
    away -= tl.sum(tl.where(best[None, :], loss, 0.0), 1)[:, None] * (own / larger).to(tl.float32)[None, :]
    away *= 1.0 / tl.maximum(tl.max(tl.abs(away), 0), 1e-30)[None, :]
    mean = tl.sum(away * w, 0)
    away -= mean[None, :]
    variance = tl.sum(away * away * w, 0)
    return tl.where(mean == 0.0, 0.0, -2.0 * n_eff * mean * mean / variance)


@sized
def narrow_kernel(
    values, weights, few, rates, out, n, d, length, splits, top, m, unit, factor,
    SQUARES: tl.constexpr, LOGS: tl.constexpr, LAPLACE: tl.constexpr,
):  # fmt: skip
    """Write the rates to evaluate on all samples, and −1 for others, as _Criteria.narrowed of sdkde_core does.

    ``values`` are from :func:`criteria_kernel` at ``splits`` rates ``few``: every third of the ``m`` rates up to the
    one before ``top``, and the first. They stand for ``factor`` times as many samples.
    ``unit`` is 1, which the compiler does not know: else it gives a thread all bandwidths of a sample, and spills.
    """
    b, i, j, counted = tl.arange(0, 16), tl.arange(0, 512), tl.arange(0, 64), n * (1 + LAPLACE)
    values += b[None, :] * length
    here, parts = (b < splits)[None, :] & (i < n)[:, None], (b < splits)[None, :] & (counted + j < length)[:, None]
    squares = tl.sum(tl.load(values + (counted + j[:, None]) * unit, mask=parts, other=0.0), 0)
    squares = tl.log(tl.maximum(squares, 1e-300)) + 0.5 * d * tl.log(tl.load(few + b, mask=b < splits, other=1.0))
    w = tl.load(weights + i, mask=i < n, other=0.0).to(tl.float32)[:, None]
    logs = tl.where(here, tl.load(values + i[:, None] * unit, mask=here).to(tl.float32), -1e30)
    units = tl.maximum(tl.max(logs, 0), squares)
    near = 2.0 * tl.exp(logs - units.to(tl.float32)[None, :])
    if LAPLACE:
        near *= tl.load(values + (n + i[:, None]) * unit, mask=here, other=0.0).to(tl.float32)
    near = tl.exp(squares - units).to(tl.float32)[None, :] - near
    worthwhile = tl.sum(near * w, 0) < 0.0
    low, high, going, n_eff = splits, 0 * n, n > 0, 1.0 / tl.sum(tl.sum(w * w, 1), 0)
    for k in range(6, splits + 3, 3):  # from the widest down to where none of the narrower half is plausible
        if going:
            row = (b < splits) & (b >= splits - k)
            largest = tl.max(tl.where(row & worthwhile, units, float("-inf")), 0)
            largest = tl.where(largest > float("-inf"), largest, tl.min(tl.where(row, units, float("inf")), 0))
            scores = tl.full((16,), float("-inf"), tl.float64)
            for logarithmic in range(1 - SQUARES, 1 + LOGS):  # compiled once for both criteria
                loss = tl.where(logarithmic == 1, -tl.maximum(logs, (largest - 1e4).to(tl.float32)), near)
                of_units = tl.where(logarithmic == 1, 1.0, tl.exp(tl.minimum(units - largest, 300.0)))
                scores = tl.maximum(scores, _scores(loss, of_units, w, row, b, n_eff))
            plausible = row & (factor * scores > -6.0)
            low, high = tl.min(tl.where(plausible, b, splits), 0), tl.max(tl.where(plausible, b, -1), 0)
            going = (high >= 0) & (low < tl.maximum(splits - k, 0) + 3)
    nothing = high < 0
    low, high = tl.maximum(top - 1 - 3 * (splits - 1 - low), 0) - 4, tl.maximum(top + 2 - 3 * (splits - 1 - high), 3)
    looked = (j > low) & (j <= high) | (j >= top) & (high >= top - 1)
    rate = tl.load(rates + j, mask=j < m, other=0.0)
    tl.store(out + j, tl.where(looked | nothing, rate, -1.0), mask=j < m)


@functools.lru_cache(64)
@launches.aside
def _rates(bandwidths: tuple[float, ...], device: torch.device) -> torch.Tensor:
    """½h⁻² on a device: of samples of one shape the bandwidths are the same in every call."""
    return torch.from_numpy(0.5 / np.square(bandwidths)).to(device)


@functools.cache
@launches.aside
def begin(device: torch.device, method: str) -> None:
    """The first time, let all kernels compile side by side."""
    if device.type == "cuda":
        few = [torch.full(k, 0.5, dtype=torch.float64, device="cpu") for k in ((2, 1), (2,))]
        with np.errstate(all="ignore"):  # nothing is launched, so what is read is arbitrary
            rehearse(left_out, *few, [1.0], method)
            rehearse(narrowed, few[0], few[1], 1, [1.0], [1.0], 1, 1.0, (True, method != "laplace"), method)


def left_out(u: Any, weights: Any, bandwidths: Sequence[float], method: str, looked: Any = None) -> Any:
    """See :class:`sdkde_core.protocol.CriteriaBackend`."""
    (n, d), count, rows, moved, laplace = u.shape, len(bandwidths), 16, method == "sdkde", method == "laplace"
    with on_device(u):
        begin(u.device, method)
        rates = _rates(tuple(bandwidths), u.device) if looked is None else looked
        padded, programs = -(-n // 128) * 128, -(-n // rows)
        sizes, length = (n, d, padded), n * (1 + laplace) + programs
        single = {"dtype": torch.float32, "device": u.device}
        squares = torch.empty(padded * (padded + 1 + d), **single)
        moves = torch.empty(count * (d + 1) * padded if moved else 1, **single)
        out = torch.empty((count, length), dtype=torch.float64, device=u.device)
        kept(squares_kernel, (padded // 4, 1), sizes, (4, 128))(u, squares)
        if moved:
            splits = -(-d // 16)
            grid = padded // 32, count * splits
            kept(moves_kernel, grid, (*sizes, splits), (32, 64))(u, weights, rates, squares, moves)
        flags = moved, laplace, rows, 128
        kept(criteria_kernel, (programs, count), (*sizes, length), flags)(weights, rates, squares, moves, out)
    return out


def narrowed(
    values: Any, weights: Any, d: int, first: Sequence[float], bandwidths: Sequence[float], top: int, times: float,
    criteria: Sequence[bool], method: str,
) -> Any:  # fmt: skip
    """See :class:`sdkde_core.protocol.CriteriaBackend`."""
    with on_device(values):
        rates = (_rates(tuple(hs), values.device) for hs in (first, bandwidths))
        out = torch.empty(len(bandwidths), dtype=torch.float64, device=values.device)
        sizes = len(weights), d, values.shape[1], len(first), top, len(bandwidths), 1, float(times)
        flags = *criteria, method == "laplace"
        kept(narrow_kernel, (1, 1), sizes, flags, Config(1, 1, 16, 1))(values, weights, *rates, out)
    return out


def terms(values: Any, n: int, d: int, bandwidths: Sequence[float], method: str) -> tuple[Any, Any, Any]:
    """See :class:`sdkde_core.protocol.CriteriaBackend`."""
    found, signed = values.reshape(len(bandwidths), -1), method == "laplace"
    signs = found[:, n : 2 * n] if signed else np.ones(len(found))
    squares = np.log(np.maximum(found[:, n * (1 + signed) :].sum(1), 1e-300))
    return found[:, :n], signs, squares - d * np.log(np.multiply(bandwidths, 2**0.5))
