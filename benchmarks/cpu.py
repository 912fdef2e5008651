"""The CPU backends, beside scikit-learn and torch.compile: time with error, memory, import time.

    python benchmarks/cpu.py [--repeat 5] [--only compiled]

KDE of 32768 × 4096 in 16 dimensions, h = 0.8, a mixture of eight normals; then the first pass of SD-KDE,
32768 × 32768. Errors are against float64 sums of direct differences. Medians; fresh data each run. "compiled" compares
the Numba backend in three cases with the NumPy backend and a compiled PyTorch loop, taken in turn.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

N, M, D, H = 32768, 4096, 16, 0.8
SAMPLE = 512  # rows that errors are taken over: the reference is slow
TORCH_ROWS = 128  # of a block of the compiled PyTorch loop


def mixture(rng: np.random.Generator, *counts: int, d: int = D) -> list[np.ndarray]:
    """Samples of one mixture of eight normals: means 2·N(0, I), std 1."""
    means = 2.0 * rng.normal(size=(8, d))
    return [means[rng.integers(0, 8, n)] + rng.normal(size=(n, d)) for n in counts]


def machine() -> dict[str, Any]:
    from threadpoolctl import threadpool_info

    model, flags = platform.processor(), ""
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as file:
            for line in file:
                key, _, value = line.partition(":")
                model = value.strip() if key.strip() == "model name" else model
                flags = value if key.strip() == "flags" else flags
    blas = [f"{b['internal_api']} {b['version']} ({b.get('architecture', '?')})" for b in threadpool_info()]
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "widest instructions": next((f for f in ("avx512f", "avx2", "avx") if f in flags.split()), "?"),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "blas": blas,
    }


def timed(call: Callable[[], Any], repeat: int) -> tuple[float, Any]:
    times, result = [], None
    for _ in range(repeat):
        start = time.perf_counter()
        result = call()
        times.append(time.perf_counter() - start)
    return statistics.median(times), result


def errors(got: np.ndarray, want: np.ndarray) -> str:
    p, q = np.exp(got), np.exp(want)
    worst = np.abs(got - want).max()
    return f"worst row |Δ log p| {worst:.1e}, relative L2 of p {np.linalg.norm(p - q) / np.linalg.norm(q):.1e}"


def case_a(repeat: int) -> None:
    import sklearn
    from sklearn.neighbors import KernelDensity

    import sdkde_core
    from sdkde_core.testing import reference

    x, y = mixture(np.random.default_rng(), N, M)
    rows = np.linspace(0, M - 1, SAMPLE).astype(int)
    want = reference.estimate(x, y[rows], method="kde", bandwidth=H, log=True)

    print(f"KDE {N} × {M}, d = {D}, h = {H}")
    peer_time, peer = timed(
        lambda: KernelDensity(bandwidth=H, rtol=0, atol=0).fit(x).score_samples(y), max(1, repeat // 2)
    )
    print(f"  scikit-learn {sklearn.__version__}, exact: {peer_time * 1e3:8.1f} ms; {errors(peer[rows], want)}")
    for backend, (dtype, precision) in itertools.product(
        ("numpy", "numba"), (("float32", "fast"), ("float64", "fast"), ("float64", "high"), ("float64", "float64"))
    ):
        a, b = x.astype(dtype), y.astype(dtype)
        options = {"method": "kde", "bandwidth": H, "log": True, "precision": precision, "backend": backend}
        sdkde_core.estimate(a[:100], b, **options)  # imports, and compiles
        seconds, got = timed(lambda a=a, b=b, o=options: sdkde_core.estimate(a, b, **o), repeat)
        truth = want
        if dtype == "float32":
            truth = reference.estimate(a.astype(float), b[rows].astype(float), method="kde", bandwidth=H, log=True)
        what = f"{peer_time / seconds:5.1f} × faster; {errors(got[rows].astype(float), truth)}"
        print(f"  {backend}, {precision:7} ({dtype} in): {seconds * 1e3:8.1f} ms, {what}")

    shift = reference.sums(x[rows], x, H).shift
    for backend, precision in itertools.product(("numpy", "numba"), ("fast", "high", "float64")):
        options = {"bandwidth": H, "precision": precision, "backend": backend}
        seconds, moved = timed(lambda o=options: sdkde_core.debias(x, **o), max(1, repeat // 2))
        off = np.sqrt(((2 * (moved[rows] - x[rows]) - shift) ** 2).sum(1)).max() / H
        print(f"SD-KDE first pass {N} × {N}, {backend}, {precision}: {seconds:.2f} s; worst shift off by {off:.1e}")


def compiled(repeat: int) -> None:
    """KDE in float32 at "fast": each contender in turn, so that all meet the same neighbours on a shared machine."""
    import torch

    import sdkde_core

    @torch.compile(dynamic=False)
    def block(y: Any, x: Any, half_norms: Any) -> Any:
        exponents = y @ x.T - half_norms - 0.5 * (y * y).sum(1, keepdim=True)
        top = exponents.amax(1, keepdim=True)
        return (exponents - top).clamp(min=-87.0).exp().sum(1).log() + top[:, 0]  # exp of less is several times slower

    def blocked_product(x: np.ndarray, y: np.ndarray, h: float) -> np.ndarray:
        u, v = torch.from_numpy(x) / h, torch.from_numpy(y) / h
        half_norms = 0.5 * (u * u).sum(1)
        log_sums = torch.cat([block(rows, u, half_norms) for rows in v.split(TORCH_ROWS)])
        d = x.shape[1]
        return (log_sums - np.log(len(x)) - d * (np.log(h) + 0.5 * np.log(2 * np.pi))).numpy()

    contenders: dict[str, Callable[..., np.ndarray]] = {f"torch {torch.__version__}, compiled": blocked_product}
    for backend in ("numpy", "numba"):
        options = {"method": "kde", "log": True, "backend": backend, "precision": "fast"}
        contenders[backend] = lambda x, y, h, o=options: sdkde_core.estimate(x, y, bandwidth=h, **o)
    for n, m, d, h in ((N, M, D, H), (N, M, 1, 0.1), (20000, 20000, 2, 0.2)):
        x, y = (a.astype(np.float32) for a in mixture(np.random.default_rng(), n, m, d=d))
        print(f"KDE {n} × {m}, d = {d}, h = {h}, float32")
        in_turn({name: functools.partial(call, x, y, h) for name, call in contenders.items()}, repeat)
    (x,) = mixture(np.random.default_rng(), N)
    print(f"SD-KDE first pass {N} × {N}, d = {D}, high")
    options = {"bandwidth": H, "precision": "high"}
    in_turn(
        {b: functools.partial(sdkde_core.debias, x, backend=b, **options) for b in ("numpy", "numba")},
        max(1, repeat // 2),
    )


def in_turn(contenders: dict[str, Callable[[], Any]], repeat: int) -> None:
    """Print medians on the clock and, since neighbours take the cores, of processor time over the cores there are."""
    cores = machine()["cores"]
    wall: dict[str, list[float]] = {name: [] for name in contenders}
    used: dict[str, list[float]] = {name: [] for name in contenders}
    for call in contenders.values():
        call()
    for _ in range(repeat):
        for name, call in contenders.items():
            before = time.process_time()
            wall[name].append(timed(call, 1)[0])
            used[name].append((time.process_time() - before) / cores)
    for name in contenders:
        seconds, busy = statistics.median(wall[name]), statistics.median(used[name])
        slower = seconds / statistics.median(wall["numba"]), busy / statistics.median(used["numba"])
        ratios = f"{slower[0]:.1f} and {slower[1]:.1f} × numba"
        print(f"  {name}: {seconds * 1e3:8.1f} ms, processor time over cores {busy * 1e3:8.1f} ms; {ratios}")


MEMORY = """
import json, resource, sys
import numpy as np, sdkde_core
n, m, method = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
rng = np.random.default_rng(0)
x, y = rng.normal(size=(n, 16)), rng.normal(size=(131072, 16))[:m]
sdkde_core.estimate(x[:50], y[:5], bandwidth="silverman")
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before = peak()
call = sdkde_core.grad_log_density if method == "gradient" else sdkde_core.estimate
call(x, y, method="kde", bandwidth="silverman")
print(json.dumps((peak() - before) / 2**20))
"""


def memory() -> None:
    print("Peak memory beyond the inputs, 1,048,576 points in 16 dimensions, Silverman's rule included")
    for m, method in ((512, "density"), (4096, "density"), (4096, "gradient")):
        command = [sys.executable, "-P", "-c", MEMORY, str(2**20), str(m), method]
        mib = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        print(f"  {m:6} queries, {method:8}: {mib:6.0f} MiB")


def imports() -> None:
    code = "import time, numpy; t = time.perf_counter(); import sdkde_core; sdkde_core.backends(); "
    code += "print(time.perf_counter() - t)"
    times = [
        float(subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True).stdout)
        for _ in range(7)
    ]
    print(f"Importing the core and listing backends, beyond NumPy's import: {statistics.median(times) * 1e3:.0f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--only", choices=["compiled"])
    arguments = parser.parse_args()
    repeat = arguments.repeat
    for key, value in machine().items():
        print(f"{key}: {value}")
    print()
    compiled(repeat)
    if arguments.only:
        return
    case_a(repeat)
    memory()
    imports()


if __name__ == "__main__":
    main()
