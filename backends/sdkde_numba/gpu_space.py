"""Launch parameters of the CUDA kernels: the values that can be tuned, their limits, and the defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from sdkde_core.tuning import checked

from .gpu_bounds import DEPTH, MANY, MOST_DEPTH

__all__ = [
    "CHUNK",
    "CONFIG_VERSION",
    "SHARED",
    "SPACE",
    "LaunchConfig",
    "default",
    "depth_of",
    "fits",
    "fitted",
    "listed",
]

#: Raised when a launch parameter changes its meaning: configurations stored under another version are not used.
CONFIG_VERSION = 1

#: Values that are worth trying.
SPACE: Mapping[str, tuple[int, ...]] = {
    "depth": (4, 8, 16),
    "rows": (1, 2, 4, 8),
    "threads": (64, 128, 256),
    "columns": (4, 8, 16, 32, 64, 128, 256),
    "registers": (0, 128, 168),
}

#: Shared memory that a block can have without asking, on every card.
SHARED = 48 << 10

#: Columns that are added up at a time, by precision; those of the first two in float32. Beside a heap of duplicates
#: every addition rounds alike, by 2⁻²⁵ of the sum at most: that is 1e-5 of it after 512.
CHUNK = {"fast": 512, "high": 64, "float64": 4096}


class LaunchConfig(NamedTuple):
    """Launch parameters."""

    depth: int  # a row's coordinates in one thread, at most: where there are more, neighbouring threads share a row
    rows: int  # of a thread
    threads: int  # of a block
    columns: int  # in shared memory at a time
    registers: int  # of a thread, at most; 0: the compiler's choice

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> LaunchConfig:
        """Return the configuration that a mapping describes; ValueError as of :func:`sdkde_core.tuning.checked`."""
        return checked(cls, values, SPACE)


def depth_of(d: int, most: int) -> tuple[int, int]:
    """Return the coordinates in one thread, and the threads of a row, of d dimensions with ``most`` in a thread.

    Beyond 512 dimensions 32 threads need more than 16 each. Up to ``most`` nothing is padded; beyond, to pairs.
    """
    if d <= most:
        return d, 1
    group = min(32, 1 << (-(-d // most) - 1).bit_length())
    return 2 * -(-d // (2 * group)), group


def fitted(config: LaunchConfig, precision: str) -> LaunchConfig:
    """Return the configuration that is launched: with no more columns in shared memory than are added up."""
    return config._replace(columns=min(config.columns, CHUNK[precision]))


def _shared_bytes(config: LaunchConfig, d: int, arithmetic: str) -> int:
    """Shared memory of a block, with a number a column besides its coordinates."""
    depth, group = depth_of(d, config.depth)
    numbers = depth * group * (2 if arithmetic == "doubled" else 1) + 1
    return config.columns * numbers * (8 if arithmetic == "float64" else 4)


def fits(config: LaunchConfig, reduction: str, d: int, arithmetic: str) -> bool:
    """Whether a configuration fits the shared memory of every card, and its coordinates a thread's registers."""
    depth, _ = depth_of(d, config.depth)
    if depth > (DEPTH if d <= MANY else MOST_DEPTH) or _shared_bytes(config, d, arithmetic) > SHARED:
        return False
    words = {"doubled": 2, "float64": 2}.get(arithmetic, 1)
    held = (2 * depth + 4 if reduction == "mean" else depth + 4) * words * config.rows
    return held <= (config.registers or 255) - 24


def default(reduction: str, d: int, arithmetic: str) -> LaunchConfig:
    """Return the default configuration, as measured on an H200: 16 coordinates in a thread, few threads to a row."""
    mean, wide = reduction == "mean", arithmetic in ("doubled", "float64")
    held, _ = depth_of(d, DEPTH)
    if held <= 4:
        rows = 4 if mean or wide else 8
    else:
        rows = 2 if wide or not mean or held > DEPTH else 4
    config = LaunchConfig(DEPTH, rows, 256, 128, 0)
    while _shared_bytes(config, d, arithmetic) > SHARED // 2 and config.columns > SPACE["columns"][0]:
        config = config._replace(columns=config.columns // 2)
    if wide and held > 4:
        if not mean:
            config = config._replace(threads=128 if arithmetic == "doubled" else 256)
        else:
            config = config._replace(rows=1, threads=128, registers=168 if held <= DEPTH else 0)
    return config


def listed(reduction: str, d: int, arithmetic: str) -> LaunchConfig:
    """Return the configuration for sums over lists: the fewer rows and columns a tile has, the more is left out.

    A block of one warp waits for no other at its barriers.
    """
    config = default(reduction, d, arithmetic)
    return config._replace(rows=min(config.rows, 2), threads=32, columns=64)
