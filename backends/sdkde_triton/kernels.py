"""Device code: exponents on Tensor Cores or by direct differences, and the reductions fused to them.

Everything is in log2 units: with v = √(log2 e) u, log2 φ_ij = −½‖v_i − v_j‖² = v_i·v_j − ½‖v_i‖² − ½‖v_j‖².

**Packed operands.** That exponent is a small difference of large numbers, so it must be exact where it cancels. Every
coordinate is split into two half-precision pieces, v = hi + lo, hi a multiple of a grid g (a power of two), and the
constant −½‖v‖² (with the log weight, or a row's shift) into three, c = c₁ + c₂ + c₃, the first two multiples of g². The
products hi·hi and c₁ + c₂ are then multiples of g², and as long as they stay below 2²⁴ g² the Tensor Core's fp32
accumulator sums them exactly, although it truncates. They go first; the corrections lo·hi + hi·lo (+ lo·lo + c₃, the
long form) follow when the large terms have cancelled. The same hi and lo tiles serve the second product of MEAN.

Layouts: ``hi``, ``lo`` (rows, D), D the power of two ≥ max(d, 16); column constants (rows, 16) = [1, 1, c₁, c₂, c₃,
0 …]; row constants (rows, 32) = [c₁, c₂, 1, 1, 0 … | c₃, 0, 0, 0, 1, 0 …]. Columns are padded to a multiple of every
tile with c₁ = −60000, whose φ is 0.

Partial results of one split of the columns are (splits, m) arrays; ``finish_*`` merges them in a fixed order.
"""

from __future__ import annotations

import triton
import triton.language as tl

#: Constant of a padding column, in log2 units: its φ is 0 next to any row's.
PADDING = tl.constexpr(-60000.0)

#: MEAN on Tensor Cores scales φ by 2**SCALE_BITS: φ ≤ 1 then uses the whole range of half precision.
SCALE_BITS = tl.constexpr(14)

#: Where running maxima start, in log2 units: finite, below any point's exponent and above any padding column's.
FLOOR = tl.constexpr(-1.0e30)
FLOOR64 = tl.constexpr(-1.0e305)

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
SQRT_LOG2E = tl.constexpr(1.2011224087864498)


@triton.jit
def _f64(value: tl.constexpr):
    return tl.full((), value, tl.float64)


@triton.jit
def _nearest(x, step):
    """The multiple of ``step`` (a power of two) nearest to x, float64."""
    return tl.floor(x / step + 0.5) * step


