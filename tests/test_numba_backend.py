"""The Numba backend: its exponential, its bounds, its threads, and what it compiles."""

import io
import itertools
import os
import subprocess
import sys
import threading
from dataclasses import fields, replace

import mpmath
import numba
import numpy as np
import pytest
from sdkde_numba import backend as implementation
from sdkde_numba import compiled
from sdkde_numba.backend import NumbaBackend
from sdkde_numba.bounds import choose, double_limit, extent_limit, single_limit, single_products
from sdkde_numba.cpu_kernels import CODES, LEAST, exp2
from sdkde_numba.info import INFO
from sdkde_numba.kept import keep
from sdkde_numba.near import aligned, order_columns, sum_leaves
from sdkde_numba.price import HEIGHT, LEAF
from some_of_all import some_of_all

import sdkde_core
from sdkde_core.choice import cost, hardware, registry
from sdkde_core.nearby import lists, order
from sdkde_core.plugin import each, map_threads
from sdkde_core.protocol import BackendUnavailable, Columns, Partial, Problem, Reduction
from sdkde_core.testing.problems import Case, answer, errors, far, make, truth

# --- the exponential ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "allowed"), [("float32", 3e-7), ("float64", 6e-16)])
def test_exp2_over_its_whole_range(dtype, allowed):
    """Against mpmath: ends, halves and integers, where the rounding of the exponent turns, and numbers between."""
    least = LEAST[dtype == "float64"]
    rng = np.random.default_rng(0)
    turns = np.arange(least, 1.0, 0.5)
    x = np.concatenate([turns, np.nextafter(turns, 1e9)[:-1], np.nextafter(turns, -1e9)[1:], least * rng.random(2000)])
    x = np.concatenate([x, -(10.0 ** -rng.uniform(0, 30, 200))]).astype(dtype)
    x = x[(x >= least) & (x <= 0)]
    with mpmath.workdps(30):
        want = [mpmath.mpf(2) ** mpmath.mpf(float(v)) for v in x]
        error = max(abs(mpmath.mpf(float(exp2(v))) / w - 1) for v, w in zip(x, want))
    assert error < allowed


# --- sizes and features ---------------------------------------------------------------------------------------------


def _same(a, b):
    return all(
        np.array_equal(getattr(a, f.name), getattr(b, f.name))
        for f in fields(Partial)
        if getattr(a, f.name) is not None
    )


@pytest.mark.parametrize("n", [1, 63, 64, 65, 511, 512, 513, 1025])
@pytest.mark.parametrize("precision", ["fast", "float64"])
def test_columns_that_do_not_fill_a_tile(n, precision):
    case = make("mixture", n, 5, 2)
    for reduction in Reduction:
        for exclude_self in (False, True):
            problem = case.problem(reduction, precision, exclude_self=exclude_self)
            want = truth(case, exclude_self=exclude_self)
            assert errors(problem, answer(INFO, NumbaBackend(), problem, case), want).max() <= 0.5


@pytest.mark.parametrize("m", [1, 2, 3, 4, 5, 131])
def test_rows_that_do_not_fill_a_block(m):
    case = make("weights", 700, m, 3)
    for reduction in Reduction:
        problem = case.problem(reduction, "high")
        assert errors(problem, answer(INFO, NumbaBackend(), problem, case), truth(case)).max() <= 0.5


@pytest.mark.parametrize("precision", ["fast", "high", "float64"])
def test_tiles_too_far_to_matter_are_left_out_and_no_others(precision):
    """Clusters in order, so that whole tiles are far from a row: before, after and between those that matter."""
    rng = np.random.default_rng(3)
    centres = np.repeat([-60.0, 0.0, 60.0, -60.0], 600)
    points = rng.normal(size=(2400, 2)) + centres[:, None] * [1.0, 0.0]
    queries = np.array([[-60.0, 0.1], [0.0, 0.0], [60.0, 1.0], [30.0, 0.0], [-29.0, 2.0], [75.0, -80.0]])
    case = Case("far tiles", points, queries, np.full(2400, -np.log(2400)))
    for reduction in Reduction:
        problem = case.problem(reduction, precision)
        assert errors(problem, answer(INFO, NumbaBackend(), problem, case), truth(case)).max() <= 0.5


