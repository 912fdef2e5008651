"""Worst error over tolerance of a backend's reductions, by precision: dimensions, extents, tails, clusters, weights.

    python benchmarks/tolerances.py [--backend numpy] [--quick]

A figure of at most 1 is within the contract (sdkde_core.protocol.TOLERANCES).
"""

from __future__ import annotations

import argparse
import os
import time
from concurrent.futures import ProcessPoolExecutor
from itertools import product

from sdkde_core.choice import registry
from sdkde_core.protocol import PRECISIONS, Reduction
from sdkde_core.testing.problems import CASES, answer, errors, make, truth

KINDS = tuple(CASES)
DIMENSIONS = (1, 2, 3, 5, 7, 16, 17, 33, 64, 128, 384, 784)
EXTENTS = (10.0, 30.0, 100.0, 1e3, 1e4)
ROWS = {"other rows": (False, False), "same": (True, False), "leave-one-out": (True, True)}


def worst(task: tuple[str, str, int, float]) -> list[tuple[str, str, Reduction, float, str]]:
    """Every precision's and reduction's worst row over its tolerance, for one case."""
    name, kind, d, extent = task
    record = registry.find(name)
    assert record is not None and record.info is not None, f"no backend {name!r}"
    info, backend = record.info, record.info.load()
    case = make(kind, *((401, 101) if d < 200 else (203, 53)), d, extent)
    found = []
    for rows, (same, exclude) in ROWS.items():
        if exclude and "exclude_self" not in info.features:
            continue
        want = truth(case, same=same, exclude_self=exclude)
        for precision, reduction in product(info.precisions, Reduction):
            problem = case.problem(reduction, precision, same=same, exclude_self=exclude)
            error = float(errors(problem, answer(info, backend, problem, case), want).max())
            found.append((precision, kind, reduction, error, f"d={d} e={extent:g} {rows}"))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="numpy")
    parser.add_argument("--quick", action="store_true", help="four dimensions, two extents")
    arguments = parser.parse_args()
    dimensions = (1, 3, 17, 784) if arguments.quick else DIMENSIONS
    extents = (10.0, 1e4) if arguments.quick else EXTENTS
    tasks = [(arguments.backend, kind, d, extent) for kind, d, extent in product(KINDS, dimensions, extents)]
    start, rows = time.perf_counter(), []
    os.environ.setdefault("SDKDE_NUM_THREADS", "1")
    with ProcessPoolExecutor() as pool:
        for found in pool.map(worst, tasks):
            rows += found
    seconds = time.perf_counter() - start
    print(f"{arguments.backend}: {len(rows)} reductions in {seconds:.0f} s; worst row over its tolerance\n")
    print(f"{'precision':8} {'case':13} " + " ".join(f"{r:>9} {'where':28}" for r in Reduction))
    for precision, kind in product(PRECISIONS, KINDS):
        cells = []
        for reduction in Reduction:
            here = [(error, where) for lv, k, r, error, where in rows if (lv, k, r) == (precision, kind, reduction)]
            if here:
                cells.append("{:9.1e} {:28}".format(*max(here)))
        if cells:
            print(f"{precision:8} {kind:13} " + " ".join(cells))


if __name__ == "__main__":
    main()
