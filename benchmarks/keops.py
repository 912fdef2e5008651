"""The KeOps backend beside the same formulas written by hand: time with error, and what the backend adds.

    python benchmarks/keops.py [--device cuda:0] [--n 32768] [--m 4096] [--dimensions 1,2,3,16] [--precisions fast,high]
                               [--repeats 7]

Reductions, then SD-KDE as a whole, on a mixture of eight normals in units of Silverman's bandwidth. By hand: one call
of pykeops.torch.Genred on tensors of the precision that the backend takes, "GPU_2D" on a GPU, and the logarithms and
quotients that make it a log sum, a shift or a signed sum. Both in turn, medians of
wall time; the ratio on a CPU, which others may use, is that of CPU time. Levels computed in the same precision share a
line. Errors: worst row over the strictest precision's tolerance, against float64 sums of differences, over 256 rows.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from sdkde_keops import bounds
from sdkde_keops.info import INFO
from torch import Tensor

import sdkde_core
from sdkde_core.engine.merge import each
from sdkde_core.protocol import Columns, Problem, Reduction
from sdkde_core.testing.problems import Case, Truth, errors

#: The second pass of SD-KDE, its first, and Laplace's only one.
PASSES = ((Reduction.MEAN, True), (Reduction.LOG_SUM, False), (Reduction.LAPLACE, False))


def whitened(n: int, m: int, d: int) -> Case:
    """Eight equal normals, means 2·N(0, I), in units of the bandwidth, centred."""
    rng = np.random.default_rng(d)
    means = 2.0 * rng.normal(size=(8, d))
    x, y = (means[rng.integers(8, size=k)] + rng.normal(size=(k, d)) for k in (n, m))
    h = 0.9 * x.std(0).mean() * n ** (-1.0 / (d + 4))
    centre = x.mean(0)
    return Case("eight normals", (x - centre) / h, (y - centre) / h, np.full(n, -np.log(n)))


def genred(reduction: Reduction, d: int, device: str, plain: bool) -> Callable[[Tensor, Tensor], Tensor]:
    """The reduction as a user of KeOps writes it: stable sums of exp(−½‖x − y‖²), or plain ones, to the end."""
    import pykeops
    from pykeops.torch import Genred

    pykeops.set_verbose(False)
    aliases, e = [f"x=Vi({d})", f"y=Vj({d})"], "RatCst(-1,2)*SqDist(x,y)"
    other = {Reduction.MEAN: "y-x", Reduction.LAPLACE: "SqDist(x,y)"}.get(reduction)
    summed = f"Concat(IntCst(1),{other})" if other else "IntCst(1)"
    if plain:
        call = Genred(f"Exp({e})*{summed}", aliases, reduction_op="Sum", axis=1)
    else:
        call = Genred(e, aliases, reduction_op="Max_SumShiftExpWeight", axis=1, formula2=summed)

    def finished(x: Tensor, y: Tensor) -> Any:
        sums = call(x, y, backend="CPU" if device == "cpu" else "GPU_2D").double()
        log_scale, sums = (0.0, sums) if plain else (sums[:, 0] - math.log(len(y)), sums[:, 1:])
        if reduction is Reduction.LOG_SUM:
            return log_scale + sums[:, 0].log()
        if reduction is Reduction.MEAN:
            return log_scale + sums[:, 0].log(), sums[:, 1:] / sums[:, :1]
        half = (1.0 + 0.5 * d) * sums[:, 0]
        signed = half - 0.5 * sums[:, 1]
        return signed.sign(), signed.abs().log() + log_scale, (half + 0.5 * sums[:, 1]).log() + log_scale

    return finished


def medians(calls: list[Callable[[], Any]], repeats: int, cuda: bool) -> list[tuple[float, float]]:
    """Wall and CPU seconds of each, in turn."""
    taken: list[list[tuple[float, float]]] = [[] for _ in calls]
    for repeat in range(repeats + 1):
        for call, times in zip(calls, taken):
            if cuda:
                torch.cuda.synchronize()
            wall, cpu = time.perf_counter(), time.process_time()
            call()
            if cuda:
                torch.cuda.synchronize()
            if repeat:  # the first compiles
                times.append((time.perf_counter() - wall, time.process_time() - cpu))
    return [(statistics.median(w for w, _ in t), statistics.median(c for _, c in t)) for t in taken]


def exact(rows: Tensor, points: Tensor) -> Truth:
    """All three reductions by differences in float64, a row at a time."""
    found: list[list[Any]] = []
    half = 1.0 + 0.5 * rows.shape[1]
    for row in rows:
        differences = points - row  # (n, d)
        exponents = -0.5 * (differences**2).sum(1)
        log_scale = float(exponents.max())
        phi = (exponents - log_scale).exp()
        total, plus = phi.sum(), (phi * (half - exponents)).sum()
        log_scale -= math.log(len(points))
        shift, signed = (phi @ differences) / total, (phi * (half + exponents)).sum() / plus
        found.append(
            [float(total.log()) + log_scale, shift.cpu().numpy(), float(signed), float(plus.log()) + log_scale]
        )
    return Truth(*(np.array(column) for column in zip(*found)))


def measure(case: Case, problem: Problem, want: Truth, some: Any, repeats: int) -> tuple[list[float], float, float]:
    """Milliseconds of the backend and by hand, their ratio, and the worst error over the tolerance."""
    backend, device = INFO.load(), problem.device
    columns = Columns(*(torch.as_tensor(a, device=device) for a in (case.points, case.log_weights)))
    queries = None if problem.same else torch.as_tensor(case.queries, device=device)
    state = backend.prepare(problem, columns)
    y = columns.points.to(getattr(torch, bounds.dtype(problem)))
    x, hand = (
        y if queries is None else queries.to(y.dtype),
        genred(problem.reduction, problem.d, device, problem.same and device != "cpu"),
    )
    times = medians([lambda: backend.reduce(problem, queries, state), lambda: hand(x, y)], repeats, device != "cpu")
    got = each(backend.reduce(problem, queries, state), lambda a: a[some].cpu().numpy())
    return [1e3 * t[0] for t in times], _ratio(times, device), float(errors(problem, got, want).max())


def whole(case: Case, precision: str, device: str, repeats: int) -> tuple[list[float], float]:
    """Milliseconds of SD-KDE by the estimator and by hand, and their ratio."""
    x, y = (torch.as_tensor(a, device=device) for a in (case.points, case.queries))
    last = case.problem(Reduction.LOG_SUM, precision, device=device)
    kind = getattr(torch, bounds.dtype(last))
    first = genred(Reduction.MEAN, x.shape[1], device, device != "cpu")
    second = genred(Reduction.LOG_SUM, x.shape[1], device, False)

    def by_hand() -> Tensor:
        moved = x + 0.5 * first(x, x)[1]
        return second(y.to(kind), moved.to(kind))

    def ours() -> Any:
        return sdkde_core.estimate(x, y, bandwidth=1.0, precision=precision, log=True, backend="keops", device=device)

    times = medians([ours, by_hand], repeats, device != "cpu")
    return [1e3 * t[0] for t in times], _ratio(times, device)


def _ratio(times: list[tuple[float, float]], device: str) -> float:
    clock = int(device == "cpu")
    return times[0][clock] / times[1][clock]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--n", type=int, default=32768)
    parser.add_argument("--m", type=int, default=4096)
    parser.add_argument("--dimensions", default="1,2,3,16")
    parser.add_argument("--precisions", default="fast,high,float64")
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    print(f"KeOps on {options.device}, {options.n} samples, {options.m} queries, torch {torch.__version__}")
    print("| d | extent | pass | precisions | in | ms | by hand, ms | ratio | worst row over tolerance |")
    print("|--:|--:|---|---|---|--:|--:|--:|--:|")
    precisions = options.precisions.split(",")
    for d in map(int, options.dimensions.split(",")):
        case = whitened(options.n, options.m, d)
        some = np.linspace(0, options.m - 1, min(256, options.m)).astype(int)
        points, queries = (torch.as_tensor(a, device=options.device) for a in (case.points, case.queries))
        truths = {same: exact((points if same else queries)[some], points) for same in (True, False)}
        for reduction, same in PASSES:
            kinds: dict[str, list[Problem]] = {}
            for precision in precisions:
                problem = case.problem(reduction, precision, same=same, device=options.device)
                if INFO.supports(problem).ok:
                    kinds.setdefault(bounds.dtype(problem), []).append(problem)
            for kind, problems in kinds.items():
                ms, ratio, error = measure(case, problems[-1], truths[same], some, options.repeats)
                names = ", ".join(p.precision for p in problems)
                print(
                    f"| {d} | {problems[-1].extent:.1f} | {reduction} | {names} | {kind} | {ms[0]:.3g} | {ms[1]:.3g} "
                    f"| {ratio:.3f} | {error:.2g} |",
                    flush=True,
                )
        for precision in precisions:
            ms, ratio = whole(case, precision, options.device, options.repeats)
            print(f"| {d} | | SD-KDE | {precision} | | {ms[0]:.3g} | {ms[1]:.3g} | {ratio:.3f} | |", flush=True)


if __name__ == "__main__":
    main()
