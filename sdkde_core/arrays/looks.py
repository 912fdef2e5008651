"""What the host reads of arrays on a device: all numbers at once, as it waits for the device every time."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from array_api_compat import array_namespace, is_torch_array

from .places import to_host

R = TypeVar("R")


def look(decide: Callable[..., R], *numbers: Any) -> R:
    """Return ``decide(*numbers)``, a float for every number, of arrays that may be on a device: all read at once.

    Parameters
    ----------
    decide : callable
    *numbers : array
        float64; of arrays with axes every entry.
    """
    if isinstance(numbers[0], (np.ndarray, np.generic)):
        return decide(*[float(x) for number in numbers for x in np.ravel(number)])
    if len(numbers) == 1 and numbers[0].ndim == 0:
        return decide(float(numbers[0]))
    xp = array_namespace(numbers[0])
    flat = [xp.reshape(x, (-1,)) for x in numbers]
    together = flat[0] if len(flat) == 1 else xp.concat(flat)
    return decide(*(together if is_torch_array(together) else to_host(together)).tolist())


def rounded(x: float) -> float:
    """Return a number ≥ 0 rounded up by at most a twelfth: what is decided from it changes rarely with the data."""
    return 2.0 ** (math.ceil(8.0 * math.log2(x)) / 8.0) if 0.0 < x < math.inf else x
