"""Host side of the kernels: buffers, packing, configurations and launches."""

from __future__ import annotations

import logging
import math
import threading
from dataclasses import dataclass
from typing import Any

import torch
from triton.runtime.interpreter import InterpretedFunction

from sdkde_core.protocol import Partial, Problem, Reduction
from sdkde_core.tuning import tuned

from . import finish, kernels
from .bounds import merges, packed_dimensions
from .direct import direct_kernel
from .grid import Processor, most_parts, resident, splits
from .space import COLUMN_PADDING, Config, default, fits, tiles_per_sum

__all__ = ["INTERPRETED", "Packed", "Weights", "direct", "log_sum", "mean", "pack_columns", "pack_rows", "transpose"]

#: Compilation of the kernels that only copy.
PLAIN = Config(1, 1, 4, 1)

#: Whether kernels run in Triton's interpreter, on the CPU.
INTERPRETED = isinstance(kernels.mean_kernel, InterpretedFunction)

_logger = logging.getLogger("sdkde")
_SQRT_LOG2E = math.sqrt(math.log2(math.e))


@dataclass(frozen=True)
class Packed:
    """Points packed as rows, or as columns and rows; see :mod:`sdkde_triton.kernels` for the buffer's layout."""

    buffer: torch.Tensor
    count: int
    padded: int


@dataclass(frozen=True)
class Weights:
    """The columns' log weights (n,), float64, and whether they vary."""

    log: torch.Tensor
    vary: bool


_interpreter = threading.Lock()

#: Compiled kernels by kernel, flags, configuration, element type, device, and whether all pointers are aligned.
_compiled: dict[Any, Any] = {}


def _compile(kernel: Any, arguments: tuple[Any, ...], flags: tuple[Any, ...], config: Config) -> Any:
    """Return the compiled kernel for those arguments and compile-time parameters, which come last; None: interpreted.

    Triton itself looks at every argument of every launch to find the compiled code, which takes longer than a small
    problem's kernels. No integer is specialised on, so what is left is in this key.
    """
    if INTERPRETED:
        return None
    first = arguments[0]  # the only pointer that may not be aligned: the user's rows, from somewhere in an array
    key = (kernel, flags, config, first.dtype, first.device.index, first.data_ptr() % 16)
    found = _compiled.get(key)
    if found is None:
        named = dict(zip(kernel.arg_names[len(arguments) :], flags, strict=True))
        found = _compiled[key] = kernel.warmup(*arguments, grid=(1,), **named, **config.options)
        found._init_handles()  # loads it, which tells its registers
    return found


def _launch(
    kernel: Any, compiled: Any, grid: tuple[int, int], arguments: tuple[Any, ...], flags: Any, config: Config
) -> None:
    if compiled is None:
        with _interpreter:  # it replaces parts of Triton while it runs
            kernel[grid](*arguments, *flags, **config.options)
    else:
        compiled[(*grid, 1)](*arguments, *flags)


def _copy(kernel: Any, programs: int, arguments: tuple[Any, ...], flags: tuple[Any, ...]) -> None:
    """Launch a kernel without launch parameters to choose."""
    _launch(kernel, _compile(kernel, arguments, flags, PLAIN), (programs, 1), arguments, flags, PLAIN)


