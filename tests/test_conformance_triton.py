"""The Triton backend passes the suite: on the GPU where there is one, otherwise in Triton's interpreter, on the CPU.

The interpreter rounds nothing: it shows that the kernels compute what they should, and no precision.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sdkde_core.testing import BackendConformance

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.mark.skipif(not INTERPRETED, reason="runs in a process of its own, see test_in_the_interpreter")
class TestInterpreted(BackendConformance):
    backend = "triton"
    device = "cpu"
    dimensions = (1, 2, 5, 17)


@pytest.mark.skipif(INTERPRETED or torch.cuda.is_available(), reason="there is a GPU, or this is what the test starts")
def test_in_the_interpreter():
    """The suite above, in a process that interprets kernels: Triton decides that when it is imported."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-k", "TestInterpreted"]
    root = Path(__file__).parent.parent
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=root)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestTriton(BackendConformance):
    backend = "triton"
    device = "cuda:0"
    profile = "full"