def test_weights_without_their_own_column():
    case = make("weights", 300, 40, 3)
    kept = np.isfinite(case.log_weights)
    case = replace(case, points=case.points[kept], log_weights=case.log_weights[kept])
    want = truth(case, same=True, exclude_self=True)
    for precision in ("fast", "float64"):
        for reduction in Reduction:
            problem = case.problem(reduction, precision, same=True, exclude_self=True)
            assert errors(problem, answer(INFO, NumbaBackend(), problem, case), want).max() <= 0.5


# --- bounds ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "d", [3, 24, *(pytest.param(d, marks=pytest.mark.slow) for d in (1, 2, 5, 8, 16, 33, 64, 128, 784))]
)
@pytest.mark.parametrize("reduction", [Reduction.LOG_SUM, Reduction.LAPLACE])
def test_float32_holds_up_to_its_limits(d, reduction):
    """In both forms: products up to theirs, squares up to the limit."""
    probe = Problem(reduction, 1, 1, d, precision="fast")
    n, m = (400, 90) if d < 200 else (100, 30)
    for limit in (single_products(probe), single_limit(probe)):
        for kind in ("mixture", "tails", "clusters", "duplicates", "weights"):
            case = make(kind, n, m, d, extent=0.97 * limit if kind != "clusters" else 0.6 * limit)
            problem = case.problem(reduction, "fast")
            if problem.extent <= limit:
                assert choose(problem).dtype == "float32"
                assert errors(problem, answer(INFO, NumbaBackend(), problem, case), truth(case)).max() <= 0.8, kind


def test_forms_follow_the_extent():
    problem = Problem(Reduction.LOG_SUM, 10, 10, 16, precision="fast")
    products, squares = single_products(problem), single_limit(problem)
    assert 10 < products < squares < double_limit(problem)
    found = [choose(replace(problem, extent=e)) for e in (products, squares, 1.01 * squares, 1e9)]
    assert found == [("float32", False), ("float32", True), ("float64", False), ("float64", True)]
    assert choose(problem, log_weight_span=1e9).dtype == "float64"
    assert choose(replace(problem, precision="high")).dtype == "float64"
    assert choose(replace(problem, reduction=Reduction.MEAN)).dtype == "float64"


def test_what_float64_cannot_hold_is_declined():
    assert not INFO.supports(Problem(Reduction.LOG_SUM, 10, 10, 1, extent=1e145)).ok


# --- threads --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", Reduction)
@pytest.mark.parametrize(("n", "m"), [(3000, 700), (40000, 13)])
def test_bits_do_not_depend_on_the_threads(monkeypatch, reduction, n, m):
    monkeypatch.setattr(implementation, "TASK", 1 << 14)  # many small tasks
    for case in (make("mixture", n, m, 3), far(n, m, 3, 1e20, stray=True)):
        problem = case.problem(reduction, "high")
        first, *others = (answer(INFO, NumbaBackend(threads=t), problem, case) for t in (1, 2, 3, 8))
        assert all(_same(first, other) for other in others)
        some = each(first, lambda x: x[:13])
        assert errors(replace(problem, m=13), some, truth(case, rows=range(13))).max() <= 1.0


def test_threads_follow_the_variable_and_end_with_the_call(monkeypatch):
    asked = []

    def spy(task, arguments, threads):
        asked.append(threads)
        return map_threads(task, arguments, threads)

    monkeypatch.setattr(implementation, "map_threads", spy)
    monkeypatch.setattr(implementation, "TASK", 1 << 14)
    x = np.random.default_rng(0).normal(size=(3000, 2))
    before = threading.active_count()
    for threads in (3, 1):
        monkeypatch.setenv("SDKDE_NUM_THREADS", str(threads))
        asked.clear()
        sdkde_core.estimate(x, method="kde", bandwidth=0.3, backend="numba")
        assert set(asked) == {threads}
        assert threading.active_count() == before


