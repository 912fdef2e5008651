"""Processes of our own import nothing from the working directory, where anybody's modules may lie."""

import os
import re
import sys
from pathlib import Path

import pytest

from sdkde_core.fresh import run_python, spawning

ROOT = Path(__file__).parent.parent

#: Modules that our processes import early: of ``python -c``, and of multiprocessing before it sets a path.
PLANTED = ("json", "numpy", "pickle", "socket", "struct", "threading", "subprocess", "statistics", "torch")


@pytest.fixture
def planted(tmp_path, monkeypatch):
    """A working directory with modules that say so when they are imported, and end the process."""
    for name in PLANTED:
        (tmp_path / f"{name}.py").write_text("open('executed', 'a').write(__name__)\nraise SystemExit(7)\n")
    monkeypatch.chdir(tmp_path)
    yield
    assert not (tmp_path / "executed").exists()


def test_code_runs_with_this_process_path(planted, monkeypatch):
    monkeypatch.setattr(sys, "path", ["", *sys.path, "/of/the/caller"])  # "" is the working directory
    code = "import sys, numpy, sdkde_core\nprint(sys.argv[1:], sys.path[-1], '' in sys.path)"
    done = run_python(code, "a", "b", capture_output=True, check=True)
    assert done.stdout == "['a', 'b'] /of/the/caller False\n"


@pytest.mark.parametrize("before", [None, "", "1"])
def test_spawned_processes(planted, monkeypatch, before):
    if before is None:
        monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    else:
        monkeypatch.setenv("PYTHONSAFEPATH", before)
    with spawning() as method:
        process = method.Process(target=os._exit, args=(3,))
        process.start()
    process.join(60)
    assert process.exitcode == 3
    assert os.environ.get("PYTHONSAFEPATH") == before


def test_the_tuners_compilers(planted):
    pytest.importorskip("filelock")
    measure = pytest.importorskip("sdkde_autotune.measure")
    compilers = measure.Pool(1)
    try:
        with pytest.raises(measure.Failed, match="ZeroDivisionError: "):
            compilers.result("one", divmod, 1, 0)
    finally:
        compilers.close()


def test_nothing_else_starts_an_interpreter():
    """A new one is to go through the module that this file tests."""
    for folder in ("sdkde_core", "backends", "autotune"):
        for path in (ROOT / folder).rglob("*.py"):
            if path.name != "fresh.py":
                text = path.read_text()
                assert not re.search(r'"-[cm]"|get_context\(|set_start_method|Popen\(', text), path
