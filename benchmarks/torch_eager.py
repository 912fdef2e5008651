"""The PyTorch backend beside the plain formula of the paper's baseline: time with error, and what derivatives cost.

    python benchmarks/torch_eager.py [--device cuda] [--n 32768] [--m 4096] [--d 16] [--memory 64MiB,256MiB]
    python benchmarks/torch_eager.py --gradients [--device cpu] [--n 20000]

SD-KDE on float32 tensors, one h for score, shift and evaluation; eight equal normals, means 2·N(0, I), std 1;
h = 0.9 · mean std · n^(−1/(d+4)). The plain formula: expanded squares in float32, exp, sum, product, the whole n × n
matrix in memory; also through torch.compile, as it is and with TF32. Fresh data in every call; medians, by CUDA events
on a GPU. Worst row: the largest error of log p̂ against float64, given the same data.

--gradients: SD-KDE's two reductions with the move between them, then backward, by samples and queries: time and peak
memory beside those of the forward pass without derivatives.
"""

from __future__ import annotations

import argparse
import math
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

import sdkde_core
from sdkde_core.choice import registry
from sdkde_core.protocol import Columns, Problem, Reduction

Call = Callable[[Tensor, Tensor, float], Tensor]


class Data(NamedTuple):
    x: Tensor  # (n, d)
    y: Tensor  # (m, d)
    h: float


def mixture(n: int, m: int, d: int, device: str) -> Data:
    means = 2 * torch.randn(8, d, device=device)
    z = means[torch.randint(8, (n + m,), device=device)] + torch.randn(n + m, d, device=device)
    return Data(z[:n], z[n:], 0.9 * z[:n].double().std(0).mean().item() * n ** (-1 / (d + 4)))


def log_density(rows: Tensor, points: Tensor) -> Tensor:
    """ℓ of rows, points in units of h, by the plain formula in their dtype."""
    e = rows @ points.T - 0.5 * (rows * rows).sum(1)[:, None] - 0.5 * (points * points).sum(1)
    return e.exp().sum(1).log() - math.log(len(points))


def moved(points: Tensor) -> Tensor:
    e = points @ points.T - 0.5 * (points * points).sum(1)[:, None] - 0.5 * (points * points).sum(1)
    phi = e.exp()
    return 0.5 * (points + phi @ points / phi.sum(1, keepdim=True))


def plain(compiled: bool = False, tf32: bool = False) -> Call:
    first, second = (torch.compile(f, dynamic=False) if compiled else f for f in (moved, log_density))

    def call(x: Tensor, y: Tensor, h: float) -> Tensor:
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
        d = x.shape[1]
        return second(y / h, first(x / h)) - d * math.log(h) - 0.5 * d * math.log(2 * math.pi)

    return call


def ours(precision: str, device: str, **options: object) -> Call:
    def call(x: Tensor, y: Tensor, h: float) -> Tensor:
        torch.set_float32_matmul_precision("highest")
        fixed = {"backend": "torch", "precision": precision, "log": True, "device": device, "backend_options": options}
        return sdkde_core.estimate(x, y, bandwidth=h, **fixed)

    return call


