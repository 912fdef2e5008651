"""Plugins through the one door: found, refused, shadowed, broken, and chosen."""

import importlib
import os
import re
import signal
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import reference
from plugins import good, installer  # noqa: F401 - the fixture ``install``

import sdkde_core
from sdkde_core import SdkdeWarning, tuning
from sdkde_core.choice import hardware, judge, registry, select
from sdkde_core.protocol import BackendInfo, BackendUnavailable, Problem, Reduction, Support, Work
from sdkde_core.testing import problems

X = np.random.default_rng(0).normal(size=(60, 2))


def test_a_strangers_backend_is_found_named_and_chosen_when_fastest(install):
    install(
        "fast-thing",
        "quick",
        good("quick", "fast-thing", more="work=lambda problem, config: Work(),"),
    )
    want = sdkde_core.estimate(X, backend="numpy")
    assert np.array_equal(sdkde_core.estimate(X, backend="quick"), want)
    e = sdkde_core.explain(X)
    assert e.backend == "quick"
    assert {c.name for c in e.candidates} >= {"quick", "numpy"}
    assert "least predicted time" in e.reason
    record = registry.find("quick")
    assert (record.distribution, record.version, record.status) == ("fast-thing", "1.0", "ok")


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        ("import no_such_module_at_all", "plugin_sad:INFO does not load: ModuleNotFoundError"),
        ("raise SystemExit(1)", "SystemExit"),
        ("INFO = 3", "a int, not a BackendInfo"),
        ("def broken(:", "SyntaxError"),
        ("class Own(BaseException): pass\nraise Own('odd')", "Own: odd"),
        (good("other", "sad"), "named 'other', its entry point 'sad'"),
        (good("sad", "sad", protocol="None"), "BackendInfo.protocol is None; pass (major, minor)"),
        (
            good("sad", "sad").replace('devices=("cpu",)', 'devices="cpu"'),
            "devices is 'cpu'; pass a tuple of strings, such as ('cpu',)",
        ),
        (good("sad", "sad", more='requires_modules="jax",'), "pass a tuple of strings, such as ('jax',)"),
        (good("sad", "sad", more='arrays="foo",'), "arrays is 'foo'; pass one of 'numpy', 'torch'"),
    ],
)
def test_a_broken_plugin_is_listed_with_its_cause(install, source, cause):
    install("sad", "sad", source)
    record = registry.find("sad")
    assert record.status == "broken"
    assert cause in record.reason
    with pytest.raises(sdkde_core.BackendUnavailable, match="is broken"):
        sdkde_core.estimate(X, backend="sad")
    assert cause in str(sdkde_core.explain(X))
    sdkde_core.estimate(X)


@pytest.mark.parametrize(
    ("protocol", "reason"),
    [
        ((99, 2), r"speaks protocol 99\.2, this sdkde 1\.0; update sdkde"),
        ((1, 9), r"speaks protocol 1\.9, this sdkde 1\.0; update sdkde"),
        ((0, 7), r"speaks protocol 0\.7, this sdkde 1\.0; update the plugin"),
    ],
)
def test_another_major_or_a_newer_minor_of_the_protocol_is_refused(install, protocol, reason):
    install("other", "other", good("other", "other", protocol=protocol))
    with pytest.raises(sdkde_core.BackendUnavailable, match=f"is incompatible: {reason}"):
        sdkde_core.estimate(X, backend="other")


def test_a_taken_name_resolves_the_same_way_every_time(install):
    install("aaa", "numpy", good("numpy", "aaa"))
    install("zzz", "other", good("other", "zzz"))
    install("bbb", "other", good("other", "bbb"))
    assert registry.find("numpy").distribution == "sdkde-core"
    assert registry.find("other").distribution == "bbb"
    shadowed = {r.distribution: r.reason for r in sdkde_core.backends() if r.status == "shadowed"}
    assert set(shadowed) == {"aaa", "zzz"}
    assert "taken by plugin_bbb:INFO of bbb" in shadowed["zzz"]
    assert "taken by" in str(sdkde_core.explain(X))


