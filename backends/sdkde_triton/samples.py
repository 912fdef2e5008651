"""Samples as a choice of bandwidth begins with them: in an order, in spreads, and what their columns are like."""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from sdkde_core.plugin import launches, on_device

from . import fits, moves
from .compiled import rehearse
from .criteria import kept
from .kernels import f64, number, sized, wide

#: Programs for a column at most.
MOST = tl.constexpr(128)


@triton.jit
def _value(ordered):
    """The float64 whose bits were mapped to unsigned integers of the same order."""
    return number(ordered ^ ((~ordered >> 63) | -0x8000000000000000))


@sized
def clear_kernel(counts, columns, length, n, BLOCK: tl.constexpr):
    """Set ``length`` counts and n numbers to 0."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(counts + i, 0 * i, mask=i < length)
    tl.store(columns + i, 0.0 * i, mask=i < n)


@sized
def digit_kernel(x, counts, found, parts, n, d, first, top, kind, ROWS: tl.constexpr, BINS: tl.constexpr):
    """A step of radix selection: eight more bits of each column's values with the ranks ``first`` and ``top``.

    x (d, n) are the columns. Step ``kind`` of 9 counts the next eight bits of the values that begin with the bits found
    so far, in ``counts`` (9, 2d, BINS), 0 before. ``found`` (9, 2d, 2) has these first bits, and the rank among such
    values. ``parts`` (5, 2d, MOST) has for each program: the sum less the column's first value (step 0), squares about
    the mean (later steps), the least and the largest value, and the least value beyond the one found (the last step).
    """
    pair, p, programs, pairs, bins = tl.program_id(1), tl.program_id(0), tl.num_programs(0), 2 * d, tl.arange(0, BINS)
    at, counts, parts = found + 2 * (kind * pairs + pair), counts + (kind * pairs + pair) * BINS, parts + pair * MOST
    begin, rank, mean = wide(0), tl.where(pair % 2 == 0, first, top), f64(0.0)
    if kind > 0:
        up_to, rank = tl.cumsum(tl.load(counts - pairs * BINS + bins), 0), tl.load(at - 2 * pairs + 1).to(tl.int32)
        digit, less = tl.sum((up_to <= rank).to(tl.int32), 0), tl.max(tl.where(up_to <= rank, up_to, 0), 0)
        begin, rank = tl.load(at - 2 * pairs) | (wide(digit) << (64 - 8 * kind)), rank - less
        others = tl.arange(0, MOST)
        mean = tl.sum(tl.load(parts + others, mask=others < programs, other=0.0), 0) / n
    tl.store(at, begin)
    tl.store(at + 1, rank)
    x += wide(pair // 2) * n
    origin, value_of, shift = tl.load(x), _value(begin), tl.maximum(56 - 8 * kind, 0)
    total, counted = tl.zeros((ROWS,), tl.float64), tl.zeros((BINS,), tl.int32)
    low, high = tl.full((ROWS,), float("inf"), tl.float64), tl.full((ROWS,), float("-inf"), tl.float64)
    for start in range(p * ROWS, n, programs * ROWS):
        i = start + tl.arange(0, ROWS)
        inside = i < n
        value = tl.load(x + i, mask=inside, other=0.0) + 0.0  # without negative zeros
        away = tl.where(inside, value - origin - mean, 0.0)
        total += tl.where(kind == 0, away, away * away)
        low = tl.minimum(low, tl.where(inside & ((kind < 8) | (value > value_of)), value, low))
        high = tl.maximum(high, tl.where(inside, value, high))
        bits = value.to(tl.int64, bitcast=True)
        bits ^= (bits >> 63) | -0x8000000000000000
        inside &= (kind == 0) | (((bits ^ begin) >> tl.minimum(64 - 8 * kind, 63)) == 0)
        if tl.max(inside.to(tl.int32), 0) > 0:  # few are, after some steps
            counted += tl.histogram(((bits >> shift) & (BINS - 1)).to(tl.int32), BINS, mask=inside)
    tl.store(parts + tl.where(kind == 0, 0, 1) * pairs * MOST + p, tl.sum(total, 0))
    tl.store(parts + tl.where(kind < 8, 2, 4) * pairs * MOST + p, tl.min(low, 0))
    tl.store(parts + 3 * pairs * MOST + p, tl.max(high, 0))
    tl.atomic_add(counts + bins, counted, mask=counted > 0)


@sized
def order_kernel(
    x, taken, ranks, columns, counts, found, parts, m, n, d, splits, share, rest,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The statistics of a column by :meth:`sdkde_core.protocol.CriteriaBackend.ordered`, and two middle values.

    They are ``columns`` (13, d). ``ranks`` (d, n) gets the samples' ranks in each column; ties in the first column are
    ordered by the second. ``taken`` are the samples' indices in columns x (d, m). ``counts``, ``found`` and ``parts``
    are from ``splits`` programs of :func:`digit_kernel`. The quartiles lie ``share`` and ``rest`` between two values.
    """
    k, i = tl.program_id(1), tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    second = x + wide(tl.where(k == 0, 1, k)) * m
    x += wide(k) * m
    own = tl.load(taken + i, mask=i < n, other=0)
    a, b = tl.load(x + own)[:, None], tl.load(second + own)[:, None]
    # Sums within the loop would wait for all threads.
    rank, ties = tl.zeros((ROWS, BLOCK), tl.int32), tl.zeros((ROWS, BLOCK), tl.int32)
    after = tl.full((ROWS, BLOCK), float("inf"), tl.float64)
    low, high = tl.full((BLOCK,), float("inf"), tl.float64), tl.full((BLOCK,), float("-inf"), tl.float64)
    for start in range(0, n, BLOCK):
        j = start + tl.arange(0, BLOCK)
        inside, row = j < n, tl.load(taken + j, mask=j < n, other=0)
        p = tl.load(x + row)
        q = p
        if k == 0:
            q = tl.load(second + row)
        low, high = tl.minimum(low, tl.where(inside, p, low)), tl.maximum(high, tl.where(inside, p, high))
        p, q, inside, earlier = p[None, :], q[None, :], inside[None, :], j[None, :] < i[:, None]
        same = inside & (p == a)
        equal = same & (q == b) & earlier
        rank += (inside & (p < a) | same & (q < b) | equal).to(tl.int32)
        ties = ties | (same & earlier).to(tl.int32) | 2 * equal.to(tl.int32)
        after = tl.minimum(after, tl.where(inside & (p > a), p, after))
    rank, ties, low, high = tl.sum(rank, 1), tl.max(ties, 1), tl.min(low, 0), tl.max(high, 0)
    tl.store(ranks + k * n + i, rank, mask=i < n)
    a, range_, columns = tl.reshape(a, (ROWS,)), high - low, columns + k
    gap = tl.min(after, 1) - a
    near = (i < n) & (gap > 1e-12 * range_) & (gap <= range_ / (100.0 * n + 1000.0))
    tl.store(columns + 6 * d, low)  # every program has the same
    tl.store(columns + 7 * d, high)
    tl.atomic_add(columns + 8 * d, tl.sum(near.to(tl.float64), 0))
    tl.atomic_add(columns + 9 * d, tl.sum(((i < n) & (ties > 0)).to(tl.float64), 0))
    tl.atomic_add(columns + 10 * d, tl.sum(((i < n) & (ties > 1) & (k == 0)).to(tl.float64), 0))
    tl.store(columns + 11 * d + 0 * i, a, mask=(i < n) & (rank == (n - 1) // 2))
    tl.store(columns + 12 * d + 0 * i, a, mask=(i < n) & (rank == n // 2))
    if tl.program_id(0) == 0:
        p, pairs = tl.arange(0, MOST), 2 * d
        here, of, inside = found + 2 * (8 * pairs + 2 * k), parts + 2 * k * MOST + p, p < splits
        squares = tl.sum(tl.load(of + pairs * MOST, mask=inside, other=0.0), 0)
        tl.store(columns, tl.sqrt(squares / m))
        for upper in tl.static_range(2):
            bits, between = tl.load(here + 2 * upper), rest if upper else share
            alike = tl.load(counts + (7 * pairs + 2 * k + upper) * 256 + (bits & 255))
            value, beyond = _value(bits), tl.load(of + (4 * pairs + upper) * MOST, mask=inside, other=float("inf"))
            beyond = tl.where(tl.load(here + 2 * upper + 1) + 1 < alike, value, tl.min(beyond, 0))
            tl.store(columns + (1 + upper) * d, tl.where(between > 0.0, value + between * (beyond - value), value))
        tl.store(columns + 3 * d, tl.min(tl.load(of + 2 * pairs * MOST, mask=inside, other=float("inf")), 0))
        tl.store(columns + 4 * d, tl.max(tl.load(of + 3 * pairs * MOST, mask=inside, other=float("-inf")), 0))
        tl.store(columns + 5 * d, tl.load(x))


@sized
def place_kernel(x, taken, ranks, columns, places, out, weights, m, n, d, asked, DIM: tl.constexpr, ROWS: tl.constexpr):
    """Write (x − median) / spread of each sample at the place for its rank in the first column, and equal weights.

    If ``asked``, all columns have the geometric mean of their spreads.
    """
    k, i = tl.arange(0, DIM), tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    std, low = tl.load(columns + k, mask=k < d, other=1.0), tl.load(columns + d + k, mask=k < d, other=0.0)
    between = (tl.load(columns + 2 * d + k, mask=k < d, other=1.0) - low) / 1.34
    scale = tl.where(between > 1e-12 * std, tl.minimum(std, between), std)
    if asked > 0:
        scale = tl.exp(tl.sum(tl.where(k < d, tl.log(scale), 0.0), 0) / d) + 0.0 * scale
    columns += 11 * d + k
    middle = tl.load(columns, mask=k < d, other=0.0) + tl.load(columns + d, mask=k < d, other=0.0)
    inside = (i < n)[:, None] & (k < d)[None, :]
    x += tl.load(taken + i, mask=i < n, other=0)[:, None] + (wide(0) + k)[None, :] * m
    u = (tl.load(x, mask=inside, other=0.0) - 0.5 * middle[None, :]) / scale[None, :]
    to = wide(0) + tl.load(places + tl.load(ranks + i, mask=i < n, other=0), mask=i < n, other=0) * d
    tl.store(out + to[:, None] + k[None, :], u, mask=inside)
    tl.store(weights + i, 1.0 / n.to(tl.float64) + 0.0 * i, mask=i < n)


@functools.cache
@launches.aside
def _begin(device: torch.device, d: int) -> None:
    """The first time, let all kernels of a choice compile side by side, and those that an estimate launches next."""
    if device.type == "cuda":
        few, some = (torch.zeros(k, dtype=x, device="cpu") for k, x in (((d, 3), torch.float64), (3, torch.int64)))
        fits.begin(device, d, d <= 17)  # these take longest
        rehearse(ordered, few, some, some, False)
        if d <= 128:  # else the line does not take them
            moves.begin(d)


def ordered(x: Any, taken: Any, places: Any, common: bool) -> tuple[Any, Any, Any]:
    """See :class:`sdkde_core.protocol.CriteriaBackend`."""
    n, (d, m), bins, most = taken.shape[0], x.shape, 256, int(MOST.value)
    programs, dim = min(-(-m // 512), most, max(1, 768 // d)), max(2, 1 << (d - 1).bit_length())
    lower, upper = 0.25 * (m - 1), 0.75 * (m - 1)

    def empty(*shape: int, dtype: Any = torch.float64) -> Any:
        return torch.empty(shape, dtype=dtype, device=x.device)

    with on_device(x):
        _begin(x.device, d)
        out, weights, columns, parts = empty(n, d), empty(n), empty(13, d), empty(5, 2 * d, most)
        counts, ranks = (empty(length, dtype=torch.int32) for length in (18 * d * bins, d * n))
        found = empty(9, 2 * d, 2, dtype=torch.int64)
        kept(clear_kernel, (18 * d, 1), (18 * d * bins, 13 * d), (bins,))(counts, columns)
        digit = kept(digit_kernel, (programs, 2 * d), (m, d, int(lower), int(upper)), (256, bins))
        for kind in range(9):
            digit(x, counts, found, parts, last=(kind,))
        given = x, taken, ranks, columns
        order = kept(order_kernel, (-(-n // 16), d), (m, n, d, programs, lower % 1.0, upper % 1.0), (16, 64))
        order(*given, counts, found, parts)
        rows = max(2, min(16, 2048 // dim))  # of larger tiles it takes seconds to compile
        kept(place_kernel, (-(-n // rows), 1), (m, n, d, int(common)), (dim, rows))(*given, places, out, weights)
    return out, weights, columns
