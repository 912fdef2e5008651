"""Host side of the kernels: buffers, packing, configurations and launches."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from triton.runtime.interpreter import InterpretedFunction

from sdkde_core.protocol import Partial, Problem, Reduction
from sdkde_core.tuning import tuned

from . import kernels
from .bounds import packed_dimensions
from .grid import Processor, resident, splits
from .space import COLUMN_PADDING, Config, default, fits

__all__ = ["INTERPRETED", "Packed", "Weights", "direct", "log_sum", "mean", "pack", "pack_rows", "transpose"]

#: Compilation of the kernels that only copy.
PLAIN = {"num_warps": 4, "enable_fp_fusion": True}

#: Whether kernels run in Triton's interpreter, on the CPU.
INTERPRETED = isinstance(kernels.mean_kernel, InterpretedFunction)

_SQRT_LOG2E = math.sqrt(math.log2(math.e))


@dataclass(frozen=True)
class Packed:
    """Packed operands: hi and lo (count, D), the constants, and how many of them are points."""

    hi: torch.Tensor
    lo: torch.Tensor
    constants: torch.Tensor
    count: int

    def __getitem__(self, rows: slice) -> Packed:
        """A range of them."""
        return Packed(self.hi[rows], self.lo[rows], self.constants[rows], rows.stop - rows.start)


@dataclass(frozen=True)
class Weights:
    """The columns' log weights (n,), float64, and whether they vary."""

    log: torch.Tensor
    vary: bool