def truth(data: Data) -> Tensor:
    """The same by float64 sums, a block of rows at a time."""
    u, v = ((a.double() - data.x.double().mean(0)) / data.h for a in (data.x, data.y))

    def blocks(rows: Tensor) -> tuple[Tensor, ...]:
        return rows.split(max(1, 2**26 // len(u)))

    def exponents(rows: Tensor, points: Tensor) -> Tensor:
        e = torch.addmm(-0.5 * (points * points).sum(1), rows, points.T)
        return e.sub_(0.5 * (rows * rows).sum(1, keepdim=True)).clamp_(max=0)

    points = torch.cat([0.5 * (r + torch.softmax(exponents(r, u), 1) @ u) for r in blocks(u)])
    d = u.shape[1]
    constant = -d * math.log(data.h) - 0.5 * d * math.log(2 * math.pi) - math.log(len(u))
    return torch.cat([torch.logsumexp(exponents(r, points), 1) for r in blocks(v)]) + constant


def once(call: Call, data: Data) -> tuple[float, Tensor]:
    """Milliseconds of a call, and what it returned."""
    if not data.x.is_cuda:
        start = time.perf_counter()
        result = call(*data)
        return 1e3 * (time.perf_counter() - start), result
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    result = call(*data)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end), result


def compare(options: argparse.Namespace) -> None:
    device, tf32 = options.device, options.device.startswith("cuda")
    contenders: dict[str, Call] = {"plain formula": plain()}
    contenders |= {"plain formula, compiled": plain(compiled=True)}
    contenders |= {"plain formula, compiled, TF32": plain(compiled=True, tf32=True)} if tf32 else {}
    for memory in options.memory.split(","):
        for precision in ("fast", "high"):
            for compiled in (False, True):
                name = f"sdkde_torch, {precision}, {memory}{', compiled' if compiled else ''}"
                contenders[name] = ours(precision, device, memory=memory, compile=compiled)
    pool = [mixture(options.n, options.m, options.d, device) for _ in range(3)]
    wanted = [truth(data) for data in pool]
    print(f"SD-KDE, {options.n} × {options.m}, d = {options.d}, {device}, PyTorch {torch.__version__}\n")
    print(f"{'':44}{'ms':>9}{'worst row':>12}{'peak MiB':>10}")
    for name, call in contenders.items():
        try:
            for data in pool:
                once(call, data)
            if tf32:
                torch.cuda.reset_peak_memory_stats()
            times, worst = [], 0.0
            for k in range(options.calls):
                ms, got = once(call, pool[k % 3])
                times.append(ms)
                worst = max(worst, float((got.double() - wanted[k % 3]).abs().max()))
        except (RuntimeError, torch.OutOfMemoryError) as error:
            print(f"{name:44} failed: {str(error).splitlines()[0][:60]}", flush=True)
            continue
        peak = f"{torch.cuda.max_memory_allocated() / 2**20:10.0f}" if tf32 else ""
        print(f"{name:44}{statistics.median(times):9.2f}{worst:12.1e}{peak}", flush=True)
    torch.set_float32_matmul_precision("highest")


# --- derivatives ----------------------------------------------------------------------------------------------------


def sdkde(x: Tensor, y: Tensor, precision: str, attached: bool) -> Tensor:
    """ℓ after both passes at the precision of reductions, x and y whitened."""
    found = registry.find("torch")
    assert found is not None and found.info is not None
    backend = found.info.load()
    n, d = x.shape
    extent = float(torch.cat([x, y]).detach().norm(dim=1).max()) * 1.01
    log_w = torch.full((n,), -math.log(n), dtype=torch.float64, device=x.device)
    requires = frozenset({"grad"} if attached else ())
    more = {"precision": precision, "device": str(x.device), "requires": requires, "extent": extent}
    first = Problem(Reduction.MEAN, n, n, d, same=True, **more)
    points = x + 0.5 * backend.reduce(first, None, backend.prepare(first, Columns(x, log_w))).shift
    last = Problem(Reduction.LOG_SUM, len(y), n, d, **more)
    return backend.reduce(last, y, backend.prepare(last, Columns(points, log_w))).log_sum


def derivative(options: argparse.Namespace) -> None:
    """One run in this process, so that its peak memory is its own: prints seconds of both parts and MiB."""
    torch.manual_seed(0)
    x, y, h = mixture(options.n, options.m, options.d, options.device)
    attached = options.part == "backward"
    u, v = (((a - x.mean(0)) / h).double().requires_grad_(attached) for a in (x, y))
    base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    seconds: list[list[float]] = [[], []]
    for _ in range(3):
        start = time.perf_counter()
        result = sdkde(u, v, options.precision, attached)
        float(result.detach()[0])  # waits for the device
        middle = time.perf_counter()
        if attached:
            grads = torch.autograd.grad(result.sum(), [u, v])
            float(grads[0][0, 0])
        for kept, t in zip(seconds, (middle - start, time.perf_counter() - middle)):
            kept.append(t)
    if u.is_cuda:
        peak = torch.cuda.max_memory_allocated() / 2**20
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 - base
    forward, backward = (statistics.median(s) for s in seconds)
    print(f"{options.part:9} {options.precision:8} forward {forward:.3f} s, backward {backward:.3f} s, {peak:.0f} MiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--n", type=int)
    parser.add_argument("--m", type=int)
    parser.add_argument("--d", type=int, default=16)
    parser.add_argument("--memory", default="256MiB")
    parser.add_argument("--calls", type=int, default=15)
    parser.add_argument("--gradients", action="store_true")
    parser.add_argument("--precision", default="high", help="of --gradients")
    parser.add_argument("--part", choices=("forward", "backward"), help="one run of --gradients, in this process")
    options = parser.parse_args()
    options.device = "cuda:0" if options.device == "cuda" else options.device
    options.n = options.n or (20_000 if options.gradients else 32_768)
    options.m = options.m or options.n // 8
    if not options.gradients:
        compare(options)
    elif options.part:
        derivative(options)
    else:
        for part in ("forward", "backward"):
            command = [sys.executable, *sys.argv, "--part", part]
            print(subprocess.run(command, check=True, capture_output=True, text=True).stdout, end="", flush=True)


if __name__ == "__main__":
    main()
