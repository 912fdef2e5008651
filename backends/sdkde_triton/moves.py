"""The steps between the sums of an estimate: samples move, points are put in a group's unit, groups are joined.

The formulas are those of :mod:`sdkde_core.estimator.moving` and :mod:`sdkde_core.engine.merge`, forty launches there.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from sdkde_core.plugin import launches

from .compiled import INTERPRETED, Launch, bits, rehearse
from .kernels import f64, number, sized, wide

PROGRAMS = tl.constexpr(128)  # the most programs that share a sum
_begun = set[tuple[int, bool]]()  # dimensions, and whether weights vary, see :func:`begin`


@sized
def parts_kernel(points, shift, logs, parts, n, d, WEIGHTED: tl.constexpr, W: tl.constexpr, B: tl.constexpr):
    """Parts of Σw u and Σw s (PROGRAMS, W) each, and of Σw, Σw u·s and Σw s·s (PROGRAMS,), s the shift; W ≥ d."""
    program, k = tl.program_id(0), tl.arange(0, W)
    mean, shifted = tl.zeros((W,), tl.float64), tl.zeros((W,), tl.float64)
    total, along, squares = tl.zeros((B,), tl.float64), tl.zeros((B,), tl.float64), tl.zeros((B,), tl.float64)
    for first in range(program * B, n, tl.num_programs(0) * B):
        i = wide(first) + tl.arange(0, B)
        at, inside = i[:, None] * d + k[None, :], (i < n)[:, None] & (k < d)[None, :]
        u, s = tl.load(points + at, mask=inside, other=0.0), tl.load(shift + at, mask=inside, other=0.0)
        w = tl.where(i < n, 1.0, 0.0).to(tl.float64)
        if WEIGHTED:
            w = tl.exp(tl.load(logs + i, mask=i < n, other=float("-inf")))
        mean += tl.sum(w[:, None] * u, 0)
        shifted += tl.sum(w[:, None] * s, 0)
        total += w
        along += w * tl.sum(u * s, 1)
        squares += w * tl.sum(s * s, 1)
    tl.store(parts + program * W + k, mean)
    tl.store(parts + (PROGRAMS + program) * W + k, shifted)
    parts += 2 * PROGRAMS * W + program
    tl.store(parts, tl.sum(total, 0))
    tl.store(parts + PROGRAMS, tl.sum(along, 0))
    tl.store(parts + 2 * PROGRAMS, tl.sum(squares, 0))


@sized
def move_kernel(points, shift, parts, out, n, d, splits, unit, least, most, W: tl.constexpr, B: tl.constexpr):
    """The points plus the step "moments" times shift / ``unit``; ``unit``, ``least`` and ``most`` are bits."""
    c, k = number(unit), tl.arange(0, W)
    mean, shifted = tl.zeros((W,), tl.float64), tl.zeros((W,), tl.float64)
    for first in range(0, splits, 16):
        p = first + tl.arange(0, 16)
        of, inside = p[:, None] * W + k[None, :], (p < splits)[:, None]
        mean += tl.sum(tl.load(parts + of, mask=inside, other=0.0), 0)
        shifted += tl.sum(tl.load(parts + PROGRAMS * W + of, mask=inside, other=0.0), 0)
    p = tl.arange(0, PROGRAMS)
    sums = parts + 2 * PROGRAMS * W + p
    total = tl.sum(tl.load(sums, mask=p < splits, other=0.0), 0)
    along = tl.sum(tl.load(sums + PROGRAMS, mask=p < splits, other=0.0), 0)
    squares = tl.sum(tl.load(sums + 2 * PROGRAMS, mask=p < splits, other=0.0), 0)
    total = tl.maximum(total, 1e-300)  # 0 where least and most are one number, which is then the step
    towards = (tl.sum(mean * shifted, 0) / total - along) / total / c
    squares = (squares - tl.sum(shifted * shifted, 0) / total) / total / (c * c)
    rest = towards * towards - squares * d
    root = d / tl.maximum(towards + tl.sqrt(tl.maximum(rest, 0.0)), 1e-300)
    root = tl.where(rest > 0.0, root, towards / tl.maximum(squares, 1e-300))
    moves = (towards > 1e-100) & (squares > 1e-200)
    step = tl.where(moves, tl.minimum(tl.maximum(root, number(least)), number(most)), number(least)) / c
    i = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    at, inside = i[:, None] * d + k[None, :], (i < n)[:, None] & (k < d)[None, :]
    u, s = tl.load(points + at, mask=inside, other=0.0), tl.load(shift + at, mask=inside, other=0.0)
    tl.store(out + at, u + step * s, mask=inside)


@sized
def reach_kernel(logs, reached, n, B: tl.constexpr):
    """The running sums (n,) of weights with these logs, by one program."""
    before, i = f64(0.0), tl.arange(0, B)
    for first in range(0, n, B):
        w = tl.exp(tl.load(logs + first + i, mask=first + i < n, other=float("-inf")))
        tl.store(reached + first + i, before + tl.cumsum(w, 0), mask=first + i < n)
        before += tl.sum(w, 0)


@sized
def unit_kernel(points, reached, out, n, d, first, unit, PICKED: tl.constexpr, W: tl.constexpr, B: tl.constexpr):
    """Points over the number with the bits ``unit``: all n, or n of ``first``, picked evenly (1) or by weight (2)."""
    i, k = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B), tl.arange(0, W)
    inside, source = (i < n)[:, None] & (k < d)[None, :], i
    place = (i.to(tl.float64) + (0.5 - 1e-6)) / n  # as in sdkde_core.engine.groups
    if PICKED == 1:
        source = tl.ceil(place * first).to(tl.int64) - 1
    if PICKED == 2:
        place, source, last = place * tl.load(reached + first - 1), i * 0, i * 0 + first - 1
        for _ in range(31):
            half = (source + last) // 2
            short = tl.load(reached + half) < place
            source, last = tl.where(short, half + 1, source), tl.where(short, last, half)
        source = tl.minimum(source, first - 1)
    u = tl.load(points + source[:, None] * d + k[None, :], mask=inside, other=0.0)
    tl.store(out + i[:, None] * d + k[None, :], u / number(unit), mask=inside)


@triton.jit
def _terms(one, other, i, m, constant, rest):
    """exp(a − top), exp(b − top) and top; a and b are logs plus the numbers with the bits ``constant``, ``rest``."""
    a = tl.load(one + i, mask=i < m, other=0.0) + number(constant)
    b = tl.load(other + i, mask=i < m, other=0.0) + number(rest)
    top = tl.maximum(tl.where(a > -1e300, a, -1e300), tl.where(b > -1e300, b, -1e300))  # NaN stays in the sum
    return tl.exp(a - top), tl.exp(b - top), top


@sized
def join_kernel(one, other, out, m, kind, constant, rest, SINGLE: tl.constexpr, B: tl.constexpr):
    """The sum of two densities (kind 1: its log) from logs, to which ``constant`` and ``rest``, bits, are added."""
    i = tl.program_id(0) * B + tl.arange(0, B)
    a, b, top = _terms(one, other, i, m, constant, rest)
    total = a + b
    result = tl.where(total == 0, float("-inf"), tl.log(tl.where(total == 0, 1.0, total)) + top)
    result = tl.where(kind == 1, result, tl.exp(result))
    tl.store(out + i, result.to(tl.float32) if SINGLE else result, mask=i < m)


@sized
def shifts_kernel(one, other, shift, second, out, n, d, constant, rest, unit, most, W: tl.constexpr, B: tl.constexpr):
    """The shift (n, d) of the sum of two densities, from their shifts over the numbers ``unit`` and ``most``."""
    i, k = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B), tl.arange(0, W)
    a, b, _ = _terms(one, other, i, n, constant, rest)
    total = tl.where(a + b == 0, 1.0, a + b)
    at, inside = i[:, None] * d + k[None, :], (i < n)[:, None] & (k < d)[None, :]
    result = tl.load(shift + at, mask=inside, other=0.0) / number(unit) * (a / total)[:, None]
    result += tl.load(second + at, mask=inside, other=0.0) / number(most) * (b / total)[:, None]
    tl.store(out + at, result, mask=inside)


@functools.lru_cache(1024)
def _launch(kernel: Any, n: int, d: int, *flags: Any, most: int = 1 << 31) -> Launch:
    """A kernel's launch for blocks of n points in d dimensions, by at most so many programs."""
    width = max(2, 1 << (d - 1).bit_length())
    block = min(128, max(2, 1024 // width))
    return Launch(kernel, (min(most, -(-n // block)), 1), (n, d), (*flags, width, block))


@launches.aside
def begin(d: int, weighted: bool = False) -> None:
    """The first time, let the kernels that most calls need compile side by side."""
    if (d, weighted) not in _begun and not INTERPRETED:
        _begun.update([(d, weighted), (d, False)])
        x = torch.zeros((2, d), dtype=torch.float64, device="cpu")
        logs = x[:, 0] if weighted else None
        rehearse(displaced, x, x, logs, 1.0, 0.0, 1.0)
        rehearse(in_unit, x, 2.0)
        rehearse(in_unit, x, 2.0, 1, logs)
        for dtype in (torch.float32, torch.float64):
            rehearse(joined, (x[:, 0], x[:, 0]), (1.0, 1.0), False, dtype)


def displaced(points: Any, shift: Any, log_weights: Any = None, c: float = 1.0, *limits: float) -> torch.Tensor:
    """See :class:`sdkde_core.protocol.MovesBackend`; without limits half a step, of ``LineBackend``."""
    limits = limits or (0.5, 0.5)
    begin(points.shape[1], log_weights is not None)
    (n, d), most, out, programs = points.shape, int(PROGRAMS.value), torch.empty_like(points), 0
    run = _launch(parts_kernel, n, d, log_weights is not None, most=most)
    parts = torch.empty(most * (2 * run.flags[1] + 3), dtype=torch.float64, device=points.device)
    if limits[0] < limits[1]:
        programs = run.grid[0]
        run(points, shift, points if log_weights is None else log_weights, parts)
    _launch(move_kernel, n, d)(points, shift, parts, out, last=(programs, *map(bits, (c, *limits))))
    return out


def in_unit(points: torch.Tensor, unit: float, some: int = 0, log_weights: Any = None) -> torch.Tensor:
    """See :class:`sdkde_core.protocol.MovesBackend`."""
    (n, d), weighted = points.shape, log_weights is not None
    begin(d, weighted)
    reached = torch.empty_like(log_weights) if weighted else points
    if weighted:
        Launch(reach_kernel, (1, 1), (n,), (2048,))(log_weights, reached)
    out = points.new_empty(some or n, d)
    _launch(unit_kernel, *out.shape, (some > 0) + weighted)(points, reached, out, last=(n, bits(unit)))
    return out


def joined(logs: tuple[Any, Any], constants: tuple[float, float], log: bool, dtype: torch.dtype) -> torch.Tensor:
    """See :class:`sdkde_core.protocol.MovesBackend`."""
    m, out = logs[0].shape[0], torch.empty_like(logs[0], dtype=dtype)
    run = Launch(join_kernel, (-(-m // 128), 1), (m, int(log)), (dtype is torch.float32, 128))
    run(*logs, out, last=tuple(map(bits, constants)))
    return out


def joined_shifts(logs: Any, constants: tuple[float, float], shifts: Any, units: tuple[float, float]) -> torch.Tensor:
    """See :class:`sdkde_core.protocol.MovesBackend`."""
    out = torch.empty_like(shifts[0])
    _launch(shifts_kernel, *out.shape)(*logs, *shifts, out, last=tuple(map(bits, (*constants, *units))))
    return out
