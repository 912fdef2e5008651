"""Calibration: what was measured of backends decides what ``auto`` takes, and cannot break an estimate."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

import sdkde_core
from sdkde_core import SdkdeWarning
from sdkde_core.choice import calibration, cards, hardware, judge, registry, select
from sdkde_core.choice.calibration import Calibration, calibration_of, ignored, machine_of
from sdkde_core.choice.cards import Processor
from sdkde_core.choice.hardware import NOMINAL_CORE
from sdkde_core.protocol import BackendInfo, Problem, Reduction, Work

PROBLEM = Problem(Reduction.MEAN, 100, 100, 16, precision="fast")


def test_factors_are_interpolated_between_dimensions():
    found = Calibration.of({"mean fast 4": 2.0, "mean fast 64": 8.0, "overhead": 0.5, "startup": 3.0})
    assert (found.startup, found.overhead) == (3.0, 0.5)
    at = {d: found.factor(replace(PROBLEM, d=d)) for d in (1, 4, 16, 64, 1000)}
    assert at == pytest.approx({1: 2.0, 4: 2.0, 16: 4.0, 64: 8.0, 1000: 8.0})
    assert found.seconds(PROBLEM, 0.25) == pytest.approx(0.5 + 4.0 * 0.25)
    other = replace(PROBLEM, precision="high")
    assert found.factor(other) == 1.0  # nothing known
    assert found and not Calibration()


@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
def test_what_no_measurement_gives_is_left_out(value):
    found = Calibration.of({"mean fast 16": value, "overhead": value, "mean fast x": 2.0, "of a later sdkde": 1.0})
    assert found.factor(PROBLEM) == 1.0
    assert found.overhead == 0.0


def test_a_cpu_is_known_by_its_host_and_a_card_by_its_name():
    assert machine_of(cards.gpu("h200").at()) == "H200 SXM"
    assert machine_of(replace(NOMINAL_CORE, threads=2)).endswith(": CPU core, nominal")


@pytest.fixture
def known(monkeypatch):
    """What is stored, by (backend, machine)."""
    values = {}
    monkeypatch.setattr(calibration, "_lookup", lambda: lambda backend, machine: values.get((backend, machine), {}))
    return values


def _info(name, flops):
    work = Work(scalar_flops=flops)
    return BackendInfo(
        name, (1, 2), "sdkde_numpy.backend:NumpyBackend", ("cpu",), ("fast", "high"), work=lambda problem, config: work
    )


def test_auto_takes_what_is_faster_here(known, monkeypatch):
    on = Processor("p", {"float64": 1e9}, 1e9, 1e9, 1e9, 0.0, threads=2, overlaps=False)
    records = [
        registry.Record(name, "ok", "installed", "x", "1", "x:INFO", _info(name, flops))
        for name, flops in (("one", 1e9), ("two", 2e9))
    ]
    monkeypatch.setattr(registry, "records", lambda: tuple(records))
    monkeypatch.setattr(judge, "processor", lambda device: on)
    problem = PROBLEM

    def ranked():
        return [(c.name, c.seconds, c.startup_seconds) for c in select.rank([problem])]

    assert [name for name, *_ in ranked()] == ["one", "two"]
    before = {name: seconds for name, seconds, _ in ranked()}
    known["one", machine_of(on)] = {"mean fast 16": 10.0, "overhead": 0.25, "startup": 1.5}
    found = {name: (seconds, startup) for name, seconds, startup in ranked()}
    assert found["one"] == (pytest.approx(10 * before["one"] + 0.25), 1.5)
    assert found["two"] == (before["two"], 0.0)
    assert ranked()[0][0] == "two"
    (told,) = [c.reason for c in select.rank([problem]) if c.name == "one"]
    assert "priced as measured on this machine" in told
    with ignored():
        assert ranked()[0][0] == "one"
    monkeypatch.setenv("SDKDE_TUNING", "off")
    assert ranked()[0][0] == "one"


def test_a_look_up_that_fails_is_no_calibration(monkeypatch, untold):
    def broken(backend, machine):
        raise RuntimeError("no such table")

    monkeypatch.setattr(calibration, "_lookup", lambda: broken)
    with pytest.warns(SdkdeWarning, match="calibration of numpy is not used.*no such table"):
        assert not calibration_of("numpy", NOMINAL_CORE)
    assert not calibration_of("numpy", NOMINAL_CORE)


RATES = {
    "name": "a CPU",
    "matrix_flops": {"float32": 8e10, "float64": 4e10},
    "scalar_flops": 5e9,
    "exps": 1e9,
    "bandwidth": 1e10,
    "launch_seconds": 1e-5,
    "overlaps": False,
    "numpy": np.__version__,
}
DAMAGED = {
    "empty": b"",
    "truncated": json.dumps(RATES).encode()[:-9],
    "binary": b"\xff\xfe\x00\x93",
    "deep": b"[" * 100_000,
    **{f"a {type(x).__name__}": json.dumps(x).encode() for x in ([RATES], "rates", 3, None)},
    "nothing in it": b"{}",
    "of a newer sdkde": json.dumps({**RATES, "cores": 3}).encode(),
    "words": json.dumps({**RATES, "exps": "many"}).encode(),
    "no table": json.dumps({**RATES, "matrix_flops": 8e10}).encode(),
    "a dtype less": json.dumps({**RATES, "matrix_flops": {"float32": 8e10}}).encode(),
    "a dtype more": json.dumps({**RATES, "matrix_flops": {**RATES["matrix_flops"], "float16": "x"}}).encode(),
    "NaN": json.dumps({**RATES, "bandwidth": math.nan}).encode(),
    "infinity": json.dumps({**RATES, "scalar_flops": math.inf}).encode(),
    "zero": json.dumps({**RATES, "exps": 0}).encode(),
}


@pytest.fixture
def cpu_file(tmp_path, monkeypatch, untold):
    path = tmp_path / "cpu.json"
    monkeypatch.setattr(hardware, "cpu_cache_file", lambda: path)
    hardware._measured_core.cache_clear()
    yield path
    hardware._measured_core.cache_clear()


@pytest.mark.parametrize("damage", DAMAGED)
def test_damaged_rates_of_the_cpu_are_told_once_and_not_used(cpu_file, damage):
    cpu_file.write_bytes(DAMAGED[damage])
    with pytest.warns(SdkdeWarning) as told:
        sdkde_core.estimate([0.0, 1.0, 3.0], [1.0])
    (warning,) = told
    assert str(cpu_file) in str(warning.message)
    assert "sdkde doctor --measure" in str(warning.message)
    assert warning.filename == __file__
    assert hardware.cpu().source == NOMINAL_CORE.source
    hardware._measured_core.cache_clear()
    assert hardware.cpu().source == NOMINAL_CORE.source


def test_rates_of_the_cpu_that_are_whole_are_used_and_missing_ones_are_no_news(cpu_file):
    assert hardware.cpu().source == NOMINAL_CORE.source
    cpu_file.write_text(json.dumps(RATES))
    hardware._measured_core.cache_clear()
    assert hardware.cpu().name.startswith("a CPU")


@pytest.mark.parametrize("value", [math.nan, math.inf, -1e9, 1e9, "many", None, 10**400])
def test_a_value_that_is_none_spoils_itself_only(value):
    found = Calibration.of({"startup": value, "overhead": 0.5, "mean fast 4": value, "mean fast 16": 2.0})
    assert found == Calibration.of({"overhead": 0.5, "mean fast 16": 2.0})
    assert found.overhead == 0.5


@pytest.mark.parametrize("d", ["0", "9" * 5000, "²", "-3"])
def test_a_factor_of_no_dimension_is_left_out(d):
    assert Calibration.of({f"mean fast {d}": 2.0}) == Calibration()
