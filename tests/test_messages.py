"""Warnings about the user's line, once for each cause, and names that were almost right."""

import importlib
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner

import sdkde_core
from sdkde_core import BackendUnavailable, SdkdeWarning
from sdkde_core.choice import registry
from sdkde_core.cli.main import main
from sdkde_core.messages import did_you_mean, warn_once
from sdkde_core.protocol import Support, Work

X = [0.0, 1.0, 3.0]


@pytest.fixture(autouse=True)
def _untold(untold):
    pass


def test_a_cause_is_told_once():
    with pytest.warns(SdkdeWarning) as told:
        warn_once("one")
        warn_once("one")
        warn_once("another text", cause="one")
        warn_once("two", cause="three")
        warn_once("four", cause="three")
    assert [str(t.message) for t in told] == ["one", "two"]
    assert all(t.filename == __file__ for t in told)


def broken(*arguments):
    raise OSError("the disk is on fire")


@pytest.fixture
def failing(monkeypatch):
    """A backend that auto takes first, and that fails, so that the next one answers."""
    numpy = registry.find("numpy")
    work = {"work": lambda problem, config: Work(), "startup_seconds": 0.0}
    info = replace(numpy.info, name="failing", implementation="sdkde_numpy.backend:Failing", **work)
    ours = importlib.import_module("sdkde_numpy.backend")
    monkeypatch.setattr(ours, "Failing", type("Failing", (ours.NumpyBackend,), {"reduce": broken}), raising=False)
    monkeypatch.setattr(registry, "records", lambda: (replace(numpy, name="failing", info=info), numpy))
    for kept in ("made", "aside", "chosen"):
        monkeypatch.setattr(registry, kept, {})


@pytest.mark.usefixtures("failing")
def test_a_warning_of_an_estimate_is_about_the_users_line():
    with pytest.warns(SdkdeWarning, match="the disk is on fire") as told:
        sdkde_core.estimate(X, [1.0])
    assert [t.filename for t in told] == [__file__]
    sdkde_core.estimate(X, [1.0])


def test_what_plugins_and_libraries_put_between_is_not_the_users(tmp_path, monkeypatch):
    """A function of the core, a backend's, an import within it, and the core again."""
    (tmp_path / "tells_on_import.py").write_text("from sdkde_core.plugin import warn_once\nwarn_once('from within')\n")
    monkeypatch.syspath_prepend(tmp_path)
    backend, core = {"__name__": "of_a_stranger"}, {"__name__": "sdkde_core.api"}
    exec(compile("def reduce():\n    import tells_on_import", "stranger.py", "exec"), backend)
    exec(compile("def estimate(reduce):\n    reduce()", "core.py", "exec"), core)
    with pytest.warns(SdkdeWarning, match="from within") as told:
        core["estimate"](backend["reduce"])
    line = sys._getframe().f_lineno - 1
    assert [(t.filename, t.lineno) for t in told] == [(__file__, line)]


def test_it_is_seen_without_any_setting_up(tmp_path):
    """Python shows a UserWarning by default; the logger of a library it does not."""
    script = tmp_path / "script.py"
    script.write_text(
        "from sdkde_core.plugin import warn_once\nfor _ in range(2):\n    warn_once('the disk is on fire')\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    assert done.stderr.count("SdkdeWarning") == 1
    assert f"{script}:3: SdkdeWarning: the disk is on fire" in done.stderr


@pytest.mark.usefixtures("failing")
@pytest.mark.filterwarnings("default::sdkde_core.SdkdeWarning")
def test_commands_tell_it_in_a_line(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    np.save("x.npy", np.arange(5.0))
    result = CliRunner().invoke(main, ["estimate", "x.npy", "-o", "p.npy", "-q"], catch_exceptions=False)
    assert result.exit_code == 0
    lines = result.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith("Warning: ") and "the disk is on fire" in lines[0]


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        *(
            ("skde", "sdkde"),
            ("KDE", "kde"),
            ("laplacian", "laplace"),
            ("Numba_cuda", "numba-cuda"),
            ("pytorch", "torch"),
        ),
        *(("float32", None), ("cupy", None), ("", None), (7, None), (None, None)),
    ],
)
def test_did_you_mean(given, meant):
    known = ("kde", "sdkde", "laplace", "numba-cuda", "torch", "numpy", "float64")
    assert did_you_mean(given, known) == (f"; did you mean {meant!r}?" if meant else "")
    assert did_you_mean(given, ()) == ""


@pytest.mark.parametrize(
    ("options", "meant"),
    [
        ({"method": "skde"}, "sdkde"),
        ({"bandwidth": "Scot"}, "scott"),
        ({"precision": "hihg"}, "high"),
        ({"backend": "nunpy"}, "numpy"),
        ({"device": "cdua:0"}, "cuda"),
        ({"bandwith": 1.0}, "bandwidth"),
        ({"logs": True}, "log"),
        ({"querry": [0.0]}, "query"),
        ({"backend": "numpy", "backend_options": {"thread": 2}}, "threads"),
    ],
)
def test_an_argument_that_is_almost_right(options, meant):
    with pytest.raises((ValueError, TypeError, BackendUnavailable)) as error:
        sdkde_core.estimate(X, **options)
    assert str(error.value).endswith(f"; did you mean {meant!r}?")


@pytest.mark.parametrize(
    ("variable", "value", "told"),
    [
        ("SDKDE_BACKEND", "nunpy", "backend 'nunpy' is unknown; installed: .*; did you mean 'numpy'"),
        ("SDKDE_BACKEND", "absent", "backend 'absent' is missing: needs a_module"),
        ("SDKDE_BACKEND", "unable", "backend 'unable' cannot do this: not today"),
        ("SDKDE_PRECISION", "fats", "set one of fast, high, float64; did you mean 'fast'"),
        ("SDKDE_NUM_THREADS", "many", "set a positive integer"),
        ("SDKDE_NUM_THREADS", "9" * 5000, "set a positive integer"),
        ("SDKDE_TUNING", "of", "set 'off' or 'on'; did you mean 'off'"),
    ],
)
def test_a_variable_that_is_not_right_is_named(variable, value, told, monkeypatch):
    (working,) = (r for r in registry.records() if r.name == "numpy")
    unable = replace(working.info, name="unable", supports=lambda p: Support(False, "not today"))
    others = (
        replace(working, name="absent", status="missing", reason="needs a_module"),
        replace(working, name="unable", info=unable),
    )
    monkeypatch.setattr(registry, "records", lambda: (working, *others))
    monkeypatch.setenv(variable, value)
    with pytest.raises((ValueError, BackendUnavailable), match=rf"^{variable} is '{value}'[:;] {told}"):
        sdkde_core.estimate(X, [1.0])
    if variable == "SDKDE_BACKEND":
        with pytest.raises(BackendUnavailable, match=f"^backend '{value}'"):
            sdkde_core.estimate(X, [1.0], backend=value)
