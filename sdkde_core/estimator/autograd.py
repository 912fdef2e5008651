"""Estimates of tensors that require grad, attached to autograd.

An estimate is planned from the arguments detached, with a backend that has the feature ``"grad"``. Then the plan's
points, weights and bandwidth are replaced by ones made of the user's own tensors, in float64, where the backend works.
PyTorch is not imported: tensors bring their own operations.

The values stay those of the plan, which whitens by a matrix more exactly than the operations that autograd records.
The centre is a constant, on which no sum depends, and so is a bandwidth that a rule has chosen.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import numpy as np
from array_api_compat import is_torch_array

from ..arrays import array_namespace, convert, detached, is_attached
from ..bandwidth.matrix import Bandwidth
from ..protocol import Columns
from .plan import Plan
from .plan import plan as plan_without
from .request import Goal, Request


def plan(request: Request, train: Any, query: Any = None, *, explained: bool = False) -> Plan:
    """Plan as :func:`.plan.plan`, attached to the arguments that require grad."""
    given = {"train": train, "query": query, "weights": request.weights, "bandwidth": request.bandwidth}
    attached = [name for name, x in given.items() if is_attached(x)]
    if not attached or not sys.modules["torch"].is_grad_enabled():
        return plan_without(request, train, query, explained=explained)
    required = ", ".join(attached)
    only = "has no derivatives but by the query of a prepared"
    refused = {
        f"kernel={request.kernel!r} has no derivatives; leave kernel out": request.kernel != "gaussian",
        f"an adaptive estimate {only} one; leave adaptive out": request.adaptive,
        f"negative='renormalise' {only} density; pass negative='clip'": request.negative == "renormalise",
        "the gradient of method='laplace' has no derivatives of its own; pass method='sdkde' or 'kde'": (
            request.method == "laplace" and request.goal is Goal.GRADIENT
        ),
    }
    if why := next((why for why, found in refused.items() if found), ""):
        raise ValueError(f"{required} requires grad, but {why}, pass detached tensors, or call within torch.no_grad()")
    name = "train" if query is None else "query"
    if not is_torch_array(given[name]):
        what = f"{name} is a {type(given[name]).__name__}, and so would the result be, without derivatives"
        instead = f"pass {name} as a torch tensor, or call within torch.no_grad()"
        raise TypeError(f"{required} requires grad, but {what}; {instead}")
    weights, bandwidth = request.weights, request.bandwidth
    request = replace(request, weights=detached(weights), bandwidth=detached(bandwidth))
    ready = plan_without(request, detached(train), detached(query), explained=explained, grad=attached)
    data, columns, place, h = ready.data, ready.columns, ready.choice.device, ready.bandwidth
    train = _points(train, data.train, place)
    query = None if data.query is None else _points(query, data.query, place)
    if is_attached(bandwidth):
        h = _attached(h, bandwidth.to(place).double())
    whiten = h.whitening(convert(ready.centre, "torch", place))
    points = _valued(whiten(train), columns.points) if is_attached(train) or is_attached(h.factor) else columns.points
    if "weights" not in ready.problems[0].requires:
        weights = None
    elif is_attached(weights):
        weights = weights.to(place).double()
        weights = weights / weights.detach().max()  # their sum may be beyond float64
        weights = weights / weights.sum()
    else:
        weights = columns.log_weights.exp()
    data, columns = data._replace(train=train, query=query), Columns(points, columns.log_weights, weights)
    rows = None if query is None else _valued(whiten(query), ready.query)
    return ready._replace(data=data, bandwidth=h, columns=columns, query=rows)


def tie(result: Any, *tensors: Any) -> Any:
    """Return a tensor without entries attached to those of ``tensors`` that require grad: the derivatives are 0."""
    for x in filter(is_attached, tensors):
        result = result + x.reshape(-1)[:0].sum().to(result)
    return result


def _attached(bandwidth: Bandwidth, value: Any) -> Bandwidth:
    """The bandwidth with its factor made of ``value``, (), (1,), (d,) or (d, d): h, or a matrix H.

    For a matrix L = diag(scale) K, with scale² the diagonal of H and K the Cholesky factor of the correlation matrix.
    """
    xp = array_namespace(value)
    if value.ndim < 2:
        return replace(bandwidth, factor=xp.broadcast_to(value, (bandwidth.d,)))
    scale = xp.sqrt(xp.linalg.diagonal(value))  # (d,) data units
    correlation = value / scale[:, None] / scale
    factor = xp.linalg.cholesky((correlation + correlation.T) / 2) * scale[:, None]
    exact = xp.asarray(np.array(bandwidth.factor), device=value.device)
    return Bandwidth(bandwidth.d, _valued(factor, exact), bandwidth.rule)


def _valued(x: Any, value: Any) -> Any:
    """``x``, attached, with another value."""
    return x + (value - x.detach())


def _points(given: Any, value: Any, place: str) -> Any:
    """Points (n, d), float64: from the user's tensor if it requires grad, else the plan's values."""
    if not is_attached(given):
        return convert(value, "torch", place).double()
    x = given.to(place).double()  # in this order: not every device has float64
    return x[:, None] if x.ndim == 1 else x
