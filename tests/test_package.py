"""The package as users meet it: what installs, what importing it loads and costs, and which way the arrows point."""

import ast
import functools
import importlib
import inspect
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from packaging.metadata import Metadata

import sdkde_core

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
    ours = {"sdkde_core", "numpy", "array_api_compat", "platformdirs", *backends}
    assert top <= {*ours, "cuda", *sys.stdlib_module_names}  # "cuda" has nothing to run: it is a namespace
    assert not {"sdkde_core.cli", "sdkde_core.testing", *(f"{name}.backend" for name in backends)} & set(loaded)
    assert len(loaded) < 250, sorted(loaded)


@functools.cache
def _imports(path):
    """Full names of the modules that a file imports, relative imports among them."""
    package, found = [part for part in path.relative_to(ROOT).parts[:-1] if part not in ("backends", "autotune")], []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, (base, node.module)))
            found += [module, *(f"{module}.{alias.name}" for alias in node.names)]  # a module, or a name in one
    return found


#: The core's rooms, each with the rooms that it may import from. A file beside them is a room of its own.
ROOMS = {
    "messages": set(),
    "protocol": {"messages"},
    "fresh": set(),
    "storage": {"messages"},
    "arrays": set(),
    "archive": {"messages", "storage", "arrays"},
    "engine": {"protocol", "arrays"},
    "nearby": {"protocol", "arrays", "engine"},
    "choice": {"messages", "protocol", "fresh", "storage", "engine"},
    "tuning": {"messages", "protocol", "choice"},
    "plugin": {"messages", "protocol", "fresh", "storage", "arrays", "engine", "choice"},
    "bandwidth": {"messages", "arrays", "engine", "choice"},
    "coordinates": {"messages", "arrays", "engine", "bandwidth"},
    "files": {"messages", "storage", "arrays"},
    "spreading": {"messages", "storage", "protocol", "arrays", "engine", "choice", "files"},
    "estimator": {
        "messages",
        "archive",
        "protocol",
        "arrays",
        "nearby",
        "engine",
        "choice",
        "bandwidth",
        "coordinates",
        "spreading",
    },
    "scale": {"messages", "arrays", "choice", "bandwidth", "files", "spreading", "estimator"},
    "api": {"protocol", "arrays", "choice", "bandwidth", "coordinates", "estimator", "scale"},
    "distributed": {"messages", "arrays", "spreading", "estimator", "api"},
    "interop": {"messages", "archive", "protocol", "arrays", "engine", "bandwidth", "coordinates", "estimator", "api"},
    "cli": {
        *("messages", "protocol", "storage", "arrays", "choice", "bandwidth", "files", "estimator", "scale", "api"),
        *("archive", "interop"),
    },
    "testing": {"protocol", "arrays", "engine", "choice", "plugin", "bandwidth", "estimator"},
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
    own = {
        "cli": {"click", "sklearn", "matplotlib"},
        "testing": {"pytest", "threadpoolctl"},
        "storage.py": {"platformdirs"},
    }
    own |= {"choice": {"pynvml"}, "engine": {"torch"}, "interop": {"matplotlib", "sklearn"}}
    own |= {"estimator": {"scipy", "torch", "tqdm"}, "distributed.py": {"torch"}, "spreading": {"dask"}}
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
    names = ("protocol", "plugin", "tuning", "testing", "nearby")
    public = {}
    for name in names:
        there = vars(importlib.import_module(f"sdkde_core.{name}"))
        public[name] = there.get("__all__") or [n for n, x in there.items() if n[0] != "_" and not inspect.ismodule(x)]
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
        "click",
        "click_default_group",
        "filelock",
        "numpy",
        "optuna",
        "sqlite_utils",
        "torch",
        "tqdm",
    }
    light = {"__init__.py", "lookup.py", "measure.py", "records.py"}
    only = {
        "sqlite_utils": {"store.py"},
        "optuna": {"search.py"},
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


def _tracked():
    """The names of the files that are tracked, or new and not ignored; None in an unpacked sdist."""
    if not (ROOT / ".git").exists():
        return None
    listed = subprocess.run(
        ["git", "ls-files", "-z", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return {name for name in listed.stdout.split("\0") if name and (ROOT / name).exists()}


def _copy_source(folder):
    names = _tracked()
    if names is None:
        shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns("__pycache__", "build", "*.egg-info"))
        return
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, folder / name)


def _check_metadata(text):
    """As PyPI does."""
    metadata = Metadata.from_email(text, validate=True)
    assert metadata.name == "sdkde-core" and str(metadata.version) == sdkde_core.__version__
    assert metadata.license_expression == "BSD-3-Clause" and not any("License" in c for c in metadata.classifiers)
    assert metadata.description_content_type == "text/markdown" and metadata.description.startswith("# sdkde")
    assert metadata.project_urls["Paper"] == "https://arxiv.org/abs/2602.10378"
    assert set(metadata.provides_extra) >= {"all", "plot", "sklearn"}


def test_the_wheel_works_outside_the_checkout(tmp_path):
    """Top-level names are sdkde_* only, and an unpacked wheel on the path has its entry points."""
    build = "from setuptools import build_meta; import sys; print(build_meta.build_wheel(sys.argv[1]))"
    source = tmp_path / "source"
    _copy_source(source)
    subprocess.run([sys.executable, "-c", build, str(tmp_path)], cwd=source, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = {n.partition("/")[0] for n in archive.namelist()}
        backends = ("fourier", "hopper", "keops", "numba", "numpy", "torch", "triton")
        ours = {f"sdkde_{x}" for x in ("core", "autotune", *backends)}
        assert {n for n in names if not n.endswith(".dist-info")} == ours
        assert {"sdkde_core/py.typed", "sdkde_numpy/py.typed"} <= set(archive.namelist())
        assert any(name.startswith("sdkde_autotune/tables/") for name in archive.namelist())
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        _check_metadata(archive.read(metadata))
        archive.extractall(tmp_path / "site")
    code = """
import importlib.metadata, sdkde_core
assert "site" in sdkde_core.__file__, sdkde_core.__file__
assert sdkde_core.explain((10, 2)).backend == "numpy"
commands = importlib.metadata.distribution("sdkde-core").entry_points.select(group="console_scripts")
assert {command.name for command in commands if callable(command.load())} == {"sdkde", "sdkde-autotune"}
print(sdkde_core.estimate([0.0, 1.0, 3.0], [1.0]))
"""
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    assert _python(code, cwd=tmp_path, env=env).startswith("[0.")


@pytest.mark.slow
def test_the_sdist_has_what_is_tracked(tmp_path):
    """As `python -m build` makes it, and a wheel from it."""
    pytest.importorskip("build")
    source = tmp_path / "source"
    _copy_source(source)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(tmp_path), str(source)]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    assert len([*tmp_path.glob("*.whl")]) == 1
    (file,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(file) as archive:
        names = {name.partition("/")[2] for name in archive.getnames() if not archive.getmember(name).isdir()}
        (top,) = {name.partition("/")[0] for name in archive.getnames()}
        _check_metadata(archive.extractfile(f"{top}/PKG-INFO").read())
    made = {name for name in names if name in ("PKG-INFO", "setup.cfg") or ".egg-info/" in name}
    tracked = _tracked()
    if tracked is None:
        pytest.skip("an unpacked sdist does not know what is tracked")
    assert names - made == tracked - {".gitignore"}


def test_the_version_is_in_the_changelog_and_the_citation():
    assert f"## {sdkde_core.__version__}" in (ROOT / "CHANGELOG.md").read_text()
    assert f"version: {sdkde_core.__version__}" in (ROOT / "CITATION.cff").read_text()


@pytest.mark.parametrize("backend", [p for p in (ROOT / "backends").iterdir() if p.is_dir()], ids=lambda p: p.name)
def test_a_backends_package_is_a_docstring(backend):
    tree = ast.parse((backend / "__init__.py").read_text())
    assert ast.get_docstring(tree)
    assert len(tree.body) == 1
