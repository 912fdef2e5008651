"""The same sums as a user of KeOps writes them, with LazyTensors; and block-sparse ones, by ``ranges``.

KeOps sums over the pairs of clusters that a mask names, and leaves clusters and mask to the user. Here clusters are
leaves of a k-d tree, since its own ``grid_cluster`` ends at three dimensions, and the mask keeps what could matter.
With near and far the least and the largest distance of two boxes, a row's sum is at least max_J W_J exp(−½ far²), and
the clusters left out, each at most W_J exp(−½ near²), come to less than the tolerance of that.
"""

from __future__ import annotations

import functools
import math
import statistics
from typing import Any

from ..subjects import Call, Subject, Task
from ..timing import clocked

LARGE = 2**20  # points from which on the usual winner is taken without a comparison


def keops(task: Task) -> Call:
    import pykeops
    import torch
    from pykeops.torch import LazyTensor

    pykeops.set_verbose(False)

    def exponent(rows: Any, points: Any, h: float) -> Any:
        scale = 1 / (h * math.sqrt(2))
        return -LazyTensor((rows * scale)[:, None, :]).sqdist(LazyTensor((points * scale)[None, :, :]))  # −r²/2

    def debias(x: Any, h: float, scheme: str) -> Any:
        x = torch.as_tensor(x)
        values = torch.cat([x, torch.ones_like(x[:, :1])], 1)
        total = exponent(x, x, h).exp().__matmul__(values, backend=scheme)
        return 0.5 * (x + total[:, :-1] / total[:, -1:])

    def whole(x: Any, y: Any, h: float, scheme: str) -> Any:
        points = debias(x, h, scheme) if task.method == "sdkde" else torch.as_tensor(x)
        y = torch.as_tensor(y)
        e = exponent(y, points, h)
        phi = e.exp() * (e + (1 + 0.5 * y.shape[1])) if task.method == "laplace" else e.exp()
        return phi.sum_reduction(axis=1, backend=scheme)[:, 0]

    schemes = ("CPU",) if task.device == "cpu" else ("GPU_2D", "GPU_1D")  # sum_scheme="direct_sum" was no faster

    def ms(scheme: str) -> float:
        call = functools.partial(whole, scheme=scheme)
        return statistics.median(clocked(call, task.data, task.device)[0] for _ in range(5))

    best = schemes[0] if len(schemes) == 1 or len(task.data.x) >= LARGE else min(schemes, key=ms)
    calls = (functools.partial(call, scheme=best) for call in (whole, debias))
    return Call(next(calls), "sum", next(calls), best)


def block_sparse(task: Task, tolerance: float = 5e-4) -> Call:
    import pykeops
    import torch
    from pykeops.torch import LazyTensor
    from pykeops.torch.cluster import from_matrix

    from sdkde_core.nearby import order

    pykeops.set_verbose(False)

    def clusters(z: Any, size: int) -> tuple[Any, Any, Any, Any]:
        """The order of points, where clusters of them begin and end (k, 2), and their boxes (k, d)."""
        where = order(z, size)
        starts = torch.arange(0, len(z), size, device=z.device)
        ends = torch.clamp(starts + size, max=len(z))
        padded = torch.nn.functional.pad(where, (0, -len(z) % size), value=0)
        padded[len(z) :] = where[-1]
        blocks = z[padded].reshape(len(starts), size, -1)
        return where, torch.stack([starts, ends], 1).int(), blocks.amin(1), blocks.amax(1)

    def kept(rows: Any, columns: Any, h: float) -> Any:
        """Which pairs of clusters can matter, (rows, columns)."""
        (_, _, low, high), (_, ends, lower, higher) = rows, columns
        near = torch.zeros(len(low), len(lower), device=low.device)
        far = torch.zeros_like(near)
        for a in range(low.shape[1]):
            left, right = lower[:, a] - high[:, a, None], low[:, a, None] - higher[:, a]
            near += torch.maximum(left, right).clamp(min=0).float() ** 2
            far += torch.maximum(higher[:, a] - low[:, a, None], high[:, a, None] - lower[:, a]).float() ** 2
        logs = torch.log((ends[:, 1] - ends[:, 0]).float())
        least = (logs - 0.5 * far / h**2).amax(1, keepdim=True)
        return logs - 0.5 * near / h**2 >= least + math.log(tolerance / len(ends))

    def whole(x: Any, y: Any, h: float, sizes: tuple[int, int]) -> Any:
        x, y = torch.as_tensor(x), torch.as_tensor(y)
        if task.device == "cpu":
            x, y = x.double(), y.double()  # KeOps is as fast in it there
        rows, columns = clusters(y, sizes[0]), clusters(x, sizes[1])
        scale = 1 / (h * math.sqrt(2))
        at, points = ((z[found[0]] * scale).contiguous() for z, found in ((y, rows), (x, columns)))
        phi = (-LazyTensor(at[:, None, :]).sqdist(LazyTensor(points[None, :, :]))).exp()
        phi.ranges = from_matrix(rows[1], columns[1], kept(rows, columns, h))
        sums = torch.empty(len(y), dtype=at.dtype, device=at.device)
        sums[rows[0]] = phi.sum_reduction(axis=1, backend="CPU" if task.device == "cpu" else "GPU_1D")[:, 0]
        return sums

    def ms(sizes: tuple[int, int]) -> float:
        return min(clocked(functools.partial(whole, sizes=sizes), task.data, task.device)[0] for _ in range(2))

    n, m, _ = task.sizes
    small = max(16, 32 * round(math.sqrt(m / 2**14))), max(64, 128 * round(math.sqrt(n / 2**17)))
    best = small if n >= LARGE // 2 else min([(k * small[0], k * small[1]) for k in (1, 2, 4)], key=ms)
    return Call(functools.partial(whole, sizes=best), "sum", setting=f"clusters of {best[0]} and {best[1]}")


SUBJECTS = [
    Subject(
        "KeOps, ranges", block_sparse, ("pykeops",), "pip install 'sdkde-core[keops]'", ("kde",), most={"cpu": 6e9}
    ),
    Subject("KeOps", keops, ("pykeops",), "pip install 'sdkde-core[keops]'", most={"cpu": 6e9}),
]
