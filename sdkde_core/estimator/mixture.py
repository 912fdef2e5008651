"""A fitted kde or sdkde as what it is, a mixture of normals of one covariance: its components, and draws from it."""

from __future__ import annotations

import operator
import sys
from typing import Any, NamedTuple

import numpy as np
from array_api_compat import is_torch_array
from numpy.typing import NDArray

from ..messages import brief
from .fitted import Fitted
from .kernels import kernel_draws

Array = NDArray[np.float64]


class Mixture(NamedTuple):
    """Σ_j weights_j N(y; means_j, covariance), on the host, float64.

    Parameters
    ----------
    means : (n, d) array
        In data units: the samples, for sdkde as they have moved.
    weights : (n,) array
        They sum to 1.
    covariance : (d, d) array
        The bandwidth's matrix H, in squared data units.
    """

    means: Array
    weights: Array
    covariance: Array


def components(fitted: Fitted) -> Mixture:
    """Return where the kernels are, their weights and their covariance, of the signed method too."""
    points, log_weights, centre = fitted.on_host
    return Mixture(centre + fitted.bandwidth.stretch(points), np.exp(log_weights), np.array(fitted.bandwidth.matrix))


def check_positive(fitted: Fitted, lacks: str) -> None:
    """Raise ValueError for the signed method, of which ``lacks`` says what it has not."""
    if fitted.request.method == "laplace":
        raise ValueError(f"method='laplace' is signed and {lacks}; pass method='sdkde' or 'kde'")


def check_count(name: str, count: Any) -> int:
    """Return how many draws there are to be; ValueError for what is no integer ≥ 0."""
    try:
        many = -1 if isinstance(count, (bool, np.bool_)) else operator.index(count)
    except TypeError:
        many = -1
    if many < 0:
        raise ValueError(f"{name} is {brief(count)}; pass an integer ≥ 0")
    return many


def generator(random_state: Any) -> Any:
    """Return a generator of NumPy: the one given, a RandomState too, or a new one from a seed."""
    if isinstance(random_state, (np.random.Generator, np.random.RandomState)):
        return random_state
    try:
        return np.random.default_rng(random_state)
    except (TypeError, ValueError) as error:
        raise type(error)(
            f"random_state is {brief(random_state)}; pass None, an integer ≥ 0, or a Generator or RandomState of NumPy"
        ) from None


def draws(fitted: Fitted, n: int, random_state: Any = None) -> Any:
    """Return draws (n, d), float64: each a component's mean and a draw of its kernel: exact.

    They are made where the columns are: on a GPU by PyTorch's generator, with a seed from ``random_state``.
    """
    check_positive(fitted, "cannot be sampled")
    rng, d = generator(random_state), fitted.problem.d
    points, bandwidth = fitted.columns.points, fitted.bandwidth
    if is_torch_array(points) and points.is_cuda:
        torch = sys.modules["torch"]
        there = torch.Generator(points.device)
        there.manual_seed(int(rng.integers(1 << 62) if hasattr(rng, "integers") else rng.randint(1 << 31)))
        reached = torch.cumsum(fitted.columns.log_weights.exp(), 0)
        uniform = torch.rand(n, dtype=torch.float64, device=points.device, generator=there) * reached[-1]
        which = torch.searchsorted(reached, uniform, right=True).clamp_(max=len(reached) - 1)
        normal = torch.randn(n, d, dtype=torch.float64, device=points.device, generator=there)
        return bandwidth.stretch(points.index_select(0, which) + normal) + torch.asarray(fitted.centre).to(points)
    host, log_weights, centre = fitted.on_host
    reached = np.cumsum(np.exp(log_weights))
    uniform = rng.random_sample(n) if hasattr(rng, "random_sample") else rng.random(n)
    which = np.searchsorted(reached, reached[-1] * uniform, side="right")
    return centre + bandwidth.stretch(host[which] + kernel_draws(fitted.request.kernel, n, d, rng))
