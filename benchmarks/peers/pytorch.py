"""The plain formulation in PyTorch: expanded squares, exp, sums and products, the matrix of all pairs in memory.

Eager and through torch.compile, in float32 and with TF32; and cuDNN's attention for the first pass of sdkde, since
softmax(QKᵀ)V is what that pass computes: exponents in log2 units from fp16 high and low parts, packed beforehand.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

from ..registry import Skipped
from ..subjects import Call, Subject, Task

#: Pairs at a time: fewer were no faster on a GPU.
PAIRS = {"cpu": 2**22, "cuda": 2**30}


def tile(rows: Any, points: Any, what: str) -> Any:
    """Of rows and points in units of h: Σφ, Laplace's sum, Σφ(−r²/2) alone, or the moved rows."""
    e = rows @ points.T - 0.5 * (rows * rows).sum(1)[:, None] - 0.5 * (points * points).sum(1)  # −r²/2
    phi = e.exp()
    if what == "moved":
        return 0.5 * (rows + phi @ points / phi.sum(1, keepdim=True))
    c = {"laplace": 1 + 0.5 * rows.shape[1], "correction": 0.0}
    return (phi * (c[what] + e)).sum(1) if what in c else phi.sum(1)


def compiled_tile() -> Callable[..., Any]:
    """The tile, compiled for the sizes that it will see; those of subjects before are forgotten."""
    import torch

    torch._dynamo.reset()
    return torch.compile(tile, dynamic=False)


def by_rows(f: Callable[..., Any], rows: Any, points: Any, h: float, what: str, tf32: bool) -> Any:
    import torch

    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    points, most = points / h, PAIRS[points.device.type]
    return torch.cat([f(part, points, what) for part in (rows / h).split(max(1, most // len(points)))])


def plain(task: Task, compiled: bool, tf32: bool) -> Call:
    import torch

    if tf32 and task.device == "cpu":
        raise Skipped("TF32 is a GPU's")
    f = compiled_tile() if compiled else tile

    def debias(x: Any, h: float) -> Any:
        x = torch.as_tensor(x)
        return by_rows(f, x, x, h, "moved", tf32) * h

    def whole(x: Any, y: Any, h: float) -> Any:
        points = debias(x, h) if task.method == "sdkde" else torch.as_tensor(x)
        return by_rows(f, torch.as_tensor(y), points, h, task.method, tf32)

    return Call(whole, "sum", debias)


def unfused(task: Task) -> Call:
    """Laplace in two passes: our kde, then Σφ(−r²/2) by torch.compile in float32."""
    import torch

    import sdkde_core

    from ..metrics import log_constant

    f = compiled_tile()

    def whole(x: Any, y: Any, h: float) -> Any:
        d = x.shape[1]
        kde = torch.as_tensor(sdkde_core.estimate(x, y, method="kde", bandwidth=h, precision="fast"))
        second = by_rows(f, torch.as_tensor(y), torch.as_tensor(x), h, "correction", tf32=False)
        return (1 + 0.5 * d) * kde + second * (math.exp(log_constant(d, h)) / len(x))

    return Call(whole, "density")


def attention(task: Task) -> Call:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    unit = math.sqrt(math.log2(math.e))
    second = compiled_tile()

    def padded(*columns: Any) -> Any:
        z = torch.cat([c.half() for c in columns], 1)
        return torch.nn.functional.pad(z, (0, -z.shape[1] % 64))[None, None].contiguous()

    @functools.cache
    def packed(x: Any, h: float) -> tuple[Any, ...]:
        u = (x.double() - x.double().mean(0)) * (unit / h)
        hi, norm, one = u.half(), -0.5 * (u * u).sum(1, keepdim=True), torch.ones_like(u[:, :1])
        lo, norms = u - hi, (norm.half(), norm - norm.half())
        return padded(hi, hi, lo, *norms, one, one), padded(hi, lo, hi, one, one, *norms), padded(hi, one), hi.float()

    def debias(x: Any, h: float) -> Any:
        q, k, v, hi = packed(x, h)
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            mean = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=math.log(2))[0, 0, :, : x.shape[1]]
        return torch.add(x, mean - hi, alpha=0.5 * h / unit)

    def whole(x: Any, y: Any, h: float) -> Any:
        return by_rows(second, y, debias(x, h), h, "kde", tf32=False)

    return Call(whole, "sum", debias)


INSTALL = {"modules": ("torch",), "install": "pip install torch", "most": {"cpu": 6e9, "cuda": 3e10}}
SUBJECTS = [
    Subject(f"{name}{' TF32' if tf32 else ''}", functools.partial(plain, compiled=compiled, tf32=tf32), **INSTALL)
    for name, compiled in (("PyTorch", False), ("torch.compile", True))
    for tf32 in (False, True)
] + [
    Subject("cuDNN attention, torch.compile", attention, methods=("sdkde",), devices=("cuda",), **INSTALL),
    Subject("kde and a second pass", unfused, methods=("laplace",), **INSTALL),
]
