"""Worst error over tolerance of a backend's reductions, by level: dimensions, extents, tails, clusters, weights.

    python benchmarks/tolerances.py [--backend numpy] [--quick]

A figure of at most 1 is within the contract (sdkde_core.protocol.TOLERANCES).
"""

from __future__ import annotations

import argparse
import time

from sdkde_core import registry
from sdkde_core.protocol import LEVELS, Reduction
from sdkde_core.testing.problems import CASES, make, worst_error

KINDS = tuple(CASES)
DIMENSIONS = (1, 2, 3, 5, 7, 16, 17, 33, 64, 128, 384, 784)
EXTENTS = (10.0, 30.0, 100.0, 1e3, 1e4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="numpy")
    parser.add_argument("--quick", action="store_true", help="four dimensions, two extents")
    arguments = parser.parse_args()
    record = registry.find(arguments.backend)
    assert record is not None and record.info is not None, f"no backend {arguments.backend!r}"
    info, backend = record.info, record.info.load()
    dimensions = (1, 3, 17, 784) if arguments.quick else DIMENSIONS
    extents = (10.0, 1e4) if arguments.quick else EXTENTS
    worst: dict[tuple[str, str, Reduction], tuple[float, str]] = {}
    start, count = time.perf_counter(), 0
    for kind in KINDS:
        for d in dimensions:
            for extent in extents:
                n, m = (401, 101) if d < 200 else (203, 53)
                case = make(kind, n, m, d, extent)
                for level in info.levels:
                    for same, exclude in ((False, False), (True, False), (True, True)):
                        found = worst_error(info, backend, case, level, same=same, exclude_self=exclude)
                        for reduction, error in found.items():
                            count += 1
                            where = f"d={d} extent={extent:g}" + (" same" if same else "") + (" loo" if exclude else "")
                            key = (level, kind, reduction)
                            worst[key] = max(worst.get(key, (0.0, "")), (error, where))
    print(
        f"{arguments.backend}: {count} reductions in {time.perf_counter() - start:.0f} s; worst error over tolerance\n"
    )
    print(f"{'level':8} {'case':13} " + " ".join(f"{r:>9} {'where':26}" for r in Reduction))
    for level in LEVELS:
        for kind in KINDS:
            cells = (worst[level, kind, r] for r in Reduction if (level, kind, r) in worst)
            print(f"{level:8} {kind:13} " + " ".join(f"{error:9.1e} {where:26}" for error, where in cells))


if __name__ == "__main__":
    main()
