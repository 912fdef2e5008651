"""Memory, and what importing takes."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from ..registry import REGISTRY, Benchmark, Case, Setting
from ..report import Table

MEMORY = """
import json, resource, sys
import numpy as np, sdkde_core
n, m, method = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
rng = np.random.default_rng(0)
x, y = rng.normal(size=(n, 16)), rng.normal(size=(131072, 16))[:m]
sdkde_core.estimate(x[:50], y[:5], bandwidth="silverman")
def peak():
    try:  # of this program; Linux's ru_maxrss begins with what the process had that started it
        with open("/proc/self/status") as file:
            return 1024 * next(int(line.split()[1]) for line in file if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
before = peak()
call = sdkde_core.grad_log_density if method == "gradient" else sdkde_core.estimate
call(x, y, method="kde", bandwidth="silverman")
print(json.dumps((peak() - before) / 2**20))
"""
IMPORT = "import time, numpy; t = time.perf_counter(); import sdkde_core; sdkde_core.backends(); "
IMPORT += "print(1e3 * (time.perf_counter() - t))"


def cases(setting: Setting) -> Iterator[Case]:
    yield {"what": "import"}
    n = setting.at(5000, 100_000, 2**20)
    yield from ({"what": what, "n": n, "m": m} for m, what in ((512, "density"), (4096, "density"), (4096, "gradient")))


def measure(setting: Setting, case: Case) -> dict[str, Any]:
    """Milliseconds to import the core and list backends, beyond NumPy; MiB beyond the inputs, 16 dimensions."""

    def told(*arguments: str) -> float:
        done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=True)
        return float(json.loads(done.stdout))

    if case["what"] == "import":
        return {"ms": statistics.median(told("-c", IMPORT) for _ in range(setting.at(1, 7, 7)))}
    return {"MiB": told("-c", MEMORY, str(case["n"]), str(case["m"]), case["what"])}


REGISTRY.add(
    Benchmark(
        "footprint",
        "ours",
        "Memory beyond the inputs, and import time.",
        cases,
        measure,
        (Table("", ("what", "n", "m"), {"ms": "ms", "MiB": "MiB"}),),
    )
)
