"""Grids: how many programs a card holds, and in how many parts the columns are split."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch

from sdkde_core.tuning import card_name

from .space import COLUMN_PADDING, Config

#: Parts of the columns at most: the second dimension of a grid.
MOST_PARTS = (1 << 16) - 1

#: Bytes of partial results that may exist at once; more rows come in slabs.
PARTIAL_BYTES = 256 << 20


@dataclass(frozen=True)
class Processor:
    """What decides grids and configurations."""

    multiprocessors: int
    capability: int  # ten times the compute capability
    registers: int  # of one multiprocessor: 32-bit registers, bytes of shared memory, threads
    shared: int
    threads: int
    name: str = "CPU"  # as :func:`sdkde_core.tuning.card_name` has it; that one interprets kernels

    @staticmethod
    @functools.cache
    def of(device: torch.device) -> Processor:
        """Describe a device; the CPU, where kernels are interpreted, as a small one."""
        if device.type != "cuda":
            return Processor(2, 90, 1 << 16, 227 << 10, 2048)
        found = torch.cuda.get_device_properties(device)
        registers, threads = found.regs_per_multiprocessor, found.max_threads_per_multi_processor
        limits = registers, found.shared_memory_per_multiprocessor, threads
        name, capability = card_name(found.name), 10 * found.major + found.minor
        return Processor(found.multi_processor_count, capability, *limits, name)


def resident(compiled: Any, config: Config, processor: Processor) -> int:
    """Return how many programs of a compiled kernel a multiprocessor holds at once; a guess where it is interpreted."""
    threads = 32 * config.num_warps
    registers = getattr(compiled, "n_regs", None) or 128
    shared = compiled.metadata.shared if hasattr(compiled, "metadata") else 0
    by_registers = processor.registers // (threads * (-(-registers // 8) * 8))
    by_shared = processor.shared // (shared + 1024)  # the system keeps 1 KiB a program
    return max(1, min(by_registers, by_shared, processor.threads // threads))


@functools.lru_cache(maxsize=4096)
def splits(rows: int, n: int, block_m: int, step: int, slots: int, limit: int, columns: int) -> tuple[int, int]:
    """Return in how many parts the columns are split, and the columns of each.

    Every part is a program of its own, so that few rows still fill the card and the last wave of many is nearly full:
    the number is the one with the least predicted time. It follows from the problem and the card alone. A program has
    ``block_m`` rows, takes ``step`` columns at a time and ``columns`` at most; the card holds ``slots`` programs. There
    are ``limit`` parts at most, unless ``columns`` asks for more.
    """
    tiles, steps = -(-rows // block_m), -(-n // step)
    best, best_time = steps, math.inf
    fewest = min(-(-n // columns), MOST_PARTS)
    most = max(fewest, min(steps, limit, -(-8 * slots // tiles)))
    for count in range(fewest, most + 1):
        length = -(-steps // count)
        waves = tiles * -(-steps // length) / slots
        # A program starts and ends in the time of about two steps. With a fraction of the slots filled, the others run
        # faster; after some waves programs no longer start together, and what is lost is half a wave.
        time = (max(1.0, waves) if waves <= 1 else math.ceil(waves) if waves < 4 else waves + 0.5) * (length + 2)
        if time < best_time:
            best, best_time = length, time
    return -(-steps // best), best * step


@functools.cache
def block_points(block_m: int, across: int, multiprocessors: int) -> int:
    """Return how many rows and columns of φ are stored at a time: some 4096, 64 MiB or 96.

    Their sums, of ``block_m`` rows and one of ``across`` parts of the dimensions a program, are to fill whole waves.
    """

    def filled(points: int) -> float:
        programs = points // block_m * across
        return programs / (multiprocessors * math.ceil(programs / multiprocessors))

    return max(range(3072, 6144, COLUMN_PADDING), key=lambda points: (round(filled(points), 1), -abs(points - 4096)))


def most_parts(rows: int, bytes_per_row: int) -> int:
    """Return in how many parts the columns may be split at most, for the memory that their results take."""
    return max(1, min(64, PARTIAL_BYTES // (rows * bytes_per_row)))


def slab_rows(rows: int, n: int, bytes_per_row: int, columns: int) -> int:
    """Return how many rows to take at a time, so that their partial results are about :data:`PARTIAL_BYTES` at most.

    All slabs but the last have as many: none is left over that would not fill the card.
    """
    fewest = min(-(-n // columns), MOST_PARTS)
    most = max(128, PARTIAL_BYTES // (bytes_per_row * fewest))  # fewer have so many parts that they fill a card
    count, unit = -(-rows // most), 1024 if most >= 4096 else 128
    return min(rows, -(-rows // (count * unit)) * unit, max(most // unit, 1) * unit)
