"""Fresh interpreters: they import what this one would, and nothing from the working directory.

``python -c`` looks for modules in the working directory first, where anybody's ``json.py`` may lie.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def run_python(code: str, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in a fresh interpreter, with ``arguments`` in ``sys.argv[1:]`` and this one's ``sys.path``.

    Options are those of :func:`subprocess.run`, but for the standard input, which carries the path.
    """
    command = [sys.executable, "-P", "-c", f"import json, sys; sys.path[:] = json.load(sys.stdin)\n{code}", *arguments]
    return subprocess.run(command, input=json.dumps([p for p in sys.path if p]), text=True, **options)


@contextmanager
def spawning() -> Iterator[Any]:
    """Yield the context of multiprocessing that starts fresh interpreters, for processes that are started within."""
    import multiprocessing  # takes milliseconds

    before = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        yield multiprocessing.get_context("spawn")
    finally:
        del os.environ["PYTHONSAFEPATH"]
        if before is not None:
            os.environ["PYTHONSAFEPATH"] = before
