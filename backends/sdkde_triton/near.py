"""Leaves of columns that cannot matter are left out: points in order, lists, and the kernels that go through them.

Which can matter is bounded as in :mod:`sdkde_core.nearby`, but for one thing: what a row's sum is at least is summed,
over the leaves next to its tile, instead of bounded by Jensen's inequality. On a GPU that costs next to nothing, and
is much closer to the whole sum.

Several groups of columns, each with rows of its own, are summed at once in the same way: they stand one after another,
each filled up to whole SIZEs, and so do the tiles of their rows, and the list of a tile names all leaves of its group.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray

from sdkde_core.nearby import by_tile, order
from sdkde_core.plugin import PerStream, concatenate, each
from sdkde_core.protocol import TOLERANCES, Columns, Partial, Problem, Reduction

from . import choose, launch
from .bounds import Form, merges, packed_dimensions, scales, shifts_rows, steps_at_most
from .compiled import Launch, card
from .info import left_out
from .kernels import SCALE_BITS
from .launch import MOST_PARTS, PARTIAL_BYTES, Packed
from .space import HEIGHT, LEAF, LISTED, Config, default


class _Amounts(NamedTuple):
    beside: int = 128  # leaves next to a tile of rows over which a row's sum is bounded from below
    entries: int = 1 << 26  # leaves in lists that exist at once
    visited: int = 1 << 26  # nodes that tiles of rows visit at once
    shortest: int = 64  # SIZEs of columns that one program takes, at least
    longest: int = 512  # at most, in MEAN, which sums what it rounds off
    programs: int = 64  # that there are to be for every multiprocessor


AMOUNTS = _Amounts()


class Near(NamedTuple):
    """Columns in the ``order`` that follows; ``leaves`` and ``nodes`` as :mod:`sdkde_triton.choose` has them."""

    order: torch.Tensor | None  # None: they came so, and so do rows
    points: torch.Tensor
    log_weights: torch.Tensor
    leaves: torch.Tensor
    nodes: torch.Tensor
    log_weight: float


class Lists(NamedTuple):
    """The leaves that tiles of rows from the ``first`` on take, in parts of ``length``."""

    leaves: torch.Tensor  # int32
    ends: torch.Tensor  # int32
    which: torch.Tensor  # int32, tiles, the longest list first
    first: int
    length: int
    parts: int


def order_columns(points: torch.Tensor, log_weights: torch.Tensor, ordered: bool) -> Near | None:
    """Return the columns in order; None where a coordinate or weight is not finite. ``ordered``: as they are."""
    if not bool(torch.isfinite(points.sum() + log_weights.sum())):
        return None
    where = None if ordered else order(points, LEAF)
    if where is not None:
        points, log_weights = points[where], log_weights[where]
    leaves = _boxes(points, log_weights, LEAF)
    nodes = _boxes(points, log_weights, LEAF * choose.WIDE.value)
    total = float(torch.logsumexp(log_weights, 0))
    return Near(where, points, log_weights, leaves, nodes, total)


def _ends(points: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Boxes of ``size`` consecutive points, fp32, rounded outwards, (tiles, d) each."""
    low, high = by_tile(points, size).aminmax(dim=1)
    infinity = torch.tensor(math.inf, dtype=torch.float32, device=points.device)
    return torch.nextafter(low.float(), -infinity), torch.nextafter(high.float(), infinity)


def _boxes(points: torch.Tensor, log_weights: torch.Tensor, size: int) -> torch.Tensor:
    low, high = _ends(points, size)
    padded = torch.nn.functional.pad(log_weights, (0, -len(points) % size), value=-math.inf)
    logs = padded.reshape(-1, size).logsumexp(1)
    return torch.cat([low.T, high.T, logs.float()[None]]).contiguous()


