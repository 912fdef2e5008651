"""Device code: which leaves of columns can matter to which tiles of rows.

Columns stand in the order of a k-d tree, in leaves, and nodes of :data:`WIDE` leaves; rows likewise, in tiles. A
program looks at one tile of rows: at the boxes of all nodes, and of the leaves of those that are near enough. The
bounds are those of :mod:`sdkde_core.nearby`: the **score** of a leaf is −log of what its columns add to a row's sum at
most, −log W_J + ½ m² − log f(m), with their weight W_J, the distance m of both boxes and the reduction's factor f. That
of a node is at most that of its leaves.

Boxes are (2 d + 1, count) in fp32, lower and upper ends and log weights, those of rows (tiles, 2 d), rounded outwards.
A score is off by 1e-7 of what it is made of, which 1e-5 exceeds.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .kernels import sized

#: Leaves of a node.
WIDE = tl.constexpr(128)

#: Thresholds of which the least that will do is taken.
THRESHOLDS = tl.constexpr(16)


@triton.jit
def _scores(rows, tile, boxes, at, count, reach, kind, D: tl.constexpr):
    """Scores of the boxes ``at``, of ``count``, beside a tile of rows: a number or a block; ∞ beyond the last."""
    there = at < count
    rows += tile * (2 * D)
    total = tl.zeros_like(at).to(tl.float32)
    for a in tl.range(0, D, loop_unroll_factor=min(D, 4)):  # all sixteen of them compile for 3 s
        below = tl.load(boxes + a * count + at, mask=there, other=0.0) - tl.load(rows + D + a)
        above = tl.load(rows + a) - tl.load(boxes + (D + a) * count + at, mask=there, other=0.0)
        gap = tl.maximum(tl.maximum(below, above), 0.0)
        total += gap * gap
    half = total * (0.5 * (1.0 - 1e-6))  # lowered by its rounding, with room
    score = half - tl.load(boxes + 2 * D * count + at, mask=there, other=0.0)
    if kind == 1:  # MEAN
        score -= tl.log(tl.maximum(tl.sqrt(2.0 * half), 1.0) + reach)
    if kind == 2:  # LAPLACE
        score -= tl.log(1.0 + half / (1.0 + 0.5 * D))
    return tl.where(there, score, float("inf"))


@triton.jit
def _leaves(node):
    return node * WIDE + tl.arange(0, WIDE)


@triton.jit
def _add(out, at, keep, offset, room):
    """Write the leaves of a node that are kept after ``offset`` others; how many there are then."""
    kept = keep.to(tl.int32)
    place = offset + tl.cumsum(kept, 0) - kept
    tl.store(out + place, at, mask=keep & (place < room))
    return offset + tl.sum(kept, 0)


@triton.jit
def _visit(rows, tile, nodes, count, limit, least, reach, out, kind, D: tl.constexpr):
    """Write the nodes whose scores are not above ``limit``; return how many, and Σ exp(least − score) of the others."""
    number = tl.zeros((), tl.int32)
    far = tl.zeros((WIDE,), tl.float32)
    for start in range(0, count, WIDE):
        at = start + tl.arange(0, WIDE)
        s = _scores(rows, tile, nodes, at, count, reach, kind, D)
        far += tl.where(s > limit, tl.exp(tl.minimum(least - s, 0.0)), 0.0)
        number = _add(out, at, s <= limit, number, count)
    tl.debug_barrier()  # other threads read what these have written
    return number, tl.sum(far, 0)


@sized
def near_kernel(
    rows, leaves, nodes, visited, out, leaf_count, node_count, first, none, D: tl.constexpr, MOST: tl.constexpr
):
    """The nearest leaves of the tiles of rows from ``first`` on, (tiles, MOST), then ``none``.

    ``visited`` holds ``node_count`` numbers for each. Leaves are as near as the nearest of the nearest node, and
    somewhat farther while there is room.
    """
    tile = first + tl.program_id(0)
    visited += tl.program_id(0) * node_count
    best = tl.full((), float("inf"), tl.float32)
    nearest = tl.zeros((), tl.int32)
    for start in range(0, node_count, WIDE):
        s = _scores(rows, tile, nodes, start + tl.arange(0, WIDE), node_count, 0.0, 0, D)
        least = tl.min(s, 0)
        nearest = tl.where(least < best, start + tl.argmin(s, 0), nearest)
        best = tl.minimum(best, least)
    best = tl.min(_scores(rows, tile, leaves, _leaves(nearest), leaf_count, 0.0, 0, D), 0)
    limits = best + tl.arange(0, THRESHOLDS).to(tl.float32) * 0.25
    last = best + (THRESHOLDS - 1) * 0.25
    number, _ = _visit(rows, tile, nodes, node_count, last, last, 0.0, visited, 0, D)
    counts = tl.zeros((WIDE, THRESHOLDS), tl.int32)
    for i in range(number):
        s = _scores(rows, tile, leaves, _leaves(tl.load(visited + i)), leaf_count, 0.0, 0, D)
        counts += (s[:, None] <= limits[None, :]).to(tl.int32)
    few = tl.sum((tl.sum(counts, 0) <= MOST).to(tl.int32), 0)
    limit = best + tl.maximum(few - 1, 0).to(tl.float32) * 0.25
    out += tile * MOST
    offset = tl.zeros((), tl.int32)
    for i in range(number):
        at = _leaves(tl.load(visited + i))
        s = _scores(rows, tile, leaves, at, leaf_count, 0.0, 0, D)
        offset = _add(out, at, s <= limit, offset, MOST)
    k = tl.arange(0, MOST)
    tl.store(out + k, tl.zeros((MOST,), tl.int32) + none, mask=k >= offset)


@sized
def choose_kernel(
    rows, leaves, nodes, visited, lowest, reaches, limits, counts,
    leaf_count, node_count, first, step, kind,
    D: tl.constexpr,
):  # fmt: skip
    """The threshold above which scores are left out, of the tiles from ``first`` on, and how many are not above it.

    ``lowest``: −log of what may be left out. The thresholds tried are that and ``step`` more every time; the last
    exceeds it by log ``leaf_count``, so that it will do. Scores near a threshold count on both sides.
    """
    tile = first + tl.program_id(0)
    visited += tl.program_id(0) * node_count
    least, reach = tl.load(lowest + tile), tl.load(reaches + tile)
    tried = least + tl.arange(0, THRESHOLDS).to(tl.float32) * step
    last = least + (THRESHOLDS - 1) * step
    # What two computations of a score may differ by: its terms come to 64 beside a threshold, about.
    same = 1e-5 * (tl.abs(last) + 64.0)
    number, far = _visit(rows, tile, nodes, node_count, last + same, least, reach, visited, kind, D)
    found = tl.zeros((WIDE, THRESHOLDS), tl.int32)
    out = tl.zeros((WIDE, THRESHOLDS), tl.float32)
    for i in range(number):
        s = _scores(rows, tile, leaves, _leaves(tl.load(visited + i)), leaf_count, reach, kind, D)
        found += (s[:, None] <= tried[None, :] + same).to(tl.int32)
        mass = tl.exp(tl.minimum(least - s, 0.0))
        out += tl.where(s[:, None] > tried[None, :] - same, mass[:, None], 0.0)
    k = tl.arange(0, THRESHOLDS)
    enough = tl.min(tl.where(tl.sum(out, 0) + far <= 1.0, k, THRESHOLDS - 1), 0)
    tl.store(limits + tile, tl.sum(tl.where(k == enough, tried, 0.0), 0))
    tl.store(counts + tile, tl.sum(tl.where(k == enough, tl.sum(found, 0), 0), 0))


@sized
def list_kernel(
    rows, leaves, nodes, visited, limits, reaches, ends, out,
    leaf_count, node_count, first, none, top, kind,
    D: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """The leaves whose scores are not above the threshold, of the tiles of rows from ``first`` on.

    Those of tile top + i are out[TOGETHER · ends[i] : TOGETHER · ends[i + 1]], ``none`` where there are fewer.
    """
    tile = first + tl.program_id(0)
    visited += tl.program_id(0) * node_count
    limit, reach = tl.load(limits + tile), tl.load(reaches + tile)
    begin, end = tl.load(ends + tile - top), tl.load(ends + tile - top + 1)
    out += begin * TOGETHER
    room, offset = (end - begin) * TOGETHER, tl.zeros((), tl.int32)
    number, _ = _visit(rows, tile, nodes, node_count, limit, limit, reach, visited, kind, D)
    for i in range(number):
        at = _leaves(tl.load(visited + i))
        s = _scores(rows, tile, leaves, at, leaf_count, reach, kind, D)
        offset = _add(out, at, s <= limit, offset, room)
    for place in range(offset, room, WIDE):
        k = place + tl.arange(0, WIDE)
        tl.store(out + k, tl.zeros((WIDE,), tl.int32) + none, mask=k < room)
