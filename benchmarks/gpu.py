"""The Triton backend on one CUDA GPU beside its peers: time with error, clock, and share of the exp2 limit.

    python benchmarks/gpu.py [--cases d16,laplace] [--only sdkde,KeOps] [--json PATH]

Whole estimates on float32 tensors on the GPU, one h for score, shift and evaluation. Eight equal normals, means
2·N(0, I), std 1; h = 0.9 · mean std · n^(−1/(d+4)). Other data in every call than in the call before, so a stale output
shows as an error. Medians by CUDA events, the host's part included; peers at the fastest of the settings in their
functions. Errors: worst row of |Δ log p̂| against float64 sums (Laplace: |Δp̂| / M̂, M̂ with plus signs throughout), rows
beyond "fast" (twice it for sdkde), relative L2 of p̂; from a million points on over 256 rows, given own debiased points.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable
from functools import cache, partial
from importlib import metadata
from typing import Any, NamedTuple

import pynvml
import torch
from torch import Tensor

Call = Callable[..., Tensor]
LARGE, SAMPLE = 2**20, 256  # from LARGE points on: the first setting of each peer, errors on SAMPLE rows
CASES = {  # method, n_train, n_query, d
    "d16": [("sdkde", 32768, 4096, 16)],
    "dims": [("sdkde", 32768, 4096, d) for d in (2, 8, 32, 64, 128)],
    "sizes": [("sdkde", 2**k, 2**k // 8, 16) for k in range(11, 17)],
    "one-d": [("sdkde", 65536, 8192, 1)],
    "laplace": [("kde", 32768, 4096, 16), ("laplace", 32768, 4096, 16)],
    "large": [("sdkde", 2**20, 2**17, 16)],
}


class Data(NamedTuple):
    x: Tensor  # (n, d)
    y: Tensor  # (m, d)
    h: float
    truth: dict[str, Tensor]  # the reference, by method, once computed


class Contender(NamedTuple):
    whole: Call  # (x, y, h) -> (m,) of what `form` says
    form: str  # "log": log p̂; "density": p̂; "sum": Σφ, or Laplace's sum; "moved": no p̂, the (n, d) debiased points
    debias: Call | None = None  # (x, h) -> (n, d)
    setting: str = ""


def mixture(n: int, m: int, d: int) -> Data:
    means = 2 * torch.randn(8, d, device="cuda")
    z = means[torch.randint(8, (n + m,), device="cuda")] + torch.randn(n + m, d, device="cuda")
    return Data(z[:n], z[n:], 0.9 * z[:n].double().std(0).mean().item() * n ** (-1 / (d + 4)), {})


def log_constant(d: int, h: float) -> float:  # log p̂ less ℓ
    return -d * math.log(h) - 0.5 * d * math.log(2 * math.pi)


def reference(rows: Tensor, points: Tensor, h: float, what: str) -> Tensor:
    """ℓ (m,), shift (m, d) in bandwidths, or Laplace's L and M (m, 2) in float64; centred, it rounds by R²·1e-16."""
    u, v = ((z.double() - points.double().mean(0)) / h for z in (points, rows))
    norms, c, out = 0.5 * (u * u).sum(1), 1 + 0.5 * u.shape[1], []
    for part in v.split(max(1, 2**27 // len(u))):
        e = torch.addmm(-norms, part, u.T).sub_(0.5 * (part * part).sum(1, keepdim=True)).clamp_(max=0)  # −r²/2
        if what == "shift":
            out.append(torch.softmax(e, 1) @ u - part)
        elif what == "laplace":
            out.append(torch.stack([(e.exp() * (c + e)).mean(1), (e.exp() * (c - e)).mean(1)], 1))
        else:
            out.append(torch.logsumexp(e, 1) - math.log(len(u)))
    return torch.cat(out)


def truth(contender: Contender, data: Data, method: str, rows: Tensor) -> tuple[Tensor, float | None]:
    """The reference for those query rows and, from LARGE on, the worst shift's error in bandwidths."""
    x, y, h = data[:3]
    if len(x) >= LARGE and contender.debias:
        given, some = contender.debias(x, h), torch.randperm(len(x), device="cuda")[:SAMPLE]
        off = 2 * (given[some].double() - x[some].double()) / h - reference(x[some], x, h, "shift")
        return reference(y[rows], given, h, "log"), off.norm(dim=1).max().item()
    if method not in data.truth:
        points = x + 0.5 * h * reference(x, x, h, "shift") if method == "sdkde" else x
        data.truth[method] = reference(y, points, h, method)
    return data.truth[method][rows], None


def errors(contender: Contender, raw: Tensor, data: Data, method: str) -> dict[str, Any]:
    n, form, constant = len(data.x), contender.form, log_constant(data.x.shape[1], data.h)
    rows = torch.randperm(len(data.y), device="cuda")[: SAMPLE if n >= LARGE else None]
    want, shift = truth(contender, data, method, rows)
    if form == "moved" and n >= LARGE:  # p̂ would be checked against itself
        return dict.fromkeys(("worst", "beyond", "l2"), math.nan) | {"shift": shift}
    raw = reference(data.y[rows], raw, data.h, "log") if form == "moved" else raw[rows].double()
    if method == "laplace":
        p, q = raw / n if form == "sum" else raw * math.exp(-constant), want[:, 0]
        error, scale = (p - q).abs() / want[:, 1], want[:, 1].log()
    else:  # in ℓ
        got = (raw if form in ("log", "moved") else raw.log()) - {"sum": math.log(n), "moved": 0.0}.get(form, constant)
        error, scale = (got - want).abs(), want
        p, q = (got - want.max()).exp(), (want - want.max()).exp()
    beyond = ~(error <= (2 if method == "sdkde" else 1) * (5e-4 + 1e-6 * scale.abs()))
    found = {"worst": error.max(), "beyond": beyond.double().mean(), "l2": (p - q).norm() / q.norm()}
    return {key: value.item() for key, value in found.items()} | {"shift": shift}


def once(call: Call, *args: Any, clocks: list[int] | None = None) -> tuple[float, Tensor]:  # ms, output
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    result = call(*args)
    end.record()
    if clocks is not None:
        clocks.append(torch.cuda.clock_rate())  # MHz of the SMs, still at work
    end.synchronize()
    return start.elapsed_time(end), result


def measure(call: Call, pool: list[Data]) -> tuple[float, Tensor, Data, float]:
    """Median ms of about 0.6 s of calls, the last output and its data, the median clock."""
    for data in pool:  # warm-up: compilation, tuning, the clock
        last = once(call, *data[:3])[0]
    times, clocks = [], []
    for k in range(max(2, min(300, int(600 / last)))):
        data = pool[k % len(pool)]
        ms, raw = once(call, *data[:3], clocks=None if k % 32 else clocks)  # reading it takes milliseconds
        times.append(ms)
    return statistics.median(times), raw, data, statistics.median(clocks)


def fastest(candidates: dict[str, Call], *args: Any) -> tuple[str, Call]:
    """The candidate that takes the least time; from LARGE on the first, the usual winner."""
    if len(candidates) == 1 or len(args[0]) >= LARGE:
        return next(iter(candidates.items()))
    return min(candidates.items(), key=lambda item: statistics.median(once(item[1], *args)[0] for _ in range(9)))


def two_pass(data: Data, method: str, debias: dict[str, Call], evaluate: dict[str, Call], form: str) -> Contender:
    """The fastest debiasing (x, h) -> (n, d) followed by the fastest evaluation (points, y, h) -> (m,)."""
    second, last = fastest(evaluate, data.x, data.y, data.h)
    if method != "sdkde":
        return Contender(last, form, setting=second)
    first, move = fastest(debias, data.x, data.h)
    return Contender(lambda x, y, h: last(move(x, h), y, h), form, move, ", ".join({first: 0, second: 0}))


def ours(data: Data, method: str, fused: bool = True, backend: str = "triton") -> Contender | None:
    """Not fused: Laplace in two passes, our KDE and then −½ Σφr² by torch.compile in fp32."""
    import sdkde_core

    options = {"backend": backend, "precision": "fast"}

    def whole(x: Tensor, y: Tensor, h: float, method: str = method) -> Tensor:  # logs, since p̂ underflows at d = 128
        return sdkde_core.estimate(x, y, method=method, bandwidth=h, log=method != "laplace", **options)

    def two(x: Tensor, y: Tensor, h: float) -> Tensor:
        second = by_rows(f, y, x, h, "correction", tf32=False) * (math.exp(log_constant(x.shape[1], h)) / len(x))
        return (1 + 0.5 * x.shape[1]) * whole(x, y, h, "kde").exp() + second

    if not fused:
        torch._dynamo.reset()
        f = torch.compile(tile, dynamic=False)
        return Contender(two, "density") if method == "laplace" else None
    if method != "sdkde":
        return Contender(whole, "density" if method == "laplace" else "log")
    return Contender(whole, "log", lambda x, h: sdkde_core.debias(x, bandwidth=h, **options))


def flash(data: Data, method: str, mode: str, fused: bool = True) -> Contender | None:
    """flash-sd-kde 0.1: d = 16, and d = 1 in plain fp32. Its "flash" score kernel knows TF32 alone."""
    import flash_sd_kde as package
    from kernels import flash_sd_kde as kernels
    from triton.runtime import Autotuner

    d, ieee = data.x.shape[1], mode == "fp32_ieee"
    if (not fused and method != "laplace") or (ieee and d != 16):
        return None
    modules = [vars(module) for name, module in sys.modules.items() if name.startswith("kernels.")]
    for tuner in (value for module in modules for value in module.values() if isinstance(value, Autotuner)):
        tuner.cache.clear()  # its keys leave out the precision and the Laplacian

    def debias(x: Tensor, h: float, how: Any) -> Tensor:
        if d == 1:
            options = {"synchronize": False} | dict(zip(("block_m", "block_n", "num_warps"), how))
            return x + 0.5 * h * h * kernels.gaussian_kde_score_triton(x[:, 0], x[:, 0], h, **options)[0][:, None]
        if how == "flash":
            return kernels.empirical_sd_kde_triton_nd(x, h, return_tensor=True, synchronize=False)[0]
        tune = len(x) < LARGE  # the first call of symmetric_atomic is wrong then: it tunes on its own outputs
        return package.emp_sd_kde_fit_transform(x, h, precision_mode=mode, emp_score_backend=how, autotune=tune)

    def evaluate(points: Tensor, y: Tensor, h: float, how: str) -> Tensor:
        points, y = (points[:, 0], y[:, 0]) if d == 1 else (points, y)
        linearized = package.kde_eval_linearized if fused else package.kde_eval_linearized_nonfused
        density = linearized if method == "laplace" else package.kde_eval
        return density(points, y, h, precision_mode=mode, kde_backend=how)

    hows = ["flash", "symmetric_atomic", "ordered_splitk"][ieee:]
    hows = [(128, 128, 4), (64, 128, 1), (64, 256, 4)] if d == 1 else hows
    moves = {f"fp32 {how}" if d == 1 else how: partial(debias, how=how) for how in hows}
    return two_pass(data, method, moves, {b: partial(evaluate, how=b) for b in ("atomic", "splitk_stream")}, "density")


def keops(data: Data, method: str) -> Contender:
    import pykeops
    from pykeops.torch import LazyTensor

    pykeops.set_verbose(False)

    def exponent(rows: Tensor, points: Tensor, h: float) -> Any:
        scale = 1 / (h * math.sqrt(2))
        return -LazyTensor((rows * scale)[:, None, :]).sqdist(LazyTensor((points * scale)[None, :, :]))  # −r²/2

    def debias(x: Tensor, h: float, **options: Any) -> Tensor:
        values = torch.cat([x, torch.ones_like(x[:, :1])], 1)
        sums = exponent(x, x, h).exp().__matmul__(values, **options)
        return 0.5 * (x + sums[:, :-1] / sums[:, -1:])

    def evaluate(points: Tensor, y: Tensor, h: float, **options: Any) -> Tensor:
        e = exponent(y, points, h)
        phi = e.exp() * (e + (1 + 0.5 * y.shape[1])) if method == "laplace" else e.exp()
        return phi.sum_reduction(axis=1, **options)[:, 0]

    schemes = ("GPU_2D", "GPU_1D")  # neither sum_scheme="direct_sum" nor, at d = 128, enable_chunks=False was faster
    both = ({b: partial(call, backend=b) for b in schemes} for call in (debias, evaluate))
    return two_pass(data, method, *both, "sum")


def tile(rows: Tensor, points: Tensor, what: str) -> Tensor:
    """The plain GEMM formulation, on points in units of h."""
    e = rows @ points.T - 0.5 * (rows * rows).sum(1)[:, None] - 0.5 * (points * points).sum(1)  # −r²/2
    phi = e.exp()
    if what == "moved":
        return 0.5 * (rows + phi @ points / phi.sum(1, keepdim=True))
    c = {"laplace": 1 + 0.5 * rows.shape[1], "correction": 0.0}
    return (phi * (c[what] + e)).sum(1) if what in c else phi.sum(1)


def by_rows(f: Call, rows: Tensor, points: Tensor, h: float, what: str, tf32: bool) -> Tensor:
    torch.backends.cuda.matmul.allow_tf32 = tf32
    points = points / h  # 2³⁰ pairs at a time: fewer were no faster
    return torch.cat([f(part, points, what) for part in (rows / h).split(max(1, 2**30 // len(points)))])


def pytorch(data: Data, method: str, compiled: bool) -> Contender:
    torch._dynamo.reset()
    f = torch.compile(tile, dynamic=False) if compiled else tile
    debias = {"": lambda x, h: by_rows(f, x, x, h, "moved", compiled) * h}
    return two_pass(data, method, debias, {"": lambda x, y, h: by_rows(f, y, x, h, method, compiled)}, "sum")


def attention(data: Data, method: str) -> Contender | None:
    """softmax(QKᵀ)V is the score pass: exponents in log2 units from fp16 high and low parts, packed beforehand."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    unit = math.sqrt(math.log2(math.e))

    def padded(*columns: Tensor) -> Tensor:
        z = torch.cat([c.half() for c in columns], 1)
        return torch.nn.functional.pad(z, (0, -z.shape[1] % 64))[None, None].contiguous()

    @cache
    def packed(x: Tensor, h: float) -> tuple[Tensor, ...]:
        u = (x.double() - x.double().mean(0)) * (unit / h)
        hi, norm, one = u.half(), -0.5 * (u * u).sum(1, keepdim=True), torch.ones_like(u[:, :1])
        lo, norms = u - hi, (norm.half(), norm - norm.half())
        return padded(hi, hi, lo, *norms, one, one), padded(hi, lo, hi, one, one, *norms), padded(hi, one), hi.float()

    def debias(x: Tensor, h: float) -> Tensor:
        q, k, v, hi = packed(x, h)
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            mean = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=math.log(2))[0, 0, :, : x.shape[1]]
        return torch.add(x, mean - hi, alpha=0.5 * h / unit)

    return Contender(lambda x, y, h: debias(x, h), "moved", debias) if method == "sdkde" else None


IMPLEMENTATIONS: dict[str, Callable[[Data, str], Contender | None]] = {  # None: no row in this case
    "flash-sd-kde TF32": partial(flash, mode="fast_tf32"),  # first: the others' ratios are to its time
    "sdkde": ours,
    "sdkde Hopper": partial(ours, backend="hopper"),
    "sdkde's KDE + Σφr² pass": partial(ours, fused=False),
    "flash-sd-kde fp32": partial(flash, mode="fp32_ieee"),
    "flash-sd-kde TF32 unfused": partial(flash, mode="fast_tf32", fused=False),
    "KeOps": keops,
    "torch.compile TF32": partial(pytorch, compiled=True),
    "PyTorch fp32": partial(pytorch, compiled=False),
    "cuDNN attention, score pass only": attention,
}


def record(case: tuple[str, int, int, int], name: str, pool: list[Data]) -> dict[str, Any] | None:
    method, n, m, d = case
    found: dict[str, Any] = {"method": method, "n": n, "m": m, "d": d, "implementation": name}
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        if (contender := IMPLEMENTATIONS[name](pool[0], method)) is None:
            return None
        ms, raw, data, mhz = measure(contender.whole, pool)
        pairs = n * n * (method == "sdkde") + n * m * (contender.form != "moved")
        limit = pairs / (16 * torch.cuda.get_device_properties(0).multi_processor_count * mhz * 1e3)  # ms
        found |= {"setting": contender.setting, "ms": ms, "mhz": mhz, "of_limit": limit / ms}
        return found | errors(contender, raw, data, method)
    except Exception as error:
        return found | {"error": f"{type(error).__name__}: {error}".split("\n")[0][:110]}


def line(row: dict[str, Any], flash_ms: float | None) -> str:
    name = f"{row['method']} {row['n']} × {row['m']}, d = {row['d']} | {row['implementation']}"
    if "error" in row:
        return f"| {name} | skipped: {row['error']} |"
    name += f" ({row['setting']})" if row["setting"] else ""
    name += f"; shift off by {row['shift']:.1e} h" if row["shift"] else ""
    cells = [name, f"{row['ms']:.3f}", f"{row['worst']:.1e}", f"{100 * row['beyond']:.2f} %", f"{row['l2']:.1e}"]
    cells += [f"{row['mhz']:.0f}", f"{100 * row['of_limit']:.0f} %", f"{row['ms'] / flash_ms:.2f}" if flash_ms else "–"]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="d16", help=f"of {', '.join(CASES)}; or all")
    parser.add_argument("--only", default="", help="implementations whose names begin with one of these")
    parser.add_argument("--json", metavar="PATH", help="write every record there")
    options = parser.parse_args()
    groups = CASES if options.cases == "all" else options.cases.split(",")
    torch.cuda.seed()
    pynvml.nvmlInit()
    about = {"gpu": torch.cuda.get_device_name(), "driver": pynvml.nvmlSystemGetDriverVersion(), "precision": "fast"}
    rows, versions = [], {each.name: each.version for each in metadata.distributions()}
    about |= {p: versions.get(p, "missing") for p in ("torch", "triton", "sdkde-core", "pykeops", "flash-sd-kde")}
    print(", ".join(f"{key} {value}" for key, value in about.items()))
    print("| case | implementation | ms | worst row | beyond | rel L2 | SM MHz | exp2 limit | × flash TF32 |")
    print("|---|---|---:|---:|---:|---:|---:|---:|---:|")
    for case in dict.fromkeys(case for group in groups for case in CASES[group]):
        pool, flash_ms = [mixture(*case[1:]) for _ in range(2 if case[1] >= LARGE else 3)], None
        for name in (name for name in IMPLEMENTATIONS if name.startswith(tuple(options.only.split(",")))):
            if row := record(case, name, pool):
                flash_ms = row.get("ms") if name == "flash-sd-kde TF32" else flash_ms
                rows.append(row)
                print(line(row, flash_ms), flush=True)
            torch.cuda.empty_cache()
        if options.json:
            with open(options.json, "w") as file:
                json.dump(about | {"rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
