"""A fitted density's answers, attached to autograd and ``torch.func`` by the query; this module imports PyTorch.

The derivative of log p̂ is the score s, that of p̂ is p̂ s, and that of s the matrix ∇²log p̂, which is symmetric: its
product with a vector serves backward and forward mode. All sums but that product are by the density's own backend.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def refuse_twice_forward() -> None:
    """RuntimeError within two forward modes of ``torch.func``, where :class:`Answer` would be 0 in silence."""
    levels: Any = torch._C._functorch
    if sum(one.key() == levels.TransformType.Jvp for one in levels.get_interpreter_stack() or ()) > 1:
        instead = "(jvp of jvp, jacfwd of jacfwd); take torch.func.hessian, which is jacfwd of jacrev"
        raise RuntimeError(f"a density has no forward mode within forward mode {instead}")


class Answer(torch.autograd.Function):
    """Return ``compute(what, *given)``, ``given`` the queries (m, d), and for the curvature vectors (m, d).

    What is ``"density"`` or ``"log"``, (m,); ``"score"``, (m, d), or ``"slope"``, the same where a signed density is
    negative too; or ``"curvature"``, (m, d), the matrix ∇²log p̂ times a vector for each query.
    """

    @staticmethod
    def forward(compute: Callable[..., Tensor], what: str, *given: Tensor) -> Tensor:
        return compute(what, *(x.detach() for x in given))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.compute, ctx.what, *given = inputs
        ctx.save_for_backward(*given, output)
        ctx.save_for_forward(*given, output)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        query, *_, found = ctx.saved_tensors  # read once, as checkpointing allows no more
        along = _curvature(ctx, query, g) if g.ndim == 2 else g[:, None] * _slope(ctx, query, found)
        return None, None, along.to(query.dtype)

    @staticmethod
    def jvp(ctx: Any, _compute: None, _what: None, tangent: Tensor, *_vectors: Tensor) -> Tensor:
        query, *_, found = ctx.saved_tensors
        along = _curvature(ctx, query, tangent) if found.ndim == 2 else (_slope(ctx, query, found) * tangent).sum(1)
        return along.to(found.dtype)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], compute: Any, what: str, *given: Tensor) -> tuple[Tensor, int]:
        """Answer the queries of the whole batch by one call."""
        size, dims = info.batch_size, in_dims[2:]
        every = [x.expand(size, *x.shape) if k is None else x.movedim(k, 0) for x, k in zip(given, dims)]
        found = Answer.apply(compute, what, *(x.flatten(0, 1) for x in every))
        return found.unflatten(0, every[0].shape[:2]), 0


def _slope(ctx: Any, query: Tensor, found: Tensor) -> Tensor:
    """The derivative (m, d) of each row's density or its log: 0 where p̂ is 0, or has no log."""
    slope, found = Answer.apply(ctx.compute, "slope", query), found[:, None]
    if ctx.what == "log":
        return torch.where(found.isfinite(), slope, 0.0)
    return torch.where(found == 0.0, 0.0, found * slope)


def _curvature(ctx: Any, query: Tensor, vectors: Tensor) -> Tensor:
    if ctx.what == "curvature":
        raise RuntimeError("a prepared density differentiates twice by its query; its second derivatives have none")
    return Answer.apply(ctx.compute, "curvature", query, vectors)
