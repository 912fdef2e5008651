"""Estimates among processes: the numbers of one process, whoever has which samples, and errors that name the rank."""

import os
import subprocess
import sys

import numpy as np
import pytest

import sdkde_core

pytest.importorskip("torch")

RANK = """
import sys
from contextlib import nullcontext
from unittest import mock
import numpy as np
import torch
import torch.distributed as dist
import sdkde_core.distributed
from sdkde_numpy.backend import NumpyBackend
from sdkde_core.choice import select
from sdkde_core.engine import columns
from sdkde_core.engine.failures import BackendFailed
from sdkde_core.spreading.ranks import PeerFailed

torch.set_num_threads(1)
rank, size, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
sys.path.append(sys.argv[4])
import blocks
dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=size)
x, y, w = (np.load(f"{folder}/{name}.npy") for name in "xyw")
here, there = slice(*{1: [(0, None)], 3: [(0, 700), (700, 700), (700, None)]}[size][rank]), slice(rank, None, size)

def refused(words, *arguments, kind=ValueError, **options):
    try:
        sdkde_core.distributed.estimate(*arguments, **options)
    except kind as error:
        assert words in str(error), (rank, words, str(error))
    else:
        raise SystemExit(f"not refused: {words}")

def failing(where, name, error):
    '''On rank 1 a function raises.'''
    def fail(*arguments, **options):
        raise error(*arguments, **options)
    return mock.patch.object(where, name, fail) if rank == 1 else nullcontext()

estimate = sdkde_core.distributed.estimate
plain = estimate(x[here], backend="numpy")
weighted = estimate(x[here], y[there], weights=w[here], method="laplace", backend="numpy", bandwidth=0.7)
tensor = estimate(torch.from_numpy(x[here]), torch.from_numpy(y[there]).float(), log=True, backend="numpy")
assert tensor.dtype == torch.float64 and isinstance(plain, np.ndarray)
none = estimate(x[here], y[:0] if rank == 0 else y, backend="numpy", bandwidth=0.7)
assert len(none) == (0 if rank == 0 else len(y))
NumpyBackend.reduce_pairs = blocks.NumpyBackend.reduce_pairs
with mock.patch.object(columns.PackedColumns, "takes_pairs", True):
    pairs = estimate(x[here], backend="numpy")
with mock.patch.object(columns.PackedColumns, "takes_pairs", True), \
        mock.patch.object(columns, "limit_of", lambda info, problem: 8.0):  # some samples are far
    beside = estimate(x[here], backend="numpy")
np.savez(f"{folder}/{rank}.npz", pairs=pairs, beside=beside, plain=plain, weighted=weighted, tensor=tensor)
if size > 1:
    refused("rank 2 has samples of shape ('n', 3)", x[here] if rank < 2 else np.ones((5, 3)))
    refused("rank 1 has bandwidth = 2.0, rank 0 has 1.0", x[here], bandwidth=2.0 if rank == 1 else 1.0, backend="numpy")
    refused("bandwidth is -1.0", x[here], bandwidth=-1.0, backend="numpy")  # all fail, each by its own error
    kind = ValueError if rank == 2 else PeerFailed
    refused("weights", x[here], weights=w[here][:3] if rank == 2 else w[here], backend="numpy", kind=kind)
    bad, kind = (y * np.nan, ValueError) if rank == 1 else (y, PeerFailed)
    refused("query" if rank == 1 else "rank 1 failed: ValueError: query", x[here], bad, backend="numpy", kind=kind)
    refused("local_train requires grad", torch.from_numpy(x[here]).requires_grad_(), backend="numpy", kind=TypeError)
    refused("one device to each rank", x[here], device=["cuda:0", "cuda:1"])
    narrow = w[here].astype("float32" if rank == 2 else "float64")  # weights of either dtype, but one result
    estimate(x[here], weights=narrow, backend="numpy", bandwidth=0.7)
    kind, words = (MemoryError, "no room") if rank == 1 else (PeerFailed, "rank 1 failed: MemoryError: no room")
    with failing(np, "ascontiguousarray", lambda *a, **k: MemoryError("no room")):
        refused(words, x[here], backend="numpy", kind=kind)
    words = "a fault" if rank == 1 else "rank 1 failed: BackendFailed"  # and it does not go on with another backend
    with failing(columns, "call", lambda info, problem, *a, **k: BackendFailed(info, problem.device, "a fault")):
        refused(words, x[here], device="cpu", kind=RuntimeError)
    group = dist.new_group([0, 2])
    if rank == 1:
        refused("group has no rank 1", x, group=group)
    else:
        assert len(estimate(x[:900] if rank else x[900:], y, group=group, backend="numpy", bandwidth=0.7)) == len(y)
dist.barrier()
print("done")
"""


@pytest.mark.slow
def test_three_processes_have_the_numbers_of_one(tmp_path):
    rng = np.random.default_rng(0)
    x, y, w = rng.normal(size=(3000, 2)), rng.normal(size=(101, 2)) * 2, rng.random(3000)
    for name, array in {"x": x, "y": y, "w": w}.items():
        np.save(tmp_path / f"{name}.npy", array)
    found = {}
    for size in (1, 3):
        (tmp_path / "meet").unlink(missing_ok=True)
        pipes, tests = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}, os.path.dirname(__file__)
        running = [
            subprocess.Popen([sys.executable, "-c", RANK, str(rank), str(size), str(tmp_path), tests], **pipes)
            for rank in range(size)
        ]
        for process in running:
            out, err = process.communicate(timeout=300)
            assert out == b"done\n", err.decode()[-3000:]
        found[size] = [dict(np.load(tmp_path / f"{rank}.npz")) for rank in range(size)]
    one, three = found[1][0], found[3]
    plain = np.concatenate([f["plain"] for f in three])
    assert np.allclose(plain, one["plain"], rtol=5e-5)
    assert np.allclose(plain, sdkde_core.estimate(x), rtol=5e-5)
    for name in ("pairs", "beside"):
        by_pairs = np.concatenate([f[name] for f in three])
        assert np.allclose(by_pairs, one[name], rtol=5e-5) and np.allclose(by_pairs, plain, rtol=5e-5)
    how = {"weights": w, "method": "laplace", "bandwidth": 0.7}
    for name, want in {
        "weighted": sdkde_core.estimate(x, y, **how),
        "tensor": sdkde_core.estimate(x, y, log=True),
    }.items():
        got = np.empty(len(y))
        for rank in range(3):
            got[rank::3] = three[rank][name]
        assert np.allclose(got, want, rtol=5e-5, atol=1e-8)
        assert np.allclose(got, one[name], rtol=5e-5, atol=1e-8)


def test_there_must_be_a_group():
    import sdkde_core.distributed

    with pytest.raises(RuntimeError, match="init_process_group"):
        sdkde_core.distributed.estimate([[0.0], [1.0]])