def pack(points: torch.Tensor, step: float, weights: Weights) -> Packed:
    """Pack float64 points (n, d) as columns of the first product; see :mod:`sdkde_triton.kernels`."""
    padded = -(-points.shape[0] // COLUMN_PADDING) * COLUMN_PADDING
    return _pack(points, step, padded, weights, None, ROWS=False, WEIGHTED=weights.vary, UNIFORM=False, SCALED=False)


def pack_rows(
    points: torch.Tensor, step: float, weights: Weights, *, scaled: bool = False, log_sums: torch.Tensor | None = None
) -> Packed:
    """Pack float64 points (m, d) as rows, shifted by their log sums (m,) over columns with ``weights``, if given."""
    m = points.shape[0]
    return _pack(points, step, m, weights, log_sums, ROWS=True, WEIGHTED=False, UNIFORM=not weights.vary, SCALED=scaled)


def _pack(
    points: torch.Tensor, step: float, padded: int, weights: Weights, log_sums: torch.Tensor | None, **flags: bool
) -> Packed:
    n, d = points.shape
    columns = packed_dimensions(d)
    hi, lo = torch.empty((2, padded, columns), dtype=torch.float16, device=points.device).unbind()
    constants = torch.empty((padded, 32 if flags["ROWS"] else 16), dtype=torch.float16, device=points.device)
    block = max(16, 2048 // columns)
    kernels.pack_kernel[(-(-padded // block),)](
        points, weights.log, weights.log if log_sums is None else log_sums, hi, lo, constants, n, padded, d, step,
        D=columns, BLOCK=block, SHIFTED=log_sums is not None, **flags, **PLAIN,
    )  # fmt: skip
    return Packed(hi, lo, constants, n)


def transpose(points: torch.Tensor, dtype: torch.dtype, padding: int = 1) -> torch.Tensor:
    """Return v = √(log2 e) u, (d, n), as the direct kernel reads it; padding columns lie far away."""
    n, d = points.shape
    v = torch.empty((d, -(-n // padding) * padding), dtype=dtype, device=points.device)
    v[:, :n] = points.T * _SQRT_LOG2E
    v[:, n:] = 1e153 if dtype == torch.float64 else 1e18
    return v


def configuration(kernel: str, problem: Problem, columns: int, processor: Processor) -> Config:
    """Return the tuned launch parameters of a kernel, or the default where none that fit are known."""
    found = tuned(kernel, problem)
    if found is not None:
        config = Config.of(found.config)
        if fits(kernel, config, columns, processor.capability):
            return config
    return default(kernel, columns, processor.capability)


#: Programs that a multiprocessor holds, by kernel, flags, configuration and processor.
_resident: dict[Any, int] = {}


def _grid(
    kernel: Any, config: Config, processor: Processor, m: int, n: int, arguments: Any, flags: dict[str, Any]
) -> tuple[int, int]:
    """Split the columns for a launch: their parts, and the columns of each."""
    key = (kernel.__name__, tuple(flags.values()), config, processor)
    if key not in _resident:
        compiled = None
        if not INTERPRETED:
            compiled = kernel.warmup(*arguments(1, n), grid=(1,), **flags, **config.options)
            compiled._init_handles()  # loads it, which tells its registers
        _resident[key] = resident(compiled, config, processor)
    return splits(m, n, config, processor.multiprocessors * _resident[key])


def log_sum(problem: Problem, rows: Packed, columns: Packed, weights: Weights, long: bool) -> Partial:
    """LOG_SUM or LAPLACE on Tensor Cores.

    Parameters
    ----------
    problem : Problem
    rows, columns : Packed
    weights : Weights
    long : bool
        See :func:`sdkde_triton.bounds.needs_long`.
    """
    device, width, m, n = rows.hi.device, rows.hi.shape[1], rows.count, columns.count
    laplace = problem.reduction is Reduction.LAPLACE
    processor = Processor.of(device)
    config = configuration("triton.log_sum", problem, width, processor)
    flags = {
        "D": width, "LONG": long, "LAPLACE": laplace, "WEIGHTED": weights.vary,
        "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "STAGES": config.num_stages,
    }  # fmt: skip

    def arguments(parts: int, length: int) -> tuple[Any, ...]:
        partial = torch.empty((3, parts, m), dtype=torch.float32, device=device).unbind()
        row = (rows.hi, rows.lo, rows.constants)
        return *row, columns.hi, columns.lo, columns.constants, weights.log, *partial, m, n, length

    parts, length = _grid(kernels.log_sum_kernel, config, processor, m, n, arguments, flags)
    grid = (-(-m // config.block_m), parts)
    given = arguments(parts, length)
    kernels.log_sum_kernel[grid](*given, **flags, **config.options)
    return _finish_log_sum(problem, given[7:10], weights, m, parts)


def _finish_log_sum(problem: Problem, partial: Any, weights: Weights, m: int, parts: int) -> Partial:
    laplace = problem.reduction is Reduction.LAPLACE
    result = torch.empty((3 if laplace else 1, m), dtype=torch.float64, device=partial[0].device)
    log_sum, sign, size = result.unbind() if laplace else (result[0],) * 3
    kernels.finish_log_sum_kernel[(-(-m // 128),)](
        *partial, weights.log, log_sum, sign, size, m, parts, problem.d,
        LAPLACE=laplace, WEIGHTED=weights.vary, BLOCK=128, **PLAIN,
    )  # fmt: skip
    return Partial(log_sum, None, sign, size) if laplace else Partial(log_sum)


def mean(
    problem: Problem, rows: Packed, columns: Packed, weights: Weights, long: bool, log_sums: torch.Tensor | None = None
) -> Partial:
    """MEAN on Tensor Cores; ``log_sums`` (m,) are what the rows were shifted by, if they were."""
    device, width, m, n = rows.hi.device, rows.hi.shape[1], rows.count, columns.count
    processor = Processor.of(device)
    config = configuration("triton.mean", problem, width, processor)
    flags = {
        "D": width, "LONG": long,
        "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "STAGES": config.num_stages,
    }  # fmt: skip

    def arguments(parts: int, length: int) -> tuple[Any, ...]:
        totals = torch.empty((parts, m), dtype=torch.float32, device=device)
        means = torch.empty((parts, m, width), dtype=torch.float32, device=device)
        row = (rows.hi, rows.lo, rows.constants)
        return *row, columns.hi, columns.lo, columns.constants, totals, means, m, n, length

    parts, length = _grid(kernels.mean_kernel, config, processor, m, n, arguments, flags)
    grid = (-(-m // config.block_m), parts)
    given = arguments(parts, length)
    kernels.mean_kernel[grid](*given, **flags, **config.options)
    partial = (given[6], *given[6:8])  # no maxima
    return _finish_mean(problem, partial, rows.hi, rows.lo, weights, log_sums, m, parts, DIRECT=False)


def _finish_mean(
    problem: Problem, partial: Any, hi: Any, lo: Any, weights: Weights, log_sums: Any, m: int, parts: int, DIRECT: bool
) -> Partial:
    d, width = problem.d, packed_dimensions(problem.d)
    shift = torch.empty((m, d), dtype=torch.float64, device=hi.device)
    result = torch.empty(m, dtype=torch.float64, device=hi.device)
    block = max(1, 512 // width)
    kernels.finish_mean_kernel[(-(-m // block),)](
        *partial, hi, lo, weights.log, result if log_sums is None else log_sums, result, shift, m, parts, d,
        D=width, DIRECT=DIRECT, SHIFTED=log_sums is not None, WEIGHTED=weights.vary, BLOCK=block, **PLAIN,
    )  # fmt: skip
    return Partial(result, shift)


def direct(problem: Problem, rows: torch.Tensor, columns: torch.Tensor, weights: Weights) -> Partial:
    """Any reduction by direct differences of transposed points, rows (d, m) and padded columns (d, ≥ n)."""
    device, d, m, n = columns.device, problem.d, rows.shape[1], weights.log.shape[0]
    laplace, mean = problem.reduction is Reduction.LAPLACE, problem.reduction is Reduction.MEAN
    anchored = mean and problem.same and not weights.vary and columns.dtype == torch.float32
    processor = Processor.of(device)
    config = configuration("triton.direct_mean" if anchored else "triton.direct", problem, d, processor)
    flags = {
        "D": d, "LAPLACE": laplace, "MEAN": mean, "WEIGHTED": weights.vary, "ANCHORED": anchored,
        "BLOCK_M": config.block_m, "BLOCK_N": config.block_n,
    }  # fmt: skip

    def arguments(parts: int, length: int) -> tuple[Any, ...]:
        tops, totals = torch.empty((2, parts, m), dtype=columns.dtype, device=device).unbind()
        more = torch.empty((parts, d if mean else 1, m), dtype=columns.dtype, device=device)
        partial = (tops, totals, more)
        return rows, columns, weights.log, *partial, m, n, columns.shape[1], length

    parts, length = _grid(kernels.direct_kernel, config, processor, m, n, arguments, flags)
    grid = (-(-m // config.block_m), parts)
    given = arguments(parts, length)
    kernels.direct_kernel[grid](*given, **flags, **config.options)
    partial = given[3:6]
    if mean:
        return _finish_mean(problem, partial, rows, rows, weights, None, m, parts, DIRECT=True)
    return _finish_log_sum(problem, partial, weights, m, parts)
