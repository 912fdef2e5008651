"""Starting backends before they are needed, so that the choice counts their start no more."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..arrays import convert, to_host
from ..choice import registry, select
from ..choice.cost import typical_extent
from ..choice.hardware import cpu_threads, processor
from ..choice.judge import compile_seconds, judge
from ..engine.failures import BackendFailed
from ..messages import switched_off
from ..protocol import BackendInfo, BackendUnavailable, Problem
from .fitted import run, set_aside
from .plan import plan
from .request import METHODS, Goal, Request


def warm_up(device: str | tuple[str, ...] | None) -> dict[str, dict[str, float]]:
    """Start every backend on the devices named; None: on the CPU and on devices that are here."""
    cpu_threads(), switched_off("SDKDE_TUNING")  # ValueError for one that is set wrongly
    named = select.named_backend("auto")
    if named != "auto":
        select.require_known(named, f"SDKDE_BACKEND is {named!r}: ")
    infos = [r.info for r in registry.records() if r.ok and r.info is not None and named in ("auto", r.name)]
    found: dict[str, dict[str, float]] = {}
    for place in _places(infos, device):
        took, declined = {}, []
        for info in infos:
            start = time.perf_counter()
            if reason := _warm(info, place):
                declined.append(f"{info.name}: {reason}")
            else:
                took[info.name] = time.perf_counter() - start
        if took:
            found[place] = took
        elif device is not None:
            raise BackendUnavailable(f"no backend works on {place}: {'; '.join(declined)}")
    return found


def common(info: BackendInfo, device: str) -> list[tuple[Request, tuple[Problem, ...]]]:
    """The common estimates that a backend can compute, with their passes: it is warmed up by these."""
    n, m = (64, 8) if device == "cpu" else (4096, 512)  # on a device launch parameters go by the size
    found = []
    for d, dtype, method in itertools.product((1, 2, 3, 16), ("float32", "float64"), METHODS):
        bandwidth = "silverman" if device == "cpu" else "auto"  # "auto" has kernels of its own on a device
        request = Request(Goal.DENSITY, method, bandwidth, backend=info.name, device=device)
        problems = request.problems(m, n, d, typical_extent(n, d), frozenset(), dtype, device)
        if judge(info, problems, device, None, None).ok:
            found.append((request, problems))
    return found


def _places(infos: Sequence[BackendInfo], device: str | tuple[str, ...] | None) -> Sequence[str]:
    """The devices to warm up, by the names that :func:`.select.choose` uses."""
    if isinstance(device, tuple):
        return device
    if device is not None:
        return [device if device == "cpu" or ":" in device else f"{device}:0"]
    kinds = {kind: None for info in infos for kind in info.devices if kind != "cpu"}
    return ["cpu", *(f"{kind}:0" for kind in kinds if processor(f"{kind}:0") is not None)]


def _warm(info: BackendInfo, device: str) -> str:
    """Start a backend and run the common estimates, unless they compile for long; return why it cannot, or nothing."""
    if device.partition(":")[0] not in info.devices:
        return f"runs on {', '.join(info.devices)}"
    if (info.name, device) in registry.aside:
        return registry.aside[info.name, device]
    if not (asked := common(info, device)):
        return "takes none of the common estimates there"
    compiled = all(compile_seconds(info, [p]) <= 5.0 for _, problems in asked for p in problems)
    _, support = registry.start(info, device)
    if not support.ok:
        return support.reason
    for request, problems in asked if compiled else ():
        try:
            _run(info, request, problems[-1])
        except BackendFailed as failure:
            set_aside(Request(Goal.DENSITY), failure)
            return str(failure)
        except BackendUnavailable as error:  # it finds out only now that it does not take these
            logging.getLogger("sdkde").debug("backend %s is not warmed up by %s: %s", info.name, problems, error)
    registry.warm[info.name, device] = compiled
    return ""


def _run(info: BackendInfo, request: Request, problem: Problem) -> None:
    x: Any = np.random.default_rng(0).normal(size=(problem.n + problem.m, problem.d)).astype(problem.dtype)
    if problem.device != "cpu":
        x = convert(x, info.arrays, problem.device)
    to_host(run(plan(request, x[: problem.n, :], x[problem.n :, :])).log_sum[:1])  # waits for the device
