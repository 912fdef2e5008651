"""What the Triton backend decides on the host: formulas, grids, splits, launch parameters."""

import math
import sys
from dataclasses import replace

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch
import triton
from sdkde_triton import backend, bounds, compiled, kernels, space, tunables
from sdkde_triton.backend import TritonBackend
from sdkde_triton.info import INFO
from sdkde_triton.launch import PARTIAL_BYTES, most_parts, slab_rows, splits
from triton.errors import TritonError

from sdkde_core import SdkdeWarning, tuning
from sdkde_core.choice import cards, cost
from sdkde_core.plugin import grids
from sdkde_core.protocol import Columns, Problem, Reduction


def problem(reduction="log_sum", m=1000, n=2000, d=16, precision="fast", **more):
    return Problem(Reduction(reduction), m, n, d, precision=precision, device="cuda:0", **more)


def test_tritons_hash_of_itself_is_kept_for_its_files(monkeypatch, tmp_path):
    asked = []

    def made():
        asked.append(1)
        return f"{triton.__version__}-made"

    def found():
        asked.clear()
        monkeypatch.setattr(compiled.cache, "triton_key", made)
        one = compiled.hash_of_triton()
        assert one == compiled.cache.triton_key()
        return one.removeprefix(triton.__version__), bool(asked)

    monkeypatch.setattr(compiled, "cache_folder", lambda: tmp_path / "sdkde")
    assert [found(), found()] == [("-made", True), ("-made", False)]
    (kept,) = (tmp_path / "sdkde" / "triton").iterdir()
    right = kept.read_bytes()
    for spoilt in (b"", right[:-1], right + b"\n", b"\xff" + right):
        kept.write_bytes(spoilt)
        assert [found(), found()] == [("-made", True), ("-made", False)]
    monkeypatch.setattr(compiled, "cache_folder", lambda: kept)  # no folder
    assert found() == ("-made", True)


def test_lists_are_priced_where_they_pay():
    """Half of the pairs of a wide cloud take less; few pairs, or those of a narrow cloud, are all summed."""

    def asked(extent, n=2**20, d=3, **more):
        return problem("mean", m=n, n=n, d=d, same=True, extent=extent, **more)

    def price(problem):  # besides launches
        return cost.work_seconds(replace(INFO.work(problem, None), launches=0), cards.gpu("h200").processor)

    for precision, extent in (("fast", 40.0), ("high", 30.0)):
        wide, narrow = (asked(e, precision=precision) for e in (extent, 2.0))
        assert price(wide) < 0.7 * price(narrow) and "% of the pairs matter" in INFO.supports(wide).reason
        assert "%" not in INFO.supports(narrow).reason
    for more in ({"n": 2**13}, {"d": 64}, {"d": 16}):
        assert "%" not in INFO.supports(asked(20.0, **more)).reason


@pytest.mark.parametrize("extent", [0.0, 1.0, 15.0, 100.0])
@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("span", [0.0, 921.0])
@pytest.mark.parametrize("d", [16, 17])
def test_sums_on_the_grid_are_exact_in_24_bits(d, extent, shifted, span):
    step = bounds.grid_step(problem("mean" if shifted else "log_sum", d=d), extent, span)
    assert math.log2(step).is_integer()
    largest = 1.4427 * (extent**2 + 2 * span)
    assert 2.0**25 * step**2 >= largest
    if d > 16 or step > 2.0**-8:
        assert 2.0**24 * step**2 >= largest


@pytest.mark.parametrize("reduction", list(Reduction))
@pytest.mark.parametrize("d", [1, 2, 3, 16, 128])
@pytest.mark.parametrize("same", [False, True])
def test_the_formula_changes_at_the_limit(reduction, d, same):
    asked = problem(reduction, d=d, same=same)
    limit = INFO.extent_limit(asked)
    inside = problem(reduction, d=d, same=same, extent=min(limit, 1e9))
    beyond = problem(reduction, d=d, same=same, extent=1.01 * min(limit, 1e9))
    if limit < 1e9:
        assert "Tensor Cores" in INFO.supports(inside).reason
        assert "direct differences" in INFO.supports(beyond).reason
    assert INFO.supports(beyond).ok


