"""The compiled loops over the leaves of points in order: over those that matter to a few rows.

Where rows and columns stand together, differences from the middle of a tile of rows are small. So float32 does for
them, whatever the extent; and as no exponent is above 0, no maxima run. What float32 cannot keep is seen afterwards,
from the sums: :func:`sdkde_numba.bounds.leaf_errors`.

For :data:`GROUP` rows at a time the leaves of :data:`LEAF` columns are chosen in two steps. First those are summed that
may add most: what the rows then have is a bound from below on their whole sums. By that bound, and the least distances
of boxes, :func:`choose_leaves` leaves out others as long as they come to no more than the allowed share
(:mod:`sdkde_core.nearby` derives what they add to a result at most).

Only :func:`add_leaves` is compiled for each number of dimensions, so that the sums of all coordinates stay in
registers. As in ``cpu_kernels``, everything that is called is in this file, but for ``instructions``.
"""

import functools
import math

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from . import instructions as llvm
from .bounds import BLOCK, LEAF, LN2
from .instructions import exp2, larger, loop

#: Rows for which leaves are chosen together.
GROUP = 8

#: Coordinates times this have squares of distances that are −log2 φ.
UNIT = math.sqrt(0.5 / LN2)


@intrinsic
def _add_block(typing_context, x, log_weights, which, first, last, rows, i, centre, totals, moments, shifts):
    """Add the leaves ``which[first:last]`` to the sums of row i, in registers; other arguments as in add_leaves."""
    d, wanted = len(centre), [isinstance(kind, types.Array) for kind in (totals, moments, shifts)]

    def generate(context, builder, signature, arguments):
        lanes = llvm.register_bytes(context) // 4
        vector, index = ir.VectorType(ir.FloatType(), lanes), ir.IntType(32)
        columns, weights, leaves, u = (llvm.array(context, builder, signature, arguments, k).data for k in (0, 1, 2, 5))
        first, last, i = arguments[3], arguments[4], arguments[6]
        constant = functools.partial(ir.Constant, first.type)
        splat = lambda value: ir.Constant(vector, [value] * lanes)  # noqa: E731

        def place(a, factor, offset):
            return llvm.at(builder, a, constant(factor), constant(offset))

        own = [llvm.load(builder, u, place(i, d, c), vector.element) for c in range(d)]
        own = [llvm.everywhere(builder, x, vector) for x in own]
        total, moment, shift = (llvm.zeros(builder, vector, many * wish) for many, wish in zip((1, 2, d), wanted))
        with cgutils.for_range_slice(builder, first, last, constant(1)) as (j, _):
            leaf = builder.load(builder.gep(leaves, [j]))
            for v in range(0, LEAF, lanes):
                x = [llvm.load(builder, columns, place(leaf, d * LEAF, c * LEAF + v), vector) for c in range(d)]
                apart = [builder.fsub(a, b) for a, b in zip(x, own)]
                s = builder.fmul(apart[0], apart[0])
                for a in apart[1:]:
                    s = llvm.times_plus(builder, a, a, s)
                exponent = builder.fsub(llvm.load(builder, weights, place(leaf, LEAF, v), vector), s)
                exponent = llvm.call(builder, "llvm.maxnum", [exponent, splat(-126.0)], ("nnan", "nsz"))
                phi = llvm.exp2_of(builder, exponent)
                llvm.add(builder, total[0], phi)
                if moment:
                    product = builder.fmul(phi, s)
                    llvm.add(builder, moment[0], product)
                    llvm.add(builder, moment[1], product, s)
                for slot, a in zip(shift, apart):
                    llvm.add(builder, slot, phi, a)

        half = lanes // 2
        wide = ir.VectorType(ir.DoubleType(), half)
        for k, slots in zip((8, 9, 10), (total, moment, shift)):
            for n, slot in enumerate(slots):
                data = llvm.array(context, builder, signature, arguments, k).data
                for part in range(2):
                    mask = ir.Constant(ir.VectorType(index, half), [part * half + lane for lane in range(half)])
                    value = builder.fpext(builder.shuffle_vector(builder.load(slot), splat(0.0), mask), wide)
                    there = place(i, len(slots) * LEAF, n * LEAF + part * half)
                    llvm.store(builder, builder.fadd(llvm.load(builder, data, there, wide), value), data, there)
        return context.get_dummy_value()

    kinds = x, log_weights, which, first, last, rows, i, centre, totals, moments, shifts
    return types.void(*kinds), generate


