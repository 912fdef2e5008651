"""Packages by strangers, installed as users install them, and the page that says how to write one.

Everything runs in processes of its own, outside the checkout, that see the packages only through their entry points.
"""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest

from sdkde_core.protocol import FEATURES, PRECISIONS, TOLERANCES, BackendInfo, Reduction

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "docs" / "examples" / "sdkde-jax"
PAGE = (ROOT / "docs" / "writing-a-backend.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.S | re.M)
FILE = re.compile(r"# file: (\S+)\n")
FILES = {FILE.match(body)[1]: body.partition("\n")[2] for _, body in BLOCKS if FILE.match(body)}
SCRIPTS = [body for language, body in BLOCKS if language == "python" and not FILE.match(body)]


class Site:
    """A folder that packages are installed into, and a folder to run in."""

    def __init__(self, folder, source=None):
        self.folder, self.work = folder / "site", folder / "work"
        self.work.mkdir()
        if source:
            self.lay_out(source)

    def lay_out(self, source):
        """Install a package as pip would, which takes seconds."""
        project = tomllib.loads((source / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        info = self.folder / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
        )
        entries = project["entry-points"]["sdkde.backends"].items()
        lines = ["[sdkde.backends]", *(f"{name} = {value}" for name, value in entries)]
        (info / "entry_points.txt").write_text("\n".join(lines))
        for package in source.rglob("__init__.py"):
            if "build" not in package.relative_to(source).parts:  # where pip may have built it
                shutil.copytree(package.parent, self.folder / package.parent.name)

    def python(self, *arguments):
        """Run Python where the packages are found; return what it prints."""
        ours = ("PYTEST_ADDOPTS", "SDKDE_CONFORMANCE")
        env = {k: v for k, v in os.environ.items() if k not in ours} | {"PYTHONPATH": str(self.folder)}
        done = subprocess.run([sys.executable, *arguments], cwd=self.work, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def json(self, code):
        """What a script prints last, as JSON; warnings are errors in it."""
        return json.loads(self.python("-W", "error", "-c", code).splitlines()[-1])

    def passes(self, source, least):
        """Install a plugin with pip and run its test file: what it does not declare is skipped, and nothing else is."""
        how = ("--isolated", "--disable-pip-version-check", "install", "--quiet", "--no-deps", "--no-index")
        self.python("-m", "pip", *how, "--no-build-isolation", "--target", str(self.folder), str(source))
        report = self.python(
            "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "-W", "error", str(source / "tests")
        )
        passed = re.search(r"^(\d+) passed", report, re.M)
        assert passed and int(passed[1]) > least, report
        assert all("does not declare" in line for line in report.splitlines() if line.startswith("SKIPPED")), report


@pytest.fixture(scope="session")
def toy(tmp_path_factory):
    """The package that the page builds, as a folder."""
    folder = tmp_path_factory.mktemp("source")
    for name, text in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "sdkde_toy" / "__init__.py").touch()
    return folder


@pytest.fixture(scope="session")
def strangers(toy, tmp_path_factory):
    """The page's package, installed."""
    return Site(tmp_path_factory.mktemp("strangers"), toy)


# --- strangers -----------------------------------------------------------------------------------------------------


def test_auto_takes_the_toy_where_it_is_fastest_and_only_there(strangers):
    code = """
import json, sys, numpy as np, sdkde_core
record = next(r for r in sdkde_core.backends() if r.name == "toy")
assert "sdkde_toy.backend" not in sys.modules
assert (record.status, record.distribution, record.version) == ("ok", "sdkde-toy", "1.0")
small = sdkde_core.explain((20, 2), (5, 2))
x = np.random.default_rng(0).normal(size=(20, 2))
same = bool((sdkde_core.estimate(x) == sdkde_core.estimate(x, backend="toy")).all())
print(json.dumps([small.backend, small.reason, str(small), sdkde_core.explain((20000, 8)).backend, same]))
"""
    backend, reason, text, large, same = strangers.json(code)
    assert backend == "toy"
    assert re.fullmatch(r"least predicted time with start-up of \d+ (that can|whose time is known)", reason)
    assert "→ toy (cpu)" in text
    assert f"chosen: toy on cpu, {reason}" in text
    assert large != "toy"
    assert same


@pytest.mark.slow
def test_the_pages_backend_passes_the_suite(toy, tmp_path):
    Site(tmp_path).passes(toy, 500)


# --- the page and the example ---------------------------------------------------------------------------------------


@pytest.mark.skipif(not importlib.util.find_spec("jax"), reason="JAX is not installed: pip install jax")
@pytest.mark.slow
def test_the_example_passes_the_suite(tmp_path):
    ignored = shutil.ignore_patterns("*.egg-info", "__pycache__")
    Site(tmp_path).passes(shutil.copytree(EXAMPLE, tmp_path / "source", ignore=ignored), 700)


def test_without_jax_the_example_says_how_to_install_it(tmp_path):
    code = """
import json, sys
sys.modules["jax"] = None
import numpy as np, sdkde_core
try:
    sdkde_core.estimate(np.arange(9.0), backend="jax")
except sdkde_core.BackendUnavailable as error:
    print(json.dumps(str(error)))
"""
    assert "needs jax; install with: pip install 'jax[cpu]'" in Site(tmp_path, EXAMPLE).json(code)


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=range(len(SCRIPTS)))
def test_the_pages_scripts_run(strangers, script):
    printed = strangers.python("-W", "error", "-c", script).splitlines()
    if "failures(" in script:
        assert printed == ["{}"]
    if "explain(" in script:
        assert any("toy (cpu)" in line for line in printed)


def test_the_pages_table_is_the_contracts():
    for precision in PRECISIONS:
        (row,) = re.findall(rf'^\| `"{precision}"` \|.*$', PAGE, re.M)
        log_sum, shift = TOLERANCES[precision][Reduction.LOG_SUM], TOLERANCES[precision][Reduction.MEAN]
        assert TOLERANCES[precision][Reduction.LAPLACE] == log_sum
        numbers = [float(x) for x in re.findall(r"\d+e-\d+", row)]
        assert numbers == [*log_sum, *shift, *log_sum], row


def test_the_pages_name_every_field_and_feature():
    pages = PAGE + (ROOT / "docs" / "advanced-backends.md").read_text()
    for name in [*(field.name for field in fields(BackendInfo)), *FEATURES]:
        assert re.search(rf"\b{name}\b", pages), name
    assert len(SCRIPTS) == 2
