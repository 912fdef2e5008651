"""What the default bandwidth adds to a call on a CUDA device, and whether it is the CPU's.

python benchmarks/selection_on_card.py              # 2,048 to 131,072 samples in 1 to 64 dimensions, within a minute
python benchmarks/selection_on_card.py --profile    # where the host's time goes, at 16,384 samples in 16 dimensions
"""

from __future__ import annotations

import cProfile
import pstats
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

import sdkde_core

QUERIES = 1024


def drawn(n: int, d: int, seed: int) -> np.ndarray:
    """Two groups of correlated normal samples, float32."""
    rng = np.random.default_rng(seed)
    mixed = np.eye(d) + 0.3 * np.random.default_rng(d).normal(size=(d, d)) / np.sqrt(d)
    return np.float32(rng.normal(size=(n, d)) @ mixed + 2.0 * (rng.random((n, 1)) < 0.4))


def milliseconds(call: Callable[[Any], Any], pool: Sequence[Any], seconds: float = 0.7) -> tuple[float, float]:
    """The first call, and the median of others, of other data than the call before; until nothing is to be done."""
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 5 or (len(times) < 60 and time.perf_counter() < end):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call(pool[len(times) % len(pool)])
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return times[0], statistics.median(times[3:])


def main() -> None:
    print(torch.cuda.get_device_name(), "times in ms; chosen: select_bandwidth alone")
    print("      n  d | number  default  (first)   on top   chosen | multiple on card, on CPU     matrix off by")
    for d in (1, 2, 16, 64):
        for n in (2048, 16384, 131072):
            host = [drawn(n, d, seed) for seed in range(2)]
            pool = [torch.from_numpy(x).cuda() for x in host]
            ours, cpus = (sdkde_core.select_bandwidth(x[0]) for x in (pool, host))
            h = float(np.sqrt(np.diagonal(ours.matrix)).mean())
            _, number = milliseconds(lambda x, h=h: sdkde_core.estimate(x, x[:QUERIES], bandwidth=h), pool)
            first, default = milliseconds(lambda x: sdkde_core.estimate(x, x[:QUERIES]), pool)
            _, chosen = milliseconds(sdkde_core.select_bandwidth, pool)
            scale = np.sqrt(np.diagonal(cpus.matrix))
            off = float(np.max(abs(ours.matrix - cpus.matrix) / scale[:, None] / scale)) / 2
            picks = f"{ours.selection.multiple:10.6f} {cpus.selection.multiple:10.6f}"
            times = f"{number:6.2f}  {default:7.2f}  ({first:5.0f})  {default - number:7.2f}  {chosen:7.2f}"
            print(f"{n:7d} {d:2d} | {times} | {picks}   {off:.1e}", flush=True)


def profile() -> None:
    x = torch.from_numpy(drawn(16384, 16, 0)).cuda()
    for _ in range(5):
        sdkde_core.select_bandwidth(x)
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(50):
        sdkde_core.select_bandwidth(x)
    profiler.disable()
    pstats.Stats(profiler).sort_stats("cumtime").print_stats(60)
    with torch.profiler.profile() as traced:
        sdkde_core.select_bandwidth(x)
        torch.cuda.synchronize()
    print(traced.key_averages().table(sort_by="self_cuda_time_total", row_limit=25, max_name_column_width=60))


if __name__ == "__main__":
    profile() if "--profile" in sys.argv else main()
