"""How start-up counts in the choice: by the calls that a process makes, never by what ran before, and not once warm."""

import json
import math
import os
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner
from plugins import good, installer  # noqa: F401 - the fixture ``install``

import sdkde_core
from sdkde_core import SdkdeWarning
from sdkde_core.choice import hardware, judge, registry, select
from sdkde_core.cli.main import main
from sdkde_core.estimator import warming
from sdkde_core.protocol import BackendInfo, BackendUnavailable, Problem, Reduction, Support, Work
from sdkde_core.testing.calls import _status_of_child

X = np.random.default_rng(0).normal(size=(60, 2))
RATE = hardware.cpu().scalar_flops / hardware.speedup(hardware.cpu_threads())  # of one core


@pytest.fixture
def plugins(monkeypatch):
    """``plugins(info, …)``: what is installed, that alone; in a process that uses no GPU."""
    monkeypatch.setattr(judge, "has_context", lambda device: False)

    def only(*infos):
        records = tuple(registry.Record(i.name, "ok", "installed", "x", "1", "x:INFO", i) for i in infos)
        monkeypatch.setattr(registry, "records", lambda: records)
        monkeypatch.setattr(registry, "made", {})

    return only


def info(name, seconds, startup=0.0, compiling=0.0, **more):
    """A backend that takes so long for an estimate by the nominal core's rates, start and compiling apart."""
    fixed = {
        "implementation": "sdkde_numpy.backend:NumpyBackend",
        "devices": ("cpu",),
        "precisions": ("fast", "high"),
        "features": frozenset({"weights"}),
        "startup_seconds": startup,
        "work": lambda problem, config: Work(scalar_flops=seconds * RATE, launches=0, parallel=False),
        "compile_seconds": lambda problem: compiling,
    }
    return BackendInfo(name, (1, 0), **(fixed | more))


PROBLEM = Problem(Reduction.LOG_SUM, 60, 60, 2)

#: Fastest: alone, as one of ten calls, as one of ten thousand or warm.
ONE, TEN, MANY = info("one", 1.0), info("ten", 0.5, 2.0), info("many", 0.4, 1.0, 10.0)


# --- the rule -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("calls", "where", "first", "counted"),
    [
        (1, "cpu", "one", {"one": 0.0, "ten": 2.0, "many": 11.0}),
        (None, "cpu", "ten", {"one": 0.0, "ten": 0.2, "many": 1.1}),
        (None, "cuda:0", "many", {"one": 0.0, "ten": 2e-4, "many": 11e-4}),
    ],
)
def test_start_up_is_spread_over_the_calls_of_a_process(plugins, calls, where, first, counted, monkeypatch):
    monkeypatch.setattr(judge, "processor", lambda device: hardware.cpu())
    plugins(*(replace(i, devices=("cpu", "cuda")) for i in (ONE, TEN, MANY)))
    ranked = select.ranked([PROBLEM], None, select.Wanted("auto", where, where, judge.calls_of(calls, where)))
    assert ranked[0].name == first
    assert {c.name: c.counted_seconds for c in ranked} == pytest.approx(counted)
    assert {c.name: c.startup_seconds for c in ranked} == {"one": 0.0, "ten": 2.0, "many": 11.0}
    if where == "cpu":
        assert select.choose([PROBLEM], device=where, calls=calls).name == first


def test_a_number_that_compiling_does_not_take_is_never_spread(plugins):
    plugins(ONE, info("odd", 0.1, compiling=math.nan))
    for calls in (1, None):
        (odd,) = (c for c in select.choose([PROBLEM], calls=calls, explained=True).candidates if c.name == "odd")
        assert odd.counted_seconds == math.inf


def test_the_choice_does_not_depend_on_what_ran(plugins):
    plugins(ONE, TEN, MANY)
    before = sdkde_core.explain(X, method="kde")
    for name in ("many", "many", "ten", "one"):
        sdkde_core.estimate(X, method="kde", backend=name)
    assert sdkde_core.explain(X, method="kde") == before
    assert before.backend == "ten"


def test_explain_says_how_start_up_counts(plugins):
    plugins(ONE, TEN)
    explained = sdkde_core.explain(X, method="kde")
    assert (explained.backend, explained.calls, explained.to_dict()["calls"]) == ("ten", 10, 10)
    assert "what counts of start-up: a tenth, for one of ten calls" in str(explained)
    assert "500 ms + 200 ms" in str(explained)
    registry.warm["ten", "cpu"] = True
    explained = str(sdkde_core.explain(X, method="kde"))
    assert "500 ms + 0 ms" in explained
    assert "warmed up: start-up does not count" in explained
    registry.warm["ten", "cpu"] = False
    assert "warmed up: of start-up only compiling counts" in str(sdkde_core.explain(X, method="kde"))


def test_the_command_line_counts_all(plugins, tmp_path):
    plugins(ONE, TEN)
    told = CliRunner().invoke(main, ["explain", "60x2", "--method", "kde"], catch_exceptions=False).output
    assert "what counts of start-up: all of it, for the only call" in told
    assert "chosen: one on cpu" in told
    told = CliRunner().invoke(main, ["explain", "60x2", "--method", "kde", "--json"], catch_exceptions=False).output
    assert json.loads(told)["calls"] == 1
    file, out = str(tmp_path / "x.npy"), str(tmp_path / "out.npy")
    np.save(file, X)
    done = CliRunner().invoke(main, ["estimate", file, "-o", out, "--method", "kde"], catch_exceptions=False)
    assert "60 rows, one on cpu" in done.output + done.stderr


