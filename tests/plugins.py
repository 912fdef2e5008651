"""Distributions with a plugin, installed for a test as pip would lay them out."""

import sys
import textwrap

import pytest

from sdkde_core import tuning
from sdkde_core.choice import registry

__all__ = ["good", "installer"]


#: NumPy's backend as a plugin, with ways to fail.
GOOD = """
    from sdkde_core.protocol import BackendInfo, Support, Work
    from sdkde_numpy.backend import NumpyBackend as Implementation
    INFO = BackendInfo(
        name="{name}", protocol={protocol}, implementation="{module}:{factory}", devices=("cpu",),
        precisions=("fast", "high", "float64"), features=frozenset({features}),
        {more}
    )
    def failing(**options):
        raise ImportError("libfoo.so.3: cannot open shared object file")
    class Elsewhere(Implementation):
        def probe(self, device):
            return Support(False, "no device of mine here")
    class Exits(Implementation):
        def probe(self, device):
            raise SystemExit(3)
    class Raises(Implementation):
        def reduce(self, *given):
            raise RuntimeError("it broke")
"""


def good(name, distribution, **changes):
    """The source of a plugin."""
    values = {"name": name, "protocol": (1, 0), "module": f"plugin_{distribution.replace('-', '_')}"}
    values |= {"factory": "Implementation", "features": {"weights"}, "more": ""}
    return GOOD.format(**(values | changes))


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
        forget()

    def forget():
        for kept in (registry.made, registry.chosen):
            kept.clear()
        registry.records.cache_clear()
        tuning._lookup.cache_clear()

    yield install
    for module in modules:
        sys.modules.pop(module, None)
    monkeypatch.undo()
    forget()
