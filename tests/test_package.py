"""The package as users meet it: what installs, what importing it loads and costs, and which way the arrows point."""

import ast
import importlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def _python(code, **options):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, **options).stdout


def test_importing_and_listing_load_little():
    """Beside NumPy and the standard library: most of the core, and backends' declarations."""
    code = """
import sys, numpy
before = set(sys.modules)
import sdkde_core; sdkde_core.backends()
print(*set(sys.modules) - before)
"""
    loaded = _python(code).split()
    top = {name.partition(".")[0] for name in loaded} - {name for name in loaded if name.startswith("__editable__")}
    backends = {path.name for path in (ROOT / "backends").iterdir()}
    assert top <= {"sdkde_core", "numpy", "array_api_compat", "platformdirs", *backends, *sys.stdlib_module_names}
    assert not {"sdkde_core.cli", "sdkde_core.testing", *(f"{name}.backend" for name in backends)} & set(loaded)
    assert len(loaded) < 250, sorted(loaded)


def _imports(path):
    """Full names of the modules that a file imports, relative imports among them."""
    package = [part for part in path.relative_to(ROOT).parts[:-1] if part not in ("backends", "autotune")]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, (base, node.module)))
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)  # a module, or a name in one


#: The core's rooms, each with the rooms that it may import from. A file beside them is a room of its own.
ROOMS = {
    "messages": set(),
    "protocol": {"messages"},
    "fresh": set(),
    "storage": set(),
    "arrays": set(),
    "engine": {"protocol", "arrays"},
    "choice": {"messages", "protocol", "fresh", "storage", "engine"},
    "tuning": {"messages", "protocol", "choice"},
    "plugin": {"messages", "protocol", "fresh", "storage", "arrays", "engine", "choice"},
    "bandwidth": {"messages", "arrays", "engine", "choice"},
    "estimator": {"messages", "protocol", "arrays", "engine", "choice", "bandwidth"},
    "api": {"protocol", "arrays", "choice", "bandwidth", "estimator"},
    "interop": {"arrays", "bandwidth", "estimator", "api"},
    "cli": {"messages", "protocol", "storage", "arrays", "choice", "bandwidth", "estimator", "api"},
    "testing": {"protocol", "arrays", "engine", "choice", "plugin"},
}


def test_the_cores_rooms_import_each_other_one_way():
    """The table above has no circle, and the code imports nothing that it does not have."""
    order = list(ROOMS)
    assert all(order.index(other) < order.index(room) for room, others in ROOMS.items() for other in others)
    for path in sorted((ROOT / "sdkde_core").rglob("*.py")):
        room = path.relative_to(ROOT / "sdkde_core").parts[0].removesuffix(".py")
        if room == "__init__":
            continue
        found = {name.split(".")[1] for name in _imports(path) if name.startswith("sdkde_core.")}
        assert found - {"__version__"} <= ROOMS[room] | {room}, path


def test_what_the_core_imports():
    allowed = {"numpy", "array_api_compat", "sdkde_core", *sys.stdlib_module_names}
    own = {"cli": {"click", "sklearn", "matplotlib"}, "testing": {"pytest"}, "storage.py": {"platformdirs"}}
    own |= {"choice": {"pynvml"}, "engine": {"threadpoolctl"}, "bandwidth": {"matplotlib"}, "estimator": {"scipy"}}
    for path in sorted((ROOT / "sdkde_core").rglob("*.py")):
        room = path.relative_to(ROOT / "sdkde_core").parts[0]
        found = {name.partition(".")[0] for name in _imports(path)}
        assert found <= allowed | own.get(room, set()), path


def test_backends_import_the_core_and_not_each_other():
    for package in sorted((ROOT / "backends").iterdir()):
        for path in package.glob("*.py"):
            for name in _imports(path):
                if name.startswith("sdkde_"):
                    assert name.partition(".")[0] in ("sdkde_core", package.name), (path, name)
        info = {n.partition(".")[0] for n in _imports(package / "info.py")}
        light = {"sdkde_core", "numpy", package.name, *sys.stdlib_module_names}  # what the core has imported
        assert info <= light, f"{package.name}: info must be light"


