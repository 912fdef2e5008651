"""Device code: packed operands, exponents on Tensor Cores, and the reductions fused to them.

Everything is in log2 units: with v = √(log2 e) u, log2 φ_ij = −½‖v_i − v_j‖² = v_i·v_j − ½‖v_i‖² − ½‖v_j‖².

**Packed operands.** That exponent is a small difference of large numbers, so it must be exact where it cancels. Every
coordinate is split into two half-precision pieces, v = hi + lo, hi a multiple of a grid g (a power of two), and the
constant −½‖v‖² (with the log weight, or a row's shift) into three, c = c₁ + c₂ + c₃, the first two multiples of g². The
products hi·hi and c₁ + c₂ are then multiples of g², and as long as they stay below 2²⁴ g² the Tensor Core's fp32
accumulator sums them exactly, although it truncates. They go first; the corrections follow when the large terms have
cancelled, in one of four forms: SHORT adds lo·hi + hi·lo; PAIRED also lo·lo, which is not 0 on average between a row
and its own column or a duplicate; LONG also c₃, and sums the corrections by themselves; FULL takes coordinates in three
pieces, v = hi + lo + rest, and adds rest·hi + hi·rest. The same tiles serve the second product of MEAN.

Where d leaves columns of hi free, they carry a one, so that the second product of MEAN sums φ too, and up to 12
dimensions the constants, so that one product less is needed.

A packed array is one half-precision buffer for ``padded`` points: their PIECES, two or three, (padded, D) each, D as
:func:`sdkde_triton.bounds.packed_dimensions` has it; the points' constants as rows, (padded, 32) = [c₁, c₂, 1, 1, 0 … |
c₃, 0, 0, 0, 1, 0 …]; and for columns theirs as such, (padded, 16) = [1, 1, c₁, c₂, c₃, what of it is a multiple of g²,
0 …], the first four of these and the last in hi from its column d on too, as far as there is room. Columns are padded
to a multiple of every tile with c₁ = −60000, whose φ is 0. Where MEAN stores φ at "fast", columns end with the points
in two pieces of eleven bits each, (padded, D).

Half precision ends at 2⁻²⁴, which would cut the rest short. So three pieces are of 128 v, and end at 2⁻³¹ of v. The
constants, which would overflow, stay as they are; their ones are 128² instead. A sum of products is then 128² times the
exponent, and what a column of ones sums is 128² Σφ. These are powers of two: what is exact stays so.

Partial results of the splits of the columns are consecutive (splits, m) arrays in one buffer, which
:mod:`sdkde_triton.finish` merges in a fixed order.

**Lists.** LISTED kernels sum over lists of leaves, of LEAF columns each, SIZE columns at a time. The list of tile k of
the rows, counted from the row ``first``, begins at leaf SIZE / LEAF · ends[k] and ends where the next tile's begins.
Program (i, p) has tile ``which[i]``, and the p-th ``length`` SIZEs of its list. Beyond the list's end there are no
columns, and the program writes empty sums. Other kernels take the p-th ``length`` columns of all; SIZE is BLOCK_N.

Integer arguments are not specialised on, so that a kernel is compiled once for all sizes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .bounds import Form

LONG, FULL = tl.constexpr(Form.LONG), tl.constexpr(Form.FULL)

#: Units of a coordinate in three pieces to one of v; fp16 then ends at 426 bandwidths, beyond any packed extent.
UNITS = tl.constexpr(128.0)

#: MEAN on Tensor Cores scales φ by 2**SCALE_BITS: φ ≤ 1 then uses the whole range of half precision. With two pieces
#: the rows' constants do that; with three it follows exp2, as exponents near 14 are rounded to 2⁻²¹.
SCALE_BITS = tl.constexpr(14)

#: Where running maxima of fp32 start, in log2 units: finite, below any exponent; in the direct kernel above any
#: padding column's. Every split has a column that is none.
FLOOR = tl.constexpr(-1.0e30)

SQRT_LOG2E = tl.constexpr(1.2011224087864498)

sized = triton.jit(
    do_not_specialize=[
        *("n", "m", "d", "padded", "row_padded", "column_padded", "columns_per_split", "splits", "first", "top"),
        *("height", "tile_rows", "tile_columns", "length", "leaf_count", "node_count", "none", "factor", "constant"),
        *("kind", "asked", "raised", "unit", "least", "most", "rest", "cycle"),
    ]
)


@triton.jit
def wide(x):
    """An integer argument in 64 bits."""
    return tl.zeros((), tl.int64) + x


@triton.jit
def f64(value: tl.constexpr):
    return tl.full((), value, tl.float64)


@triton.jit
def number(x):
    """The float64 of these bits."""
    return wide(x).to(tl.float64, bitcast=True)


@triton.jit
def to_log2(x):
    """Nats in log2 units, float64."""
    return x * f64(1.4426950408889634)


@triton.jit
def _nearest(x, step):
    """The multiple of ``step`` (a power of two) nearest to x, float64."""
    return tl.floor(x / step + 0.5) * step


@sized
def pack_kernel(
    points, log_weights, log_sums, out,
    n, padded, d, step, raised,
    D: tl.constexpr, WIDTH: tl.constexpr, PIECES: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
    MERGE: tl.constexpr, WEIGHTED: tl.constexpr, SHIFTED: tl.constexpr, ROUNDED: tl.constexpr, MOVED: tl.constexpr,
):  # fmt: skip
    """Pack float64 points (n, d) as rows, or as columns and rows; the grid of hi is ``step``, WIDTH a power of two ≥ D.

    ``WEIGHTED``: the columns' weights vary, and log2 of them is in their constants. ``SHIFTED`` subtracts log2 of the
    rows' sums, so that the exponents are those of φ / Σφ; ``raised`` is added to the rows' constants. ``ROUNDED``:
    columns are followed by v in two pieces, (2, padded, D), the first of eleven bits, which lose 2⁻²² of a coordinate.
    ``MOVED`` moves every dimension by a fraction of g, see :func:`sdkde_triton.bounds.in_blocks`.
    """
    units: tl.constexpr = UNITS if PIECES == 3 else 1.0
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    k = tl.arange(0, WIDTH)
    row = index[:, None].to(tl.int64)
    inside = index < n
    v = tl.load(points + row * d + k[None, :], mask=inside[:, None] & (k[None, :] < d), other=0.0)
    v *= f64(SQRT_LOG2E * units)
    g = tl.zeros((), tl.float64) + step
    if MOVED:
        turns = k.to(tl.float64) * f64(0.6180339887498949)
        v += tl.where(k < d, (turns - tl.floor(turns) - 0.5) * g * units, 0.0)[None, :]
    # Beyond 2048 g, half precision rounds to a coarser multiple of g: still exact, with a larger lo.
    v_hi = _nearest(v, g * units).to(tl.float32).to(tl.float16)
    v_lo = (v - v_hi.to(tl.float64)).to(tl.float32).to(tl.float16)
    packed = v_hi.to(tl.float64) + v_lo.to(tl.float64)
    written = index[:, None] < padded
    stored = written & (k[None, :] < D)
    size = wide(padded)
    tl.store(out + (size + row) * D + k[None, :], v_lo, mask=stored)
    if PIECES == 3:
        v_rest = (v - packed).to(tl.float32).to(tl.float16)
        packed += v_rest.to(tl.float64)
        tl.store(out + (2 * size + row) * D + k[None, :], v_rest, mask=stored)
    c = tl.sum(packed * packed, 1) * (-0.5 / (units * units))
    one = tl.full((BLOCK, 1), units * units, tl.float16)
    zero = tl.full((BLOCK, 1), 0.0, tl.float16)
    if COLUMNS:
        weighted = c
        if WEIGHTED:
            weighted += to_log2(tl.load(log_weights + index, mask=inside, other=0.0))
        c1, c2, c3 = _three_pieces(tl.where(inside, weighted, f64(-60000.0)), g)
        f = tl.arange(0, 16)[None, :]
        whole = _nearest(c3.to(tl.float64), g * g).to(tl.float32).to(tl.float16)
        block = tl.where(f == 2, c1[:, None], tl.where(f == 3, c2[:, None], tl.where(f == 4, c3[:, None], zero)))
        block = tl.where(f == 5, whole[:, None], block)
        tl.store(out + size * (PIECES * D + 32) + row * 16 + f, tl.where(f < 2, one, block), mask=written)
        if ROUNDED:
            high = v.to(tl.float32).to(tl.float16)
            low = (v - high.to(tl.float64)).to(tl.float32).to(tl.float16)
            values = out + size * (PIECES * D + 48) + row * D + k[None, :]
            tl.store(values, high, mask=stored)
            tl.store(values + size * D, low, mask=stored)
        free = k[None, :] - d
        v_hi = tl.where((free == 0) | ((free == 1) & MERGE), one, v_hi)
        if MERGE:
            v_hi = tl.where(free == 2, c1[:, None], tl.where(free == 3, c2[:, None], v_hi))
            v_hi = tl.where(free == 4, whole[:, None], v_hi)
    tl.store(out + row * D + k[None, :], v_hi, mask=stored)
    if SHIFTED:
        log_sum = tl.load(log_sums + index, mask=inside, other=0.0)
        log_sum = tl.where(log_sum == float("-inf"), 0.0, log_sum)  # a row without columns
        if not WEIGHTED:  # then the columns' constants are without their weight
            log_sum -= tl.load(log_weights)
        c -= to_log2(log_sum)
    c += raised
    c1, c2, c3 = _three_pieces(c, g)
    f = tl.arange(0, 32)[None, :]
    block = tl.where(f == 0, c1[:, None], tl.where(f == 1, c2[:, None], tl.where(f == 16, c3[:, None], zero)))
    block = tl.where((f == 2) | (f == 3) | (f == 20), one, block)
    tl.store(out + size * (PIECES * D) + row * 32 + f, block, mask=written)


@triton.jit
def _three_pieces(c, g):
    """c ≈ c₁ + c₂ + c₃ in half precision, the first two multiples of g²."""
    c1 = _nearest(c, 4096.0 * g * g).to(tl.float32).to(tl.float16)
    rest = c - c1.to(tl.float64)
    c2 = _nearest(rest, g * g).to(tl.float32).to(tl.float16)
    return c1, c2, (rest - c2.to(tl.float64)).to(tl.float32).to(tl.float16)


@triton.jit
def load_rows(
    rows, padded, index, m, d, D: tl.constexpr, PIECES: tl.constexpr, FORM: tl.constexpr, MERGE: tl.constexpr
):
    """A tile of packed rows: hi, lo, and rest in FULL (BLOCK_M, D), the constants' two halves (BLOCK_M, 16)."""
    k = tl.arange(0, D)[None, :]
    f = tl.arange(0, 16)[None, :]
    row = index[:, None].to(tl.int64)
    inside = index[:, None] < m
    size = wide(padded)
    # Points packed as columns have those constants in the free columns, where a row's belong or nothing does.
    a_hi = tl.load(rows + row * D + k, mask=inside & (k < d), other=0.0)
    a_lo = tl.load(rows + size * D + row * D + k, mask=inside, other=0.0)
    a_rest = a_lo
    if FORM == FULL:
        a_rest = tl.load(rows + size * (2 * D) + row * D + k, mask=inside, other=0.0)
    constants = rows + size * (PIECES * D)
    if MERGE:  # c₁, c₂, 1, 1
        a_hi += tl.load(constants + row * 32 + (k - d), mask=inside & (k >= d) & (k < d + 4), other=0.0)
    a_c = tl.load(constants + row * 32 + f, mask=inside, other=0.0)
    if FORM < LONG:  # of the columns' c₃ what c₂ cannot hold of the farthest points, but nothing that is truncated
        one = UNITS * UNITS if PIECES == 3 else 1.0
        if MERGE:
            a_hi = tl.where(k == d + 4, one, a_hi).to(a_hi.dtype)
        a_c = tl.where(f == 5, one, a_c).to(a_c.dtype)
    a_c3 = tl.load(constants + row * 32 + 16 + f, mask=inside, other=0.0)
    return a_hi, a_lo, a_rest, a_c, a_c3


