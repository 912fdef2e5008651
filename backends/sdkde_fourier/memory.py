"""What the Fourier backend takes of the host's memory, in bytes: counted, from what finufft 2.5 and NumPy allocate.

finufft works on a grid of complex numbers, finer than the modes. Beside it are, on the way to modes, the part of the
grid that a part of the points is spread to first; and in one dimension the tables of the FFT. Points have angles, a
place in finufft's order, and values.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

from sdkde_core.protocol import Problem, Reduction

from .bounds import requested

#: finufft's widest kernel, in points of its grid.
WIDEST = 16


def fields_of(problem: Problem) -> int:
    """How many transforms to points a pass takes: each gives two real fields."""
    return {1: 1, 2: 2, 3: 2}[problem.d] if problem.reduction is Reduction.MEAN else 1


def blocks_to_modes(count: int, shape: tuple[int, ...], threads: int) -> int:
    """How many transforms points go to modes by: of 2¹⁷ points or more, with at most 16 modes a point."""
    return max(1, min(threads, count // (1 << 17), 16 * count // math.prod(shape)))


def blocks_to_points(count: int, shape: tuple[int, ...], threads: int) -> tuple[int, int]:
    """How many transforms modes go back to points by, of 2¹⁵ points or more, and the threads of each."""
    blocks = min(threads, count // (1 << 15)) if math.prod(shape) <= max(count, 1 << 22) else 1
    return max(1, blocks), threads if blocks == 1 else 1


def _grid(shape: tuple[int, ...], epsilon: float) -> tuple[int, ...]:
    finer, _ = requested(epsilon, len(shape))
    return tuple(_even(max(math.ceil(finer * modes), 2 * WIDEST)) for modes in shape)


@functools.lru_cache(1 << 10)
def _even(size: int) -> int:
    """The next even number without prime factors beyond 5."""
    odd = (3**b * 5**c for b in range(20) for c in range(14))
    return min(q << max(1, (-(-size // q) - 1).bit_length()) for q in odd)


def _transform(shape: tuple[int, ...], epsilon: float) -> int:
    """The grid; in one dimension also the FFT's tables, at most as large, and the kernel's modes, half as many."""
    return math.prod(_grid(shape, epsilon)) * (16 if len(shape) > 1 else 2 * 16 + 4)


def parts(count: int, shape: tuple[int, ...], epsilon: float) -> int:
    """The number of parts in which finufft spreads ``count`` points, one after the other."""
    grid = _grid(shape, epsilon)
    if len(shape) == 1 and count > 1000 * grid[0]:
        return 1  # they are not sorted
    return count if 1000 * count < math.prod(grid) else -(-count // (10_000 if len(shape) == 1 else 100_000))


def spreading(count: int, shape: tuple[int, ...], epsilon: float, extents: Sequence[float]) -> int:
    """Return what a transform of ``count`` points to modes takes; a part of them extends over such shares of the box.

    The result is there from the beginning, although nothing is written to it until all is spread. And where a part is
    wider than those before, its grid is made twice as large as theirs, for more to come, while theirs is still there.
    """
    many, modes = parts(count, shape, epsilon), math.prod(shape) * 16
    spread = math.prod(int(share * k) + WIDEST for share, k in zip(extents, _grid(shape, epsilon))) * 16
    copied = -(-count // many) * (8 * len(shape) + 16)
    fixed = _transform(shape, epsilon) + count * (16 + 8)
    return fixed + spread * (3 if many > 1 else 1) + copied + modes


def interpolation(count: int, shape: tuple[int, ...], epsilon: float) -> int:
    """Return what a transform to ``count`` points takes, beside its results."""
    return _transform(shape, epsilon) + count * 8
