"""Tests of a file in a process of their own, whose Triton interprets kernels on the CPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="test_in_the_interpreter runs it")

if INTERPRETED:
    from triton.runtime.interpreter import InterpretedFunction, _patch_lang

    _prepared = set()

    def _call(self, *args, **kwargs):
        """A function that kernels call. Triton looks through its language in every call, a quarter of the time."""
        if self.fn.__module__ not in _prepared:  # a kernel's launch has prepared the rest
            _prepared.add(self.fn.__module__)
            _patch_lang(self.fn)
        return self.rewrite()(*args, **kwargs)

    InterpretedFunction.__call__ = _call


def run(file, marked, named="", more=()):
    """Run tests by marker and name; Triton decides when it is imported whether it interprets its kernels.

    ``more``: other files of the same folder, as a process takes some seconds to start.
    """
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    files = [file, *(str(Path(file).with_name(name)) for name in more)]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files, "-m", marked, "-k", named]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=Path(file).parent.parent)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
