"""Backends made and probed once a process, and those that ``"auto"`` does without.

What was found is kept until :func:`sdkde_core.choice.registry.refresh`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..protocol import Backend, BackendInfo, Support
from . import registry
from .judge import as_support, ask

__all__ = ["set_aside", "start", "unusable", "warmed"]


def start(info: BackendInfo, device: str, options: Mapping[str, Any] | None = None) -> tuple[Backend | None, Support]:
    """Make a backend and probe the device, or say why it cannot be used there; what was found is kept.

    Raises
    ------
    ValueError
        The options do not suit the backend.
    """
    key = (info.implementation, device, repr(sorted((options or {}).items())))
    if key not in registry.made:
        registry.made[key] = _start(info, device, options)
    backend, support = registry.made[key]
    if not support.ok and not options:
        registry.aside[info.name, device] = support.reason
    return backend, support


def set_aside(name: str, device: str, reason: str) -> None:
    """Let ``"auto"`` take a backend no more on a device."""
    registry.aside[name, device] = reason


def warmed(name: str, device: str, compiled: bool) -> None:
    """Count a backend's start on a device no more; ``compiled``: nor what it compiles for a problem."""
    registry.warm[name, device] = compiled


def unusable() -> dict[tuple[str, str], str]:
    """Return why ``"auto"`` does not take backends, by name and device."""
    return dict(registry.aside)


def _start(info: BackendInfo, device: str, options: Mapping[str, Any] | None) -> tuple[Backend | None, Support]:
    if options:
        try:
            backend, failure = info.load(options), ""
        except (TypeError, ValueError) as error:
            raise ValueError(f"backend_options {dict(options)} do not suit backend {info.name!r}: {error}") from error
    else:
        backend, failure = ask(info.load)
    if failure:
        return None, Support(False, f"does not load: {failure}")
    probed, failure = ask(backend.probe, device)
    if failure:
        return None, Support(False, f"its probe of {device} failed: {failure}")
    return backend, as_support(probed)
