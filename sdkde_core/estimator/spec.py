"""What is to be computed: an estimator, as a short list of passes over one family of reductions."""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from ..protocol import PRECISIONS, Problem, Reduction

__all__ = ["METHODS", "EstimatorSpec", "Goal", "Pass", "asked_precision"]

METHODS = ("kde", "sdkde", "laplace")


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


@dataclass(frozen=True)
class EstimatorSpec:
    """An estimator and how exactly it is to be computed.

    Parameters
    ----------
    method : {"kde", "sdkde", "laplace"}
        * kde: p̂(y) = Σ_j w_j N(y; x_j, H).
        * sdkde: kde on samples moved by ½ H ŝ(x_j), ŝ = ∇log p̂ the empirical score at the same H.
        * laplace: p̂(y) = Σ_j w_j N(y; x_j, H) (1 + d/2 − ½ r²_j); signed.
    goal : Goal
    precision : {"auto", "fast", "high", "float64"}
        ``"auto"``: high for float64 input, fast for narrower.
    deterministic : bool
        The same call must give the same bits.
    """

    method: str = "sdkde"
    goal: Goal = Goal.DENSITY
    precision: str = "auto"
    deterministic: bool = True

    def __post_init__(self) -> None:
        for name in ("method", "precision"):
            if not isinstance(getattr(self, name), str):
                raise TypeError(f"{name} is {getattr(self, name)!r}; pass a string")
        if self.method not in METHODS:
            raise ValueError(f"method is {self.method!r}; pass one of {', '.join(map(repr, METHODS))}")
        if self.precision not in ("auto", *PRECISIONS):
            raise ValueError(
                f"precision is {self.precision!r}; pass one of {', '.join(map(repr, ('auto', *PRECISIONS)))}"
            )
        if self.method == "laplace" and self.goal is Goal.GRADIENT:
            raise ValueError("the gradient of method='laplace' is not available yet; pass method='sdkde' or 'kde'")
        if self.method != "sdkde" and self.goal is Goal.DEBIASED:
            raise ValueError(f"method={self.method!r} moves no samples; debiased samples are method='sdkde'")

    @property
    def passes(self) -> tuple[Pass, ...]:
        """The passes, in order."""
        if self.goal is Goal.DEBIASED:
            return (Pass(Reduction.MEAN, "train"),)
        move = (Pass(Reduction.MEAN, "train", moves=True),) if self.method == "sdkde" else ()
        if self.goal is Goal.GRADIENT:
            return (*move, Pass(Reduction.MEAN, "query"))
        return (*move, Pass(Reduction.LAPLACE if self.method == "laplace" else Reduction.LOG_SUM, "query"))

    def precision_for(self, dtype: str) -> str:
        """The precision for input of ``dtype``."""
        if self.precision != "auto":
            return self.precision
        return "high" if dtype == "float64" else "fast"

    def problems(
        self,
        m: int | None,
        n: int,
        d: int,
        dtype: str,
        device: str,
        extent: float,
        weighted: bool,
        grad: bool = False,
    ) -> tuple[Problem, ...]:
        """Describe each pass.

        Moved samples are means of samples, so they stay within the extent.

        Parameters
        ----------
        m : int or None
            Query rows; None: the training points.
        n, d : int
        dtype, device : str
        extent : float
            In bandwidths, over train and query.
        weighted : bool
            The weights differ.
        grad : bool
            The results are to be attached to autograd.
        """
        moved, requires = False, frozenset({"weights"} if weighted else ()) | ({"grad"} if grad else set())
        result = []
        for step in self.passes:
            same = step.rows == "train" or (m is None and not moved)
            problem = Problem(
                reduction=step.reduction,
                m=n if step.rows == "train" or m is None else m,
                n=n,
                d=d,
                dtype=dtype,
                precision=self.precision_for(dtype),
                device=device,
                same=same,
                requires=requires,
                deterministic=self.deterministic,
                extent=extent,
            )
            result.append(problem)
            moved = moved or step.moves
        return tuple(result)


def asked_precision(precision: str) -> str:
    """The precision asked for, with the environment's in place of ``"auto"``."""
    if precision != "auto":
        return precision
    chosen = os.environ.get("SDKDE_PRECISION") or "auto"
    if chosen not in ("auto", *PRECISIONS):
        raise ValueError(f"SDKDE_PRECISION is {chosen!r}; set one of {', '.join(PRECISIONS)}")
    return chosen
