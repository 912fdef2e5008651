"""The command ``sdkde estimate`` on small samples, and its refusals; each test in a folder of its own."""

import numpy as np
import pytest
from click.testing import CliRunner

from sdkde_core.cli.main import main

X = np.random.default_rng(0).normal(size=(1224, 3))  # in two blocks of rows
HOW = {"bandwidth": 0.5, "backend": "numpy"}


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    """Run in a folder of the test's own."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(name="zarr")
def needs_zarr():
    return pytest.importorskip("zarr")


def command(*arguments):
    return CliRunner().invoke(main, ["estimate", *arguments, "--bandwidth", "0.5", "--backend", "numpy", "-q"])


def refused(*arguments):
    """Run a command that must fail in one line; return that."""
    result = command(*arguments)
    assert result.exit_code == 2 and result.stderr.count("\n") == 1, (result.output, result.exception)
    return result.stderr
