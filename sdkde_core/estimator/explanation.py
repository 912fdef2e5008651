"""What an estimate would do and why, for people and for programs."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ..arrays import Argument, check_query, check_weights
from ..bandwidth.matrix import Bandwidth
from ..bandwidth.rules import check_rule
from ..bandwidth.selection import Selection
from ..choice import select
from ..choice.cost import typical_extent
from ..choice.judge import Candidate
from ..protocol import TOLERANCES, Problem, Reduction
from . import autograd
from .fitted import Fitted, Ran, run, with_fallback
from .laplace import NegativeMass
from .mapped import located, mapped, shares
from .request import Request
from .stacked import stacked


@dataclass(frozen=True)
class PassLine:
    """One pass: what for, over how much, and how long that takes (seconds; None where not known)."""

    purpose: str
    reduction: str
    m: int
    n: int
    d: int
    precision: str
    extent: float
    predicted_seconds: float | None
    measured_seconds: float | None = None
    far_points: int = 0


@dataclass(frozen=True)
class Explanation:
    """Returned by :func:`sdkde_core.explain`; ``str()`` for people, :meth:`to_dict` for programs."""

    method: str
    bandwidth: str
    backend: str
    device: str
    reason: str
    passes: tuple[PassLine, ...]
    candidates: tuple[Candidate, ...]
    calls: int
    data_device: str = "cpu"
    negative_mass: NegativeMass | None = None
    selection: Selection | None = field(default=None, compare=False)  # what it chose is the bandwidth
    kernel: str = "gaussian"
    stack: dict[str, tuple[float, float | None]] | None = None  # by part its share, and mean log of left-out samples
    coordinates: str | None = None
    distinct: float = 1.0  # what share of the samples is expected to differ, see Problem

    @classmethod
    def of(
        cls, request: Request, problems: tuple[Problem, ...], choice: select.Choice, bandwidth: str,
        reports: Sequence[Ran] = (), **more: Any,
    ) -> Explanation:  # fmt: skip
        """Make one of a plan; ``reports``: of the passes, if they were run; ``more``: the last fields."""
        seconds, lines = next(c for c in choice.candidates if c.chosen).pass_seconds, []
        density = "the density" if request.method != "laplace" else "the signed density"
        for i, (problem, step) in enumerate(zip(problems, request.passes)):
            purpose = density if step.most is None else "the guard of its tails"
            if step.moves:
                purpose = "how wide kernels are, and how samples move" if request.adaptive else "how samples move"
            p, took, far = reports[i] if reports else (problem, None, 0)
            size = str(p.reduction), p.m, p.n, p.d, p.precision, p.extent
            lines.append(PassLine(purpose, *size, seconds[i] if seconds else None, took, far))
        chosen = choice.name, choice.where, choice.reason, tuple(lines), choice.candidates, choice.calls
        return cls(request.method, bandwidth, *chosen, kernel=request.kernel, distinct=problems[0].distinct, **more)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain dicts, lists, numbers and strings."""
        result = asdict(self)
        result["selection"] = None if self.selection is None else self.selection.to_dict()
        result["passes"], result["candidates"] = list(result["passes"]), list(result["candidates"])
        return result

    def __str__(self) -> str:
        last = next(p for p in self.passes if "samples move" not in p.purpose)
        error = TOLERANCES[last.precision][Reduction.LOG_SUM].absolute
        how = self.method if self.kernel == "gaussian" else f"{self.method} with the {self.kernel} kernel"
        lines = [f"{how} of {last.n} samples at {last.m} points, d = {last.d}"]
        for label, (share, left_out) in (self.stack or {}).items():
            said = "" if left_out is None else f", mean log density of left-out samples {left_out:.4g}"
            lines.append(f"  {100.0 * share:.3g} % {label}{said}")
        lines += [f"in coordinates {self.coordinates}"] * (self.coordinates is not None)
        lines += ["what follows is of sdkde"] * (self.stack is not None) + [f"bandwidth {self.bandwidth}"]
        if self.selection is not None:
            lines.append(f"chosen from the data: {self.selection.reason}")
        lines.append(f"precision {last.precision}: errors of log p up to about {error:.0e}")
        lines += [f"the farthest point is {last.extent:.3g} bandwidths from the centre"]
        differ = f"about {self.distinct * last.n:.2g} samples differ; on a CPU equal ones are summed once"
        lines += [differ] * (self.distinct < 1.0) + ["", "passes (rows × samples)"]
        for p in self.passes:
            took = "" if p.measured_seconds is None else f", took {_time(p.measured_seconds)}"
            far = f", {p.far_points} far points summed apart" if p.far_points else ""
            times = f"predicted {_time(p.predicted_seconds)}{took}{far}"
            lines.append(f"  {p.reduction:8} {p.m} × {p.n}, d = {p.d}: {p.purpose}, {times}")
        if self.negative_mass is not None:
            lines.append(f"the density is negative somewhere: its integral there is −{self.negative_mass}")
        few = {1: "all of it, for the only call", 10: "a tenth, for one of ten calls"}
        counted = few.get(self.calls, "a ten-thousandth, for one of many calls")
        lines += ["", f"backends that can, by predicted time + what counts of start-up: {counted}"]
        able, unable = ([c for c in self.candidates if c.ok is ok] for ok in (True, False))
        names = {c: f"{c.name} ({c.device})" if c.device != "-" else c.name for c in self.candidates}
        width = max(map(len, names.values()))
        for c in able:
            price = "time not known" if c.seconds is None else f"{_time(c.seconds)} + {_time(c.counted_seconds)}"
            lines.append(f"{'→' if c.chosen else ' '} {names[c]:{width}}  {price:18}  {c.reason}")
        if unable:
            lines += ["", "backends that cannot", *(f"  {names[c]:{width}}  {c.reason}" for c in unable)]
        lines += ["", f"chosen: {self.backend} on {self.device}, {self.reason}"]
        return "\n".join(lines)