@triton.jit
def alone(a, b):
    """a b, summed from 0: what is added afterwards the compiler would take for the start of the sum, and truncate.

    It leaves products alone that ask for another precision of sums, which means something for FP8 only.
    """
    return tl.dot(a, b, max_num_imprecise_acc=1)


@triton.jit
def exponents(
    a, columns, column_padded, j, D: tl.constexpr, PIECES: tl.constexpr, FORM: tl.constexpr, MERGE: tl.constexpr
):
    """log2 φ of a tile, (BLOCK_M, BLOCK_N), for rows from :func:`load_rows`; and the tiles of the columns' pieces.

    LONG and FULL sum the corrections by themselves: next to a large exponent every step of theirs would be truncated.
    """
    a_hi, a_lo, a_rest, a_c, a_c3 = a
    k = tl.arange(0, D)[None, :]
    f = tl.arange(0, 16)[None, :]
    column = j[:, None].to(tl.int64)
    size = wide(column_padded)
    b_hi = tl.load(columns + column * D + k)
    if FORM >= LONG or not MERGE:
        b_c = tl.load(columns + size * (PIECES * D + 32) + column * 16 + f)
    b_lo = tl.load(columns + size * D + column * D + k)
    b_rest = b_lo
    if PIECES == 3:
        b_rest = tl.load(columns + size * (2 * D) + column * D + k)
    e = alone(a_hi, tl.trans(b_hi))
    if not MERGE:
        e = tl.dot(a_c, tl.trans(b_c), e)
    if FORM >= LONG:
        small = tl.dot(a_lo, tl.trans(b_lo))
        small = tl.dot(a_c3, tl.trans(b_c), small)
        if FORM == FULL:
            small = tl.dot(a_rest, tl.trans(b_hi), small)
            small = tl.dot(a_hi, tl.trans(b_rest), small)
        small = tl.dot(a_lo, tl.trans(b_hi), small)
        small = tl.dot(a_hi, tl.trans(b_lo), small)
        e = e + small
    else:
        e = tl.dot(a_lo, tl.trans(b_hi), e)
        e = tl.dot(a_hi, tl.trans(b_lo), e)
        if FORM == 1:  # PAIRED
            e = tl.dot(a_lo, tl.trans(b_lo), e)
    if PIECES == 3:
        e *= 1.0 / (UNITS * UNITS)
    return e, (b_hi, b_lo, b_rest)


