"""GitHub's workflows, which nothing here can run: what they call exists, and they agree with pyproject.toml."""

import re
import tomllib
from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
TEXTS = {path.stem: path.read_text(encoding="utf-8") for path in (ROOT / ".github" / "workflows").glob("*.yml")}
WORKFLOWS = {name: yaml.safe_load(text) for name, text in TEXTS.items()}
MATRIX = WORKFLOWS["tests"]["jobs"]["test"]["strategy"]["matrix"]

#: The classifier of each system's images.
SYSTEMS = {
    "ubuntu": "Operating System :: POSIX :: Linux",
    "macos": "Operating System :: MacOS",
    "windows": "Operating System :: Microsoft :: Windows",
}


def steps(name):
    return [step for job in WORKFLOWS[name]["jobs"].values() for step in job.get("steps", ())]


def commands(name):
    return [step["run"] for step in steps(name) if "run" in step]


def test_every_python_and_system_that_is_promised_is_tested():
    versions = MATRIX["python-version"]
    promised = [c.rpartition(" ")[2] for c in PROJECT["classifiers"] if re.fullmatch(r".*Python :: 3\.\d+", c)]
    assert versions == promised
    assert PROJECT["requires-python"] == f">={versions[0]}"
    systems = {c for c in PROJECT["classifiers"] if c.startswith("Operating System")}
    assert {SYSTEMS[image.partition("-")[0]] for image in MATRIX["os"]} == systems


@pytest.mark.parametrize("name", WORKFLOWS)
def test_what_a_workflow_calls_exists(name):
    for command in commands(name):
        for target in re.findall(r"\bmake ([a-z-]+)", command):
            assert re.search(rf"^{target}:", MAKEFILE, re.M), target
        for variable in re.findall(r"\b([A-Z_]+)=", command):
            assert re.search(rf"^{variable} \?=", MAKEFILE, re.M), variable
        for extras in re.findall(r"\.\[([a-z,-]+)\]", command):
            assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"])
        for file in re.findall(r"(?:tests/[\w.]+|[\w-]+\.txt)", command):
            assert (ROOT / file).exists(), file
    for step in steps(name):
        given = step.get("with", {})
        for file in given.get("cache-dependency-path", "").split():
            assert (ROOT / file).exists(), file
        version = given.get("python-version", "${{ matrix.python-version }}")
        assert version.removesuffix("t") in (*MATRIX["python-version"], "${{ matrix.python-version }}")
    for job in WORKFLOWS[name]["jobs"].values():
        if "uses" in job:
            assert "workflow_call" in WORKFLOWS[Path(job["uses"]).stem][True]  # YAML 1.1 reads the key `on` so
        assert set(job.get("needs", ())) <= set(WORKFLOWS[name]["jobs"])


def test_the_workflows_tests_are_those_of_the_makefile():
    (marks,) = re.findall(r"^test:.*\n\t.*(-m \"[^\"]+\")", MAKEFILE, re.M)
    assert any(marks in command and "pytest" in command for command in commands("tests"))


@pytest.mark.parametrize("name", WORKFLOWS)
def test_workflows_are_careful(name):
    """Actions pinned by digest, the version beside it, least permissions, limits of time, one run for a branch."""
    workflow = WORKFLOWS[name]
    assert workflow["permissions"] in ({}, {"contents": "read"})
    assert workflow["concurrency"]["group"].startswith(name)  # a called workflow must not wait for its caller
    assert all("uses" in job or job["timeout-minutes"] <= 60 for job in workflow["jobs"].values())
    for step in steps(name):
        if "uses" in step:
            assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", step["uses"]), step["uses"]
            assert re.search(rf"{step['uses']} # v\d+\.\d+\.\d+$", TEXTS[name], re.M), step["uses"]
        if step.get("uses", "").startswith("actions/checkout"):
            assert step["with"]["persist-credentials"] is False


def test_an_action_has_one_digest_everywhere():
    uses = {step["uses"] for name in WORKFLOWS for step in steps(name) if "uses" in step}
    assert len(uses) == len({action.partition("@")[0] for action in uses})


def test_lower_bounds_development_versions_and_no_lock_are_tested():
    jobs = WORKFLOWS["tests"]["jobs"]
    oldest = " ".join(step.get("run", "") for step in jobs["oldest"]["steps"])
    assert "--resolution lowest-direct" in oldest
    assert jobs["oldest"]["steps"][1]["with"]["python-version"] == MATRIX["python-version"][0]
    assert jobs["free-threaded"]["env"]["PYTHON_GIL"] == "0"
    nightly = " ".join(commands("nightly"))
    assert all(name in nightly for name in ("torch", "numpy", "scikit-learn", "scientific-python-nightly-wheels"))


def test_gpus_are_not_used_unless_switched_on():
    (job,) = WORKFLOWS["gpu"]["jobs"].values()
    assert job["if"].startswith("vars.GPU_RUNNER != '' && ")
    assert WORKFLOWS["gpu"][True] == {"pull_request": {"types": ["labeled"]}}


def test_a_release_is_built_once_and_published_without_a_secret():
    release = WORKFLOWS["release"]["jobs"]
    publish, download = release["publish"], release["publish"]["steps"][0]
    assert {name for name, job in release.items() if "write" in job.get("permissions", {}).values()} == {"publish"}
    assert publish["permissions"] == {"id-token": "write"} and publish["environment"]["name"]
    assert set(publish["needs"]) == {"tests", "build"}
    used = [step["uses"].partition("@")[0] for step in publish["steps"]]
    assert used == ["actions/download-artifact", "pypa/gh-action-pypi-publish"]
    (made,) = [s["with"] for s in release["build"]["steps"] if s.get("uses", "").startswith("actions/upload-artifact")]
    assert made["name"] == download["with"]["name"] and made["path"] == download["with"]["path"]
    assert sum(command.count("-m build") for command in commands("release")) == 1
    assert publish["steps"][1]["with"]["attestations"] is True
    assert "secrets." not in TEXTS["release"]
