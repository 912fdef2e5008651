"""What the user asked for: an estimator, as a short list of passes over the reductions, and how to compute it.

One frozen object, made by the public functions and read by everything else.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, NamedTuple, TypedDict, TypeVar

from ..choice.select import parse_device
from ..engine.spread import Group
from ..messages import did_you_mean
from ..protocol import KERNELS, PRECISIONS, Problem, Reduction, with_fields

__all__ = ["METHODS", "NEGATIVE", "Goal", "Options", "Pass", "Request", "takes_options"]

METHODS = ("kde", "sdkde", "laplace")

#: What becomes of negative values of a signed density.
NEGATIVE = ("keep", "clip", "renormalise")


class Goal(StrEnum):
    """What the caller wants of the estimator."""

    DENSITY = "density"
    DEBIASED = "debiased"
    GRADIENT = "gradient"


class Pass(NamedTuple):
    """One reduction over all training points."""

    reduction: Reduction
    rows: str  # "train" or "query"
    moves: bool = False  # the result moves the training points of the passes that follow


class Options(TypedDict, total=False):
    """The options that public functions share; :func:`sdkde_core.estimate` describes them."""

    method: str
    bandwidth: Any
    kernel: str
    weights: Any
    negative: str
    precision: str
    backend: str
    device: str | Sequence[str] | None
    check_finite: bool
    backend_options: Mapping[str, Any] | None


@dataclass(frozen=True, eq=False)
class Request:
    """A goal and the shared options, validated as far as that needs no data.

    ``method`` is the estimator:

    * kde: p̂(y) = Σ_j w_j N(y; x_j, H).
    * sdkde: kde on samples moved by ½ H ŝ(x_j), ŝ = ∇log p̂ the empirical score at the same H.
    * laplace: p̂(y) = Σ_j w_j N(y; x_j, H) (1 + d/2 − ½ r²_j); signed.

    Three fields are no options. ``calls``: how many like this one the process makes, over which ``"auto"`` spreads
    start-up; None: as many as the place of the data says. ``without``: backends by name and device that have given up
    this call, and why. ``ranks``: the processes that share the rows.

    Raises
    ------
    TypeError, ValueError
        An option cannot be right, or the goal is not the method's; the message names it.
    """

    goal: Goal
    method: str = "sdkde"
    bandwidth: Any = "auto"
    kernel: str = "gaussian"
    weights: Any = None
    negative: str = "keep"
    precision: str = "auto"
    backend: str = "auto"
    device: str | Sequence[str] | None = None
    check_finite: bool = True
    backend_options: Mapping[str, Any] | None = None
    calls: int | None = None
    without: Mapping[tuple[str, str], str] = field(default_factory=dict)
    ranks: Group | None = None

    @classmethod
    def of(cls, goal: Goal, options: Options, *own: str) -> Request:
        """Make a request from a public function's keyword arguments; ``own``: those that only this function takes.

        One of plain values is made once: in a loop of small estimates to make it takes a tenth of a call.
        """
        key = _plain(goal, options)
        made = _made.get(key)
        if made is None:
            made = cls._of(goal, options, own)
            if key is None:
                return made
            if len(_made) >= MOST_MADE:
                _made.clear()
            _made[key] = made if made.weights is None else with_fields(made, weights=None)
        weights = options.get("weights")
        return made if weights is made.weights else with_fields(made, weights=weights)

    @classmethod
    def _of(cls, goal: Goal, options: Options, own: Sequence[str]) -> Request:
        unknown = [name for name in options if name not in Options.__annotations__]
        if unknown:
            known = [*own, *Options.__annotations__]
            hint = did_you_mean(unknown[0], known)
            raise TypeError(f"got an unexpected keyword argument {unknown[0]!r}; pass some of {', '.join(known)}{hint}")
        return cls(goal, **options)

    def __post_init__(self) -> None:
        for name in ("method", "kernel", "negative", "precision", "backend"):
            if not isinstance(getattr(self, name), str):
                raise TypeError(f"{name} is {getattr(self, name)!r}; pass a string")
        if self.method not in METHODS:
            known = ", ".join(map(repr, METHODS))
            raise ValueError(f"method is {self.method!r}; pass one of {known}{did_you_mean(self.method, METHODS)}")
        if self.kernel != "gaussian":
            self._check_kernel()
        if self.negative not in NEGATIVE:
            known, hint = ", ".join(map(repr, NEGATIVE)), did_you_mean(self.negative, NEGATIVE)
            raise ValueError(f"negative is {self.negative!r}; pass one of {known}{hint}")
        if self.negative != "keep" and self.method != "laplace":
            raise ValueError(
                f"negative={self.negative!r} is for method='laplace', but method={self.method!r} is never negative; "
                "leave negative out"
            )
        object.__setattr__(self, "precision", _asked_precision(self.precision))
        if self.method != "sdkde" and self.goal is Goal.DEBIASED:
            raise ValueError(f"method={self.method!r} moves no samples; debiased samples are method='sdkde'")
        options = self.backend_options
        if options is not None and not (isinstance(options, Mapping) and all(isinstance(k, str) for k in options)):
            raise TypeError(f"backend_options is {options!r}; pass a mapping from names to values")
        object.__setattr__(self, "device", parse_device(self.device))

    def _check_kernel(self) -> None:
        """Raise where there is no such kernel, or it does not go with the method or the goal."""
        if self.kernel not in KERNELS:
            known, hint = ", ".join(map(repr, KERNELS)), did_you_mean(self.kernel, KERNELS)
            raise ValueError(f"kernel is {self.kernel!r}; pass one of {known}{hint}")
        if self.method != "kde":
            raise ValueError(
                f"kernel={self.kernel!r} is for method='kde', but method={self.method!r} is made for the Gaussian "
                "kernel; pass method='kde', or leave kernel out"
            )
        if self.goal is Goal.GRADIENT:
            raise ValueError(
                f"kernel={self.kernel!r} is for densities, not for their gradients; leave kernel out: those are of "
                "the Gaussian kernel"
            )

    def options(self, *without: str) -> dict[str, Any]:
        """Return the shared options, as keyword arguments of the public functions."""
        return {name: getattr(self, name) for name in Options.__annotations__ if name not in without}

    @functools.cached_property
    def kind(self) -> tuple[Any, ...]:
        """Those options that are plain values and on which the result depends, but for the bandwidth."""
        names = "method", "kernel", "negative", "precision", "backend", "check_finite"
        return tuple(getattr(self, name) for name in names)

    @property
    def passes(self) -> tuple[Pass, ...]:
        """The passes, in order."""
        if self.goal is Goal.DEBIASED:
            return (Pass(Reduction.MEAN, "train"),)
        move = (Pass(Reduction.MEAN, "train", moves=True),) if self.method == "sdkde" else ()
        if self.method == "laplace":  # of its gradient the sum is the core's own
            return (Pass(Reduction.LAPLACE, "query"),)
        return (*move, Pass(Reduction.MEAN if self.goal is Goal.GRADIENT else Reduction.LOG_SUM, "query"))

    def precision_for(self, dtype: str) -> str:
        """The precision for input of ``dtype``: unless the user says otherwise high for float64, fast for narrower."""
        return ("high" if dtype == "float64" else "fast") if self.precision == "auto" else self.precision

    def problems(
        self,
        m: int | None,
        n: int,
        d: int,
        extent: float,
        requires: frozenset[str],
        dtype: str,
        device: str,
    ) -> tuple[Problem, ...]:
        """Describe each pass.

        Moved samples are means of samples, so they stay within the extent.

        Parameters
        ----------
        m : int or None
            Query rows; None: the training points.
        n, d : int
        extent : float
            In bandwidths, over train and query.
        requires : frozenset of str
        dtype, device : str
        """
        moved, result = False, []
        if self.kernel != "gaussian":
            requires |= {"kernel"}
        for step in self.passes:
            at_train = step.rows == "train" or m is None
            result.append(
                Problem(
                    reduction=step.reduction,
                    m=n if at_train or m is None else m,
                    n=n,
                    d=d,
                    dtype=dtype,
                    precision=self.precision_for(dtype),
                    device=device,
                    same=at_train and not moved,
                    requires=requires,
                    extent=extent,
                    kernel=self.kernel,
                )
            )
            moved = moved or step.moves
        return tuple(result)


#: Requests by what :func:`_plain` has of them; so many are kept, and then forgotten.
_made: dict[Any, Request] = {}
MOST_MADE = 64


def _plain(goal: Goal, options: Options) -> Any:
    """Return what a request follows from, but for the weights; None where that is more than plain values."""
    key: list[Any] = [goal, os.environ.get("SDKDE_PRECISION")]
    for name, value in options.items():
        if name != "weights":
            kind = type(value)  # True is no 1 to who reads the request
            if kind not in _PLAIN or (name == "device" and value is not None):
                return None
            key += name, kind, value
    return tuple(key)


_PLAIN = frozenset({str, bool, int, float, type(None)})


def _asked_precision(precision: str) -> str:
    """The precision asked for, with the environment's in place of ``"auto"``."""
    known = ("auto", *PRECISIONS)
    if precision not in known:
        hint = did_you_mean(precision, known)
        raise ValueError(f"precision is {precision!r}; pass one of {', '.join(map(repr, known))}{hint}")
    chosen = os.environ.get("SDKDE_PRECISION") or "auto" if precision == "auto" else precision
    if chosen not in known:
        hint = did_you_mean(chosen, PRECISIONS)
        raise ValueError(f"SDKDE_PRECISION is {chosen!r}; set one of {', '.join(PRECISIONS)}{hint}")
    return chosen


F = TypeVar("F", bound=Callable[..., Any])


def takes_options(function: F) -> F:
    """Show the shared options in the signature of a function that takes them as ``**options``."""
    own = inspect.signature(function)
    first: list[inspect.Parameter] = []
    last: list[inspect.Parameter] = []
    for parameter in own.parameters.values():
        if parameter.kind is not parameter.VAR_KEYWORD:
            (last if parameter.kind is parameter.KEYWORD_ONLY else first).append(parameter)
    taken = {p.name for p in (*first, *last)}
    shared = [
        inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=f.type)
        for f in fields(Request)
        if f.name in Options.__annotations__ and f.name not in taken
    ]
    function.__signature__ = own.replace(parameters=[*first, *shared, *last])  # type: ignore[attr-defined]
    return function