@triton.jit
def no_columns(BLOCK_M: tl.constexpr):
    """The rows' maximum, sum and moment before the first tile of columns."""
    zero = tl.zeros((BLOCK_M,), tl.float32)
    return tl.full((BLOCK_M,), FLOOR, tl.float32), zero, zero


@triton.jit
def accumulated(e, top, total, moment, log_weights, j, n, LAPLACE: tl.constexpr, WEIGHTED: tl.constexpr):
    """The rows' maximum, Σ 2^(e − μ) and LAPLACE's moment with those of another tile of columns j."""
    highest = tl.maximum(top, tl.max(e, 1))
    below = e - highest[:, None]
    p = tl.exp2(below)
    decay = tl.exp2(top - highest)
    if LAPLACE:
        if WEIGHTED:
            below -= to_log2(tl.load(log_weights + j, mask=j < n, other=0.0)).to(tl.float32)[None, :]
        # Σ 2^(e − μ') (x − μ') from sums at the old maximum μ: (moment + total (μ − μ')) 2^(μ − μ').
        # Before the first tile both are 0, but FLOOR − μ' times 0 is 0 as well.
        moment = (moment + total * (top - highest)) * decay + tl.sum(p * below, 1)
    return highest, total * decay + tl.sum(p, 1), moment


