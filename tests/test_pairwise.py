"""The selection of few cases from a product."""

import itertools

import pytest
from pairwise import combinations, covering

PRODUCT = list(itertools.product("abcdefgh", range(6), (1.0, 2.0, 3.0), ("x", "y", "z")))  # 432 cases


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("strength", "most"), [(1, 8), (2, 60), (3, 180)])
def test_all_that_some_factors_do_together_is_covered_by_few_cases(strength, most, seed):
    chosen = covering(PRODUCT, strength=strength, seed=seed)
    assert set(chosen) <= set(PRODUCT)
    assert len(chosen) <= most
    wanted, got = ({c for row in rows for c in combinations(row, strength)} for rows in (PRODUCT, chosen))
    assert got == wanted


def test_what_does_not_occur_together_is_not_asked_for():
    rows = [row for row in PRODUCT if row[0] != "a" or row[1] == 0]
    chosen = covering(rows)
    assert {row[1] for row in chosen if row[0] == "a"} == {0}
    assert {c for row in rows for c in combinations(row)} == {c for row in chosen for c in combinations(row)}
