"""What can be tuned: launch parameters, their limits, and the defaults per architecture.

Below, ``columns`` is D, of a packed operand (d for direct differences), ``pieces`` how many a coordinate is in, and
``capability`` ten times the compute capability.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

from sdkde_core.tuning import checked

#: Kernels of :mod:`sdkde_triton.blocked`; the others are log_sum, mean, direct and direct_mean.
BLOCKED = ("blocked", "stored", "weighted_sum")

#: Values that are worth trying. Tiles are powers of two; a row tile has at least the 64 rows of a warp group's product.
SPACE: Mapping[str, tuple[int, ...]] = {
    "block_m": (64, 128, 256, 512, 1024),
    "block_n": (4, 8, 16, 32, 64, 128, 256),
    "num_warps": (4, 8),
    "num_stages": (1, 2, 3, 4),
}

#: Of lists (:mod:`sdkde_triton.near`): rows of a tile, columns of a leaf, and of the leaves that are taken at once.
HEIGHT, LEAF, LISTED = 64, 32, 128

#: Ten times the compute capability that the kernels need: Tensor Cores that take asynchronous copies.
LEAST_CAPABILITY = 80

#: What packed columns are padded to: a multiple of every BLOCK_N.
COLUMN_PADDING = 256


class Config(NamedTuple):
    """Launch parameters of a kernel: rows and columns of a tile, warps of a program, tiles of columns in flight."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Config:
        """Return the configuration that a mapping describes; ValueError as of :func:`sdkde_core.tuning.checked`."""
        return checked(cls, values, SPACE)

    @property
    def options(self) -> dict[str, Any]:
        """The compiler's options. Fusing products and sums is set, as its default changes between versions."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, "enable_fp_fusion": True}


def block_k(columns: int, pieces: int, capability: int) -> int:
    """Return how many dimensions a step of :mod:`sdkde_triton.blocked` takes; stored columns, if ``columns`` is 0."""
    return 64 if columns == 0 and pieces == 2 and 90 <= capability < 110 else 32


def shared_bytes(kernel: str, config: Config, columns: int, pieces: int = 2, capability: int = 90) -> int:
    """Return an upper bound on a program's shared memory: its rows' operands, and the column tiles in flight."""
    if kernel.startswith("direct"):
        return 4096
    if kernel in BLOCKED:
        last = kernel == "weighted_sum"
        numbers = (config.block_m + config.block_n) * pieces
        stage = 2 * numbers * block_k(0 if last else columns, pieces, capability)
        scratch = 4 * config.block_m * config.block_n if kernel == "stored" else 0
        return max(2, config.num_stages) * stage + scratch + (config.block_m + config.block_n) * 64 + 12288
    rows = config.block_m * (pieces * columns + 32) * 2
    tile = config.block_n * (pieces * columns + 16) * 2
    return rows + max(2, config.num_stages) * tile + 4096


def shared_limit(capability: int) -> int:
    """Return the shared memory that one program can have, in bytes.

    CUDA C++ Programming Guide, technical specifications per compute capability; of one unknown, that before it.
    """
    known = {80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 120: 99}
    return known[max(c for c in known if c <= max(capability, LEAST_CAPABILITY))] << 10


def fits(kernel: str, config: Config, columns: int, capability: int, pieces: int = 2) -> bool:
    """Whether a configuration fits a GPU's shared memory and register file."""
    if not kernel.startswith("direct") and config.block_n < 16:
        return False  # the second product's inner dimension
    accumulators = config.block_m * config.block_n
    if kernel == "mean":
        accumulators += 2 * config.block_m * columns
    if kernel in BLOCKED:
        accumulators *= 3 if pieces == 3 else 2
    shared = shared_bytes(kernel, config, columns, pieces, capability)
    # Accumulators above 160 of a thread's 255 registers leave too few for the exponentials.
    return shared <= shared_limit(capability) and accumulators <= 160 * 32 * config.num_warps


@functools.lru_cache(maxsize=256)
def default(kernel: str, columns: int, capability: int, merged: bool = False, pieces: int = 2) -> Config:
    """Return the default configuration; measured on an H200, and chosen elsewhere by what fits without spilling."""
    if kernel.startswith("direct"):
        if kernel == "direct":
            return Config(256, 16, 8, 1)
        return {3: Config(1024, 8, 4, 1), 4: Config(512, 8, 4, 1)}.get(columns, Config(1024, 16, 8, 1))
    if kernel.endswith("_listed"):
        config = default(kernel.removesuffix("_listed"), columns, capability, merged, pieces)
        most = 64 if merged or pieces == 3 else 128  # .87 to .96 of the time in 4 and 8 dimensions (H200)
        return config if kernel == "mean_listed" else config._replace(block_n=min(config.block_n, most), num_stages=2)
    hopper = 90 <= capability < 100
    if kernel in BLOCKED:
        if not hopper:
            return Config(64, 32, 4, 2)
        if pieces == 3:
            return Config(64, 64, 4, 3)
        return Config(128, 128, 8, 3) if kernel == "weighted_sum" else Config(64, 128, 4, 3)
    if pieces == 3:
        if hopper and kernel == "mean" and columns <= 64:
            return Config(64, 64, 4, 3)
        if hopper:
            return Config(64, 128, 4, 3) if columns <= 32 else Config(128, 64, 8, 2)
        if columns >= 128:
            return Config(64, 16, 8 if kernel == "mean" else 4, 2)
        return Config(64, 32, 4, 2) if columns <= 32 else Config(64, 16, 4, 2)
    if hopper:
        wide = Config(128, 64, 8, 3)
        if kernel == "mean":
            return {16: Config(64, 64, 4, 3), 32: Config(64, 128, 4, 3), 64: Config(64, 64, 4, 2)}.get(columns, wide)
        return {16: Config(64, 128, 4, 3), 32: Config(128, 128, 8, 2)}.get(columns, wide)
    # Elsewhere the rows' operands stay in registers, or (10.0, Triton 3.6) more goes to shared memory: smaller tiles.
    if merged and kernel == "mean":
        return Config(64, 64, 4, 2)
    if columns >= 128:
        return Config(64, 16, 8, 2) if kernel == "mean" else Config(64, 16, 4, 2)
    return Config(64, 64, 4, 2) if columns == 32 else Config(64, 32, 4, 3 if columns == 16 else 2)