@pytest.mark.parametrize("threads", [0, -1, True, "2", 1.5])
def test_threads_must_be_a_positive_integer(threads):
    with pytest.raises((TypeError, ValueError)):
        NumbaBackend(threads=threads)


def test_calls_from_several_threads_at_once():
    case = make("mixture", 2000, 300, 3)
    problem = case.problem(Reduction.MEAN, "high")
    backend = NumbaBackend(threads=2)
    state = backend.prepare(problem, Columns(case.points, case.log_weights))
    want = backend.reduce(problem, case.queries, state)
    found = []
    callers = [
        threading.Thread(target=lambda: found.append(backend.reduce(problem, case.queries, state))) for _ in range(6)
    ]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert len(found) == 6
    assert all(_same(want, got) for got in found)


# --- compiling ------------------------------------------------------------------------------------------------------

_SCRIPT = """
import numpy as np, sdkde_core
x = np.random.default_rng(0).normal(size=(50, 2))
for precision in PRECISIONS:
    print(sdkde_core.estimate(x, method="kde", bandwidth=0.5, backend="numba", precision=precision)[0])
from sdkde_numba.compiled import reduce_tiles
print(sum(reduce_tiles.stats.cache_hits.values()), sum(reduce_tiles.stats.cache_misses.values()))
"""


def _run(script, **environment):
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env={**os.environ, **environment}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\n")[:-1], done.stderr


@pytest.mark.parametrize(
    "precisions",
    [
        pytest.param(("high", "high"), marks=pytest.mark.slow),
        pytest.param(("fast", "high", "fast"), marks=pytest.mark.slow),
    ],
)
def test_a_first_call_says_that_it_compiles_and_the_next_process_finds_the_code(tmp_path, precisions):
    script, count = f"PRECISIONS = {precisions}" + _SCRIPT, len(set(precisions))
    log = "import logging; logging.basicConfig(level='INFO'); logging.getLogger('numba').setLevel('ERROR')\n"
    impatient = "from sdkde_numba import compiled; compiled.PATIENCE = 0.05\n"
    first, said = _run(log + impatient + script, NUMBA_CACHE_DIR=str(tmp_path))
    assert said.count("\n") == 1
    assert said.startswith("INFO:sdkde:numba: the first call compiles")
    assert str(tmp_path) in said
    assert first[-1] == f"0 {count}"
    again, _ = _run(script, NUMBA_CACHE_DIR=str(tmp_path))
    assert again[-1] == f"{count} 0"
    assert again[:-1] == first[:-1]


