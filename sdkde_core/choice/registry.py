"""Finding backends, entry points of group ``sdkde.backends``, and starting them, once a process.

Listing never raises and never imports what a backend depends on: only the module with its :class:`BackendInfo`.
"""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..engine.failures import raise_interrupt
from ..engine.forks import in_child
from ..protocol import FEATURES, PRECISIONS, PROTOCOL, Backend, BackendInfo, Support

#: By implementation, device and options: the backend, if it could be made, and what its probe said.
made: dict[tuple[str, str, str], tuple[Backend | None, Support]] = {}

#: By name and device: why ``"auto"`` does without a backend there.
aside: dict[tuple[str, str], str] = {}

#: Kept choices, by the question and the state that they depend on; each with the :func:`records` of its time.
chosen: dict[Any, tuple[Any, Any]] = {}

#: Backends that :func:`sdkde_core.warm_up` has started, by name and device: whether it has compiled their kernels, too.
warm: dict[tuple[str, str], bool] = {}


@dataclass(frozen=True)
class Record:
    """One plugin, usable or not.

    Its status is ``"ok"``, ``"missing"`` (a required module is not installed), ``"broken"``, ``"incompatible"``
    (protocol), or ``"shadowed"`` (another plugin has the name).
    """

    name: str  # the entry point's: what ``backend=`` takes
    status: str
    reason: str  # never empty; if not ok, the cause and the remedy
    distribution: str  # what installed it
    version: str
    value: str  # where the entry point points
    info: BackendInfo | None = None  # None where it could not be loaded

    @property
    def ok(self) -> bool:
        return self.status == "ok"


@functools.cache
def records() -> tuple[Record, ...]:
    """Return every plugin, by name; those with a shadowed name after the one that has it.

    Where two distributions claim a name, sdkde's own has it, else the first in alphabetical order of distribution
    and value.
    """
    points: dict[tuple[str, str, str], tuple[importlib.metadata.EntryPoint, str]] = {}
    named = functools.cache(lambda dist: (dist.name, dist.version))  # it reads a file for each
    for point in importlib.metadata.entry_points(group="sdkde.backends"):
        by, version = named(point.dist) if point.dist is not None else ("unknown", "unknown")
        points[point.name, by, point.value] = point, version
    result: list[Record] = []
    taken: dict[str, Record] = {}
    for name, by, value in sorted(points, key=lambda key: (key[0], key[1] != "sdkde-core", key)):
        point, version = points[name, by, value]
        if name in taken:
            reason = f"the name {name!r} is taken by {taken[name].value} of {taken[name].distribution}"
            result.append(Record(name, "shadowed", reason, by, version, value))
            continue
        info, failure = ask(point.load)
        status, reason, known = "broken", f"{value} does not load: {failure}", None
        if not failure:
            judged, failure = ask(status_of, name, info)
            status, reason, known = judged or ("broken", f"its BackendInfo cannot be read: {failure}", None)
        taken[name] = Record(name, status, reason, by, version, value, known)
        result.append(taken[name])
    return tuple(result)


# A forked child has its parent's modules and what they compiled, but no context on a device.
in_child(lambda: [warm.pop(key) for key in list(warm) if key[1] != "cpu"])


def find(name: str) -> Record | None:
    """Return the plugin that has the name, usable or not."""
    return next((r for r in records() if r.name == name and r.status != "shadowed"), None)


def status_of(name: str, info: Any) -> tuple[str, str, BackendInfo | None]:
    """Return status, reason and info of the entry point ``name``, whose value is ``info``."""
    if not isinstance(info, BackendInfo):
        return "broken", f"its entry point is a {type(info).__name__}, not a BackendInfo", None
    if info.name != name:
        return "broken", f"its BackendInfo is named {info.name!r}, its entry point {name!r}", info
    if info.protocol[0] != PROTOCOL[0] or info.protocol > PROTOCOL:
        theirs, ours = ".".join(map(str, info.protocol)), ".".join(map(str, PROTOCOL))
        side = "the plugin" if info.protocol < PROTOCOL else "sdkde"
        return "incompatible", f"speaks protocol {theirs}, this sdkde {ours}; update {side}", info
    if not all(precision in PRECISIONS for precision in info.precisions) or not info.precisions:
        return "broken", f"declares precisions {info.precisions}; there are {PRECISIONS}", info
    if not info.devices:
        return "broken", "declares no device", info
    if missing := info.missing_modules():
        mend = f"; install with: {info.install}" if info.install else ""
        return "missing", f"needs {', '.join(missing)}{mend}", info
    extra = sorted(info.features - set(FEATURES))
    return "ok", "installed" + (f" (features this sdkde does not know: {', '.join(extra)})" if extra else ""), info


def start(info: BackendInfo, device: str, options: Mapping[str, Any] | None = None) -> tuple[Backend | None, Support]:
    """Make a backend and probe the device, or say why it cannot be used there; what was found is kept.

    ValueError: the options do not suit the backend.
    """
    key = (info.implementation, device, repr(sorted((options or {}).items())))
    if key not in made:
        made[key] = _start(info, device, options)
    backend, support = made[key]
    if not support.ok and not options:
        aside[info.name, device] = support.reason
    return backend, support


def having(feature: str, device: str) -> Any:
    """Return a backend with the feature that can be used there, or None."""
    able = (r.info for r in records() if r.ok and r.info and feature in r.info.features)
    started = (start(info, device) for info in able if (info.name, device) not in aside)
    return next((backend for backend, support in started if support.ok), None)


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


def ask(question: Callable[..., Any], *arguments: Any) -> tuple[Any, str]:
    """Ask a plugin something; return its answer and "", or None and what it raised, which may be SystemExit.

    Only the user's interrupt, what a signal's handler raises, and memory that does not suffice pass.
    """
    try:
        return question(*arguments), ""
    except (KeyboardInterrupt, MemoryError):
        raise
    except BaseException as error:
        raise_interrupt(error)
        return None, f"{type(error).__name__}: {error}"


def as_support(answer: Any) -> Support:
    """Return a plugin's answer as a Support with a reason, whatever it is."""
    if not isinstance(answer, Support):
        return Support(False, f"broken: it answered {answer!r}, not a Support")
    return answer if answer.reason else answer._replace(reason="no reason given")
