"""The plan of an estimate whose points nobody has all of: blocks of rows over shards of columns.

What depends on all points is found first, by questions that are put to every block (:class:`Survey`). Then every block
of rows sums over the shards 0, 1, 2 … in order (:class:`BlockPlan`). Shards follow from (n, d) alone, blocks of rows
from the shapes and the kind of device: so the bits do not depend on who computes them, nor on when.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..arrays import Array, convert, quiet, rounded, to_host
from ..bandwidth.matrix import Bandwidth
from ..bandwidth.rules import FULL_RULES, by_rule, check_rule, check_spread
from ..choice import registry, select
from ..choice.hardware import gpu_name
from ..engine.forks import cached_property
from ..engine.groups import MIDDLE, Group, guard_scale
from ..engine.merge import each, merge
from ..protocol import Columns, Partial, Problem, Reduction
from ..spreading.devices import Reducer, pack_on
from ..spreading.tasks import Task, cut
from .density import density, log_constant, undefined, widths
from .moving import Products, joined, moments, products
from .plan import FARTHEST, centre_of
from .request import GUARD, Goal, Request, precision_for
from .resolution import REACH, clearest_centre
from .survey import Counting, Moments, MomentsOf, Reach, Summary, digest, log_of, numbers

NUMBERS = 1 << 22  # in a shard, and in a block of rows, at most: 32 MiB of float64


def width_of_a_shard(n: int, d: int) -> int:
    """Return how many of n columns in d dimensions are a shard: a multiple of 1024."""
    return min(max(1024, NUMBERS // d // 1024 * 1024), -(-n // 1024) * 1024)


@dataclass(frozen=True)
class Shape:
    n: int
    d: int
    m: int | None = None  # query rows; None: the samples
    dtype: str = "float64"  # of the result: the wider one of samples and queries
    weighted: bool = False

    @property
    def shards(self) -> list[tuple[int, int]]:
        """The shards of the columns, (start, stop)."""
        return cut(self.n, width_of_a_shard(self.n, self.d))


@dataclass(frozen=True, eq=False)
class BlockPlan:
    """An estimate that is decided in full; the last :meth:`Survey.next` returns it. Immutable, pickles."""

    request: Request  # without the user's arrays
    shape: Shape
    bandwidth: Bandwidth
    centre: Array  # (d,), data units
    log_total: float | None  # of all weights; None: all are equal
    shares: Array  # of the weight, by shard
    carrying: int  # samples with weight
    backend: str
    device: str
    devices: tuple[str, ...]  # those that share the rows of a block, where the user named several
    problems: tuple[Problem, ...]
    digest: str  # of all points and weights

    @property
    def rows(self) -> int:
        """Rows of a block, the same in all passes: a multiple of 1024, by the shapes and the kind of device alone.

        A block takes two cores some minutes at most, and a GPU a fraction of a second, but does not wait for a disk.
        """
        on_host, n, d = self.device.partition(":")[0] == "cpu", self.shape.n, self.shape.d
        work = max((1 << 41 if on_host else 1 << 48) // (n * (d + 16)), 1024 if on_host else 1 << 16)
        return max(1024, min(work, NUMBERS // d, max(p.m for p in self.problems)) // 1024 * 1024)

    def tasks(self, step: int) -> list[list[Task]]:
        """The tasks of a pass: for every block of rows those over each shard, in the order of the sums."""
        blocks = cut(self.problems[step].m, self.rows)
        return [[Task(rows, columns) for columns in self.shape.shards] for rows in blocks]

    @property
    def last(self) -> Problem:
        return self.problems[self.request.answering]

    @property
    def debiased(self) -> bool:
        return self.request.goal is Goal.DEBIASED

    def whitened(self, points: Any) -> Array:
        """Rows of the data (k, d), in bandwidths from the centre, float64."""
        return self.bandwidth.whiten(numbers(points), self.centre)

    def columns(self, points: Any, weights: Any = None) -> Columns:
        """A shard of the columns, of data (k, d) and the user's weights (k,)."""
        log_weights = np.full(len(points), -math.log(self.shape.n))
        if self.log_total is not None:
            log_weights = np.minimum(log_of(weights) - self.log_total, 0.0)
        return Columns(self.whitened(points), log_weights)

    @cached_property
    def _choice(self) -> select.Choice:
        where: dict[str, Any] = {"device": self.devices or self.device, "options": self.request.backend_options}
        return select.choose(self.problems, backend=self.backend, **where)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if not name.startswith("_")}

    def _group(self, step: int, columns: Any = None) -> Group:
        one, share = self.request.passes[step], self.request.guard
        if one.most is None:
            return Group(columns, one.scale, 0.0 if one.moves else math.log1p(-share))
        return Group(columns, guard_scale(self.carrying, self.shape.d, one.scale, one.most), math.log(share))

    def packed(self, step: int, columns: Columns) -> Reducer | None:
        """A shard's columns ready for any number of blocks of rows; None where none has weight."""
        columns = self._group(step, columns).scaled
        if not (columns.log_weights > -math.inf).any():
            return None
        choice = self._choice
        library, place = choice.info.arrays, choice.device
        there = Columns(convert(columns.points, library, place), convert(columns.log_weights, library, place))
        problem = replace(self.problems[step], n=columns.points.shape[0], device=place)
        return pack_on(self.devices, choice.backend, choice.info, problem, there)

    def partial(self, step: int, columns: Reducer | None, rows: Array) -> Partial:
        """The sums of whitened rows (k, d) over what :meth:`packed` returned, as NumPy arrays."""
        if columns is None:
            least, zeros, reduction = np.full(len(rows), -math.inf), np.zeros(len(rows)), self.problems[step].reduction
            shift = np.zeros(rows.shape) if reduction is Reduction.MEAN else None
            return Partial(least, shift, *((zeros, least) if reduction is Reduction.LAPLACE else ()))
        choice, group = self._choice, self._group(step)
        with np.errstate(all="ignore"):
            sums = columns.reduce(convert(group.unit(rows), choice.info.arrays, choice.device))[0]
            return group.raised(each(sums, to_host), self.shape.d)

    @quiet
    def folded(self, parts: Iterable[Partial]) -> Partial:
        """The sums over all shards, of those over each in order."""
        return functools.reduce(lambda so_far, part: merge([so_far, part]), parts)

    @quiet
    def products(self, columns: Columns, shift: Array) -> Products | None:
        """The sums that the step needs from a shard whose shifts are (k, d)."""
        return products(columns, shift) if self.request.step == "moments" else None

    @quiet
    def step(self, found: Iterable[Any]) -> float:
        """The step, of the :meth:`products` of all shards in order."""
        if isinstance(self.request.step, str):
            return float(moments(functools.reduce(joined, found), self.request.score_bandwidth or 1.0))
        return self.request.step or 0.5

    @quiet
    def moved(self, columns: Columns, shift: Array, step: float) -> Columns:
        return replace(columns, points=columns.points + step * shift)

    def unwhitened(self, columns: Columns) -> Array:
        """Where columns are (k, d), in data units, in the result's dtype."""
        return (self.bandwidth.stretch(columns.points) + self.centre).astype(self.shape.dtype, copy=False)

    def guarding(self, columns: Columns, shard: int) -> Columns | None:
        """The columns of a shard that guard the tails, chosen as by :func:`.groups.guard`; None: no guard."""
        most = GUARD[1]
        if self.carrying <= most or not self.request.guard:
            return columns if self.request.guard else None
        reached, own = np.cumsum(self.shares), np.cumsum(np.exp(columns.log_weights))
        at = (np.arange(most) + MIDDLE) / most * reached[-1]
        at = at[np.searchsorted(reached, at) == shard] - (reached[shard - 1] if shard else 0.0)
        which = np.searchsorted(own, np.minimum(at / self.shares[shard], 1.0) * own[-1])
        return Columns(columns.points[which], np.full(len(which), -math.log(most)))

    def guard(self, found: Sequence[Columns | None]) -> Columns | None:
        """The columns of the guard, of the :meth:`guarding` ones of all shards in order."""
        some = [(c.points, c.log_weights) for c in found if c is not None]
        return Columns(*map(np.concatenate, zip(*some))) if some else None

    @quiet
    def density(self, sums: Partial, rows: Array, guard: Columns | None, log: bool) -> Array:
        """The density (k,), or its log, of the sums of whitened rows (k, d) over all shards, and the guard."""
        if guard is not None:
            wide = self.request.answering + 1
            sums = merge([sums, self.partial(wide, self.packed(wide, guard), rows)])
        clip, constant = self.request.negative != "keep", log_constant(self.request.kernel, self.bandwidth)
        return density(sums, constant, log, clip).astype(self.shape.dtype)

    def undefined(self, block: Array, log: bool) -> int:
        return undefined(self.request, block, log)

    def identity(self) -> dict[str, Any]:
        """All that decides the bits of the result, in JSON's types."""
        from .. import __version__

        record, places = registry.find(self.backend), self.devices or (self.device,)
        cards = sorted({gpu_name(place) or "" for place in places if place.startswith("cuda")})
        options = "method", "kernel", "negative", "step", "score_bandwidth"
        return {name: getattr(self.request, name) for name in options} | {
            "samples, weights and queries": self.digest,
            "shapes": [self.shape.n, self.shape.d, self.shape.m],
            "dtype": self.shape.dtype,
            "tails": self.request.guard,
            "bandwidth": f"{digest(self.centre, *self.bandwidth.arrays().values(), start=0):032x}",
            "precision": self.last.precision,
            "extent": self.last.extent,
            "backend": [self.backend, record.version if record else "", repr(self.request.backend_options or {})],
            "version": __version__,
            "device": [self.device.partition(":")[0], len(places), *cards],
            "shards": width_of_a_shard(self.shape.n, self.shape.d),
            "rows": self.rows,
        }


