"""GitHub's workflows, which nothing here can run: what they call exists, and they agree with pyproject.toml."""

import re
import tomllib
from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
FILES = sorted((ROOT / ".github" / "workflows").glob("*.yml"))

#: The classifier of each system's images.
SYSTEMS = {
    "ubuntu": "Operating System :: POSIX :: Linux",
    "macos": "Operating System :: MacOS",
    "windows": "Operating System :: Microsoft :: Windows",
}


def load(path):
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def jobs(path):
    return load(path)["jobs"]


def steps(path):
    return [step for job in jobs(path).values() for step in job.get("steps", ())]


def commands(path):
    return [step["run"] for step in steps(path) if "run" in step]


def matrix():
    return jobs(ROOT / ".github" / "workflows" / "tests.yml")["test"]["strategy"]["matrix"]


def test_the_workflows_are_those():
    assert [path.stem for path in FILES] == ["release", "tests"]


def test_every_python_and_system_that_is_promised_is_tested():
    versions = matrix()["python-version"]
    promised = [c.rpartition(" ")[2] for c in PROJECT["classifiers"] if re.fullmatch(r".*Python :: 3\.\d+", c)]
    assert versions == promised
    assert PROJECT["requires-python"] == f">={versions[0]}"
    assert {SYSTEMS[os.partition("-")[0]] for os in matrix()["os"]} == {
        c for c in PROJECT["classifiers"] if c.startswith("Operating System")
    }


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_what_a_workflow_calls_exists(path):
    for command in commands(path):
        for target in re.findall(r"\bmake ([a-z-]+)", command):
            assert re.search(rf"^{target}:", MAKEFILE, re.M), target
        for variable in re.findall(r"\b([A-Z_]+)=", command):
            assert re.search(rf"^{variable} \?=", MAKEFILE, re.M), variable
        for extras in re.findall(r"\.\[([a-z,-]+)\]", command):
            assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"])
        for name in re.findall(r"(?:tests/[\w.]+|[\w-]+\.txt)", command):
            assert (ROOT / name).exists(), name
    versions = matrix()["python-version"]
    for step in steps(path):
        given = step.get("with", {})
        for name in given.get("cache-dependency-path", "").split():
            assert (ROOT / name).exists(), name
        assert given.get("python-version") in (None, *versions, "${{ matrix.python-version }}")
    for job in jobs(path).values():
        if "uses" in job:
            assert "workflow_call" in load(ROOT / job["uses"])[True]  # YAML 1.1 reads the key `on` so
        assert set(job.get("needs", ())) <= set(jobs(path))


def test_the_workflows_tests_are_those_of_the_makefile():
    (marks,) = re.findall(r"^test:.*\n\t.*(-m \"[^\"]+\")", MAKEFILE, re.M)
    tests = commands(ROOT / ".github" / "workflows" / "tests.yml")
    assert any(marks in command and "pytest" in command for command in tests)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_workflows_are_careful(path):
    """Pinned actions, least permissions, limits of time, one run for a branch."""
    workflow = load(path)
    assert workflow["permissions"] in ({}, {"contents": "read"})
    assert workflow["concurrency"]["group"].startswith(path.stem)  # a called workflow must not wait for its caller
    for job in workflow["jobs"].values():
        assert "uses" in job or job["timeout-minutes"] <= 60
    for step in steps(path):
        if "uses" in step:
            assert re.fullmatch(r"[\w-]+/[\w-]+@(v\d+|release/v\d+)", step["uses"]), step["uses"]
        if step.get("uses", "").startswith("actions/checkout"):
            assert step["with"]["persist-credentials"] is False


def test_a_release_is_built_once_and_published_without_a_secret():
    path = ROOT / ".github" / "workflows" / "release.yml"
    release = jobs(path)
    writers = {name for name, job in release.items() if "write" in job.get("permissions", {}).values()}
    publish = release["publish"]
    assert writers == {"publish"} and publish["permissions"] == {"id-token": "write"}
    assert set(publish["needs"]) == {"tests", "build"} and publish["environment"]["name"]
    assert [step["uses"].partition("@")[0] for step in publish["steps"]] == [
        "actions/download-artifact",
        "pypa/gh-action-pypi-publish",
    ]
    (made,) = [s["with"] for s in release["build"]["steps"] if s.get("uses", "").startswith("actions/upload-artifact")]
    assert made["name"] == publish["steps"][0]["with"]["name"] and made["path"] == publish["steps"][0]["with"]["path"]
    assert sum(command.count("-m build") for command in commands(path)) == 1
    assert "secrets." not in path.read_text(encoding="utf-8")
