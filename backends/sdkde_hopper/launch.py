"""Host side of the kernels: buffers, and which kernels make a reduction."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from sdkde_core.plugin import PerStream, Slots, grids
from sdkde_core.protocol import Partial, Problem, Reduction, Whitened

from . import plan
from .bounds import RAISED_BITS, SCALE_BITS
from .compiled import Kernel, kernel, load, module_name

Range: TypeAlias = tuple[int, int]

_slots = Slots()

#: With it the density is returned instead of log sums: the constant, whether the log is wanted, and the dtype.
End: TypeAlias = tuple[float, bool, torch.dtype] | None


def _room(device: torch.device, *sizes: int) -> tuple[Tensor, list[int]]:
    """Return memory for arrays of these sizes in bytes, and their addresses: making a tensor takes a launch's time."""
    offsets = [0, *itertools.accumulate(-(-size // 256) * 256 for size in sizes)]
    memory = torch.empty(offsets.pop(), dtype=torch.uint8, device=device)
    begin = memory.data_ptr()
    return memory, [begin + offset for offset in offsets]


@dataclass(frozen=True)
class Packed:
    """Addresses of points cut into pieces, as rows, as columns or both; see ``pack_points`` in ``device/pack.cu``.

    ``top`` has the largest log weight, by whose weight all are divided; ``logs``: log weights to base two; ``bytes``:
    φ's other factor in the columns' sums at "fast".
    """

    count: int
    width: int
    precision: str
    memory: Tensor
    rows: int
    tiles: int
    logs: int
    bytes: int
    top: Tensor | None = None

    @property
    def kind(self) -> plan.Kind:
        return self.precision, self.width

    @property
    def sums(self) -> int:
        """Numbers of a partial sum by symmetry: Σφv in ``width`` dimensions, Σφ, and three that are free."""
        return self.width + 4

    @property
    def padded(self) -> int:
        """The number of points, filled up to whole supers."""
        return -(-self.count // plan.COLUMNS) * plan.COLUMNS


def whiten(given: tuple[Tensor, ...], scale: Any, centre: Any, weights: Any) -> Whitened:
    """See :class:`sdkde_core.protocol.LineBackend`."""
    first, second = given[0], given[1] if len(given) > 1 else None
    (n, d), m, device = first.shape, 0 if second is None else second.shape[0], first.device
    single = int(first.dtype == torch.float32)
    load_for(d, "fast" if single else "high", weights is not None)  # as a rule
    if centre is None:
        centre, stride = torch.empty(d, dtype=torch.float64, device=device), max(1, n // 256)
        kernel("pack", "find_centre", 512)(d, first, single, -(-n // stride), stride, d, centre)
    points = [torch.empty(x.shape, dtype=torch.float64, device=device) for x in given]
    programs, weighed, log_weights = -(-n // 128) - (-m // 128), int(weights is not None), None
    (slots, time), factor = _slots.ready(programs, first, weighed), scale if isinstance(scale, float) else 0.0
    if weights is not None:
        log_weights = torch.empty(n, dtype=torch.float64, device=device)
        of_weights = weights, int(weights.dtype == torch.float32), n, log_weights, slots.data_ptr() + 8 * programs
        kernel("pack", "weigh", 1024)(1, *of_weights)
    by = None if isinstance(scale, float) else scale
    end = int(by is not None and by.ndim == 2), centre, points[0], points[1] if m else None, slots
    kernel("pack", "whiten", 256)(programs, first, second, single, n, m, d, factor, by, *end)
    read = functools.partial(_slots.largest, programs, device, time, weighed)
    return Whitened(tuple(points), read, log_weights)


@functools.cache
def load_for(d: int, precision: str, weighted: bool) -> None:
    """Load the modules of an estimate in d dimensions."""
    width = plan.width(d)
    mean = module_name("dense", width, weighted, precision)
    if d <= 16 and not weighted:
        mean = module_name("mean", plan.width(d, plan.MEAN_WIDTHS), False, precision)
    load("pack", mean, module_name("log_sum", width, weighted, precision), *["exact"] * weighted)


def pack(
    points: Tensor, step: float, problem: Problem, columns: bool, log_weights: Tensor | None, symmetric: bool = False
) -> Packed:
    """Pack float64 points (n, d), on a grid of that step, for the ``symmetric`` kernel or for others.

    Points are packed as rows, or as columns, which for MEAN are rows too. Columns have log weights if these differ.
    """
    (n, d), mean, weighted = points.shape, problem.reduction is Reduction.MEAN, log_weights is not None
    high = problem.precision == "high"
    shares, width = symmetric and not high, plan.width(d, plan.MEAN_WIDTHS if symmetric else plan.WIDTHS)
    padded = -(-n // 3072) * 3072  # of supers, and of a program's rows, 192 or 256
    point, copies = plan.point_bytes(width, problem.precision), 1 + ((mean and weighted) or shares)
    # Rows of a range begin anywhere: the last program's reach beyond the padding.
    rows = (padded + plan.ROWS) * point if mean or not columns else 0
    logs = 4 * padded if weighted and not mean else 0
    sizes = rows, copies * padded * point * columns, logs, (2 * width + 8) * padded * shares
    memory, found = _room(points.device, *sizes)
    at, tiles, logs, in_bytes = (address if size else 0 for address, size in zip(found, sizes))
    top = None
    if log_weights is not None:
        top = torch.empty(1, dtype=torch.float64, device=points.device)
        kernel("pack", "find_largest", 1024)(1, log_weights, n, top)
    raised = float((SCALE_BITS if mean else RAISED_BITS)[problem.precision])
    offsets = (0.0, raised) if high and not mean else (raised, 0.0)
    given = points, log_weights, top, n, padded, d, width, step, *offsets
    kernel("pack", "pack_points", 256)(padded // 16, *given, at, tiles, logs, in_bytes, copies - 1, int(high))
    return Packed(n, width, problem.precision, memory, at, tiles, logs, in_bytes, top)


def log_sum(
    problem: Problem, points: Tensor, step: float, whole: int, columns: Packed, log_weights: Tensor, end: End
) -> Any:
    """LOG_SUM or LAPLACE of some of ``whole`` rows; that number decides how the columns are split into parts."""
    rows, device, width = pack(points, step, problem, False, None), points.device, columns.width
    m, tiles, laplace = rows.count, -(-columns.count // 64), problem.reduction is Reduction.LAPLACE
    groups = plan.warpgroups(width, problem.precision, mean=False)
    height, longest = 64 * groups, plan.LONGEST[problem.precision]
    length = min(plan.parts(-(-whole // height), tiles, _programs(device))[1], longest)
    parts, blocks = -(-tiles // length), -(-m // height)
    out = torch.empty(parts * m * 3, dtype=torch.float32, device=device)
    constant, log, dtype = end or (0.0, False, torch.float64)
    result = torch.empty((3, m) if laplace and not end else m, dtype=dtype, device=device)
    name = module_name(problem.reduction.value, width, columns.top is not None, problem.precision)
    reduce = kernel(name, "log_sum", 128 * (groups + 1), plan.ring(width, problem.precision, False).shared)
    reduce(blocks * parts, rows.rows, columns.tiles, columns.logs, out, m, tiles, length)
    top = log_weights if columns.top is None else columns.top
    log_sums, sign, magnitude = (result[0], result[1], result[2]) if result.ndim == 2 else (result, None, None)
    single = result if dtype == torch.float32 else None
    more = float(RAISED_BITS[problem.precision]), constant, (1 if log else 2) if end else 0, single
    finish = kernel("pack", "finish_log_sum", 128)
    finish(-(-m // 128), out, top, m, problem.d, parts, int(laplace), log_sums, sign, magnitude, *more)
    return result if end else Partial(log_sums, None, sign, magnitude)


def dense_mean(packed: Packed, points: Tensor, log_weights: Tensor, rows: Range, columns: Range) -> Partial:
    """MEAN of a range of the points over another, every φ for its row alone.

    Columns start with a tile, and end with one or the points.
    """
    (start, stop), d, device, width = columns, points.shape[1], points.device, packed.width
    groups, weighted = plan.warpgroups(width, packed.precision), packed.top is not None
    n, height = rows[1] - rows[0], groups * 64
    blocks, tiles, programs = -(-n // height), -(-(stop - start) // 64), _programs(device)
    parts, length = plan.parts(blocks, tiles, programs)
    high = packed.precision == "high"
    size = plan.point_bytes(width, packed.precision)
    row_pieces, column_pieces = packed.rows + rows[0] * size, packed.tiles + start * size * (1 + weighted)
    out = torch.empty(parts * blocks * height * (width + 4), dtype=torch.float64, device=device)
    name = module_name("dense", width, weighted, packed.precision)
    reduce = kernel(name, "mean_dense", 128 * (groups + 1), plan.ring(width, packed.precision, True, weighted).shared)
    own = rows[0] - start
    listed = torch.empty(n + 1, dtype=torch.int32, device=device) if weighted else None
    reduce(blocks * parts, row_pieces, column_pieces, out, blocks, tiles, length, own, listed)
    log_sum, shift = _results(n, d, device)
    given = out, parts, blocks * height, width, row_pieces, log_weights[start:], packed.top, n, d, log_sum, shift
    raised, more = float(SCALE_BITS[packed.precision]), 4.0 if high else 1.0
    end = listed, raised, more, int(high), own, stop - start if high else 0
    kernel("pack", "finish_dense", 256)(-(-n // 8), *given, *end)
    if listed is not None:
        # 128 columns in up to 64 dimensions, padded by one number each.
        exact = kernel("exact", "mean_exact", 128, 128 * 65 * 8)
        over = points[start:stop], log_weights[start:stop], stop - start
        exact(4 * programs, points[rows[0] :], *over, d, listed, log_sum, shift)
    return Partial(log_sum, shift)


def _results(n: int, d: int, device: torch.device) -> tuple[Tensor, Tensor]:
    new = functools.partial(torch.empty, dtype=torch.float64, device=device)
    return new(n), new((n, d))


def _programs(device: torch.device) -> int:
    """How many programs run at a time, each on a multiprocessor of its own."""
    return grids.Card.of(device).multiprocessors


_tables = PerStream()


def _on_device(tables: plan.Tables, like: Tensor) -> tuple[Tensor, ...]:
    """Units and their beginnings, then the lists of partial sums, on a tensor's device."""
    parts = tables.units, tables.begins, *tables.lists
    return _tables.get((tables, like.device), lambda: tuple(torch.from_numpy(x).to(like.device) for x in parts), like)


def moved(points: Tensor, shift: Tensor) -> Tensor:
    """Return the points plus half their shift, (n, d) each."""
    out = torch.empty_like(points)
    kernel("pack", "move_points", 256)(-(-points.numel() // 256), points, shift, points.numel(), out)
    return out


def symmetric_mean(points: Packed, d: int, log_weights: Tensor) -> Partial:
    """MEAN of the points themselves, every φ for its row and its column; all log weights (n,) are equal."""
    device = points.memory.device
    supers, blocks, programs = points.padded // plan.COLUMNS, points.padded // plan.ROWS, _programs(device)
    launches = plan.launches(supers, programs, points.kind)
    units, slots = max(len(x.units) for _, x in launches), max(x.slots for _, x in launches)
    carried = 8 * points.padded * points.sums if len(launches) > 1 else 0
    sizes = 4 * units * plan.ROWS * points.sums, 4 * slots * plan.COLUMNS * points.sums, carried
    memory, (out_rows, out_columns, sums) = _room(device, *sizes)
    log_sum, shift = _results(points.count, d, device)
    own = 2.0 ** SCALE_BITS["high"] if points.precision == "high" else 0.0
    end = points.rows, log_weights, points.count, d, own, log_sum, shift
    reduce, merge = _symmetric_kernels(points)
    for i, (first, tables) in enumerate(launches):
        table, circle = _on_device(tables, log_weights), (first * (plan.COLUMNS // plan.ROWS), first, blocks, supers)
        reduce(programs, points.rows, points.tiles, points.bytes, *table[:2], out_rows, out_columns, *circle)
        when = int(i == 0), int(i == len(launches) - 1)
        merge(points.padded // 32, out_rows, out_columns, *table[2:], *circle, sums, *when, *end)
    del memory  # the launches are queued
    return Partial(log_sum, shift)


def _symmetric_kernels(points: Packed) -> tuple[Kernel, Kernel]:
    """The kernels that make partial sums and that merge them: 32 rows a program, a thread for four numbers."""
    module = module_name("mean", points.width, False, points.precision)
    reduce = kernel(module, "mean_symmetric", 640, plan.MEAN_SHARED[points.kind])
    return reduce, kernel(module, "merge", 8 * points.sums)


def symmetric_pair(points: Packed, d: int, log_weights: Tensor, rows: Range, columns: Range) -> tuple[Partial, Partial]:
    """MEAN of two ranges of the points, each over the other; they begin with supers, and end with one or the points."""
    if rows == columns:
        own = symmetric_mean(_some(points, rows), d, log_weights)
        return own, own
    device = points.memory.device
    here, programs = _some(points, rows), _programs(device)
    blocks = -(-here.count // plan.ROWS)
    new = functools.partial(torch.empty, device=device)
    results = [_results(b - a, d, device) for a, b in (rows, columns)]
    most = max(1, plan.MOST_UNITS // blocks) * plan.COLUMNS  # columns at a time
    starts = range(columns[0], columns[1], most)
    sums = new(here.padded * here.sums if len(starts) > 1 else 0, dtype=torch.float64)
    reduce, merge = _symmetric_kernels(here)
    none = torch.zeros(max(here.padded, most) // plan.ROWS + 1, dtype=torch.int32, device=device)
    for start in starts:
        there = _some(points, (start, min(start + most, columns[1])))
        table = plan.rectangle(blocks, there.padded // plan.COLUMNS, programs, here.kind)
        units, begins, *lists = _on_device(table, log_weights)
        out_rows = new(len(units) * plan.ROWS * here.sums, dtype=torch.float32)
        out_columns = new(table.slots * plan.COLUMNS * here.sums, dtype=torch.float32)
        given = points.rows, points.tiles, points.bytes, units, begins, out_rows, out_columns
        offsets = rows[0] // plan.ROWS, start // plan.COLUMNS
        reduce(programs, *given, *offsets, points.padded // plan.ROWS, points.padded // plan.COLUMNS)
        for side, of_side, result, when in (
            (here, (*lists[:2], none, none), results[0], (int(start == starts[0]), int(start == starts[-1]))),
            (there, (none, none, *lists[2:]), [x[start - columns[0] :] for x in results[1]], (1, 1)),
        ):
            circle = 0, 0, side.padded // plan.ROWS, side.padded // plan.COLUMNS
            end = side.rows, log_weights, side.count, d, 0.0, *result
            merge(-(-side.count // 32), out_rows, out_columns, *of_side, *circle, sums, *when, *end)
    return Partial(*results[0]), Partial(*results[1])


def _some(points: Packed, which: Range) -> Packed:
    start, stop = which
    size, copies = start * plan.point_bytes(points.width, points.precision), 1 if points.precision == "high" else 2
    rows, tiles, in_bytes = points.rows + size, points.tiles + size * copies, start * (2 * points.width + 8)
    return replace(points, count=stop - start, rows=rows, tiles=tiles, bytes=points.bytes + in_bytes)