def test_missing_modules_come_with_the_command_that_brings_them(install):
    more = "requires_modules=('no_such_module',), install='pip install no-such-module',"
    install("needy", "needy", good("needy", "needy", more=more))
    with pytest.raises(
        sdkde_core.BackendUnavailable, match="needs no_such_module; install with: pip install no-such-module"
    ):
        sdkde_core.estimate(X, backend="needy")


def test_features_are_enforced_by_the_core(install):
    install("plain", "plain", good("plain", "plain", features="()"))
    sdkde_core.estimate(X, backend="plain")
    with pytest.raises(sdkde_core.BackendUnavailable, match="lacks weights"):
        sdkde_core.estimate(X, backend="plain", weights=np.arange(60.0))
    unknown = Problem(Reduction.LOG_SUM, 1, 1, 1, precision="fast", requires=frozenset({"from_the_future"}))
    candidates = select.ranked([unknown], None, select.Wanted())
    assert not any(c.ok for c in candidates)
    assert all("lacks from_the_future" in c.reason for c in candidates if not c.reason.startswith("missing: "))


@pytest.mark.parametrize(
    ("factory", "cause"),
    [
        ("failing", "libfoo.so.3"),
        ("Elsewhere", "no device of mine"),
        ("Exits", "SystemExit"),
        ("nothing", "AttributeError"),
    ],
)
def test_auto_passes_over_what_does_not_start_and_a_named_one_does_not_fall_back(install, factory, cause):
    more = "work=lambda problem, config: Work(),"
    install("stuck", "stuck", good("stuck", "stuck", factory=factory, more=more))
    e = sdkde_core.explain(X)
    assert e.backend == "numpy"
    assert [cause in c.reason for c in e.candidates if c.name == "stuck"] == [True]
    with pytest.raises(sdkde_core.BackendUnavailable, match=cause):
        sdkde_core.estimate(X, backend="stuck")


@pytest.mark.parametrize(
    ("supports", "cause"),
    [
        ("Support(problem.d > 2, 'wants d > 2')", "wants d > 2"),
        ("1 / 0", "ZeroDivisionError"),
        ("True", "answered True, not a Support"),
        ("Support(False, '')", "no reason given"),
        ("(_ for _ in ()).throw(SystemExit(4))", "SystemExit: 4"),
    ],
)
def test_supports_that_declines_or_misbehaves_takes_nothing_down(install, supports, cause):
    install("odd", "odd", good("odd", "odd", more=f"supports=lambda problem: {supports},"))
    assert cause in str(sdkde_core.explain(X))
    with pytest.raises(sdkde_core.BackendUnavailable, match=re.escape(cause)):
        sdkde_core.estimate(X, backend="odd")


def test_a_device_whose_rates_are_not_known_has_no_price(install):
    install("exotic", "exotic", good("exotic", "exotic", more="work=lambda p, c: Work({'int4': 1.0}),"))
    (candidate,) = (c for c in sdkde_core.explain(X).candidates if c.name == "exotic")
    assert candidate.ok
    assert candidate.seconds is None


def test_a_backend_never_sees_an_extent_that_it_declines(install):
    """A tenth of the points is far: too many to be few, so they are split off only because the plugin needs it."""
    more = "supports=lambda p: Support(p.extent <= 50, 'to 50'), extent_limit=lambda p: 50.0,"
    install("near", "near", good("near", "near", more=more))
    x = X.copy()
    x[::10] *= 1e4
    got = sdkde_core.estimate(x, X, backend="near", bandwidth=0.5, precision="float64")
    np.testing.assert_allclose(got, reference.estimate(x, X, bandwidth=0.5), rtol=1e-9)