@pytest.mark.parametrize("kind", ["nbi", "nbc"])
def test_a_damaged_file_of_compiled_code_is_replaced(tmp_path, monkeypatch, kind):
    """Cut short, or with one bit changed, which in the code itself would be other numbers or a crash."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "kept"))
    (tmp_path / "one_more.py").write_text("def one_more(x): return x + 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "one_more", raising=False)
    import one_more

    def hits():
        made = numba.njit(one_more.one_more)
        keep(made)
        made.compile((numba.int64,))
        assert made(2) == 3
        return sum(made.stats.cache_hits.values())

    assert hits() == 0 and hits() == 1
    (file,) = (tmp_path / "kept").rglob(f"*.{kind}")
    whole = file.read_bytes()
    places = np.random.default_rng(0).integers(len(whole), size=8)
    flipped = [whole[:i] + bytes([whole[i] ^ 1 << i % 8]) + whole[i + 1 :] for i in (0, len(whole) - 1, *places)]
    for damaged in (b"", whole[: len(whole) // 2], bytes(len(whole)), whole + b"x", *flipped):
        file.write_bytes(damaged)
        assert hits() == 0
        assert hits() == 1


def test_code_that_was_kept_for_other_types_is_not_taken(tmp_path, monkeypatch):
    """Processes that begin at once give the same name to what they compile for different types."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "kept"))
    (tmp_path / "halved.py").write_text("def halved(x): return x / 2\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "halved", raising=False)
    import halved

    def compiled_for(kind):
        made = numba.njit(halved.halved)
        keep(made)
        made.compile((kind,))
        return made(3.0 if kind is numba.float64 else 3)

    assert compiled_for(numba.float64) == compiled_for(numba.int64) == 1.5
    one, other = sorted((tmp_path / "kept").rglob("*.nbc"))
    code = one.read_bytes(), other.read_bytes()
    one.write_bytes(code[1])
    other.write_bytes(code[0])
    assert compiled_for(numba.float64) == compiled_for(numba.int64) == 1.5


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["nbi", "nbc"])
def test_a_bit_that_has_changed_in_what_numba_keeps_changes_nothing(tmp_path, kind):
    script = "PRECISIONS = ('high',)" + _SCRIPT
    first, _ = _run(script, NUMBA_CACHE_DIR=str(tmp_path))
    (file,) = tmp_path.rglob(f"*.reduce_tiles-*.{kind}")
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 4
    file.write_bytes(raw)
    assert _run(script, NUMBA_CACHE_DIR=str(tmp_path)) == ([first[0], "0 1"], "")
    assert _run(script, NUMBA_CACHE_DIR=str(tmp_path)) == ([first[0], "1 0"], "")


def test_one_compiled_form_a_precision_serves_every_problem():
    """Numba would compile for other types of argument in silence, in every call's time."""
    rng = np.random.default_rng(0)
    x = np.asfortranarray(rng.normal(size=(90, 3)))
    for method, precision in itertools.product(("kde", "sdkde", "laplace"), ("fast", "high", "float64")):
        options = {"method": method, "precision": precision, "backend": "numba", "bandwidth": 0.3}
        sdkde_core.estimate(x, x[::2], weights=rng.random(90), **options)
        sdkde_core.estimate(x[:0:-1], **options)
        sdkde_core.estimate(x * 1e6, x[:0], **options)
        sdkde_core.estimate(x, **options, backend_options={"skip": True})
    # float32, float64, and terms in float32 beside exponents in float64 where tiles are left out
    assert len(compiled.reduce_tiles.overloads) <= 3


def test_other_kernels_are_one_compiled_form_that_nobody_else_waits_for(monkeypatch):
    x = np.random.default_rng(0).normal(size=(90, 3))
    for kernel in CODES:
        for precision in ("fast", "float64"):
            how = {"method": "kde", "kernel": kernel, "precision": precision, "bandwidth": 0.3, "backend": "numba"}
            sdkde_core.estimate(x, x[::2], **how)
    assert len(compiled.reduce_kernel_tiles.overloads) == 1
    monkeypatch.setattr(compiled, "reduce_kernel_tiles", None)
    sdkde_core.estimate(x, bandwidth=0.3, backend="numba")


@pytest.mark.slow
def test_without_a_folder_to_write_to_it_compiles_for_the_process():
    nowhere = """
from numba.core import caching
def refuse(self):
    raise OSError("read-only")
caching._CacheLocator.ensure_cache_path = refuse
"""
    got, _ = _run("PRECISIONS = 'fast', 'high'" + nowhere + _SCRIPT, SDKDE_NUM_THREADS="1")
    assert float(got[0]) == pytest.approx(float(got[1]), rel=1e-3)
    assert got[-1].startswith("0 ")


@pytest.mark.parametrize(("person", "level", "lines"), [(True, "WARNING", 1), (True, "INFO", 0), (False, "WARNING", 0)])
def test_a_person_at_a_terminal_reads_one_line_unless_it_is_in_the_log(monkeypatch, caplog, person, level, lines):
    class Terminal(io.StringIO):
        def isatty(self):
            return person

    caplog.set_level(level, logger="sdkde")
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setattr(compiled, "_announced", False)
    compiled._announce()
    compiled._announce()
    assert sys.stderr.getvalue().count("\n") == lines
    assert len(caplog.records) == (level == "INFO")


