"""Estimates of tensors that require grad, attached to autograd.

What is to be computed is decided as for any estimate, from the arguments detached: validation, the bandwidth, the
precision and the backend, one with the feature ``"grad"``. Then the same passes run on points, weights and a bandwidth
that are made of the user's own tensors, in float64, where the backend works. Here is what lies between those tensors and the
backend's reductions; PyTorch is not imported, as tensors bring their own operations.

The centre is a constant, on which no sum depends. So is a bandwidth that a rule has chosen: its derivative by the
samples, through quantiles, is not what people mean by the derivative of a density.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from array_api_compat import array_namespace, device

from ..arrays import Data, c_order, convert, detached, grad_enabled, is_attached
from .bandwidth import Bandwidth
from .plan import Plan

__all__ = ["AttachedBandwidth", "Given", "accepted", "attach"]


class Given(NamedTuple):
    """The arguments that an estimate can be differentiated by, as the user gave them."""

    train: Any
    query: Any = None
    weights: Any = None
    bandwidth: Any = None

    @property
    def attached(self) -> bool:
        """Whether one of them requires grad, and grad mode is on."""
        return grad_enabled() and any(map(is_attached, self))

    def detached(self) -> Given:
        """Return them detached."""
        return Given(*map(detached, self))

    def tie(self, result: Any) -> Any:
        """Return a tensor without entries attached to those of them that require grad: the derivatives are 0."""
        for x in filter(is_attached, self):
            result = result + x.reshape(-1)[:0].sum().to(result)
        return result


def accepted(given: Given, data: Data) -> Data:
    """Return the data as what is attached needs them.

    Raises
    ------
    TypeError
        The result is to be no tensor, so that it could not be attached.
    """
    if getattr(data.origin.xp, "__name__", "") != "array_api_compat.torch":
        name, kind = ("train", given.train) if given.query is None else ("query", given.query)
        required = ", ".join(n for n, x in zip(Given._fields, given) if is_attached(x))
        raise TypeError(
            f"{required} requires grad, but {name} is a {type(kind).__name__}, and so would the result be, without "
            f"derivatives; pass {name} as a torch tensor, or call within torch.no_grad()"
        )
    if data.log_weights is None and is_attached(given.weights):  # equal now, but their derivatives are not
        xp = array_namespace(data.train)
        equal = xp.full((data.n,), -math.log(data.n), dtype=xp.float64, device=device(data.train))
        return replace(data, log_weights=equal)
    return data


def attach(
    given: Given, data: Data, bandwidth: Bandwidth, plan: Plan
) -> tuple[Data, Bandwidth | AttachedBandwidth, Plan]:
    """Return data, bandwidth and plan with what the user gave in place of its detached values.

    Parameters
    ----------
    given : Given
    data : Data
        From :func:`accepted`.
    bandwidth : Bandwidth
    plan : Plan
        Of problems that require ``"grad"``.
    """
    place = plan.choice.device
    train = _points(given.train, data.train, place)
    query = None if data.query is None else _points(given.query, data.query, place)
    known: Bandwidth | AttachedBandwidth = bandwidth
    if is_attached(given.bandwidth):
        known = AttachedBandwidth(bandwidth, _double(given.bandwidth, place))
    whiten = known.whitening(convert(plan.centre, "torch", place))
    plan = replace(
        plan,
        train=whiten(train),
        query=None if query is None else whiten(query),
        weights=None if data.log_weights is None else _weights(given.weights, plan.log_weights, place),
    )
    return replace(data, train=train, query=query), known, plan


class AttachedBandwidth:
    """What the passes need of a :class:`Bandwidth`, attached to the tensor that it was made from.

    Parameters
    ----------
    bandwidth : Bandwidth
        Its value.
    value : (), (1,), (d,) or (d, d) float64 tensor
        h, or a matrix H: then L = diag(scale) K, with scale² the diagonal of H and K the Cholesky factor of the
        correlation matrix, as :class:`Bandwidth` has it.
    """

    def __init__(self, bandwidth: Bandwidth, value: Any) -> None:
        xp = array_namespace(value)
        self._bandwidth, self._factor, self._inverse = bandwidth, None, None
        if value.ndim < 2:
            self._scale = diagonal = xp.broadcast_to(value, (bandwidth.d,))
        else:
            self._scale = xp.sqrt(xp.linalg.diagonal(value))  # (d,) data units
            correlation = value / self._scale[:, None] / self._scale
            self._factor = xp.linalg.cholesky((correlation + correlation.T) / 2)
            self._inverse = xp.linalg.inv(self._factor)
            diagonal = self._scale * xp.linalg.diagonal(self._factor)
        #: Log of the kernel's normalising constant, −½ d log 2π − log det L, a () tensor.
        self.log_constant = -0.5 * bandwidth.d * math.log(2 * math.pi) - xp.sum(xp.log(diagonal))

    def whitening(self, centre: Any) -> Callable[[Any], Any]:
        """Return the map of points x to L⁻¹(x − centre)."""

        def whiten(x: Any) -> Any:
            scaled = c_order((x - centre) / self._scale)
            return scaled if self._inverse is None else scaled @ self._inverse.T

        return whiten

    def stretch(self, u: Any) -> Any:
        """Return L u for every row: a whitened displacement in data units."""
        return (u if self._factor is None else u @ self._factor.T) * self._scale

    def pull_back(self, u: Any) -> Any:
        """Return L⁻ᵀ u for every row: a gradient with respect to whitened points, per data unit."""
        return (u if self._inverse is None else u @ self._inverse) / self._scale

    def __str__(self) -> str:
        return str(self._bandwidth)


def _double(x: Any, place: str) -> Any:
    """A tensor in float64 on a device, in this order: not every device has float64."""
    return x.to(place).double()


def _points(given: Any, value: Any, place: str) -> Any:
    """Points (n, d), float64: the user's tensor where it requires grad, otherwise what was read of the argument."""
    if not is_attached(given):
        return convert(value, "torch", place).double()
    x = _double(given, place)
    return x[:, None] if x.ndim == 1 else x


def _weights(given: Any, log_weights: Any, place: str) -> Any:
    """Weights (n,), float64, that sum to 1."""
    if not is_attached(given):
        return log_weights.exp()
    w = _double(given, place)
    w = w / w.detach().max()  # their sum may be beyond float64
    return w / w.sum()
