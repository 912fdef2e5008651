"""What the user asked for: an estimator, as a short list of passes over the reductions, and how to compute it."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from numbers import Real
from typing import Any, Literal, NamedTuple, TypeAlias, TypedDict, TypeVar, get_args

from ..arrays.frames import Values
from ..bandwidth.matrix import Bandwidth
from ..bandwidth.rules import BandwidthLike
from ..choice.select import parse_device
from ..coordinates import OfColumns, check_support
from ..coordinates import check as check_coordinates
from ..messages import did_you_mean
from ..protocol import KERNELS, PRECISIONS, TOLERANCES, Kernel, Precision, Problem, Reduction, with_fields

# Options that are names. They are validated against these types, or a test compares the two.
Single = Literal["kde", "sdkde", "laplace"]
Method = Literal[Single, "stacked"]  # the last: a list of fitted densities, each of its own method
Negative = Literal["keep", "clip", "renormalise"]  # what becomes of negative values of a signed density
Progress: TypeAlias = bool | Callable[[int, int], object]  # of the rows done and of all rows
Score: TypeAlias = Callable[[Any], Any] | Values | None
Support: TypeAlias = Sequence[Any] | Mapping[Any, Any]  # (low, high) or ("circular", period) of columns

METHODS: tuple[Any, ...] = get_args(Single)
ALL_METHODS: tuple[Any, ...] = get_args(Method)
NEGATIVE: tuple[str, ...] = get_args(Negative)

MOST = 1.2  # the largest step of "moments", for a score at the bandwidth itself
TAILS = {"guard": 0.02, "plain": 0.0}  # the guard's part of the whole
GUARD = 4.0, 4096  # its width in bandwidths, and how many samples it has at most


class Goal(StrEnum):
    DENSITY = "density"
    DEBIASED = "debiased"
    GRADIENT = "gradient"


class Pass(NamedTuple):
    """One reduction over all training points."""

    reduction: Reduction
    rows: str  # "train" or "query"
    moves: bool = False  # the result moves the training points, or decides on their widths, for the passes that follow
    scale: float = 1.0  # of the kernels, in bandwidths
    most: int | None = None  # columns, at most; None: all samples


class Options(TypedDict, total=False):
    """The options that public functions share; :func:`sdkde_core.estimate` describes them."""

    method: Method
    bandwidth: BandwidthLike
    step: float | Literal["moments"] | None
    score_bandwidth: float | None
    adaptive: float | None
    tails: float | Literal["guard", "plain"] | None
    coordinates: OfColumns | None
    support: Support | None
    kernel: Kernel
    weights: Values | None
    negative: Negative
    precision: Literal["auto", Precision]
    backend: str
    device: str | Sequence[str] | None
    check_finite: bool
    backend_options: Mapping[str, Any] | None


# What some functions take besides.
class Watched(Options, total=False):
    progress: Progress


class Asked(Watched, total=False):
    log: bool


@dataclass(frozen=True, eq=False)
class Request:
    """A goal and the shared options, validated as far as that needs no data."""

    goal: Goal
    method: str = "sdkde"
    bandwidth: Any = "auto"
    step: float | str | None = None
    score_bandwidth: float | None = None
    adaptive: float | None = None
    tails: float | str | None = None
    coordinates: Any = None
    support: Any = None
    kernel: str = "gaussian"
    weights: Any = None
    negative: str = "keep"
    precision: str = "auto"
    backend: str = "auto"
    device: str | Sequence[str] | None = None
    check_finite: bool = True
    backend_options: Mapping[str, Any] | None = None
    # No options:
    calls: int | None = None  # "auto" spreads start-up over that many calls; None: by the data's device
    without: dict[tuple[str, str], str] = field(default_factory=dict)  # backends given up for this call, and why
    ranks: Any = None  # the processes that share the rows: spreading.ranks.Ranks
    mixed: bool = True  # a bandwidth that is chosen may couple columns
    # What follows from the options:
    passes: tuple[Pass, ...] = field(init=False)  # in order
    answering: int = field(init=False)  # which pass answers: the first that does not move the samples
    guard: float = field(init=False)  # the part of the weight that guards the tails
    steps: bool = field(init=False)  # a rule for the bandwidth may choose the step and the score's bandwidth too
    mapped: bool = field(init=False)  # the estimate is of columns in other coordinates, or with ends
    apart: bool = field(init=False)  # mapped or stacked: the density is fitted before it is evaluated

    @classmethod
    def of(cls, goal: Goal, options: Options, *own: str) -> Request:
        """Make a request from a public function's keyword arguments; ``own``: arguments that only this function has.

        Requests of plain values are cached, as making one takes a tenth of a small estimate. The bandwidth and the
        weights are validated with the data.
        """
        if unknown := [name for name in options if name not in Options.__annotations__]:
            known = [*own, *Options.__annotations__]
            instead = f"pass some of {', '.join(known)}{did_you_mean(unknown[0], known)}"
            raise TypeError(f"got an unexpected keyword argument {unknown[0]!r}; {instead}")
        shared: dict[str, Any] = {name: x for name, x in options.items() if name not in ("bandwidth", "weights")}
        plain = set(map(type, shared.values())) <= {str, bool, int, float, type(None)}
        if plain and options.get("device") is None:
            made = _kept(os.environ.get("SDKDE_PRECISION"), goal, **shared)
        else:
            made = cls(goal, **shared)
        return with_fields(made, bandwidth=options.get("bandwidth", "auto"), weights=options.get("weights"))

    def __post_init__(self) -> None:
        for name in ("method", "kernel", "negative", "precision", "backend"):
            if not isinstance(getattr(self, name), str):
                raise TypeError(f"{name} is {getattr(self, name)!r}; pass a string")
        precisions = ("auto", *PRECISIONS)
        named = {"method": ALL_METHODS, "kernel": tuple(KERNELS), "negative": NEGATIVE, "precision": precisions}
        for name, known in named.items():
            if (value := getattr(self, name)) not in known:
                hint = did_you_mean(value, known)
                raise ValueError(f"{name} is {value!r}; pass one of {', '.join(map(repr, known))}{hint}")
        if self.kernel != "gaussian" and self.method != "kde":
            why = f"method={self.method!r} is made for the Gaussian kernel; pass method='kde', or leave kernel out"
            raise ValueError(f"kernel={self.kernel!r} is for method='kde', but {why}")
        if self.kernel != "gaussian" and self.goal is Goal.GRADIENT:
            raise ValueError(f"kernel={self.kernel!r} is for densities, not for their gradients; leave kernel out")
        for name, word in (("step", "moments"), ("score_bandwidth", None)):
            value = getattr(self, name)
            if value is None:
                continue
            if self.method != "sdkde":
                raise ValueError(f"{name}={value!r} is for method='sdkde'; method={self.method!r} moves no samples")
            number = isinstance(value, Real) and not isinstance(value, bool) and 0.0 < value < 1e308  # type: ignore[operator]
            if not number and not (isinstance(value, str) and value == word):
                raise ValueError(f"{name} is {value!r}; pass a positive number, {f'{word!r}, ' if word else ''}or None")
            object.__setattr__(self, name, float(value) if number else value)
        if (alpha := self.adaptive) is not None:
            if not isinstance(alpha, Real) or isinstance(alpha, bool) or not 0.0 <= alpha <= 1.0:
                raise ValueError(f"adaptive is {alpha!r}; pass an exponent from 0 to 1, such as 0.5, or None")
            if alpha and (self.method in ("laplace", "stacked") or self.kernel != "gaussian" or self.step == "moments"):
                goes = "method='sdkde' or 'kde' with the Gaussian kernel, and its own step or a number"
                raise ValueError(f"adaptive={alpha!r} is for {goes}; leave adaptive out")
            object.__setattr__(self, "adaptive", float(alpha))
        if self.tails is not None:
            share = TAILS.get(self.tails) if isinstance(self.tails, str) else self.tails
            if not isinstance(share, Real) or isinstance(share, bool) or not 0.0 <= share < 1.0:
                raise ValueError(f"tails is {self.tails!r}; pass 'guard', 'plain', a number from 0 to below 1, or None")
            if share and (self.method in ("laplace", "stacked") or self.kernel != "gaussian"):
                raise ValueError(f"tails={self.tails!r} is for method='sdkde' or 'kde', Gaussian kernels; leave it out")
            object.__setattr__(self, "tails", float(share))
        if self.coordinates is not None:
            check_coordinates(self.coordinates)
        if self.support is not None:
            object.__setattr__(self, "support", check_support(self.support))
            if self.kernel != "gaussian" or self.negative == "renormalise":
                raise ValueError("support= is for Gaussian kernels; not for negative='renormalise' yet")
            if self.method == "stacked" and self.coordinates is not None:
                raise ValueError("a stack chooses the coordinates of columns that end; leave coordinates out")
        if self.negative != "keep" and self.method != "laplace":
            why = f"method={self.method!r} is never negative; leave negative out"
            raise ValueError(f"negative={self.negative!r} is for method='laplace', but {why}")
        if self.precision == "auto" and (chosen := os.environ.get("SDKDE_PRECISION")):
            if chosen not in precisions:
                hint = did_you_mean(chosen, PRECISIONS)
                raise ValueError(f"SDKDE_PRECISION is {chosen!r}; set one of {', '.join(PRECISIONS)}{hint}")
            object.__setattr__(self, "precision", chosen)
        if self.method != "sdkde" and self.goal is Goal.DEBIASED:
            raise ValueError(f"method={self.method!r} moves no samples; debiased samples are method='sdkde'")
        options = self.backend_options
        if options is not None and not (isinstance(options, Mapping) and all(isinstance(k, str) for k in options)):
            raise TypeError(f"backend_options is {options!r}; pass a mapping from names to values")
        object.__setattr__(self, "device", parse_device(self.device))
        self._follow()

    def _follow(self) -> None:
        guard = self.tails if isinstance(self.tails, float) else 0.0
        passes = _passes(self.goal, self.method, self.score_bandwidth or 1.0, bool(self.adaptive), guard > 0.0)
        steps = not (self.step or self.score_bandwidth or self.adaptive)
        self.__dict__.update(passes=passes, answering=int(passes[0].moves), guard=guard, steps=steps)
        mapped = self.coordinates not in (None, "identity")  # "identity": a stack tries no others
        mapped = mapped or (self.support is not None and self.method != "stacked")  # its parts have the support
        self.__dict__.update(mapped=mapped, apart=mapped or self.method == "stacked")

    @property
    def settled(self) -> Request:
        """The request without the user's arrays, after these are read."""
        left = {"mapped": False, "apart": self.method == "stacked"}
        return with_fields(self, weights=None, bandwidth="silverman", coordinates=None, support=None, **left)

    def options(self, *without: str) -> dict[str, Any]:
        return {name: getattr(self, name) for name in Options.__annotations__ if name not in without}

    def moving(self, bandwidth: Bandwidth) -> Request:
        """Return the request with the step and the tails that a bandwidth was chosen for, where the user named none."""
        chosen: dict[str, Any] = {}
        if self.method == "sdkde" and bandwidth.step is not None and self.steps:
            chosen = {"step": bandwidth.step, "score_bandwidth": bandwidth.score_bandwidth}
        if self.method == "sdkde" and bandwidth.tails is not None and self.tails is None:
            chosen["tails"] = bandwidth.tails
        if not chosen:
            return self
        moving = with_fields(self, **chosen)
        moving._follow()
        return moving

    def annotated(self, bandwidth: Bandwidth) -> Bandwidth:
        """The bandwidth with the step and the tails of this request."""
        tails: Any = self.tails  # a number: __post_init__
        return replace(bandwidth, step=self.step, score_bandwidth=self.score_bandwidth, tails=tails)

    def problems(
        self, m: int | None, n: int, d: int, extent: float, requires: frozenset[str], dtype: str, device: str
    ) -> tuple[Problem, ...]:
        """Describe each pass; ``m``: query rows, None: the samples. The extent is that before samples have moved."""
        shared = {"d": d, "dtype": dtype, "device": device, "extent": extent, "requires": requires}
        shared |= {"kernel": self.kernel, "precision": self.precision}
        c = self.score_bandwidth or 1.0
        step = MOST if isinstance(self.step, str) else (self.step or 0.5) / c / c
        # A step of c² takes a sample to a mean of samples; 2c² takes it equally far past that mean.
        reach = max(1.0, 2.0 * step - 1.0)
        found = _problems(self.passes, m, n, reach, **shared)
        if (self.step or self.score_bandwidth) and not max(p.extent for p in found) < 1e149:  # for NaN too
            both = f"step={self.step!r} and score_bandwidth={self.score_bandwidth!r}"
            where = "beyond 1e149 bandwidths, where distances overflow"
            raise ValueError(f"{both} put points {where}; pass numbers nearer to 1")
        return found


