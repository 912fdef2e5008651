"""Tuned launch configurations: how a backend looks them up, and how it declares what can be tuned."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import platform
import re
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from typing import Protocol as TypingProtocol

from .choice.cards import GPU, card_name
from .messages import switched_off, warn_once
from .protocol import BackendInfo, Problem

__all__ = ["GPU", "GROUP", "Compiled", "Config", "Query", "Space", "Tuned", "card_name"]
__all__ += ["checked", "reject", "space_of", "this_cpu", "tuned", "using"]

GROUP = "sdkde.tuning"

#: A launch configuration: values by parameter.
Config = Mapping[str, Any]
C = TypeVar("C", bound=tuple[Any, ...])


@dataclass(frozen=True)
class Query:
    """The kernel and the device that a launch configuration is asked for; the problem goes with it.

    Parameters
    ----------
    backend, kernel : str
    config_version : int
        The author raises it when a parameter changes its meaning. A configuration stored under another version is never
        returned.
    dimension : int
        The dimension as the kernel pads it. Problems that are padded alike share configurations.
    gpu, architecture : str
        :func:`sdkde_core.choice.cards.card_name` of the device, and ``"sm_90"``; or what :func:`this_cpu` returns.
    """

    backend: str
    kernel: str
    config_version: int
    dimension: int
    gpu: str
    architecture: str


class Tuned(NamedTuple):
    """A launch configuration, and how closely it was tuned for the problem: from ``"exact"`` to ``"predicted"``."""

    config: Config
    rung: str


class Compiled(NamedTuple):
    """Resources of a compiled kernel: registers per thread, bytes of shared memory, bytes spilled."""

    registers: int
    shared: int
    spills: int


class Space(TypingProtocol):
    """A backend's kernels and their parameters: the object that ``BackendInfo.tuning`` names.

    No method needs a GPU. ``kernel`` is a kernel's name, ``architecture`` one such as ``"sm_86"``. Only :meth:`compile`
    may import heavy packages. The last four methods are not called for a backend that runs on CPUs.
    """

    @property
    def config_version(self) -> int:
        """Version of the parameters' meaning, see :class:`Query`."""

    def kernels(self, problem: Problem) -> tuple[str, ...]:
        """Return the kernels that a problem runs and that can be tuned, by descending time."""

    def dimension(self, kernel: str, problem: Problem) -> int:
        """Return the dimension as the kernel pads it."""

    def parameters(self, kernel: str) -> Mapping[str, tuple[Any, ...]]:
        """Return the values worth trying of each parameter, in order."""

    def default(self, kernel: str, problem: Problem, architecture: str) -> Config:
        """Return the configuration that an untuned problem gets."""

    def limit(self, kernel: str, config: Config, problem: Problem, architecture: str) -> str | None:
        """Return why a configuration cannot run, as far as its parameters tell; None if it can."""

    def seconds(self, kernel: str, config: Config, problem: Problem, card: GPU) -> float:
        """Return the time that the cost model predicts for a configuration on a card; 0: there is no model."""

    def compile(self, kernel: str, config: Config, problem: Problem, architecture: str) -> Compiled:
        """Compile for an architecture; such a GPU need not be there, unless there is no cost model (:meth:`seconds`).

        Raises
        ------
        Exception
            Whatever the compiler raises.
        """

    def code(self, kernel: str, config: Config, problem: Problem) -> Hashable:
        """Return all that the compiled code depends on, but for the architecture; equal values are compiled once."""

    def too_much(self, compiled: Compiled, architecture: str) -> str | None:
        """Return why a compiled kernel must not run (it spills, needs too much shared memory); None if it may."""


def space_of(info: BackendInfo) -> Space | None:
    """Import a backend's search space; None if it has none."""
    module, _, name = info.tuning.partition(":")
    return getattr(importlib.import_module(module), name) if module else None


