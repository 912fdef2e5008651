"""Choices that were made before: in a loop all calls ask for the same, and to judge every backend takes half of a call.

What is chosen follows from the passes, from what the caller asked for, and from what is read here besides: the
backends, those set aside or warmed up, the hardware, the environment. Choices for which more of the data was looked at,
a sample or the share of the pairs beyond an extent, are not kept.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from ..protocol import Problem
from . import calibration, hardware, registry
from .judge import Share

__all__ = ["MOST", "remembered"]

C = TypeVar("C")

#: Choices kept; then all are forgotten.
MOST = 256

#: What of the environment the choice depends on, besides what is in the problems and in :func:`hardware.visible_gpus`.
#: Where it is the same as it was, it need not be checked again.
ENVIRONMENT = ("SDKDE_TUNING", "SDKDE_DB", "SDKDE_REPLAY")


def remembered(
    problems: Sequence[Problem],
    share: Share | None,
    asked: tuple[Any, ...],
    choose: Callable[[Sequence[Problem], Share | None], C],
) -> C:
    """Return ``choose(problems, share)``, or what that was when the same was ``asked`` before."""
    of_them = registry.records(), registry.made, hardware.cpu()  # made anew where they change
    apart = tuple(registry.aside.items()), tuple(registry.warm.items()), hardware.visible_gpus()
    key = (tuple(problems), *asked, *apart, calibration.is_ignored(), *map(os.environ.get, ENVIRONMENT))
    known = registry.chosen.get(key)
    if known is not None and all(a is b for a, b in zip(known[0], of_them)):
        choice: C = known[1]
        return choice
    looked: list[Any] = []

    def noting_share(step: int, limit: float) -> float:
        looked.append(step)
        assert share is not None  # it is handed on only where there is one
        return share(step, limit)

    choice = choose(problems, None if share is None else noting_share)
    if not looked:
        if len(registry.chosen) >= MOST:
            registry.chosen.clear()
        registry.chosen[key] = of_them, choice
    return choice
