"""Device code: exponents summed over blocks of dimensions, and weighted sums of stored φ.

For more dimensions than one program holds. With that many the products weigh most, so MEAN is two kernels: φ of some
rows and columns is stored, in half-precision pieces, and multiplied. See :mod:`sdkde_triton.kernels` for the packed
operands.
"""

from __future__ import annotations

import triton.language as tl

from .kernels import (
    FLOOR,
    FULL,
    SCALE_BITS,
    UNITS,
    accumulated,
    alone,
    compensated,
    leave_out,
    sized,
    three_halves,
    two_halves,
    wide,
)
from .space import COLUMN_PADDING

#: Columns of stored φ are a multiple of this.
PADDED = tl.constexpr(COLUMN_PADDING)


@sized
def blocked_kernel(
    rows,
    columns,
    log_weights,
    out,
    row_padded,
    column_padded,
    m,
    n,
    own,
    first,
    columns_per_split,
    D: tl.constexpr,
    PIECES: tl.constexpr,
    FORM: tl.constexpr,
    LAPLACE: tl.constexpr,
    STORE: tl.constexpr,
    EXACT: tl.constexpr,
    WEIGHTED: tl.constexpr,
    EXCLUDE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """As :func:`sdkde_triton.kernels.log_sum_kernel`, with LONG's or FULL's exponents.

    ``STORE``: instead φ, scaled by 2**SCALE_BITS, as two half-precision pieces, with ``EXACT`` three, (2 or 3, m,
    columns_per_split) of the one split that begins at column ``first``; and to ``log_weights``, which the columns
    carry already, its sums over tiles (tiles, m).
    """
    # Tiles of 64-bit addresses would take the registers: programs begin at one, and go on in 32 bits.
    top_row = tl.program_id(0) * BLOCK_M
    index = top_row + tl.arange(0, BLOCK_M)
    inside = index < m
    row = (tl.minimum(index, m - 1) - top_row)[:, None]
    f = tl.arange(0, 16)[None, :]
    k = tl.arange(0, BLOCK_K)[None, :]
    row_size = wide(row_padded)
    size = wide(column_padded)
    constants = rows + row_size * (PIECES * D) + wide(top_row) * 32 + (row * 32 + f)
    rows += wide(top_row) * D
    top = tl.full((BLOCK_M,), FLOOR, tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    moment = tl.zeros((BLOCK_M,), tl.float32)
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
            if FORM == FULL:
                # Each block by itself, added with rounding to nearest: hundreds of truncated steps are a bias.
                part = tl.dot(a_lo, b_lo)
                part = tl.dot(tl.load(at + row_size * (2 * D)), b_hi, part)
                part = tl.dot(a_hi, tl.trans(tl.load(by + size * (2 * D))), part)
                part = tl.dot(a_lo, b_hi, part)
                small += tl.dot(a_hi, b_lo, part)
            else:
                small = tl.dot(a_lo, b_lo, small)
                small = tl.dot(a_lo, b_hi, small)
                small = tl.dot(a_hi, b_lo, small)
        b_c = tl.trans(tl.load(columns + size * (PIECES * D + 32) + wide(start) * 16 + (column * 16 + f)))
        e = tl.dot(tl.load(constants), b_c, e)
        small = tl.dot(tl.load(constants + 16), b_c, small)
        e += small
        if PIECES == 3:
            e *= 1.0 / (UNITS * UNITS)
        if EXCLUDE:
            e = leave_out(e, index, j, own, n)
        if STORE:
            p = tl.exp2(e)
            if PIECES == 3:
                p *= 2.0**SCALE_BITS
            if EXACT:
                p_hi, p_lo, p_rest, sum_hi, sum_rest = three_halves(p)
            else:
                p_hi, p_lo = two_halves(p)
            stride = columns_per_split // PADDED * PADDED  # tells the compiler that rows begin at whole vectors
            to = row * stride + (j - first)[None, :]
            at = out + wide(top_row) * stride
            both = inside[:, None]
            tl.store(at + to, p_hi, mask=both)
            tl.store(at + wide(m) * stride + to, p_lo, mask=both)
            if EXACT:
                tl.store(at + wide(m) * stride * 2 + to, p_rest, mask=both)
                stored = sum_hi.to(tl.float64) + sum_rest.to(tl.float64)
            else:
                # Of what is stored, so that the largest φ has the same weight in both sums.
                stored = tl.sum(p_hi.to(tl.float32) + p_lo.to(tl.float32), 1).to(tl.float64)
            tl.store(log_weights + tl.program_id(1).to(tl.int64) * m + index, stored, mask=inside)
        else:
            top, total, moment = accumulated(e, top, total, moment, log_weights, j, n, LAPLACE, WEIGHTED)
    if not STORE:
        to = tl.program_id(1).to(tl.int64) * m + index
        size = wide(m) * tl.num_programs(1)
        tl.store(out + to, top, mask=inside)
        tl.store(out + size + to, total, mask=inside)
        if LAPLACE:
            tl.store(out + 2 * size + to, moment, mask=inside)


@sized
def weighted_sum_kernel(
    phi,
    columns,
    sums,
    out,
    column_padded,
    m,
    splits,
    first,
    columns_per_split,
    D: tl.constexpr,
    PIECES: tl.constexpr,
    EXACT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Add Σ φ (m,) and Σ φ b (m, D) over the columns from ``first`` on, whose φ is stored, as ``EXACT`` says.

    ``columns`` has PIECES arrays (column_padded, D), ``sums`` those of φ over tiles (splits, m). The results are
    float64: what is added comes in order.
    """
    top_row = tl.program_id(0) * BLOCK_M
    index = top_row + tl.arange(0, BLOCK_M)
    inside = index < m
    row = (tl.minimum(index, m - 1) - top_row)[:, None]
    c = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    exists = (c < D)[None, :]
    size = wide(column_padded) * D
    stride = columns_per_split // PADDED * PADDED  # tells the compiler that rows begin at whole vectors
    low = wide(m) * stride
    phi += wide(top_row) * stride
    columns += wide(first) * D
    mean = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    rest = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in tl.range(0, columns_per_split, BLOCK_K, num_stages=STAGES):
        at = phi + start + (row * stride + k[None, :])
        p_hi = tl.load(at)
        p_lo = tl.load(at + low)
        by = columns + start * D + (k[:, None] * D + c[None, :])
        b_hi = tl.load(by, mask=exists, other=0.0)
        b_lo = tl.load(by + size, mask=exists, other=0.0)
        rest = tl.dot(p_lo, b_lo, rest)
        if PIECES == 3:
            rest = tl.dot(p_hi + p_lo, tl.load(by + 2 * size, mask=exists, other=0.0), rest)
        if EXACT:
            p_rest = tl.load(at + 2 * low)
            rest = tl.dot(p_rest, b_lo, rest)
            rest = tl.dot(p_rest, b_hi, rest)
            rest = tl.dot(p_hi, b_lo, rest)
            rest += alone(p_lo, b_hi)
            mean, rest = compensated(mean, rest, alone(p_hi, b_hi))
        else:
            rest = tl.dot(p_lo, b_hi, rest)
            rest = tl.dot(p_hi, b_lo, rest)
            mean += alone(p_hi, b_hi)
    mean += rest
    to = out + wide(m) + wide(top_row) * D + (row * D + c[None, :])
    both = inside[:, None] & exists
    tl.store(to, tl.load(to, mask=both, other=0.0) + mean.to(tl.float64), mask=both)
    if tl.program_id(1) == 0:
        total = tl.load(out + index, mask=inside, other=0.0)
        at = index.to(tl.int64)
        for _ in range(splits):
            total += tl.load(sums + at, mask=inside, other=0.0)
            at += m
        tl.store(out + index, total, mask=inside)
