"""Trials, what spoils the tuner's file, and other processes that use it; for the tests of the tuner."""

import contextlib
import json
import os
import sqlite3
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from sdkde_autotune import records

#: Executes statements and waits, with whatever locks that takes.
HOLD = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
for statement in sys.argv[2:]:
    connection.execute(statement).fetchall()
print("ready", flush=True)
sys.stdin.read()
"""


def ok(ms):
    return {"ms": (0.9 * ms, ms, 1.2 * ms)}


def guess(rank):
    return {"rank": rank}


def failed(status, error=""):
    return {"status": status, **({"error": error} if error else {})}


def add(store, key, config, found, source="measured", provenance=None, is_default=False):
    more = {"source": source, "provenance": provenance or {}, "is_default": is_default}
    store.add(records.Trial(key, config, **found, **more))


def found(trial):
    """What was found, as the functions above give it."""
    fields = {name: getattr(trial, name) for name in ("status", "error", "ms", "rank")}
    return {name: value for name, value in fields.items() if value and (name, value) != ("status", "ok")}


def written(path, dump):
    path.write_text(json.dumps(dump))
    return path


@pytest.fixture
def python():
    """Start other processes; they end with the test at the latest."""
    with contextlib.ExitStack() as stack:

        def start(code, *arguments, ready=True):
            command = [sys.executable, "-c", code, *map(str, arguments)]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            process = stack.enter_context(subprocess.Popen(command, text=True, **pipes))
            stack.callback(process.kill)
            assert not ready or process.stdout.readline() == "ready\n"
            return process

        yield start


def edit(*statements):
    def change(path):
        with contextlib.closing(sqlite3.connect(path)) as connection:
            for statement in statements:
                connection.execute(statement)
            connection.commit()

    return change


def cut_to(size):
    return lambda path: path.write_bytes(path.read_bytes()[:size])


def random(path):
    path.write_bytes(os.urandom(5000))


def text(path):
    path.write_text("not a database, just a few lines of text\n" * 9)


def rotten(path):
    """Without the first page of rows."""
    data = path.read_bytes()
    path.write_bytes(data[:4096] + b"\xa5" * 4096 + data[8192:])


def foreign(path):
    path.unlink()
    edit("CREATE TABLE trial (bookmark)")(path)


def directory(path):
    path.unlink()
    path.mkdir()


def fifo(path):
    path.unlink()
    os.mkfifo(path)


NOBODY = """
import os, sys
from pathlib import Path
def become_nobody():
    if os.getuid() == 0:
        os.setgroups([]); os.setgid(65534); os.setuid(65534)
"""


def as_nobody(code, *arguments):
    """Run code that calls ``become_nobody()`` after its imports, for root may do all; the finished process."""
    return subprocess.run([sys.executable, "-c", NOBODY + code, *map(str, arguments)], capture_output=True, text=True)


@pytest.fixture
def entered():
    """A folder that others can enter, unlike pytest's."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        yield folder
        for path in [folder, *folder.rglob("*")]:
            if path.is_dir():
                path.chmod(0o755)
