"""Device code: the reductions by direct differences of coordinates."""

from __future__ import annotations

import triton.language as tl

from .kernels import FLOOR, FLOOR64, LOG2E, f64, sized, wide


@sized
def direct_kernel(
    rows,
    columns,
    log_weights,
    out,
    m,
    n,
    column_padded,
    columns_per_split,
    D: tl.constexpr,
    LAPLACE: tl.constexpr,
    MEAN: tl.constexpr,
    WEIGHTED: tl.constexpr,
    ANCHORED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """As :func:`sdkde_triton.kernels.log_sum_kernel`, and for MEAN also Σ 2^(e − μ) (v_j − v_i), by direct differences.

    ``rows`` (D, m) and ``columns`` (D, column_padded) are v; all arithmetic is in their dtype, fp32 or float64. For few
    dimensions, where Tensor Cores would multiply padding, and for extents at which expanded squares fail. ``ANCHORED``:
    every row is a column too, so its largest φ is 1 and needs no search.

    Tiles are (columns, rows), so that a thread owns whole rows and sums without talking to its neighbours.
    """
    real = columns.dtype.element_ty
    i = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = i < m
    split = tl.program_id(1).to(tl.int64)
    size = wide(m) * tl.num_programs(1)
    out_more = out + 2 * size
    if ANCHORED:
        top = tl.zeros((BLOCK_M,), real)
    else:
        top = tl.full((BLOCK_M,), FLOOR if real == tl.float32 else FLOOR64, real)
    total = tl.zeros((BLOCK_M,), real)
    moment = tl.zeros((BLOCK_M,), real)
    if D <= 2:
        x0 = tl.load(rows + i, mask=inside, other=0.0)
        mean0 = tl.zeros((BLOCK_M,), real)
        if D == 2:
            x1 = tl.load(rows + m + i, mask=inside, other=0.0)
            mean1 = tl.zeros((BLOCK_M,), real)
    elif MEAN:
        more_at = split * D * m + i
        for _ in range(D):
            tl.store(out_more + more_at, tl.zeros((BLOCK_M,), real), mask=inside)
            more_at += m
    begin = tl.program_id(1) * columns_per_split
    for start in range(begin, tl.minimum(begin + columns_per_split, n), BLOCK_N):
        j = start + tl.arange(0, BLOCK_N)
        if D <= 2:
            d0 = tl.load(columns + j)[:, None] - x0[None, :]
            e = d0 * d0
            if D == 2:
                d1 = tl.load(columns + column_padded + j)[:, None] - x1[None, :]
                e += d1 * d1
        else:
            e = tl.zeros((BLOCK_N, BLOCK_M), real)
            x_at = i.to(tl.int64)
            y_at = j.to(tl.int64)
            for _ in range(D):
                away = tl.load(columns + y_at)[:, None] - tl.load(rows + x_at, mask=inside, other=0.0)[None, :]
                e += away * away
                x_at += m
                y_at += column_padded
        e = e * -0.5
        if WEIGHTED:
            log2_w = (tl.load(log_weights + j, mask=j < n, other=0.0) * f64(LOG2E)).to(real)
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
            if D <= 2:
                if not ANCHORED:
                    mean0 *= decay
                mean0 += tl.sum(p * d0, 0)
                if D == 2:
                    if not ANCHORED:
                        mean1 *= decay
                    mean1 += tl.sum(p * d1, 0)
            else:
                x_at = i.to(tl.int64)
                y_at = j.to(tl.int64)
                more_at = split * D * m + i
                for _ in range(D):
                    away = tl.load(columns + y_at)[:, None] - tl.load(rows + x_at, mask=inside, other=0.0)[None, :]
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
    if MEAN and D <= 2:
        tl.store(out_more + split * D * m + i, mean0, mask=inside)
        if D == 2:
            tl.store(out_more + (split * D + 1) * m + i, mean1, mask=inside)
