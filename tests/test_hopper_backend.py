"""The Hopper backend without a card: its kernels compile as they must, and its plan and its pieces are right."""

import hashlib
import io
import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("cuda.core")

import torch
from sdkde_hopper import bounds, compiled, info, launch, plan
from sdkde_hopper.backend import HopperBackend
from sdkde_hopper.info import INFO
from sdkde_hopper.wgmma import wgmma

from sdkde_core.choice import registry
from sdkde_core.choice.started import start
from sdkde_core.protocol import Columns, Problem, Reduction

LN2, SQRT_LOG2E = math.log(2.0), math.sqrt(math.log2(math.e))


#: The others are these for other dimensions, with weights or without.
QUICK = ("pack", "exact", "mean_8", "mean_16", "log_sum_16", "laplace_32_weighted", "dense_64", "dense_16_weighted")


@pytest.mark.parametrize(
    "module", [x if x in QUICK else pytest.param(x, marks=pytest.mark.slow) for x in compiled.MODULES]
)
def test_kernels_compile_for_hopper(module):
    """Without spilling; and products run on while the exponentials before them are taken."""
    log = io.StringIO()
    code = compiled.compile_module(module, log)
    assert code.startswith(b"\x7fELF")
    told = log.getvalue()
    assert "sm_90a" in told
    assert not re.findall(r"\(C7\d\d\d\).*", told)  # such as C7512 and C7514: products are serialised
    spills = [int(x) for x in re.findall(r"(\d+) bytes spill stores", told)]
    # That one does in its sums with a running maximum, which few rows take.
    assert spills and max(spills) <= (64 if module == "laplace_64_weighted" else 0)
    kind, *rest = module.split("_")
    threads = {"pack": 256, "exact": 128}.get(kind, 640)
    if kind == "dense":
        threads = 128 * (plan.warpgroups(int(rest[0])) + 1)
    registers = max(int(x) for x in re.findall(r"Used (\d+) registers", told))
    assert registers * threads <= 65536


def test_warpgroups_take_no_more_registers_than_they_are_launched_with():
    """Of what all threads of a program have: one that asks for more waits for ever."""
    for groups, registers in plan.REGISTERS.items():
        launched = 65536 // (128 * (groups + 1)) // 8 * 8
        assert groups * registers + 24 <= (groups + 1) * launched
    assert {plan.warpgroups(width) for width in plan.WIDTHS} <= set(plan.REGISTERS)


def test_shared_memory_fits():
    rings = [plan.dense_ring(x, weighted) for x in plan.WIDTHS for weighted in (False, True)]
    rings += [plan.log_sum_ring(x) for x in plan.WIDTHS]
    assert min(ring.stages for ring in rings) >= 3
    assert max(*plan.MEAN_SHARED.values(), *(ring.shared for ring in rings)) <= 232448  # of a multiprocessor


def test_products_name_their_operands_in_order():
    text = wgmma("add", 16, k=32, kind="e5m2", a="shared")
    assert "m64n16k32.f32.e5m2.e4m3" in text
    assert "%8, %9, p, 1, 1;" in text and '"l"(a), "l"(b), "n"(1)' in text
    assert "p, 1, 1, 1, 0;" in wgmma("add", 16, a="transposed")


