"""The authors' code, flash-sd-kde 0.1 on PyPI: CUDA, d = 16, and d = 1 in plain float32.

Its "flash" score kernel knows TF32 alone. Each call takes the fastest of its own kernels.
"""

from __future__ import annotations

import functools
import statistics
import sys
from collections.abc import Callable
from typing import Any

from ..registry import Skipped
from ..subjects import Call, Subject, Task
from ..timing import clocked

LARGE = 2**20  # points from which on the first of its kernels is taken, the usual winner


def flash(task: Task, mode: str, fused: bool = True) -> Call:
    import flash_sd_kde as package
    from kernels import flash_sd_kde as kernels
    from triton.runtime import Autotuner

    (n, _, d), ieee = task.sizes, mode == "fp32_ieee"
    if ieee and d != 16:
        raise Skipped("in one dimension it computes in plain float32 anyway")
    modules = [vars(module) for name, module in sys.modules.items() if name.startswith("kernels.")]
    for tuner in (value for module in modules for value in module.values() if isinstance(value, Autotuner)):
        tuner.cache.clear()  # its keys leave out the precision and the Laplacian

    def debias(x: Any, h: float, how: Any) -> Any:
        if d == 1:
            options = {"synchronize": False} | dict(zip(("block_m", "block_n", "num_warps"), how))
            return x + 0.5 * h * h * kernels.gaussian_kde_score_triton(x[:, 0], x[:, 0], h, **options)[0][:, None]
        if how == "flash":
            return kernels.empirical_sd_kde_triton_nd(x, h, return_tensor=True, synchronize=False)[0]
        tune = len(x) < LARGE  # the first call of symmetric_atomic is wrong then: it tunes on its own outputs
        return package.emp_sd_kde_fit_transform(x, h, precision_mode=mode, emp_score_backend=how, autotune=tune)

    def evaluate(points: Any, y: Any, h: float, how: str) -> Any:
        points, y = (points[:, 0], y[:, 0]) if d == 1 else (points, y)
        linearized = package.kde_eval_linearized if fused else package.kde_eval_linearized_nonfused
        density = linearized if task.method == "laplace" else package.kde_eval
        return density(points, y, h, precision_mode=mode, kde_backend=how)

    def fastest(call: Callable[..., Any], hows: list[Any]) -> Any:
        if n >= LARGE:
            return hows[0]

        def ms(how: Any) -> float:
            return statistics.median(
                clocked(lambda x, y, h: call(x, y, h, how), task.data, task.device)[0] for _ in range(9)
            )

        return min(hows, key=ms)

    scores = [(128, 128, 4), (64, 128, 1), (64, 256, 4)] if d == 1 else ["flash", "symmetric_atomic", "ordered_splitk"]
    last = fastest(evaluate, ["atomic", "splitk_stream"])
    if task.method != "sdkde":
        return Call(lambda x, y, h: evaluate(x, y, h, last), "density", setting=str(last))
    first = fastest(lambda x, y, h, how: debias(x, h, how), scores[ieee and d != 1 :])
    return Call(
        lambda x, y, h: evaluate(debias(x, h, first), y, h, last),
        "density",
        lambda x, h: debias(x, h, first),
        f"{first}, {last}",
    )


ABOUT = {
    "modules": ("flash_sd_kde",),
    "install": "pip install flash-sd-kde",
    "devices": ("cuda",),
    "dimensions": (1, 16),
}
SUBJECTS = [
    Subject("flash-sd-kde TF32", functools.partial(flash, mode="fast_tf32"), **ABOUT),
    Subject("flash-sd-kde fp32", functools.partial(flash, mode="fp32_ieee"), **ABOUT),
    Subject(
        "flash-sd-kde TF32, unfused",
        functools.partial(flash, mode="fast_tf32", fused=False),
        methods=("laplace",),
        **ABOUT,
    ),
]
