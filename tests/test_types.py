"""What those who check types, and consoles that complete names, are told: the same as what is taken and returned."""

import inspect
import re
import subprocess
import sys
import types
import typing

import numpy as np
import pytest

import sdkde_core
from sdkde_core.estimator.request import Options

X = np.random.default_rng(0).normal(size=(30, 2))
HINTS = typing.get_type_hints(Options)


def names(hint):
    """The strings that a type allows by name."""
    if typing.get_origin(hint) is typing.Literal:
        return set(typing.get_args(hint))
    parts = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else ()
    return set().union(*map(names, parts))


@pytest.mark.parametrize("option", sorted(name for name, hint in HINTS.items() if names(hint)))
def test_the_names_of_an_option_are_those_that_an_error_lists(option):
    with pytest.raises(ValueError, match=rf"^{option} is 'nothing'; pass ") as error:
        sdkde_core.estimate(X, **{option: "nothing"})
    assert set(re.findall(r"'([\w-]+)'", str(error.value))) - {"nothing"} == names(HINTS[option])


def test_every_option_that_is_a_name_has_a_type_of_names():
    assert {name for name, hint in HINTS.items() if names(hint)} == {
        *("method", "bandwidth", "step", "tails", "coordinates", "kernel", "negative", "precision"),
    }
    for name in names(HINTS["bandwidth"]):
        sdkde_core.estimate(X, bandwidth=name, method="kde")
    for name in names(HINTS["coordinates"]):
        sdkde_core.estimate(abs(X) / 10.0, coordinates=name, bandwidth=0.5)


def test_the_classes_and_select_bandwidth_have_the_same_types():
    pytest.importorskip("sklearn")
    ours = typing.get_type_hints(sdkde_core.KernelDensity.__init__)
    for name in set(ours) & set(HINTS) - {"bandwidth"}:
        assert ours[name] == HINTS[name], name
    assert ours["bandwidth"] == HINTS["bandwidth"]
    kde = typing.get_type_hints(sdkde_core.gaussian_kde.__init__)
    for name in set(kde) & set(HINTS):
        assert kde[name] == HINTS[name], name
    assert names(kde["bw_method"]) == names(HINTS["bandwidth"])
    choosing = typing.get_type_hints(sdkde_core.select_bandwidth)
    assert names(choosing["rule"]) == names(choosing["base"]) == names(HINTS["bandwidth"])
    assert names(choosing["method"]) == names(HINTS["method"]) - {"stacked"}
    assert choosing["return"] is sdkde_core.Bandwidth
    assert typing.get_type_hints(sdkde_core.prepare)["return"] is sdkde_core.Prepared


FUNCTIONS = [sdkde_core.estimate, sdkde_core.grad_log_density, sdkde_core.debias]
METHODS = [sdkde_core.Prepared.estimate, sdkde_core.Prepared.grad_log_density]


@pytest.mark.parametrize("function", FUNCTIONS + METHODS)
def test_overloads_have_all_parameters_of_the_function(function):
    """And begin with NumPy's arrays, and end with anything."""
    taken, found = set(inspect.signature(function).parameters), set()
    overloads = typing.get_overloads(function)
    for one in overloads:
        hints = typing.get_type_hints(one)
        parameters = set(inspect.signature(one).parameters)
        if "options" in parameters:
            (options,) = typing.get_args(hints["options"])
            parameters = parameters - {"options"} | set(typing.get_type_hints(options))
        assert parameters <= taken
        found |= parameters
    assert found == taken
    returned = [typing.get_type_hints(one)["return"] for one in overloads]
    assert typing.get_origin(returned[0]) is np.ndarray
    assert returned[-1] is typing.Any


def test_dir_has_what_is_public():
    modules = {"distributed", "plots", "plugin", "protocol", "scale", "testing", "tuning"}
    assert dir(sdkde_core) == sorted({*sdkde_core.__all__, *modules})
    code = """
import sys, sdkde_core
assert "sdkde_core.scale" not in sys.modules and "torch" not in sys.modules
dir(sdkde_core)
assert "sklearn" not in sys.modules and "torch" not in sys.modules
for name in ("plugin", "protocol", "scale", "testing", "tuning"):
    assert getattr(sdkde_core, name).__name__ == f"sdkde_core.{name}"
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_dir_leaves_out_what_needs_a_library_that_is_not_here(monkeypatch):
    """As help() and completion ask for everything that is listed."""
    for name in ("sklearn", "torch"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(vars(sdkde_core), "KernelDensity", raising=False)
    assert not {"KernelDensity", "distributed"} & set(dir(sdkde_core))
    assert {"gaussian_kde", "plots", "testing"} <= set(dir(sdkde_core))
    assert "estimate" in dict(inspect.getmembers(sdkde_core))
