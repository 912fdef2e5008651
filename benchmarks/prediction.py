"""How well the cost model predicts this CPU: predicted against measured time over a grid of problems.

    python benchmarks/prediction.py [--backend numpy] [--nominal]

Measures the CPU's rates first (kept, as by `sdkde doctor --measure`), unless --nominal. Prints the rank correlation
(Spearman) of predicted and measured times, and the worst factor between them.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time

import numpy as np
from scipy.stats import spearmanr

from sdkde_core.arrays import convert
from sdkde_core.choice import cost, hardware, registry
from sdkde_core.plugin import reduce_pass
from sdkde_core.protocol import Columns, Reduction
from sdkde_core.testing.problems import make

SIZES = ((500, 500), (4000, 1000), (20000, 2000), (100_000, 100), (8000, 8000))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="numpy")
    parser.add_argument("--nominal", action="store_true")
    arguments = parser.parse_args()
    record = registry.find(arguments.backend)
    assert record is not None and record.info is not None, f"no backend {arguments.backend!r}"
    info, backend = record.info, record.info.load()
    if not arguments.nominal:
        hardware.measure_cpu()
    on = hardware.cpu()
    print(f"{on.name}: {on.source}; exps {on.exps:.2e}/s, scalar {on.scalar_flops:.2e}/s, ", end="")
    print(", ".join(f"{dtype} products {rate:.2e}/s" for dtype, rate in on.matrix_flops.items()), "\n")
    rows = []
    for (n, m), d, reduction, precision in itertools.product(SIZES, (1, 3, 16, 64), Reduction, ("fast", "high")):
        case = make("mixture", n, m, d, extent=12.0)
        problem = case.problem(reduction, precision)
        points, log_weights, queries = (
            convert(x, info.arrays, "cpu") for x in (case.points, case.log_weights, case.queries)
        )
        columns = Columns(points, log_weights)
        times = []
        for _ in range(3):
            start = time.perf_counter()
            reduce_pass(backend, info, problem, columns, queries)
            times.append(time.perf_counter() - start)
        predicted = cost.predict(info, problem, on)
        assert predicted is not None
        rows.append((predicted, statistics.median(times), problem))
    predicted, measured = np.array([r[0] for r in rows]), np.array([r[1] for r in rows])
    factor = predicted / measured
    order = np.argsort(factor)
    for i in (*order[:5], *order[-5:]):
        p = rows[i][2]
        times_ms = f"predicted {predicted[i] * 1e3:8.2f} ms, measured {measured[i] * 1e3:8.2f} ms"
        what = f"{p.reduction} {p.precision} {p.m} × {p.n}, d = {p.d}"
        print(f"{what:44} {times_ms}, factor {factor[i]:.2f}")
    print(f"\n{len(rows)} problems: rank correlation {spearmanr(predicted, measured).statistic:.3f}, ", end="")
    print(f"median factor {np.median(factor):.2f}, worst factor {max(factor.max(), 1 / factor.min()):.2f}")


if __name__ == "__main__":
    main()
