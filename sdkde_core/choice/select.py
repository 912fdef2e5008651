"""Choosing a backend, and keeping the reasons."""

from __future__ import annotations

import functools
import logging
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ..engine.repeats import merged
from ..messages import did_you_mean, switched_off
from ..protocol import Backend, BackendInfo, BackendUnavailable, Problem, Reduction, with_fields
from . import cost, registry
from .hardware import cpu_threads, gpu_name, processor, visible_gpus
from .judge import Candidate, Share, StartUp, calls_of, has_context, judge, start_up

_logger = logging.getLogger("sdkde")


@dataclass(frozen=True)
class Choice:
    """The backend that runs, and why."""

    info: BackendInfo
    device: str
    backend: Backend
    candidates: tuple[Candidate, ...]  # that were considered, best first: all of them where it is explained
    reason: str
    calls: int  # over how many start-up was spread
    devices: tuple[str, ...] = ()  # those that share the rows, ``device`` first, where the user named several

    @property
    def name(self) -> str:
        return self.info.name

    @property
    def where(self) -> str:
        """The device, or all devices, for people."""
        return ", ".join(self.devices) or self.device


class Wanted(NamedTuple):
    """Arguments of :func:`choose` for one device, besides the passes."""

    backend: str = "auto"
    device: str | None = None
    data_device: str = "cpu"
    calls: int = 10  # over how many start-up is spread


class AllGpus(tuple[str, ...]):
    """All GPUs, for ``device="cuda:all"``: an estimate uses the number with the shortest predicted time."""


def parse_device(device: str | Sequence[str] | None) -> str | tuple[str, ...] | None:
    """Return the device that the user named, or the devices, all of one kind.

    ValueError: no installed plugin declares a device of that kind, or several cannot share rows. BackendUnavailable:
    ``"cuda:all"``, and there is none.
    """
    if device is None:
        return None
    if not isinstance(device, str) and isinstance(device, Sequence):
        return _parsed_several(device)
    if device == "cuda:all":
        if not (found := AllGpus(f"cuda:{i}" for i in range(len(visible_gpus())))):
            raise BackendUnavailable("device is 'cuda:all', but no CUDA device is here; pass None, or 'cpu'")
        return found
    kinds = {kind: None for record in registry.records() if record.info for kind in record.info.devices}
    kind, _, number = str(device).lower().partition(":")
    if kind not in {"cpu", *kinds} or not re.fullmatch("[0-9]*", number) or str(device).endswith(":"):
        known = ", ".join(map(repr, dict.fromkeys(["cpu", *kinds])))
        hint = did_you_mean(kind, ["cpu", *kinds]) if kind not in kinds else ""
        raise ValueError(f"device is {device!r}; pass None, or one of {known}, with a number as in 'cuda:0'{hint}")
    return "cpu" if kind == "cpu" else str(device).lower()


def _parsed_several(devices: Sequence[str]) -> tuple[str, ...]:
    parsed = tuple(parse_device(device) for device in devices)
    for given, device in zip(devices, parsed):
        if not isinstance(device, str) or ":" not in device:
            raise ValueError(f"device has {given!r} in a list; pass GPUs by number, as in ['cuda:0', 'cuda:1']")
        if parsed.count(device) > 1:
            raise ValueError(f"device has {given!r} twice; pass each GPU once")
    if len({str(device).partition(":")[0] for device in parsed}) != 1:
        raise ValueError(f"device is {list(devices)!r}; pass one or more devices of one kind")
    return parsed  # type: ignore[return-value]