@intrinsic
def _block(typing_context):
    """Leaves after which each lane has added :data:`BLOCK` terms: narrower registers take a leaf in parts."""

    def generate(context, builder, signature, arguments):
        return context.get_constant(types.intp, BLOCK * llvm.register_bytes(context) // (4 * LEAF))

    return types.intp(), generate


@intrinsic
def _move(typing_context, columns, tile, c, start, middle, x, k):
    """x[k, c] = (columns[tile, c, start : start + LEAF] − middle) · UNIT, from float64 to float32."""

    def generate(context, builder, signature, arguments):
        columns, x = (llvm.array(context, builder, signature, arguments, i) for i in (0, 5))
        tile, c, start, middle, k = (arguments[i] for i in (1, 2, 3, 4, 6))
        (many, width), d = (builder.extract_value(columns.shape, i) for i in (1, 2)), builder.extract_value(x.shape, 1)
        wide, narrow = (ir.VectorType(kind, LEAF) for kind in (ir.DoubleType(), ir.FloatType()))
        source = llvm.at(builder, llvm.at(builder, tile, many, c), width, start)
        moved = builder.fsub(llvm.load(builder, columns.data, source, wide), llvm.everywhere(builder, middle, wide))
        moved = builder.fptrunc(builder.fmul(moved, ir.Constant(wide, [UNIT] * LEAF)), narrow)
        target = builder.mul(llvm.at(builder, k, d, c), ir.Constant(k.type, LEAF))
        llvm.store(builder, moved, x.data, target)
        return context.get_dummy_value()

    return types.void(columns, tile, c, start, middle, x, k), generate


@loop
def add_leaves(x, log_weights, chosen, ends, u, centre, totals, moments, shifts):
    """Add leaves to the sums of rows, group by group. Compiled for every d, which is the length of ``centre``.

    ``x`` (k, d, LEAF) and ``log_weights`` (k, LEAF), log2, none above 0, are float32. Group g has the leaves
    ``chosen[g, :ends[g]]``, ascending, and the rows ``u[g · GROUP : (g + 1) · GROUP]``, float32. Lane by lane, in
    float64, ``totals`` (rows, 1, LEAF) gets Σ φ, ``moments`` (rows, 2, LEAF) Σ φ s and Σ φ s², with s = −log2 φ before
    weights, ``shifts`` (rows, d, LEAF) Σ φ (x − u); the last two are None where they are not wanted.
    """
    stretch = 2048  # leaves that stay in the second cache while one group of rows after the other goes through them
    done = np.zeros_like(ends)
    for stop in range(stretch, x.shape[0] + stretch, stretch):
        for g in range(ends.shape[0]):
            first = done[g]
            while done[g] < ends[g] and chosen[g, done[g]] < stop:
                done[g] += 1
            for start in range(first, done[g], _block()):
                last = min(start + _block(), done[g])
                for r in range(g * GROUP, (g + 1) * GROUP):
                    _add_block(x, log_weights, chosen[g], start, last, u, r, centre, totals, moments, shifts)


@njit(inline="always")
def _halves(boxes, rows, first, last, count, out, g):
    """out[g, k] is what −log2 φ is at least, of the rows from ``first`` to ``last`` and leaf k, from their boxes."""
    zero = np.float32(0.0)
    for k in range(count):
        out[g, k] = zero
    for c in range(rows.shape[1]):
        least, most = -rows[first, c], rows[first, c]
        for r in range(first + 1, last):
            least, most = larger(least, -rows[r, c]), larger(most, rows[r, c])
        least, most = _below(-least), -_below(-most)
        for k in range(count):
            gap = larger(larger(boxes[0, c, k] - most, least - boxes[1, c, k]), zero)
            out[g, k] += gap * gap
    for k in range(count):
        out[g, k] *= np.float32(1.0 - 1e-6)  # room for rounding, as in _below


@njit(inline="always")
def _below(x):
    """A float32 lower bound on x before it was rounded, within ±1e15: its square is finite."""
    return np.float32(-larger(-larger(x - 1e-6 * abs(x), -1e15), -1e15))


@njit(inline="always")
def _masses(halves, g, heavy, count, floor, whole, factor, d, out):
    """Upper bounds on what leaves add to a result, relative to sums of 2^floor or more; right below 1."""
    real = np.float32
    reach, base = real(math.sqrt(2.0 * LN2 * max(whole - floor, 0.0))), real(max(floor, -1e15))
    for k in range(count):
        exponent = -larger(-larger(heavy[k] - halves[g, k] - base, real(-126.0)), real(0.0))
        out[k] = exp2(exponent) * real(1.001)  # room for its rounding
    if factor == 1:
        for k in range(count):
            out[k] *= larger(np.sqrt(real(2.0 * LN2) * larger(halves[g, k], real(0.0))), real(1.0)) + reach
    if factor == 2:
        for k in range(count):
            out[k] *= real(1.0) + halves[g, k] * real(LN2 / (1.0 + 0.5 * d))


@njit(inline="always")
def _threshold(masses, count, allowed):
    """A number such that all smaller masses come to no more than ``allowed``."""
    good, factor = np.float32(allowed / count), np.float32(math.sqrt(count))
    for _ in range(6):  # halvings of the factor by which it may be too small
        tried, total = good * factor, np.float32(0.0)
        for k in range(count):
            total += masses[k] if masses[k] < tried else np.float32(0.0)
        if total * np.float32(1.001) <= allowed:
            good = tried
        factor = np.float32(math.sqrt(factor))
    return good


@njit(inline="always")
def _early(heavy, halves, g, count, which):
    """List in which[g] the leaves that may add most, to six bits; return how many. Their exponents become −1."""
    nearest, number = np.float32(-2e30), 0
    for k in range(count):
        nearest = larger(nearest, heavy[k] - halves[g, k])
    for k in range(count):  # without a branch, which could not be foreseen
        which[g, number] = k
        number += heavy[k] - halves[g, k] >= nearest - np.float32(6.0)
    for k in range(number):
        halves[g, which[g, k]] = np.float32(-1.0)
    return number


@loop
def list_leaves(
    columns, log_weights, low, high, heavy, tiles, rows, floor, whole, factor, allowed,
    x, weights, boxes, heavies, halves, masses, leaves, u, chosen, ends, middle,
):  # fmt: skip
    """List the leaves that can matter to a tile of rows, move them to its middle, and choose those to be summed first.

    ``columns`` (tiles, c, width) and ``log_weights`` (tiles, width) are as packed, in float64; ``low``, ``high``
    (d, leaves) are the leaves' boxes, ``heavy`` (leaves,) log2 of their weights. The ``rows`` (b, d) need the tiles
    ``tiles``, ascending. ``floor`` and ``whole`` are log2 of a lower bound on the rows' sums, and of all weights
    together. ``factor`` says for which result (0 LOG_SUM, 1 MEAN, 2 LAPLACE) ``allowed`` may be left out.

    The arguments from ``x`` on are written, with room for k leaves: ``x``, ``weights``, ``u``, ``chosen`` and ``ends``
    as :func:`add_leaves` takes them, times :data:`UNIT` from the rows' ``middle`` (d,), with the leaves to be summed
    first, and missing rows as the last; ``boxes`` (2, d, k) and ``heavies`` (k,); ``halves`` (groups, k), a lower bound
    on −log2 φ, −1 for leaves to be summed first; ``masses`` and ``leaves`` (k,). Returns how many leaves can matter.
    """
    (b, d), per, count = rows.shape, columns.shape[2] // LEAF, 0
    for c in range(d):
        least, most = -rows[0, c], rows[0, c]
        for r in range(1, b):
            least, most = larger(least, -rows[r, c]), larger(most, rows[r, c])
        middle[c] = 0.5 * (most - least)
        for r in range(u.shape[0]):
            u[r, c] = (rows[min(r, b - 1), c] - middle[c]) * UNIT
    for tile in tiles:
        for leaf in range(tile * per, min(tile * per + per, heavy.shape[0])):
            leaves[count], heavies[count] = leaf, heavy[leaf]
            for c in range(d):
                boxes[0, c, count] = _below((low[c, leaf] - middle[c]) * UNIT)
                boxes[1, c, count] = -_below((middle[c] - high[c, leaf]) * UNIT)
            count += 1
    for g in range(ends.shape[0]):
        ends[g] = 0
    if count == 0:
        return 0
    _halves(boxes, u, 0, b, count, halves, 0)
    _masses(halves, 0, heavies, count, floor, whole, factor, d, masses)
    bound, listed, count = _threshold(masses, count, allowed), count, 0
    for k in range(listed):
        if masses[k] >= bound:
            leaves[count], heavies[count] = leaves[k], heavies[k]
            for c in range(d):
                boxes[0, c, count], boxes[1, c, count] = boxes[0, c, k], boxes[1, c, k]
            count += 1
    for k in range(count):
        tile, start = leaves[k] // per, (leaves[k] % per) * LEAF
        for j in range(LEAF):
            weights[k, j] = log_weights[tile, start + j]
        for c in range(d):
            _move(columns, tile, c, start, middle[c], x, k)
    for g in range(-(-b // GROUP)):
        _halves(boxes, u, g * GROUP, (g + 1) * GROUP, count, halves, g)
        ends[g] = _early(heavies, halves, g, count, chosen)
    return count


@loop
def choose_leaves(totals, heavies, halves, masses, count, d, whole, factor, allowed, chosen, ends):
    """Write the leaves to be summed next, by the rows' sums over the first ones; arguments as in list_leaves."""
    for g in range(ends.shape[0]):
        first, ends[g], floor = ends[g], 0, 1e300
        for r in range(g * GROUP, (g + 1) * GROUP):
            total = 0.0
            for j in range(LEAF):
                total += totals[r, 0, j]
            floor = min(floor, total)
        if first == 0 or not floor > 0.0:
            continue
        _masses(halves, g, heavies, count, math.log2(floor), whole, factor, d, masses)
        for k in range(first):
            masses[chosen[g, k]] = np.float32(0.0)
        least, number = _threshold(masses, count, allowed), 0
        for k in range(count):
            chosen[g, number] = k
            number += masses[k] >= least
        ends[g] = number
