"""Device code: exponents summed over blocks of dimensions, and weighted sums of stored φ.

For more dimensions than one program holds. MEAN is two kernels then: φ of some rows and columns is stored, in
half-precision pieces, and multiplied. See :mod:`sdkde_triton.kernels` for the packed operands.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .kernels import (
    FULL,
    SCALE_BITS,
    UNITS,
    accumulated,
    alone,
    leading_power,
    no_columns,
    sized,
    store_sums,
    three_halves,
    two_halves,
    wide,
)


@triton.jit
def _padded(size):
    """A size of stored φ, which :data:`sdkde_triton.space.COLUMN_PADDING` divides: so rows begin at whole vectors."""
    return size // 256 * 256


@sized
def blocked_kernel(
    rows, columns, log_weights, out,
    row_padded, column_padded, m, n, top, first, columns_per_split,
    D: tl.constexpr, PIECES: tl.constexpr, FORM: tl.constexpr, LAPLACE: tl.constexpr, STORE: tl.constexpr,
    BOTH: tl.constexpr, EXACT: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """As :func:`sdkde_triton.kernels.log_sum_kernel`, with LONG's or FULL's exponents.

    ``EXACT``: for "high". ``STORE``: instead φ, scaled by 2**SCALE_BITS, as two half-precision pieces, with ``EXACT``
    three, (2 or 3, height, columns_per_split) of the rows from ``top`` on (0 from row m on) and the columns from
    ``first`` on; and to ``log_weights``, which the columns carry already, its sums over tiles of columns (tiles,
    height), with ``BOTH`` followed by those over tiles of rows (tiles, columns_per_split). ``top`` is 0 otherwise.
    """
    # Tiles of 64-bit addresses would take the registers: programs begin at one, and go on in 32 bits.
    top_row = top + tl.program_id(0) * BLOCK_M
    index = top_row + tl.arange(0, BLOCK_M)
    inside = index < m
    row = (tl.minimum(index, m - 1) - top_row)[:, None]
    f = tl.arange(0, 16)[None, :]
    k = tl.arange(0, BLOCK_K)[None, :]
    row_size = wide(row_padded)
    size = wide(column_padded)
    constants = rows + row_size * (PIECES * D) + wide(top_row) * 32 + (row * 32 + f)
    rows += wide(top_row) * D
    highest, total, moment = no_columns(BLOCK_M)
    if STORE:
        begin = first + tl.program_id(1) * BLOCK_N
        end = begin + BLOCK_N
    else:
        begin = tl.program_id(1) * columns_per_split
        end = tl.minimum(begin + columns_per_split, n)
    for start in range(begin, end, BLOCK_N):
        j = start + tl.arange(0, BLOCK_N)
        column = tl.arange(0, BLOCK_N)[:, None]
        e = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        small = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for block in tl.range(0, D, BLOCK_K, num_stages=STAGES):
            at = rows + block + (row * D + k)
            by = columns + wide(start) * D + block + (column * D + k)
            a_hi = tl.load(at)
            b_hi = tl.trans(tl.load(by))
            e = tl.dot(a_hi, b_hi, e)
            a_lo = tl.load(at + row_size * D)
            b_lo = tl.trans(tl.load(by + size * D))
            if FORM == FULL and EXACT:
                # Each block by itself, added with rounding to nearest: hundreds of truncated steps are a bias.
                part = tl.dot(a_lo, b_lo)
                part = tl.dot(tl.load(at + row_size * (2 * D)), b_hi, part)
                part = tl.dot(a_hi, tl.trans(tl.load(by + size * (2 * D))), part)
                part = tl.dot(a_lo, b_hi, part)
                small += tl.dot(a_hi, b_lo, part)
            else:
                small = tl.dot(a_lo, b_lo, small)
                if FORM == FULL:
                    small = tl.dot(tl.load(at + row_size * (2 * D)), b_hi, small)
                    small = tl.dot(a_hi, tl.trans(tl.load(by + size * (2 * D))), small)
                small = tl.dot(a_lo, b_hi, small)
                small = tl.dot(a_hi, b_lo, small)
        b_c = tl.trans(tl.load(columns + size * (PIECES * D + 32) + wide(start) * 16 + (column * 16 + f)))
        e = tl.dot(tl.load(constants), b_c, e)
        small = tl.dot(tl.load(constants + 16), b_c, small)
        e += small
        if PIECES == 3:
            e *= 1.0 / (UNITS * UNITS)
        if STORE:
            p = tl.where(inside[:, None], tl.exp2(e), 0.0)
            if PIECES == 3:
                p *= 2.0**SCALE_BITS
            if EXACT:
                power, _ = leading_power(p)
                p_hi, p_lo, p_rest = three_halves(p, power)
            else:
                p_hi, p_lo = two_halves(p)
            height = tl.num_programs(0) * BLOCK_M
            stride = _padded(columns_per_split)
            to = tl.arange(0, BLOCK_M)[:, None] * stride + (j - first)[None, :]
            place = tl.program_id(0) * BLOCK_M
            at = out + wide(place) * stride
            tl.store(at + to, p_hi)
            tl.store(at + wide(height) * stride + to, p_lo)
            if EXACT:
                tl.store(at + wide(height) * stride * 2 + to, p_rest)
                rest = tl.sum(p_lo.to(tl.float32) + p_rest.to(tl.float32), 1)
                stored = tl.sum(p_hi.to(tl.float32), 1).to(tl.float64) + rest.to(tl.float64)
            else:
                # Of what is stored, so that the largest φ has the same weight in both sums.
                whole = p_hi.to(tl.float32) + p_lo.to(tl.float32)
                stored = tl.sum(whole, 1).to(tl.float64)
            tl.store(log_weights + wide(tl.program_id(1)) * height + place + tl.arange(0, BLOCK_M), stored)
            if BOTH:
                sums = log_weights + wide(tl.num_programs(1)) * height + wide(tl.program_id(0)) * stride
                tl.store(sums + (j - first), tl.sum(whole, 0).to(tl.float64))
        else:
            highest, total, moment = accumulated(e, highest, total, moment, log_weights, j, n, LAPLACE, WEIGHTED)
    if not STORE:
        store_sums(out, index, m, highest, total, moment, LAPLACE)


@triton.jit
def _products(
    phi, columns, size, low, stride, length, c,
    D: tl.constexpr, EXACT: tl.constexpr, ACROSS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Σ φ b of a tile (BLOCK_M, BLOCK_N) over ``length`` points, fp32; see :func:`weighted_sum_kernel`."""
    k = tl.arange(0, BLOCK_K)
    r = tl.arange(0, BLOCK_M)
    exists = (c < D)[None, :]
    mean = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if EXACT:
        segment = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in tl.range(0, length, BLOCK_K, num_stages=STAGES):
        if ACROSS:
            at = phi + wide(start) * stride + (k[:, None] * stride + r[None, :])
            p_hi = tl.trans(tl.load(at))
            p_lo = tl.trans(tl.load(at + low))
        else:
            at = phi + start + (r[:, None] * stride + k[None, :])
            p_hi = tl.load(at)
            p_lo = tl.load(at + low)
        by = columns + start * D + (k[:, None] * D + c[None, :])
        b_hi = tl.load(by, mask=exists, other=0.0)
        b_lo = tl.load(by + size, mask=exists, other=0.0)
        # The largest products last, and every block from 0: what follows is truncated next to them.
        if EXACT:
            part = tl.dot(tl.load(at + 2 * low), b_hi)
            part = tl.dot(p_hi, tl.load(by + 2 * size, mask=exists, other=0.0), part)
            part = tl.dot(p_lo, b_lo, part)
            part = tl.dot(p_hi, b_lo, part)
            part = tl.dot(p_lo, b_hi, part)
            segment += part + alone(p_hi, b_hi)
            # "high" sums the blocks of so many points by themselves: fp32 rounds by a share of the sum so far.
            if wide(start + BLOCK_K) % 256 == 0:
                mean += segment
                segment = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        else:
            part = tl.dot(p_lo, b_hi)
            part = tl.dot(p_hi, b_lo, part)
            mean += tl.dot(p_hi, b_hi, part)
    if EXACT:
        mean += segment
    return mean


