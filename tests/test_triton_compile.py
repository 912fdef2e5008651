"""Every default launch configuration compiles for the architectures that matter, without spilling, on any machine."""

import itertools
import json
import os
import re

import pytest
from pairwise import covering

pytest.importorskip("triton")

import torch
import triton
from sdkde_autotune import records
from sdkde_autotune.lookup import TABLES
from sdkde_triton import (
    blocked,
    choose,
    compiled,
    criteria,
    direct,
    finish,
    fits,
    kernels,
    line,
    moves,
    near,
    samples,
    space,
    tunables,
    whiten,
)
from sdkde_triton.bounds import Form, merges, packed_dimensions
from sdkde_triton.tunables import Launch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sdkde_core.protocol import Problem, Reduction

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter replaces what would be compiled"
)

#: Compute capabilities; those after Hopper are left to `make test-full`.
ARCHITECTURES = (80, 86, 90, 100, 120)


#: Who takes a turn beside Hopper.
TURNS = itertools.cycle([80, None, None, 86, None, None])


def _on_all(*axes):
    """Every combination of the axes for every architecture.

    `make test` has Hopper's in a dimension of every kind of kernel, and where that takes most registers, with every
    value of the other axes; those before it take turns.
    """
    product = list(itertools.product(*axes))
    chosen = covering([row for row in product if row[0] in (1, 16, 17, 784) or row[:2] == (64, Form.FULL)], strength=1)
    quick = {row: {90, next(TURNS) if row[0] in (1, 16, 784) else None} for row in chosen}
    for row, capability in itertools.product(product, ARCHITECTURES):
        yield pytest.param(*row, capability, marks=[] if capability in quick.get(row, ()) else [pytest.mark.slow])


def _check(launch, problem, capability):
    config = space.default(launch.base, launch.columns, capability, merges(problem.d), launch.pieces)
    fits = space.fits(launch.base, config, launch.columns, capability, launch.pieces)
    assert fits, f"{config} does not fit sm_{capability} by its own bounds"
    compiled = tunables.compiled_kernel(launch, config, problem, capability)
    registers, spills = tunables.usage(compiled.asm["cubin"])
    assert spills <= tunables.SPILLS, f"{config} spills {spills} bytes on sm_{capability}, with {registers} registers"
    bound = space.shared_bytes(launch.base, config, launch.columns, launch.pieces, capability)
    assert compiled.metadata.shared <= bound, f"{config} takes {compiled.metadata.shared} bytes of shared memory"
    assert compiled.metadata.shared <= space.shared_limit(capability)
    return compiled


def _launch(kernel, d, form):
    full = form == Form.FULL
    return Launch(kernel + "_full" * full, packed_dimensions(d), 3 if full else 2, form)


def _problem(reduction, d, form, *requires):
    """A problem that takes every branch of a kernel's form."""
    full = form == Form.FULL
    return Problem(
        Reduction(reduction), 1000, 1000, d, precision="high" if full else "fast", requires=frozenset(requires)
    )


@pytest.mark.parametrize(
    ("d", "form", "capability"),
    [
        *_on_all((12, 15, 16, 32, 64, 128), (Form.SHORT, Form.PAIRED, Form.LONG)),
        *_on_all((12, 16, 32, 64), (Form.FULL,)),
        *(pytest.param(d, Form.FULL, 90, marks=pytest.mark.slow) for d in (100, 128)),
    ],
)
def test_mean(d, form, capability):
    _check(_launch("mean", d, form), _problem("mean", d, form), capability)


@pytest.mark.parametrize(
    ("d", "form", "laplace", "capability"),
    [
        *_on_all((12, 16, 32, 64, 128), (Form.SHORT, Form.LONG), (False, True)),
        *_on_all((12, 16, 32, 64, 128), (Form.FULL,), (False, True)),
    ],
)
def test_log_sum(d, form, laplace, capability):
    problem = _problem("laplace", d, form, "weights") if laplace else _problem("log_sum", d, form)
    _check(_launch("log_sum", d, form), problem, capability)


def _listed():
    """Every variant for the architectures that the README names; `make test` has three."""
    quick = {("mean", 4, Form.SHORT, 80), ("mean", 16, Form.FULL, 90), ("log_sum", 4, Form.SHORT, 90)}
    kernels = [("mean", 4), ("mean", 16), ("log_sum", 4), ("log_sum", 16), ("laplace", 16)]
    for (kernel, d), full, capability in itertools.product(kernels, (False, True), (80, 86, 90)):
        row = kernel, d, Form.FULL if full else Form.SHORT if d == 4 else Form.LONG, capability
        yield pytest.param(*row, marks=[] if row in quick else [pytest.mark.slow])


