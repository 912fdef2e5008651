"""From the last pass's sums to the density, or its log."""

from __future__ import annotations

import math
import warnings
from typing import Any

from array_api_compat import array_namespace

from ..messages import caller_level
from ..protocol import Partial
from .request import Request


def density(sums: Partial, constant: float, log: bool, clip: bool = False) -> Any:
    """Return the density, or its log: NaN where it is negative. Nothing is read on the host, so it can be recorded.

    ``constant`` is the kernel's log normalising constant; ``clip``: zero where it is negative, and the log −inf.
    """
    xp = array_namespace(sums.log_sum)
    if sums.sign is None:
        log_density = sums.log_sum + constant
        return log_density if log else xp.exp(log_density)
    log_density = sums.log_magnitude + constant
    if clip or log:
        values, least = (log_density, -math.inf if clip else math.nan) if log else (xp.exp(log_density), 0.0)
        return xp.where(sums.sign < 0, xp.full_like(values, least), values)
    return sums.sign * xp.exp(log_density)


def has_gaps(request: Request, log: bool) -> bool:
    """Whether results are NaN where the estimate is negative, which users are warned of."""
    return log and request.method == "laplace" and request.negative == "keep"


def undefined(log_density: Any) -> int:
    """Return of how many rows the log is NaN, once the device has computed it."""
    xp = array_namespace(log_density)
    return int(xp.sum(xp.astype(xp.isnan(log_density), xp.int32)))  # of an array of the user's: any library, any device


def warn_of_negative(undefined: int, rows: int, finite: bool = True) -> None:
    """Warn that the log is NaN for some rows, if there are any; ``finite``: the data are known to be."""
    if not undefined:
        return
    warnings.warn(
        f"the Laplace estimate is {'negative' if finite else 'negative or NaN'} at {undefined} of {rows} points, where "
        "its log is NaN; use log=False for the signed values, negative='clip', or method='sdkde', which is never "
        "negative",
        RuntimeWarning,
        stacklevel=caller_level(),
    )
