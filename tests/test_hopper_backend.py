"""The Hopper backend without a card: its kernels compile as they must, and its plan and its pieces are right."""

import hashlib
import io
import itertools
import math
import os
import re
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("cuda.core")

import torch
from sdkde_hopper import bounds, compiled, launch, plan
from sdkde_hopper.backend import HopperBackend
from sdkde_hopper.info import INFO

from sdkde_core.choice import cards, cost, registry
from sdkde_core.choice.registry import start
from sdkde_core.protocol import Columns, Problem, Reduction

#: The others are these for other dimensions, with weights or without.
QUICK = "pack", "mean_8", "mean_16_high", "log_sum_16", "laplace_32_weighted", "dense_16", "dense_64_weighted_high"


@pytest.mark.parametrize(
    "module", [x if x in QUICK else pytest.param(x, marks=pytest.mark.slow) for x in compiled.MODULES]
)
def test_kernels_compile_for_hopper(module, tmp_path):
    """Without spilling; and products run on while the exponentials before them are taken."""
    log = io.StringIO()
    code = compiled.compile_module(module, log)
    assert code.startswith(b"\x7fELF")
    told = log.getvalue()
    assert "sm_90a" in told
    assert not re.findall(r"\(C7\d\d\d\).*", told)  # such as C7512 and C7514: products are serialised
    spills = [int(x) for x in re.findall(r"(\d+) bytes spill stores", told)]
    # That one does in its sums with a running maximum, which few rows take.
    few = 64 if module == "laplace_64_weighted" else 0
    assert spills and max(spills) <= few
    frames = [int(x) for x in re.findall(r"(\d+) bytes stack frame", told)]
    assert max(frames) <= few or not module.startswith("dense")  # what an unrolled loop holds is in registers
    kind = module.split("_")[0]
    threads = {"pack": 256, "exact": 128, "mean": 640}.get(kind)
    if threads is None:
        asked = int(re.findall(r"\d+", module)[0]), "high" if module.endswith("high") else "fast", kind == "dense"
        threads = 128 * (plan.warpgroups(*asked) + 1)
    registers = max(int(x) for x in re.findall(r"Used (\d+) registers", told))
    assert registers * threads <= 65536
    if kind in ("pack", "exact"):  # which have no products
        return
    machine = _disassembled(code, tmp_path)
    assert "HGMMA" in machine
    groups = re.findall(r"HGMMA.*gsb0|WARPGROUP\.\w+", machine)
    # No group of products is cut in two.
    assert not any("gsb0" in one and "ARRIVE" in two for one, two in itertools.pairwise(groups))


def _disassembled(code, folder):
    """The machine code as text, by the disassembler that Triton brings."""
    triton = pytest.importorskip("triton")
    (folder / "code").write_bytes(code)
    command = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")
    return subprocess.run([command, "-sass", folder / "code"], capture_output=True, text=True, check=True).stdout


def test_warpgroups_take_no_more_registers_than_they_are_launched_with():
    """Of what all threads of a program have: one that asks for more waits for ever."""
    for groups, registers in plan.REGISTERS.items():
        launched = 65536 // (128 * (groups + 1)) // 8 * 8
        assert groups * registers + 24 <= (groups + 1) * launched
    every = itertools.product(plan.WIDTHS, INFO.precisions, (False, True))
    assert {plan.warpgroups(*asked) for asked in every} == set(plan.REGISTERS)