def test_a_quick_compilation_says_nothing(monkeypatch, caplog):
    monkeypatch.setattr(compiled, "_announced", False)
    monkeypatch.setattr(compiled.reduce_tiles, "compile", lambda signature: None)
    compiled._compile(compiled.reduce_tiles, ())
    assert not caplog.records


def test_without_compilation_it_says_so():
    script = """
import numpy as np, sdkde_core
x = np.random.default_rng(0).normal(size=(50, 2))
try:
    sdkde_core.estimate(x, backend="numba")
except sdkde_core.BackendUnavailable as error:
    print(error)
print(sdkde_core.explain(x).backend)
"""
    got, _ = _run(script, NUMBA_DISABLE_JIT="1")
    assert "NUMBA_DISABLE_JIT" in got[0]
    assert got[-1] == "numpy"


# --- its price ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fast", "high"])
@pytest.mark.parametrize("reduction", Reduction)
def test_it_is_priced_below_numpy_but_for_its_start(reduction, precision):
    """As measured, see docs/measurements.md; on the nominal core, whatever the machine."""
    numpy_info = registry.find("numpy").info
    for d in (1, 3, 16, 64):
        problem = Problem(reduction, 8000, 8000, d, precision=precision, extent=12.0)
        ours, theirs = (cost.predict(info, problem, hardware.NOMINAL_CORE) for info in (INFO, numpy_info))
        assert 1.1 < theirs / ours < 8.0, d
        small = replace(problem, m=500, n=500)
        ours, theirs = (cost.predict(i, small, hardware.NOMINAL_CORE) + i.startup_seconds for i in (INFO, numpy_info))
        assert ours > theirs


def test_a_small_problem_is_priced_as_of_one_thread(monkeypatch):
    def seconds(threads, n):
        monkeypatch.setenv("SDKDE_NUM_THREADS", str(threads))
        return cost.predict(INFO, Problem(Reduction.LOG_SUM, n, n, 16), hardware.cpu())

    assert seconds(8, 900) > 0.9 * seconds(1, 900)  # one task
    assert seconds(8, 9000) < 0.25 * seconds(1, 9000)


def test_an_unknown_option_is_refused():
    with pytest.raises((BackendUnavailable, ValueError)):
        sdkde_core.estimate([[0.0], [1.0]], backend="numba", backend_options={"block": 3})


# --- pairs that cannot matter ---------------------------------------------------------------------------------------


