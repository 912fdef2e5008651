"""Device code: the reductions by direct differences of coordinates."""

from __future__ import annotations

import triton
import triton.language as tl

from .kernels import FLOOR, SQRT_LOG2E, f64, sized, to_log2, wide


@sized
def transpose_kernel(points, out, n, padded, d, SINGLE: tl.constexpr, DOUBLED: tl.constexpr, BLOCK: tl.constexpr):
    """v = √(log2 e) u of float64 points (n, d), as :func:`direct_kernel` reads it, (d, padded) in fp32 or float64.

    Columns of padding lie far away. ``DOUBLED``: as many rows of what fp32 leaves of every coordinate follow.
    """
    j, k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1)
    real: tl.constexpr = tl.float32 if SINGLE else tl.float64
    v = tl.load(points + j.to(tl.int64) * d + k, mask=j < n, other=0.0) * f64(SQRT_LOG2E)
    leading = v.to(real)
    far: tl.constexpr = 1e17 if SINGLE else 1e152
    tl.store(out + wide(k) * padded + j, tl.where(j < n, leading, far), mask=j < padded)
    if DOUBLED:
        tl.store(out + (wide(k) + d) * padded + j, (v - leading.to(tl.float64)).to(real), mask=j < padded)


@triton.jit
def _differences(rows, columns, i, inside, j, low_rows, low_columns, DOUBLED: tl.constexpr):
    """v_j − v_i of one dimension, (columns, rows). ``DOUBLED``: a coordinate is the sum of two fp32 numbers."""
    away = tl.load(columns + j)[:, None] - tl.load(rows + i, mask=inside, other=0.0)[None, :]
    if DOUBLED:  # near pairs' leading parts cancel exactly (Sterbenz), and then the rest counts
        rest = tl.load(columns + low_columns + j)[:, None]
        away += rest - tl.load(rows + low_rows + i, mask=inside, other=0.0)[None, :]
    return away


@sized
def direct_kernel(
    rows, columns, log_weights, out,
    m, n, d, column_padded, columns_per_split,
    D: tl.constexpr, DOUBLED: tl.constexpr, LAPLACE: tl.constexpr, MEAN: tl.constexpr, WEIGHTED: tl.constexpr,
    ANCHORED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """As :func:`sdkde_triton.kernels.log_sum_kernel`, and for MEAN also Σ 2^(e − μ) (v_j − v_i), by direct differences.

    ``rows`` (d, m) and ``columns`` (d, column_padded) are v; all arithmetic is in their dtype, fp32 or float64.
    ``DOUBLED``: as many rows of what fp32 leaves of every coordinate follow. D is d up to
    :data:`sdkde_triton.bounds.MOST_DIRECT`, whose differences a thread holds, else one more. ``ANCHORED``: every row is
    a column too, so its largest φ is 1 and needs no search. Tiles are (columns, rows): a thread owns whole rows.
    """
    real = columns.dtype.element_ty
    floor: tl.constexpr = FLOOR if real == tl.float32 else -1.0e303
    held: tl.constexpr = D <= 4
    i = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = i < m
    split = tl.program_id(1).to(tl.int64)
    size = wide(m) * tl.num_programs(1)
    out_more = out + 2 * size
    low_rows = wide(d) * m
    low_columns = wide(d) * column_padded
    top = tl.zeros((BLOCK_M,), real) if ANCHORED else tl.full((BLOCK_M,), floor, real)
    total = tl.zeros((BLOCK_M,), real)
    moment = tl.zeros((BLOCK_M,), real)
    means = (tl.zeros((BLOCK_M,), real),) * D
    if not held and MEAN:
        more_at = split * d * m + i
        for _ in range(d):
            tl.store(out_more + more_at, tl.zeros((BLOCK_M,), real), mask=inside)
            more_at += m
    begin = tl.program_id(1) * columns_per_split
    for start in range(begin, tl.minimum(begin + columns_per_split, n), BLOCK_N):
        j = start + tl.arange(0, BLOCK_N)
        if held:
            away = (_differences(rows, columns, i, inside, j, low_rows, low_columns, DOUBLED),)
            e = away[0] * away[0]
            for k in tl.static_range(1, D):  # 64 bits only where it takes them: they cost registers
                x = rows + m if k == 1 else rows + k * wide(m)
                y = columns + column_padded if k == 1 else columns + k * wide(column_padded)
                away += (_differences(x, y, i, inside, j, low_rows, low_columns, DOUBLED),)
                e = tl.fma(away[k], away[k], e)  # left to the compiler, registers of one tile are fused differently
        else:
            # Sixteen squares at a time: one sum of a thousand would lose more digits.
            e = tl.zeros((BLOCK_N, BLOCK_M), real)
            x_at = i.to(tl.int64)
            y_at = j.to(tl.int64)
            for block in range(0, d, 16):
                part = tl.zeros((BLOCK_N, BLOCK_M), real)
                for _ in range(tl.minimum(16, d - block)):
                    away = _differences(rows, columns, x_at, inside, y_at, low_rows, low_columns, DOUBLED)
                    part += away * away
                    x_at += m
                    y_at += column_padded
                e += part
        e = e * -0.5
        if WEIGHTED:
            log2_w = to_log2(tl.load(log_weights + j, mask=j < n, other=0.0)).to(real)
            e += log2_w[:, None]
        if ANCHORED:
            p = tl.exp2(e)
            total += tl.sum(p, 0)
        else:
            highest = tl.maximum(top, tl.max(e, 0))
            below = e - highest[None, :]
            p = tl.exp2(below)
            fall = top - highest
            decay = tl.exp2(fall)
            if LAPLACE:
                if WEIGHTED:
                    below -= log2_w[:, None]
                moment = (moment + total * fall) * decay + tl.sum(p * below, 0)
            total = total * decay + tl.sum(p, 0)
            top = highest
        if MEAN:
            if held:
                added = ()
                for k in tl.static_range(D):
                    mean = means[k]
                    if not ANCHORED:
                        mean *= decay
                    added += (mean + tl.sum(p * away[k], 0),)
                means = added
            else:
                x_at = i.to(tl.int64)
                y_at = j.to(tl.int64)
                more_at = split * d * m + i
                for _ in range(d):
                    away = _differences(rows, columns, x_at, inside, y_at, low_rows, low_columns, DOUBLED)
                    mean = tl.load(out_more + more_at, mask=inside, other=0.0)
                    if not ANCHORED:
                        mean *= decay
                    tl.store(out_more + more_at, mean + tl.sum(p * away, 0), mask=inside)
                    x_at += m
                    y_at += column_padded
                    more_at += m
    to = split * m + i
    tl.store(out + to, top, mask=inside)
    tl.store(out + size + to, total, mask=inside)
    if LAPLACE:
        tl.store(out_more + to, moment, mask=inside)
    if MEAN and held:
        for k in tl.static_range(D):
            tl.store(out_more + (split * D + k) * m + i, means[k], mask=inside)
