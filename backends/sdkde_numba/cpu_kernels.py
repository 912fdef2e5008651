"""The compiled loops: exponents in registers, exponentials and sums on tiles in cache.

A tile is :data:`ROWS` query rows by a block of columns. Its numbers s_ij, either ‖u_i − u_j‖² or u_i·u_j − ½‖u_j‖², are
made by :func:`_squares` and :func:`_products`, written as vector instructions because LLVM does not keep such a block
in registers by itself. Everything else is plain loops over columns that it vectorises. Functions that call one another
are in one file, as Numba's cache notices changes of a function's own file only.
"""

import functools
import math

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from . import instructions as llvm
from .bounds import LEAF
from .instructions import exp2, larger, loop

#: Query rows of a tile. Its columns are a multiple of 64: whole blocks of registers, whatever their width.
ROWS = 4

#: The log2 weight of padding columns, for float32 and float64. Running maxima start at -1e28 and -1e290, above it and
#: far below any exponent.
ABSENT = (-1e30, -1e300)


def _tile_product(direct, most=4):
    """out[r, j] = Σ_k (x[k, j] − rows[first + r, k])², or Σ_k x[k, j] · rows[first + r, k], with x = columns[tile].

    ``first`` may be an array: for each r the place in ``out`` of its results, LEAF² places for each row of ``rows``.
    """

    def typed(typing_context, rows, first, columns, tile, out):
        first = first if isinstance(first, types.Array) else types.intp
        return types.void(rows, first, columns, types.intp, out), generate

    def generate(context, builder, signature, arguments):
        rows, columns, out = (llvm.array(context, builder, signature, arguments, k) for k in (0, 2, 4))
        first, tile = arguments[1], arguments[3]
        vector, constant = _vector(context, signature.args[0]), functools.partial(ir.Constant, tile.type)
        lanes, vectors = vector.count, most if llvm.register_bytes(context) != 32 else 2  # sums fill 16 or 32 registers
        many, width = (builder.extract_value(columns.shape, k) for k in (1, 2))
        if isinstance(signature.args[1], types.Array):
            places = llvm.array(context, builder, signature, arguments, 1).data
            ends = [builder.load(builder.gep(places, [constant(r)])) for r in range(ROWS)]
            numbers = [builder.sdiv(end, constant(LEAF**2)) for end in ends]
        else:
            numbers = [builder.add(first, constant(r)) for r in range(ROWS)]
            ends = [builder.mul(constant(r), width) for r in range(ROWS)]
        row_starts = [builder.mul(number, many) for number in numbers]
        with cgutils.for_range_slice(builder, constant(0), width, constant(lanes * vectors)) as (j, _):
            places = [builder.add(j, constant(v * lanes)) for v in range(vectors)]
            sums = [llvm.zeros(builder, vector, vectors) for _ in range(ROWS)]
            with cgutils.for_range(builder, many) as loop:
                line = llvm.at(builder, tile, many, loop.index)
                x = [llvm.load(builder, columns.data, llvm.at(builder, line, width, v), vector) for v in places]
                for start, row in zip(row_starts, sums):
                    u = llvm.load(builder, rows.data, builder.add(start, loop.index), vector.element)
                    u = llvm.everywhere(builder, u, vector)
                    for x_v, slot in zip(x, row):
                        apart = builder.fsub(x_v, u) if direct else None
                        llvm.add(builder, slot, apart or x_v, apart or u)
            for end, row in zip(ends, sums):
                for place, slot in zip(places, row):
                    llvm.store(builder, builder.load(slot), out.data, builder.add(end, place))
        return context.get_dummy_value()

    return intrinsic(typed)


_squares, _products = _tile_product(direct=True), _tile_product(direct=False)
_leaf_products = _tile_product(direct=False, most=2)  # of LEAF columns in float64


@intrinsic
def _add_means(typing_context, phi, rows, first, columns, tile, out):
    """out[first + r] += Σ_j phi[r, j] (columns[tile, :, j] − rows[first + r]), in every coordinate of ``out``."""

    def generate(context, builder, signature, arguments):
        phi, rows, columns, out = (llvm.array(context, builder, signature, arguments, k) for k in (0, 1, 3, 5))
        first, tile = arguments[2], arguments[4]
        vector, constant = _vector(context, signature.args[0]), functools.partial(ir.Constant, first.type)
        many, width = (builder.extract_value(columns.shape, k) for k in (1, 2))
        d = builder.extract_value(out.shape, 1)
        with cgutils.for_range(builder, d) as coordinate:
            c, own = coordinate.index, [builder.add(first, constant(r)) for r in range(ROWS)]
            u = [llvm.load(builder, rows.data, llvm.at(builder, i, many, c), vector.element) for i in own]
            u = [llvm.everywhere(builder, x, vector) for x in u]
            # Two for each row: additions wait for each other.
            sums = [llvm.zeros(builder, vector, ROWS) for _ in range(2)]
            line = llvm.at(builder, tile, many, c)
            with cgutils.for_range_slice(builder, constant(0), width, constant(2 * vector.count)) as (j, _):
                for v, slots in enumerate(sums):
                    place = builder.add(j, constant(v * vector.count))
                    x = llvm.load(builder, columns.data, llvm.at(builder, line, width, place), vector)
                    for r, slot in enumerate(slots):
                        term = llvm.load(builder, phi.data, llvm.at(builder, constant(r), width, place), vector)
                        llvm.add(builder, slot, term, builder.fsub(x, u[r]))
            for i, slots in zip(own, zip(*sums)):
                target, total = llvm.at(builder, i, d, c), builder.fadd(*(builder.load(slot) for slot in slots))
                total = [llvm.load(builder, out.data, target, vector.element), total]
                total = llvm.call(builder, "llvm.vector.reduce.fadd", total, ("reassoc",))
                llvm.store(builder, total, out.data, target)
        return context.get_dummy_value()

    return types.void(phi, rows, types.intp, columns, types.intp, out), generate


