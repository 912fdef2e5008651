"""Workers of Dask's, of one thread each, against one of them: wall and processor time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np

import sdkde_core

from ..registry import REGISTRY, Benchmark, Case, Setting, Skipped
from ..report import Table

D, BACKEND = 16, "numba"


def cases(setting: Setting) -> Iterator[Case]:
    if setting.kind == "cpu":  # workers in this process would share what is measured, so "small" says little
        yield {"workers": 2, "n": setting.at(2000, 40_000, 120_000), "processes": setting.scale != "small"}


def measure(setting: Setting, case: Case) -> dict[str, Any]:
    """Seconds of one worker and of several; ``efficiency`` is what is left of the ideal, by the wall.

    ``by_processor`` is the same by the processor time of the busiest worker: on cores that others load it says more.
    Compiling and importing are done before. ``beside`` is what the scheduler and the client took.
    """
    one, several = (_timed(workers, case) for workers in (1, case["workers"]))
    return {
        "s_one": one["s"],
        "s": several["s"],
        "cpu_s_one": sum(one["cpu"]),
        "cpu_s": sum(several["cpu"]),
        "busiest_s": max(several["cpu"]),
        "beside_s": several["beside"],
        "efficiency": one["s"] / (case["workers"] * several["s"]),
        "by_processor": sum(one["cpu"]) / (case["workers"] * max(several["cpu"])),
    }


def _timed(workers: int, case: Case) -> dict[str, Any]:
    try:
        import dask.array as da
        from distributed import Client, LocalCluster
    except ImportError as error:
        raise Skipped(f"needs distributed: pip install 'sdkde-core[dask]' distributed ({error})") from error
    x = np.random.default_rng(0).normal(size=(case["n"], D)).astype(np.float32)

    def estimate(n: int) -> None:
        points = da.from_array(x[:n], chunks=(max(1, n // 8), D))
        sdkde_core.estimate(points, points, backend=BACKEND).compute()

    how = {"n_workers": workers, "threads_per_worker": 1, "processes": case["processes"], "dashboard_address": None}
    with LocalCluster(**how) as cluster, Client(cluster) as client:
        client.run(_warm)
        estimate(min(2000, case["n"]))
        before, beside, start = client.run(time.process_time), time.process_time(), time.perf_counter()
        estimate(case["n"])
        seconds, beside = time.perf_counter() - start, time.process_time() - beside
        after = client.run(time.process_time)
    return {"s": seconds, "cpu": [after[who] - before[who] for who in after], "beside": beside}


def _warm() -> None:
    """Compile what the tasks call, on every worker."""
    x = np.random.default_rng(0).normal(size=(50, D)).astype(np.float32)
    sdkde_core.estimate(x, backend=BACKEND)


COLUMNS = {
    "s_one": "s, one",
    "s": "s, all",
    "cpu_s_one": "processor s, one",
    "cpu_s": "processor s, all",
    "busiest_s": "the busiest",
    "beside_s": "scheduler and client",
    "efficiency": "of the ideal",
    "by_processor": "by processor time",
}

REGISTRY.add(
    Benchmark(
        "dask-workers",
        "ours",
        "Parallel efficiency of Dask workers with one thread each.",
        cases,
        measure,
        (Table("", ("workers", "n"), COLUMNS),),
    )
)