def reduce(
    problem: Problem, points: torch.Tensor | None, near: Near, columns: Packed, step: float, form: int, most: float
) -> Partial | None:
    """Reduce rows (m, d), or all columns as they came, over the columns that can matter to them.

    ``columns`` are packed in order, with a leaf of padding. Results are in the order of the rows as they came; None
    where a coordinate is not finite, or more than a share ``most`` of the pairs is left.
    """
    if points is None:
        where, rows = near.order, near.points
    elif not bool(torch.isfinite(points.sum())):
        return None
    else:
        where = None if near.order is None else order(points, HEIGHT)
        rows = points if where is None else points[where]
    packed = columns  # these themselves, where they are the rows
    if rows is not near.points:
        packed = launch.pack(problem, rows, step, near.log_weights, columns.pieces, raised=columns.raised)
    way = Pass(problem, near, columns, step, form)
    tiles, counts = way.count(rows, packed)
    counts = -(-counts.to(torch.int64) * LEAF // LISTED)  # in SIZEs
    sizes = counts.cpu().numpy()  # PyTorch's functions may start threads on the CPU, which takes milliseconds
    if float(sizes.sum()) * LISTED > most * float(len(sizes)) * float(columns.padded):  # the last tile may be free
        return None
    ends, length = way.planned(sizes)
    found = []
    for first, last in zip((0, *ends), ends):
        over = way.list((*tiles, counts), sizes[first:last], first, length)
        found.append(way.sum(rows[first * HEIGHT : last * HEIGHT], packed, over))
    whole = concatenate(found)
    return whole if where is None else each(whole, lambda x: torch.empty_like(x).index_copy_(0, where, x))


@dataclass(frozen=True)
class Pass:
    """The arguments that all steps of a reduction over lists share."""

    problem: Problem
    near: Near
    columns: Packed
    step: float
    form: int

    def count(self, rows: torch.Tensor, packed: Packed) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        """Return boxes, the scores above which leaves are left out, and reaches of tiles of rows; and leaves to sum."""
        problem, near, device = self.problem, self.near, rows.device
        kind = list(Reduction).index(problem.reduction)
        boxes = torch.cat(_ends(rows, HEIGHT), dim=1)
        tiles = boxes.shape[0]
        beside = torch.empty((tiles, AMOUNTS.beside), dtype=torch.int32, device=device)
        self._look(choose.near_kernel, boxes, 0, tiles, (beside,), (self.columns.padded // LEAF - 1,), AMOUNTS.beside)
        length, which = AMOUNTS.beside * LEAF // LISTED, torch.arange(tiles + 1, dtype=torch.int32, device=device)
        over = Lists(beside, which * length, which, 0, length, 1)
        # PAIRED adds less than 1e-3 to an exponent, the allowance that follows is 0.01; SHORT serves the next pass too.
        form = Form.SHORT if shifts_rows(problem) or self.form == Form.PAIRED else self.form
        found = self.log_sum(replace(problem, reduction=Reduction.LOG_SUM), packed, rows.shape[0], over, form).log_sum
        raised = packed.raised + SCALE_BITS.value * (scales(problem) and self.columns.pieces == 2)
        found = found - raised * math.log(2.0)
        least = by_tile(found, HEIGHT).amin(dim=1)
        # 0.01 nats: more than sums at "fast" may exceed the truth by, in whatever form.
        least = least - 0.01 - TOLERANCES["fast"][Reduction.LOG_SUM].relative * least.abs()
        least = torch.where(torch.isfinite(least), least, -math.inf)

        # 0.97: what bounds may be off by rounding. 1e30 stands for infinity: nothing may be left out.
        lowest = (-math.log(0.97 * left_out(problem)) - least).float().clamp(max=1e30)
        whole = max(near.log_weight, 0.0)  # of all columns, of which these may be some
        reaches = (2.0 * (whole - least).clamp(min=0.0)).sqrt().float().clamp(max=1e30)
        limits, counts = torch.empty_like(lowest), torch.zeros(tiles, dtype=torch.int32, device=device)
        apart = (1.0 + 1e-6) * math.log(near.leaves.shape[1]) / (choose.THRESHOLDS.value - 1)
        self._look(choose.choose_kernel, boxes, 0, tiles, (lowest, reaches, limits, counts), (apart, kind))
        return (boxes, limits, reaches), counts

    def list(self, tiles: tuple[torch.Tensor, ...], sizes: NDArray[Any], first: int, length: int) -> Lists:
        """The lists of some tiles of rows, from the ``first`` on, which have ``sizes`` SIZEs.

        Nothing is read or sent: the host would wait for it until the tiles before are summed.
        """
        (boxes, *limits, counts), kind = tiles, list(Reduction).index(self.problem.reduction)
        counts, device = counts[first : first + len(sizes)], counts.device
        ends = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
        # The longest first, so that the last program ends early; neighbours together, as they read the same columns.
        lengths = counts.clamp(min=1).log2().floor()
        which, together = lengths.argsort(descending=True, stable=True).int(), LISTED // LEAF
        found = torch.empty(max(1, int(sizes.sum()) * together), dtype=torch.int32, device=device)
        numbers = self.columns.padded // LEAF - 1, first, kind
        self._look(choose.list_kernel, boxes, first, len(counts), (*limits, ends, found), numbers, together)
        return Lists(found, ends, which, first, length, max(1, -(-int(sizes.max()) // length)))

    def _look(
        self, kernel: Any, boxes: torch.Tensor, top: int, count: int, others: Any, numbers: Any, *flags: int
    ) -> None:
        """Run a kernel of :mod:`sdkde_triton.choose` for ``count`` tiles of rows, from ``top`` on."""
        near, nodes = self.near, self.near.nodes.shape[1]
        most = max(1, AMOUNTS.visited // nodes)  # tiles at once: there has to be room for the nodes that each visits
        visited = torch.empty(min(count, most) * nodes, dtype=torch.int32, device=boxes.device)
        for first in range(0, count, most):
            sizes = near.leaves.shape[1], nodes, top + first
            run = Launch(kernel, (min(most, count - first), 1), (*sizes, *numbers), (self.problem.d, *flags))
            run(boxes, near.leaves, near.nodes, visited, *others)

    def sum(self, points: torch.Tensor, rows: Packed, over: Lists) -> Partial:
        """Reduce some tiles of rows, whose points are those from ``over.first`` tiles on."""
        problem, m, top = self.problem, points.shape[0], over.first * HEIGHT
        if problem.reduction is not Reduction.MEAN:
            return self.log_sum(problem, rows, m, over, self.form)
        log_sums, log_weights, pieces = None, self.near.log_weights, self.columns.pieces
        if shifts_rows(problem):  # as in sdkde_triton.backend
            plain = replace(problem, reduction=Reduction.LOG_SUM)
            log_sums = self.log_sum(plain, rows, m, over, Form.SHORT).log_sum
            rows = launch.pack(problem, points, self.step, log_weights, pieces, log_sums=log_sums)
            over, top = over._replace(first=0), 0
        out = self._launched("mean", problem, rows, m, over, self.form)
        width = packed_dimensions(problem.d)
        here = Packed(rows.buffer[top * width :], m, rows.padded, pieces, rows.raised)
        return launch.finish_mean(problem, out, here, log_weights, log_sums, over.parts, problem.d < width)

    def log_sum(self, problem: Problem, rows: Packed, m: int, over: Lists, form: int) -> Partial:
        """LOG_SUM or LAPLACE of m rows, those of the lists' tiles; see :func:`sdkde_triton.launch.log_sum`."""
        out = self._launched("log_sum", problem, rows, m, over, form)
        return launch.finish_log_sum(problem, out, self.near.log_weights, m, over.parts)

    def _launched(self, name: str, problem: Problem, rows: Packed, m: int, over: Lists, form: int) -> torch.Tensor:
        """Partial results of a kernel, (parts, m, numbers of a row) in some order."""
        columns, config, device = self.columns, self.config(name), rows.buffer.device
        sums = 2 + (problem.reduction is Reduction.LAPLACE)
        per_row = sums if name == "log_sum" else max(packed_dimensions(problem.d), problem.d + 1)
        more = (self.near.log_weights,) if name == "log_sum" else ()
        capability = card(device).capability
        kernel, flags = launch.kernel_of(f"{name}_listed", problem, config, capability, rows.pieces, form, "", False)
        numbers = rows.padded, columns.padded, m, columns.points, problem.d, over.first * HEIGHT, over.length
        out = torch.empty(over.parts * m * per_row, dtype=torch.float32, device=device)
        run = Launch(kernel, (-(-m // HEIGHT), over.parts), numbers, flags, config)
        run(rows.buffer, columns.buffer, *more, over.leaves, over.which, over.ends, out)
        return out

    def config(self, name: str) -> Config:
        capability, d = card(self.near.points.device).capability, self.problem.d
        return default(f"{name}_listed", packed_dimensions(d), capability, merges(d), self.columns.pieces)

    def planned(self, counts: NDArray[Any]) -> tuple[Sequence[int], int]:
        """Where batches of tiles end, and how many SIZEs a program takes, by what each list has."""
        most, per_row = AMOUNTS.longest, 4 * (packed_dimensions(self.problem.d) + 1)
        if self.problem.reduction is not Reduction.MEAN:
            most = max(1, steps_at_most(self.problem, 0.0) * self.config("log_sum").block_n // LISTED)
        programs = AMOUNTS.programs * card(self.near.points.device).multiprocessors
        length = min(max(-(-int(counts.sum()) // programs), AMOUNTS.shortest), most)
        length = max(length, -(-int(counts.max()) // MOST_PARTS))
        until, ends, first = counts.cumsum(), [], 0
        while first < len(counts):
            before = int(until[first - 1]) if first else 0
            last = int(until.searchsorted(before + AMOUNTS.entries * LEAF // LISTED, side="right"))
            longest = int(counts[first : max(first + 1, last)].max())
            together = PARTIAL_BYTES // (per_row * HEIGHT * max(1, -(-longest // length)))
            first = min(max(first + 1, min(last, first + together)), len(counts))
            ends.append(first)
        return ends, length


@dataclass(frozen=True, eq=False)
class Groups:
    """Columns of several groups, and where each begins, in SIZEs; then the end."""

    points: torch.Tensor  # (n, d) float64
    log_weights: torch.Tensor  # (n,)
    begins: tuple[int, ...]
    span: float  # largest magnitude of a log weight, nats, rounded up
    made: PerStream = field(default_factory=PerStream)


def gathered(groups: Sequence[Columns]) -> Groups:
    """Put groups one after another."""
    begins = (0, *itertools.accumulate(-(-g.points.shape[0] // LISTED) for g in groups))
    first, size = groups[0].points, begins[-1] * LISTED
    points = first.new_zeros((size, first.shape[1]))
    log_weights = first.new_full((size,), -60000.0 * math.log(2.0))  # 2^−60000: no column, as padding is
    for group, begin in zip(groups, begins):
        here = slice(begin * LISTED, begin * LISTED + group.points.shape[0])
        points[here], log_weights[here] = group.points, group.log_weights
    least = float(torch.stack([g.log_weights.min() for g in groups]).min())
    return Groups(points, log_weights, begins, float(math.ceil(max(0.0, -least))))


def reduce_groups(problem: Problem, rows: torch.Tensor, groups: Groups, step: float, form: int, pieces: int) -> Partial:
    """Reduce rows (k, m, d), each group's over its columns: log sums (k, m), and shifts (k, m, d)."""
    (k, m, d), points, log_weights = rows.shape, groups.points, groups.log_weights
    high = -(-m // HEIGHT)  # tiles of a group
    rows = torch.nn.functional.pad(rows, (0, 0, 0, high * HEIGHT - m)).reshape(-1, d)
    pack: Any = functools.partial(launch.pack, problem, step=step, log_weights=log_weights, pieces=pieces)
    columns = groups.made.get((step, pieces, scales(problem)), lambda: pack(points, columns=True), points)
    packed = pack(rows)
    # Lists are not looked for: of Near only points and weights count.
    way = Pass(problem, Near(points, points, log_weights, points, points, 0.0), columns, step, form)
    lists = groups.made.get((problem.reduction, m), lambda: _lists(way, groups, k, high), points)
    whole = concatenate([way.sum(rows[a * HEIGHT : b * HEIGHT], packed, over) for a, b, over in lists])
    shift = None if whole.shift is None else whole.shift.reshape(k, -1, d)[:, :m]
    return Partial(whole.log_sum.reshape(k, -1)[:, :m], shift)


def _lists(way: Pass, groups: Groups, k: int, high: int) -> list[tuple[int, int, Lists]]:
    """All leaves of its group for every tile of rows: some tiles at a time, from the first up to the last."""
    device, together = groups.points.device, LISTED // LEAF
    sizes = torch.tensor([b - a for a, b in itertools.pairwise(groups.begins)])
    counts, starts = sizes.repeat_interleave(high), torch.tensor(groups.begins[:k]).repeat_interleave(high)
    found = []
    lasts, length = way.planned(counts.numpy())
    for first, last in zip((0, *lasts), lasts):
        here = counts[first:last]
        ends = torch.nn.functional.pad(here.cumsum(0), (1, 0))
        tile = torch.arange(len(here)).repeat_interleave(here * together).to(device)
        place = torch.arange(len(tile), device=device) + ((starts[first:last] - ends[:-1]) * together).to(device)[tile]
        which = here.argsort(descending=True, stable=True).to(torch.int32).to(device)
        parts = max(1, -(-int(here.max()) // length))
        found.append((first, last, Lists(place.int(), ends.int().to(device), which, first, length, parts)))
    return found
