"""The backend on PyTorch's devices: transforms as matrix products, and exact sums for the rows that those leave."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sdkde_core.nearby import Neighbours
from sdkde_core.plugin import PerStream, concatenate, empty, in_child, memory_errors, without_grad
from sdkde_core.protocol import Columns, Partial, Problem, Reduction, Support

from . import bounds, price, separable
from .finish import add, finish, least, put, take_off
from .modes import SIDE, Box, choose_box


@dataclass(frozen=True)
class _Series:
    """The columns in a box, as modes."""

    basis: separable.Basis
    modes: Tensor
    epsilon: float
    error: Tensor  # bound on a sum's
    inside: Tensor | None = None  # (n,) which columns; None: all
    outside: Neighbours | None = None  # the others


@dataclass(frozen=True)
class _State:
    columns: Columns
    series: _Series | None
    made: PerStream = field(default_factory=PerStream)

    def neighbours(self) -> Neighbours:
        """All columns in order, made when the first row asks."""
        columns = self.columns
        return self.made.get("near", lambda: Neighbours(columns), columns.points, Neighbours.buffers)


def _without_threads() -> None:
    """In a forked child OpenMP would wait for threads that are not there, so that PyTorch does without."""
    torch.set_num_threads(1)


in_child(_without_threads)


class TorchFourierBackend:
    """Fourier series in up to three dimensions as matrix products in PyTorch, direct sums over tiles for isolated rows.

    Parameters
    ----------
    always : bool
        Transform also where direct sums would be faster. For tests.
    """

    def __init__(self, always: bool = False) -> None:
        if not isinstance(always, bool):
            raise TypeError(f"always is {always!r}; pass True or False")
        self.always = always

    def probe(self, device: str) -> Support:
        """Make a tensor in float64 on the device."""
        try:
            torch.zeros(1, dtype=torch.float64, device=device).add_(1.0).cpu()
        except (RuntimeError, AssertionError, ValueError, TypeError, NotImplementedError) as error:
            why = str(error).splitlines()[0].partition(". ")[0]  # then come all the names that PyTorch knows
            return Support(False, f"PyTorch {torch.__version__} cannot use {device} in float64: {why}")
        return Support(True, f"PyTorch {torch.__version__} on {device}")

    @without_grad
    def prepare(self, problem: Problem, columns: Columns) -> _State:
        """Transform the columns to modes, if that is faster than direct sums."""
        with memory_errors():
            return _State(columns, self._transform(problem, columns))

    def _transform(self, problem: Problem, columns: Columns) -> _Series | None:
        points, log_weights = columns.points, columns.log_weights
        step = max(1, len(points) // (1 << 13))
        some, weights = points[::step].flatten(), log_weights[::step]
        weighed = torch.stack([log_weights.mean().exp(), log_weights.exp().sum()])
        known, d = torch.cat([points.amin(0), points.amax(0), weighed, weights, some]).cpu().numpy(), problem.d
        # A point's own row has at least its own term; no sum is more than all weights.
        floor, total = float(known[2 * d]), float(known[2 * d + 1])
        if not total > bounds.SMALLEST or any(map(math.isnan, known[: 2 * d])):  # a NaN is in no box, and counts
            return None
        epsilon = bounds.tolerance(problem, floor, total)
        ends, rest = (known[:d], known[d : 2 * d]), known[2 * d + 2 :]
        sample = rest[len(weights) :].reshape(-1, d)
        cost = functools.partial(price.box_seconds, price.DEVICE, problem, epsilon)
        found = choose_box(problem, ends, sample, epsilon, cost)
        if not self.always:
            direct = price.direct_seconds(price.DEVICE, problem, sample, rest[: len(weights)])
            modes = math.inf if found is None else found[1]
            if modes > direct:
                return None
        if found is None:
            return None
        box = found[0]
        device = points.device
        basis = separable.Basis(box, device, _memory(device))
        low, high = (torch.as_tensor(x, device=device) for x in (box.low, box.high))
        inside = ((points >= low) & (points <= high)).all(1)
        weights = torch.where(inside, log_weights.exp(), 0.0)  # (n,)
        # Columns outside the box are those of a trimmed one: rarely many.
        whole = (box.low <= ends[0]).all() and (box.high >= ends[1]).all()
        members = None if whole else torch.nonzero(~inside)[:, 0]
        held = points if members is None else torch.where(inside[:, None], points, low)
        modes = separable.to_modes(basis, held, weights)
        largest = _density_bound(box, held, weights)
        if not float(largest) > bounds.SMALLEST:
            return None
        error = bounds.error(epsilon, 1.0, float(box.period.max())) * largest
        if members is None or not len(members):
            return _Series(basis, modes, epsilon, error)
        return _Series(
            basis, modes, epsilon, error, inside, Neighbours(Columns(points[members], log_weights[members]), members)
        )

    @without_grad
    def reduce(self, problem: Problem, queries: Tensor | None, state: _State, own_offset: int = 0) -> Partial:
        """Sum by modes, then redo the rows whose sum is too small against the bound on its error."""
        rows = state.columns.points if queries is None else queries
        if not len(rows):
            return empty(problem, rows)
        blocks = []
        with memory_errors():
            for start in range(0, len(rows), 1 << 21):  # which bounds the memory of the fields
                block, own = rows[start : start + (1 << 21)], None
                if "exclude_self" in problem.requires:
                    own = torch.arange(len(block), device=block.device) + own_offset + start
                blocks.append(self._block(problem, block, own, state))
        return concatenate(blocks)

    def _block(self, problem: Problem, rows: Tensor, own: Tensor | None, state: _State) -> Partial:
        if state.series is None:
            return state.neighbours().reduce(problem, rows, own)
        found, good = self._by_modes(problem, rows, own, state, state.series)
        some = torch.nonzero(~good)[:, 0]
        if not len(some):
            return found
        mine = None if own is None else own[some]
        return put(found, some, state.neighbours().reduce(problem, rows[some], mine))

    def _by_modes(
        self, problem: Problem, rows: Tensor, own: Tensor | None, state: _State, series: _Series
    ) -> tuple[Partial, Tensor]:
        """The answers, and a mask of those that hold."""
        box, error = series.basis.box, series.error
        low, high = (torch.as_tensor(x, device=rows.device) for x in (box.low, box.high))
        margin = torch.as_tensor(box.margin, device=rows.device).clamp(max=bounds.cutoff(series.epsilon))
        held = ((rows >= low - margin) & (rows <= high + margin)).all(1)
        coefficients = separable.fields(problem, series.basis, series.modes)
        slope = 1.0 if problem.reduction is Reduction.MEAN else 0.0
        moved = torch.where(held[:, None], rows, low)
        total, *others = separable.to_points(series.basis, moved, coefficients, slope)
        if own is not None:
            take_off(problem, rows, own, state.columns, series.inside, total, others)
        if series.outside is not None:
            nats = max(0.0, -math.log(0.1 * float(error)))  # farther away they are below the error
            reach = math.sqrt(2.0 * (nats + math.log(2.0 + nats)))  # times 1 + r²/2, too
            deep = ((rows >= low + reach) & (rows <= high - reach)).all(1)
            near = torch.nonzero(held & ~deep)[:, 0]
            if len(near):
                mine = None if own is None else own[near]
                more = series.outside.reduce(problem, rows[near], mine, least(problem, float(error)))
                add(problem, more, near, total, others)
        answer, good = finish(problem, total, others, error)
        return answer, held & good


def _density_bound(box: Box, points: Tensor, weights: Tensor) -> Tensor:
    """Bound Σ_j w_j exp(−½‖y − u_j‖²) at every y; see :func:`sdkde_fourier.modes.density_bound`.

    Weights are added as integers, whose sum does not depend on the order: a device adds in any.
    """
    side, width = SIDE, [float(w) for w in box.high - box.low]
    while math.prod(math.floor(w / side) + 1 for w in width) > max(1 << 16, 4 * len(points)):
        side *= 2.0
    counts = [math.floor(w / side) + 1 for w in width]
    index = torch.zeros(len(points), dtype=torch.int64, device=points.device)
    for a, count in enumerate(counts):
        index = index * count + ((points[:, a] - float(box.low[a])) / side).long().clamp(0, count - 1)
    units = (weights * 2.0**52).ceil().long()  # they sum to at most 1
    cells = torch.zeros(math.prod(counts), dtype=torch.int64, device=points.device).index_add_(0, index, units)
    heaviest = cells.max().double() * 2.0**-52
    return torch.minimum(weights.sum(), heaviest * bounds.around_a_cell(side, points.shape[1]))


def _memory(device: torch.device) -> int:
    """Bytes for the functions of a block of points: of the card, never of what is free, so that sums do not change."""
    if device.type == "cpu":
        return 1 << 26
    return min(1 << 30, int(torch.get_device_module(device).get_device_properties(device).total_memory) // 32)
