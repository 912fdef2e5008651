"""The Numba backend: its exponential, its bounds, its threads, and what it compiles."""

import itertools
import os
import subprocess
import sys
from dataclasses import replace

import mpmath
import numba
import numpy as np
import pytest
from sdkde_numba import compiled
from sdkde_numba.backend import NumbaBackend
from sdkde_numba.bounds import LEAF, choose, extent_limit, single_limit, single_products
from sdkde_numba.info import INFO
from sdkde_numba.instructions import exp2, loop
from sdkde_numba.kept import keep
from some_of_all import some_of_all

import sdkde_core
from sdkde_core.plugin import each
from sdkde_core.protocol import BackendUnavailable, Columns, Problem, Reduction
from sdkde_core.testing.problems import Case, answer, errors, far, make, truth

# --- the exponential ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "allowed"), [("float32", 3e-7), ("float64", 6e-16)])
def test_exp2_over_its_whole_range(dtype, allowed):
    """Against mpmath: ends, halves and integers, where the rounding of the exponent turns, and numbers between."""
    least = np.log2(float(np.finfo(dtype).smallest_normal))
    rng = np.random.default_rng(0)
    turns = np.arange(least, 1.0, 0.5)
    x = np.concatenate([turns, np.nextafter(turns, 1e9)[:-1], np.nextafter(turns, -1e9)[1:], least * rng.random(500)])
    x = np.concatenate([x, -(10.0 ** -rng.uniform(0, 30, 200))]).astype(dtype)
    x = x[(x >= least) & (x <= 0)]
    compiled_exp2 = loop(lambda x: exp2(x))
    with mpmath.workdps(30):
        want = [mpmath.mpf(2) ** mpmath.mpf(float(v)) for v in x]
        error = max(abs(mpmath.mpf(float(compiled_exp2(v))) / w - 1) for v, w in zip(x, want))
    assert error < allowed


def _same(a, b):
    return all(np.array_equal(x, y) for x, y in zip(vars(a).values(), vars(b).values()))


def _straight(backend, problem, case):
    """The backend's answer without the core, which takes outliers off."""
    state = backend.prepare(problem, Columns(case.points, case.log_weights))
    return backend.reduce(problem, case.queries, state)


# --- bounds ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "d", [3, 24, *(pytest.param(d, marks=pytest.mark.slow) for d in (1, 2, 5, 8, 16, 33, 64, 128, 784))]
)
@pytest.mark.parametrize("reduction", [Reduction.LOG_SUM, Reduction.LAPLACE])
def test_float32_holds_up_to_its_limits(d, reduction):
    """In both forms: products up to theirs, squares up to the limit."""
    probe = Problem(reduction, 1, 1, d, precision="fast")
    n, m = (400, 40) if d < 200 else (100, 30)
    for limit in (single_products(probe), single_limit(probe)):
        for kind in ("mixture", "tails", "clusters", "duplicates", "weights"):
            case = make(kind, n, m, d, extent=0.97 * limit if kind != "clusters" else 0.6 * limit)
            problem = case.problem(reduction, "fast")
            if problem.extent <= limit:
                assert choose(problem).dtype == "float32"
                assert errors(problem, answer(INFO, NumbaBackend(), problem, case), truth(case)).max() <= 0.8, kind


def test_what_float64_cannot_hold_is_declined():
    assert not INFO.supports(Problem(Reduction.LOG_SUM, 10, 10, 1, extent=1e145)).ok


@pytest.mark.parametrize("reduction", Reduction)
@pytest.mark.parametrize(("n", "m"), [(6000, 1500), (40000, 13)])
def test_bits_do_not_depend_on_the_threads(reduction, n, m):
    for case in (make("mixture", n, m, 3), far(n, m, 3, 1e20, stray=True)):
        problem = case.problem(reduction, "high")
        first, *others = (answer(INFO, NumbaBackend(threads=t), problem, case) for t in (1, 2, 8))
        assert all(_same(first, other) for other in others)
        some = each(first, lambda x: x[:13])
        assert errors(replace(problem, m=13), some, truth(case, rows=range(13))).max() <= 1.0


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


@pytest.mark.slow
@pytest.mark.parametrize("precisions", [("high", "high"), ("fast", "high", "fast")])
def test_a_first_call_says_that_it_compiles_and_the_next_process_finds_the_code(tmp_path, precisions):
    script, count = f"PRECISIONS = {precisions}" + _SCRIPT, len(set(precisions))
    log = "import logging; logging.basicConfig(level='INFO'); logging.getLogger('numba').setLevel('ERROR')\n"
    first, said = _run(log + script, NUMBA_CACHE_DIR=str(tmp_path))
    assert said.startswith("INFO:sdkde:numba: reduce_tiles was compiled for this processor")
    assert str(tmp_path) in said
    assert first[-1] == f"0 {count}"
    again, _ = _run(script, NUMBA_CACHE_DIR=str(tmp_path))
    assert again[-1] == f"{count} 0"
    assert again[:-1] == first[:-1]


