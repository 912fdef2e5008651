"""What a small estimate of CUDA tensors takes by every backend, beside what auto prices it at.

    python -m benchmarks.choice.overheads [--save FILE.json] [--keops] [--device cuda:0]

kde and sdkde, "fast" and "high", 256 to 8192 samples of a mixture of 8 normals in 1, 3, 16 and 64 dimensions, an eighth
as many queries, Silverman's bandwidth as a number. Medians of 15 calls; the device is waited for before and after.
Kernels are compiled beforehand, on all cores; KeOps, which takes 20 s a formula, with --keops only.

The last table says what of that is the host's: with 256 samples kernels take next to nothing, so that one pass more,
sdkde for kde, costs what a backend does around a pass (Work.launches, at so many seconds a launch), and the rest is
what the core does in every call (host_seconds of sdkde_core.choice.judge).
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import sdkde_core
from sdkde_core.choice import hardware
from sdkde_core.plugin import write_atomically

from .cases import Case, data
from .report import rows_of
from .worker import clocked, compile_ahead, placed

SIZES, DIMENSIONS = (256, 512, 1024, 2048, 4096, 8192), (1, 3, 16, 64)
CALLS = 15

#: A case by one backend: fields of Case, "backend", "seconds", and "predicted" (None: not known).
Record = dict[str, Any]


def cases() -> list[Case]:
    return [
        Case(method, precision, n, n // 8, d, "silverman", "device")
        for method, precision, d, n in itertools.product(("kde", "sdkde"), ("fast", "high"), DIMENSIONS, SIZES)
    ]


def measure(case: Case, device: str, left_out: set[str]) -> Iterator[Record]:
    """Every backend that can."""
    x, y, h = data(case)
    train, query = placed(x, case.place), placed(y, case.place)
    how = {"method": case.method, "precision": case.precision, "bandwidth": h}
    for c in sdkde_core.explain(train, query, **how).candidates:
        if not c.ok or c.device != device or c.name in left_out:
            continue
        try:
            sdkde_core.estimate(train, query, backend=c.name, **how)
            times = [clocked(sdkde_core.estimate, train, query, backend=c.name, **how)[0] for _ in range(CALLS)]
        except sdkde_core.BackendUnavailable as error:
            print(f"{c.name}, {case.text}: {error}")
            continue
        yield asdict(case) | {"backend": c.name, "seconds": statistics.median(times), "predicted": c.seconds}


def compile_all(device: str, left_out: set[str]) -> None:
    """Compile what the cases need, on all cores at once."""
    able = [
        r.name
        for r in sdkde_core.backends()
        if r.ok and r.info and device.partition(":")[0] in r.info.devices and r.name not in left_out
    ]
    todo = [(case, name, device) for case in cases() for name in able]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max(1, min(12, hardware.cpu_threads() - 2)), mp_context=context) as pool:
        list(pool.map(compile_ahead, *zip(*todo), chunksize=4))


def ms(seconds: float | None) -> str:
    return "?" if seconds is None else f"{seconds * 1e3:.3g}"


def table(records: list[Record]) -> str:
    """Milliseconds by case and backend: measured, and in brackets predicted; the least measured one in bold."""
    names = sorted({r["backend"] for r in records})
    rows = []
    for case in cases():
        here = {r["backend"]: r for r in records if all(r[k] == v for k, v in asdict(case).items())}
        least = min((r["seconds"] for r in here.values()), default=0.0)
        cells = [f"{case.method} {case.precision}", str(case.d), str(case.n)]
        for name in names:
            r = here.get(name)
            bold = "**" if r and r["seconds"] == least else ""
            cells.append(f"{bold}{ms(r['seconds'])}{bold} ({ms(r['predicted'])})" if r else "")
        rows.append(cells)
    return rows_of(("", "d", "n", *names), *rows)


def host_table(records: list[Record], launch: float) -> str:
    """What a call and a pass take the host, from the smallest cases: medians over dimensions and precisions."""
    rows = []
    for name in sorted({r["backend"] for r in records}):
        small = {
            method: statistics.median(
                [r["seconds"] for r in records if (r["method"], r["n"], r["backend"]) == (method, SIZES[0], name)]
                or [0.0]
            )
            for method in ("kde", "sdkde")
        }
        each = small["sdkde"] - small["kde"]
        rows.append([name, *map(ms, small.values()), ms(each), f"{each / launch:.0f}", ms(small["kde"] - each)])
    return rows_of(("", "kde", "sdkde", "a pass", "launches", "a call besides"), *rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", type=Path, metavar="FILE.json", help="write every record there")
    parser.add_argument("--keops", action="store_true")
    parser.add_argument("--device", default="cuda:0", help="the current one")
    options = parser.parse_args()
    on = hardware.processor(options.device)
    if on is None:
        raise SystemExit(f"no {options.device} is here, or not its rates")
    left_out = set() if options.keops else {"keops"}
    start = time.perf_counter()
    compile_all(options.device, left_out)
    print(f"compiled in {time.perf_counter() - start:.0f} s", flush=True)
    records = [record for case in cases() for record in measure(case, options.device, left_out)]
    saved = {"processor": on.name, "launch_seconds": on.launch_seconds, "records": records}
    if options.save:
        with write_atomically(options.save) as path:
            path.write_text(json.dumps(saved) + "\n")
    print(f"{on.name}, {time.perf_counter() - start:.0f} s. Milliseconds, in brackets as predicted:\n")
    print(f"{table(records)}\n\nOf the host, from {SIZES[0]} samples, in milliseconds:\n")
    print(host_table(records, on.launch_seconds))


if __name__ == "__main__":
    main()
