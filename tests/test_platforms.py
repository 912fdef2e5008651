"""What installs on which platform, and the Makefile: by the markers and recipes, as one machine has one platform."""

import os
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
PINS = [Requirement(line) for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]

#: What markers look at, by platform, and the packages that have no wheels there.
PLATFORMS = {
    "Linux": ({"sys_platform": "linux", "platform_machine": "x86_64"}, set()),
    "Linux on Arm": ({"sys_platform": "linux", "platform_machine": "aarch64"}, set()),
    "Mac": ({"sys_platform": "darwin", "platform_machine": "arm64"}, {"triton", "numba-cuda", "cuda-core"}),
    "Mac with Intel": (
        {"sys_platform": "darwin", "platform_machine": "x86_64"},
        {"triton", "numba-cuda", "cuda-core", "torch", "pykeops"},
    ),
    "Windows": ({"sys_platform": "win32", "platform_machine": "AMD64"}, {"triton", "pykeops"}),
}


def installed(extra, environment):
    """The requirements of an extra on a platform."""
    for requirement in map(Requirement, EXTRAS[extra]):
        if requirement.name == "sdkde-core":
            for other in requirement.extras:
                yield from installed(other, environment)
        elif requirement.marker is None or requirement.marker.evaluate(environment):
            yield requirement


@pytest.fixture(params=PLATFORMS)
def platform(request):
    changes, absent = PLATFORMS[request.param]
    return {**default_environment(), **changes}, absent


@pytest.mark.parametrize("extra", EXTRAS)
def test_an_extra_leaves_out_what_has_no_wheels(platform, extra):
    environment, absent = platform
    names = {r.name for r in installed(extra, environment)}
    everything = {r.name for r in map(Requirement, EXTRAS[extra]) if r.name != "sdkde-core"}
    for requirement in map(Requirement, EXTRAS[extra]):
        for other in requirement.extras if requirement.name == "sdkde-core" else ():
            everything |= {r.name for r in installed(other, environment)}
    assert names == everything - absent


def test_what_the_tests_need_is_pinned_once(platform):
    environment, _ = platform
    pins = {}
    for pin in PINS:
        if pin.marker is None or pin.marker.evaluate(environment):
            assert pin.name not in pins, f"{pin.name} is pinned twice"
            pins[pin.name] = pin.specifier
    for requirement in installed("dev", environment):
        assert requirement.name in pins, requirement.name
        (pinned,) = pins[requirement.name]
        assert pinned.operator == "=="
        assert requirement.specifier.contains(pinned.version), (requirement, pinned)


# --- make -------------------------------------------------------------------------------------------------------


def recipes(target, tmp_path, **variables):
    """What `make` would run in a fresh checkout."""
    make = shutil.which("make") or pytest.skip("make is not installed")
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    given = [f"{name}={value}" for name, value in variables.items()]
    left_out = ("OS", "TORCH_INDEX", "VENV", "PYTHON")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MAKE") and k not in ("MFLAGS", *left_out)}
    done = subprocess.run(
        [make, "-n", target, *given], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout


@pytest.mark.parametrize(("system", "folder"), [("", "bin"), ("Windows_NT", "Scripts")])
def test_make_test(tmp_path, system, folder):
    lines = recipes("test", tmp_path, OS=system).splitlines()
    assert lines[1] == "python3 -m venv .venv"
    assert lines[2].startswith(f".venv/{folder}/python -m pip install ")
    assert lines[2].endswith(' --constraint constraints.txt --editable ".[dev]"')
    assert lines[-1].startswith(f".venv/{folder}/python -m pytest ")


def test_pytorchs_index_is_asked_for_pytorch_only(tmp_path):
    lines = [line for line in recipes("test", tmp_path, TORCH_INDEX="of-the-user").splitlines() if " pip " in line]
    assert [line.rpartition("constraints.txt ")[2] for line in lines] == [
        "torch --index-url of-the-user",
        '--editable ".[dev]"',
    ]
    assert "index-url" not in recipes("test", tmp_path)
