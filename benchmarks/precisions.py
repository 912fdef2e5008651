"""Both precisions of the Triton backend on one CUDA GPU: dimensions, outliers, prepared training sets.

    python benchmarks/precisions.py [--cases dims,outliers,prepared] [--json PATH]

Whole estimates of SD-KDE on the data of gpu.py, float32, once repeated calls are replayed; medians by CUDA events.
Kernels: what a first call runs on the card, by the profiler. Error: the worst row of |Δ log p̂| over the
tolerance of LOG_SUM, which SD-KDE may take twice, of the same numbers as float64 (float32 results would be rounded).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from gpu import log_constant, mixture, once, reference
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import sdkde_core
from sdkde_core.protocol import TOLERANCES, Reduction

N, M = 32768, 4096
DIMENSIONS = (1, 2, 8, 16, 32, 64, 128, 384, 784)
PRECISIONS = ("fast", "high")


def median(call: Callable[..., Tensor], *args: Any, times: int = 9) -> float:
    """Milliseconds of a repeated call."""
    for _ in range(10):  # compiles, and records what is replayed
        call(*args)
    return statistics.median(once(call, *args)[0] for _ in range(times))


def kernels(call: Callable[..., Tensor], *args: Any) -> float:
    """Milliseconds of the kernels of a call that is not replayed."""
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        call(*args)
        torch.cuda.synchronize()
    return sum(event.device_time_total for event in found.key_averages()) / 1e3


def estimate(precision: str, h: float, **more: Any) -> Callable[..., Tensor]:
    return lambda x, y: sdkde_core.estimate(x, y, bandwidth=h, precision=precision, backend="triton", **more)


def dims() -> list[dict[str, Any]]:
    rows = []
    for d in DIMENSIONS:
        x, y, h, _ = mixture(N, M, d)
        moved = x.double() + 0.5 * h * reference(x, x, h, "shift")
        want = reference(y, moved, h, "log")
        for precision in PRECISIONS:
            call = estimate(precision, h, log=True)
            off = call(x.double(), y.double()) - log_constant(d, h) - want
            error = (off.abs() / TOLERANCES[precision][Reduction.LOG_SUM].at(want)).max().item()
            ms = median(call, x, y, times=5 if d > 128 else 9)
            rows.append(
                {"d": d, "precision": precision, "ms": ms, "kernels": kernels(call, x.clone(), y), "error": error}
            )
    return rows


def outliers() -> list[dict[str, Any]]:
    x, y, h, _ = mixture(N, M, 16)
    rows = []
    for precision in PRECISIONS:
        for count in (0, 10, 1000):
            far = x.clone()
            far[7 * torch.arange(count, device=x.device)] += 1e4 * h
            rows.append({"outliers": count, "precision": precision, "ms": median(estimate(precision, h), far, y)})
    return rows


def prepared() -> list[dict[str, Any]]:
    x, y, h, _ = mixture(2**20, 4096, 16)
    batches = [y + 0.01 * k for k in range(100)]
    rows = []

    def seconds(work: Callable[[], Any]) -> tuple[float, Any]:
        torch.cuda.synchronize()
        start = time.perf_counter()
        result = work()
        torch.cuda.synchronize()
        return time.perf_counter() - start, result

    for method, whole in (("kde", 100), ("sdkde", 3)):  # whole: batches that come by estimate
        options: dict[str, Any] = {"method": method, "bandwidth": h, "precision": "fast", "backend": "triton"}
        sdkde_core.prepare(x[:4096], **options).estimate(y)
        first, ready = seconds(lambda: sdkde_core.prepare(x, **options))  # noqa: B023
        ready.estimate(y)
        then, _ = seconds(lambda: [ready.estimate(q) for q in batches])  # noqa: B023
        each, _ = seconds(lambda: [sdkde_core.estimate(x, q, **options) for q in batches[:whole]])  # noqa: B023
        times = {"prepare": 1e3 * first, "prepared batch": 10 * then, "batch by estimate": 1e3 * each / whole}
        rows.append({"method": method} | times)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="dims,outliers,prepared")
    parser.add_argument("--json", metavar="PATH")
    args = parser.parse_args()
    versions = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "sdkde": sdkde_core.__version__}
    print(", ".join(f"{name} {value}" for name, value in versions.items()))
    records = []
    for case in args.cases.split(","):
        for row in {"dims": dims, "outliers": outliers, "prepared": prepared}[case]():
            shown = (f"{k} {v:.3f}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items())
            print(case, ", ".join(shown), flush=True)
            records.append({"case": case} | versions | row)
    if args.json:
        with open(args.json, "w") as file:
            json.dump(records, file, indent=1)


if __name__ == "__main__":
    main()