@triton.jit
def store_sums(out, index, m, top, total, moment, LAPLACE: tl.constexpr):
    """Write a part's maxima, sums, and for LAPLACE moments of the rows ``index``."""
    to = tl.program_id(1).to(tl.int64) * m + index
    inside = index < m
    size = wide(m) * tl.num_programs(1)
    tl.store(out + to, top, mask=inside)
    tl.store(out + size + to, total, mask=inside)
    if LAPLACE:
        tl.store(out + 2 * size + to, moment, mask=inside)


@triton.jit
def store_means(out, index, m, total, mean, D: tl.constexpr, SUMMED: tl.constexpr):
    """Write a part's sums, unless they are a column of the means, and means of the rows ``index``."""
    to = tl.program_id(1).to(tl.int64) * m + index
    inside = index < m
    means = out
    if not SUMMED:
        tl.store(out + to, total, mask=inside)
        means += wide(m) * tl.num_programs(1)
    tl.store(means + to[:, None] * D + tl.arange(0, D)[None, :], mean, mask=inside[:, None])


@triton.jit
def part_of_columns(which, ends, n, length, LISTED: tl.constexpr):
    """A program's tile of rows, and where its part of the columns begins and ends; of the tile's list, in SIZEs."""
    tile, begin, end = tl.program_id(0), tl.program_id(1) * length, n
    if LISTED:
        tile = tl.load(which + tile)
        begin += tl.load(ends + tile)
        end = tl.load(ends + tile + 1)
    return tile, begin, tl.minimum(begin + length, end)