def choose(
    problems: Sequence[Problem], *, backend: str = "auto", device: str | Sequence[str] | None = None,
    data_device: str = "cpu", came_from: str | None = None, options: Mapping[str, Any] | None = None,
    share: Share | None = None, calls: int | None = None, explained: bool = False,
    without: Mapping[tuple[str, str], str] | None = None,
) -> Choice:  # fmt: skip
    """Return the backend for the passes: the named one, by argument or ``SDKDE_BACKEND``, or the best that works here.

    Candidates are all plugins on the devices in question: the named device; else the data's, and for data on the host
    the plugin's other devices too. A plugin that cannot answer keeps the reason (:func:`.judge.judge`). The others are
    ranked: for data on a GPU those that work there come first; then by predicted time, which includes transfers and a
    share of start-up (docs/backends.md); those without a time are last. The first that starts is taken. The choice is
    kept for the next call that asks the same, unless it used ``share``, options or ``explained``.

    Without ``explained`` a plugin is left out whose start-up alone takes longer than the best one, and a plugin without
    a competitor gets no price. For several devices it is the best backend for the first that works on all of them; of
    ``"cuda:all"`` as many devices take part as make the estimate faster.

    ``device``: as the user named it. ``came_from``: where the user had the data, if they have been copied to
    ``data_device``. ``share``: the share of the pairs beyond an extent. ``calls``: start-up is spread over that many;
    None: by the data's device. ``without``: why ``"auto"`` must not take a backend, by its name and device.

    BackendUnavailable: the named backend is unknown or cannot answer, or none can; with the reason and the mend.
    ValueError: ``backend_options`` without a named backend, or that it does not take; ``SDKDE_NUM_THREADS`` or
    ``SDKDE_TUNING`` cannot be right; several devices for input that requires grad.
    """
    aside, several = dict(without or {}), None if isinstance(device, str) or device is None else device
    first = device if device is None or isinstance(device, str) else device[0]
    wanted = Wanted(backend, first, data_device, calls_of(calls, came_from or data_device))
    # In a loop all calls ask the same, and judging takes half of a call: so choices are kept, unless the share of far
    # pairs was asked for.
    key: Any = None
    if not (explained or options or aside):
        state = tuple(registry.aside.items()), tuple(registry.warm.items()), cpu_threads(), has_context("cuda")
        cards = map(os.environ.get, ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"))  # the driver is asked once
        ours = map(os.environ.get, ("SDKDE_BACKEND", "SDKDE_TUNING", "SDKDE_DB"))
        key = (tuple(problems), wanted, several and tuple(several), type(several), share is None, *state, *cards, *ours)
        if (known := registry.chosen.get(key)) is not None and known[0] is registry.records():
            return known[1]
    if several and "grad" in problems[0].requires:
        raise ValueError("the input requires grad, for which one device computes; pass one, or detached tensors")
    looked: list[float] = []

    @functools.cache  # several backends have one limit
    def noted(step: int, limit: float) -> float:
        looked.append(limit)
        return share(step, limit) if share else 1.0

    while True:
        choice = _choose(problems, share and noted, wanted, options, explained, aside)
        if not (reason := _unusable_on((several or ())[1:], choice, options, aside)):
            break
        if named_backend(backend) != "auto":
            raise BackendUnavailable(f"backend {choice.name!r} {reason}; leave it out")
        aside[choice.name, choice.device] = reason  # one that works on all of them is to be found
    if several:
        most, count = len(several), len(several)
        if isinstance(several, AllGpus):
            counts = [k for k in (1, 2, 4, 8) if k < most] + [most]
            count = min(counts, key=lambda k: (_shared_seconds(problems, choice, k), -k))
        more = f"; {count} of {most} devices, as more would take longer" if count < most else ""
        choice = replace(choice, devices=tuple(several[:count]) if count > 1 else (), reason=choice.reason + more)
    if key is not None and not (looked or aside):
        if len(registry.chosen) >= 256:
            registry.chosen.clear()
        registry.chosen[key] = registry.records(), choice
    return choice


def _shared_seconds(problems: Sequence[Problem], choice: Choice, devices: int) -> float:
    """Predicted time if devices share every pass: by blocks of pairs where the backend has these, else by rows."""
    info, on = choice.info, processor(choice.device)
    total = 1.5e-3 * devices if devices > 1 else 0.0  # the host's time for each, measured with two and four H100s
    for problem in at(problems, choice.device):
        own = problem.same and problem.reduction is Reduction.MEAN
        pairs = with_fields(problem, requires=problem.requires | {"pairs"})
        blocks = own and "pairs" in info.features and info.supports(pairs).ok
        part = problem
        if devices > 1 and not blocks:
            ranged = problem.requires | ({"range"} if problem.same else set())
            part = with_fields(problem, m=-(-problem.m // devices), requires=ranged)
        if (seconds := cost.predict(info, part, on)) is not None and on is not None:
            launching = info.work(part, None).launches * on.launch_seconds if info.work else 0.0  # one host for all
            total += seconds / (devices if blocks else 1) + (devices - 1) * launching
    return total


def _unusable_on(
    devices: Sequence[str], choice: Choice, options: Mapping[str, Any] | None, without: Mapping[tuple[str, str], str]
) -> str:
    """Return why a backend does not work, or has failed, on one of the other devices; "" if it works on all."""
    for device in devices:
        reason = "" if choice.reason == "named" else (registry.aside | dict(without)).get((choice.name, device), "")
        implementation, support = registry.start(choice.info, device, options)
        if reason or implementation is None or not support.ok:
            return f"cannot use {device}: {reason or support.reason}"
    return ""


def _choose(
    problems: Sequence[Problem], share: Share | None, wanted: Wanted, options: Mapping[str, Any] | None,
    explained: bool, aside: Mapping[tuple[str, str], str],
) -> Choice:  # fmt: skip
    """The choice for one device: first among those that may rank first, then among all."""
    cpu_threads(), switched_off("SDKDE_TUNING")  # ValueError for one set wrongly, before a backend is blamed for it
    named, tried = named_backend(wanted.backend), dict[tuple[str, str], str]()
    named_by = f"SDKDE_BACKEND is {named!r}: " if named != wanted.backend else ""
    if named != "auto":
        require_known(named, named_by)
    elif options:
        raise ValueError("backend_options go with a named backend; pass backend=... too")
    else:
        tried = registry.aside | dict(aside)
    for everything in (True,) if explained else (False, True):
        candidates = ranked(problems, share, wanted, tried, everything)
        for candidate in candidates if everything else candidates[:1]:
            where = candidate.name, candidate.device
            if not candidate.ok or named not in ("auto", candidate.name) or where in tried:
                continue
            record = registry.find(candidate.name)
            assert record is not None and record.info is not None  # a candidate that is ok has both
            implementation, support = registry.start(record.info, candidate.device, options)
            if implementation is None or not support.ok:
                tried[where] = support.reason
                continue
            reason = "named" if named != "auto" else _why(candidate, candidates) if everything else "ranked first"
            final = tuple(_settle(c, candidate, tried) for c in candidates)
            choice = Choice(record.info, candidate.device, implementation, final, reason, wanted.calls)
            _logger.debug("backend %s on %s: %s", choice.name, choice.device, choice.reason)
            return choice
    failures = [_settle(c, None, tried) for c in candidates if named in ("auto", c.name)]
    if named != "auto":
        reasons = "; ".join(c.reason for c in failures)
        raise BackendUnavailable(f"{named_by}backend {named!r} cannot do this: {reasons}{_mend(problems, 'name')}")
    details = "\n".join(f"  {c.name} ({c.device}): {c.reason}" for c in failures) or "  no plugin is installed"
    raise BackendUnavailable(f"no backend can do this:\n{details}{_mend(problems, 'install')}")


def named_backend(backend: str) -> str:
    """Return the backend that the user named, by the argument or in the environment, else ``"auto"``."""
    return backend if backend != "auto" else os.environ.get("SDKDE_BACKEND") or "auto"


def _mend(problems: Sequence[Problem], how: str) -> str:
    """What to do about input that requires grad, where there is some, and about kernels that few backends have."""
    for feature, what, instead in (
        ("grad", "the input requires grad", "pass detached tensors, or call within torch.no_grad()"),
        ("kernel", f"kernel={problems[0].kernel!r} is asked for", "leave kernel out"),
    ):
        if feature in problems[0].requires:
            able = [f"{r.name}: {r.info.install}" for r in registry.records() if r.info and feature in r.info.features]
            known = f" ({'; '.join(able)})" if able else ""
            return f"\n{what}: {how} a backend with the feature {feature!r}{known}, or {instead}"
    return ""


def ranked(
    problems: Sequence[Problem], share: Share | None, wanted: Wanted,
    tried: Mapping[tuple[str, str], str] | None = None, everything: bool = True,
) -> list[Candidate]:  # fmt: skip
    """Return the candidates of :func:`choose`, best first; with ``everything`` also those that cannot be first.

    No backend is started.
    """
    named, found = named_backend(wanted.backend), list[Candidate]()
    places: list[tuple[BackendInfo, str]] = []
    for record in registry.records():
        if not record.ok or record.info is None:
            found.append(Candidate(record.name, "-", False, f"{record.status}: {record.reason}"))
        elif everything or named in ("auto", record.name):
            there = _devices(record.info, wanted.device, wanted.data_device)
            places += [(record.info, place) for place in there]
            if not there:
                where = f"runs on {', '.join(record.info.devices)}, not on {wanted.device or wanted.data_device}"
                found.append(Candidate(record.name, "-", False, where))
    if not everything:
        found, places = [], [(info, place) for info, place in places if (info.name, place) not in (tried or {})]
        if wanted.data_device != "cpu":
            places = [p for p in places if p[1] == wanted.data_device] or places
    # What all plugins on a device share is asked once.
    posed = {place: tuple(map(merged, at(problems, place))) for _, place in places}
    if not everything and len(places) < 2:
        starts: list[tuple[StartUp | None, BackendInfo, str]] = [(None, *p) for p in places]
    else:
        starts = [(start_up(info, posed[place], wanted.calls), info, place) for info, place in places]
        starts.sort(key=lambda s: s[0].counted if s[0] else 0.0)
    least = math.inf
    for startup, info, place in starts:
        if not everything and startup is not None and startup.counted > least:
            break  # later candidates start up for longer
        candidate = judge(info, posed[place], wanted.data_device, share, startup)
        # :func:`_devices` has the GPU of a plugin without a CPU even if no GPU is listed: tried only if named. For
        # kinds other than CUDA nothing here says whether a device is there.
        absent = place.startswith("cuda") and gpu_name(place) is None
        if candidate.ok and wanted.device is None and info.name != named and absent:
            candidate = replace(candidate, ok=False, reason=f"no {place} is here", seconds=None, pass_seconds=())
        if candidate.ok and wanted.device is None and place != wanted.data_device and processor(place) is None:
            candidate = replace(candidate, seconds=None, pass_seconds=())  # unknown rates: data may gain nothing there
        if candidate.ok:
            least = min(least, candidate.total_seconds)
        found.append(candidate)
    home = wanted.data_device
    return sorted(found, key=lambda c: (not c.ok, home not in ("cpu", c.device), c.total_seconds, c.name, c.device))


def _devices(info: BackendInfo, device: str | None, data_device: str) -> list[str]:
    """Where a plugin is to be considered, of the devices in question."""
    kinds = [kind for kind in info.devices if kind != "cpu"]
    if device is not None:
        kind, _, number = device.partition(":")
        wanted = [device]
        if kind != "cpu" and not number:
            wanted = [data_device if data_device.partition(":")[0] == kind else f"{kind}:0"]
    elif data_device == "cpu":
        # For data on the host a plugin's other devices count if the driver lists them, or if it has no CPU at all.
        there = [f"{kind}:0" for kind in kinds]
        wanted = ["cpu", *(p for p in there if "cpu" not in info.devices or gpu_name(p) is not None)]
    else:  # data on a device do not leave it for a backend that can work there
        wanted = [data_device] if data_device.partition(":")[0] in kinds else ["cpu"]
    return [place for place in wanted if place.partition(":")[0] in info.devices]


def at(problems: Sequence[Problem], device: str) -> tuple[Problem, ...]:
    """The passes, to run on ``device``."""
    return tuple(p if p.device == device else with_fields(p, device=device) for p in problems)


def require_known(name: str, named_by: str) -> None:
    """Raise if no plugin of that name is usable; ``named_by`` begins the message: what named it, if not an argument."""
    if (record := registry.find(name)) is None:
        known = sorted({r.name for r in registry.records()})
        installed = (", ".join(known) or "none") + did_you_mean(name, known)
        raise BackendUnavailable(f"{named_by}backend {name!r} is unknown; installed: {installed}")
    if not record.ok:
        raise BackendUnavailable(f"{named_by}backend {name!r} is {record.status}: {record.reason}")


def _why(chosen: Candidate, candidates: Sequence[Candidate]) -> str:
    able = [c.seconds for c in candidates if c.ok]
    if len(able) == 1:
        return "the only one that can"
    if chosen.seconds is None:
        return f"first of {len(able)} that can, none with a predicted time"
    which = "whose time is known" if None in able else "that can"
    return f"least predicted time with start-up of {len(able) - able.count(None)} {which}"


def _settle(c: Candidate, chosen: Candidate | None, tried: Mapping[tuple[str, str], str]) -> Candidate:
    if c == chosen:
        return with_fields(c, chosen=True)
    return replace(c, ok=False, reason=tried[c.name, c.device]) if (c.name, c.device) in tried else c
