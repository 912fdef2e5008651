"""The three reductions as operators of PyTorch, for what traces: ``torch.compile(fullgraph=True)``, ``torch.export``.

Importing this module, and nothing else, registers ``sdkde::log_sum``, ``sdkde::mean`` and ``sdkde::laplace``.
:func:`sdkde_core.estimate` does not go through them.

============  ========================================================================================================
``log_sum``   ℓ_i = log Σ_j w_j φ_ij, (m,), φ_ij = exp(−½‖u_i − u_j‖²)
``mean``      ℓ (m,), and the shifts Σ_j w_j φ_ij (u_j − u_i) / Σ_j w_j φ_ij = ∇ℓ_i, (m, d), in bandwidths
``laplace``   log M_i, and the signs and log magnitudes of L_i = Σ_j w_j φ_ij (1 + d/2 − ½ r²_ij), each (m,); M is L
              with plus signs throughout, the scale of its error
============  ========================================================================================================

All take the same arguments; ``extent`` and ``precision`` by name:

points : (n, d) float64 tensor
    The columns u_j, whitened: in bandwidths. Precision depends on how far they reach from the origin, so centre them.
    On CUDA; on the CPU under ``TRITON_INTERPRET=1``.
queries : (m, d) float64 tensor, optional
    The rows u_i; m may be 0. None: the points themselves, self terms included.
log_weights : (n,) float64 tensor, optional
    log w_j; their exponentials sum to 1, −inf is a weight of zero. None: −log n.
extent : float, optional
    A bound on the distance of every point and query from the origin. It decides which formula is taken: with one that
    is exceeded the results are wrong, without a word. None: measured, for which the host waits for the device.
precision : {"high", "fast"}
    The tolerance, see :data:`sdkde_core.protocol.TOLERANCES`.

Results are float64, on the points' device, written on its current stream; none is a view of another or of an argument.
The host waits for the device where ``extent`` is None, exceeds what the fast formulas hold, or with log weights.
There are no derivatives: ``backward()`` through an operator is an error.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any

import torch

from sdkde_core.plugin import reduce_pass
from sdkde_core.protocol import BackendUnavailable, Columns, Partial, Problem, Reduction

from .backend import TritonBackend
from .info import INFO

__all__ = ["laplace", "log_sum", "mean"]


def _operator(reduction: Reduction, results: str) -> Any:
    """Register an operator, and the shapes of its results."""

    def compute(
        points: Any, queries: Any = None, log_weights: Any = None, *, extent: Any = None, precision: str = "high"
    ) -> Any:
        _check(points, queries, log_weights, precision)
        sums = _reduce(reduction, points, queries, log_weights, extent, precision)
        if reduction is Reduction.LAPLACE:  # the backend's may be rows of one buffer
            return sums.log_sum.clone(), sums.sign.clone(), sums.log_magnitude.clone()
        return (sums.log_sum, sums.shift) if reduction is Reduction.MEAN else sums.log_sum

    def shapes(
        points: Any, queries: Any = None, log_weights: Any = None, *, extent: Any = None, precision: str = "high"
    ) -> Any:
        _check(points, queries, log_weights, precision)
        m, d = (points if queries is None else queries).shape
        if reduction is Reduction.LAPLACE:
            return points.new_empty(m), points.new_empty(m), points.new_empty(m)
        return (points.new_empty(m), points.new_empty(m, d)) if reduction is Reduction.MEAN else points.new_empty(m)

    arguments = "Tensor points, Tensor? queries=None, Tensor? log_weights=None, *, float? extent=None"
    name, schema = f"sdkde::{reduction.value}", f'({arguments}, str precision="high") -> {results}'
    # PyTorch must not record it as part of a CUDA graph by itself: depending on the arguments it reads numbers back.
    tags = (torch.Tag.cudagraph_unsafe,)
    found = torch.library.custom_op(name, compute, mutates_args=(), schema=schema, tags=tags)
    found.register_fake(shapes)
    return found


log_sum = _operator(Reduction.LOG_SUM, "Tensor")
mean = _operator(Reduction.MEAN, "(Tensor log_sum, Tensor shift)")
laplace = _operator(Reduction.LAPLACE, "(Tensor log_plus, Tensor sign, Tensor log_magnitude)")


def _check(points: Any, queries: Any, log_weights: Any, precision: str) -> None:
    """Refuse what cannot be right, as far as that shows without the numbers: also where there are none yet."""
    if precision not in INFO.precisions:
        raise ValueError(f"precision is {precision!r}; pass one of {INFO.precisions}")
    n, d = points.shape if points.ndim == 2 else (0, 0)
    for name, x, shape in (("points", points, "n, d"), ("queries", queries, "m, d"), ("log_weights", log_weights, "n")):
        if x is None:
            continue
        if x.dtype != torch.float64 or x.ndim != len(shape.split()) or x.device != points.device:
            found = f"a {x.dtype} tensor of shape {tuple(x.shape)} on {x.device}"
            raise ValueError(f"{name} is {found}; pass float64 ({shape}), all on one device")
    if queries is not None:
        torch._check_value(queries.shape[1] == d, lambda: f"queries has {queries.shape[1]} dimensions, but points {d}")
    if log_weights is not None:
        torch._check_value(log_weights.shape[0] == n, lambda: f"log_weights has {log_weights.shape[0]} numbers for {n}")


def _reduce(reduction: Reduction, points: Any, queries: Any, log_weights: Any, extent: Any, precision: str) -> Partial:
    (n, d), device = points.shape, str(points.device)
    if not n or not d:
        raise ValueError(f"points has shape {(n, d)}; pass at least one point with at least one dimension")
    if extent is None:  # that of the others where a point is NaN
        rows = [x for x in (points, queries) if x is not None and x.shape[0]]
        extent = float(torch.stack([x.norm(dim=1).nan_to_num(0.0, math.inf).max() for x in rows]).max())
    if not 0.0 <= extent <= 1e149:  # beyond, squares of distances are not finite
        raise ValueError(f"extent is {extent}; pass points and queries within 1e149 bandwidths of the origin")
    m, how = n if queries is None else len(queries), dict[str, Any](precision=precision, device=device)
    requires = frozenset[str]() if log_weights is None else frozenset({"weights"})
    problem = Problem(reduction, m, n, d, same=queries is None, requires=requires, extent=extent, **how)
    support = INFO.supports(replace(problem, extent=min(extent, INFO.extent_limit(problem))))  # the core takes the rest
    if not support.ok:
        raise BackendUnavailable(f"backend 'triton' cannot do this: {support.reason}")
    if log_weights is None:
        log_weights = torch.full((n,), -math.log(n), dtype=torch.float64, device=points.device)
    columns = Columns(points.contiguous(), log_weights.contiguous())
    return reduce_pass(_backend(device), INFO, problem, columns, None if queries is None else queries.contiguous())


@functools.cache
def _backend(device: str) -> TritonBackend:
    backend = TritonBackend()
    found = backend.probe(device)
    if not found.ok:
        raise BackendUnavailable(f"backend 'triton' cannot be used: {found.reason}")
    return backend