@pytest.mark.parametrize(("kernel", "d", "form", "capability"), [*_listed()])
def test_listed(kernel, d, form, capability):
    base = "log_sum" if kernel == "laplace" else kernel
    listed = _launch(base + "_listed", d, form)
    problem = _problem(kernel, d, form, "weights")
    config = space.default(f"{base}_listed", listed.columns, capability, merges(d), listed.pieces)
    compiled = tunables.compiled_kernel(listed, config, problem, capability)
    assert tunables.usage(compiled.asm["cubin"])[1] <= tunables.SPILLS
    assert compiled.metadata.shared <= space.shared_limit(capability)


_FP32 = dict.fromkeys(("rows", "leaves", "nodes", "lowest", "reaches", "limits"), "*fp32") | {"step": "fp32"}
_INT = dict.fromkeys(("visited", "counts", "ends", "out"), "*i32")
_FP64 = ("x", "u", "weights", "rates", "out", "state", "turned", "columns", "parts", "shape")
_FP64 = dict.fromkeys(_FP64, "*fp64") | {"counts": "*i32", "ranks": "*i32", "taken": "*i64", "places": "*i64"}
_FP64 |= dict.fromkeys(("squares", "moves", "scratch"), "*fp32") | {"found": "*i64"}
_STEPS = dict.fromkeys(("length", "other", "least", "unit", "constant", "share"), "fp32")


_SHAPES = [(16, False), (32, True), (32, False)]


def _check_spills(kernel, types, constants, capability, warps=4, most=tunables.SPILLS):
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
    source = ASTSource(kernel, signature=signature, constexprs=constants)
    options = space.Config(1, 1, warps, 1).options
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    assert tunables.usage(compiled.asm["cubin"])[1] <= most