def test_backends_import_from_the_core_what_it_exports_to_all():
    """So that a third party's backend can do all that ours do."""
    names = ("protocol", "plugin", "tuning", "testing")
    public = {name: importlib.import_module(f"sdkde_core.{name}").__all__ for name in names}
    exported = {f"sdkde_core.{room}" for room in public}
    exported |= {f"sdkde_core.{room}.{name}" for room, names in public.items() for name in names}
    private = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in (ROOT / "backends").rglob("*.py")
        for name in _imports(path)
        if name.startswith("sdkde_core.") and name not in exported
    }
    assert not private, sorted(private)


def test_the_tuner_imports_the_core_and_no_backend():
    """And what `estimate` loads of it needs the standard library only, without the extra."""
    library = {
        "optuna",
        "sqlite_utils",
        "click",
        "click_default_group",
        "filelock",
        "tqdm",
        "matplotlib",
        "numpy",
        "torch",
    }
    light = {"__init__.py", "key.py", "lookup.py", "provenance.py", "records.py", "runner.py"}
    only = {
        "sqlite_utils": {"schema.py", "store.py"},
        "optuna": {"report.py", "search.py"},  # it draws, and it searches
        "torch": {"bench.py"},
    }
    for path in sorted((ROOT / "autotune" / "sdkde_autotune").glob("*.py")):
        found = {name.partition(".")[0] for name in _imports(path)}
        found -= {"sdkde_core", "sdkde_autotune", *sys.stdlib_module_names}
        assert found <= (set() if path.name in light else library), path
        assert all(path.name in where for name, where in only.items() if name in found), path


def test_the_core_names_no_backend():
    names = [p.name for p in (ROOT / "backends").iterdir() if p.is_dir()]
    for path in (ROOT / "sdkde_core").rglob("*.py"):
        text = path.read_text()
        assert not [n for n in names if n in text], path


def test_the_wheel_works_outside_the_checkout(tmp_path):
    """Top-level names are sdkde_* only, and an unpacked wheel on the path has its entry points."""
    build = "from setuptools import build_meta; import sys; print(build_meta.build_wheel(sys.argv[1]))"
    source = tmp_path / "source"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(source)], check=True)
    changed = subprocess.run(["git", "ls-files", "-mo", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    for name in changed.stdout.split():
        if (ROOT / name).exists():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    subprocess.run([sys.executable, "-c", build, str(tmp_path)], cwd=source, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = {n.partition("/")[0] for n in archive.namelist()}
        ours = {f"sdkde_{x}" for x in ("core", "fourier", "keops", "numba", "numpy", "torch", "triton", "autotune")}
        assert {n for n in names if not n.endswith(".dist-info")} == ours
        assert {"sdkde_core/py.typed", "sdkde_numpy/py.typed"} <= set(archive.namelist())
        archive.extractall(tmp_path / "site")
    code = """
import sdkde_core
assert "site" in sdkde_core.__file__, sdkde_core.__file__
assert sdkde_core.explain((10, 2)).backend == "numpy"
print(sdkde_core.estimate([0.0, 1.0, 3.0], [1.0]))
"""
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    assert _python(code, cwd=tmp_path, env=env).startswith("[0.")


def test_the_version_is_in_the_changelog_and_the_citation():
    import sdkde_core

    assert f"## {sdkde_core.__version__}" in (ROOT / "CHANGELOG.md").read_text()
    assert f"version: {sdkde_core.__version__}" in (ROOT / "CITATION.cff").read_text()


def test_public_names_have_docstrings():
    import sdkde_core

    for name in sdkde_core.__all__:
        if name != "__version__":
            assert len(getattr(sdkde_core, name).__doc__) > 40, name


@pytest.mark.parametrize("backend", [p for p in (ROOT / "backends").iterdir() if p.is_dir()], ids=lambda p: p.name)
def test_a_backends_package_is_a_docstring(backend):
    tree = ast.parse((backend / "__init__.py").read_text())
    assert ast.get_docstring(tree)
    assert len(tree.body) == 1