@pytest.mark.parametrize("supers", [1, 2, 3, 4, 7, 32, 33])
@pytest.mark.parametrize("most", [40, 16384])
def test_every_pair_comes_once(supers, most, monkeypatch):
    """As a row and a column, in both directions, or in its own super in one."""
    monkeypatch.setattr(plan, "MOST_UNITS", most)
    per, tiles = plan.COLUMNS // plan.ROWS, np.zeros((supers, supers), int)
    for part in plan.launches(supers, 132):
        tables = part.tables
        block, column, flags, _ = tables.units.T
        row = (block // per + part.first) % supers
        column = (column + part.first) % supers
        assert ((row != column) == (flags & 1 == 1)).all()
        count = (flags >> 16) - (flags >> 8 & 255)
        assert (count > 0).all() and not (count % 4).any() and not ((flags >> 8 & 255) % 4).any()
        np.add.at(tiles, (row, column), count)
    both = tiles + tiles.T - np.diag(np.diag(tiles))
    assert (both == per * plan.TILES).all()


@pytest.mark.parametrize(("blocks", "supers"), [(1, 1), (4, 9), (7, 2), (40, 10)])
def test_every_pair_of_two_ranges_comes_once(blocks, supers):
    tables, tiles = plan.rectangle(blocks, supers, 132), np.zeros((blocks, supers), int)
    block, column, flags, slot = tables.units.T
    np.add.at(tiles, (block, column), (flags >> 16) - (flags >> 8 & 255))
    assert (tiles == plan.TILES).all() and (flags & 1).all()
    assert len(tables.row_begin) == blocks + 1 and len(tables.column_begin) == supers + 1
    assert sorted(tables.row_units) == list(range(len(block))) and (slot < tables.slots).all()
    for one in range(supers):
        slots = tables.column_slots[tables.column_begin[one] : tables.column_begin[one + 1]]
        assert set(slots) == set(slot[column == one])


@pytest.mark.parametrize("programs", [8, 132])
def test_no_sum_of_columns_in_fp32_is_of_many_units(programs):
    """Of a card's share of 8 multiprocessors too."""
    for part in plan.launches(128, programs):
        slots = part.tables.units[:, 3]
        assert np.bincount(slots).max() <= plan.MOST_ADDED
        assert (np.diff(slots) >= 0).all()


@pytest.mark.parametrize("width", plan.COSTS)
def test_programs_take_equally_long(width):
    (part,) = plan.launches(32, 132, width)
    flags = part.tables.units[:, 2]
    tiles = (flags >> 16) - (flags >> 8 & 255)
    cost = tiles * np.where(flags & 1, 1.0, plan.COSTS[width].dense)
    each = np.add.reduceat(cost, part.tables.begins[:-1])
    assert each.max() < 1.05 * each.mean()


def _sums(points, supers, programs):
    """Σφ and Σφu as the kernels take them: by units, into partial sums, merged by the tables."""
    n, d = points.shape
    total, ones = np.zeros((n, d + 1)), np.hstack([points, np.ones((n, 1))])
    for part in plan.launches(supers, programs):
        tables = part.tables
        rows = np.full((len(tables.units), plan.ROWS, d + 1), np.nan)
        columns = np.full((tables.slots, plan.COLUMNS, d + 1), np.nan)
        for program in range(programs):
            for u in range(tables.begins[program], tables.begins[program + 1]):
                block, column, flags, slot = tables.units[u]
                first = (block + part.first * (plan.COLUMNS // plan.ROWS)) % (n // plan.ROWS) * plan.ROWS
                start = (column + part.first) % supers * plan.COLUMNS
                some = slice(64 * (flags >> 8 & 255), 64 * (flags >> 16))
                i, j = slice(first, first + plan.ROWS), slice(start + some.start, start + some.stop)
                phi = np.exp(-0.5 * ((points[i, None] - points[None, j]) ** 2).sum(2))
                rows[u] = phi @ ones[j]
                if flags & 2:
                    columns[slot] = 0.0
                if flags & 1:
                    columns[slot, some] += phi.T @ ones[i]
        for own in range(n // plan.ROWS):
            block = (own - part.first * (plan.COLUMNS // plan.ROWS)) % (n // plan.ROWS)
            units = tables.row_units[tables.row_begin[block] : tables.row_begin[block + 1]]
            total[own * plan.ROWS : (own + 1) * plan.ROWS] += rows[units].sum(0)
        for own in range(supers):
            column = (own - part.first) % supers
            slots = tables.column_slots[tables.column_begin[column] : tables.column_begin[column + 1]]
            total[own * plan.COLUMNS : (own + 1) * plan.COLUMNS] += columns[slots].sum(0)
    return total


@pytest.mark.parametrize(("supers", "most", "added"), [(1, 16384, 128), (3, 16384, 128), (4, 20, 128), (5, 16384, 3)])
def test_partial_sums_make_the_whole(supers, most, added, monkeypatch):
    monkeypatch.setattr(plan, "MOST_UNITS", most)
    monkeypatch.setattr(plan, "MOST_ADDED", added)
    points = np.random.default_rng(supers).normal(size=(supers * plan.COLUMNS, 1))
    phi = np.exp(-0.5 * (points - points.T) ** 2)
    want = phi @ np.hstack([points, np.ones_like(points)])
    np.testing.assert_allclose(_sums(points, supers, 5), want, rtol=1e-12, atol=1e-9)


def _pieces(points, step, offset=0.0):
    """v in two pieces and its constant in three, as pieces.cuh has them; float64."""
    v = SQRT_LOG2E * points
    hi = (np.rint(v / step) * step).astype(np.float16).astype(float)
    lo = (v - hi).astype(np.float16).astype(float)
    c = np.rint((offset - 0.5 * ((hi + lo) ** 2).sum(1)) / step**2) * step**2
    c1 = c.astype(np.float16).astype(float)
    c2 = (c - c1).astype(np.float16).astype(float)
    c3 = (c - c1 - c2).astype(np.float16).astype(float)
    return hi, lo, c1 + c2 + c3


@pytest.mark.parametrize("extent", [0.5, 3.0, 9.4, 12.0, bounds.MOST_EXTENT])
@pytest.mark.parametrize("d", [1, 16, 64])
def test_exponents_of_pieces_are_as_near_as_the_bounds_say(d, extent):
    rng = np.random.default_rng(d)
    points = rng.normal(size=(300, d)) * rng.random(d) ** 2  # some dimensions have most of it
    points *= extent * rng.random((300, 1)) ** 0.1 / np.linalg.norm(points, axis=1, keepdims=True)
    points[1::2] = points[::2]  # duplicates
    points[1::4] += 1e-3 * rng.normal(size=(75, d)) / math.sqrt(d)
    step = bounds.grid_step(extent * 1.01)
    hi, lo, c = _pieces(points, step)
    assert np.abs(np.rint(hi / step) * step - hi).max() == 0
    # Sixteen dimensions at a time, the constants after half of them, are multiples of step²: a Tensor Core truncates
    # sums to 24 bits.
    total = np.zeros((300, 300))
    constants = c[:, None] + c
    blocks = [hi[:, k : k + 16] @ hi[:, k : k + 16].T for k in range(0, d, 16)]
    for term in (*blocks[: (len(blocks) + 1) // 2], constants, *blocks[(len(blocks) + 1) // 2 :]):
        exact = total + term
        assert np.abs(exact).max() <= 2.0**25 * step**2
        unit = np.where(np.abs(exact) >= 2.0**24 * step**2, 2.0, 1.0) * step**2
        total = np.trunc(exact / unit) * unit
    got = total + hi @ lo.T + lo @ hi.T + lo @ lo.T
    want = -0.5 * math.log2(math.e) * ((points[:, None] - points[None]) ** 2).sum(2)
    near = want > -60
    assert LN2 * np.abs(got - want)[near].max() <= (2.5e-5 if d <= 16 else 4.2e-5) + 1e-6 * 60


def test_weights_in_two_pieces_are_near_where_rows_are_kept():
    """Down to a mean weight of 2⁻¹⁵ of the largest, what is multiplied by φ loses 1e-5 of a bandwidth at most."""
    rng = np.random.default_rng(0)
    v = rng.uniform(-22.0, 22.0, 100_000)
    w = 2.0 ** (bounds.WEIGHT_BITS - rng.uniform(0.0, 15.0, len(v)))
    assert (np.abs(w * v) < 65504).all()
    near = (w * v).astype(np.float16).astype(float)
    rest = (w * v - near).astype(np.float16).astype(float)
    assert (np.abs(near + rest - w * v) <= np.maximum(w * 2.0**-17.5, 2.0**-22 * np.abs(w * v))).all()


def test_two_pieces_of_phi_hold_fifteen_bits():
    """The second in e5m2, made of half precision by adding half a unit of the upper byte; down to r = 4.7."""
    phi = np.exp2(np.random.default_rng(0).uniform(-16.0, 0.0, 100_000) + bounds.SCALE_BITS).astype(np.float32)
    near = phi.astype(np.float16)
    rest = (phi - near.astype(np.float32)).astype(np.float16)
    byte = ((rest.view(np.uint16).astype(np.uint32) + 0x80) & 0xFF00).astype(np.uint16).view(np.float16)
    error = (near.astype(float) + byte.astype(float)) / phi - 1.0
    assert np.abs(error).max() <= 2.0**-15 * 1.01


@pytest.mark.parametrize(("bits", "most"), [(0.3, 2.0**-17), (12.6, 2.0**-17), (20.4, 4e-5)])
def test_duplicates_are_not_rounded_alike(bits, most):
    """As symmetric.cu sets φ apart by ``share``; 2^bits duplicates weigh as much as a row itself."""
    source = (Path(compiled.__file__).parent / "device" / "symmetric.cu").read_text()
    factor, mask, unit = re.search(r"return 1\.0 - \(point \* (\d+)u & (\d+)u\) \* 0x1p(-\d+);", source).groups()
    share = 1.0 - (np.arange(1 << 14) * int(factor) & int(mask)) * 2.0 ** int(unit)
    assert len(np.unique(share)) == int(mask) + 1
    assert (share.astype(np.float16) == share).all()
    assert plan.COLUMNS % (int(mask) + 1) == 0  # ranges of points begin with a super
    errors = {}
    for name, w in ("alike", np.ones_like(share)), ("apart", share):
        found = []
        for more in np.linspace(0.0, 1.0, 64):  # φ of any leading digits
            phi = (2.0 ** (bounds.SCALE_BITS - bits - more) / w).astype(np.float32)
            near = phi.astype(np.float16)
            rest = (phi - near.astype(np.float32)).astype(np.float16)
            byte = ((rest.view(np.uint16).astype(np.uint32) + 0x80) & 0xFF00).astype(np.uint16).view(np.float16)
            pieces = near.astype(float) + byte.astype(float)
            found.append(pieces @ w / (len(w) * 2.0 ** (bounds.SCALE_BITS - bits - more)) - 1.0)
        errors[name] = np.abs(found).max()
    assert errors["apart"] <= most
    assert errors["alike"] > 4 * errors["apart"]


@pytest.mark.parametrize("spread", [0.5, 2.0, 5.0])
@pytest.mark.parametrize(("d", "distance"), [(2, 3.0), (16, 5.0)])
def test_rows_that_weights_leave_to_the_pieces_are_within_the_tolerance(d, distance, spread):
    """As dense.cu sums them and pack.cu lists the others, products and sums in float64; heaps of duplicates."""
    rng, n = np.random.default_rng([d, int(spread * 10)]), 600
    centres = rng.normal(size=(12, d))
    away = np.repeat(rng.normal(size=(12, d)), 50, 0)
    points = np.repeat(centres, 50, 0) + distance * away / np.linalg.norm(away, axis=1, keepdims=True)
    points[::50] = centres  # alone, with a heap near it
    weights = np.exp(spread * rng.normal(size=n))
    weights /= weights.max()
    v = SQRT_LOG2E * points
    phi = np.exp2(-0.5 * ((v[:, None] - v[None]) ** 2).sum(2))
    x = (phi * 2.0**bounds.SCALE_BITS).astype(np.float32)
    near = x.astype(np.float16)
    pieces = near.astype(float) + (x - near.astype(np.float32)).astype(np.float16).astype(float)
    given = np.hstack([v, np.ones((n, 1))]) * (weights * 2.0**bounds.WEIGHT_BITS)[:, None]
    first = given.astype(np.float16).astype(float)
    second = (given - first).astype(np.float16).astype(float)
    sums = pieces @ (first + second)
    total, count = sums[:, -1], pieces.sum(1)
    scale = 2.0 ** (bounds.SCALE_BITS + bounds.WEIGHT_BITS)
    kept = (total >= count * 2.0**-5) & (total >= min(weights.sum(), 131072.0) * 2.0**-22 * scale)
    assert kept.mean() > (0.3 if spread > 2 else 0.9)
    exact = (phi * weights) @ v / (phi @ weights)[:, None]
    off = np.linalg.norm(sums[:, :-1] / total[:, None] - exact, axis=1) / SQRT_LOG2E
    assert off[kept].max() < 3e-5


def test_what_is_declined_and_why():
    def asked(reduction=Reduction.MEAN, d=16, extent=10.0, same=True, *requires):
        requires = frozenset(requires)
        problem = Problem(
            reduction, 5000, 5000, d, precision="fast", device="cuda:0", same=same, extent=extent, requires=requires
        )
        return INFO.supports(problem)

    assert asked().ok and asked(Reduction.LOG_SUM, same=False).ok
    for reduction in Reduction:
        assert asked(reduction, 64, 18.0, True, "weights").ok
    assert asked(Reduction.LOG_SUM, 3, 10.0, False, "exclude_self").ok
    assert "64 dimensions, not 65" in asked(d=65).reason
    assert "not of other rows" in asked(same=False).reason
    assert "own column" in asked(Reduction.MEAN, 3, 10.0, True, "exclude_self").reason
    assert "up to 18.8 bandwidths, not 19" in asked(extent=19.0).reason


def test_exponentials_that_are_priced_are_those_that_are_taken(monkeypatch):
    monkeypatch.setattr(info, "WAITS", dict.fromkeys(info.WAITS, (1.0, 1.0)))

    def exponentials(**more):
        given = {"reduction": Reduction.MEAN, "m": 4000, "n": 4000, "d": 16, "same": True, "precision": "fast"} | more
        return INFO.work(Problem(**given, extent=9.0), None).exps / (given["m"] * given["n"])

    assert set(plan.COSTS) == set(plan.MEAN_SHARED)
    assert exponentials() == 0.5  # for its row and its column
    assert exponentials(d=17) == exponentials(m=1000) == exponentials(requires=frozenset({"weights"})) == 1.0


def _parameters(module, name):
    """The types of a kernel's parameters, from its source: pointers, or ``int`` and ``double``."""
    source = re.sub(r"__launch_bounds__\(.*\)", "", compiled.source(module))
    given = re.search(rf"\b{name}\(([^)]*)\) {{", source[source.index('extern "C" __global__') :]).group(1)
    return ["pointer" if "*" in x else x.split()[0] for x in given.split(",")]


class _Launched:
    """Takes the place of :func:`sdkde_hopper.compiled.kernel`: checks what kernels are given, and runs none."""

    def __init__(self):
        self.names = []

    def __call__(self, module, name, threads, shared=0):
        def launch(programs, *arguments):
            parameters = _parameters(module, name)
            kinds = {int: "int", float: "double"}
            assert [kinds.get(type(x), "pointer") for x in arguments] == parameters, name
            assert programs > 0
            self.names.append(name)

        return launch


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("d", [3, 16, 17, 64])
@pytest.mark.parametrize("reduction", list(Reduction))
def test_kernels_are_launched_with_what_they_take(reduction, d, weighted, monkeypatch):
    launched, n, m = _Launched(), 2100, 40
    monkeypatch.setattr(launch, "kernel", launched)
    monkeypatch.setattr(launch, "_programs", lambda device: 132)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(synchronize=lambda: None))
    monkeypatch.setattr(plan, "MOST_UNITS", 9)  # in several launches
    mean, requires = reduction is Reduction.MEAN, frozenset({"weights"} if weighted else ())
    problem = Problem(reduction, n if mean else m, n, d, precision="fast", same=mean, requires=requires, extent=9.0)
    points = torch.rand(n, d, dtype=torch.float64)
    backend = HopperBackend()
    state = backend.prepare(problem, Columns(points, torch.full((n,), -7.0, dtype=torch.float64)))
    got = backend.reduce(problem, None if mean else points[:m], state)
    assert got.log_sum.shape == (problem.m,)
    part = backend.reduce(replace(problem, m=1052, same=True), None, state, 1048)
    assert part.log_sum.shape == (1052,)
    if not mean:
        out = backend.reduce(replace(problem, requires=requires | {"exclude_self"}), points[:m], state, -5)
        assert (out.sign is None) == (reduction is Reduction.LOG_SUM)
        return
    both = d <= 16 and not weighted
    assert ("mean_symmetric" in launched.names) == both and ("mean_exact" in launched.names) == weighted
    for rows, columns in (((0, 1024), (1024, 2100)), ((1024, 2100), (0, 1024)), ((1024, 2100), (1024, 2100))):
        one, other = backend.reduce_pairs(problem, state, rows, columns)
        assert one.shift.shape == (rows[1] - rows[0], d)
        assert other.shift.shape == (columns[1] - columns[0], d)


CODE = """
import logging, sys
from sdkde_hopper import compiled
logging.basicConfig(level="INFO", stream=sys.stdout)
compiled.compile_module = lambda module: print("compiles") or b"\\x7fELF of " + module.encode()
print(compiled._code("pack"))
"""


def _compiles(folder, printed=b"\x7fELF of pack", **environment):
    """Whether a process compiles, NVRTC replaced; what else it says."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder), **environment}
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, env=environment, check=True)
    *said, last = done.stdout.splitlines()
    assert last == repr(printed), done.stdout
    return "compiles" in said, [line for line in said if line != "compiles"]


@pytest.mark.slow
def test_compiled_code_is_kept_and_compiled_anew_where_it_is_another(tmp_path):
    """Of code that has changed a card knows nothing: it runs it."""
    assert _compiles(tmp_path) == (True, [])
    assert _compiles(tmp_path) == (False, [])
    folder = tmp_path / "sdkde" / "hopper"
    assert folder.stat().st_mode & 0o777 == 0o700
    (kept,) = folder.iterdir()
    whole = kept.read_bytes()
    flipped = whole[:-3] + bytes([whole[-3] ^ 8]) + whole[-2:]
    others = hashlib.sha256(b"other" + whole[32:]).digest() + whole[32:]
    for damaged in (flipped, others):
        kept.write_bytes(damaged)
        assert _compiles(tmp_path) == (True, [])
        assert kept.read_bytes() == whole
    folder.chmod(0o777)
    assert _compiles(tmp_path) == (False, [])
    assert folder.stat().st_mode & 0o777 == 0o700


def test_another_compilers_code_is_another_file(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = []
    monkeypatch.setattr(compiled, "compile_module", lambda module: made.append(module) or b"\x7fELF")
    for version in ("13.0", "13.0", "99.0"):
        monkeypatch.setattr(compiled, "nvrtc_version", lambda version=version: version)
        compiled._code("pack")
    assert len(made) == 2 == len(list((tmp_path / "sdkde" / "hopper").iterdir()))


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix" or os.getuid() != 0, reason="only root can give a folder away")
def test_a_folder_that_is_another_users_is_not_trusted(tmp_path):
    assert _compiles(tmp_path) == (True, [])
    folder = tmp_path / "sdkde" / "hopper"
    (kept,) = folder.iterdir()
    os.chown(folder, 1, 1)
    compiles, (said,) = _compiles(tmp_path)
    assert compiles and f"{folder} is another user's; set XDG_CACHE_HOME" in said
    assert list(folder.iterdir()) == [kept]


def test_parts_of_the_columns_fill_the_card():
    assert plan.parts(16, 512, 132) == 8  # 4096 rows, 32768 columns: 128 programs of 132
    assert plan.parts(128, 512, 132) == 1
    assert plan.parts(1, 3, 132) == 1
    assert plan.parts(5462, 16384, 132) == 1  # a million rows: partial sums of many parts would not fit


def test_what_is_missing_is_named_with_its_mend(monkeypatch):
    """PyTorch brings packages named ``cuda`` without this one."""
    monkeypatch.setattr(registry, "made", {})
    for name in [name for name in sys.modules if name.startswith("sdkde_hopper.") and name != INFO.__module__]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "cuda.core", None)
    reason = start(INFO, "cuda:0")[1].reason
    assert "pip install 'sdkde-core[hopper]'" in reason


def test_an_older_driver_is_told_apart(monkeypatch):
    success = compiled.driver.CUresult.CUDA_SUCCESS
    monkeypatch.setattr(compiled, "nvrtc_version", lambda: "13.0")
    monkeypatch.setattr(compiled.driver, "cuDriverGetVersion", lambda: (success, 13000))
    compiled.check_driver()
    monkeypatch.setattr(compiled.driver, "cuDriverGetVersion", lambda: (success, 12080))
    with pytest.raises(RuntimeError, match=r"NVRTC is 13\.0 and the driver knows CUDA up to 12\.8"):
        compiled.check_driver()