@pytest.mark.parametrize("supers", [1, 2, 3, 4, 7, 32, 33])
@pytest.mark.parametrize("most", [40, 16384])
@pytest.mark.parametrize("kind", plan.MEAN_SHARED)
def test_every_pair_comes_once(kind, supers, most, monkeypatch):
    """As a row and a column, in both directions, or in its own super in one. Few units add to the same sums in fp32."""
    monkeypatch.setattr(plan, "MOST_UNITS", most)
    per, tiles = plan.COLUMNS // plan.ROWS, np.zeros((supers, supers), int)
    for first, tables in plan.launches(supers, 132, kind):
        block, column, flags, slot = tables.units.T
        assert np.bincount(slot).max() <= (128 if kind[0] == "fast" else 8) and slot[-1] + 1 == tables.slots
        row = (block // per + first) % supers
        column = (column + first) % supers
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
    row_begin, row_units, column_begin, column_slots = tables.lists
    assert len(row_begin) == blocks + 1 and len(column_begin) == supers + 1
    assert sorted(row_units) == list(range(len(block))) and (slot < tables.slots).all()
    for one in range(supers):
        slots = column_slots[column_begin[one] : column_begin[one + 1]]
        assert set(slots) == set(slot[column == one])


def test_what_is_declined_and_why():
    problem = Problem(Reduction.MEAN, 5000, 5000, 16, precision="fast", device="cuda:0", same=True, extent=10.0)

    def asked(**other):
        return INFO.supports(replace(problem, **other))

    assert asked().ok and asked(reduction=Reduction.LOG_SUM, same=False).ok
    for reduction in Reduction:
        assert asked(reduction=reduction, d=64, extent=18.0, requires=frozenset({"weights"})).ok
    assert "64 dimensions, not 65" in asked(d=65).reason
    assert "not of other rows" in asked(same=False).reason
    assert "up to 18.8 bandwidths, not 19" in asked(extent=19.0).reason
    assert asked(precision="high", d=64, extent=18.8).ok
    many = frozenset({"weights"})
    assert "small φ adds up" in asked(precision="high", n=200_000, m=200_000, requires=many).reason
    assert asked(precision="high", n=200_000, m=200_000).ok and asked(n=200_000, m=200_000, requires=many).ok
    assert "in up to 16 dimensions" in asked(d=17, n=1 << 20, m=1 << 20, requires=frozenset({"pairs"})).reason


def test_points_with_very_uneven_weights_are_priced_as_summed_again():
    card, triton = cards.gpu("NVIDIA H200").processor, registry.find("triton").info
    for precision, n, span, first in (
        *(("fast", 131072, 9.0, INFO), ("fast", 131072, 18.0, triton), ("fast", 131072, math.inf, triton)),
        *(("high", 131072, 5.0, INFO), ("high", 131072, 12.0, triton), ("high", 4096, 12.0, INFO)),
    ):
        how = {"precision": precision, "device": "cuda:0", "same": True, "extent": 8.0, "weight_span": span}
        problem = Problem(Reduction.MEAN, n, n, 16, requires=frozenset({"weights"}), **how)
        seconds = {info.name: cost.predict(info, problem, card) for info in (INFO, triton)}
        assert min(seconds, key=seconds.get) == first.name, (precision, n, span)


class _Launched:
    """Takes the place of :func:`sdkde_hopper.compiled.kernel`: checks what kernels are given, and runs none."""

    def __init__(self):
        self.names = []

    def __call__(self, module, name, threads, shared=0):
        def launch(programs, *arguments):
            kinds = {"i": (int,), "d": (float,), "P": (int, torch.Tensor, type(None))}
            types = compiled.parameters(compiled.source(module), name)
            assert len(types) == len(arguments) and programs > 0, name
            assert all(isinstance(x, kinds[kind]) for x, kind in zip(arguments, types)), name
            self.names.append(name)

        return launch


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("d", [3, 16, 17, 64])
@pytest.mark.parametrize("reduction", list(Reduction))
@pytest.mark.parametrize("precision", INFO.precisions)
def test_kernels_are_launched_with_what_they_take(precision, reduction, d, weighted, monkeypatch):
    launched, n, m = _Launched(), 2100, 40
    monkeypatch.setattr(launch, "kernel", launched)
    monkeypatch.setattr(launch, "load_for", lambda d, precision, weighted: None)
    monkeypatch.setattr("sdkde_hopper.backend.launching", nullcontext)
    monkeypatch.setattr(launch, "_programs", lambda device: 132)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(synchronize=lambda: None))
    monkeypatch.setattr(plan, "MOST_UNITS", 9)  # in several launches
    mean, requires = reduction is Reduction.MEAN, frozenset({"weights"} if weighted else ())
    problem = Problem(reduction, n if mean else m, n, d, precision=precision, same=mean, requires=requires, extent=9.0)
    points = torch.rand(n, d, dtype=torch.float64)
    backend = HopperBackend()
    state = backend.prepare(problem, Columns(points, torch.full((n,), -7.0, dtype=torch.float64)))
    got = backend.reduce(problem, None if mean else points[:m], state)
    assert got.log_sum.shape == (problem.m,)
    part = backend.reduce(replace(problem, m=1052, same=True), None, state, 1048)
    assert part.log_sum.shape == (1052,)
    assert (got.sign is not None) == (reduction is Reduction.LAPLACE)
    if not mean:
        return
    assert backend.moved(points, got.shift).shape == (n, d)
    both = d <= 16 and not weighted
    assert ("mean_symmetric" in launched.names) == both and ("mean_exact" in launched.names) == weighted
    for rows, columns in (((0, 1024), (1024, 2100)), ((1024, 2100), (0, 1024)), ((1024, 2100), (1024, 2100))):
        one, other = backend.reduce_pairs(problem, state, rows, columns)
        assert one.shift.shape == (rows[1] - rows[0], d)
        assert other.shift.shape == (columns[1] - columns[0], d)


@pytest.mark.slow
def test_modules_compile_side_by_side_in_a_new_process():
    code = """
from concurrent.futures import ThreadPoolExecutor
from sdkde_hopper.compiled import compile_module
with ThreadPoolExecutor(3) as pool:
    assert all(code[:4] == b"\\x7fELF" for code in pool.map(compile_module, ("log_sum_16", "log_sum_32", "log_sum_64")))
"""
    subprocess.run([sys.executable, "-c", code], check=True)


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


@pytest.mark.parametrize("precision", INFO.precisions)
def test_what_is_taken_has_its_kernels_and_a_grid_that_is_fine_enough(precision):
    """‖hi‖ ≤ ‖v‖ + ½ √d g, whose square is exact in 24 bits, but for one bit at "fast"."""
    for reduction in Reduction:
        for d in range(1, 65):
            for extent in (0.1, 3.3, 6.65, 6.67, 13.3, 13.304, 13.31, 18.79, 18.85):
                problem = Problem(reduction, 900, 900, d, precision=precision, same=True, extent=extent)
                if not INFO.supports(problem).ok:
                    continue
                kind = "dense" if reduction is Reduction.MEAN else reduction.value
                for weighted in (False, True):
                    assert compiled.module_name(kind, plan.width(d), weighted, precision) in compiled.MODULES
                g, v = bounds.grid_step(extent, precision), 1.2011224087864498 * extent
                assert (v + 0.5 * g * d**0.5 * (precision == "high")) ** 2 <= 2.0**24 * g * g * (
                    1 + (precision == "fast")
                )
                assert precision == "fast" or g <= 2.0**-7
