"""What the Fourier backend takes of the host's memory, in bytes: counted, from what finufft 2.5 and NumPy allocate.

finufft works on a grid of complex numbers, finer than the modes, one for every transform at a time. Beside it are, on
the way to modes, the part of the grid that a part of the points is spread to first; and in one dimension the tables of
the FFT. Points have angles, a place in finufft's order, and values.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

from sdkde_core.protocol import Problem, Reduction

from .bounds import requested

REAL = INDEX = 8
COMPLEX = 16

#: finufft's widest kernel, in points of its grid, and points that it spreads at a time by dimension.
WIDEST, PART = 16, {1: 10_000, 2: 100_000, 3: 100_000}

#: Rows at a time, which bounds the memory of angles and fields.
ROWS = 1 << 20

#: Fewest points of a block that a thread transforms on its own, and most modes, if more than the points.
BLOCK, MODES = 1 << 15, 1 << 22

#: Fewest points of a block that goes to modes on its own, and most modes for each.
SPREAD, MODES_EACH = 1 << 17, 16


def fields_of(problem: Problem) -> int:
    """How many transforms to points a pass takes: each gives two real fields."""
    return {1: 1, 2: 2, 3: 2}[problem.d] if problem.reduction is Reduction.MEAN else 1


def blocks_to_modes(count: int, shape: tuple[int, ...], threads: int) -> int:
    """How many transforms ``count`` points are shared out over, on the way to modes."""
    return max(1, min(threads, count // SPREAD, MODES_EACH * count // math.prod(shape)))


def blocks_to_points(count: int, shape: tuple[int, ...], threads: int) -> tuple[int, int]:
    """How many transforms ``count`` points are shared out over, on the way back, and the threads of each."""
    blocks = min(threads, count // BLOCK) if math.prod(shape) <= max(count, MODES) else 1
    return max(1, blocks), threads if blocks == 1 else 1


def _grid(shape: tuple[int, ...], epsilon: float) -> tuple[int, ...]:
    """finufft's grid."""
    finer, _ = requested(epsilon, len(shape))
    return tuple(_even(max(math.ceil(finer * modes), 2 * WIDEST)) for modes in shape)


@functools.lru_cache(1 << 10)
def _even(size: int) -> int:
    """The next even number without prime factors beyond 5."""
    odd = (3**b * 5**c for b in range(20) for c in range(14))
    return min(q << max(1, (-(-size // q) - 1).bit_length()) for q in odd)


def _transform(shape: tuple[int, ...], epsilon: float) -> int:
    """The grid; in one dimension also the FFT's tables, at most as large, and the kernel's modes, half as many."""
    return math.prod(_grid(shape, epsilon)) * (COMPLEX if len(shape) > 1 else 2 * COMPLEX + REAL // 2)


def parts(count: int, shape: tuple[int, ...], epsilon: float) -> int:
    """How many parts finufft spreads so many points in, one after the other."""
    grid = _grid(shape, epsilon)
    if len(shape) == 1 and count > 1000 * grid[0]:
        return 1  # they are not sorted
    return count if 1000 * count < math.prod(grid) else -(-count // PART[len(shape)])


def spreading(
    count: int, shape: tuple[int, ...], epsilon: float, extents: Sequence[float], reserved: bool = False
) -> int:
    """Return what a transform of ``count`` points to modes takes; a part of them extends over such shares of the box.

    ``reserved``: what it reserves at most, rather than what it uses. The result is there from the beginning, although
    nothing is written to it until all is spread. And where a part is wider than those before, its grid is made twice as
    large as theirs, for more to come, while theirs is still there.
    """
    many, modes = parts(count, shape, epsilon), math.prod(shape) * COMPLEX
    spread = math.prod(int(share * k) + WIDEST for share, k in zip(extents, _grid(shape, epsilon))) * COMPLEX
    copied = -(-count // many) * (REAL * len(shape) + COMPLEX)
    fixed = _transform(shape, epsilon) + count * (COMPLEX + INDEX)
    return fixed + (spread * (3 if many > 1 else 1) + copied + modes if reserved else max(spread + copied, modes))


def interpolation(count: int, shape: tuple[int, ...], epsilon: float) -> int:
    """Return what a transform to ``count`` points takes, beside its results."""
    return _transform(shape, epsilon) + count * INDEX


def peak(
    problem: Problem,
    shape: tuple[int, ...],
    waves: tuple[int, ...],
    epsilon: float,
    threads: int,
    filled: Sequence[float],
) -> int:
    """Return what a pass takes at most at a time, beside its points.

    ``shape`` has the modes per dimension, ``waves`` those that go back to points, and ``filled`` the shares of the
    period that the points extend over. Not counted: direct sums, once the transforms are done.
    """
    n, d, rows = problem.n, problem.d, min(problem.m, ROWS)
    mean, laplace = problem.reduction is Reduction.MEAN, problem.reduction is Reduction.LAPLACE
    blocks = blocks_to_modes(n, shape, threads)
    # Of two parts or more none extends over more than half of the box, if the points' median is in the middle.
    part = [filled[0] if parts(n // blocks, shape, epsilon) == 1 else 0.5 * filled[0], *filled[1:]]
    first = n * (d + 1) * REAL + blocks * spreading(-(-n // blocks), shape, epsilon, part)
    blocks, _ = blocks_to_points(rows, waves, threads)
    fields = fields_of(problem)
    modes = (math.prod(shape) + fields * math.prod(waves)) * COMPLEX
    found = rows * fields * COMPLEX
    second = modes + found + rows * d * REAL + blocks * interpolation(-(-rows // blocks), waves, epsilon)
    # MEAN: the shift twice, its length, squares. LAPLACE: L and M, their logs and signs.
    third = modes + found + rows * REAL * (2 * d + 5 if mean else 8 if laplace else 2)
    results = problem.m * REAL * (1 + d if mean else 3 if laplace else 1)
    return max(first, second, third) + results * (1 if problem.m <= ROWS else 2)  # joined at the end
