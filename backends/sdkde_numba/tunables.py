"""What the autotuner can choose for the CPU: the columns of a tile, and the threads."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from sdkde_core.plugin import cpu_threads
from sdkde_core.protocol import Problem
from sdkde_core.tuning import Config, Query, this_cpu, tuned

from .bounds import Form, choose


class TileSpace:
    """See :class:`sdkde_core.tuning.Space`. Nothing is compiled for a configuration."""

    config_version = 1

    def kernels(self, problem: Problem) -> tuple[str, ...]:
        return ("tiles",)

    def dimension(self, kernel: str, problem: Problem) -> int:
        return problem.d

    def parameters(self, kernel: str) -> Mapping[str, tuple[Any, ...]]:
        most = cpu_threads()
        busy = hasattr(os, "getloadavg") and os.getloadavg()[0] > 0.5 * (os.cpu_count() or 1)
        # Beside other work fewer threads look better than they are.
        threads = {most} if busy else {most, *(1 << k for k in range(most.bit_length()))}
        return {"width": (64, 128, 256, 512, 1024, 2048), "threads": tuple(sorted(threads))}

    def default(self, kernel: str, problem: Problem, architecture: str) -> Config:
        return {"width": width_of(problem.n, problem.d, choose(problem)), "threads": cpu_threads()}

    def limit(self, kernel: str, config: Config, problem: Problem, architecture: str) -> str | None:
        if config.keys() != {"width", "threads"} or any(type(x) is not int or x < 1 for x in config.values()):
            return "a configuration has width and threads, positive integers"
        if config["width"] % 64:
            return "width is no multiple of 64"
        return f"takes more threads than {cpu_threads()}" if config["threads"] > cpu_threads() else None


SPACE = TileSpace()


def configuration(problem: Problem) -> Config:
    """Return the tuned configuration; empty if there is none, or the look-up takes longer than it can save."""
    if problem.pairs < 1 << 20:
        return {}
    query = Query("numba", "tiles", SPACE.config_version, problem.d, *this_cpu())
    found = tuned(query, problem, lambda config: SPACE.limit("tiles", config, problem, "") is None)
    return found.config if found else {}


def width_of(n: int, d: int, form: Form, tuned: int | None = None) -> int:
    """Return the columns of a tile, blocks of registers: shared out evenly, at most as tuned or in cache."""
    bytes_of_one = (d + (not form.direct)) * np.dtype(form.dtype).itemsize
    most = tuned or max(64, min(512, (1 << 18) // bytes_of_one) // 64 * 64)
    return -(-n // (64 * -(-n // most))) * 64
