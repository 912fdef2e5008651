"""What ``sdkde-autotune calibrate`` still imports: this module goes with that command."""

from __future__ import annotations

import math
import platform
from collections.abc import Iterator
from contextlib import contextmanager

from ..messages import tuning_is_off
from .cards import Processor

__all__ = ["ignored", "implausible", "machine_of", "tuning_is_off"]


def implausible(name: str, value: object) -> str:
    """Return why a stored value is none that a measurement gives; empty if it may be one."""
    if not isinstance(name, str) or not isinstance(value, int | float) or not abs(value) < 1e300:
        return "it is no finite number by name"
    times = {"startup": (0.0, 3600.0), "overhead": (0.0, 60.0)}
    least, most = times.get(name, (1e-4, 1e4) if " " in name else (-math.inf, math.inf))
    return "" if least <= value <= most else f"it is {value:g}, and a measurement gives {least:g} to {most:g}"


def machine_of(on: Processor) -> str:
    """Return the name under which a processor's calibration is stored: a GPU's own, a CPU's with the host's."""
    return on.name if on.threads == 1 and on.overlaps else f"{platform.node() or 'host'}: {on.name}"


@contextmanager
def ignored() -> Iterator[None]:
    """Do nothing: no price is corrected."""
    yield
