"""What the documents claim: examples run, commands exist, tables are those of the records."""

import doctest
import importlib
import importlib.util
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import of_benchmarks  # noqa: F401
import pytest
from click.testing import CliRunner
from sdkde_autotune.cli import main as tuner

import sdkde_core
from benchmarks.__main__ import main as benchmarks
from sdkde_core import plugin
from sdkde_core.bandwidth.rules import RULES
from sdkde_core.cli.main import main

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


PAGES = ["backends", "coming-from", "data-frames", "guide", "mathematics", "scikit-learn", "scipy"]
PAGES += ["start"]
SLOW_PAGES = ["../README", "bandwidths", "densities", "gallery", "large-data"]
#: What the README's examples have less of in `make test`.
LESS = {', "diabetes", "breast_cancer"': "", r"(?m)^(diabetes|breast_cancer) .*\n": "", r"randn\(5000": "randn(500"}


def numbers(text):
    return [float(x) for x in re.findall(r"-?\d+\.?\d*(?:e-?\d+)?", text)]


@pytest.mark.parametrize(
    "page", ["less of ../README", *PAGES, *(pytest.param(page, marks=pytest.mark.slow) for page in SLOW_PAGES)]
)
def test_the_examples_of_a_page_run(page, capsys, tmp_path, monkeypatch):
    """One after the other, in one namespace. What is printed: a block of text that follows, a comment that begins with
    a number below zero."""
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs" / f"{page.removeprefix('less of ')}.md").read_text(encoding="utf-8")
    for long, short in LESS.items() if page.startswith("less of ") else ():
        text, found = re.subn(long, short, text)
        assert found, long
    examples = re.findall(r"```python\n(.*?)```(?:\n+```text\n(.*?)```)?", text, re.S)
    if page.endswith("README"):
        assert len(examples[0][0].strip().splitlines()) <= 10
    names, everything = {}, ""
    for example, output in examples:
        exec(compile(example, f"{page}.md", "exec"), names)
        printed = capsys.readouterr().out
        everything += printed
        if output:
            assert re.sub(r"[-\d.e ]+", "#", printed) == re.sub(r"[-\d.e ]+", "#", output)
            assert numbers(printed) == pytest.approx(numbers(output), rel=0.01, abs=2e-3)
        for said in re.findall(r"  # (-\d+\.\d+)", example):
            assert any(abs(float(x) - float(said)) <= 0.05 for x in re.findall(r"-\d+\.\d+", printed)), said
    assert everything


def test_the_reference_has_all_that_is_public():
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    for name in set(sdkde_core.__all__) - {"__version__"}:
        assert re.search(rf"^(   |.. currentmodule:: sdkde_core\.(interop\.)?){name}$", page, re.M), name


def test_every_public_function_has_an_example():
    """In its docstring, or below it on its page of the site; exceptions and modules have none."""
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    shown = re.findall(r'^    "([\w.]+)": \("', (ROOT / "docs" / "conf.py").read_text(encoding="utf-8"), re.M)
    names = [
        f"{module}.{name}"
        for module, listed in re.findall(r"currentmodule:: (\S+)\n(.*?)```", page, re.S)
        for name in re.findall(r"^   (\w+)$", listed, re.M)
    ]
    assert len(names) > 20 and set(shown) <= set(names)
    for full in names:
        module, _, name = full.rpartition(".")
        value = getattr(importlib.import_module(module), name, None)  # None: a module that is not loaded yet
        if callable(value) and not (isinstance(value, type) and issubclass(value, Exception)):
            assert full in shown or ">>>" in value.__doc__, full


def headings(path):
    """The anchors of a page, as GitHub makes them."""
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.S)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in re.findall(r"^#+ (.*)$", text, re.M)}


