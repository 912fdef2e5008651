"""From the last pass's sums to the density, or its log."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

from array_api_compat import array_namespace

from ..messages import caller_level
from ..protocol import Partial

__all__ = ["density", "warn_of_negative"]


#: Told of how many rows, of how many there are.
Count = Callable[[int, int], None]


def density(sums: Partial, constant: float, log: bool, clip: bool = False, negative: Count | None = None) -> Any:
    """Return the density, or its log: NaN where it is negative, with one RuntimeWarning.

    Parameters
    ----------
    sums : Partial
    constant : float
        The kernel's log normalising constant.
    log : bool
    clip : bool
        Zero where it is negative, and the log −inf.
    negative : callable, optional
        Told of how many rows the log is NaN and of how many there are, instead of the warning.
    """
    xp = array_namespace(sums.log_sum)
    if sums.sign is None:
        log_density = sums.log_sum + constant
        return log_density if log else xp.exp(log_density)
    log_density = sums.log_magnitude + constant
    if clip:
        values, least = (log_density, -math.inf) if log else (xp.exp(log_density), 0.0)
        return xp.where(sums.sign < 0, xp.full_like(values, least), values)
    return _signed_log(sums.sign, log_density, negative or warn_of_negative) if log else sums.sign * xp.exp(log_density)


def _signed_log(sign: Any, log_magnitude: Any, told: Count) -> Any:
    """log p̂ where p̂ ≥ 0, NaN elsewhere."""
    xp = array_namespace(sign)
    negative = sign < 0
    count = int(xp.sum(xp.astype(negative, xp.int64)))
    if count:
        told(count, sign.shape[0])
    return xp.where(negative, xp.full_like(log_magnitude, math.nan), log_magnitude)


def warn_of_negative(count: int, rows: int) -> None:
    """Warn that the log is NaN for some rows."""
    warnings.warn(
        f"the Laplace estimate is negative at {count} of {rows} points, where its log is NaN; "
        "use log=False for the signed values, negative='clip', or method='sdkde', which is never negative",
        RuntimeWarning,
        stacklevel=caller_level(),
    )