def _clustered(n, m, d):
    """Three clusters 1e4 bandwidths apart, one of them wide, with rows in them, in their tails and between."""
    rng = np.random.default_rng([n, m, d])
    which = rng.integers(0, 3, n)
    points = rng.normal(size=(n, d)) * np.array([8.0, 1.0, 8.0])[which, None]
    points[:, 0] += np.array([0.0, 1e4, -1e4])[which]
    queries = points[rng.integers(0, n, m)] + rng.normal(size=(m, d))
    queries[: m // 8] *= 1.001
    queries[0, 0] = 5e3
    return Case("clusters in tiles", points, queries, np.full(n, -np.log(n)))


@pytest.mark.parametrize("reduction", Reduction)
@pytest.mark.parametrize("precision", [pytest.param("fast", marks=pytest.mark.slow), "high", "float64"])
def test_tiles_are_left_out_where_they_cannot_matter(reduction, precision):
    case = _clustered(20_000, 400, 3)
    problem, columns = case.problem(reduction, precision), Columns(case.points, case.log_weights)
    one, two, dense = NumbaBackend(1, skip=True), NumbaBackend(2, skip=True), NumbaBackend(skip=False)
    state = one.prepare(problem, columns)
    assert state.near is not None and dense.prepare(problem, columns).near is None
    found = lists(problem, state.near.columns, case.queries[order(case.queries, LEAF)], HEIGHT)
    assert len(found.tiles) < 0.7 * (len(found.ends) - 1) * len(state.columns)
    got = one.reduce(problem, case.queries, state)
    assert errors(problem, got, truth(case)).max() <= 0.6
    assert _same(got, two.reduce(problem, case.queries, two.prepare(problem, columns)))


@pytest.mark.parametrize("reduction", Reduction)
def test_tiles_are_left_out_without_a_rows_own_column(reduction):
    """By rows and by columns that came in another order, from an offset."""
    case = _clustered(6000, 40, 2)
    problem = case.problem(reduction, "high", exclude_self=True)
    backend = NumbaBackend(skip=True)
    state, rows = backend.prepare(problem, Columns(case.points, case.log_weights)), case.points[700:740]
    got = backend.reduce(problem, rows, state, 700)
    want = truth(replace(case, queries=case.points), same=True, exclude_self=True, rows=range(700, 740))
    assert errors(problem, got, want).max() <= 0.6


@pytest.mark.parametrize(("precision", "share"), [("fast", 0.13), ("high", 0.1)])
def test_tiles_are_left_out_beside_an_outlier_that_weighs_far_more(precision, share):
    """Of the shift that both are merged into."""
    limit = extent_limit(Problem(Reduction.MEAN, 64, 1000, 2, precision=precision, requires=frozenset({"weights"})))
    case = some_of_all(limit, LEAF, share, precision)
    problem = case.problem(Reduction.MEAN, precision)
    assert errors(problem, answer(INFO, NumbaBackend(skip=True), problem, case), truth(case)).max() <= 0.6


def _leaves(case, reduction, precision="high", rows=slice(None), **changes):
    """What leaves in float32 give for rows in order, and which of these are to be summed again."""
    problem, backend = case.problem(reduction, precision, **changes), NumbaBackend(1, skip=True)
    state = backend.prepare(problem, Columns(case.points, case.log_weights))
    where = order(case.queries, LEAF)[rows]
    some = case.queries[where]
    found = lists(problem, state.near.columns, some, HEIGHT)
    with np.errstate(all="ignore"):
        got, again = sum_leaves(problem, state.near, state.columns, state.log_weights, some, found)
    return replace(problem, m=len(some)), got, again, where


@pytest.mark.parametrize("reduction", Reduction)
@pytest.mark.parametrize("d", [1, 4, 7])
def test_leaves_are_right_but_for_rows_that_they_name(reduction, d):
    """Of continuous data they name few. Of values on a grid, whose roundings may agree, they name more."""
    rng, n = np.random.default_rng(d), 6000
    points, queries = rng.normal(size=(n, d)), rng.normal(size=(256, d))
    log_weights = np.log(rng.dirichlet(np.full(n, 5.0)))
    case = Case("one normal", points, np.concatenate([queries, 50.0 + queries[:64]]), log_weights)
    problem, got, again, where = _leaves(case, reduction, requires={"weights"})
    good = np.setdiff1d(np.arange(len(where)), again)
    assert (where[again] >= 256).mean() >= 0.9 if d < 7 else True
    assert len(good) >= 64
    want = truth(case, rows=where[good])
    assert errors(replace(problem, m=len(good)), each(got, lambda x: x[good]), want).max() <= 0.5
    grid = replace(case, points=np.rint(points), queries=np.rint(case.queries))
    problem, got, more, where = _leaves(grid, reduction, requires={"weights"})
    good = np.setdiff1d(np.arange(len(where)), more)
    assert reduction is not Reduction.MEAN or len(more) >= len(again)
    if len(good):
        want = truth(grid, rows=where[good])
        assert errors(replace(problem, m=len(good)), each(got, lambda x: x[good]), want).max() <= 0.5


@pytest.mark.parametrize("shape", [(1,), (3, 5, 16), (4097, 16)])
def test_what_kernels_read_begins_with_a_line_of_the_cache(shape):
    arrays = [aligned(*shape) for _ in range(5)]
    assert all(x.shape == shape and x.dtype == np.float32 and x.flags.c_contiguous for x in arrays)
    assert not any(x.ctypes.data % 64 for x in arrays)
    for k, x in enumerate(arrays):
        x[:] = k
    assert all((x == k).all() for k, x in enumerate(arrays))


def test_leaves_answer_for_what_float32_cannot_know():
    """Rows whose tile is so wide that differences are rounded to nothing are named."""
    rng = np.random.default_rng(0)
    points = rng.normal(size=(600, 3)) * 10.0 ** rng.integers(0, 25, size=(600, 1))
    for reduction in Reduction:
        problem, got, again, where = _leaves(
            Case("far and near", points, points, np.full(600, -np.log(600))), reduction
        )
        good = np.setdiff1d(np.arange(600), again)
        want = truth(Case("far and near", points, points, np.full(600, -np.log(600))), rows=where[good])
        if len(good):
            assert errors(replace(problem, m=len(good)), each(got, lambda x, good=good: x[good]), want).max() <= 0.5


@pytest.mark.parametrize("reduction", Reduction)
def test_tiles_at_any_extent(reduction):
    """Where squares of squares overflow, no bound is known, and nothing is left out."""
    points = np.random.default_rng(0).normal(size=(300, 3))
    points[5] = 1e120
    case = Case("one far out", points, points, np.full(300, -np.log(300)))
    problem, backend = case.problem(reduction, "high"), NumbaBackend(skip=True)
    got = backend.reduce(problem, points, backend.prepare(problem, Columns(points, case.log_weights)))
    assert errors(problem, got, truth(case)).max() <= 0.6


def test_ties_are_looked_for_where_columns_stand():
    """Values in common among a few columns, beside many that have none, in other places of the same range."""
    rng = np.random.default_rng(0)
    points = rng.normal(size=(20_000, 2))
    log_weights = np.full(len(points), -np.log(len(points)))
    assert order_columns(Columns(points, log_weights), True, 2).tie <= 0.05
    points[:300, 0], points[:300, 1] = 0.25, 1000.0 + points[:300, 1]
    assert order_columns(Columns(points, log_weights), True, 2).tie >= 0.9


def test_rows_that_are_not_finite_are_alone():
    case = _clustered(3000, 50, 2)
    problem, backend = case.problem(Reduction.MEAN, "high"), NumbaBackend(skip=True)
    state = backend.prepare(problem, Columns(case.points, case.log_weights))
    queries = case.queries.copy()
    queries[7, 1] = np.nan
    got, rest = backend.reduce(problem, queries, state), np.arange(50) != 7
    assert np.isnan(got.log_sum[7]) and np.isnan(got.shift[7]).all()
    part, want = each(got, lambda x: x[rest]), truth(case, rows=np.flatnonzero(rest))
    assert errors(replace(problem, m=49), part, want).max() <= 0.6


def test_pairs_that_matter_are_priced():
    """Cheaper where few pairs of a normal sample matter; over all pairs where all do, or where they are few."""

    def asked(n, d, extent, **more):
        return Problem(Reduction.MEAN, n, n, d, same=True, extent=extent, **more)

    few, most = asked(1_000_000, 4, 50.0), asked(1_000_000, 12, 12.0)
    for problem, some in ((few, True), (most, False), (asked(2000, 3, 30.0), False)):
        assert (INFO.work(problem, None).exps < 0.2 * problem.pairs) is some
        assert ("% of the pairs matter" in INFO.supports(problem).reason) is some


def test_explain_says_how_many_pairs_matter():
    x = np.random.default_rng(0).normal(size=(300_000, 3))
    found = sdkde_core.explain(x, x[:1000], bandwidth=0.02, backend="numba", method="sdkde")
    assert "% of the pairs matter" in str(found)


@pytest.mark.parametrize("skip", ["yes", 2])
def test_skip_is_a_switch(skip):
    with pytest.raises(TypeError, match="skip is"):
        NumbaBackend(skip=skip)
