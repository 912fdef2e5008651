"""What an estimate would do and why, for people and for programs."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ..arrays import Argument
from ..bandwidth.selection import Selection
from ..choice.judge import Candidate
from ..choice.select import Choice
from ..protocol import TOLERANCES, Problem, Reduction
from .fitted import PassReport
from .negative import NegativeMass

__all__ = ["Explanation", "PassLine", "shape_of"]


@dataclass(frozen=True)
class PassLine:
    """One pass: what is summed, over how much, and how long that takes (seconds; None where not known)."""

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

    @classmethod
    def of(
        cls,
        method: str,
        problems: Sequence[Problem],
        choice: Choice,
        bandwidth: str,
        reports: Sequence[PassReport] = (),
        data_device: str = "cpu",
        negative_mass: NegativeMass | None = None,
        selection: Selection | None = None,
    ) -> Explanation:
        """Put together what planning, and running if it was run, have said."""
        lines = []
        priced = next(c for c in choice.candidates if c.chosen).pass_seconds
        for i, problem in enumerate(problems):
            report = reports[i] if reports else None
            if report:
                problem = report.problem
            lines.append(
                PassLine(
                    str(problem.reduction),
                    problem.m,
                    problem.n,
                    problem.d,
                    problem.precision,
                    problem.extent,
                    priced[i] if priced else None,
                    report.seconds if report else None,
                    report.far_points if report else 0,
                )
            )
        chosen = (choice.name, choice.where, choice.reason)
        what = tuple(lines), choice.candidates, choice.calls
        return cls(method, bandwidth, *chosen, *what, data_device, negative_mass, selection, problems[-1].kernel)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain dicts, lists, numbers and strings."""
        result = asdict(self)
        result["selection"] = None if self.selection is None else self.selection.to_dict()
        result["passes"], result["candidates"] = list(result["passes"]), list(result["candidates"])
        return result

    def __str__(self) -> str:
        last = self.passes[-1]
        error = TOLERANCES[last.precision][Reduction.LOG_SUM].absolute
        how = self.method if self.kernel == "gaussian" else f"{self.method} with the {self.kernel} kernel"
        lines = [f"{how} of {last.n} samples at {last.m} points, d = {last.d}", f"bandwidth {self.bandwidth}"]
        if self.selection is not None:
            lines.append(f"chosen from the data: {self.selection.reason}")
        lines.append(f"precision {last.precision}: errors of log p up to about {error:.0e}")
        lines += [f"the farthest point is {last.extent:.3g} bandwidths from the origin", "", "passes (rows × samples)"]
        lines += [self._pass_text(p, p is last) for p in self.passes]
        if self.negative_mass is not None:
            lines.append(f"the density is negative somewhere: its integral there is −{self.negative_mass}")
        lines += ["", f"backends that can, by predicted time + what counts of start-up: {self._counted}"]
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

    def _pass_text(self, p: PassLine, last: bool) -> str:
        """One pass: its size, what it is for, and its times."""
        purpose = ("the density" if self.method != "laplace" else "the signed density") if last else "how samples move"
        times = f"predicted {_time(p.predicted_seconds)}"
        if p.measured_seconds is not None:
            times += f", took {_time(p.measured_seconds)}"
        far = f", {p.far_points} far points summed apart" if p.far_points else ""
        return f"  {p.reduction:8} {p.m} × {p.n}, d = {p.d}: {purpose}, {times}{far}"

    @property
    def _counted(self) -> str:
        """How much of start-up counts."""
        if self.calls == 1:
            return "all of it, for the only call"
        if self.data_device == "cpu":
            return "a tenth, for one of ten calls"
        return f"a ten-thousandth, for one of many calls with data on {self.data_device}"


def shape_of(name: str, value: Any) -> tuple[int, int] | None:
    """Return (points, dimensions) if ``value`` is a shape, a tuple of one or two integers; None for anything else."""
    if not isinstance(value, tuple) or not value or not all(isinstance(v, numbers.Integral) for v in value):
        return None
    shape = tuple(int(v) for v in value)
    if len(shape) > 2 or min(shape) < 1:
        raise ValueError(f"{name} has the shape {shape}; pass (points, dimensions), or (points,) in one dimension")
    return shape[0], shape[1] if len(shape) == 2 else 1


def rows_of(query: Any, d: int) -> int | None:
    """Return the rows of ``query``, a shape or an array, for a train that is given by its shape; None for None."""
    if query is None:
        return None
    shape = shape_of("query", query)
    if shape is None:
        given = Argument.of("query", query).shape
        shape = (given[0], given[1] if len(given) == 2 else 1) if len(given) in (1, 2) else (0, 0)
    if shape[1] != d or shape[0] < 1:
        raise ValueError(f"query has the shape {shape}, but train has {d} dimensions; pass (points, {d})")
    return shape[0]


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "unknown"
    if seconds >= 100:
        return f"{seconds:.0f} s"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
