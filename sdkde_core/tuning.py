"""Tuned launch configurations: how backends look them up, and what of a backend can be tuned."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple
from typing import Protocol as TypingProtocol

from .choice.cards import GPU
from .protocol import BackendInfo, Problem

__all__ = ["GROUP", "Compiled", "Query", "Space", "Tuned", "reject", "space_of", "tuned", "using"]

GROUP = "sdkde.tuning"
_logger = logging.getLogger("sdkde")

#: A launch configuration: values by parameter.
Config = Mapping[str, Any]


@dataclass(frozen=True)
class Query:
    """What a backend asks about, besides the problem.

    Parameters
    ----------
    backend, kernel : str
    config_version : int
        Raised when a parameter changes its meaning: what is stored under another is never returned.
    dimension : int
        As the kernel pads it: problems of one dimension share configurations.
    gpu : str
        :func:`sdkde_core.choice.cards.card_name` of the device.
    architecture : str
        ``"sm_90"``.
    """

    backend: str
    kernel: str
    config_version: int
    dimension: int
    gpu: str
    architecture: str


class Tuned(NamedTuple):
    """A launch configuration, and the rung of the ladder that it was found on (``"exact"`` … ``"predicted"``)."""

    config: Config
    rung: str


class Compiled(NamedTuple):
    """What compiling a kernel told: registers of a thread, bytes of shared memory, bytes that spill."""

    registers: int
    shared: int
    spills: int


class Space(TypingProtocol):
    """What of a backend can be tuned: the object that ``BackendInfo.tuning`` names. Kernels are known by name.

    Nothing in it needs a GPU; ``architecture`` is ``"sm_86"``. Only :meth:`compile` may import what is heavy.
    """

    @property
    def config_version(self) -> int:
        """Raised when a parameter changes its meaning."""

    def kernels(self, problem: Problem) -> tuple[str, ...]:
        """The kernels with launch parameters that a problem runs, those that take longest first."""

    def dimension(self, kernel: str, problem: Problem) -> int:
        """The dimension as the kernel pads it."""

    def parameters(self, kernel: str) -> Mapping[str, tuple[Any, ...]]:
        """Values worth trying, in order, by parameter."""

    def default(self, kernel: str, problem: Problem, architecture: str) -> Config:
        """The configuration that is taken where nothing is known."""

    def limit(self, kernel: str, config: Config, problem: Problem, architecture: str) -> str | None:
        """Why the configuration cannot run, by its parameters alone; None if it can."""

    def seconds(self, kernel: str, config: Config, problem: Problem, card: GPU) -> float:
        """Predicted time on a card: the cost model, with what the configuration changes."""

    def compile(self, kernel: str, config: Config, problem: Problem, architecture: str) -> Compiled:
        """Compile for an architecture, whether there is such a GPU or not.

        Raises
        ------
        Exception
            Whatever the compiler raises.
        """

    def too_much(self, compiled: Compiled, architecture: str) -> str | None:
        """Why what was compiled must not run (spills, more shared memory than there is); None if it may."""


def space_of(info: BackendInfo) -> Space | None:
    """Import what can be tuned of a backend; None if it names nothing."""
    if not info.tuning:
        return None
    module, _, name = info.tuning.partition(":")
    space: Space = getattr(importlib.import_module(module), name)
    return space


def tuned(query: Query, problem: Problem, accept: Callable[[Config], bool] | None = None) -> Tuned | None:
    """Return the best known launch configuration.

    The answer comes from the one entry point of group ``sdkde.tuning``, a callable ``lookup(query, problem, accept)``
    that returns ``(config, rung)`` or None. Never raises: a look-up that fails is logged, and the backend uses its
    default.

    Parameters
    ----------
    query : Query
    problem : Problem
    accept : callable, optional
        ``accept(config)``: whether the kernel can be launched so. The next rung is asked where it cannot.

    Returns
    -------
    Tuned or None
        None: nothing is installed, nothing is known, or ``SDKDE_TUNING`` is ``off``.
    """
    forced = _forced.get().get(query.kernel)
    if forced is not None:
        return Tuned(forced, "forced")
    if os.environ.get("SDKDE_TUNING", "").lower() in ("off", "0", "false", "no"):
        return None
    lookup = _lookup()
    if lookup is None:
        return None

    def acceptable(config: Config) -> bool:
        return (query, _frozen(config)) not in _rejected and (accept is None or accept(config))

    try:
        found = lookup(query, problem, acceptable)
        return None if found is None else Tuned(*found)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        _logger.warning("tuning look-up for %s failed, using the default configuration: %s", query.kernel, error)
        return None


def reject(query: Query, found: Tuned, error: BaseException) -> None:
    """Skip a configuration that failed to launch, for the life of this process; warns once."""
    key = query, _frozen(found.config)
    if key not in _rejected:
        _rejected.add(key)
        _logger.warning(
            "%s cannot run as tuned (%s, rung %s): %s; `sdkde-autotune verify` measures stored configurations again",
            query.kernel,
            ", ".join(f"{k}={v}" for k, v in found.config.items()),
            found.rung,
            str(error).partition("\n")[0],
        )


@contextmanager
def using(configs: Mapping[str, Config]) -> Iterator[None]:
    """Launch the named kernels with these configurations, in this thread: what a tuner tries."""
    token = _forced.set({**_forced.get(), **configs})
    try:
        yield
    finally:
        _forced.reset(token)


_forced: ContextVar[Mapping[str, Config]] = ContextVar("sdkde_forced", default={})  # noqa: B039, never changed
_rejected: set[tuple[Query, frozenset[Any]]] = set()


def _frozen(config: Config) -> frozenset[Any]:
    return frozenset(config.items())


@functools.cache
def _lookup() -> Callable[..., Any] | None:
    points = sorted(importlib.metadata.entry_points(group=GROUP), key=lambda point: (point.name, point.value))
    if not points:
        return None
    if len(points) > 1:
        _logger.warning("several entry points of group %s, using the first: %s", GROUP, [p.value for p in points])
    try:
        return points[0].load()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        _logger.warning("tuning look-up %s does not load, using default configurations: %r", points[0].value, error)
        return None
