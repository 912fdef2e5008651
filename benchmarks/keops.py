"""The KeOps backend beside the same formulas written by hand: time with error, and what the backend adds.

    python benchmarks/keops.py [--device cuda:0] [--n 32768] [--m 4096] [--dimensions 1,2,3,16] [--levels fast,high]
                               [--repeats 7]

Reductions on whitened points of a mixture of eight normals, h by Silverman's rule, so that its extent is that of data.
By hand: one call of pykeops.torch.Genred on float32 or float64 tensors as the backend takes them, "GPU_2D" on a GPU,
and the logarithm. Both in turn, medians of wall time (on a GPU synchronised, on a CPU of CPU time too). Errors: worst
row over the level's tolerance, against float64 sums by differences, over 256 rows.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from sdkde_keops import bounds
from sdkde_keops.info import INFO
from torch import Tensor

from sdkde_core.merge import each
from sdkde_core.protocol import Columns, Partial, Problem, Reduction
from sdkde_core.testing.problems import Case, errors, truth

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


def by_hand(problem: Problem, x: Tensor, y: Tensor) -> Callable[[], Any]:
    """The reduction as a user of KeOps writes it: stable sums of −½‖x − y‖²; where x is y, plain ones."""
    import pykeops
    from pykeops.torch import Genred

    pykeops.set_verbose(False)
    d, scheme = problem.d, "CPU" if problem.device == "cpu" else "GPU_2D"
    aliases, e = [f"x=Vi({d})", f"y=Vj({d})"], "RatCst(-1,2)*SqDist(x,y)"
    if problem.reduction is Reduction.LOG_SUM:
        summed = "IntCst(1)"
    else:
        summed = f"Concat(IntCst(1),{'y-x' if problem.reduction is Reduction.MEAN else 'SqDist(x,y)'})"
    if problem.same and problem.device != "cpu":
        call = Genred(f"Exp({e})*{summed}", aliases, reduction_op="Sum", axis=1)
    else:
        call = Genred(e, aliases, reduction_op="Max_SumShiftExpWeight", axis=1, formula2=summed)
    return lambda: call(x, y, backend=scheme)


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


def worst(problem: Problem, case: Case, got: Partial) -> float:
    """Of 256 rows, the largest error over its tolerance."""
    rows = case.points if problem.same else case.queries
    some = np.linspace(0, len(rows) - 1, min(256, len(rows))).astype(int)
    want = truth(Case(case.name, case.points, rows[some], case.log_weights))
    return float(errors(problem, each(got, lambda a: a[torch.as_tensor(some)].cpu().numpy()), want).max())


def measure(case: Case, reduction: Reduction, same: bool, level: str, device: str, repeats: int) -> str:
    problem = case.problem(reduction, level, same=same, device=device)
    backend = INFO.load()
    columns = Columns(*(torch.as_tensor(a, device=device) for a in (case.points, case.log_weights)))
    queries = None if same else torch.as_tensor(case.queries, device=device)
    state = backend.prepare(problem, columns)
    kind = getattr(torch, bounds.dtype(problem))
    y = columns.points.to(kind)
    hand = by_hand(problem, y if queries is None else queries.to(kind), y)
    ours, theirs = medians([lambda: backend.reduce(problem, queries, state), hand], repeats, device != "cpu")
    error = worst(problem, case, backend.reduce(problem, queries, state))
    clock = int(device == "cpu")  # a CPU may be shared: its own time counts
    return (
        f"{problem.d} | {reduction} | {level} | {bounds.dtype(problem)} | {1e3 * ours[0]:.3g} | {1e3 * theirs[0]:.3g} "
        f"| {ours[clock] / theirs[clock]:.3f} | {error:.2g} | {problem.extent:.1f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--n", type=int, default=32768)
    parser.add_argument("--m", type=int, default=4096)
    parser.add_argument("--dimensions", default="1,2,3,16")
    parser.add_argument("--levels", default="fast,high,float64")
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    print(f"KeOps on {options.device}, {options.n} samples, {options.m} queries, torch {torch.__version__}")
    print("d | pass | level | computes in | ms | by hand, ms | ratio | worst row over tolerance | extent")
    print("--:|---|---|---|--:|--:|--:|--:|--:")
    for d in map(int, options.dimensions.split(",")):
        case = whitened(options.n, options.m, d)
        seen = set()
        for reduction, same in PASSES:
            for level in options.levels.split(","):
                problem = case.problem(reduction, level, same=same, device=options.device)
                if not INFO.supports(problem).ok or (reduction, bounds.dtype(problem), level == "fast") in seen:
                    continue
                seen.add((reduction, bounds.dtype(problem), level == "fast"))
                print(measure(case, reduction, same, level, options.device, options.repeats), flush=True)


if __name__ == "__main__":
    main()
