"""Host side of the kernels: buffers, and which kernels make a reduction."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from sdkde_core.protocol import Partial, Reduction

from . import plan
from .bounds import RAISED_BITS, SCALE_BITS
from .compiled import kernel

__all__ = ["Packed", "log_sum", "mean", "pack", "pack_rows"]

#: Numbers of a partial sum: Σφv in sixteen dimensions, Σφ, and three that are free.
SUMS = 20

#: Bytes of a tile of 64 columns: what the exponents need, and with what φ is multiplied by.
EXPONENT_BYTES, TILE_BYTES = 64 * 48 * 2, 64 * (48 + 40) * 2


@dataclass(frozen=True)
class Packed:
    """Points in pieces, padded to whole supers; see ``device/pack.cu``. For LOG_SUM they are ``tiles`` alone."""

    count: int
    padded: int
    tiles: torch.Tensor
    rows: torch.Tensor | None = None
    bytes: torch.Tensor | None = None

    def tensors(self) -> list[torch.Tensor]:
        """Return the buffers."""
        return [x for x in (self.tiles, self.rows, self.bytes) if x is not None]


def pack(points: torch.Tensor, step: float, reduction: Reduction) -> Packed:
    """Pack float64 points (n, d) as columns, and for MEAN as its rows.

    Parameters
    ----------
    points : (n, d) float64 tensor
    step : float
        See :func:`sdkde_hopper.bounds.grid_step`.
    reduction : Reduction
        LOG_SUM or MEAN.
    """
    n, d = points.shape
    padded = -(-n // plan.COLUMNS) * plan.COLUMNS
    mean = reduction is Reduction.MEAN
    new = functools.partial(torch.empty, dtype=torch.uint8, device=points.device)
    tiles = new(padded // 64 * (TILE_BYTES if mean else EXPONENT_BYTES))
    rows, in_bytes = (new(padded * 96), new(padded * 40)) if mean else (None, None)
    kernel("pack", "pack", 256)(padded // 16, points, n, padded, d, step, float(SCALE_BITS), rows, tiles, in_bytes)
    return Packed(n, padded, tiles, rows, in_bytes)


def pack_rows(points: torch.Tensor, step: float) -> torch.Tensor:
    """Pack float64 points (m, d) as rows of LOG_SUM, in whole blocks."""
    m, d = points.shape
    padded = -(-m // plan.ROWS) * plan.ROWS
    rows = torch.empty(padded * 96, dtype=torch.uint8, device=points.device)
    kernel("pack", "pack", 256)(padded // 16, points, m, padded, d, step, float(RAISED_BITS), rows, None, None)
    return rows


def log_sum(rows: torch.Tensor, m: int, whole: int, columns: Packed, log_weights: torch.Tensor) -> Partial:
    """LOG_SUM of m rows from :func:`pack_rows`, of ``whole`` in all; all log weights (n,) are equal."""
    device = rows.device
    tiles, blocks = -(-columns.count // 64), -(-m // plan.ROWS)
    parts = plan.parts(-(-whole // plan.ROWS), tiles, _programs(device))
    length = -(-tiles // parts)
    parts = -(-tiles // length)
    out = torch.empty(parts * m * 2, dtype=torch.float32, device=device)
    result = torch.empty(m, dtype=torch.float64, device=device)
    reduce = kernel("log_sum", "log_sum", 544, plan.LOG_SUM_SHARED)
    reduce(blocks * parts, rows, columns.tiles, out, m, tiles, length)
    kernel("pack", "finish_log_sum", 128)(-(-m // 128), out, log_weights, m, parts, result)
    return Partial(result)


def _programs(device: torch.device) -> int:
    """How many programs run at a time, each on a multiprocessor of its own."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@dataclass(frozen=True)
class _Tables:
    """:class:`sdkde_hopper.plan.Tables` on a device."""

    units: torch.Tensor
    begins: torch.Tensor
    lists: tuple[torch.Tensor, ...]
    count: int
    slots: int


#: Tables by the plan's and the device. They stay: a recorded CUDA graph may read them again.
_tables: dict[tuple[int, int], tuple[plan.Tables, _Tables]] = {}


def _on_device(tables: plan.Tables, device: torch.device) -> _Tables:
    key = id(tables), device.index or 0
    if key not in _tables:
        arrays = tables.row_begin, tables.row_units, tables.column_begin, tables.column_slots
        units, begins, *lists = (torch.from_numpy(x).to(device) for x in (tables.units, tables.begins, *arrays))
        torch.cuda.current_stream(device).synchronize()  # other streams find them there
        _tables[key] = tables, _Tables(units, begins, tuple(lists), len(tables.units), tables.slots)
    return _tables[key][1]


def mean(points: Packed, d: int, log_weights: torch.Tensor) -> Partial:
    """MEAN of the points themselves; all log weights (n,) are equal."""
    device = points.tiles.device
    supers, blocks = points.padded // plan.COLUMNS, points.padded // plan.ROWS
    programs = _programs(device)
    launches = plan.launches(supers, programs)
    tables = [_on_device(x.tables, device) for x in launches]
    n = points.count
    log_sum = torch.empty(n, dtype=torch.float64, device=device)
    shift = torch.empty((n, d), dtype=torch.float64, device=device)
    sums = torch.empty(points.padded * SUMS if len(launches) > 1 else 0, dtype=torch.float64, device=device)
    most_units, most_slots = max(x.count for x in tables), max(x.slots for x in tables)
    out_rows = torch.empty(most_units * plan.ROWS * SUMS, dtype=torch.float32, device=device)
    out_columns = torch.empty(most_slots * plan.COLUMNS * SUMS, dtype=torch.float32, device=device)
    reduce, merge = kernel("mean", "mean_symmetric", 640, plan.MEAN_SHARED), kernel("pack", "merge", 160)
    for i, (part, table) in enumerate(zip(launches, tables, strict=True)):
        circle = part.first * (plan.COLUMNS // plan.ROWS), part.first, blocks, supers
        given = points.rows, points.tiles, points.bytes, table.units, table.begins
        reduce(programs, *given, out_rows, out_columns, *circle)
        when = int(i == 0), int(i == len(launches) - 1)
        end = points.rows, log_weights, n, d, log_sum, shift
        merge(points.padded // 32, out_rows, out_columns, *table.lists, *circle, sums, *when, *end)
    return Partial(log_sum, shift)
