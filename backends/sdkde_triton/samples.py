"""Samples as a choice of bandwidth begins with them: in an order, in spreads, and what their columns are like."""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton.language as tl

from sdkde_core.plugin import on_device

from . import fits
from .compiled import rehearse
from .criteria import kept
from .kernels import sized, wide


@sized
def order_kernel(x, taken, ranks, columns, n, d, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """What :meth:`sdkde_core.protocol.CriteriaBackend.ordered` says of a column, and two middle values: (7, d).

    ``ranks`` (d, n) are the rows' places in each column; in the first one those that are equal follow the second.
    ``taken`` are rows of x.
    """
    k, i = tl.program_id(1), tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    own = wide(0) + tl.load(taken + i, mask=i < n, other=0) * d
    a, b = tl.load(x + own + k)[:, None], tl.load(x + own + tl.where(k == 0, 1, k))[:, None]
    # Sums within the loop would wait for all threads.
    rank, ties = tl.zeros((ROWS, BLOCK), tl.int32), tl.zeros((ROWS, BLOCK), tl.int32)
    after = tl.full((ROWS, BLOCK), float("inf"), tl.float64)
    low, high = tl.full((BLOCK,), float("inf"), tl.float64), tl.full((BLOCK,), float("-inf"), tl.float64)
    for start in range(0, n, BLOCK):
        j = start + tl.arange(0, BLOCK)
        inside, row = j < n, wide(0) + tl.load(taken + j, mask=j < n, other=0) * d
        p = tl.load(x + row + k)
        q = p
        if k == 0:
            q = tl.load(x + row + 1)
        low, high = tl.minimum(low, tl.where(inside, p, low)), tl.maximum(high, tl.where(inside, p, high))
        p, q, inside, earlier = p[None, :], q[None, :], inside[None, :], j[None, :] < i[:, None]
        same = inside & (p == a)
        equal = same & (q == b) & earlier
        rank += (inside & (p < a) | same & (q < b) | equal).to(tl.int32)
        ties = ties | (same & earlier).to(tl.int32) | 2 * equal.to(tl.int32)
        after = tl.minimum(after, tl.where(inside & (p > a), p, after))
    rank, ties, low, high = tl.sum(rank, 1), tl.max(ties, 1), tl.min(low, 0), tl.max(high, 0)
    tl.store(ranks + k * n + i, rank, mask=i < n)
    a, whole, columns = tl.reshape(a, (ROWS,)), high - low, columns + k
    gap = tl.min(after, 1) - a
    near = (i < n) & (gap > 1e-12 * whole) & (gap <= whole / (100.0 * n + 1000.0))
    tl.store(columns, low)  # every program has the same
    tl.store(columns + d, high)
    tl.atomic_add(columns + 2 * d, tl.sum(near.to(tl.float64), 0))
    tl.atomic_add(columns + 3 * d, tl.sum(((i < n) & (ties > 0)).to(tl.float64), 0))
    tl.atomic_add(columns + 4 * d, tl.sum(((i < n) & (ties > 1) & (k == 0)).to(tl.float64), 0))
    tl.store(columns + 5 * d + 0 * i, a, mask=(i < n) & (rank == (n - 1) // 2))
    tl.store(columns + 6 * d + 0 * i, a, mask=(i < n) & (rank == n // 2))


@sized
def place_kernel(
    x, taken, ranks, columns, measured, places, out, n, d, asked, share, rest, DIM: tl.constexpr, ROWS: tl.constexpr
):
    """The samples less the columns' medians, in their spreads: at the places of their ranks in the first column.

    If ``asked``, these are one. ``share`` and ``rest``: how far between two values the quartiles are.
    """
    k, i = tl.arange(0, DIM), tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    std, low = tl.load(measured + k, mask=k < d, other=1.0), tl.load(measured + d + k, mask=k < d, other=0.0)
    low += share * (tl.load(measured + 2 * d + k, mask=k < d, other=0.0) - low)
    high = tl.load(measured + 3 * d + k, mask=k < d, other=1.0)
    between = (high + rest * (tl.load(measured + 4 * d + k, mask=k < d, other=1.0) - high) - low) / 1.34
    scale = tl.where(between > 1e-12 * std, tl.minimum(std, between), std)
    if asked > 0:
        scale = tl.exp(tl.sum(tl.where(k < d, tl.log(scale), 0.0), 0) / d) + 0.0 * scale
    middle = tl.load(columns + 5 * d + k, mask=k < d, other=0.0) + tl.load(columns + 6 * d + k, mask=k < d, other=0.0)
    inside = (i < n)[:, None] & (k < d)[None, :]
    row = wide(0) + tl.load(taken + i, mask=i < n, other=0) * d
    u = (tl.load(x + row[:, None] + k[None, :], mask=inside, other=0.0) - 0.5 * middle[None, :]) / scale[None, :]
    to = wide(0) + tl.load(places + tl.load(ranks + i, mask=i < n, other=0), mask=i < n, other=0) * d
    tl.store(out + to[:, None] + k[None, :], u, mask=inside)


@functools.cache
def _begin(device: torch.device, d: int) -> None:
    """The first time, let all kernels of a choice compile side by side, those of fits as a rule."""
    if device.type == "cuda":
        few, some = torch.zeros((3, d), dtype=torch.float64), torch.zeros(3, dtype=torch.int64)
        rehearse(ordered, few, some, some, few, (0.5, 0.5), False)
        if d <= 34:  # of more columns no shape is chosen
            fits.begin(device, d, d <= 17)


def ordered(x: Any, taken: Any, places: Any, measured: Any, shares: Any, common: bool) -> tuple[Any, Any]:
    """See :class:`sdkde_core.protocol.CriteriaBackend`."""
    n, d, double = taken.shape[0], x.shape[1], {"dtype": torch.float64, "device": x.device}
    with on_device(x):
        _begin(x.device, d)
        columns, out = torch.zeros((7, d), **double), torch.empty((n, d), **double)
        ranks, dim = torch.empty(d * n, dtype=torch.int32, device=x.device), max(2, 1 << (d - 1).bit_length())
        given = x, taken, ranks, columns
        kept(order_kernel, (-(-n // 16), d), (n, d), (16, 64))(*given)
        place = kept(place_kernel, (-(-n // 16), 1), (n, d, int(common)), (dim, 16))
        place(*given, measured, places, out, last=tuple(shares))
    return out, columns[:5]