@pytest.fixture
def card(monkeypatch):
    """An H200 beside the CPU."""
    monkeypatch.setattr(hardware, "visible_gpus", lambda *root: (hardware.ListedGPU("NVIDIA H200", "GPU-1"),))


# --- warm_up --------------------------------------------------------------------------------------------------------


def test_after_warm_up_start_up_counts_no_more(plugins):
    plugins(ONE, TEN, info("quick", 0.3, 4.0, 2.0))
    assert sdkde_core.explain(X, method="kde").backend == "ten"
    took = sdkde_core.warm_up("cpu")
    assert took.keys() == {"cpu"} and took["cpu"].keys() == {"one", "ten", "quick"}
    assert all(seconds > 0 for seconds in took["cpu"].values())
    explained = sdkde_core.explain(X, method="kde")
    assert explained.backend == select.choose([PROBLEM]).name == "quick"
    assert [c.counted_seconds for c in explained.candidates] == [0.0, 0.0, 0.0]


def test_what_compiles_for_long_is_started_only_and_its_compiling_counts(plugins, monkeypatch):
    plugins(ONE, info("slow", 0.3, 4.0, 6.0))
    ran = []
    monkeypatch.setattr(warming, "_run", lambda info, request, problem: ran.append(info.name))
    assert sdkde_core.warm_up("cpu")["cpu"].keys() == {"one", "slow"}
    assert set(ran) == {"one"}
    (slow,) = (c for c in sdkde_core.explain(X, method="kde").candidates if c.name == "slow")
    assert slow.counted_seconds == pytest.approx(0.6)


@pytest.mark.parametrize(
    ("what", "more"),
    [
        ("Elsewhere", ""),
        ("Exits", ""),
        ("nothing", ""),
        ("Implementation", "supports=lambda problem: 1 / 0"),
        ("Implementation", "supports=lambda problem: Support(False, 'never')"),
        ("Raises", ""),
    ],
)
def test_a_broken_plugin_is_skipped(install, monkeypatch, untold, what, more):
    install("broken", "broken", good("broken", "broken", factory=what, more=more))
    two = tuple(r for r in registry.records() if r.name in ("numpy", "broken"))
    monkeypatch.setattr(registry, "records", lambda: two)
    if what == "Raises":
        with pytest.warns(SdkdeWarning, match="'broken' failed on cpu: RuntimeError: it broke"):
            took = sdkde_core.warm_up("cpu")
        assert ("broken", "cpu") in registry.aside
    else:
        took = sdkde_core.warm_up("cpu")
    assert took["cpu"].keys() == {"numpy"}
    assert ("broken", "cpu") not in registry.warm
    assert sdkde_core.warm_up("cpu")["cpu"].keys() == {"numpy"}


def test_a_device_where_nothing_works_is_told(plugins, monkeypatch):
    plugins(ONE, info("card", 1.0, devices=("cuda",), supports=lambda problem: Support(False, "no card")))
    with pytest.raises(BackendUnavailable, match="no backend works on cuda:0: one: runs on cpu; card: "):
        sdkde_core.warm_up("cuda")
    with pytest.raises(ValueError, match="device is 'tpu'; pass None, or one of 'cpu', 'cuda'"):
        sdkde_core.warm_up("tpu")
    monkeypatch.setenv("SDKDE_TUNING", "of")
    with pytest.raises(ValueError, match="SDKDE_TUNING is 'of'"):
        sdkde_core.warm_up("cpu")


def test_devices_by_default_are_those_that_are_here(plugins, monkeypatch, card):
    ran = []
    monkeypatch.setattr(warming, "_run", lambda info, request, problem: ran.append(problem.device))
    plugins(ONE, info("card", 1.0, devices=("cuda", "mps"), implementation="sdkde_numpy.backend:NumpyBackend"))
    monkeypatch.setattr("sdkde_numpy.backend.NumpyBackend.probe", lambda self, device: Support(True, "yes"))
    assert sdkde_core.warm_up().keys() == {"cpu", "cuda:0"}
    assert set(ran) == {"cpu", "cuda:0"}
    assert sdkde_core.warm_up("cuda").keys() == {"cuda:0"}
    assert sdkde_core.warm_up("cuda:1").keys() == {"cuda:1"}
    monkeypatch.setattr(hardware, "visible_gpus", lambda *root: ())
    assert sdkde_core.warm_up().keys() == {"cpu"}


def test_a_backend_named_in_the_environment_is_warmed_up_alone(plugins, monkeypatch):
    plugins(ONE, TEN)
    monkeypatch.setenv("SDKDE_BACKEND", "ten")
    assert sdkde_core.warm_up("cpu")["cpu"].keys() == {"ten"}
    monkeypatch.setenv("SDKDE_BACKEND", "tan")
    with pytest.raises(BackendUnavailable, match="SDKDE_BACKEND is 'tan': backend 'tan' is unknown"):
        sdkde_core.warm_up("cpu")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks")
def test_a_forked_child_is_warm_on_the_cpu_only():
    registry.warm.update({("one", "cpu"): True, ("one", "cuda:0"): True})

    def child():
        assert registry.warm == {("one", "cpu"): True}

    assert _status_of_child(child) == 0
    assert len(registry.warm) == 2
