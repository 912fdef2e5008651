"""Checkpoints: what is damaged is computed again or refused, and one process at a time has one."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from commands import HOW, X, command, in_a_folder, refused  # noqa: F401 - fixtures too

import sdkde_core
from sdkde_core import scale

DAMAGES = {
    "zeroed": lambda data: bytes(len(data)),
    "flipped": lambda data: data[:1000] + bytes([data[1000] ^ 16]) + data[1001:],
    "undefined": lambda data: np.full(len(data) // 4, np.nan, "f4").tobytes() + data[len(data) // 4 * 4 :],
    "cut": lambda data: data[: len(data) // 2],
    "grown": lambda data: data + data[:8],
    "emptied": lambda data: b"",
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ["shifts", "results"])
def test_a_damaged_block_is_computed_again(damage, name):
    once = scale.estimate(X, checkpoint="kept", **HOW)
    if name == "shifts":
        shutil.rmtree("kept/results")
    for chunk in list(Path(f"kept/{name}").iterdir()):
        chunk.write_bytes(DAMAGES[damage](chunk.read_bytes()))
        with pytest.warns(sdkde_core.SdkdeWarning, match=f"{chunk}: the block is damaged .*; it is computed again"):
            assert np.array_equal(scale.estimate(X, checkpoint="kept", resume=True, **HOW), once)
        if name == "shifts":
            shutil.rmtree("kept/results")
    assert np.array_equal(scale.estimate(X, checkpoint="kept", resume=True, **HOW), once)


@pytest.mark.parametrize("garbage", [b"", b"{", b"null", b"[1]", b"\xff\xfe\x00", b"[" * 10**5, b'{"shape": NaN}'])
def test_garbage_in_a_checkpoint_names_the_file(garbage):
    scale.estimate(X[:300], checkpoint="kept", **HOW)
    Path("kept/checkpoint.json").write_bytes(garbage)
    with pytest.raises(ValueError, match=r"kept/checkpoint\.json: |checkpoint kept is of another estimate"):
        scale.estimate(X[:300], checkpoint="kept", resume=True, **HOW)


def test_resuming_goes_with_a_checkpoint():
    np.save("x.npy", X[:50])
    for call in (scale.estimate, scale.debias):
        with pytest.raises(ValueError, match="goes with a checkpoint"):
            call("x.npy", resume=True, **HOW)
    assert "goes with a checkpoint" in refused("x.npy", "-o", "p.npy", "--resume")


HOLDER = """
import sys, time, numpy as np
from sdkde_core import scale
def wait(done, rows):
    print("begun", flush=True)
    time.sleep(600)
scale.estimate(np.load("x.npy"), checkpoint="kept", progress=wait, bandwidth=0.5, backend="numpy")
"""


@pytest.mark.skipif(os.name != "posix", reason="SIGKILL")
@pytest.mark.parametrize("resume", [False, True])
def test_one_process_at_a_time_has_a_checkpoint_and_a_killed_one_leaves_it(resume):
    np.save("x.npy", X)
    with subprocess.Popen([sys.executable, "-c", HOLDER], stdout=subprocess.PIPE) as holder:
        try:
            assert holder.stdout.readline() == b"begun\n"
            with pytest.raises(ValueError, match="checkpoint kept is in use by another estimate"):
                scale.estimate(X, checkpoint="kept", resume=resume, **HOW)
        finally:
            holder.kill()
    assert np.array_equal(scale.estimate(X, checkpoint="kept", resume=True, **HOW), scale.estimate(X, **HOW))


def test_a_checkpoint_is_free_after_an_error():
    def stop(done, rows):
        raise KeyError

    with pytest.raises(KeyError):
        scale.estimate(X, checkpoint="kept", progress=stop, **HOW)
    assert np.array_equal(scale.estimate(X, checkpoint="kept", resume=True, **HOW), scale.estimate(X, **HOW))
    Path("kept/lock").write_bytes(b"no lock " * 100)
    with pytest.raises(ValueError, match=r"kept/lock: cannot be locked"):
        scale.estimate(X, checkpoint="kept", resume=True, **HOW)
