"""Kernels on a CUDA card: whether it can be used, how many programs it holds, in how many parts columns are split.

PyTorch is not imported here: whoever asks has imported it.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Container
from dataclasses import dataclass
from typing import Any

from ..protocol import Support
from .cards import card_name


@dataclass(frozen=True)
class Card:
    """The properties of a card that decide grids and launch parameters."""

    multiprocessors: int
    capability: int  # ten times the compute capability
    registers: int  # of one multiprocessor: 32-bit registers, bytes of shared memory, threads
    shared: int
    threads: int
    name: str = "CPU"  # as :func:`sdkde_core.tuning.card_name` has it; a CPU interprets kernels

    @staticmethod
    @functools.cache
    def of(device: Any) -> Card:
        """Describe a device of PyTorch's; the CPU, where kernels are interpreted, as a small one."""
        if device.type != "cuda":
            return Card(2, 90, 1 << 16, 227 << 10, 2048)
        has = sys.modules["torch"].cuda.get_device_properties(device)
        limits = has.regs_per_multiprocessor, has.shared_memory_per_multiprocessor, has.max_threads_per_multi_processor
        return Card(has.multi_processor_count, 10 * has.major + has.minor, *limits, card_name(has.name))

    def resident(self, threads: int, registers: int, shared: int) -> int:
        """Return how many programs a multiprocessor holds at once; ``registers`` of a thread, ``shared`` bytes."""
        by_registers = self.registers // (threads * (-(-registers // 8) * 8))
        by_shared = self.shared // (shared + 1024)  # the system keeps 1 KiB a program
        return max(1, min(by_registers, by_shared, self.threads // threads))


@functools.lru_cache(maxsize=4096)
def parts(
    blocks: int, steps: int, slots: int, most: int, *, begins: int, fewest: int = 1, together: float = 4.0
) -> tuple[int, int]:
    """Return the number of parts of the columns with the least predicted time, and the steps of each part.

    Every part of every block of rows is a program of its own, so that few rows still fill the card and the last wave of
    many is nearly full. A program would take all columns in ``steps``, and begins and ends in the time of ``begins``
    steps; the card holds ``slots`` programs at once. There are from ``fewest`` to ``most`` parts. From ``together``
    waves on programs no longer start together, and half a wave is lost.
    """
    best, best_time = steps, math.inf
    for count in range(fewest, most + 1):
        length = -(-steps // count)
        waves = blocks * -(-steps // length) / slots
        # With a fraction of the slots filled, the others run faster.
        time = (math.ceil(waves) if waves < together else waves + 0.5) * (length + begins)
        if time < best_time:
            best, best_time = length, time
    return -(-steps // best), best


def probe(device: str, capabilities: Container[int], needs: str) -> Support:
    """Say whether PyTorch has the CUDA device with one of these capabilities, times ten; ``needs`` names them."""
    cuda = sys.modules["torch"].cuda
    if not cuda.is_available():
        return Support(False, "PyTorch finds no CUDA device")
    index = int(device.partition(":")[2] or 0)
    if index >= cuda.device_count():
        return Support(False, f"there are {cuda.device_count()} CUDA devices, no {device}")
    name, (major, minor) = cuda.get_device_name(index), cuda.get_device_capability(index)
    if 10 * major + minor not in capabilities:
        return Support(False, f"{name} has compute capability {major}.{minor}; {needs}")
    return Support(True, f"{name}, compute capability {major}.{minor}")
