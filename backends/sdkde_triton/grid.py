"""Grids: how many programs a card holds, and in how many parts the columns are split."""

from __future__ import annotations

import math

from sdkde_core.plugin import grids

from .space import COLUMN_PADDING

#: Parts of the columns at most: the second dimension of a grid.
MOST_PARTS = (1 << 16) - 1

#: Bytes of partial results that may exist at once; more rows come in slabs.
PARTIAL_BYTES = 1 << 30


def splits(rows: int, n: int, block_m: int, step: int, slots: int, limit: int, columns: int) -> tuple[int, int]:
    """Return in how many parts the columns are split, as a rule ``limit`` at most, and the columns of each.

    A program has ``block_m`` rows, takes ``step`` columns at a time and ``columns`` at most; a card holds ``slots``.
    """
    blocks, steps = -(-rows // block_m), -(-n // step)
    fewest = min(-(-n // columns), MOST_PARTS)
    most = max(fewest, min(steps, limit, -(-8 * slots // blocks)))
    parts, length = grids.parts(blocks, steps, slots, most, begins=2, fewest=fewest)
    return parts, length * step


def block_points(block_m: int, across: int, multiprocessors: int) -> int:
    """Return how many rows and columns of φ are stored at a time: some 4096, 64 MiB or 96.

    Their sums, of ``block_m`` rows and one of ``across`` parts of the dimensions a program, are to fill whole waves.
    """

    def filled(points: int) -> float:
        programs = points // block_m * across
        return programs / (multiprocessors * math.ceil(programs / multiprocessors))

    return max(range(3072, 6144, COLUMN_PADDING), key=lambda points: (round(filled(points), 1), -abs(points - 4096)))


def most_parts(rows: int, bytes_per_row: int) -> int:
    """Return in how many parts the columns may be split, for the memory that their results take."""
    return max(1, min(64, PARTIAL_BYTES // (rows * bytes_per_row)))


def slab_rows(rows: int, n: int, bytes_per_row: int, columns: int) -> int:
    """Return how many rows to take at a time, for :data:`PARTIAL_BYTES`, so that no few are left over at the end."""
    fewest = min(-(-n // columns), MOST_PARTS)
    most = max(128, PARTIAL_BYTES // (bytes_per_row * fewest))  # fewer have so many parts that they fill a card
    count, unit = -(-rows // most), 1024 if most >= 4096 else 128
    return min(rows, -(-rows // (count * unit)) * unit, max(most // unit, 1) * unit)