@pytest.mark.parametrize("cards", [0, 1])
def test_a_device_that_is_not_here_cannot(install, monkeypatch, cards):
    """A plugin for GPUs only: where there is none, it is no backend that can. If it is named, it is asked."""
    source = good("card", "card", factory="Elsewhere", more="arrays='numpy',").replace('("cpu",)', '("cuda",)')
    install("card", "card", source)
    monkeypatch.setattr(hardware, "visible_gpus", lambda: (hardware.ListedGPU("of no table", "GPU-1"),) * cards)
    explained = sdkde_core.explain(X)
    (mine,) = (c for c in explained.candidates if c.name == "card")
    assert (mine.device, explained.backend) == ("cuda:0", "numpy")
    assert ("no cuda:0 is here" in mine.reason) is (not cards)
    others = explained.reason.split("least predicted time with start-up of ")[1]
    assert int(others.split()[0]) >= sum(c.ok and c.seconds is not None for c in explained.candidates)
    with pytest.raises(BackendUnavailable, match="no device of mine here"):
        sdkde_core.estimate(X, backend="card")


def test_a_card_that_nobody_listed_is_priced(monkeypatch):
    """So the fastest is taken, not the first of the alphabet, and host data may go there."""
    card = hardware.ListedGPU("NVIDIA GeForce RTX 3080 Ti", "GPU-1", 86, 80, 1.665, 912e9)
    monkeypatch.setattr(hardware, "visible_gpus", lambda: (card,))
    infos = [importlib.import_module(f"sdkde_{module}").INFO for module in ("keops.info", "triton.info", "torch.info")]
    problem = Problem(Reduction.LOG_SUM, 4096, 32768, 16, precision="fast", device="cuda:0", extent=10.0)
    starts = [judge.start_up(info, [problem], 10_000) for info in infos]
    found = [judge.judge(info, [problem], "cuda:0", None, start) for info, start in zip(infos, starts)]
    assert all(0 < c.seconds < 1 for c in found)
    assert min(found, key=lambda c: c.total_seconds).name == "triton"
    host = select.ranked([replace(problem, device="cpu")], None, select.Wanted())
    assert {c.device for c in host if c.name == "torch"} == {"cpu", "cuda:0"}


@pytest.mark.parametrize("device", ["xpu:0", "mps", "cuda:0"])
def test_what_nobody_has_rates_for_is_ranked_by_what_a_plain_gpu_would_take(monkeypatch, device):
    monkeypatch.setattr(hardware, "visible_gpus", lambda: (hardware.ListedGPU("NVIDIA of no table", "GPU-1"),))
    kind = device.partition(":")[0]

    def record(name, operations, startup):
        info = BackendInfo(name, (1, 0), "x:y", (kind,), ("high",), startup_seconds=startup)
        info = replace(info, supports=lambda p: Support(True, "yes"), work=lambda p, c: Work(scalar_flops=operations))
        return registry.Record(name, "ok", "installed", "x", "1", "x:INFO", info)

    records = (record("ample", 1e13, 0.0), record("brisk", 1e12, 900.0), record("chary", 1e14, 0.0))
    monkeypatch.setattr(registry, "records", lambda: records)
    problem = Problem(Reduction.LOG_SUM, 10, 10, 2)
    ranked = select.ranked([problem], None, select.Wanted(data_device=device, calls=10_000))
    assert [c.name for c in ranked] == ["brisk", "ample", "chary"]
    for c in ranked:
        assert 0 < c.seconds < 60
        assert "priced as if it were a plain GPU" in c.reason
    named = select.ranked([problem], None, select.Wanted(device=kind))
    assert [c.name for c in named] == ["ample", "chary", "brisk"]  # start-up counts
    both = replace(records[0].info, devices=("cpu", kind))
    monkeypatch.setattr(registry, "records", lambda: (replace(records[0], info=both),))
    ranked = select.ranked([problem], None, select.Wanted())
    assert [c.device for c in ranked] == (["cpu", device] if kind == "cuda" else ["cpu"])
    assert ranked[0].seconds > 100  # host data stay where prices are known


QUERY = tuning.Query("triton", "mean", 1, 16, "H200 SXM", "sm_90")


