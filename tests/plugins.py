"""Distributions with a plugin, installed for a test as pip would lay them out."""

import sys
import textwrap

import pytest

from sdkde_core import tuning
from sdkde_core.choice import registry

__all__ = ["installer"]


@pytest.fixture(name="install")
def installer(tmp_path, monkeypatch):
    """``install(distribution, entry point, source)``: a distribution of one module with that source."""
    monkeypatch.syspath_prepend(str(tmp_path))
    modules = []

    def install(distribution, entry, source, module=None):
        module = module or f"plugin_{distribution.replace('-', '_')}"
        (tmp_path / f"{module}.py").write_text(textwrap.dedent(source))
        info = tmp_path / f"{distribution}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[sdkde.backends]\n{entry} = {module}:INFO\n")
        modules.append(module)
        registry.refresh()
        tuning._lookup.cache_clear()

    yield install
    for module in modules:
        sys.modules.pop(module, None)
    monkeypatch.undo()
    registry.refresh()
    tuning._lookup.cache_clear()
