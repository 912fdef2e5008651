"""Device code: the results of all splits of the columns, merged in order, in float64."""

from __future__ import annotations

import triton
import triton.language as tl

from .kernels import SCALE_BITS, SQRT_LOG2E, UNITS, f64, number, sized, wide


@triton.jit
def _nats(x):
    return x * f64(0.6931471805599453)


@triton.jit
def _log(x):
    """log x, −∞ at 0; NaN stays."""
    return tl.where(x == 0, float("-inf"), tl.log(tl.where(x == 0, 1.0, x)))


@sized
def finish_log_sum_kernel(
    partial, log_weights, out,
    m, splits, d, constant,
    LAPLACE: tl.constexpr, WEIGHTED: tl.constexpr, END: tl.constexpr, SINGLE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Merge the splits in order, float64: ℓ, and for LAPLACE the sign and log |L| (then ℓ is log M), (1 or 3, m).

    Without weights every column's log weight is that of the first. With END there is one result, (m,), to whose log the
    number with the bits ``constant`` is added: END 1 is that log, NaN where L is negative; END 2 its exponential, with
    L's sign. SINGLE: ``out`` is float32.
    """
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    size = wide(m) * splits
    inside = i < m
    top = tl.full((BLOCK,), -1.0e303, tl.float64)  # where the direct kernel's maxima start in float64
    at = i.to(tl.int64)
    for _ in range(splits):
        top = tl.maximum(top, tl.load(partial + at, mask=inside, other=0.0).to(tl.float64))
        at += m
    total = tl.zeros((BLOCK,), tl.float64)
    moment = tl.zeros((BLOCK,), tl.float64)
    at = i.to(tl.int64)
    for _ in range(splits):
        away = tl.load(partial + at, mask=inside, other=0.0).to(tl.float64) - top
        decay = tl.exp2(away)
        part = tl.load(partial + size + at, mask=inside, other=1.0).to(tl.float64)
        total += part * decay
        if LAPLACE:
            moment += (tl.load(partial + 2 * size + at, mask=inside, other=0.0).to(tl.float64) + part * away) * decay
        at += m
    scale = _nats(top)
    if not WEIGHTED:
        scale += tl.load(log_weights)
    if LAPLACE:
        # Σ φ (1 + d/2 ∓ ½r²) with ½r² = −ln 2 · log2 φ, in units of 2^top. The moment is Σ p (log2 φ − top).
        half_square = _nats(-(moment + total * top))
        most = total * (1.0 + 0.5 * d)
        signed = most - half_square
        result = _log(tl.abs(signed)) + scale
        if END == 0:
            # NaN (in the data) stays NaN: no comparison with it is true.
            sign = tl.where(signed > 0, 1.0, tl.where(signed < 0, -1.0, signed * 0.0)).to(tl.float64)
            tl.store(out + wide(m) + i, sign, mask=inside)
            tl.store(out + 2 * wide(m) + i, result, mask=inside)
            result = _log(most + half_square) + scale
    else:
        result = _log(total) + scale
    if END > 0:
        result += number(constant)
        if LAPLACE and END == 1:
            result = tl.where(signed < 0, float("nan"), result)
    if END == 2:
        result = tl.exp(result)
        if LAPLACE:
            result = tl.where(signed < 0, -result, result)
    tl.store(out + i, result.to(tl.float32) if SINGLE else result, mask=inside)


@sized
def finish_mean_kernel(
    partial, rows, log_weights, log_sums, log_sum, shift,
    row_padded, m, splits, d, raised,
    D: tl.constexpr, WIDTH: tl.constexpr, PIECES: tl.constexpr, DIRECT: tl.constexpr, SUMMED: tl.constexpr,
    SHIFTED: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Merge the splits in order, float64: ℓ and the shift in bandwidths. φ is raised by ``raised`` bits.

    WIDTH is a power of two ≥ D. ``DIRECT``: maxima, sums, and means (splits, d, m) of differences. Otherwise sums (with
    ``SUMMED`` they are column d of the means) and means (splits, m, D) of the packed columns, in their units; the
    packed row is subtracted, so that a row's own term cancels exactly.
    """
    units: tl.constexpr = UNITS if PIECES == 3 else 1.0
    size = wide(m) * splits
    totals = partial + size if DIRECT else partial
    means = partial if SUMMED else totals + size
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    k = tl.arange(0, WIDTH)
    inside = i < m
    row = i[:, None].to(tl.int64)
    both = inside[:, None] & (k[None, :] < d)
    top = tl.zeros((BLOCK,), tl.float64)
    if DIRECT:
        top += -1.0e303
        at = i.to(tl.int64)
        for _ in range(splits):
            top = tl.maximum(top, tl.load(partial + at, mask=inside, other=0.0).to(tl.float64))
            at += m
    total = tl.zeros((BLOCK,), tl.float64)
    mean = tl.zeros((BLOCK, WIDTH), tl.float64)
    at = i.to(tl.int64)
    of = k[None, :].to(tl.int64) * m + row if DIRECT else row * D + k[None, :]
    for _ in range(splits):
        if SUMMED:
            part = tl.load(means + at * D + d, mask=inside, other=1.0).to(tl.float64)
        else:
            part = tl.load(totals + at, mask=inside, other=1.0).to(tl.float64)
        some = tl.load(means + of, mask=both, other=0.0).to(tl.float64)
        if DIRECT:
            away = tl.load(partial + at, mask=inside, other=0.0).to(tl.float64) - top
            decay = tl.exp2(away)
            part *= decay
            some *= decay[:, None]
            of += wide(m) * d
        else:
            of += wide(m) * D
        total += part
        mean += some
        at += m
    if SUMMED:
        total /= units * units  # of the columns' ones
    v = mean / total[:, None]
    if not DIRECT:
        packed = row * D + k[None, :]
        for piece in tl.static_range(PIECES):
            v -= tl.load(rows + wide(row_padded) * (piece * D) + packed, mask=both, other=0.0).to(tl.float64)
        top -= SCALE_BITS
    v = v / f64(SQRT_LOG2E * units)
    tl.store(shift + row * d + k[None, :], v, mask=both)
    result = _log(total) + _nats(top - raised)
    if SHIFTED:  # the exponents had the log sums, with their weights, taken off
        result += tl.load(log_sums + i, mask=inside, other=0.0)
    elif not WEIGHTED:
        result += tl.load(log_weights)
    tl.store(log_sum + i, result, mask=inside)
