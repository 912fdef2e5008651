"""Marginal and conditional densities of a fitted one: fitted densities of fewer dimensions, in closed form.

The marginal of a normal over some coordinates has the means and the covariance of these. So has that of the Laplace
kernel N(x) (1 + d/2 − ½ r²): r² is the sum of that within the coordinates kept and one whose mean is the number of the
others.

Of the conditional, let the coordinates given come first and L be the lower Cholesky factor of H in that order. A
component's whitened coordinates are independent, so those of the others do not depend on what is given: they keep
their places, the origin moves to where the value given is regressed to, and weights are multiplied by the densities
there.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..bandwidth.matrix import Bandwidth
from ..messages import brief
from .fitted import Fitted
from .mixture import check_positive

Array = NDArray[np.float64]


def marginal(fitted: Fitted, dims: Any) -> Fitted:
    """Return the density of the coordinates ``dims``, in that order."""
    kept = indices("dims", fitted, dims)
    if fitted.request.negative != "keep":
        raise ValueError(
            f"negative={fitted.request.negative!r} has no marginal in closed form; pass negative='keep' to prepare"
        )
    points, log_weights, centre = fitted.on_host
    whole = fitted.bandwidth
    if whole.factor.ndim == 1:
        bandwidth, points = Bandwidth(len(kept), whole.factor[kept], whole.rule), points[:, kept]
    else:
        bandwidth = _of_matrix(whole.matrix[np.ix_(kept, kept)], whole.rule)
        points = bandwidth.whiten(whole.stretch(points)[:, kept], np.zeros(len(kept)))
    return fitted.derived(bandwidth, centre[kept], np.ascontiguousarray(points), log_weights, _names(fitted, kept))


def conditional(fitted: Fitted, given: Mapping[Any, Any]) -> Fitted:
    """Return the density of the other coordinates where some have the values ``given``."""
    check_positive(fitted, "has no conditional density")
    if not isinstance(given, Mapping):
        raise TypeError(f"given is {brief(given)}; pass a mapping from dimensions to values, such as {{0: 1.5}}")
    first = indices("given", fitted, list(given))
    if len(first) == fitted.problem.d:
        raise ValueError(f"given has all {fitted.problem.d} dimensions; leave out those that the density is of")
    try:
        values = np.array([float(v) for v in given.values()])
    except (TypeError, ValueError):
        raise TypeError(f"given is {brief(dict(given))}; pass a number for each dimension") from None
    if not np.isfinite(values).all():
        raise ValueError(f"given is {brief(dict(given))}; pass finite values")
    others = [k for k in range(fitted.problem.d) if k not in first]
    order, k, whole = [*first, *others], len(first), fitted.bandwidth
    points, log_weights, centre = fitted.on_host
    away = values - centre[first]
    if whole.factor.ndim == 1:
        points, value, moved = points[:, order], away / whole.factor[first], np.zeros(len(others))
        bandwidth = Bandwidth(len(others), whole.factor[others], whole.rule)
    else:
        joint = _of_matrix(whole.matrix[np.ix_(order, order)], whole.rule)
        factor = np.diag(joint.factor) if joint.factor.ndim == 1 else joint.factor
        points = joint.whiten(whole.stretch(points)[:, order], np.zeros(len(order)))
        value = Bandwidth(k, factor[:k, :k]).whiten(away[None, :], np.zeros(k))[0]
        moved, bandwidth = factor[k:, :k] @ value, Bandwidth(len(others), factor[k:, k:], whole.rule)
    with np.errstate(over="ignore"):
        log_weights = log_weights - 0.5 * np.square(points[:, :k] - value).sum(axis=1)
    log_weights = log_weights - log_weights.max()
    if not math.isfinite(log_weights.sum()) and not np.isfinite(log_weights).any():
        raise ValueError(f"given is {brief(dict(given))}, too far from every sample: squared distances overflow")
    log_weights = log_weights - math.log(np.exp(log_weights).sum())
    names = _names(fitted, others)
    return fitted.derived(bandwidth, centre[others] + moved, np.ascontiguousarray(points[:, k:]), log_weights, names)


def _of_matrix(matrix: Array, rule: str) -> Bandwidth:
    return Bandwidth.of(math.sqrt(matrix[0, 0]) if len(matrix) == 1 else matrix, len(matrix), rule)


def indices(name: str, fitted: Fitted, dims: Any) -> list[int]:
    """Return dimensions as distinct indices, counted from the end where negative; of a data frame also by name.

    ``name`` is the argument's, for errors: TypeError, ValueError.
    """
    d, names = fitted.problem.d, fitted.names
    try:
        listed: list[Any] = [dims] if isinstance(dims, str) else list(dims)
    except TypeError:  # a single one
        listed = [dims]
    found = []
    for one in listed:
        if isinstance(one, str) and one in names:
            found.append(names.index(one))
            continue
        try:
            k = operator.index(one)
        except TypeError:
            known = f", or names of columns: {', '.join(names)}" if names else ""
            raise TypeError(f"{name} has {brief(one)}; pass indices of dimensions{known}") from None
        if isinstance(one, (bool, np.bool_)) or not -d <= k < d:
            raise ValueError(f"{name} has {brief(one)}; pass indices of dimensions below {d}")
        found.append(k % d)
    if not found or len(set(found)) < len(found):
        raise ValueError(f"{name} is {brief(dims)}; pass at least one dimension, each once")
    return found


def _names(fitted: Fitted, kept: list[int]) -> tuple[str, ...]:
    return tuple(fitted.names[k] for k in kept) if fitted.names else ()
