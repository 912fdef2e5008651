"""The Triton backend's implementation of the protocol."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from sdkde_core.nearby import rough_share
from sdkde_core.plugin import PerStream, empty, grids, in_slabs, launches, on_device
from sdkde_core.protocol import Columns, Partial, Problem, Reduction, Support

from . import bounds, criteria, fits, info, launch, line, moves, samples
from . import near as nearby
from . import whiten as whitening
from .compiled import INTERPRETED, LaunchFailed, card, no_compiler, rehearse
from .launch import slab_rows
from .space import COLUMN_PADDING, HEIGHT, LEAF, LEAST_CAPABILITY


@dataclass(frozen=True, eq=False)
class _State:
    """The training points, packed when the first rows come, as packing depends on whether rows are shifted."""

    problem: Problem  # as given to prepare: its extent is the largest
    points: torch.Tensor  # (n, d) float64
    log_weights: torch.Tensor
    span: float  # largest magnitude of a log weight, nats, rounded up
    middle: float = 0.0  # between the largest and the least log weight, in bits, rounded
    ordered: bool = False
    made: PerStream = field(default_factory=PerStream)

    def kept(self, key: Any, make: Callable[[], Any]) -> Any:
        return self.made.get(key, make, self.points)


class TritonBackend:
    """Tensor Core kernels for CUDA GPUs of compute capability 8.0 and later.

    Parameters
    ----------
    skip : bool, optional
        Leave out pairs that cannot matter: in 2 to 16 dimensions, of all rows at once. Default: where a sample says
        that this is faster.
    """

    def __init__(self, skip: bool | None = None) -> None:
        if skip not in (None, True, False):
            raise TypeError(f"skip is {skip!r}; pass True, False, or None where what is faster is to be taken")
        self.skip = skip

    def probe(self, device: str) -> Support:
        """Look for a GPU with half-precision Tensor Cores that take asynchronous copies, and for a C compiler."""
        if INTERPRETED:
            return Support(True, "Triton's interpreter")
        if not device.startswith("cuda"):
            return Support(False, "Triton compiles for GPUs; set TRITON_INTERPRET=1 to interpret its kernels on a CPU")
        found = grids.probe(device, range(LEAST_CAPABILITY, 1000), "the kernels need 8.0")
        lacking = no_compiler() if found.ok else ""
        return Support(False, lacking) if lacking else found

    def prepare(self, problem: Problem, columns: Columns) -> _State:
        """Keep the training points; they are packed when the first rows come."""
        log_weights, weighted = columns.log_weights, "weights" in problem.requires
        least, most = columns.log_range or (torch.stack(log_weights.aminmax()).tolist() if weighted else (0.0, 0.0))
        # Whole numbers, so that decisions kept by them serve other weights too.
        span = float(math.ceil(max(0.0, -least, most))) if -math.inf < least <= most < math.inf else math.inf
        middle = float(round(0.5 * (least + most) / math.log(2.0))) if span < math.inf else 0.0
        if log_weights.data_ptr() % 16:  # kernels are compiled for aligned pointers
            log_weights = log_weights.clone()
        return _State(problem, columns.points, log_weights, span, middle, columns.ordered)

    def order(self, problem: Problem, points: torch.Tensor, columns: Columns | None = None) -> torch.Tensor | None:
        """Return the order that lists need, or None where sums are over all pairs."""
        with on_device(points):
            lists = info.looks(problem) if self.skip is None else self.skip
            if columns is not None and lists:  # with a span of 0: whatever the weights
                lists = self._skips(problem, _State(problem, columns.points, columns.log_weights, 0.0), points)
            return nearby.order(points.nan_to_num(0.0, 0.0, 0.0), LEAF) if lists else None

    def density(self, problem: Problem, queries: Any, state: _State, constant: float, log: bool, dtype: Any) -> Any:
        """Return the density in the user's dtype by the launches of LOG_SUM or LAPLACE; None for rows in slabs."""
        points, way = state.points if queries is None else queries, _way(problem, state.problem.extent, state.span)
        whole = slab_rows(points.shape[0], state.points.shape[0], 8 * (problem.d + 3), way.columns) == points.shape[0]
        if not whole or info.looks(problem) or self.skip:
            return None
        with on_device(points):
            return _run(problem, way, points, state, (constant, log, dtype))

    whiten = staticmethod(whitening.whiten)
    moved = displaced = staticmethod(moves.displaced)
    in_unit = staticmethod(moves.in_unit)
    joined = staticmethod(moves.joined)
    joined_shifts = staticmethod(moves.joined_shifts)
    left_out, terms = staticmethod(criteria.left_out), staticmethod(criteria.terms)
    narrowed = staticmethod(criteria.narrowed)
    ordered, shaped = staticmethod(samples.ordered), staticmethod(fits.shaped)
    line_search = staticmethod(line.line_search)

    def reduce(self, problem: Problem, queries: Any, state: _State, own_offset: int = 0) -> Partial:
        """Reduce over all columns, rows in slabs; where memory does not suffice, in smaller ones."""
        points = queries
        if queries is None:  # all of them, or some
            whole = problem.m == problem.n
            points = state.points if whole else state.points[own_offset : own_offset + problem.m]
        m = points.shape[0]
        if m == 0:
            return empty(problem, points)
        with on_device(points):
            if self._skips(problem, state, points):
                way = _way(problem, state.problem.extent, state.span, True)
                found = _run(problem, way, points, state, 1.0 if self.skip else 1.0 / info.SLOWER)
                if found is not None:
                    return found
            way = _way(problem, state.problem.extent, state.span)
            rows = m
            if not way.mirrors:
                rows = slab_rows(m, state.points.shape[0], 8 * (problem.d + 3), way.columns)

            def slab(start: int, stop: int) -> Partial:
                here = points if stop - start == m else points[start:stop]
                while True:
                    try:
                        return _run(problem, way, here, state)
                    except LaunchFailed:
                        continue  # with the next best configuration

            return in_slabs(slab, m, rows)

    def prepare_groups(self, problem: Problem, groups: Sequence[Columns]) -> nearby.Groups:
        """Keep several groups, one after another."""
        with on_device(groups[0].points):
            return nearby.gathered(groups)

    def reduce_groups(self, problem: Problem, queries: torch.Tensor, state: nearby.Groups, *unused: Any) -> Partial:
        """Reduce the rows of every group over all of its columns, some rows at a time."""
        k, m, _ = queries.shape
        way = _way(problem, problem.extent, state.span, listed=True)
        with on_device(queries):
            most = max(HEIGHT, (1 << 20) // k // HEIGHT * HEIGHT)
            parts = [
                nearby.reduce_groups(problem, queries[:, i : i + most], state, way.step, way.form, way.pieces)
                for i in range(0, m, most)
            ]
        if len(parts) == 1:
            return parts[0]
        shifts = None if parts[0].shift is None else torch.cat([part.shift for part in parts], dim=1)
        return Partial(torch.cat([part.log_sum for part in parts], dim=1), shifts)

    def _skips(self, problem: Problem, state: _State, rows: torch.Tensor) -> bool:
        """Whether to sum all rows over lists, without pairs that cannot matter."""
        if self.skip is False or not info.takes(problem):
            return False
        if rows.is_cuda and torch.cuda.is_current_stream_capturing():  # making lists needs the host
            return False
        if _way(problem, state.problem.extent, state.span, listed=True).compute is not _listed:
            return False
        looks = self.skip or info.looks(problem)
        if self.skip or state.ordered or not looks:  # ``order`` has asked the sample below already
            return looks
        log_weights, out = state.log_weights, info.left_out(problem)
        return info.pays(problem, rough_share(problem, rows, state.points, log_weights, LEAF, HEIGHT, out))


class _Way(NamedTuple):
    """How a problem is computed."""

    compute: Callable[..., Any]
    columns: int  # about the most that one program takes; the exact number depends on its configuration
    step: float = 0.0  # this and what follows are for packed operands
    form: int = bounds.Form.SHORT
    pieces: int = 2  # of every coordinate
    mirrors: bool = False  # stored φ serves rows and columns
    arithmetic: str = ""  # for direct differences


@functools.lru_cache(maxsize=1024)
def _way(problem: Problem, extent: float, span: float, listed: bool = False) -> _Way:
    """``listed``: over lists."""
    packed = bounds.formula(problem, extent, span, listed) == "packed"
    compute = _direct if not packed else _listed if listed else _packed
    columns = (64 if packed else 16) * bounds.steps_at_most(problem, extent, packed)
    if packed and bounds.in_blocks(problem.d) and problem.reduction is Reduction.MEAN:
        columns = 1 << 16  # stored φ has no parts: this sizes the rows' other buffers
    if not packed:
        return _Way(compute, columns, arithmetic=bounds.arithmetic(problem, extent, span))
    step = bounds.grid_step(problem, extent, span)
    form, both = bounds.form(problem, extent, step), bounds.in_blocks(problem.d) and bounds.mirrors(problem)
    return _Way(compute, columns, step, form, 3 if form == bounds.Form.FULL else 2, both)


#: Keys of the passes whose kernels are compiled or being compiled: all that decides the kernels.
_seen = set[Any]()


def _run(problem: Problem, way: _Way, points: torch.Tensor, state: _State, end: Any = None) -> Any:
    """Compute by a way; kernels that are new to the process are compiled before, side by side."""
    whole = problem.same and points.shape[0] == state.points.shape[0]
    asked = problem.reduction, problem.precision, problem.dtype, problem.requires, problem.same, problem.d, whole
    ending = end[1:] if isinstance(end, tuple) else None
    key = asked, bounds.shifts_rows(problem), way.compute, way.form, way.arithmetic, ending, points.device
    if points.is_cuda and key not in _seen and not torch.cuda.is_current_stream_capturing():
        _seen.add(key)
        _compile(problem, way, whole, state, end)
    return way.compute(problem, way, points, state, end)


@launches.aside
def _compile(problem: Problem, way: _Way, whole: bool, state: _State, end: Any) -> None:
    """Compile a way's kernels by a rehearsal on a few CPU points; after a shift those of the density too."""
    few = torch.zeros((2 * LEAF, problem.d), dtype=torch.float64, device="cpu")
    like = replace(state, points=few, log_weights=few[:, 0], made=PerStream())
    rehearse(way.compute, problem, way, few if whole else few[:LEAF], like, end)
    if whole and problem.reduction is Reduction.MEAN:
        after = replace(problem, reduction=Reduction.LOG_SUM, same=False)
        then = _way(after, state.problem.extent, state.span, way.compute is _listed)
        for to in (end,) if then.compute is _listed else (None, (0.0, False, getattr(torch, problem.dtype))):
            rehearse(then.compute, after, then, few[:LEAF], like, to)


def _listed(problem: Problem, way: _Way, points: torch.Tensor, state: _State, most: float) -> Any:
    """Sum over lists; None where more than a share ``most`` of the pairs matters, or a point is not finite."""
    near = state.kept("near", lambda: nearby.order_columns(state.points, state.log_weights, state.ordered))
    if near is None:
        return None
    scaled = bounds.scales(problem)
    key = "ordered", way.step, way.pieces, scaled
    how: Any = {"columns": True, "beyond": LEAF, "raised": -state.middle * scaled}  # a leaf of padding fills lists
    columns = state.kept(key, lambda: launch.pack(problem, near.points, way.step, near.log_weights, way.pieces, **how))
    rows = None if points is state.points else points
    return nearby.reduce(problem, rows, near, columns, way.step, way.form, most)


def _direct(problem: Problem, way: _Way, points: torch.Tensor, state: _State, end: launch.End = None) -> Any:
    arithmetic, rows = way.arithmetic, launch.transpose(points, way.arithmetic)
    columns = state.kept(arithmetic, lambda: launch.transpose(state.points, arithmetic, COLUMN_PADDING))
    return launch.direct(problem, arithmetic, rows, columns, state.log_weights, end)


def _packed(problem: Problem, way: _Way, points: torch.Tensor, state: _State, end: launch.End = None) -> Any:
    step, corrections, count, weights = way.step, way.form, way.pieces, state.log_weights
    mean, scaled = problem.reduction is Reduction.MEAN, bounds.scales(problem)
    stored = mean and bounds.stores(problem, corrections, card(points.device).capability)
    rounded = stored and problem.precision == "fast"
    raised = -state.middle * scaled  # others are scaled one by one
    pack: Any = functools.partial(launch.pack, problem, columns=True, rounded=rounded, raised=raised)
    columns = state.kept((step, count, scaled, rounded), lambda: pack(state.points, step, weights, count))
    # Packed columns serve as rows where all of them are rows, if the kernel masks what padding dimensions hold.
    masked = not bounds.in_blocks(problem.d) and not stored
    whole = problem.same and points.shape[0] == columns.points and masked
    rows = columns if whole else launch.pack(problem, points, step, weights, count, raised=raised)
    if not mean:
        return launch.log_sum(problem, rows, columns, weights, corrections, end)
    log_sums = None
    if not scaled:
        # Errors of these log sums cancel, as the sums are added back: so the smaller corrections can be left out.
        shift_form = corrections if bounds.in_blocks(problem.d) else bounds.Form.SHORT
        plain = replace(problem, reduction=Reduction.LOG_SUM)
        log_sums = launch.log_sum(plain, rows, columns, weights, shift_form).log_sum
        rows = launch.pack(problem, points, step, weights, count, log_sums=log_sums)
    return launch.mean(problem, rows, columns, weights, corrections, state.problem.extent, log_sums)
