"""What a small call goes through: ``python -m benchmarks.way_through``, with ``--times`` beside its peers.

Counts the distinct functions of ``sdkde_*`` that ``estimate(x, y, bandwidth=.3)`` enters by NumPy, and their files.
What runs while a module is imported does not count, nor does what nobody has to find in a file to follow the call:
comprehensions, lambdas, and methods that dataclasses generate.

``--times``: what 100 normal samples and 10 queries among them, in two dimensions, take the CPU, over what SciPy's
``gaussian_kde`` or scikit-learn's ``KernelDensity`` takes. Ours and theirs alternate, and the least time counts.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import CodeType
from typing import Any

import numpy as np

import sdkde_core

__all__ = ["functions_of"]


def functions_of(call: Callable[[], Any]) -> Counter[CodeType]:
    """Return how often a call enters each of this project's functions."""
    found: Counter[CodeType] = Counter()
    importing = 0

    def profile(frame: Any, event: str, argument: Any) -> None:
        nonlocal importing
        code = frame.f_code
        if code.co_name == "<module>":
            importing += {"call": 1, "return": -1}.get(event, 0)
        ours = frame.f_globals.get("__name__", "").startswith("sdkde_")
        written = not code.co_name.startswith("<") and not code.co_filename.startswith("<")
        if event == "call" and ours and written and not importing:
            found[code] += 1

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found


def least_times(calls: Sequence[Callable[[], Any]], rounds: int = 400, each: int = 10) -> list[float]:
    """Return the least time of the CPU that every call took, in microseconds, of ``rounds`` alternations."""
    least = [float("inf")] * len(calls)
    for _ in range(rounds):
        for i, call in enumerate(calls):
            start = time.process_time()
            for _ in range(each):
                call()
            least[i] = min(least[i], (time.process_time() - start) / each * 1e6)
    return least


def print_times(backend: str) -> None:
    """Print what small calls take beside SciPy's and scikit-learn's."""
    from scipy import stats
    from sklearn import neighbors

    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(100, 2)), 0.5 * rng.normal(size=(10, 2))
    how: dict[str, Any] = {"bandwidth": 0.3, "backend": backend}
    ours: dict[str, Callable[[], Any]] = {
        "estimate, kde": lambda: sdkde_core.estimate(x, y, method="kde", **how),
        "estimate, sdkde": lambda: sdkde_core.estimate(x, y, **how),
        "gaussian_kde": lambda: sdkde_core.gaussian_kde(x.T, backend=backend)(y.T),
        "KernelDensity": lambda: sdkde_core.KernelDensity(**how).fit(x).score_samples(y),
    }
    theirs = [
        lambda: stats.gaussian_kde(x.T)(y.T),
        lambda: neighbors.KernelDensity(bandwidth=0.3).fit(x).score_samples(y),
    ]
    *times, scipy, sklearn = least_times([*ours.values(), *theirs])
    for name, own in zip(ours, times):
        other, peer = ("scikit-learn", sklearn) if name == "KernelDensity" else ("SciPy", scipy)
        print(f"{name:16} {own:6.1f} µs, {other} {peer:6.1f} µs, ratio {own / peer:.2f}")


def main() -> None:
    """Print the counts of a first call and of a warm one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", action="store_true", help="print every function of the warm call")
    parser.add_argument("--times", action="store_true", help="print what small calls take beside their peers'")
    parser.add_argument("--backend", default="numpy")
    options = parser.parse_args()
    if options.times:
        print_times(options.backend)
        return
    x, y = np.random.default_rng(0).normal(size=(2, 100))
    for name in ("first", "second", "warm"):
        found = functions_of(lambda: sdkde_core.estimate(x, y, bandwidth=0.3, backend=options.backend))
        files = {code.co_filename for code in found}
        print(f"{name:6} {len(found):4} functions in {len(files):3} files, {found.total():5} calls")
    for code in found if options.list else ():
        path = Path(code.co_filename)
        print(f"{found[code]:4}  {path.parent.name}/{path.name}: {code.co_qualname}")


if __name__ == "__main__":
    main()