def explained(request: Request, train_or_shape: Any, query_or_shape: Any = None, *, measure: bool) -> Explanation:
    shape = _shape_of("train", train_or_shape)
    if request.mapped:
        if shape is not None:
            raise ValueError("coordinates are fitted to data, not to their shape; pass the samples, or leave them out")
        request, z, coordinates, n = mapped(request, train_or_shape)
        query = None if query_or_shape is None else Argument.of("query", query_or_shape)
        if query is not None:
            check_query(query, n, z.shape[1], z.names)
            query = query._replace(array=located(coordinates, query, z.array[0])[1])
        return replace(explained(request, z, query, measure=measure), coordinates=str(coordinates))
    if request.method == "stacked":
        own = replace(request, method="sdkde", coordinates=None)
        first = explained(own, train_or_shape, query_or_shape, measure=measure)
        stack = {} if shape is not None else shares(stacked(request, train_or_shape)[0])
        return replace(first, method="stacked", stack=stack)
    if shape is not None:
        if measure:
            raise ValueError("measure=True needs the data, not their shape")
        return _of_shape(request, *shape, query_or_shape)
    if _shape_of("query", query_or_shape) is not None:
        raise ValueError(f"query is the shape {query_or_shape}, but train is data; pass both as data or both as shapes")

    def compute(request: Request) -> Explanation:
        ready = autograd.plan(request, train_or_shape, query_or_shape, explained=True)
        if not ready.problems[-1].m:
            raise ValueError("query is empty: there is nothing to explain")
        reports: list[Ran] = []
        if measure:
            run(ready, reports.append)
        given = ready.request, ready.problems, ready.choice, str(ready.request.annotated(ready.bandwidth)), reports
        mass = Fitted.of(ready).negative_mass if measure and request.method == "laplace" else None
        more: dict[str, Any] = {"data_device": ready.data.came_from, "selection": ready.bandwidth.selection}
        return Explanation.of(*given, negative_mass=mass, **more)

    return with_fallback(request, compute)


def _of_shape(request: Request, n: int, d: int, query: Any) -> Explanation:
    """``query``: a shape or an array, or None."""
    m = None
    if query is not None:
        m, width = _shape_of("query", query) or _shape_of("query", Argument.of("query", query).shape) or (0, 0)
        if width != d or m < 1:
            raise ValueError(f"query has the shape {(m, width)}, but train has {d} dimensions; pass (points, {d})")
    if isinstance(request.bandwidth, str):
        check_rule(request.bandwidth, request.method, request.kernel)
    else:
        Bandwidth.of(request.bandwidth, d)
    requires = frozenset({"weights"} if request.weights is not None else ())
    problems = request.problems(m, n, d, typical_extent(n, d), requires, "float64", "cpu")
    if request.weights is not None:
        if (weights := Argument.of("weights", request.weights)).shape != (n,):
            raise ValueError(f"weights has shape {weights.shape}, but train has {n} points; pass shape ({n},)")
        problems = tuple(replace(p, weight_span=check_weights(weights.array)[1]) for p in problems)
    where: Any = {"backend": request.backend, "device": request.device, "options": request.backend_options}
    choice = select.choose(problems, explained=True, calls=request.calls, **where)
    return Explanation.of(request, problems, choice, f"{request.bandwidth} (from a shape: nothing computed)")


def _shape_of(name: str, value: Any) -> tuple[int, int] | None:
    """(points, dimensions) if ``value`` is a shape, a tuple of one or two integers; None for anything else."""
    if not isinstance(value, tuple) or not value or not all(isinstance(v, numbers.Integral) for v in value):
        return None
    shape = tuple(int(v) for v in value)
    if len(shape) > 2 or min(shape) < 1:
        raise ValueError(f"{name} has the shape {shape}; pass (points, dimensions), or (points,) in one dimension")
    return shape[0], shape[1] if len(shape) == 2 else 1


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "unknown"
    if seconds >= 100:
        return f"{seconds:.0f} s"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