@dataclass(frozen=True, eq=False)
class Survey:
    """The next question to all blocks of points, and the answers to earlier ones. Immutable, pickles."""

    request: Request  # without weights
    shape: Shape
    question: Moments | Counting | Reach
    moments: tuple[Moments, MomentsOf] | None = None  # the first question and its answer
    largest: float = 0.0  # distance of any point from the centre so far, in bandwidths

    @property
    def abouts(self) -> list[str]:
        """Which points all questions that there may be are about: "train" or "query"."""
        rule = self.request.bandwidth
        counted = Counting.most if isinstance(rule, str) and rule not in FULL_RULES else 0
        return ["train"] * (2 + counted) + ["query"] * bool(self.shape.m)

    @classmethod
    def of(cls, request: Request, shape: Shape) -> Survey:
        rule = request.bandwidth
        if request.apart:
            raise ValueError("method='stacked', coordinates= and support= need all samples in memory; leave them out")
        if request.negative == "renormalise":
            raise ValueError("negative='renormalise' needs all samples in memory; pass 'clip' or 'keep'")
        if request.adaptive:
            raise ValueError(f"adaptive={request.adaptive} needs all samples in memory; leave it out")
        if isinstance(rule, str):
            check_rule(rule, request.method, request.kernel)
            if rule == "isj":
                raise ValueError("bandwidth='isj' needs all samples in memory; pass 'auto', another rule, or numbers")
        covariance = isinstance(rule, str) and rule in FULL_RULES
        first = Moments(shape.n, shape.d, covariance, request.check_finite, shape.weighted)
        return cls(replace(request, weights=None), shape, first)

    @quiet
    def next(self, answer: Any) -> Survey | BlockPlan:
        """Another question, or the plan, by the merged answers of all blocks."""
        asked = self.question
        if isinstance(asked, Moments):
            return self._after_moments(asked, answer)
        if isinstance(asked, Counting):
            listed = asked.listed
            return self._located(asked.quartiles(answer)) if listed else replace(self, question=asked.next(answer))
        reached = max(self.largest, answer[0])
        if asked.about == "train" and self.shape.m:
            return replace(self, question=replace(asked, about="query"), largest=reached)
        return self._decided(asked, reached, answer[1])

    @property
    def _found(self) -> tuple[MomentsOf, float | None, float]:
        """The moments, the log of the sum of all weights (None: all are equal), and n_eff."""
        assert self.moments is not None
        found = self.moments[1]
        if found.equal:
            return found, None, float(self.shape.n)
        return found, found.log_total, math.exp(2.0 * found.log_total - found.log_squares)

    def _after_moments(self, asked: Moments, found: MomentsOf) -> Survey:
        rule, here = self.request.bandwidth, replace(self, moments=(asked, found))
        _, log_total, n_eff = here._found
        if self.shape.weighted and found.log_total == -math.inf:
            raise ValueError("weights are all zero; pass at least one positive weight")
        if not isinstance(rule, str):
            return here._located()
        if not (np.isfinite(found.low) & np.isfinite(found.high)).all():
            raise ValueError(f"bandwidth={rule!r} is chosen from train, which has NaN or infinite values; drop them")
        check_spread(rule, found.carrying, n_eff, found.low, found.high)
        if rule in FULL_RULES:
            return here._located()
        return replace(here, question=Counting.first(asked.sample(found)[0], found.low, found.high, n_eff, log_total))

    def _located(self, quartiles: tuple[Array, Array] | None = None) -> Survey:
        assert self.moments is not None
        (asked, found), rule = self.moments, self.request.bandwidth
        if isinstance(rule, str):
            summary = Summary(asked, found, self._found[2], self.request.method, quartiles)
            summary.steps = self.request.steps and rule == "auto"
            bandwidth = by_rule(rule, summary, found.low, found.high)
        else:
            bandwidth = Bandwidth.of(rule, self.shape.d)
        centre = centre_of(found.rows[np.isin(found.index, asked.centre())], bandwidth)
        centre = clearest_centre(found.rows, None, widths(bandwidth)[0], centre)
        reach = Reach("train", bandwidth, centre, self.request.check_finite)
        return replace(self, request=self.request.moving(bandwidth), question=reach)

    def _decided(self, asked: Reach, largest: float, digest: int) -> BlockPlan:
        request, shape, (found, log_total, _) = self.request, self.shape, self._found
        farthest = "query" if self.largest < largest and asked.about == "query" else "train"
        bandwidth, precision = asked.bandwidth, precision_for(request.precision, shape.dtype)
        if not largest < 0.9 * FARTHEST:
            where = f"beyond 1e149 bandwidths ({bandwidth}) from the median of train, where distances overflow"
            instead = "drop it, rescale its column, or pass a larger bandwidth"
            raise ValueError(f"a point of {farthest} is {where}; {instead}")
        extent = rounded(largest)
        if extent > REACH[precision]:
            other = next((f"pass precision={p!r}, " for p in ("high", "fast") if extent <= REACH[p]), "")
            where = f"{extent:.1e} bandwidths ({bandwidth}) from the median of train"
            holds = f"precision={precision!r} holds up to {REACH[precision]:.2g} where data are not all in memory"
            instead = f"{other}drop it, or pass a larger bandwidth"
            raise ValueError(f"a point of {farthest} is {where}, and {holds}; {instead}")
        requires = frozenset(() if log_total is None else ("weights",))
        problems = request.problems(shape.m, shape.n, shape.d, extent, requires, shape.dtype, "cpu")
        problems = tuple(replace(p, same=False) for p in problems)  # rows and columns are cut apart
        how: dict[str, Any] = {"backend": request.backend, "device": request.device, "calls": request.calls}
        choice = select.choose(problems, options=request.backend_options, **how)
        chosen = choice.name, choice.device, choice.devices, tuple(replace(p, device=choice.device) for p in problems)
        digests, shares = f"{found.digest:032x} {digest:032x}", np.exp(found.totals - found.log_total)
        known = request.settled, shape, bandwidth, asked.centre, log_total, shares, found.carrying
        return BlockPlan(*known, *chosen, digests)