@sized
def weighted_sum_kernel(
    phi, columns, sums, out,
    column_padded, m, n, top, first, height, columns_per_split, tile_rows, tile_columns,
    D: tl.constexpr, EXACT: tl.constexpr, BOTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Add Σ φ (m,) and Σ φ b (m, D), float64, over the columns from ``first`` on for the rows from ``top`` on.

    φ is (2 or 3, height, columns_per_split), as :func:`blocked_kernel` stores it in tiles of ``tile_rows`` and
    ``tile_columns``, and ``sums`` what it sums. ``columns`` has arrays (column_padded, D): with ``EXACT`` three pieces
    of v, else two. ``BOTH``: a second half of the programs takes φ transposed, and adds sums over the rows for the
    columns.
    """
    parts: tl.constexpr = (D + BLOCK_N - 1) // BLOCK_N
    across = tl.program_id(1) >= parts
    part = tl.program_id(1) % parts
    c = part * BLOCK_N + tl.arange(0, BLOCK_N)
    place = tl.program_id(0) * BLOCK_M
    index = place + tl.arange(0, BLOCK_M)
    size = wide(column_padded) * D
    stride = _padded(columns_per_split)
    tall = _padded(height)
    low = wide(height) * stride
    origin = top
    splits = stride // tile_columns
    step = height
    count = tl.minimum(height, m - top)
    if BOTH and across:
        origin = first
        sums += wide(splits) * height
        splits = height // tile_rows
        step = stride
        count = tl.minimum(stride, n - first)
        start = phi + tl.minimum(place, stride - BLOCK_M)
        values = columns + wide(top) * D
        mean = _products(start, values, size, low, stride, tall, c, D, EXACT, True, BLOCK_M, BLOCK_N, STAGES, BLOCK_K)
    else:
        start = phi + wide(tl.minimum(place, tall - BLOCK_M)) * stride
        values = columns + wide(first) * D
        mean = _products(
            start, values, size, low, stride, stride, c, D, EXACT, False, BLOCK_M, BLOCK_N, STAGES, BLOCK_K
        )
    # No other program adds to these: so nothing has to be loaded, for which there are no registers.
    inside = index < count
    to = out + m + (wide(origin) + place) * D + (tl.arange(0, BLOCK_M)[:, None] * D + c[None, :])
    tl.atomic_add(to, mean.to(tl.float64), mask=inside[:, None] & (c < D)[None, :], sem="relaxed")
    if part == 0:
        total = tl.zeros((BLOCK_M,), tl.float64)
        at = index.to(tl.int64)
        for _ in range(splits):
            total += tl.load(sums + at, mask=inside, other=0.0)
            at += step
        tl.atomic_add(out + wide(origin) + index, total, mask=inside, sem="relaxed")
