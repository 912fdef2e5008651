"""Points in bandwidths, and their extent: what comes before packing."""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton.language as tl

from sdkde_core.plugin import Slots
from sdkde_core.protocol import Whitened

from .compiled import INTERPRETED, Launch, bits, rehearse
from .kernels import number, sized
from .space import Config

_slots = Slots()


@sized
def centre_kernel(x, out, n, d, first, SOME: tl.constexpr, BLOCK: tl.constexpr):
    """Per column, a program each, the lower median of n rows, which are ``first`` rows apart; NaN is left out."""
    k = tl.program_id(0)
    i = tl.arange(0, SOME)
    values = tl.load(x + i.to(tl.int64) * first * d + k, mask=i < n, other=float("nan"))
    valid = values == values
    rank = tl.zeros((SOME,), tl.int32)
    for start in range(0, n, BLOCK):
        j = start + tl.arange(0, BLOCK)
        others = tl.load(x + j.to(tl.int64) * first * d + k, mask=j < n, other=float("nan"))[None, :]
        less = (others < values[:, None]) | ((others == values[:, None]) & (j[None, :] < i[:, None]))
        rank += tl.sum(less.to(tl.int32), 1)
    known = tl.sum(valid.to(tl.int32), 0)
    chosen = valid & (rank == (known - 1) // 2)
    found = tl.sum(tl.where(chosen, values, 0.0).to(tl.float64), 0)
    tl.store(out + k, tl.where(known > 0, found, float("nan")))


@sized
def whiten_kernel(
    first_points, second_points, scale, centre, out, second_out, slots,
    n, m, d, factor,
    KIND: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """u = L⁻¹(x − centre) for the rows of two arrays, and the largest distance of a program's rows to its slot.

    KIND 0: L⁻¹ is 1/h in every column, and ``factor`` the bits of that, as Triton passes numbers in 32; 1: ``scale`` is
    L's diagonal; 2: it is L⁻¹. WIDTH is a power of two ≥ d. The distance is infinite where a coordinate is NaN.
    """
    blocks = (n + BLOCK - 1) // BLOCK
    program = tl.program_id(0) + tl.zeros((BLOCK,), tl.int32)
    own = program < blocks
    row = tl.where(own, program, program - blocks) * BLOCK + tl.arange(0, BLOCK)
    of_first, of_second = own & (row < n), (program >= blocks) & (row < m)
    k = tl.arange(0, WIDTH)
    at = row[:, None].to(tl.int64) * d + k[None, :]
    column = k[None, :] < d
    if KIND < 2:
        x = tl.load(first_points + at, mask=of_first[:, None] & column, other=0.0)
        x += tl.load(second_points + at, mask=of_second[:, None] & column, other=0.0)
        u = x.to(tl.float64) - tl.load(centre + k, mask=k < d, other=0.0)[None, :]
        if KIND == 0:
            u *= number(factor)
        else:
            u /= tl.load(scale + k, mask=k < d, other=1.0)[None, :]
    else:
        u = tl.zeros((BLOCK, WIDTH), tl.float64)
        for j in range(d):
            of = row.to(tl.int64) * d + j
            x = tl.load(first_points + of, mask=of_first, other=0.0)
            x += tl.load(second_points + of, mask=of_second, other=0.0)
            away = x.to(tl.float64) - tl.load(centre + j)
            u += away[:, None] * tl.load(scale + k * d + j, mask=k < d, other=0.0)[None, :]
    u = tl.where((of_first | of_second)[:, None] & column, u, 0.0)
    tl.store(out + at, u, mask=of_first[:, None] & column)
    tl.store(second_out + at, u, mask=of_second[:, None] & column)
    distances = tl.sqrt(tl.sum(u * u, 1))
    distances = tl.where(distances <= 1.0e300, distances, float("inf"))
    tl.store(slots + tl.program_id(0), tl.max(distances, 0))


@sized
def weigh_kernel(given, logs, slots, n, first, BLOCK: tl.constexpr):
    """log w − log Σw of weights w (n,), by one program; to a slot log max w − log min w, ∞ where it is none."""
    i = tl.arange(0, BLOCK)
    least, most = tl.full((BLOCK,), float("inf"), tl.float64), tl.zeros((BLOCK,), tl.float64)
    total = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, n, BLOCK):
        w = tl.load(given + start + i, mask=start + i < n, other=0.0).to(tl.float64)
        least = tl.minimum(least, tl.where(start + i < n, tl.where((w > 0) & (w < float("inf")), w, 0.0), float("inf")))
        most = tl.maximum(most, w)
        total += w
    whole, low = tl.sum(total, 0), tl.min(least, 0)
    good = (low > 0) & (whole < float("inf"))
    span = tl.maximum(tl.log(tl.max(most, 0)) - tl.log(tl.where(good, low, 1.0)), 0.0)
    tl.store(slots + first, tl.where(good, span, float("inf")))
    for start in range(0, n, BLOCK):
        w = tl.load(given + start + i, mask=start + i < n, other=1.0).to(tl.float64)
        tl.store(logs + start + i, tl.log(w) - tl.log(whole), mask=start + i < n)


def whiten(given: tuple[torch.Tensor, ...], scale: Any, centre: Any = None, weights: Any = None) -> Whitened | None:
    """See :class:`sdkde_core.protocol.LineBackend`; None for so many numbers that two launches matter little."""
    first, second = given[0], given[-1]
    many = weights is not None and first.shape[0] > 1 << 20  # one program reads all weights
    if many or first.shape[1] > 128 or sum(x.numel() for x in given) > 1 << 23:
        return None
    (n, d), m, device = first.shape, second.shape[0] if len(given) > 1 else 0, first.device
    to_centre, to_weigh, to_whiten, programs = _launches(n, m, d, 0 if isinstance(scale, float) else scale.ndim)
    points = [torch.empty(x.shape, dtype=torch.float64, device=device) for x in given]
    slots, time = _slots.ready(programs, first, int(weights is not None))
    log_weights = None if weights is None else torch.empty(n, dtype=torch.float64, device=device)
    at = torch.empty(d, dtype=torch.float64, device=device) if centre is None else centre
    by, last = (at, (bits(scale),)) if isinstance(scale, float) else (scale, (bits(1.0),))
    if centre is None:
        if not (INTERPRETED or to_whiten.kept):  # all compile at the same time
            rehearse(to_whiten, first, second, by, at, points[0], points[-1], slots, last=last)
            if weights is not None:
                rehearse(to_weigh, weights, log_weights, slots)
        to_centre(first, at)
    if weights is not None:
        to_weigh(weights, log_weights, slots)
    to_whiten(first, second, by, at, points[0], points[-1], slots, last=last)
    read = functools.partial(_slots.largest, programs, device, time, int(weights is not None))
    return Whitened(tuple(points), read, log_weights)


@functools.lru_cache(maxsize=1024)
def _launches(n: int, m: int, d: int, kind: int) -> tuple[Launch, Launch, Launch, int]:
    apart, width = max(1, n // 256), max(2, 1 << (d - 1).bit_length())
    block = min(128, max(2, 2048 // width))
    programs = -(-n // block) - (-m // block)
    to_centre = Launch(centre_kernel, (d, 1), (-(-n // apart), d, apart), (512, 32), Config(1, 1, 16, 1))
    to_weigh = Launch(weigh_kernel, (1, 1), (n, programs), (2048,), Config(1, 1, 8, 1))
    return to_centre, to_weigh, Launch(whiten_kernel, (programs, 1), (n, m, d), (kind, width, block)), programs