def tuned(query: Query, problem: Problem, accept: Callable[[Config], bool] | None = None) -> Tuned | None:
    """Return the best known launch configuration.

    The answer comes from the one entry point of group ``sdkde.tuning``, a callable ``lookup(query, problem, accept)``
    that returns ``(config, rung)`` or None. If it fails, a warning says so once, and the backend uses its default.

    Parameters
    ----------
    query : Query
    problem : Problem
    accept : callable, optional
        ``accept(config)``: whether the kernel can be launched so. If not, the next best configuration is tried. A
        configuration may have been tuned for other sizes, for other features, or in nearby dimensions. If it raises
        ValueError or TypeError, the stored values are no configuration, and a warning says why.

    Returns
    -------
    Tuned or None
        None if no tuner is installed, nothing is stored, or ``SDKDE_TUNING`` is ``off``.

    Raises
    ------
    ValueError
        ``SDKDE_TUNING`` is neither on nor off; or the configuration of :func:`using` is not accepted.
    """

    def fits(config: Config) -> bool:
        try:
            return accept is None or accept(config)
        except (TypeError, ValueError) as error:
            warn_once(f"a tuned configuration of {query.kernel} is ignored: {error}")
            return False

    if (forced := _forced.get().get(query.kernel)) is not None:
        if not fits(forced):
            raise ValueError(f"{query.kernel} cannot be launched with {dict(forced)} on {query.architecture}")
        return Tuned(forced, "forced")
    lookup = None if switched_off("SDKDE_TUNING") else _lookup()
    if lookup is None:
        return None
    try:
        found = lookup(query, problem, lambda x: (query, frozenset(x.items())) not in _rejected and fits(x))
        return None if found is None else Tuned(*found)
    except Exception as error:
        what = f"look-up for {query.kernel}"
        warn_once(f"tuning {what} failed, using the default configuration: {error}", what)
        return None


def reject(query: Query, found: Tuned, error: BaseException) -> None:
    """Exclude a configuration that failed to launch from this process's look-ups, and warn once."""
    key = query, frozenset(found.config.items())
    if key not in _rejected:
        _rejected.add(key)
        config, why = ", ".join(f"{k}={v}" for k, v in found.config.items()), str(error).partition("\n")[0]
        remedy = "`sdkde-autotune --again` measures stored configurations again"
        warn_once(f"{query.kernel} cannot run as tuned ({config}, rung {found.rung}): {why}; {remedy}")


def checked(kind: type[C], values: Mapping[str, Any], space: Mapping[str, tuple[int, ...]]) -> C:
    """Return the configuration, a NamedTuple of integers, that a mapping (from a table, or from the user) describes.

    Raises
    ------
    ValueError
        An unknown name, or a value that is not in ``space``.
    """
    names = list(kind._fields)  # type: ignore[attr-defined]
    if sorted(values) != sorted(names):
        raise ValueError(f"a configuration has {', '.join(names)}, not {', '.join(map(str, values))}")
    for name, value in values.items():
        if type(value) is not int or value not in space[name]:
            raise ValueError(f"{name} is {value!r}; pass one of {space[name]}")
    return kind(**values)


@contextmanager
def using(configs: Mapping[str, Config]) -> Iterator[None]:
    """Launch the named kernels with these configurations in this thread, as a tuner does to try them."""
    token = _forced.set({**_forced.get(), **configs})
    try:
        yield
    finally:
        _forced.reset(token)


_forced: ContextVar[Mapping[str, Config]] = ContextVar("sdkde_forced", default={})  # noqa: B039, never changed
_rejected: set[tuple[Query, frozenset[Any]]] = set()


@functools.cache
def _lookup() -> Callable[..., Any] | None:
    """The first entry point of the group, by name; None if there is none or it does not load, with a warning."""
    points = sorted(importlib.metadata.entry_points(group=GROUP), key=lambda point: (point.name, point.value))
    try:
        return points[0].load() if points else None
    except Exception as error:
        warn_once(f"{points[0].value} does not load, so group {GROUP} is not used: {error!r}")
        return None


@functools.cache
def this_cpu() -> tuple[str, str]:
    """Return the CPU's name and architecture, which stand in a :class:`Query` for those of a GPU."""
    name = platform.processor()
    with suppress(OSError):  # Linux, where `processor` is empty or the architecture
        name = next(iter(re.findall(r"^model name\s*: (.+)", Path("/proc/cpuinfo").read_text(), re.M)), name)
    return " ".join(name.split()) or "CPU", platform.machine()
