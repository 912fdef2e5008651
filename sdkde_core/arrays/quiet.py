"""Decorators: NumPy's error state within what computes, and what else public functions need."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import numpy as np

P = ParamSpec("P")
T = TypeVar("T")


#: Have NumPy pass over underflow, overflow and NaN within a function: a decorator. Sums of exponentials underflow by
#: design, and what must not overflow is checked.
quiet = np.errstate(all="ignore")


def public(function: Callable[P, T]) -> Callable[P, T]:
    """Make ``function`` :func:`quiet`, and break PyTorch's graphs at its call: nothing within is traced.

    Of an estimate PyTorch would compile some 250 frames, which takes it ten seconds, turn NumPy into tensors, warn of
    caches, and fail in kernels. PyTorch is not imported for this: without its tracer nobody traces.
    """
    outside: Any = None

    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        nonlocal outside
        if "torch._dynamo" not in sys.modules:
            with np.errstate(all="ignore"):
                return function(*args, **kwargs)
        if outside is None:
            outside = sys.modules["torch"].compiler.disable(quiet(function))
        return outside(*args, **kwargs)

    call.__code__ = call.__code__.replace(co_name=function.__name__)  # of its own: by it PyTorch counts recompilations
    return wraps(function)(call)