@triton.jit
def some_columns(
    leaves, i, part: tl.constexpr, LISTED: tl.constexpr, SIZE: tl.constexpr, LEAF: tl.constexpr, BLOCK_N: tl.constexpr
):
    """BLOCK_N of the SIZE columns from the i-th on, or of the i-th SIZE of a list."""
    k = part * BLOCK_N + tl.arange(0, BLOCK_N)
    if LISTED:
        return tl.load(leaves + i * (SIZE // LEAF) + k // LEAF) * LEAF + k % LEAF
    return i + k


@sized
def log_sum_kernel(
    rows, columns, log_weights, leaves, which, ends, out,
    row_padded, column_padded, m, n, d, first, length,
    D: tl.constexpr, PIECES: tl.constexpr, FORM: tl.constexpr, MERGE: tl.constexpr, LAPLACE: tl.constexpr,
    WEIGHTED: tl.constexpr, LISTED: tl.constexpr, SIZE: tl.constexpr, LEAF: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Of every row over one part of the columns: the maximum μ of e = log2 (w φ), Σ 2^(e − μ), and for LAPLACE the
    moment Σ 2^(e − μ) (log2 φ − μ), by which one pass gives the Laplace estimate too: −½r² = ln 2 · log2 φ.

    The running maximum keeps rows whose φ all underflow (Milakov and Gimelshein, "Online normalizer calculation for
    softmax", 2018).
    """
    tile, begin, end = part_of_columns(which, ends, n, length, LISTED)
    local = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    a = load_rows(rows, row_padded, first + local, first + m, d, D, PIECES, FORM, MERGE)
    top, total, moment = no_columns(BLOCK_M)
    for i in tl.range(begin, end, 1 if LISTED else SIZE, num_stages=STAGES):
        for part in tl.static_range(SIZE // BLOCK_N):
            j = some_columns(leaves, i, part, LISTED, SIZE, LEAF, BLOCK_N)
            e, _ = exponents(a, columns, column_padded, j, D, PIECES, FORM, MERGE)
            top, total, moment = accumulated(e, top, total, moment, log_weights, j, n, LAPLACE, WEIGHTED)
    store_sums(out, local, m, top, total, moment, LAPLACE)


@triton.jit
def two_halves(p):
    """p ≥ 0 in fp32 as two half-precision pieces: 22 bits, where p is in half precision's normal range."""
    # Clearing 13 bits leaves a number that half precision holds, so the difference is exact.
    leading = (p.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
    return leading.to(tl.float16), (p - leading).to(tl.float16)


@triton.jit
def leading_power(p):
    """The power of two in every row's largest p ≥ 0, 2⁻¹⁰⁰ at least, and its inverse; columns."""
    exponent = tl.maximum(tl.max(p, 1).to(tl.int32, bitcast=True) & 0x7F800000, 27 << 23)[:, None]
    inverse = ((254 << 23) - exponent).to(tl.float32, bitcast=True)
    return exponent.to(tl.float32, bitcast=True), inverse


@triton.jit
def three_halves(p, power):
    """A tile of p ≥ 0 in three half-precision pieces, the first with six bits below ``power``, of a row's largest.

    Its products with hi, of eleven bits, then sum exactly over 64 columns. A Tensor Core aligns all products to the
    largest number and cuts what hangs over: 22 bits in the leading product would move a shift by 2⁻²⁰ ‖v‖.
    """
    rounding = power * (1.5 * 2.0**18)  # a unit in its last place is a 32nd of the power of two
    first = (p + rounding) - rounding
    second, third = two_halves(p - first)
    return first.to(tl.float16), second, third


@triton.jit
def weighted(p, b, part, count, PIECES: tl.constexpr, SUMMED: tl.constexpr):
    """``part`` with φ b of a tile, and ``count`` with φ; φ in two pieces: the largest products last."""
    b_hi, b_lo, b_rest = b
    if PIECES == 3:
        p *= 2.0**SCALE_BITS
    if not SUMMED:
        count += tl.sum(p, 1)
    p_hi, p_lo = two_halves(p)
    if PIECES == 3:
        part = tl.dot(p_lo, b_lo, part)
        part = tl.dot(p_hi, b_rest, part)
    part = tl.dot(p_lo, b_hi, part)
    part = tl.dot(p_hi, b_lo, part)
    return tl.dot(p_hi, b_hi, part), count


@triton.jit
def added(a, b):
    """a + b, and what is lost by rounding it, for |a| ≥ |b| (T. J. Dekker, "A floating-point technique for extending
    the available precision", 1971).
    """
    total = a + b
    return total, b - (total - a)


@triton.jit
def exactly_weighted(p, b, mean, rest, total, total_rest, SUMMED: tl.constexpr):
    """Sums for "high" with those of a tile: of φ b in ``mean`` and ``rest``, of φ in ``total`` and ``total_rest``.

    φ is in three pieces, in units of the row's largest of the tile. The largest product is added to the first of a sum,
    and what that rounds off, with all else, to the second: beside a heap of duplicates every tile rounds alike. Beyond
    64 dimensions registers do not hold all that: programs take few tiles instead
    (:func:`sdkde_triton.bounds.steps_at_most`), and φ has one unit. The largest products come last: every step after
    them is truncated.
    """
    b_hi, b_lo, b_rest = b
    held: tl.constexpr = mean.shape[1] <= 64
    if held:
        power, inverse = leading_power(p)
        p_hi, p_lo, p_rest = three_halves(p * (inverse * 2.0**SCALE_BITS), 2.0**SCALE_BITS)
    else:
        p *= 2.0**SCALE_BITS
        power, inverse = leading_power(p)
        p_hi, p_lo, p_rest = three_halves(p, power)
    if not SUMMED:
        count = tl.sum(p_hi.to(tl.float32), 1)
        less = tl.sum(p_lo.to(tl.float32) + p_rest.to(tl.float32), 1)
        if held:
            row = tl.reshape(power, total.shape)
            total, rounded = added(total, count * row)
            total_rest += less * row + rounded
        else:
            total += less
            total += count
    part = tl.dot(p_rest, b_hi)
    part = tl.dot(p_hi, b_rest, part)
    part = tl.dot(p_lo, b_lo, part)
    part = tl.dot(p_hi, b_lo, part)
    part = tl.dot(p_lo, b_hi, part)
    if held:
        mean, rounded = added(mean, alone(p_hi, b_hi) * power)
        rest += part * power + rounded
    else:
        mean += part
        mean += alone(p_hi, b_hi)
    return mean, rest, total, total_rest


@sized
def mean_kernel(
    rows, columns, leaves, which, ends, out,
    row_padded, column_padded, m, n, d, first, length,
    D: tl.constexpr, PIECES: tl.constexpr, FORM: tl.constexpr, MERGE: tl.constexpr, SUMMED: tl.constexpr,
    EXACT: tl.constexpr, LISTED: tl.constexpr, SIZE: tl.constexpr, LEAF: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Σ φ (m,) and Σ φ v (m, D) of every row over one part of the columns, φ scaled by 2**SCALE_BITS.

    v is in the columns' units. ``SUMMED``: column d of the means, of ones, is the sum. ``EXACT``, for "high" and for
    points with weights, with three PIECES: φ in three pieces too, else in two; with one half of the rows miss the
    shift's tolerance. There is no running maximum: the largest φ of a row is near 1 (a point among the columns, or rows
    shifted by their log sums), or EXACT holds terms of any size.
    """
    tile, begin, end = part_of_columns(which, ends, n, length, LISTED)
    local = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    a = load_rows(rows, row_padded, first + local, first + m, d, D, PIECES, FORM, MERGE)
    total = tl.zeros((BLOCK_M,), tl.float32)
    total_rest = tl.zeros((BLOCK_M,), tl.float32)
    mean = tl.zeros((BLOCK_M, D), tl.float32)
    rest = tl.zeros((BLOCK_M, D), tl.float32)
    for i in tl.range(begin, end, 1 if LISTED else SIZE, num_stages=STAGES):
        # A fresh accumulator for every SIZE, added in fp32 with rounding to nearest: Tensor Cores truncate, and over
        # thousands of steps that bias reaches the shift (5e-4 bandwidths at n = 32768).
        sums = tl.zeros((BLOCK_M, D), tl.float32)
        count = tl.zeros((BLOCK_M,), tl.float32)
        for part in tl.static_range(SIZE // BLOCK_N):
            j = some_columns(leaves, i, part, LISTED, SIZE, LEAF, BLOCK_N)
            e, b = exponents(a, columns, column_padded, j, D, PIECES, FORM, MERGE)
            p = tl.exp2(e)
            if EXACT:
                mean, rest, total, total_rest = exactly_weighted(p, b, mean, rest, total, total_rest, SUMMED)
            else:
                sums, count = weighted(p, b, sums, count, PIECES, SUMMED)
        if not EXACT and LISTED:  # near columns stand together, so nearly every sum rounds: that is summed too
            mean, rounded = added(mean, sums)
            rest += rounded
            total, rounded = added(total, count)
            total_rest += rounded
        elif not EXACT:
            mean += sums
            total += count
    if EXACT or LISTED:
        mean += rest
        total += total_rest
    store_means(out, local, m, total, mean, D, SUMMED)