@triton.jit
def pack_kernel(
    points,
    log_weights,
    log_sums,
    hi,
    lo,
    constants,
    n,
    n_padded,
    d,
    step,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    WEIGHTED: tl.constexpr,
    SHIFTED: tl.constexpr,
    UNIFORM: tl.constexpr,
    SCALED: tl.constexpr,
):
    """Pack float64 points (n, d) as rows or as columns; the grid of hi is ``step``.

    ``WEIGHTED`` adds log2 of the weights to the constants; ``SHIFTED`` subtracts log2 of the rows' sums, so that the
    exponents are those of φ / Σφ (``UNIFORM``: all columns have the first one's weight); ``SCALED`` adds SCALE_BITS.
    """
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    k = tl.arange(0, D)
    row = index[:, None].to(tl.int64)
    inside = index < n
    v = tl.load(points + row * d + k[None, :], mask=inside[:, None] & (k[None, :] < d), other=0.0) * _f64(SQRT_LOG2E)
    g = tl.zeros((), tl.float64) + step
    # Beyond 2048 g, half precision rounds to a coarser multiple of g: still exact, with a larger lo.
    v_hi = _nearest(v, g).to(tl.float32).to(tl.float16)
    v_lo = (v - v_hi.to(tl.float64)).to(tl.float32).to(tl.float16)
    packed = v_hi.to(tl.float64) + v_lo.to(tl.float64)
    c = tl.sum(packed * packed, 1) * -0.5
    if WEIGHTED:
        c += tl.load(log_weights + index, mask=inside, other=0.0) * _f64(LOG2E)
    if SHIFTED:
        log_sum = tl.load(log_sums + index, mask=inside, other=0.0)
        if UNIFORM:  # the columns' constants are without their weight
            log_sum -= tl.load(log_weights)
        c -= log_sum * _f64(LOG2E)
    if SCALED:
        c += SCALE_BITS
    c = tl.where(inside, c, _f64(PADDING))
    c1 = _nearest(c, 4096.0 * g * g).to(tl.float32).to(tl.float16)
    rest = c - c1.to(tl.float64)
    c2 = _nearest(rest, g * g).to(tl.float32).to(tl.float16)
    c3 = (rest - c2.to(tl.float64)).to(tl.float32).to(tl.float16)
    written = index[:, None] < n_padded
    tl.store(hi + row * D + k[None, :], v_hi, mask=written)
    tl.store(lo + row * D + k[None, :], v_lo, mask=written)
    one = tl.full((BLOCK, 1), 1.0, tl.float16)
    zero = tl.full((BLOCK, 1), 0.0, tl.float16)
    if ROWS:
        f = tl.arange(0, 32)[None, :]
        block = tl.where(f == 0, c1[:, None], tl.where(f == 1, c2[:, None], tl.where(f == 16, c3[:, None], zero)))
        block = tl.where((f == 2) | (f == 3) | (f == 20), one, block)
        tl.store(constants + row * 32 + f, block, mask=written)
    else:
        f = tl.arange(0, 16)[None, :]
        block = tl.where(f == 2, c1[:, None], tl.where(f == 3, c2[:, None], tl.where(f == 4, c3[:, None], zero)))
        block = tl.where(f < 2, one, block)
        tl.store(constants + row * 16 + f, block, mask=written)


@triton.jit
def _load_rows(hi, lo, constants, index, m, D: tl.constexpr):
    """A tile of packed rows: hi, lo (BLOCK_M, D), the constants' two halves (BLOCK_M, 16)."""
    k = tl.arange(0, D)[None, :]
    f = tl.arange(0, 16)[None, :]
    row = index[:, None].to(tl.int64)
    inside = index[:, None] < m
    a_hi = tl.load(hi + row * D + k, mask=inside, other=0.0)
    a_lo = tl.load(lo + row * D + k, mask=inside, other=0.0)
    a_c = tl.load(constants + row * 32 + f, mask=inside, other=0.0)
    a_rest = tl.load(constants + row * 32 + 16 + f, mask=inside, other=0.0)
    return a_hi, a_lo, a_c, a_rest


@triton.jit
def _exponents(a_hi, a_lo, a_c, a_rest, b_hi, b_lo, b_c, LONG: tl.constexpr):
    """log2 φ of a tile, (BLOCK_M, BLOCK_N): what cancels first, and exactly; see the module's docstring.

    The long form sums the corrections by themselves: next to a large exponent every step of theirs would be truncated.
    """
    e = tl.dot(a_hi, tl.trans(b_hi))
    e = tl.dot(a_c, tl.trans(b_c), e)
    if LONG:
        small = tl.dot(a_lo, tl.trans(b_lo))
        small = tl.dot(a_rest, tl.trans(b_c), small)
        small = tl.dot(a_lo, tl.trans(b_hi), small)
        small = tl.dot(a_hi, tl.trans(b_lo), small)
        e = e + small
    else:
        e = tl.dot(a_lo, tl.trans(b_hi), e)
        e = tl.dot(a_hi, tl.trans(b_lo), e)
    return e