@functools.lru_cache(maxsize=64, typed=True)  # True equals 1 and is another option
def _kept(environment: str | None, goal: Goal, **options: Any) -> Request:
    """The request of plain options; ``environment``: the variable SDKDE_PRECISION, which is part of the key."""
    return Request(goal, **options)


def precision_for(precision: str, dtype: str) -> str:
    """The precision for input of ``dtype``: unless the user says otherwise high for float64, fast for narrower."""
    return ("high" if dtype == "float64" else "fast") if precision == "auto" else precision


@functools.lru_cache(maxsize=256)  # in a loop all calls describe the same passes
def _problems(passes: tuple[Pass, ...], m: int | None, n: int, reach: float, **shared: Any) -> tuple[Problem, ...]:
    """Describe passes; ``reach``: how much farther out samples may move."""
    moved, result = False, []
    shared["precision"] = precision_for(shared["precision"], shared["dtype"])
    shared["requires"] |= frozenset(["kernel"] * (shared["kernel"] != "gaussian"))
    if passes[0].moves:
        # Half a step ends between a sample and a mean of samples: within the extent, but for rounding and the shift's
        # tolerance. Longer steps end within ``reach`` times the extent. So moved samples need not be measured again.
        shared["extent"] = (reach + 1e-6) * shared["extent"] + TOLERANCES["fast"][Reduction.MEAN].absolute
    for step in passes:
        at_train = step.rows == "train" or m is None
        same = at_train and not moved and step.most is None
        columns, rows = n if step.most is None else min(n, step.most), n if at_train or m is None else m
        fields = shared if step.scale == 1.0 else shared | {"extent": shared["extent"] / step.scale}
        result.append(Problem(step.reduction, rows, columns, same=same, **fields))
        moved = moved or step.moves
    return tuple(result)


