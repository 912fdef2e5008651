"""Device code and its launches: the order of points that :func:`sdkde_core.nearby.order` has.

Array code launches some 45 kernels for every sort, which takes the host longer than the card.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl

from sdkde_core import nearby

from .compiled import copy
from .kernels import sized, wide

__all__ = ["order", "ordered"]

#: Levels of the tree that are split at once, and leaves of a part, as the core has them.
AT_ONCE, PART = 2, 128

#: Points of a program.
BLOCK = 1024


@sized
def boxes_kernel(points, low, high, n, length, D: tl.constexpr, BLOCK: tl.constexpr):
    """Ends of the points of every ``length``, (D, pieces), of points (D, n)."""
    piece, pieces = tl.program_id(0), tl.num_programs(0)
    first = piece * length
    for a in tl.static_range(D):
        least = tl.full((BLOCK,), float("inf"), tl.float64)
        most = tl.full((BLOCK,), float("-inf"), tl.float64)
        for start in range(first, tl.minimum(first + length, n), BLOCK):
            i = start + tl.arange(0, BLOCK)
            there = (i < n) & (i < first + length)
            x = points + wide(n) * a + i
            least = tl.minimum(least, tl.load(x, mask=there, other=float("inf")))
            most = tl.maximum(most, tl.load(x, mask=there, other=float("-inf")))
        tl.store(low + a * pieces + piece, tl.min(least, 0))
        tl.store(high + a * pieces + piece, tl.max(most, 0))


@sized
def widest_kernel(low, high, axis, lows, scales, pieces, parts, level, steps, D: tl.constexpr, BLOCK: tl.constexpr):
    """The widest dimension of every node, where it begins there, and by what to multiply to come to ``steps``.

    Node k of 2^level has the pieces from ⌈k · parts / 2^level⌉ on.
    """
    node = tl.program_id(0)
    k = wide(node)
    first = ((k * parts + (wide(1) << level) - 1) >> level).to(tl.int32)
    end = tl.minimum((((k + 1) * parts + (wide(1) << level) - 1) >> level).to(tl.int32), pieces)
    widest = tl.zeros((), tl.int32)
    largest = tl.full((), -1.0, tl.float64)
    begin = tl.zeros((), tl.float64)
    for a in tl.static_range(D):
        least = tl.full((BLOCK,), float("inf"), tl.float64)
        most = tl.full((BLOCK,), float("-inf"), tl.float64)
        for start in range(first, end, BLOCK):
            i = start + tl.arange(0, BLOCK)
            least = tl.minimum(least, tl.load(low + a * pieces + i, mask=i < end, other=float("inf")))
            most = tl.maximum(most, tl.load(high + a * pieces + i, mask=i < end, other=float("-inf")))
        ends = tl.min(least, 0)
        width = tl.max(most, 0) - ends
        wider = width > largest
        widest = tl.where(wider, a, widest)
        begin = tl.where(wider, ends, begin)
        largest = tl.where(wider, width, largest)
    tl.store(axis + node, widest)
    tl.store(lows + node, begin)
    tl.store(scales + node, steps.to(tl.float64) / tl.where(largest > 0.0, largest, 1.0))


@sized
def keys_kernel(points, axis, lows, scales, keys, n, length, parts, level, steps, BLOCK: tl.constexpr):
    """Numbers by which points are sorted within their nodes."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = i < n
    node = (((i // length).to(tl.int64) << level) // parts).to(tl.int32)
    x = tl.load(points + wide(n) * tl.load(axis + node, mask=there, other=0) + i, mask=there, other=0.0)
    low = tl.load(lows + node, mask=there, other=0.0)
    place = ((x - low) * tl.load(scales + node, mask=there, other=0.0)).to(tl.int32)
    tl.store(keys + i, node * steps + tl.minimum(place, steps - 1), mask=there)


@sized
def move_kernel(points, where, places, moved, there, n, D: tl.constexpr, BLOCK: tl.constexpr):
    """Points, and where they came from, at other places."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    place = tl.load(places + i, mask=inside, other=0)
    tl.store(there + i, tl.load(where + place, mask=inside, other=0), mask=inside)
    for a in tl.static_range(D):
        tl.store(moved + wide(n) * a + i, tl.load(points + wide(n) * a + place, mask=inside, other=0.0), mask=inside)


def order(points: torch.Tensor, size: int) -> torch.Tensor:
    """Return the indices of finite points (n, d) in the order of a k-d tree's leaves of ``size`` points, (n,)."""
    return ordered(points, size) if points.is_cuda else nearby.order(points, size)  # the interpreter is slow


def ordered(points: torch.Tensor, size: int) -> torch.Tensor:
    """Return what :func:`order` does, by kernels."""
    n = points.shape[0]
    found = _Found(points.T.clone(memory_format=torch.contiguous_format), torch.arange(n, device=points.device))
    leaves, part = -(-n // size), size * PART
    parts = -(-n // part)
    depth, level = (parts - 1).bit_length(), 0
    while level < depth:  # nodes are stretches of parts
        found = _sorted(found, part, 1 << level, parts, level, n // size)
        level += min(AT_ONCE, depth - level)
    width = PART
    while width > 1:  # and then halves of halves of parts
        if width < 2 * leaves:
            found = _sorted(found, width * size, -(-leaves // width), 1, 0, n // size)
        width //= 2
    return found.where


class _Found(NamedTuple):
    """Points (d, n) in the order so far, and which these are."""

    points: torch.Tensor
    where: torch.Tensor


def _sorted(found: _Found, length: int, nodes: int, parts: int, level: int, leaves: int) -> _Found:
    """Sort points within nodes; piece p, of ``length`` points, is in node ⌊2^level p / parts⌋."""
    (d, n), device = found.points.shape, found.points.device
    pieces = -(-n // length)
    steps = min((1 << 31) - 1, max((1 << 31) // max(nodes, leaves), 1 << 8))
    low, high = (torch.empty(d * pieces, dtype=torch.float64, device=device) for _ in range(2))
    copy(boxes_kernel, pieces, (found.points, low, high, n, length), (d, min(BLOCK, _power_of_two(length))))
    lows, scales = (torch.empty(nodes, dtype=torch.float64, device=device) for _ in range(2))
    axis = torch.empty(nodes, dtype=torch.int32, device=device)
    copy(widest_kernel, nodes, (low, high, axis, lows, scales, pieces, parts, level, steps), (d, 128))
    keys = torch.empty(n, dtype=torch.int32, device=device)
    programs = -(-n // BLOCK)
    copy(keys_kernel, programs, (found.points, axis, lows, scales, keys, n, length, parts, level, steps), (BLOCK,))
    places = keys.argsort(stable=True)
    moved = _Found(torch.empty_like(found.points), torch.empty_like(found.where))
    copy(move_kernel, programs, (found.points, found.where, places, moved.points, moved.where, n), (d, BLOCK))
    return moved


def _power_of_two(x: int) -> int:
    return 1 << (x - 1).bit_length()
