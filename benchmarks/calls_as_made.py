"""What one estimate costs by how it is called, with fresh data in every call: views, dtypes, bandwidths, scores.

    python benchmarks/calls_as_made.py [--device cuda] [--samples 2048] [--dimensions 8]

Prints the median and the largest of thirty calls after three, in ms, and the largest error of the last call's logs or
scores, against float64 on the CPU, relative to their largest magnitude (of scores) or absolute (of logs).
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import sdkde_core

WARM, CALLS = 3, 30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--samples", type=int, default=2048)
    parser.add_argument("--dimensions", type=int, default=8)
    options = parser.parse_args()
    n, d, device = options.samples, options.dimensions, torch.device(options.device)
    if device.type == "cuda":
        torch.zeros(1, device=device)
        print(torch.cuda.get_device_name(device), end=", ")
    print(
        f"PyTorch {torch.__version__}, sdkde {sdkde_core.__version__}; {n} samples, {n // 8} queries, d = {d}, float32"
    )

    def points(k: int, seed: int) -> Any:
        x = np.random.default_rng([k, seed]).normal(size=(k, d)).astype(np.float32)
        return torch.from_numpy(x).to(device)

    def show(
        label: str, views: Callable[[Any, Any], Any], ask: Any = sdkde_core.estimate, weighted: bool = False, **how: Any
    ) -> None:
        times, how = [], {"bandwidth": 0.6, **({"log": True} if ask is sdkde_core.estimate else {}), **how}
        for call in range(WARM + CALLS):
            x, y = views(points(n, call), points(n // 8, -1 - call & 0xFFFF))
            if weighted:
                how["weights"] = points(n, ~call & 0xFFFF)[:, 0].exp()
            _wait(device)
            start = time.perf_counter()
            got = ask(x, y, **how)
            _wait(device)
            times.append(time.perf_counter() - start)
        if weighted:
            how["weights"] = how["weights"].double().cpu().numpy()
        want = ask(*(None if a is None else a.double().cpu().numpy() for a in (x, y)), precision="float64", **how)
        error = abs(got.double().cpu().numpy() - want).max()
        error /= 1.0 if how.get("log") else abs(want).max()
        times = [1e3 * t for t in times[WARM:]]
        print(f"{label:44} {statistics.median(times):8.3f} {max(times):8.2f}   {error:.0e}", flush=True)

    print(f"{'':44} {'median':>8} {'largest':>8}   error")
    show("samples and queries", lambda x, y: (x, y))
    show("no query", lambda x, y: (x, None))
    show("a query of the first samples, x[:k]", lambda x, y: (x, x[: n // 8]))
    show("of every eighth, x[::8]", lambda x, y: (x, x[::8]))
    show("samples in columns, x.T of a (d, n) tensor", lambda x, y: (x.T.contiguous().T, y))
    show("one column, x[:, 0]", lambda x, y: (x[:, 0], y[:, 0]))
    show("queries of float64", lambda x, y: (x, y.double()))
    show("bandwidth=1", lambda x, y: (x, y), bandwidth=1)
    show("a bandwidth per column", lambda x, y: (x, y), bandwidth=np.full(d, 0.6))
    show("kde", lambda x, y: (x, y), method="kde")
    show("scores", lambda x, y: (x, y), sdkde_core.grad_log_density)
    show("weights", lambda x, y: (x, y), weighted=True)
    chosen = sdkde_core.select_bandwidth(points(n, 0))
    show("a chosen bandwidth", lambda x, y: (x, y), bandwidth=chosen)
    show("a chosen bandwidth, weights", lambda x, y: (x, y), weighted=True, bandwidth=chosen)
    of_chosen = functools.cache(
        lambda there: sdkde_core.prepare(points(n, 0) if there else points(n, 0).double().cpu())
    )
    show("prepared by default", lambda x, y: (x, y), lambda x, y, **how: of_chosen(type(x) is torch.Tensor).estimate(y))
    show(
        "scores, prepared by default",
        lambda x, y: (x, y),
        lambda x, y, **how: of_chosen(type(x) is torch.Tensor).grad_log_density(y),
        log=False,
    )
    show("the default bandwidth", lambda x, y: (x, y), bandwidth="auto")


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