@pytest.fixture
def hits(tmp_path, monkeypatch):
    """A function that compiles x / 2 for a type, checks it, and returns how much of it was found in ``tmp_path``."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "kept"))
    (tmp_path / "halved.py").write_text("def halved(x): return x / 2\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "halved", raising=False)
    import halved

    def compiled_for(kind=numba.int64):
        made = numba.njit(halved.halved)
        keep(made)
        made.compile((kind,))
        assert made(3.0 if kind is numba.float64 else 3) == 1.5
        return sum(made.stats.cache_hits.values())

    return compiled_for


@pytest.mark.parametrize("kind", ["nbi", "nbc"])
def test_a_damaged_file_of_compiled_code_is_replaced(tmp_path, hits, kind):
    """Cut short, or with one bit changed, which in the code itself would be other numbers or a crash."""
    assert hits() == 0 and hits() == 1
    (file,) = (tmp_path / "kept").rglob(f"*.{kind}")
    whole = file.read_bytes()
    places = np.random.default_rng(0).integers(len(whole), size=3)
    flipped = [whole[:i] + bytes([whole[i] ^ 1 << i % 8]) + whole[i + 1 :] for i in (0, len(whole) - 1, *places)]
    for damaged in (b"", whole[: len(whole) // 2], bytes(len(whole)), *flipped):
        file.write_bytes(damaged)
        hits()
        assert hits() == 1


def test_code_that_was_kept_for_other_types_is_not_taken(tmp_path, hits):
    """Processes that begin at once give the same name to what they compile for different types."""
    assert hits(numba.float64) == hits(numba.int64) == 0
    one, other = sorted((tmp_path / "kept").rglob("*.nbc"))
    code = one.read_bytes(), other.read_bytes()
    one.write_bytes(code[1])
    other.write_bytes(code[0])
    assert hits(numba.float64) == hits(numba.int64) == 0


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


@pytest.mark.parametrize(
    ("reduction", "precision"),
    [
        pytest.param(r, p, marks=() if (r, p) == (Reduction.MEAN, "high") else pytest.mark.slow)
        for r in Reduction
        for p in ("fast", "high", "float64")
    ],
)
def test_tiles_are_left_out_where_they_cannot_matter(reduction, precision):
    case = _clustered(20_000, 400, 3)
    problem = case.problem(reduction, precision)
    one, two = (_straight(NumbaBackend(threads, skip=True), problem, case) for threads in (1, 2))
    assert _same(one, two)
    rows = range(0, 400, 5)
    some = each(one, lambda x: x[::5])
    assert errors(replace(problem, m=len(rows)), some, truth(case, rows=rows)).max() <= 0.6


@pytest.mark.parametrize(("precision", "share"), [("fast", 0.13), ("high", 0.1)])
def test_tiles_are_left_out_beside_an_outlier_that_weighs_far_more(precision, share):
    """Of the shift that both are merged into."""
    limit = extent_limit(Problem(Reduction.MEAN, 64, 1000, 2, precision=precision, requires=frozenset({"weights"})))
    case = some_of_all(limit, LEAF, share, precision)
    problem = case.problem(Reduction.MEAN, precision)
    assert errors(problem, answer(INFO, NumbaBackend(skip=True), problem, case), truth(case)).max() <= 0.6


def _hard(kind, n=3000):
    """Columns and rows that leaves in float32 are right for, or not."""
    rng = np.random.default_rng(0)
    points, queries = rng.normal(size=(n, 4)), rng.normal(size=(320, 4))
    queries[256:] += 50.0
    if kind == "grid":  # the roundings of equal coordinates agree
        points, queries = np.rint(points), np.rint(queries)
    if kind == "ties":  # values in common among a few columns, beside many that have none
        points[:300, :3], points[:300, 3] = 0.25, 1000.0 + points[:300, 3]
        queries[:100] = points[:100] + 0.01
    if kind == "wide":  # a tile is so wide that differences are rounded to nothing
        points *= 10.0 ** rng.integers(0, 25, size=(n, 1))
        queries = points[:320]
    if kind == "far":  # where squares of squares overflow, no bound is known, and nothing is left out
        points[5] = 1e120
        queries = points[:320]
    return Case(kind, points, queries, np.log(rng.dirichlet(np.full(n, 5.0))))


@pytest.mark.parametrize("kind", ["normal", "grid", "ties", "wide", "far"])
def test_rows_that_float32_does_not_do_for_are_summed_again(kind):
    case, rows = _hard(kind), range(2, 320, 3)  # the far point's among them
    for reduction, precision in itertools.product(Reduction, ("fast", "high")):  # which one oracle's answer is for
        problem = case.problem(reduction, precision, requires={"weights"})
        got = each(_straight(NumbaBackend(skip=True), problem, case), lambda x: x[rows.start :: rows.step])
        assert errors(replace(problem, m=len(rows)), got, truth(case, rows=rows)).max() <= 0.6, (reduction, precision)


def test_explain_says_how_many_pairs_matter():
    x = np.random.default_rng(0).normal(size=(300_000, 3))
    found = sdkde_core.explain(x, x[:1000], bandwidth=0.02, backend="numba", method="sdkde")
    assert "% of the pairs matter" in str(found)


@pytest.mark.parametrize("skip", ["yes", 2])
def test_skip_is_a_switch(skip):
    with pytest.raises(TypeError, match="skip is"):
        NumbaBackend(skip=skip)