def pack_columns(points: torch.Tensor, step: float, weights: Weights, *, scaled: bool = False) -> Packed:
    """Pack float64 points (n, d) as columns of the first product, and as its rows.

    Parameters
    ----------
    points : (n, d) float64 tensor
    step : float
        See :func:`sdkde_triton.bounds.grid_step`.
    weights : Weights
    scaled : bool
        MEAN: the rows scale φ to half precision's range.
    """
    padded = -(-points.shape[0] // COLUMN_PADDING) * COLUMN_PADDING
    return _pack(points, step, weights, None, padded, True, scaled)


def pack_rows(
    points: torch.Tensor, step: float, weights: Weights, *, scaled: bool = False, log_sums: torch.Tensor | None = None
) -> Packed:
    """Pack float64 points (m, d) as rows, shifted by their log sums (m,) over columns with ``weights``, if given."""
    return _pack(points, step, weights, log_sums, points.shape[0], False, scaled)


def _pack(
    points: torch.Tensor, step: float, weights: Weights, log_sums: Any, padded: int, columns: bool, scaled: bool
) -> Packed:
    n, d = points.shape
    width = packed_dimensions(d)
    halves = padded * (2 * width + (48 if columns else 32))
    buffer = torch.empty(halves, dtype=torch.float16, device=points.device)
    block = max(16, 2048 // width)
    shifts = weights.log if log_sums is None else log_sums
    arguments = (points, weights.log, shifts, buffer, n, padded, d, step)
    flags = (width, block, columns, merges(d), weights.vary, log_sums is not None, scaled)
    _copy(kernels.pack_kernel, -(-padded // block), arguments, flags)
    return Packed(buffer, n, padded)


def transpose(points: torch.Tensor, dtype: torch.dtype, padding: int = 1) -> torch.Tensor:
    """Return v = √(log2 e) u, (d, n), as the direct kernel reads it; padding columns lie far away."""
    n, d = points.shape
    v = torch.empty((d, -(-n // padding) * padding), dtype=dtype, device=points.device)
    v[:, :n] = points.T * _SQRT_LOG2E
    v[:, n:] = 1e153 if dtype == torch.float64 else 1e18
    return v


def configuration(kernel: str, problem: Problem, columns: int, processor: Processor) -> Config:
    """Return the tuned launch parameters of a kernel, or the default where none that suit it are known."""
    found = tuned(kernel, problem)
    if found is not None:
        try:
            config = Config.of(found.config)
        except (TypeError, ValueError) as error:
            _logger.warning("tuned configuration of %s ignored: %s", kernel, error)
        else:
            if fits(kernel, config, columns, processor.capability):
                return config
    return default(kernel, columns, processor.capability, merges(problem.d))


def _reduce(
    kernel: Any,
    config: Config,
    step: int,
    m: int,
    n: int,
    per_row: int,
    before: Any,
    after: Any,
    flags: Any,
    dtype: Any,
) -> tuple[torch.Tensor, int]:
    """Launch a reduction over all splits of the columns; return their results, ``per_row`` numbers each, and how many.

    The kernel's arguments are ``before``, the buffer of results, ``after``, and the columns of a split. A program takes
    ``step`` columns at a time.
    """
    device = before[0].device
    processor = Processor.of(device)
    flags = (*flags, config.block_m, config.block_n)
    if "STAGES" in kernel.arg_names:
        flags = (*flags, config.num_stages)
    # The buffer of another call stands for this one's, whose size depends on what the compiled kernel needs.
    compiled = _compile(kernel, (*before, before[0].view(dtype), *after, n), flags, config)
    slots = processor.multiprocessors * resident(compiled, config, processor)
    parts, length = splits(m, n, config.block_m, step, slots, most_parts(m, per_row * dtype.itemsize))
    out = torch.empty(parts * m * per_row, dtype=dtype, device=device)
    _launch(kernel, compiled, (-(-m // config.block_m), parts), (*before, out, *after, length), flags, config)
    return out, parts


def log_sum(problem: Problem, rows: Packed, columns: Packed, weights: Weights, form: int) -> Partial:
    """LOG_SUM or LAPLACE on Tensor Cores.

    Parameters
    ----------
    problem : Problem
    rows, columns : Packed
    weights : Weights
    form : int
        See :func:`sdkde_triton.bounds.form`.
    """
    width, m, n = packed_dimensions(problem.d), rows.count, columns.count
    laplace = problem.reduction is Reduction.LAPLACE
    config = configuration("triton.log_sum", problem, width, Processor.of(rows.buffer.device))
    before = (rows.buffer, columns.buffer, weights.log)
    after = (rows.padded, columns.padded, m, n, problem.d)
    flags = (width, form, merges(problem.d), laplace, weights.vary)
    out, parts = _reduce(
        kernels.log_sum_kernel, config, config.block_n, m, n, 3 if laplace else 2, before, after, flags, torch.float32
    )
    return _finish_log_sum(problem, out, weights, m, parts)


def _finish_log_sum(problem: Problem, partial: torch.Tensor, weights: Weights, m: int, parts: int) -> Partial:
    laplace = problem.reduction is Reduction.LAPLACE
    result = torch.empty((3, m) if laplace else m, dtype=torch.float64, device=partial.device)
    arguments = (partial, weights.log, result, m, parts, problem.d)
    _copy(finish.finish_log_sum_kernel, -(-m // 128), arguments, (laplace, weights.vary, 128))
    return Partial(result[0], None, result[1], result[2]) if laplace else Partial(result)


def mean(
    problem: Problem, rows: Packed, columns: Packed, weights: Weights, form: int, log_sums: torch.Tensor | None = None
) -> Partial:
    """MEAN on Tensor Cores; ``log_sums`` (m,) are what the rows were shifted by, if they were."""
    width, m, n = packed_dimensions(problem.d), rows.count, columns.count
    processor = Processor.of(rows.buffer.device)
    config = configuration("triton.mean", problem, width, processor)
    before, after = (rows.buffer, columns.buffer), (rows.padded, columns.padded, m, n, problem.d)
    summed = problem.d < width
    tiles = tiles_per_sum(width, form, merges(problem.d), processor.capability) if config.block_n <= 128 else 1
    flags = (width, form, merges(problem.d), summed, tiles)
    per_row, step = width if summed else width + 1, tiles * config.block_n
    out, parts = _reduce(kernels.mean_kernel, config, step, m, n, per_row, before, after, flags, torch.float32)
    return _finish_mean(problem, out, rows.buffer, rows.padded, weights, log_sums, m, parts, False)


def _finish_mean(
    problem: Problem,
    partial: torch.Tensor,
    rows: torch.Tensor,
    padded: int,
    weights: Weights,
    log_sums: torch.Tensor | None,
    m: int,
    parts: int,
    direct: bool,
) -> Partial:
    d, width = problem.d, packed_dimensions(problem.d)
    shift = torch.empty((m, d), dtype=torch.float64, device=rows.device)
    result = torch.empty(m, dtype=torch.float64, device=rows.device)
    block = max(1, 512 // width)
    given = result if log_sums is None else log_sums
    arguments = (partial, rows, weights.log, given, result, shift, padded, m, parts, d)
    flags = (width, direct, not direct and d < width, log_sums is not None, weights.vary, block)
    _copy(finish.finish_mean_kernel, -(-m // block), arguments, flags)
    return Partial(result, shift)


def direct(problem: Problem, rows: torch.Tensor, columns: torch.Tensor, weights: Weights) -> Partial:
    """Any reduction by direct differences of transposed points, rows (d, m) and padded columns (d, ≥ n)."""
    d, m, n = problem.d, rows.shape[1], weights.log.shape[0]
    laplace, mean = problem.reduction is Reduction.LAPLACE, problem.reduction is Reduction.MEAN
    anchored = mean and problem.same and not weights.vary and columns.dtype == torch.float32
    name = "triton.direct_mean" if anchored else "triton.direct"
    config = configuration(name, problem, d, Processor.of(rows.device))
    before, after = (rows, columns, weights.log), (m, n, columns.shape[1])
    flags = (d, laplace, mean, weights.vary, anchored)
    per_row = 2 + (d if mean else laplace)
    out, parts = _reduce(direct_kernel, config, config.block_n, m, n, per_row, before, after, flags, columns.dtype)
    if mean:
        return _finish_mean(problem, out, rows, 0, weights, None, m, parts, True)
    return _finish_log_sum(problem, out, weights, m, parts)
