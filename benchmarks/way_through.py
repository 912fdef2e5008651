"""How many functions of this project one call goes through: ``python -m benchmarks.way_through``.

Counts the distinct functions of ``sdkde_*`` that ``estimate(x, y, bandwidth=.3)`` enters by NumPy, and their files.
What runs while a module is imported does not count, nor does what nobody has to find in a file to follow the call:
comprehensions, lambdas, and methods that dataclasses generate.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable
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


def main() -> None:
    """Print the counts of a first call and of a warm one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", action="store_true", help="print every function of the warm call")
    parser.add_argument("--backend", default="numpy")
    options = parser.parse_args()
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
