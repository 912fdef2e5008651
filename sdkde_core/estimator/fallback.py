"""What ``backend="auto"`` does when the backend that it has chosen fails: the next best one answers."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from ..choice import registry, select
from ..engine.failures import BackendFailed, OutOfReach
from ..messages import warn_once
from .request import Request

_logger = logging.getLogger("sdkde")

R = TypeVar("R")


def with_fallback(request: Request, compute: Callable[[Request], R]) -> R:
    """Return ``compute(request)``, which plans and runs; planned anew where the backend that was chosen fails.

    BackendUnavailable where the user named the backend that failed, or none is left.
    """
    while True:
        try:
            return compute(request)
        except BackendFailed as failure:
            set_aside(request, failure)


def without(request: Request, stopped: OutOfReach) -> Request:
    """Return the request for this call to go on with: it does without the backend that does not answer."""
    _logger.debug("backend %s on %s %s", stopped.backend, stopped.device, stopped)
    return replace(request, without={**request.without, (stopped.backend, stopped.device): str(stopped)})


def set_aside(request: Request, failure: BackendFailed) -> None:
    """Let ``"auto"`` take the backend that failed no more in this process, and say so; raise where it was named.

    Among ranks too: the others have not failed, and do not plan anew.
    """
    if select.named_backend(request.backend) != "auto" or request.ranks is not None:
        raise failure
    registry.aside[failure.backend, failure.device] = f"set aside: {failure}"
    warn_once(f"{failure}. Until this process ends, backend='auto' does without it.")
