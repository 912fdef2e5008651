"""The hook through which backends look up tuned launch configurations."""

from __future__ import annotations

import functools
import importlib.metadata
import logging
import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from .protocol import Problem

__all__ = ["GROUP", "Tuned", "tuned"]

GROUP = "sdkde.tuning"
_logger = logging.getLogger("sdkde")


class Tuned(NamedTuple):
    """A launch configuration, and the rung of the look-up ladder that it was found on (``"exact"``, ``"gpu"`` …)."""

    config: Mapping[str, Any]
    rung: str


def tuned(kernel: str, problem: Problem) -> Tuned | None:
    """Return the best known launch configuration of ``kernel`` for ``problem``.

    The answer comes from the one entry point of group ``sdkde.tuning``, a callable ``lookup(kernel, problem)`` that
    returns ``(config, rung)`` or None. Never raises: a look-up that fails is logged, and the backend uses its default.

    Returns
    -------
    Tuned or None
        None: nothing is installed, nothing is known, or ``SDKDE_TUNING`` is ``off``.
    """
    if os.environ.get("SDKDE_TUNING", "").lower() in ("off", "0", "false", "no"):
        return None
    lookup = _lookup()
    if lookup is None:
        return None
    try:
        found = lookup(kernel, problem)
        return None if found is None else Tuned(*found)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        _logger.warning("tuning look-up for %s failed, using the default configuration: %s", kernel, error)
        return None


@functools.cache
def _lookup() -> Callable[[str, Problem], Any] | None:
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
