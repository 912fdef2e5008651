"""What those who check types, and consoles that complete names, are told: the same as what is taken and returned."""

import inspect
import operator
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


@pytest.mark.parametrize(
    "option", ["method", "bandwidth", "step", "tails", "coordinates", "kernel", "negative", "precision"]
)
def test_the_names_of_an_option_are_those_that_its_error_lists(option):
    with pytest.raises(ValueError, match=rf"^{option} is 'nothing'; pass ") as error:
        sdkde_core.estimate(X, **{option: "nothing"})
    assert set(re.findall(r"'([\w-]+)'", str(error.value))) - {"nothing"} == names(HINTS[option]) != set()


def test_the_classes_and_select_bandwidth_have_the_same_types():
    pytest.importorskip("sklearn")
    for made in (sdkde_core.KernelDensity, sdkde_core.gaussian_kde):
        hints = typing.get_type_hints(made.__init__)
        shared = set(hints) & set(HINTS)
        assert shared > {"method", "precision", "coordinates", "support"}
        assert {name: hints[name] for name in shared} == {name: HINTS[name] for name in shared}
    assert names(hints["bw_method"]) == names(HINTS["bandwidth"])
    choosing = typing.get_type_hints(sdkde_core.select_bandwidth)
    assert names(choosing["rule"]) == names(choosing["base"]) == names(HINTS["bandwidth"])
    assert names(choosing["method"]) == names(HINTS["method"]) - {"stacked"}
    assert choosing["return"] is sdkde_core.Bandwidth
    assert typing.get_type_hints(sdkde_core.prepare)["return"] is sdkde_core.Prepared


@pytest.mark.parametrize(
    "name", ["estimate", "grad_log_density", "debias", "Prepared.estimate", "Prepared.grad_log_density"]
)
def test_overloads_have_all_parameters_of_the_function(name):
    """And begin with NumPy's arrays, and end with anything."""
    function = operator.attrgetter(name)(sdkde_core)
    taken, found, returned = set(inspect.signature(function).parameters), set(), []
    for one in typing.get_overloads(function):
        hints, parameters = typing.get_type_hints(one), set(inspect.signature(one).parameters)
        for options in typing.get_args(hints.get("options")):
            parameters = parameters - {"options"} | set(typing.get_type_hints(options))
        found |= parameters
        returned.append(hints["return"])
    assert found == taken
    assert typing.get_origin(returned[0]) is np.ndarray
    assert returned[-1] is typing.Any


def test_dir_has_what_is_public_and_imports_nothing():
    modules = {"distributed", "plots", "plugin", "protocol", "scale", "testing", "tuning"}
    assert dir(sdkde_core) == sorted({*sdkde_core.__all__, *modules})
    code = """
import sys, sdkde_core
dir(sdkde_core)
assert not {"sdkde_core.scale", "sklearn", "torch"} & set(sys.modules)
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
    assert {"estimate", "gaussian_kde", "plots", "testing"} <= {name for name, _ in inspect.getmembers(sdkde_core)}