def _tuners(monkeypatch, *points):
    """Only these entry points answer, not the package's own."""
    monkeypatch.setattr(tuning.importlib.metadata, "entry_points", lambda group: points)
    tuning._lookup.cache_clear()


@pytest.fixture(autouse=True)
def _ask_again():
    yield
    tuning._lookup.cache_clear()


def test_tuning_is_silent_while_nothing_is_installed(monkeypatch):
    _tuners(monkeypatch)
    assert tuning.tuned(QUERY, Problem(Reduction.MEAN, 10, 10, 2)) is None


def test_tuning_asks_the_entry_point(monkeypatch, untold):
    def lookup(query, problem, accept):
        if query.kernel == "bad":
            raise OSError("database is locked")
        return next(((c, "exact") for c in ({"BLOCK_M": 64}, {"BLOCK_M": 32}) if accept(c)), None)

    point = SimpleNamespace(name="sqlite", value="tuner:lookup", load=lambda: lookup)
    _tuners(monkeypatch, point)
    monkeypatch.setattr(tuning, "_rejected", set())
    problem = Problem(Reduction.MEAN, 10, 10, 2)
    found = tuning.tuned(QUERY, problem)
    assert found == ({"BLOCK_M": 64}, "exact")
    assert tuning.tuned(QUERY, problem, lambda config: config["BLOCK_M"] < 64) == ({"BLOCK_M": 32}, "exact")
    assert tuning.tuned(QUERY, problem, lambda config: False) is None
    with pytest.warns(SdkdeWarning, match="database is locked"):
        assert tuning.tuned(replace(QUERY, kernel="bad"), problem) is None
    assert tuning.tuned(replace(QUERY, kernel="bad"), problem) is None
    with pytest.warns(SdkdeWarning, match="sdkde-autotune --again"):
        tuning.reject(QUERY, found, RuntimeError("out of resource: shared memory\nmore"))
    tuning.reject(QUERY, found, RuntimeError("out of resource: shared memory\nmore"))
    assert tuning.tuned(QUERY, problem) == ({"BLOCK_M": 32}, "exact")
    assert tuning.tuned(replace(QUERY, dimension=32), problem) == ({"BLOCK_M": 64}, "exact")
    with tuning.using({"mean": {"BLOCK_M": 1}}):
        assert tuning.tuned(QUERY, problem) == ({"BLOCK_M": 1}, "forced")
        assert tuning.tuned(replace(QUERY, kernel="other"), problem).rung == "exact"
    monkeypatch.setenv("SDKDE_TUNING", "off")
    assert tuning.tuned(QUERY, problem) is None
    monkeypatch.setenv("SDKDE_TUNING", "of")
    with pytest.raises(ValueError, match="SDKDE_TUNING is 'of'; set 'off' or 'on'; did you mean 'off'"):
        tuning.tuned(QUERY, problem)


def test_what_can_be_tuned_is_found_by_name():
    assert tuning.space_of(BackendInfo("x", (1, 0), "x:y", ("cpu",), ("high",))) is None
    info = BackendInfo("x", (1, 2), "x:y", ("cpu",), ("high",), tuning="sdkde_core.testing.problems:CASES")
    assert tuning.space_of(info) is problems.CASES


def test_a_choice_made_without_the_data_s_outliers_is_not_taken_where_they_are_known():
    far, shares = [Problem(Reduction.MEAN, 20_000, 20_000, 8, same=True, extent=5e3, precision="fast")], []
    for share in (None, lambda step, limit: shares.append(limit) or 1e-6):
        select.choose(far, backend="numpy", share=share)
        select.choose(far, share=share)
    assert shares


@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="needs POSIX signals")
def test_what_a_signal_raises_while_a_plugin_is_asked_is_not_the_plugins():
    def handler(number, frame):
        raise SystemExit(7)

    def question():
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(5.0)

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.raises(SystemExit, match="7"):
            registry.ask(question)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert registry.ask(sys.exit, 3) == (None, "SystemExit: 3")  # which a plugin may raise
