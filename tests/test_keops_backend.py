"""The KeOps backend: silence, the trial in a process of its own, its bounds, its threads.

KeOps compiles for ten seconds whatever differs in reduction, dimension or feature. `make test` has one formula:
densities of separate queries in one dimension, which the trial compiles, too.
"""

import importlib.util
import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest

import sdkde_core
from sdkde_core.protocol import BackendUnavailable, Problem, Reduction
from sdkde_core.testing.checks import Target
from sdkde_core.testing.problems import errors, make, truth

if importlib.util.find_spec("pykeops") is None:  # which reads its folder's name when it is imported
    pytest.skip("needs pykeops", allow_module_level=True)
torch = pytest.importorskip("torch")

import threadpoolctl  # noqa: E402
from sdkde_keops import backend, bounds, library  # noqa: E402
from sdkde_keops.backend import KeopsBackend  # noqa: E402
from sdkde_keops.info import INFO  # noqa: E402

#: Of tests that compile; the others are as right on a machine without a compiler.
compiles = pytest.mark.skipif(library.compiler() is None, reason="needs a C++ compiler")

ONE = "import numpy as np, sdkde_core; x = np.linspace(-2, 2, 30)\n"
KDE = "sdkde_core.estimate(x, x[:9], backend='keops', device='cpu', method='kde')"
OPTIONS = {"method": "kde", "bandwidth": 0.5, "backend": "keops", "device": "cpu"}


def _python(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", ONE + textwrap.dedent(code)],
        capture_output=True,
        text=True,
        env={k: v for k, v in {**os.environ, **environment}.items() if v is not None},
    )


# --- silence --------------------------------------------------------------------------------------------------------


@compiles
@pytest.mark.slow
def test_nothing_is_printed_but_what_users_print():
    code = f"""
    print("before")
    p = {KDE}
    print("after", p.shape)
    import os, pykeops
    print(pykeops.verbose, "KEOPS_VERBOSE" in os.environ, "PYKEOPS_VERBOSE" in os.environ)
    """
    done = _python(code, KEOPS_VERBOSE=None, PYKEOPS_VERBOSE=None)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "before\nafter (9,)\nTrue False False\n"
    assert done.stderr == ""


def test_what_users_set_keops_to_say_stays_as_they_set_it():
    with library.exclusive():
        import pykeops
    before = pykeops.verbose
    try:
        for verbose in (True, False):
            pykeops.set_verbose(verbose)
            with library.exclusive():
                assert not pykeops.verbose
            assert pykeops.verbose is verbose
    finally:
        pykeops.set_verbose(before)


# --- the trial ------------------------------------------------------------------------------------------------------


def _compiler(tmp_path, script):
    path = tmp_path / "g++"
    path.write_text("#!/bin/sh\n" + textwrap.dedent(script))
    path.chmod(0o755)
    return {"CXX": str(path), "KEOPS_CACHE_FOLDER": str(tmp_path / "keops"), "XDG_CACHE_HOME": str(tmp_path / "cache")}


UNAVAILABLE = f"""
try:
    {KDE}
except sdkde_core.protocol.BackendUnavailable as error:
    print(error)
print("alive")
"""