@functools.cache
def _passes(goal: Goal, method: str, c: float, adaptive: bool, guarded: bool) -> tuple[Pass, ...]:
    """The passes of an estimate; ``c``: the score's bandwidth, in bandwidths."""
    if method == "laplace":  # its gradient is summed by the core
        return (Pass(Reduction.LAPLACE, "query"),)
    if goal is Goal.DEBIASED:
        return (Pass(Reduction.MEAN, "train", scale=c),)
    last = Pass(Reduction.MEAN if goal is Goal.GRADIENT else Reduction.LOG_SUM, "query")
    first = Pass(Reduction.MEAN if method == "sdkde" else Reduction.LOG_SUM, "train", moves=True, scale=c)
    passes = [first, last] if method == "sdkde" or adaptive else [last]
    if guarded:
        passes.append(last._replace(scale=GUARD[0], most=GUARD[1]))
    return tuple(passes)


F = TypeVar("F", bound=Callable[..., Any])


def takes_options(function: F) -> F:
    """Show the shared options in the signature of a function that takes them as ``**options``."""
    signature = inspect.signature(function)
    own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    known, kind = Options.__annotations__.keys() - signature.parameters, inspect.Parameter.KEYWORD_ONLY
    options = [f for f in fields(Request) if f.name in known]
    shared = [inspect.Parameter(f.name, kind, default=f.default, annotation=f.type) for f in options]
    parameters = sorted([*shared, *own], key=lambda p: p.kind)  # own keywords come last
    function.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return function
