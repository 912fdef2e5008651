"""What the Triton backend decides on the host: formulas, grids, splits, launch parameters."""

import itertools
import logging
import math
from types import SimpleNamespace

import pytest

pytest.importorskip("triton")

from sdkde_triton import bounds, launch, space
from sdkde_triton.grid import MOST_COLUMNS, Processor, slabs, splits
from sdkde_triton.info import INFO

from sdkde_core.protocol import Problem, Reduction, Work


def problem(reduction="log_sum", m=1000, n=2000, d=16, **more):
    return Problem(Reduction(reduction), m, n, d, level="fast", device="cuda:0", **more)


@pytest.mark.parametrize("extent", [0.0, 1.0, 15.0, 100.0])
@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("span", [0.0, 921.0])
@pytest.mark.parametrize("d", [16, 17])
def test_sums_on_the_grid_are_exact_in_24_bits(d, extent, shifted, span):
    step = bounds.grid_step(d, extent, shifted=shifted, log_weight_span=span)
    assert math.log2(step).is_integer()
    largest = 1.4427 * (extent**2 + 2 * span)
    assert 2.0**25 * step**2 >= largest
    if d > 16 or step > 2.0**-8:
        assert 2.0**24 * step**2 >= largest


def test_what_a_row_shares_with_its_duplicates_is_left_out_only_where_it_is_small():
    def form(reduction, d, extent, **more):
        asked = problem(reduction, d=d, extent=extent, **more)
        return bounds.form(asked, extent, bounds.grid_step(d, extent, shifted=bounds.shifts_rows(asked)))

    assert [form("mean", 16, extent, same=True) for extent in (5.0, 13.0, 30.0)] == [0, 1, 2]
    assert form("mean", 16, 5.0) == 2
    assert [form("log_sum", d, 13.0) for d in (16, 128)] == [0, 2]
    assert form("laplace", 64, 13.0) >= form("log_sum", 64, 13.0)


def test_small_data_get_a_finer_grid():
    steps = [bounds.grid_step(16, extent, shifted=False) for extent in (0.1, 5.0, 15.0, 30.0, 70.0)]
    assert steps == sorted(steps)
    assert steps[0] < steps[-1]


@pytest.mark.parametrize("reduction", list(Reduction))
@pytest.mark.parametrize("d", [1, 2, 3, 16, 128])
@pytest.mark.parametrize("same", [False, True])
def test_the_formula_changes_at_the_limit(reduction, d, same):
    asked = problem(reduction, d=d, same=same)
    limit = INFO.extent_limit(asked)
    inside = problem(reduction, d=d, same=same, extent=min(limit, 1e9))
    beyond = problem(reduction, d=d, same=same, extent=1.01 * min(limit, 1e9))
    if limit < 1e9:
        assert "float64" not in INFO.supports(inside).reason
        assert "float64" in INFO.supports(beyond).reason
    assert INFO.supports(beyond).ok


def test_what_it_does_not_do_it_declines():
    assert "128 dimensions" in INFO.supports(problem(d=129)).reason
    assert not INFO.supports(problem(d=129)).ok


def test_rows_that_may_lie_far_from_every_column_are_shifted():
    assert not bounds.shifts_rows(problem("mean", same=True))
    assert bounds.shifts_rows(problem("mean"))
    assert bounds.shifts_rows(problem("mean", same=True, requires=frozenset({"weights"})))
    assert not bounds.shifts_rows(problem("log_sum"))


@pytest.mark.parametrize("rows", [1, 63, 4096, 32768, 1_000_000])
@pytest.mark.parametrize("n", [1, 255, 32768, 1_000_000])
@pytest.mark.parametrize("slots", [8, 132, 800])
def test_splits_cover_the_columns_once(rows, n, slots):
    parts, length = splits(rows, n, 64, 128, slots)
    assert length % 128 == 0
    assert (parts - 1) * length < n <= parts * length
    assert length <= MOST_COLUMNS
    assert parts <= 65535


def test_few_rows_still_fill_the_card():
    parts, _ = splits(512, 1_000_000, 64, 128, 528)
    assert 8 * parts >= 400


def test_slabs_cover_the_rows_in_order():
    for rows in (1, 1024, 5_000_000):
        found = list(slabs(rows, 5000))
        assert found[0].start == 0
        assert found[-1].stop == rows
        assert all(a.stop == b.start for a, b in itertools.pairwise(found))


@pytest.mark.parametrize("capability", [80, 86, 89, 90, 100, 103, 120])
@pytest.mark.parametrize("columns", [16, 32, 64, 128])
@pytest.mark.parametrize("kernel", ["triton.mean", "triton.log_sum"])
def test_defaults_fit_every_architecture(kernel, columns, capability):
    for merged in (False, True) if columns == 16 else (False,):
        config = space.default(kernel, columns, capability, merged)
        assert space.fits(kernel, config, columns, capability), config
    assert list(space.candidates(kernel, columns, capability))


@pytest.mark.parametrize(
    "config", [{"block_m": 64}, {"block_m": 60, "block_n": 64, "num_warps": 4, "num_stages": 2}, {"colour": 1}]
)
def test_a_tuned_configuration_that_is_none_is_ignored(config, monkeypatch, caplog):
    monkeypatch.setattr(launch, "tuned", lambda kernel, problem: SimpleNamespace(config=config))
    processor = Processor(132, 90, 1 << 16, 227 << 10, 2048)
    with caplog.at_level(logging.WARNING, logger="sdkde"):
        assert launch.configuration("triton.mean", problem("mean"), 16, processor) == space.default(
            "triton.mean", 16, 90
        )
    assert "ignored" in caplog.text


def test_a_tuned_configuration_is_used(monkeypatch):
    config = {"block_m": 128, "block_n": 32, "num_warps": 8, "num_stages": 2}
    monkeypatch.setattr(launch, "tuned", lambda kernel, problem: SimpleNamespace(config=config))
    processor = Processor(132, 90, 1 << 16, 227 << 10, 2048)
    assert launch.configuration("triton.mean", problem("mean"), 16, processor).to_dict() == config


@pytest.mark.parametrize("d", [1, 2, 8, 16, 100])
@pytest.mark.parametrize("extent", [1.0, 1e4])
@pytest.mark.parametrize("reduction", list(Reduction))
def test_work_grows_with_the_pairs(reduction, extent, d):
    work = [INFO.work(problem(reduction, m=m, n=m, d=d, extent=extent), None) for m in (1000, 2000)]
    assert all(isinstance(w, Work) for w in work)
    assert work[1].exps == 4 * work[0].exps >= 4e6
    assert sum(work[1].matrix_flops.values()) == 4 * sum(work[0].matrix_flops.values())
