"""Corrections to the cost model's times, as ``sdkde-autotune calibrate`` measured them on this machine."""

from __future__ import annotations

import functools
import importlib.metadata
import math
import os
import platform
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from ..messages import did_you_mean, warn_once
from ..protocol import Problem
from .cards import Processor

__all__ = [
    "GROUP",
    "Calibration",
    "calibration_of",
    "ignored",
    "implausible",
    "is_ignored",
    "load_lookup",
    "machine_of",
    "switched_off",
    "tuning_is_off",
]

GROUP = "sdkde.calibration"


@dataclass(frozen=True)
class Calibration:
    """How a backend's measured times on a machine differ from those that the cost model predicts.

    Parameters
    ----------
    startup : float or None
        Seconds from nothing imported to the first result; None: not measured.
    overhead : float
        Seconds of a pass that the model does not predict: argument handling, dispatch.
    factors : mapping of (str, str) to tuple of (float, float)
        By reduction and precision: pairs of log2 d and the log of measured over predicted time, by ascending d.
    """

    startup: float | None = None
    overhead: float = 0.0
    factors: Mapping[tuple[str, str], tuple[tuple[float, float], ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, values: Mapping[str, float]) -> Calibration:
        """Make one of stored values: ``startup``, ``overhead``, and the factor ``"mean fast 16"`` for d = 16.

        Unknown names are skipped, and so are values that no measurement gives, see :func:`implausible`.
        """
        values = {name: value for name, value in values.items() if not implausible(name, value)}
        factors: dict[tuple[str, str], list[tuple[float, float]]] = {}
        for name, value in values.items():
            words = name.split(" ")
            if len(words) == 3 and words[2].isdecimal() and 0 < float(words[2]) < math.inf:
                factors.setdefault((words[0], words[1]), []).append((math.log2(float(words[2])), math.log(value)))
        found = {key: tuple(sorted(points)) for key, points in factors.items()}
        times = {name: values[name] for name in ("startup", "overhead") if name in values}
        return cls(**times, factors=found)

    def factor(self, problem: Problem) -> float:
        """Return measured over predicted time of a pass, interpolated between dimensions; 1 if none was measured."""
        points = self.factors.get((str(problem.reduction), problem.precision), ())
        if not points:
            return 1.0
        x = math.log2(problem.d)
        below = max((p for p in points if p[0] <= x), default=points[0])
        above = min((p for p in points if p[0] >= x), default=points[-1])
        share = (x - below[0]) / (above[0] - below[0]) if above[0] > below[0] else 0.0
        return math.exp(below[1] + share * (above[1] - below[1]))

    def seconds(self, problem: Problem, predicted: float) -> float:
        """Return the time of a pass that the model gives ``predicted`` seconds."""
        return self.overhead + self.factor(problem) * predicted

    def __bool__(self) -> bool:
        return self != _NOTHING


_NOTHING = Calibration()

#: The least and the greatest that a measurement gives: seconds; and measured over predicted times.
_PLAUSIBLE = {"startup": (0.0, 3600.0), "overhead": (0.0, 60.0)}
_FACTORS = 1e-4, 1e4


def implausible(name: str, value: object) -> str:
    """Return why a stored value is none that a measurement gives; empty if it may be one."""
    if not isinstance(name, str) or not isinstance(value, int | float) or not abs(value) < 1e300:
        return "it is no finite number by name"
    least, most = _PLAUSIBLE.get(name, _FACTORS if " " in name else (-math.inf, math.inf))
    return "" if least <= value <= most else f"it is {value:g}, and a measurement gives {least:g} to {most:g}"


#: Values of variables that switch something off, in lower case.
_ON, _OFF = ("on", "1", "true", "yes"), ("off", "0", "false", "no")


def machine_of(on: Processor) -> str:
    """Return the name under which a processor's calibration is stored: a GPU's own, a CPU's with the host's."""
    return on.name if on.threads == 1 and on.overlaps else f"{platform.node() or 'host'}: {on.name}"


def calibration_of(backend: str, on: Processor | str) -> Calibration:
    """Return a backend's calibration on a processor, or on the card of that name.

    An empty one if none was measured or ``SDKDE_TUNING`` is ``off``.

    The answer comes from the first entry point of group ``sdkde.calibration``, a callable
    ``calibration(backend, machine)`` that returns values by name. Never measures. A failure is told once.

    Raises
    ------
    ValueError
        ``SDKDE_TUNING`` is neither on nor off.
    """
    if _ignored.get() or tuning_is_off():
        return _NOTHING
    lookup = _lookup()
    if lookup is None:
        return _NOTHING
    try:
        return _parsed(frozenset(lookup(backend, on if isinstance(on, str) else machine_of(on)).items()))
    except Exception as error:
        warn_once(f"the calibration of {backend} is not used: {error!r}", f"calibration of {backend}")
        return _NOTHING


@contextmanager
def ignored() -> Iterator[None]:
    """Use the cost model's times without corrections, in this thread."""
    token = _ignored.set(True)
    try:
        yield
    finally:
        _ignored.reset(token)


def is_ignored() -> bool:
    """Whether that holds now."""
    return _ignored.get()


_ignored: ContextVar[bool] = ContextVar("sdkde_calibration_ignored", default=False)


@functools.lru_cache(maxsize=64)
def _parsed(values: frozenset[tuple[str, float]]) -> Calibration:
    return Calibration.of(dict(values))


@functools.cache
def _lookup() -> Callable[[str, str], Mapping[str, Any]] | None:
    return load_lookup(GROUP)


def tuning_is_off() -> bool:
    """Whether ``SDKDE_TUNING`` says to ignore all that was tuned or calibrated; ValueError for what says neither."""
    return switched_off("SDKDE_TUNING")


def switched_off(variable: str) -> bool:
    """Whether a variable of the environment that is on by default says off; ValueError for what says neither."""
    text = os.environ.get(variable, "").lower()
    if text and text not in (*_ON, *_OFF):
        raise ValueError(f"{variable} is {text!r}; set 'off' or 'on'{did_you_mean(text, (*_ON, *_OFF))}")
    return text in _OFF


def load_lookup(group: str) -> Callable[..., Any] | None:
    """Load the first entry point of a group, by name; None if there is none or it does not load, with a warning."""
    points = sorted(importlib.metadata.entry_points(group=group), key=lambda point: (point.name, point.value))
    if not points:
        return None
    if len(points) > 1:
        warn_once(f"several entry points of group {group}, using the first: {', '.join(p.value for p in points)}")
    try:
        return points[0].load()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        warn_once(f"{points[0].value} does not load, so group {group} is not used: {error!r}")
        return None