@triton.jit
def log_sum_kernel(
    row_hi,
    row_lo,
    row_constants,
    column_hi,
    column_lo,
    column_constants,
    log_weights,
    out_max,
    out_sum,
    out_moment,
    m,
    n,
    columns_per_split,
    D: tl.constexpr,
    LONG: tl.constexpr,
    LAPLACE: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Of every row over one split of the columns: the maximum μ of e = log2 (w φ), Σ 2^(e − μ), and for LAPLACE the
    moment Σ 2^(e − μ) (log2 φ − μ), by which one pass gives the Laplace estimate too: −½r² = ln 2 · log2 φ.

    The running maximum keeps rows whose φ all underflow (Milakov and Gimelshein, "Online normalizer calculation for
    softmax", 2018).
    """
    index = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    a_hi, a_lo, a_c, a_rest = _load_rows(row_hi, row_lo, row_constants, index, m, D)
    k = tl.arange(0, D)[None, :]
    f = tl.arange(0, 16)[None, :]
    top = tl.full((BLOCK_M,), FLOOR, tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    moment = tl.zeros((BLOCK_M,), tl.float32)
    begin = tl.program_id(1) * columns_per_split
    for start in tl.range(begin, tl.minimum(begin + columns_per_split, n), BLOCK_N, num_stages=STAGES):
        j = start + tl.arange(0, BLOCK_N)
        column = j[:, None].to(tl.int64)
        b_hi = tl.load(column_hi + column * D + k)
        b_c = tl.load(column_constants + column * 16 + f)
        b_lo = tl.load(column_lo + column * D + k)
        e = _exponents(a_hi, a_lo, a_c, a_rest, b_hi, b_lo, b_c, LONG)
        highest = tl.maximum(top, tl.max(e, 1))
        below = e - highest[:, None]
        p = tl.exp2(below)
        decay = tl.exp2(top - highest)
        if LAPLACE:
            if WEIGHTED:
                below -= (tl.load(log_weights + j, mask=j < n, other=0.0) * _f64(LOG2E)).to(tl.float32)[None, :]
            # Σ 2^(e − μ') (x − μ') from sums at the old maximum μ: (moment + total (μ − μ')) 2^(μ − μ').
            # Before the first tile both are 0, but FLOOR − μ' times 0 is 0 as well.
            moment = (moment + total * (top - highest)) * decay + tl.sum(p * below, 1)
        total = total * decay + tl.sum(p, 1)
        top = highest
    to = tl.program_id(1).to(tl.int64) * m + index
    inside = index < m
    tl.store(out_max + to, top, mask=inside)
    tl.store(out_sum + to, total, mask=inside)
    if LAPLACE:
        tl.store(out_moment + to, moment, mask=inside)


@triton.jit
def _two_halves(p):
    """p ≥ 0 in fp32 as two half-precision pieces: 22 bits, where p is in half precision's normal range."""
    # Clearing 13 bits leaves a number that half precision holds, so the difference is exact.
    leading = (p.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
    return leading.to(tl.float16), (p - leading).to(tl.float16)


@triton.jit
def mean_kernel(
    row_hi,
    row_lo,
    row_constants,
    column_hi,
    column_lo,
    column_constants,
    out_sum,
    out_mean,
    m,
    n,
    columns_per_split,
    D: tl.constexpr,
    LONG: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Σ φ (m,) and Σ φ v (m, D) of every row over one split of the columns, φ scaled by 2**SCALE_BITS.

    No running maximum: the rows' constants see to it that the largest φ of a row is near 1 (a point among the columns,
    or rows shifted by their log sums). φ enters the second product in two pieces: one alone misses the shift's
    tolerance in half of the rows.
    """
    index = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    a_hi, a_lo, a_c, a_rest = _load_rows(row_hi, row_lo, row_constants, index, m, D)
    k = tl.arange(0, D)[None, :]
    f = tl.arange(0, 16)[None, :]
    total = tl.zeros((BLOCK_M,), tl.float32)
    mean = tl.zeros((BLOCK_M, D), tl.float32)
    begin = tl.program_id(1) * columns_per_split
    for start in tl.range(begin, tl.minimum(begin + columns_per_split, n), BLOCK_N, num_stages=STAGES):
        column = (start + tl.arange(0, BLOCK_N))[:, None].to(tl.int64)
        b_hi = tl.load(column_hi + column * D + k)
        b_c = tl.load(column_constants + column * 16 + f)
        b_lo = tl.load(column_lo + column * D + k)
        p = tl.exp2(_exponents(a_hi, a_lo, a_c, a_rest, b_hi, b_lo, b_c, LONG))
        total += tl.sum(p, 1)
        p_hi, p_lo = _two_halves(p)
        # A fresh accumulator for every tile, added in fp32 with rounding to nearest: Tensor Cores truncate, and over
        # thousands of steps that bias reaches the shift (5e-4 bandwidths at n = 32768).
        tile = tl.dot(p_hi, b_hi)
        tile = tl.dot(p_lo, b_hi, tile)
        tile = tl.dot(p_hi, b_lo, tile)
        mean += tile
    to = tl.program_id(1).to(tl.int64) * m + index
    inside = index < m
    tl.store(out_sum + to, total, mask=inside)
    tl.store(out_mean + to[:, None] * D + k, mean, mask=inside[:, None])


@triton.jit
def direct_kernel(
    rows,
    columns,
    log_weights,
    out_max,
    out_sum,
    out_more,
    m,
    n,
    n_padded,
    columns_per_split,
    D: tl.constexpr,
    LAPLACE: tl.constexpr,
    MEAN: tl.constexpr,
    WEIGHTED: tl.constexpr,
    ANCHORED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """As :func:`log_sum_kernel`, and for MEAN also Σ 2^(e − μ) (v_j − v_i), by direct differences.

    ``rows`` (D, m) and ``columns`` (D, n_padded) are v; all arithmetic is in their dtype, fp32 or float64. For few
    dimensions, where Tensor Cores would multiply padding, and for extents at which expanded squares fail. ``ANCHORED``:
    every row is a column too, so its largest φ is 1 and needs no search.

    Tiles are (columns, rows), so that a thread owns whole rows and sums without talking to its neighbours.
    """
    real = columns.dtype.element_ty
    i = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = i < m
    split = tl.program_id(1).to(tl.int64)
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
                d1 = tl.load(columns + n_padded + j)[:, None] - x1[None, :]
                e += d1 * d1
        else:
            e = tl.zeros((BLOCK_N, BLOCK_M), real)
            x_at = i.to(tl.int64)
            y_at = j.to(tl.int64)
            for _ in range(D):
                away = tl.load(columns + y_at)[:, None] - tl.load(rows + x_at, mask=inside, other=0.0)[None, :]
                e += away * away
                x_at += m
                y_at += n_padded
        e = e * -0.5
        if WEIGHTED:
            log2_w = (tl.load(log_weights + j, mask=j < n, other=0.0) * _f64(LOG2E)).to(real)
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
                    y_at += n_padded
                    more_at += m
    to = split * m + i
    tl.store(out_max + to, top, mask=inside)
    tl.store(out_sum + to, total, mask=inside)
    if LAPLACE:
        tl.store(out_more + to, moment, mask=inside)
    if MEAN and D <= 2:
        tl.store(out_more + split * D * m + i, mean0, mask=inside)
        if D == 2:
            tl.store(out_more + (split * D + 1) * m + i, mean1, mask=inside)


@triton.jit
def finish_log_sum_kernel(
    tops,
    totals,
    moments,
    log_weights,
    log_sum,
    sign,
    log_magnitude,
    m,
    splits,
    d,
    LAPLACE: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Merge the splits in order, float64: ℓ, and for LAPLACE the sign and log |L| (then ℓ is log M).

    Without weights all columns have the first one's.
    """
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < m
    top = tl.full((BLOCK,), FLOOR64, tl.float64)
    at = i.to(tl.int64)
    for _ in range(splits):
        top = tl.maximum(top, tl.load(tops + at, mask=inside, other=0.0).to(tl.float64))
        at += m
    total = tl.zeros((BLOCK,), tl.float64)
    moment = tl.zeros((BLOCK,), tl.float64)
    at = i.to(tl.int64)
    for _ in range(splits):
        away = tl.load(tops + at, mask=inside, other=0.0).to(tl.float64) - top
        decay = tl.exp2(away)
        part = tl.load(totals + at, mask=inside, other=1.0).to(tl.float64)
        total += part * decay
        if LAPLACE:
            moment += (tl.load(moments + at, mask=inside, other=0.0).to(tl.float64) + part * away) * decay
        at += m
    scale = top * _f64(LN2)
    if not WEIGHTED:
        scale += tl.load(log_weights)
    if LAPLACE:
        # Σ φ (1 + d/2 ∓ ½r²) with ½r² = −ln 2 · log2 φ, in units of 2^top. The moment is Σ p (log2 φ − top).
        half_square = -(moment + total * top) * _f64(LN2)
        constant = total * (1.0 + 0.5 * d)
        signed = constant - half_square
        tl.store(log_sum + i, tl.log(constant + half_square) + scale, mask=inside)
        size = tl.abs(signed)
        tl.store(sign + i, tl.where(signed > 0, 1.0, tl.where(signed < 0, -1.0, 0.0)).to(tl.float64), mask=inside)
        log_size = tl.log(tl.where(size > 0, size, 1.0)) + scale
        tl.store(log_magnitude + i, tl.where(size > 0, log_size, float("-inf")), mask=inside)
    else:
        tl.store(log_sum + i, tl.log(total) + scale, mask=inside)


@triton.jit
def finish_mean_kernel(
    tops,
    totals,
    means,
    row_hi,
    row_lo,
    log_weights,
    log_sums,
    log_sum,
    shift,
    m,
    splits,
    d,
    D: tl.constexpr,
    DIRECT: tl.constexpr,
    SHIFTED: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Merge the splits in order, float64: ℓ, and the shift in bandwidths.

    ``DIRECT``: means (splits, D, m) of differences, with maxima. Otherwise means (splits, m, D) of the packed columns,
    without; the packed row is subtracted, so that a row's own term cancels exactly.
    """
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    k = tl.arange(0, D)
    inside = i < m
    row = i[:, None].to(tl.int64)
    both = inside[:, None] & (k[None, :] < d)
    top = tl.zeros((BLOCK,), tl.float64)
    if DIRECT:
        top += FLOOR64
        at = i.to(tl.int64)
        for _ in range(splits):
            top = tl.maximum(top, tl.load(tops + at, mask=inside, other=0.0).to(tl.float64))
            at += m
    total = tl.zeros((BLOCK,), tl.float64)
    mean = tl.zeros((BLOCK, D), tl.float64)
    at = i.to(tl.int64)
    if DIRECT:
        of = k[None, :].to(tl.int64) * m + row
    else:
        of = row * D + k[None, :]
    for _ in range(splits):
        part = tl.load(totals + at, mask=inside, other=1.0).to(tl.float64)
        some = tl.load(means + of, mask=both, other=0.0).to(tl.float64)
        if DIRECT:
            away = tl.load(tops + at, mask=inside, other=0.0).to(tl.float64) - top
            decay = tl.exp2(away)
            part *= decay
            some *= decay[:, None]
            of += (tl.zeros((), tl.int64) + m) * d
        else:
            of += (tl.zeros((), tl.int64) + m) * D
        total += part
        mean += some
        at += m
    v = mean / total[:, None]
    if not DIRECT:
        packed = row * D + k[None, :]
        v -= tl.load(row_hi + packed, mask=both, other=0.0).to(tl.float64)
        v -= tl.load(row_lo + packed, mask=both, other=0.0).to(tl.float64)
        top -= SCALE_BITS
    tl.store(shift + row * d + k[None, :], v / _f64(SQRT_LOG2E), mask=both)
    result = tl.log(total) + top * _f64(LN2)
    if SHIFTED:  # the exponents had the log sums, with their weights, taken off
        result += tl.load(log_sums + i, mask=inside, other=0.0)
    elif not WEIGHTED:
        result += tl.load(log_weights)
    tl.store(log_sum + i, result, mask=inside)
