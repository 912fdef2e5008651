"""NumPy's error state within what computes."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import numpy as np

P = ParamSpec("P")
T = TypeVar("T")


def quiet(function: Callable[P, T]) -> Callable[P, T]:
    """Have NumPy pass over underflow, overflow and NaN within ``function``.

    Sums of exponentials underflow by design, and what must not overflow is checked.
    """

    @wraps(function)
    def ignoring(*args: P.args, **kwargs: P.kwargs) -> T:
        with np.errstate(all="ignore"):
            return function(*args, **kwargs)

    return ignoring