@pytest.mark.parametrize("capability", [*(pytest.param(x, marks=pytest.mark.slow) for x in (80, 86)), 90])
@pytest.mark.parametrize("d", [4, pytest.param(16, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("kernel", "constants"), [("near", {"MOST": 128}), ("choose", {}), ("list", {"TOGETHER": 4})])
def test_lists(kernel, constants, d, capability):
    _check_spills(getattr(choose, f"{kernel}_kernel"), _FP32 | _INT, constants | {"D": d}, capability)


@pytest.mark.parametrize("capability", [pytest.param(80, marks=pytest.mark.slow), 90])
@pytest.mark.parametrize(
    ("kernel", "constants"),
    [
        ("squares", {"ROWS": 4, "BLOCK": 128}),
        ("moves", {"ROWS": 32, "BLOCK": 64}),
        ("criteria", {"MOVED": True, "LAPLACE": False, "ROWS": 16, "BLOCK": 128}),
        ("criteria", {"MOVED": False, "LAPLACE": True, "ROWS": 16, "BLOCK": 128}),
    ],
)
def test_criteria(kernel, constants, capability):
    _check_spills(getattr(criteria, f"{kernel}_kernel"), _FP64, constants, capability)


def test_no_pointer_has_a_numbers_name():
    """Of arguments that Triton does not look at it does not know that they are aligned: loads are single numbers."""
    for module in (blocked, choose, criteria, direct, finish, fits, kernels, line, moves, near, samples, whiten):
        for name, kernel in vars(module).items():
            if name.endswith("_kernel"):
                found = re.findall(r"\b(?:load|store|atomic_add|load_rows)\(\s*(\w+)|(\w+) \+= ", kernel.src)
                pointers = {x for pair in found for x in pair} & {*kernel.arg_names}
                assert not pointers & {*kernel.do_not_specialize}, name


@pytest.mark.parametrize("capability", [*(pytest.param(x, marks=pytest.mark.slow) for x in (80, 86)), 90])
def test_narrow(capability):
    types = dict.fromkeys(("values", "weights", "few", "rates", "out"), "*fp64") | {"factor": "fp32"}
    constants = {"SQUARES": True, "LOGS": True, "LAPLACE": False}
    # One copy of the code for both criteria spills twelve registers, 3 µs of 37, and compiles in half the time.
    _check_spills(criteria.narrow_kernel, types, constants, capability, 16, 48)


@pytest.mark.parametrize("capability", [*(pytest.param(x, marks=pytest.mark.slow) for x in (80, 86)), 90])
@pytest.mark.parametrize(
    ("kernel", "constants"),
    [
        *[(kernel, {"BLOCK": 4096}) for kernel in ("values", "slots", "folds", "places")],
        ("first", {"GROWTH": 0.15}),
        ("clear", {"BLOCK": 256}),
        ("rest", {"BLOCK": 256}),
        ("total", {"MOVED": True}),
        ("bins", {"BLOCK": 256}),
        ("shifts", {"BLOCK": 256}),
        ("moved", {"MOMENTS": True, "BLOCK": 256}),
        ("sums", {"LAPLACE": True, "BLOCK": 256}),
        ("next", {"MOVED": True, "LAPLACE": False, "SCORE": 1.4, "GROWTH": 0.15}),
    ],
)
def test_line(kernel, constants, capability):
    single = ("u", "places", "ends", "shifts", "parts", "steps", "out", "held", "found", "of", "copies", "every", "std")
    counts = "folds", "mass", "moved", "own", "estimate", "left", "index", "values", "begins", "slots"
    types = dict.fromkeys(single, "*fp64") | dict.fromkeys(counts, "*i64") | {"factor": "fp32", "unit": "i64"}
    warps = 8 if constants.get("BLOCK") == 4096 else 4
    _check_spills(getattr(line, f"{kernel}_kernel"), types, constants, capability, warps)


@pytest.mark.parametrize("capability", [*(pytest.param(x, marks=pytest.mark.slow) for x in (80, 86)), 90])
@pytest.mark.parametrize(
    ("kernel", "constants"),
    [
        ("clear", {"BLOCK": 256}),
        ("digit", {"ROWS": 256, "BINS": 256}),
        ("order", {"ROWS": 16, "BLOCK": 64}),
        ("place", {"DIM": 64, "ROWS": 16}),
        ("place", {"DIM": 1024, "ROWS": 2}),
    ],
)
def test_samples(kernel, constants, capability):
    _check_spills(
        getattr(samples, f"{kernel}_kernel"), _FP64 | {"share": "fp32", "rest": "fp32"}, constants, capability
    )


@pytest.mark.parametrize("capability", [*(pytest.param(x, marks=pytest.mark.slow) for x in (80, 86)), 90])
@pytest.mark.parametrize(("dim", "full"), [(16, True), *(pytest.param(*x, marks=pytest.mark.slow) for x in _SHAPES)])
@pytest.mark.parametrize("kernel", ["begin", "rows", "step", "shape"])
def test_fits(kernel, dim, full, capability):
    more = {"step": {"ROWS": 8, "BLOCK": 1024 // dim, "FULL": full}, "shape": {"FULL": full}}
    _check_spills(
        getattr(fits, f"{kernel}_kernel"), _FP64 | _STEPS, more.get(kernel, {}) | {"DIM": dim}, capability, warps=8
    )


@pytest.mark.parametrize("capability", [*(pytest.param(x, marks=pytest.mark.slow) for x in (80, 86)), 90])
@pytest.mark.parametrize("width", [pytest.param(2, marks=pytest.mark.slow), 16])
@pytest.mark.parametrize(
    ("kernel", "constants"),
    [
        *[
            ("parts", {"WEIGHTED": True}),
            ("move", {}),
            ("unit", {"PICKED": 1}),
            ("unit", {"PICKED": 2}),
            ("join", {"SINGLE": True}),
        ],
        *[("shifts", {}), ("reach", {"B": 2048})],
    ],
)
def test_moves(kernel, constants, width, capability):
    pointers = dict.fromkeys(("points", "shift", "second", "logs", "parts", "one", "other"), "*fp64")
    pointers["reached"] = "*fp64"
    numbers = dict.fromkeys(("unit", "least", "most", "constant", "rest"), "i64")
    types = pointers | numbers | {"out": "*fp32" if kernel == "join" else "*fp64"}
    shape = {} if kernel == "reach" else {"B": 128} if kernel == "join" else {"W": width, "B": min(128, 1024 // width)}
    _check_spills(getattr(moves, f"{kernel}_kernel"), types, constants | shape, capability)


@pytest.mark.parametrize("weighted", [False, True])
def test_what_moves_samples_and_guards_is_compiled_ahead(monkeypatch, weighted):
    found = set()
    monkeypatch.setattr(
        compiled, "compiled", lambda kernel, *like: found.add((kernel.__name__, like[0][0].dtype, *like[1:]))
    )
    d = 21 + weighted  # of no other test
    x = torch.zeros((10, d), dtype=torch.float64)
    logs = x[:, 0] if weighted else None
    moves.begin(d, weighted)
    ahead = set(found)
    moves.displaced(moves.in_unit(x, 0.9), x, logs, 0.9, 0.0, 1.0)
    moves.in_unit(x, 3.0, 5, logs)
    for dtype in (torch.float32, torch.float64):
        moves.joined((x[:, 0], x[:, 0]), (0.0, 0.0), True, dtype)
    assert found == ahead
    assert len(ahead) == 6 + weighted


@pytest.mark.parametrize("capability", [*(pytest.param(x, marks=pytest.mark.slow) for x in (80, 86)), 90])
@pytest.mark.parametrize("dtype", ["*fp32", "*fp64"])
def test_weights(dtype, capability):
    types = {"given": dtype, "logs": "*fp64", "slots": "*fp64"}
    _check_spills(whiten.weigh_kernel, types, {"BLOCK": 2048}, capability)


@pytest.mark.parametrize(
    ("d", "form", "use", "capability"),
    [
        *_on_all((784,), (Form.LONG, Form.FULL), ("log_sum", "laplace")),
        *_on_all((784,), (Form.LONG, Form.FULL), ("stored",)),
        *_on_all((128,), (Form.FULL,), ("stored",)),
    ],
)
def test_blocked(d, form, use, capability):
    weighted = ("weights",) if use == "laplace" else ()
    problem = _problem("mean" if use == "stored" else use, d, form, *weighted)
    _check(_launch("stored" if use == "stored" else "blocked", d, form), problem, capability)


@pytest.mark.parametrize(
    ("d", "form", "precision", "capability"),
    [*_on_all((784,), (Form.LONG, Form.FULL), ("fast",)), *_on_all((784,), (Form.FULL,), ("high",))],
)
def test_weighted_sum(d, form, precision, capability):
    problem = Problem(Reduction.MEAN, 1000, 1000, d, precision=precision, same=form == Form.LONG)
    compiled = _check(_launch("weighted_sum", d, form), problem, capability)
    # The compiler must not take what is added to a product for the start of its sum: see sdkde_triton.kernels.alone.
    ttir = compiled.asm["ttir"]
    starts = re.findall(r"tt\.dot %\S+, %\S+, (%\S+), .*maxNumImpreciseAcc = 1", ttir)
    assert len(starts) == (1 if precision == "high" else 0)
    assert all(f"{start} = arith.constant dense<0.0" in ttir for start in starts)


@pytest.mark.parametrize(
    ("d", "arithmetic", "reduction", "capability"),
    [
        *_on_all((1,), ("float32", "doubled"), ("log_sum", "laplace")),
        *_on_all((1, 2), ("float32", "doubled"), ("anchored",)),
        *(pytest.param(3, kind, "anchored", 90, marks=pytest.mark.slow) for kind in ("float32", "doubled")),
        *((4, kind, "anchored", 90) for kind in ("float32", "doubled")),
        *_on_all((17,), ("doubled",), ("log_sum", "laplace", "mean")),
        *_on_all((1, 2, 17), ("float64",), ("log_sum", "mean", "laplace")),
    ],
)
def test_direct(d, arithmetic, reduction, capability):
    anchored = reduction == "anchored"
    requires = () if anchored else ("weights",)
    problem = Problem(Reduction("mean" if anchored else reduction), 1000, 1000, d, requires=frozenset(requires))
    _check(Launch("direct_mean" if anchored else "direct", d, arithmetic=arithmetic), problem, capability)


def _shipped():
    """The winners of all tables that ship with sdkde, for this backend."""
    for path in sorted(TABLES.glob("*.json")):
        for best in records.winners(map(records.trial_of, json.loads(path.read_text())["trial"])):
            row = {**best.key._asdict(), "config": best.config, "source": best.source, "provenance": best.provenance}
            if row["backend"] == "triton":
                yield pytest.param(
                    row, id=f"{path.stem}-{row['kernel']}-{row['precision']}-{row['dimension']}-{row['n_octave']}"
                )


@pytest.mark.slow  # all of them together
@pytest.mark.parametrize("row", list(_shipped()))
def test_shipped_winners(row):
    """Every shipped configuration is one of this backend's, fits its card by our own bounds, and compiles for it."""
    assert row["config_version"] == tunables.CONFIG_VERSION
    assert row["source"] == "measured"
    assert row["provenance"]["triton"]
    requires = frozenset(filter(None, row["requires"].split(",")))
    how = {"precision": row["precision"], "same": row["reduction"] == "mean", "device": "cuda:0", "extent": 10.0}
    m, n = 2 ** row["m_octave"], 2 ** row["n_octave"]
    given = Problem(Reduction(row["reduction"]), m, n, row["dimension"], requires=requires, **how)
    space, kernel, architecture = tunables.SPACE, row["kernel"], row["architecture"]
    assert space.dimension(kernel, given) == row["dimension"]
    assert space.limit(kernel, row["config"], given, architecture) is None
    compiled = space.compile(kernel, row["config"], given, architecture)
    assert compiled.shared <= tunables.space.shared_limit(tunables.capability(architecture))


def test_a_table_ships_for_the_card_that_the_defaults_were_measured_on():
    assert len(list(_shipped())) > 50
