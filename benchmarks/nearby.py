"""SD-KDE on a CPU with tiles left out, and over all pairs: processor time of both passes, from some of their tasks.

    python benchmarks/nearby.py [--n 1048576] [--d 4] [--data mixture] [--precision high] [--tasks 12]

n samples and n/8 queries at Silverman's bandwidth: a mixture of eight normals, one normal, or three intrinsic
dimensions in d. Preparing is timed as it is; sums by as many tasks as asked for, spread over the rows; all pairs
by 64 rows; both are scaled to all rows. Errors are those of 100 rows, 50 of them outermost, against direct
differences.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
from sdkde_numba import backend as implementation
from sdkde_numba.backend import GROUP, NumbaBackend
from sdkde_numba.price import LEAF, forecast, sample_of

from sdkde_core.nearby import order
from sdkde_core.plugin import reduce_exact
from sdkde_core.protocol import TOLERANCES, Columns, Problem, Reduction

Array = Any


def draw(kind: str, rng: np.random.Generator, d: int, *counts: int) -> list[Array]:
    means, directions = 2.0 * rng.normal(size=(8, d)), np.linalg.qr(rng.normal(size=(d, d)))[0][:3]
    found = []
    for k in counts:
        x = rng.normal(size=(k, d))
        if kind == "mixture":
            x += means[rng.integers(0, 8, k)]
        elif kind == "intrinsic":
            x = rng.normal(size=(k, 3)) @ directions + 0.01 * x
        found.append(x)
    return found


def timed(call: Any) -> tuple[float, Any]:
    start = time.process_time()
    result = call()
    return time.process_time() - start, result


def one_pass(
    problem: Problem, rows: Array, columns: Columns, tasks: int, rng: np.random.Generator
) -> tuple[float, float]:
    """Print what a pass takes; return seconds with tiles left out, and over all pairs."""
    some, whole = NumbaBackend(1, skip=True), NumbaBackend(1, skip=False)
    before, state = timed(lambda: some.prepare(problem, columns))
    sorting, places = (0.0, state.near.columns.order) if problem.same else timed(lambda: order(rows, LEAF))
    own = np.full(GROUP, implementation.NO_COLUMN)
    first = np.linspace(0, max(0, len(rows) - GROUP), tasks).astype(int)
    groups = [places[i : i + GROUP] for i in first]
    implementation._some(problem, state, rows[groups[0]], own)  # compiles
    sums, _ = timed(lambda: [implementation._some(problem, state, rows[g], own) for g in groups])
    seconds = before + sorting + sums * len(rows) / (len(groups) * GROUP)
    all_state, pick = whole.prepare(problem, columns), rng.integers(0, len(rows), 64)
    whole.reduce(problem, rows[pick], all_state)
    dense = timed(lambda: whole.reduce(problem, rows[pick], all_state))[0] * len(rows) / len(pick)

    pick = np.concatenate([np.argsort(-abs(rows).max(axis=1))[:50], rng.integers(0, len(rows), 50)])
    got, want = some.reduce(problem, rows[pick], state), reduce_exact(problem, rows[pick], columns)
    allowed = TOLERANCES[problem.precision]
    worst = (abs(got.log_sum - want.log_sum) / allowed[Reduction.LOG_SUM].at(want.log_sum)).max()
    if got.shift is not None:
        off = np.linalg.norm(got.shift - want.shift, axis=1)
        worst = max(worst, (off / allowed[Reduction.MEAN].at(want.log_sum)).max())
    left = forecast(problem, sample_of(columns))
    print(
        f"{problem.reduction}: {seconds:.1f} s (preparing {before + sorting:.1f}), all pairs {dense:.0f} s, "
        f"ratio {seconds / dense:.3f}; forecast of pairs {left}; worst row {worst:.2g} of its tolerance",
        flush=True,
    )
    return seconds, dense


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=1 << 20)
    parser.add_argument("--d", type=int, default=4)
    parser.add_argument("--data", choices=("mixture", "normal", "intrinsic"), default="mixture")
    parser.add_argument("--precision", choices=("fast", "high", "float64"), default="high")
    parser.add_argument("--tasks", type=int, default=12)
    options = parser.parse_args()
    rng, n, d = np.random.default_rng(7), options.n, options.d
    x, y = draw(options.data, rng, d, n, n // 8)
    spread = np.minimum(x.std(axis=0), np.subtract(*np.percentile(x, [75, 25], axis=0)) / 1.34)
    h, centre = 0.9 * spread * n ** (-1 / (d + 4)), np.median(x, axis=0)
    u, v = (x - centre) / h, (y - centre) / h
    extent = float(np.sqrt(max((u**2).sum(axis=1).max(), (v**2).sum(axis=1).max())))
    columns, totals = Columns(u, np.full(n, -np.log(n))), np.zeros(2)
    for reduction, rows in ((Reduction.MEAN, u), (Reduction.LOG_SUM, v)):
        problem = Problem(reduction, len(rows), n, d, precision=options.precision, extent=extent, same=rows is u)
        totals += one_pass(problem, rows, columns, options.tasks, rng)
    print(f"both: {totals[0]:.0f} s of one processor, all pairs {totals[1]:.0f} s, ratio {totals[0] / totals[1]:.3f}")


if __name__ == "__main__":
    main()
