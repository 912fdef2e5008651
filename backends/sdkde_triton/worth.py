"""Where leaves of columns that cannot matter are left out: what is taken, whether it pays, and what it costs.

The figures are of an H200; pairs stand for time, which a GPU with other rates takes for both ways alike.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from sdkde_core.nearby import rough_share, typical_share
from sdkde_core.protocol import TOLERANCES, Problem, Work

from .space import HEIGHT, LEAF

__all__ = ["LEFT_OUT", "SLOWER", "looks", "over_lists", "pays", "share_of", "takes", "typical"]

#: Dimensions from which it can pay, and up to which a packed operand is as narrow as any.
LEAST, MOST = 2, 16

#: The share of the tolerance that is left out at most.
LEFT_OUT = 0.3

#: What a pair in a list takes over one of all pairs. What lists take besides, in pairs at "fast": the host's launches,
#: and the order and the bounds, for every point.
SLOWER, STARTS, EACH = 1.3, 2e10, 1e4

#: What a pair takes over one at "fast".
TAKES = {"fast": 1.0, "high": 2.0}

#: Pairs at "fast" from which it is looked how many matter: by the backend, and by its price, for which the host looks.
LOOK, PRICED = 4e10, 2e11

#: Pairs a second at "fast", and launches a second of the host.
RATE, LAUNCHED = 2e12, 2.5e5

#: Rows and columns that the backend looks at.
LOOKED = (64, 2048)


def takes(problem: Problem) -> bool:
    """Whether a problem that can be computed from packed operands can be from lists."""
    knows_own = problem.same or "exclude_self" not in problem.requires
    return problem.precision in TAKES and LEAST <= problem.d <= MOST and knows_own


def looks(problem: Problem, *, for_price: bool = False) -> bool:
    """Whether it may pay, and a look costs little."""
    return takes(problem) and _pairs(problem) >= (PRICED if for_price else LOOK) and pays(problem, 0.0)


def pays(problem: Problem, share: float) -> bool:
    """Whether lists that leave a share of the pairs are faster than all pairs."""
    return _pairs(problem) * (1.0 - SLOWER * share) >= _besides(problem)


def _pairs(problem: Problem) -> float:
    """As many pairs at "fast" take as long."""
    return problem.pairs * TAKES[problem.precision]


def _besides(problem: Problem) -> float:
    return STARTS + EACH * (problem.m + problem.n)


def over_lists(problem: Problem, work: Work, share: float) -> Work:
    """What lists that leave a share of the pairs take, where all pairs take ``work``."""
    left = SLOWER * share
    return replace(
        work,
        matrix_flops={dtype: left * flops for dtype, flops in work.matrix_flops.items()},
        scalar_flops=left * work.scalar_flops,
        exps=left * work.exps,
        launches=work.launches + math.ceil(_besides(problem) / RATE * LAUNCHED),
    )


def share_of(problem: Problem, rows: Any, columns: Any, log_weights: Any, few: tuple[int, int] = LOOKED) -> float:
    """About what share of the pairs lists leave, by about so ``few`` of the rows and columns."""
    out = LEFT_OUT * TOLERANCES[problem.precision][problem.reduction].absolute
    return rough_share(problem, rows, columns, log_weights, LEAF, HEIGHT, out, few)


def typical(problem: Problem) -> float:
    """What share lists leave of typical data, for the price."""
    return typical_share(problem, LEAF, HEIGHT, LEFT_OUT * TOLERANCES[problem.precision][problem.reduction].absolute)
