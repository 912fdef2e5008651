"""Commands that are killed at any moment: the output is the old one or the new one, whole, and no input is touched."""

import hashlib
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from sdkde_core.files import source

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL")]

#: How often each is killed.
KILLS = 50

COMMAND = "from sdkde_core.cli.main import main; main()"

#: Blocks of 1024 rows, so that there are several.
SCALE = """
import sys
from sdkde_core import scale
from sdkde_core.estimator import blockwise
blockwise.NUMBERS = 1024 * 2
train, query, out, bandwidth = sys.argv[1:]
how = {"bandwidth": float(bandwidth), "backend": "numpy", "checkpoint": "kept", "resume": True}
how |= {"step": "moments", "tails": "guard"}
scale.estimate(train, query, out=out, **how)
"""


def words(kind, train, out, bandwidth):
    if kind == "scale":
        return [sys.executable, "-c", SCALE, train, "query.npy", out, bandwidth]
    options = ["--bandwidth", bandwidth, "--backend", "numpy", "-q"]
    return [sys.executable, "-c", COMMAND, "estimate", train, "query.npy", "-o", out, *options]


def digest(*names):
    """Of files, and of all that is in folders."""
    files = [p for name in names for p in sorted([Path(name), *Path(name).rglob("*")]) if p.is_file()]
    return hashlib.blake2b(b"".join(str(p).encode() + p.read_bytes() for p in files)).hexdigest()


@pytest.mark.parametrize("kind", ["npy", "zarr", "parquet", "scale"])
def test_the_output_is_the_old_one_or_the_new_one(kind, tmp_path, monkeypatch):
    """A third of the kills is at any moment of a run, a third after the new output was begun, a third as it appears."""
    zarr = pytest.importorskip("zarr")
    pytest.importorskip("pyarrow")
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(7)
    x, y = rng.normal(size=(3000, 2)), rng.normal(size=(20_000, 2))
    train, out = "train.npy", f"out.{'zarr' if kind == 'scale' else kind}"
    np.save("query.npy", y)
    np.save(train, x)
    if kind == "zarr":
        train = "train.zarr"
        zarr.create_array(train, shape=x.shape, chunks=(1000, 2), dtype="f8")[:] = x
    expected, seconds = {}, 0.0
    for bandwidth in ("0.5", "0.7"):
        start = time.perf_counter()
        subprocess.run(words(kind, train, out, bandwidth), check=True)
        seconds = time.perf_counter() - start
        shutil.rmtree("kept", ignore_errors=True)
        expected[bandwidth] = source(out).read()
    inputs, there, outcomes = digest(train, "query.npy"), "0.7", Counter()
    for kill in range(KILLS):
        wanted = "0.5" if there == "0.7" else "0.7"
        before, node = set(Path().glob(".out.*")), Path(out).stat().st_ino
        process = subprocess.Popen(words(kind, train, out, wanted))
        if kill % 3 == 0:
            time.sleep(rng.uniform(0.2, 1.2) * seconds)
        elif kill % 3 == 1:
            while process.poll() is None and set(Path().glob(".out.*")) <= before:
                time.sleep(0.001)
            time.sleep(rng.uniform(0.0, 0.5) * seconds)
        else:
            while process.poll() is None and Path(out).stat().st_ino == node:
                pass
        process.kill()
        assert process.wait() in (0, -signal.SIGKILL)
        found = source(out).read()
        assert digest(train, "query.npy") == inputs
        assert np.array_equal(found, expected[there]) or np.array_equal(found, expected[wanted])
        outcomes["old" if np.array_equal(found, expected[there]) else "new"] += 1
        if np.array_equal(found, expected[wanted]):
            there = wanted
            shutil.rmtree("kept", ignore_errors=True)
    wanted = "0.5" if there == "0.7" else "0.7"
    subprocess.run(words(kind, train, out, wanted), check=True)
    assert np.array_equal(source(out).read(), expected[wanted])
    print(kind, dict(outcomes))
