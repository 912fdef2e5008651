"""Device code: the reductions over the leaves of columns that a list names for every tile of rows.

As :func:`sdkde_triton.kernels.log_sum_kernel` and :func:`sdkde_triton.kernels.mean_kernel`; but leaves of LEAF columns
each are taken SIZE columns at a time, wherever they stand. Program (i, p) has tile k = ``which[i]`` of the rows from
``first`` on. Of the leaves from SIZE / LEAF · ends[k] up to those of the next tile, it takes the p-th ``length`` times
SIZE / LEAF, of which there may be none: then it writes the sums of no columns.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .kernels import (
    accumulated,
    added,
    exactly_weighted,
    exponents,
    load_rows,
    no_columns,
    sized,
    store_means,
    store_sums,
    weighted,
)


@triton.jit
def _part(which, ends, length):
    """A program's tile of rows, and where its part of the list begins and ends."""
    tile = tl.load(which + tl.program_id(0))
    begin = tl.load(ends + tile) + tl.program_id(1) * length
    return tile, begin, tl.minimum(begin + length, tl.load(ends + tile + 1))


@triton.jit
def _columns(leaves, i, tile: tl.constexpr, SIZE: tl.constexpr, LEAF: tl.constexpr, BLOCK_N: tl.constexpr):
    """Some columns of the i-th SIZE of a list."""
    k = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    return tl.load(leaves + i * (SIZE // LEAF) + k // LEAF) * LEAF + k % LEAF


@sized
def log_sum_listed_kernel(
    rows,
    columns,
    log_weights,
    leaves,
    which,
    ends,
    out,
    row_padded,
    column_padded,
    m,
    n,
    d,
    first,
    length,
    D: tl.constexpr,
    PIECES: tl.constexpr,
    FORM: tl.constexpr,
    MERGE: tl.constexpr,
    LAPLACE: tl.constexpr,
    WEIGHTED: tl.constexpr,
    SIZE: tl.constexpr,
    LEAF: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """LOG_SUM and LAPLACE; see :func:`sdkde_triton.kernels.log_sum_kernel`."""
    tile, begin, end = _part(which, ends, length)
    local = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    index = first + local
    a = load_rows(rows, row_padded, index, first + m, d, D, PIECES, FORM, MERGE)
    top, total, moment = no_columns(BLOCK_M)
    for i in tl.range(begin, end, num_stages=STAGES):
        for part_of in tl.static_range(SIZE // BLOCK_N):
            j = _columns(leaves, i, part_of, SIZE, LEAF, BLOCK_N)
            e, _ = exponents(a, columns, column_padded, j, D, PIECES, FORM, MERGE)
            top, total, moment = accumulated(e, top, total, moment, log_weights, j, n, LAPLACE, WEIGHTED)
    store_sums(out, local, m, top, total, moment, LAPLACE)


@sized
def mean_listed_kernel(
    rows,
    columns,
    leaves,
    which,
    ends,
    out,
    row_padded,
    column_padded,
    m,
    d,
    first,
    length,
    D: tl.constexpr,
    PIECES: tl.constexpr,
    FORM: tl.constexpr,
    MERGE: tl.constexpr,
    SUMMED: tl.constexpr,
    EXACT: tl.constexpr,
    SIZE: tl.constexpr,
    LEAF: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """MEAN; see :func:`sdkde_triton.kernels.mean_kernel`. The accumulator is a fresh one for every SIZE columns.

    What its sums round off is summed too, at "fast" as well: near columns stand together, so nearly every sum rounds.
    """
    tile, begin, end = _part(which, ends, length)
    local = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    index = first + local
    a = load_rows(rows, row_padded, index, first + m, d, D, PIECES, FORM, MERGE)
    total = tl.zeros((BLOCK_M,), tl.float32)
    total_rest = tl.zeros((BLOCK_M,), tl.float32)
    mean = tl.zeros((BLOCK_M, D), tl.float32)
    rest = tl.zeros((BLOCK_M, D), tl.float32)
    for i in tl.range(begin, end, num_stages=STAGES):
        part = tl.zeros((BLOCK_M, D), tl.float32)
        count = tl.zeros((BLOCK_M,), tl.float32)
        for part_of in tl.static_range(SIZE // BLOCK_N):
            j = _columns(leaves, i, part_of, SIZE, LEAF, BLOCK_N)
            e, b = exponents(a, columns, column_padded, j, D, PIECES, FORM, MERGE)
            p = tl.exp2(e)
            if EXACT:
                mean, rest, total, total_rest = exactly_weighted(p, b, mean, rest, total, total_rest, SUMMED)
            else:
                part, count = weighted(p, b, part, count, PIECES, SUMMED)
        if not EXACT:
            mean, rounded = added(mean, part)
            rest += rounded
            total, rounded = added(total, count)
            total_rest += rounded
    mean += rest
    total += total_rest
    store_means(out, local, m, total, mean, D, SUMMED)