@pytest.mark.slow
def test_a_compiler_that_crashes_is_reported(tmp_path):
    done = _python("import sdkde_core.protocol" + UNAVAILABLE, **_compiler(tmp_path, "kill -SEGV $$"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("alive\n")
    assert f"Cause: with the compiler {tmp_path / 'g++'} it returned non-zero exit status 1, saying: " in done.stdout
    assert "ModuleNotFoundError" in done.stdout
    assert "Remedy: set CXX to the system's own g++" in done.stdout
    assert f"delete {tmp_path / 'keops'}" in done.stdout
    assert done.stderr == ""
    assert not list((tmp_path / "cache").rglob("works-*"))  # it may be mended


@compiles
@pytest.mark.slow
def test_code_that_crashes_does_not_take_the_process_along(tmp_path):
    """A compiler that leaves libraries which end whoever loads them."""
    source = tmp_path / "crash.c"
    source.write_text("#include <signal.h>\n__attribute__((constructor)) static void crash(void) { raise(SIGSEGV); }\n")
    script = f"""
    while [ $# -gt 1 ]; do
        if [ "$1" = -o ]; then out=$2; fi
        shift
    done
    exec gcc -shared -fPIC -o "$out" {source}
    """
    done = _python("import sdkde_core.protocol" + UNAVAILABLE, **_compiler(tmp_path, script))
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("alive\n")
    assert "it died with <Signals.SIGSEGV: 11>" in done.stdout
    assert "Remedy: set CXX" in done.stdout


def test_no_compiler_is_said_before_anything_is_tried(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    support = KeopsBackend().probe("cpu")
    assert not support.ok
    assert "no C++ compiler: install g++, or set CXX" in support.reason
    monkeypatch.setenv("CXX", "g++-99")
    assert "no C++ compiler (CXX is 'g++-99', which is not found): install g++" in KeopsBackend().probe("cpu").reason
    problem = Problem(Reduction.LOG_SUM, 1, 1, 1)
    with pytest.raises(BackendUnavailable, match="install g"):
        KeopsBackend().prepare(problem, None)


def test_a_good_answer_is_kept_on_disk_and_a_bad_one_is_not(monkeypatch, tmp_path):
    tried, ends = [], [subprocess.TimeoutExpired("'python' ", 240), subprocess.CalledProcessError(-11, "python"), None]

    def run(*arguments, **options):
        tried.append(arguments)
        if (end := ends.pop(0)) is not None:
            raise end

    monkeypatch.setattr(library, "run_python", run)
    monkeypatch.setattr(library, "cache_folder", lambda: tmp_path)
    ask = library._tried.__wrapped__  # as another process would
    first, second = ask("cpu", sys.executable), ask("cpu", sys.executable)
    assert not first.ok and "timed out after 240 seconds" in first.reason
    assert not second.ok and "died with <Signals.SIGSEGV: 11>. Remedy: set CXX" in second.reason
    assert ask("cpu", sys.executable).ok and ask("cpu", sys.executable).ok
    assert len(tried) == 3


@compiles
@pytest.mark.slow
def test_a_formula_that_does_not_compile_is_unavailable(monkeypatch):
    def broken(*arguments):
        raise ModuleNotFoundError("No module named 'pykeops_cpp_0123456789'")

    monkeypatch.setattr(backend, "_call", broken)
    monkeypatch.setattr(backend, "_ready", set())
    with pytest.raises(BackendUnavailable, match=r"could not compile a formula with .*pykeops_cpp_0123456789"):
        sdkde_core.estimate(np.ones((4, 3)) * np.arange(4)[:, None], backend="keops", device="cpu", method="kde")


# --- bounds ---------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("precision", ["fast", "high"])
@pytest.mark.parametrize("d", [1, 3, 16, 64, 128, 256])
@pytest.mark.parametrize("reduction", [Reduction.LOG_SUM, Reduction.LAPLACE])
def test_float32_holds_up_to_its_limits(d, reduction, precision):
    target = Target(INFO, KeopsBackend(), "cuda:0")
    limit = bounds.single_limit(Problem(reduction, 400, 90, d, precision=precision, device="cuda:0"))
    n, m = (400, 90) if d < 200 else (100, 30)
    for kind in ("mixture", "tails", "clusters", "duplicates", "weights"):
        case = make(kind, n, m, d, extent=0.97 * limit if kind != "clusters" else 0.6 * limit)
        problem = case.problem(reduction, precision, device="cuda:0")
        if bounds.dtype(problem) == "float32":
            assert errors(problem, target.answer(problem, case), truth(case)).max() <= 0.8, kind


def test_what_it_cannot_take_is_declined():
    assert not INFO.supports(Problem(Reduction.LOG_SUM, 10, 10, 1, extent=1e145)).ok
    assert not INFO.supports(Problem(Reduction.LOG_SUM, 10, 10, 1025)).ok
    assert INFO.supports(Problem(Reduction.MEAN, 10, 10, 1024)).ok
    support = INFO.supports(Problem(Reduction.MEAN, 10, 10, 129, device="cuda:0"))
    assert support == (False, "has mean in up to 128 dimensions on a GPU, not 129")
    assert INFO.supports(Problem(Reduction.LAPLACE, 10, 10, 256, device="cuda:0")).ok
    assert not INFO.supports(Problem(Reduction.LAPLACE, 10, 10, 257, device="cuda:0")).ok


@compiles
@pytest.mark.parametrize(
    ("method", "d"),
    [("kde", 1), *(pytest.param(method, 3, marks=pytest.mark.slow) for method in ("kde", "laplace", "gradient"))],
)
def test_nan_stays_where_it_is(method, d):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(100, d)), rng.normal(size=(9, d))
    y[4, d // 2] = np.nan
    options = {**OPTIONS, "check_finite": False}

    def call(x, y):
        if method == "gradient":
            return sdkde_core.grad_log_density(x, y, **options)
        return sdkde_core.estimate(x, y, **{**options, "method": method})

    got = np.isnan(call(x, y).reshape(9, -1))
    assert got[4].all()
    assert not np.delete(got, 4, axis=0).any()
    x[7, 0] = np.nan
    assert np.isnan(call(x, y)).all()


# --- threads, blocks, options ---------------------------------------------------------------------------------------


@compiles
@pytest.mark.parametrize("threads", [1, 2])
def test_threads_are_as_many_as_asked_for(monkeypatch, threads):
    x, y = np.random.default_rng(0).normal(size=(2, 200, 1))
    want = sdkde_core.estimate(x, y, **OPTIONS)
    real, seen = backend._call, []

    def call(*arguments):
        seen.append({lib["num_threads"] for lib in threadpoolctl.threadpool_info() if lib["user_api"] == "openmp"})
        return real(*arguments)

    monkeypatch.setattr(backend, "_call", call)
    monkeypatch.setenv("SDKDE_NUM_THREADS", str(threads))
    before = torch.get_num_threads()
    assert np.array_equal(sdkde_core.estimate(x, y, **OPTIONS), want)
    assert seen == [{threads}]
    assert torch.get_num_threads() == before
