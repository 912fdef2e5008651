"""What the user asked for, as one frozen object that the public functions make and everything else reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..choice.select import parse_device
from .spec import EstimatorSpec, Goal, asked_precision

__all__ = ["Request"]


@dataclass(frozen=True, eq=False)
class Request:
    """An estimator, and how to compute it; validated as far as that needs no data.

    Parameters
    ----------
    spec : EstimatorSpec
    bandwidth, weights
        As the user gave them.
    backend : str
    device : str or None
    check_finite : bool
        Refuse NaN and inf in the points.
    options : mapping or None
        Of the backend.

    Raises
    ------
    TypeError
        ``backend`` is not a string, or ``backend_options`` not a mapping.
    ValueError
        ``device`` is not a device's name.
    """

    spec: EstimatorSpec
    bandwidth: Any = "silverman"
    weights: Any = None
    backend: str = "auto"
    device: str | None = None
    check_finite: bool = True
    options: Mapping[str, Any] | None = None

    @classmethod
    def of(cls, method: str, goal: Goal, precision: str = "auto", deterministic: bool = True, **others: Any) -> Request:
        """Make a request from the public functions' arguments; ``others`` are the fields but ``spec``."""
        return cls(EstimatorSpec(method, goal, asked_precision(precision), deterministic), **others)

    def __post_init__(self) -> None:
        if not isinstance(self.backend, str):
            raise TypeError(f"backend is {self.backend!r}; pass a backend's name, or 'auto'")
        named = isinstance(self.options, Mapping) and all(isinstance(name, str) for name in self.options)
        if self.options is not None and not named:
            raise TypeError(f"backend_options is {self.options!r}; pass a mapping from names to values")
        object.__setattr__(self, "device", parse_device(self.device))
