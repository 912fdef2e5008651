"""Host side of the sums over the leaves of columns that lists name; the kernels are :mod:`sdkde_triton.listed`."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from sdkde_core.protocol import Partial, Problem, Reduction

from . import launch, listed
from .bounds import merges, packed_dimensions, steps_at_most
from .compiled import launch as run
from .grid import Processor
from .launch import Packed, Weights
from .space import HEIGHT, LEAF, LISTED, Config, default

__all__ = ["Lists", "log_sum", "longest", "mean"]


class Lists(NamedTuple):
    """What tiles of rows from the ``first`` on take, in parts of ``length``."""

    leaves: torch.Tensor  # int32
    ends: torch.Tensor  # int32
    which: torch.Tensor  # int32, tiles, the longest list first
    first: int
    length: int
    parts: int


#: SIZEs that one program of MEAN may take, which sums what it rounds off.
MOST_SIZES = 512


def longest(problem: Problem, pieces: int, device: torch.device) -> int:
    """Return how many SIZEs one program may take."""
    if problem.reduction is Reduction.MEAN:
        return MOST_SIZES
    step = _config("log_sum", problem, pieces, device).block_n
    return max(1, steps_at_most(problem, 0.0) * step // LISTED)


def log_sum(
    problem: Problem,
    rows: Packed,
    m: int,
    weights: Weights,
    columns: Packed,
    over: Lists,
    form: int,
    own: int | None,
    laplace: bool,
) -> Partial:
    """LOG_SUM or LAPLACE of m rows, those of the lists' tiles; see :func:`sdkde_triton.launch.log_sum`."""
    width = packed_dimensions(problem.d)
    flags = (width, rows.pieces, form, merges(problem.d), laplace, weights.vary, own is not None)
    kernel, per_row = listed.log_sum_listed_kernel, 3 if laplace else 2
    out = _launched("log_sum", kernel, problem, rows, m, columns, over, (weights.log,), flags, per_row, own)
    return launch.finish_log_sum(problem, out, weights, m, over.parts, laplace)


def mean(
    problem: Problem,
    rows: Packed,
    top: int,
    m: int,
    weights: Weights,
    columns: Packed,
    over: Lists,
    form: int,
    own: int | None,
    log_sums: torch.Tensor | None,
) -> Partial:
    """MEAN of m rows from ``top`` on; see :func:`sdkde_triton.launch.mean`."""
    width = packed_dimensions(problem.d)
    summed = problem.d < width
    flags = (width, rows.pieces, form, merges(problem.d), summed, own is not None, problem.precision == "high")
    per_row = width if summed else width + 1
    out = _launched("mean", listed.mean_listed_kernel, problem, rows, m, columns, over, (), flags, per_row, own)
    here = Packed(rows.buffer[top * width :], m, rows.padded, rows.pieces)
    return launch.finish_mean(problem, out, here, weights, log_sums, over.parts, summed)


def _launched(
    name: str,
    kernel: Any,
    problem: Problem,
    rows: Packed,
    m: int,
    columns: Packed,
    over: Lists,
    more: tuple[Any, ...],
    flags: tuple[Any, ...],
    per_row: int,
    own: int | None,
) -> torch.Tensor:
    """Partial results of a kernel, (parts, m, per_row) in some order."""
    config = _config(name, problem, rows.pieces, rows.buffer.device)
    assert config.block_m == HEIGHT and LISTED % config.block_n == 0
    out = torch.empty(over.parts * m * per_row, dtype=torch.float32, device=rows.buffer.device)
    sizes = (rows.padded, columns.padded, m, columns.count, problem.d, own or 0, over.first * HEIGHT, over.length)
    before = (rows.buffer, columns.buffer, *more, over.leaves, over.which, over.ends, out, *sizes)
    last = (LISTED, LEAF, config.block_m, config.block_n, config.num_stages)
    run(kernel, (-(-m // HEIGHT), over.parts), before, (*flags, *last), config)
    return out


def _config(name: str, problem: Problem, pieces: int, device: torch.device) -> Config:
    capability, width = Processor.of(device).capability, packed_dimensions(problem.d)
    return default(name, width, capability, merges(problem.d), pieces)
