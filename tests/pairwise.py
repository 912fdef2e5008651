"""Few cases in place of a full product: all that any few factors can do together occurs in one of them."""

import itertools
import random
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence

import pytest


def combinations(row: Sequence[Hashable], strength: int = 2) -> Iterator[tuple]:
    """Values of any ``strength`` factors of a case, each with its factor's index."""
    return itertools.combinations(enumerate(row), strength)


def covering(rows: Sequence[tuple], *, strength: int = 2, seed: int = 0) -> list[tuple]:
    """Select cases in which every combination of ``strength`` values that occurs in ``rows`` occurs, too.

    Greedy: a combination that is still missing is drawn, and of some cases that have it that one is taken which
    adds most. Rows of fewer factors than ``strength`` are all taken. The same seed selects the same cases.
    """
    rng = random.Random(seed)
    short = [row for row in rows if len(row) < strength]
    having = defaultdict(list)
    for row in rows:
        for combination in combinations(row, strength):
            having[combination].append(row)
    missing = dict.fromkeys(having)  # in the order of the rows: that of a set would differ between processes
    chosen = []
    while missing:
        candidates = having[next(iter(missing))]
        candidates = rng.sample(candidates, min(len(candidates), 40))
        best = max(candidates, key=lambda row: sum(c in missing for c in combinations(row, strength)))
        chosen.append(best)
        for combination in combinations(best, strength):
            missing.pop(combination, None)
    return short + chosen


def cases(*factors: Sequence, strength: int = 2) -> list:
    """All of a product as pytest's parameters, of which `make test` has a covering selection: the others are slow."""
    product = list(itertools.product(*factors))
    chosen = set(covering(product, strength=strength))
    return [pytest.param(*row, marks=[] if row in chosen else pytest.mark.slow) for row in product]