def _vector(context, kind):
    return ir.VectorType(context.get_data_type(kind.dtype), llvm.register_bytes(context) * 8 // kind.dtype.bitwidth)


# Helpers are inlined before types are inferred: compiled each on its own, they took longer than the loops. A tile's
# exponents are computed once and kept: far from every column rounding another way moves them by thousands.


@njit(inline="always")
def _exponents(s, r, log_weights, tile, factor, absent, out):
    """out[r, j] = s · factor + log_weights[tile]; return the largest."""
    top = absent
    for j in range(s.shape[1]):
        exponent = s[r, j] * factor + log_weights[tile, j]
        out[r, j] = exponent
        top = larger(top, exponent)
    return top


@njit(inline="always")
def _exponentials(exponents, r, top, least, out):
    """out[r, j] = 2^(exponents[r, j] − top), 0 where that is below the normal numbers; return the sum."""
    zero = least - least
    below, total = least - type(least)(1.0), zero
    for j in range(exponents.shape[1]):  # a loop of its own: of vectors of two widths LLVM makes slow code
        out[r, j] = larger(exponents[r, j] - top, below)
    for j in range(exponents.shape[1]):
        t = out[r, j]
        term = exp2(t) if t > least else zero
        out[r, j] = term
        total += term
    return total


_taylor = tuple((-1.0) ** k * (math.pi / 2.0) ** (2 * k) / math.factorial(2 * k) for k in range(10, -1, -1))


@njit(inline="always")
def _cosine(x):
    """cos(π √x / 2), as a polynomial in x: its Taylor series, to 2e-17 of 1 on [0, 1]."""
    power = 0.0
    for c in _taylor:
        power = power * x + c
    return power


@njit(inline="always")
def _kernel_exponents(s, r, log_weights, tile, code, absent, out):
    """out[r, j] = log_weights[tile] − √s · log2(e) for the exponential kernel; for others log_weights within reach.

    Return the largest. ``code`` is 0 for the exponential kernel, then tophat, epanechnikov, linear, cosine. A kernel of
    bounded support is no exponential: its columns within reach are summed relative to the largest of their weights.
    """
    top = absent
    if code == 0:
        for j in range(s.shape[1]):
            exponent = log_weights[tile, j] - 1.4426950408889634 * math.sqrt(s[r, j])
            out[r, j] = exponent
            top = larger(top, exponent)
    else:
        for j in range(s.shape[1]):
            exponent = log_weights[tile, j] if s[r, j] < 1.0 else absent
            out[r, j] = exponent
            top = larger(top, exponent)
    return top


@njit(inline="always")
def _kernel_sum(s, phi, r, code, total):
    """Σ_j phi[r, j] K(√s), of a kernel of bounded support; phi is 0 beyond it. For tophat, K = 1, it is ``total``."""
    if code >= 2:
        total = 0.0
    if code == 2:
        for j in range(s.shape[1]):
            total += phi[r, j] * larger(1.0 - s[r, j], 0.0)
    elif code == 3:
        for j in range(s.shape[1]):
            total += phi[r, j] * larger(1.0 - math.sqrt(s[r, j]), 0.0)
    elif code == 4:
        for j in range(s.shape[1]):
            x = s[r, j]
            total += phi[r, j] * larger(_cosine(x if x < 1.0 else 1.0), 0.0)
    return total


@loop
def reduce_tiles(
    columns, log_weights, tiles, rows, direct, laplace, code, cuts, tops, sums, moments, s, exponents, phi, peaks,
):  # fmt: skip
    """Add the columns of some tiles to the sums of some rows, each row relative to its running maximum.

    Exponents, in log2 units, are e_ij = s_ij · factor + log_weights[j], with factor = −½ log2(e) for the squares of
    differences (``direct``) and log2(e) for products. ``columns`` (tiles, c, width) are coordinates, and for products
    −½‖u_j‖² after them, as 1 in ``rows`` (b, c); b is a multiple of :data:`ROWS`. ``log_weights`` (tiles, width) are
    log2, :data:`ABSENT` where there is no column. With a ``code``, as :func:`_kernel_exponents` has it, Σ φ alone is
    summed, of squares in float64.

    Four rows leave out a tile where no exponent is above their ``cuts`` (b,). Outputs, in float64: the running maxima
    ``tops`` (b,); ``sums`` (b, d), Σ φ (columns − rows), (b, 0) or None where that is not wanted; ``moments`` (2, b),
    Σ φ and for ``laplace`` Σ φ s. The last four are buffers for a tile, (ROWS, width) and (ROWS,), as allocation is
    slow to compile.
    """
    width, real = columns.shape[2], columns.dtype.type
    single = columns.itemsize == 4
    factor, zero = real(-0.7213475204444817 if direct else 1.4426950408889634), real(0.0)
    least = real(-126.0) if single else real(-1022.0)  # log2 of the least normal number
    absent = real(ABSENT[0]) if single else real(ABSENT[1])
    for tile in tiles:
        for i in range(0, rows.shape[0], ROWS):
            if direct:
                _squares(rows, i, columns, tile, s)
            else:
                _products(rows, i, columns, tile, s)
            seen = False
            for r in range(ROWS):
                if code is None:
                    peaks[r] = _exponents(s, r, log_weights, tile, factor, absent, exponents)
                else:
                    peaks[r] = _kernel_exponents(s, r, log_weights, tile, code, absent, exponents)
                seen |= peaks[r] > max(cuts[i + r], tops[i + r] + least)
            if not seen:
                continue
            for r in range(ROWS):
                top = max(tops[i + r], peaks[r])
                if top > tops[i + r]:
                    shrink = 2.0 ** (tops[i + r] - top)
                    moments[0, i + r] *= shrink
                    moments[1, i + r] *= shrink
                    if sums is not None:
                        for c in range(sums.shape[1]):
                            sums[i + r, c] *= shrink
                    tops[i + r] = top
                total = _exponentials(exponents, r, real(top), least, phi)
                if code is not None:
                    total = _kernel_sum(s, phi, r, code, total)
                moments[0, i + r] += total
                if laplace:
                    moment = zero
                    for j in range(width):
                        moment += s[r, j] * phi[r, j]
                    moments[1, i + r] += moment
            if sums is not None:
                _add_means(phi, rows, i, columns, tile, sums)


@loop
def reduce_groups(
    columns, centres, radii, heavy, begins, raised, rows, cut, tops, peaks, sums, s, needed, places, counts, exponents,
):  # fmt: skip
    """Sum groups of columns, each over rows of its own (k, b + 1, d + 2), the last to spare, by the leaves that matter.

    A row's product with one of the ``columns`` (leaves, d + 2, LEAF) is log2 of its term. LEAF leaves are a tile, with
    whose ``centres`` (tiles, d + 2, LEAF) the product is −r²; columns are within ``radii`` (tiles, LEAF) of these, and
    ``heavy`` is log2 of their weights. Group g begins with the tile ``begins[g]``. A leaf is left out that adds less
    than 2^``cut`` to 2^``tops`` (b,), which grow by what groups add, their terms times 2^``raised`` (k, b).

    Written are ``tops``, running maxima ``peaks`` (k, b), and ``sums`` (k, b) relative to these. The last are room: for
    numbers of a tile and ROWS rows; how many rows need a leaf (LEAF,), and where their exponents go (LEAF, b + ROWS);
    how many exponents rows have (b,), and these (b + 1, LEAF²).
    """
    b = peaks.shape[1]
    for g in range(rows.shape[0]):
        own = rows[g]
        for t in range(begins[g], begins[g + 1]):  # which stay in cache for all rows
            needed[:] = 0
            for first in range(0, b, ROWS):
                _leaf_products(own, first, centres, t, s)
                for r in range(ROWS):
                    i = first + r
                    for j in range(LEAF):
                        gap = larger(math.sqrt(larger(-s[r, j], 0.0)) - radii[t, j], 0.0)
                        s[r, j] = heavy[t, j] - gap * gap
                    least, place = tops[i] - raised[g, i] + cut, i * LEAF**2
                    for j in range(LEAF):  # without a branch, which could not be foreseen
                        needs = s[r, j] >= least
                        places[j, needed[j]] = place
                        needed[j] += needs
                        place += needs * LEAF
                    counts[i] = place - i * LEAF**2
            for j in range(LEAF):
                for n in range(needed[j], needed[j] + ROWS):
                    places[j, n] = b * LEAF**2
                for n in range(0, needed[j], ROWS):
                    _leaf_products(own, places[j, n:], columns, t * LEAF + j, exponents)
            for i in range(b):
                count, e, top, total = counts[i], exponents[i], peaks[g, i], 0.0
                for j in range(count):
                    top = larger(top, e[j])
                for j in range(count):  # a loop of its own, or LLVM does not make vectors of it
                    e[j] = larger(e[j] - top, -1022.0)
                for j in range(count):
                    total += exp2(e[j])
                sums[g, i] = sums[g, i] * exp2(larger(peaks[g, i] - top, -1022.0)) + total
                peaks[g, i], tops[i] = top, larger(tops[i], top + raised[g, i])
