"""mlpack's dual-tree kernel density estimation, on the host: every density within a relative error."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from ..subjects import Call, Subject, Task


def dual_tree(task: Task, relative: float) -> Call:
    from mlpack import kde

    def whole(x: Any, y: Any, h: float) -> Any:
        x, y = (np.array(z) for z in (x, y))  # a tree takes its points over, in another order
        asked = {"bandwidth": h, "kernel": "gaussian", "tree": "kd-tree", "rel_error": relative, "abs_error": 0.0}
        return kde(reference=x, query=y, algorithm="dual-tree", **asked)["predictions"]

    return Call(whole, "density")


SUBJECTS = [
    Subject(
        f"mlpack, rel_error {relative:g}",
        functools.partial(dual_tree, relative=relative),
        ("mlpack",),
        "pip install mlpack",
        methods=("kde",),
        devices=("cpu",),
        most={"cpu": 3e8},
        dtype="float64",
        compiles=False,
    )
    for relative in (1e-4, 1e-5)
]