def test_the_readmes_links_lead_somewhere_from_pypi_too(tmp_path, monkeypatch):
    """Where relative ones lead nowhere. Until there is an address, they become whole by the command for the release."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    source, text = project["urls"].get("Source"), README
    if source is None:
        source = "https://example.org/sdkde"
        release = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("## A release")[1]
        (command,) = re.findall(r"<<'END'\n(.*?)\nEND\n", release, re.S)
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["-", source])
        Path("README.md").write_text(README, encoding="utf-8")
        exec(compile(command, "CONTRIBUTING.md", "exec"), {})
        text = Path("README.md").read_text(encoding="utf-8")
    own = 0
    for picture, target in re.findall(r"(!?)\[[^\]]*\]\(([^)\s]+)\)", text):
        assert target.startswith(("https://", "#")), target
        if target.startswith(source):
            own += 1
            branch = f"{source}/{'raw' if picture else 'blob'}/main/"
            path, _, anchor = target.removeprefix(branch).partition("#")
            assert target.startswith(branch) and (ROOT / path).is_file(), target
            assert not anchor or anchor in headings(ROOT / path), target
    assert own > 20


@pytest.mark.parametrize(
    "path", [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md"], ids=lambda path: path.stem
)
def test_the_commands_of_a_page_exist(path):
    page = path.read_text(encoding="utf-8")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    code = "\n".join([*re.findall(r"```sh\n(.*?)```", page, re.S), *re.findall(r"(?<!`)`([^`\n]+)`(?!`)", page)])
    assert set(re.findall(r"^sdkde ([a-z]+)", code, re.M)) <= set(main.commands)
    assert set(re.findall(r"^sdkde-autotune ([a-z]+)", code, re.M)) <= set(tuner.commands)
    assert all(re.search(rf"^{target}:", makefile, re.M) for target in re.findall(r"^make ([a-z-]+)", code, re.M))
    assert set(",".join(re.findall(r"(?:sdkde-core|\.)\[([a-z,-]+)\]", code)).split(",")) - {""} <= set(extras)
    for module in re.findall(r"^python (?:-m )?(benchmarks[\w./]*)", code, re.M):
        found = ROOT / module.removesuffix(".py").replace(".", "/")
        assert found.is_dir() or found.with_suffix(".py").exists(), module


def test_the_front_page_links_every_page():
    """As the repository shows it, where what makes the site's sidebar is no link."""
    page = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    sidebar = {
        name
        for block in re.findall(r"```{toctree}\n(.*?)```", page, re.S)
        for name in re.findall(r"^[\w./-]+$", block, re.M)
    }
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")} - {"index"}
    assert pages | {f"../benchmarks/notes/{p.stem}" for p in (ROOT / "benchmarks" / "notes").glob("*.md")} <= sidebar
    assert sidebar <= {target.removesuffix(".md") for target in re.findall(r"\]\(([^)#]+)", page)}


