"""What ``backend="auto"`` does when the backend that it has chosen fails while it works: the next best one answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ..choice import select, started
from ..engine.failures import BackendFailed
from ..messages import warn_once
from .request import Request

__all__ = ["set_aside", "with_fallback"]

R = TypeVar("R")


def with_fallback(request: Request, compute: Callable[[], R]) -> R:
    """Return ``compute()``, which plans and runs; planned anew where the backend that was chosen fails.

    Raises
    ------
    BackendUnavailable
        The backend that the user named failed, or none is left.
    """
    while True:
        try:
            return compute()
        except BackendFailed as failure:
            set_aside(request, failure)


def set_aside(request: Request, failure: BackendFailed) -> None:
    """Let ``"auto"`` take the backend that failed no more in this process, and say so; raise where it was named."""
    if select.named_backend(request.backend) != "auto":
        raise failure
    started.set_aside(failure.backend, failure.device, f"set aside: {failure}")
    warn_once(f"{failure}. Until this process ends, backend='auto' does without it.")
