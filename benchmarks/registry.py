"""What a benchmark is, and all that there are."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["GROUPS", "REGISTRY", "SCALES", "Benchmark", "Case", "Registry", "Setting", "Skipped"]

Case = dict[str, Any]

#: Groups in the order in which they are listed, run and reported.
GROUPS = {
    "paper": "The paper's figures and tables",
    "readers": "What its readers asked for",
    "data": "Real data",
    "ours": "Only about sdkde",
}

#: Seconds on any machine; minutes on two cores; the paper's sizes.
SCALES = ("small", "medium", "full")


class Skipped(Exception):
    """A case cannot be measured here; the message says why, and how to install what is missing."""


@dataclass(frozen=True)
class Setting:
    """How to run: ``device`` is "cpu" or "cuda:0"; ``seconds`` a subject may be called for, after a warm-up."""

    device: str = "cpu"
    scale: str = "small"
    seconds: float = 0.6
    subjects: tuple[str, ...] = ()  # names begin with one of these; all if empty
    without: tuple[str, ...] = ()  # names do not begin with these
    options: Mapping[str, str] | None = None  # of single benchmarks, by name

    @property
    def kind(self) -> str:
        """The kind of device: "cpu" or "cuda"."""
        return self.device.partition(":")[0]

    def at(self, small: Any, medium: Any, full: Any) -> Any:
        """The value of the scale."""
        return dict(zip(SCALES, (small, medium, full)))[self.scale]

    def option(self, name: str, default: str = "") -> str:
        return (self.options or {}).get(name, default)


@dataclass(frozen=True)
class Benchmark:
    """One benchmark.

    Parameters
    ----------
    name, group, about : str
        ``about`` is one sentence.
    cases : function of a Setting
        The cases at its scale, the most important first: dicts of numbers and words.
    measure : function of a Setting and a case
        What was measured, a dict. Raises Skipped where that is impossible here.
    views : sequence of Table and Plot, or a function of the records that returns one
    gpu : bool
        Whether it is worth a run on a GPU.
    weight : float
        Its share of a run's time over that of others.
    """

    name: str
    group: str
    about: str
    cases: Callable[[Setting], Iterable[Case]]
    measure: Callable[[Setting, Case], dict[str, Any]]
    views: Any
    gpu: bool = False
    weight: float = 1.0


class Registry:
    """The benchmarks by name; the files of ``entries`` add theirs when they are first asked for."""

    def __init__(self) -> None:
        self._found: dict[str, Benchmark] = {}

    def add(self, benchmark: Benchmark) -> Benchmark:
        """Add one.

        Raises
        ------
        ValueError
            The name is taken, or the group unknown.
        """
        if benchmark.name in self._found or benchmark.group not in GROUPS:
            raise ValueError(f"{benchmark.name!r} of group {benchmark.group!r}: the name is taken, or no such group")
        self._found[benchmark.name] = benchmark
        return benchmark

    def __getitem__(self, name: str) -> Benchmark:
        _load()
        if name not in self._found:
            raise ValueError(f"no benchmark {name!r}; pass one of {', '.join(b.name for b in self)}")
        return self._found[name]

    def __iter__(self) -> Iterator[Benchmark]:
        """All, by group, those of most weight first."""
        _load()
        order = list(GROUPS)
        return iter(sorted(self._found.values(), key=lambda b: (order.index(b.group), -b.weight)))


REGISTRY = Registry()


@functools.cache
def _load() -> None:
    from . import entries

    for module in pkgutil.iter_modules(entries.__path__, f"{entries.__name__}."):
        importlib.import_module(module.name)