def test_links_lead_somewhere():
    """Between the pages of the repository, to files and to headings."""
    pages = [*(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").rglob("*.md"), ROOT / "CONTRIBUTING.md"]
    for page in pages:
        text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S)
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            if not target.startswith("http"):
                name, _, anchor = target.partition("#")
                path = page.parent / name if name else page
                assert path.exists(), f"{page.relative_to(ROOT)}: {target}"
                assert not anchor or anchor in headings(path), f"{page.relative_to(ROOT)}: {target}"


def test_every_method_and_backend_is_documented():
    backends = (ROOT / "docs" / "backends.md").read_text(encoding="utf-8")
    for method in sdkde_core.estimator.request.METHODS:
        assert f'| `"{method}"` |' in README, method
    for record in sdkde_core.backends():
        if record.distribution == "sdkde-core":
            assert re.search(rf"^\| (\[)?`{record.name}`", backends, re.M), record.name


def test_every_environment_variable_is_documented():
    """In one table, which has no others; those of the tests' own are left out."""
    code = "".join(
        p.read_text(encoding="utf-8") for f in ("sdkde_core", "backends", "autotune") for p in (ROOT / f).rglob("*.py")
    )
    used = set(re.findall(r"""["'`](SDKDE_[A-Z_]+)""", code)) - {"SDKDE_", "SDKDE_CONFORMANCE"}
    table = (ROOT / "docs" / "backends.md").read_text(encoding="utf-8").split("## Environment variables")[1]
    assert set(re.findall(r"^\| `(SDKDE_[A-Z_]+)", table, re.M)) == used


def test_every_rule_for_bandwidths_is_documented():
    table = (ROOT / "docs" / "bandwidths.md").read_text().split("\n## ")[1]
    for rule in RULES:
        assert f'| `"{rule}"`' in table or f', `"{rule}"`' in table, rule


def test_the_readmes_tables_are_those_of_the_records(tmp_path):
    told = CliRunner().invoke(benchmarks, ["tables", "--check"])
    assert told.exit_code == 0, told.output
    assert README.count("| **sdkde**") >= 5


def test_what_plugins_share_is_documented():
    table = (ROOT / "docs" / "advanced-backends.md").read_text().split("## What backends share")[1].split("\n## ")[0]
    assert set(plugin.__all__) <= set(re.findall(r"`(\w+)`", table))


def test_every_command_and_option_is_documented():
    page = (ROOT / "docs" / "command-line.md").read_text(encoding="utf-8")
    for name, command in main.commands.items():
        assert f"## sdkde {name}" in page, name
        assert command.help
        assert all(getattr(p, "help", None) for p in command.params), name


def test_the_commands_of_the_page_run(tmp_path, monkeypatch):
    """As they stand there, on the files that it makes; what needs a package that is not here says so."""
    page = (ROOT / "docs" / "command-line.md").read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    (files,) = re.findall(r"```python\n(.*?)```", page, re.S)
    exec(compile(files, "command-line.md", "exec"), {})
    lines = "\n".join(re.findall(r"```sh\n(.*?)```", page, re.S)).splitlines()
    ours = r"sdkde (estimate|explain|fit|score|sample|plot) [a-z\d]"
    told = [line.partition("#")[0].split()[1:] for line in lines if re.match(ours, line)]
    assert len(told) >= 9
    for arguments in told:
        # The memory is that of the process, which has that of all tests before.
        arguments = ["64GB" if before == "--memory" else a for before, a in zip(["", *arguments], arguments)]
        result = CliRunner().invoke(main, arguments)
        assert result.exit_code == 0 or "pip install 'sdkde-core[" in result.output, (arguments, result.output)


@pytest.mark.parametrize("module", ["api", "interop.gaussian_kde", "interop.kernel_density", "interop.mode_clustering"])
def test_docstring_examples(module):
    result = doctest.testmod(importlib.import_module(f"sdkde_core.{module}"))
    assert result.attempted > 0
    assert result.failed == 0


@pytest.mark.slow
def test_the_demo(tmp_path):
    output = tmp_path / "plot.png"
    result = CliRunner().invoke(main, ["demo", "-o", str(output)], catch_exceptions=False)
    assert result.exit_code == 0
    words = ("kde", "sdkde", "laplace", "chosen: numpy", "1437 × 1437", "ms", "mass below zero", "not positive")
    assert all(word in result.output for word in words)
    assert output.read_bytes().startswith(b"\x89PNG") and output.stat().st_size > 50_000


@pytest.mark.parametrize(
    ("options", "message"),
    [(["-o", "absent/plot.png"], "absent"), (["-o", "plot.xyz"], "xyz"), (["--backend", "nope"], "'nope' is unknown")],
)
def test_the_demo_refuses_at_once(tmp_path, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(main, ["demo", *options])
    assert result.exit_code == 2
    assert message in result.output and "Traceback" not in result.output and "Handwritten" not in result.output


def test_the_architecture_page_names_what_there_is():
    """Every file and module that it names exists, and every room of the core stands in its drawing."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    drawing, text = page.split("```")[1], page.split("```")[2]
    core = ROOT / "sdkde_core"
    for entry in core.iterdir():
        room = entry.name.removesuffix(".py")
        if not room.startswith(("_", "py")) or room == "plugin":
            assert re.search(rf"\b{room}\b", drawing), f"{room} is not in the drawing"
    for name in re.findall(r"`([a-z_]+/[a-z_]+\.py)`", text):
        assert (core / name).exists() or (ROOT / name).exists(), name
    for name in re.findall(r"`((?:api|estimator|engine|choice|cli|arrays|protocol)\.[\w.]+)`", text):
        module, parts = "sdkde_core", name.split(".")
        while parts and importlib.util.find_spec(f"{module}.{parts[0]}"):
            module += f".{parts.pop(0)}"
            if not hasattr(importlib.import_module(module), "__path__"):
                break
        value = importlib.import_module(module)
        for part in parts:
            value = getattr(value, part)


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_making_the_site_removes_no_page_that_a_user_wrote(tmp_path):
    """Pages of functions that are gone go; they begin with the line of the templates that they were made from."""
    mark = {path.read_text().splitlines()[0] for path in (ROOT / "docs" / "templates" / "autosummary").iterdir()}
    pages, python = tmp_path / "docs" / "api", tmp_path / "venv" / "bin" / "python"
    (first,) = mark
    for path, text in {
        pages / "made.rst": f"{first}\n\nx\n",
        pages / "made-by-sphinx.rst": f"\ufeff{first}\n\nx\n",  # with a byte order mark
        pages / "mine.rst": "mine\n",
        python: "#!/bin/sh\n",
    }.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    python.chmod(0o755)
    shutil.copy(ROOT / "Makefile", tmp_path)
    subprocess.run(["make", "--old-file=venv/.docs", "docs", "VENV=venv"], cwd=tmp_path, check=True)
    assert list(pages.iterdir()) == [pages / "mine.rst"]