def test_what_it_does_not_do_it_declines():
    assert "4096" in INFO.supports(problem(d=5000)).reason
    assert not INFO.supports(problem(d=5000)).ok


@pytest.mark.parametrize("rows", [1, 63, 4096, 32768, 1_000_000])
@pytest.mark.parametrize("n", [1, 255, 32768, 1_000_000, 100_000_000])
@pytest.mark.parametrize("slots", [8, 132, 800])
@pytest.mark.parametrize("most", [512, 65536])
def test_splits_cover_the_columns_once(rows, n, slots, most):
    parts, length = splits(rows, n, 64, 128, slots, 64, most)
    assert length % 128 == 0
    assert (parts - 1) * length < n <= parts * length
    assert length <= max(most, 128 * -(-n // (65535 * 128)))
    assert parts <= 65535  # of a grid


@pytest.mark.parametrize("rows", [1, 1024, 32768, 5_000_000])
@pytest.mark.parametrize("n", [1000, 32768, 1_000_000])
@pytest.mark.parametrize("bytes_per_row", [8, 516, 8200])
@pytest.mark.parametrize("columns", [1024, 4096, 65536])
def test_slabs_bound_the_partial_results(rows, n, bytes_per_row, columns):
    size = slab_rows(rows, n, bytes_per_row, columns)
    assert 1 <= size <= rows
    fewest = -(-n // columns)
    assert size * fewest * bytes_per_row <= 1.1 * PARTIAL_BYTES or size <= 256
    assert size == rows or size * fewest >= 64 * 132  # fills a card
    assert (
        size * most_parts(size, bytes_per_row) * bytes_per_row <= PARTIAL_BYTES or most_parts(size, bytes_per_row) == 1
    )
    assert rows % size == 0 or rows % size > size // 2 or -(-rows // size) > 2  # no sliver is left over


@pytest.mark.parametrize("capability", [80, 86, 89, 90, 100, 103, 120])
@pytest.mark.parametrize("columns", [16, 32, 64, 128, 832])
@pytest.mark.parametrize("pieces", [2, 3])
@pytest.mark.parametrize("kernel", ["mean", "log_sum", "blocked", "stored", "weighted_sum"])
def test_defaults_fit_every_architecture(kernel, pieces, columns, capability):
    if kernel in ("mean", "log_sum") and columns > 128:
        pytest.skip("comes in blocks")
    if kernel == "mean" and columns * pieces > 256 and not 90 <= capability < 100:
        pytest.skip("is stored")
    for merged in (False, True) if columns == 16 else (False,):
        config = space.default(kernel, columns, capability, merged, pieces)
        assert space.fits(kernel, config, columns, capability, pieces), config


def test_nothing_is_tuned_for_cards_that_it_does_not_run_on():
    given = problem("mean")
    (kernel, *_) = tunables.SPACE.kernels(given)
    for architecture, runs in (("sm_70", False), ("sm_75", False), ("sm_80", True), ("sm_121", True)):
        reason = tunables.SPACE.limit(kernel, tunables.SPACE.default(kernel, given, architecture), given, architecture)
        assert (reason is None) is runs, architecture
        assert runs or "needs compute capability 8.0" in reason


@pytest.mark.parametrize(
    "config", [{"block_m": 64}, {"block_m": 60, "block_n": 64, "num_warps": 4, "num_stages": 2}, {"colour": 1}]
)
def test_a_tuned_configuration_that_is_none_is_ignored(config, monkeypatch, untold):
    lookup = lambda query, problem, accept: (config, "exact") if accept(config) else None  # noqa: E731
    monkeypatch.setattr(tuning, "_lookup", lambda: lookup)
    processor = grids.Card(132, 90, 1 << 16, 227 << 10, 2048)
    with pytest.warns(SdkdeWarning, match="configuration of mean is ignored"):
        assert compiled.configuration("mean", problem("mean"), 16, processor) == space.default("mean", 16, 90)
    assert compiled.configuration("mean", problem("mean"), 16, processor) == space.default("mean", 16, 90)


def test_what_is_tried_is_launched_or_refused():
    config = {"block_m": 64, "block_n": 32, "num_warps": 4, "num_stages": 2}
    processor = grids.Card(132, 90, 1 << 16, 227 << 10, 2048)
    with tuning.using({"mean": config}):
        assert compiled.configuration("mean", problem("mean"), 16, processor)._asdict() == config
    with (
        tuning.using({"mean": config | {"block_m": 256, "block_n": 256}}),
        pytest.raises(ValueError, match="cannot be"),
    ):
        compiled.configuration("mean", problem("mean"), 128, processor)
    assert compiled.configuration("mean", problem("mean"), 16, processor) == space.default("mean", 16, 90)


def test_a_tuned_configuration_that_does_not_compile_is_not_used_again(monkeypatch, untold):
    """Where it is the default as well, nothing is left to try."""

    def fails(*_):
        raise TritonError("out of resource")

    given, processor, config = (
        problem("mean"),
        grids.Card(132, 90, 1 << 16, 227 << 10, 2048),
        space.default("mean", 16, 90),
    )
    lookup = lambda query, problem, accept: (config._asdict(), "exact") if accept(config._asdict()) else None  # noqa: E731
    for where, name, value in (
        (tuning, "_lookup", lambda: lookup),
        (tuning, "_rejected", set()),
        (compiled, "_compile", fails),
        (torch.cuda, "current_device", lambda: 0),
    ):
        monkeypatch.setattr(where, name, value)
    asked = kernels.mean_kernel, (torch.float16,), (), config
    assert compiled.configuration("mean", given, 16, processor) == config
    with pytest.warns(SdkdeWarning, match="mean cannot run as tuned"), pytest.raises(compiled.LaunchFailed):
        compiled.compiled(*asked)
    assert compiled.configuration("mean", given, 16, processor) == config
    with pytest.raises(TritonError):
        compiled.compiled(*asked)


# --- a machine without a compiler -----------------------------------------------------------------------------------


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere Triton brings a compiler of its own")
def test_no_c_compiler_is_said_by_the_probe(monkeypatch, tmp_path):
    """A card that is told of, and a path without gcc and clang: unless CC names one, or Triton has compiled before."""
    told = {"is_available": True, "device_count": 1, "get_device_capability": (9, 0), "get_device_name": "a card"}
    for name, value in told.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr("sdkde_triton.backend.INTERPRETED", False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    support = TritonBackend().probe("cuda:0")
    assert not support.ok
    assert "no C compiler: install gcc, or set CC" in support.reason
    (tmp_path / "hash").mkdir()
    (tmp_path / "hash" / "cuda_utils.so").touch()
    assert TritonBackend().probe("cuda:0").ok
    (tmp_path / "hash" / "cuda_utils.so").unlink()
    monkeypatch.setenv("CC", "cc")
    assert TritonBackend().probe("cuda:0").ok


def test_a_rehearsed_pass_begins_to_compile_all_its_kernels(monkeypatch):
    begun = set()
    monkeypatch.setattr(compiled, "compiled", lambda kernel, *_: begun.add(kernel.__name__))
    given, points = problem("mean", m=64, n=64, d=4, same=True, extent=8.0), torch.zeros((64, 4), dtype=torch.float64)
    state = TritonBackend().prepare(given, Columns(points, points[:, 0].contiguous()))
    compiled.rehearse(backend._listed, given, backend._way(given, 8.0, 0.0, True), points, state, 1.0)
    names = ("pack", "near", "log_sum", "finish_log_sum", "choose", "list", "mean", "finish_mean")
    assert begun == {f"{name}_kernel" for name in names}
