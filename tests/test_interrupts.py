"""Ctrl-C and what ends a command: calls end soon, commands with the signal's status, and nothing is left behind.

That calls go on as before after an interrupt at any moment is `interrupts` of the conformance suite.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from sdkde_core.choice import registry

pytestmark = [
    pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="needs POSIX signals"),
    pytest.mark.usefixtures("heeded"),
]

BACKENDS = sorted({"numpy", "numba", "torch", "keops", "fourier"} & {r.name for r in registry.records() if r.ok})

#: Interrupts small calls at random moments, as Ctrl-C does. A call that does not end is ended by faulthandler.
SMALL = """
import collections, faulthandler, os, signal, sys, threading, time
import numpy as np
import sdkde_core

backend, count = sys.argv[1], int(sys.argv[2])
random = np.random.default_rng(0)
x = random.normal(size=(3000, 2) if backend == "fourier" else (400, 4))
options = {"backend": backend, "bandwidth": 0.3}
options["backend_options"] = {"always": True} if backend == "fourier" else None
prepared = sdkde_core.prepare(x, **options)

def run():
    return sdkde_core.estimate(x, **options), prepared.estimate(x)

def timed():
    start = time.perf_counter()
    run()
    return time.perf_counter() - start

want = run()
seconds, seen = min(timed() for _ in range(5)), collections.Counter()
for _ in range(count):
    faulthandler.dump_traceback_later(60, exit=True)

    def interrupt(after=random.uniform(0, 1.2 * seconds)):
        time.sleep(after)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    try:
        thread.start()
        run()
        time.sleep(10)
        seen["nothing"] += 1
    except KeyboardInterrupt:
        seen["KeyboardInterrupt"] += 1
    thread.join()
    assert all(np.array_equal(got, right) for got, right in zip(run(), want))
assert seen["KeyboardInterrupt"] >= 0.98 * count, seen  # Python drops one that comes in a destructor
"""

#: Interrupts a call that would take minutes, and prints the CPU time that each of its threads used after that: on a
#: busy machine the time itself says nothing.
LARGE = """
import os, signal, sys, threading, time
import numpy as np
import sdkde_core

backend, threads = sys.argv[1], int(sys.argv[2])
n, d = (1_000_000, 3) if backend == "fourier" else (150_000, 8)
x = np.random.default_rng(0).normal(size=(n, d))
options = {"backend": backend, "bandwidth": 0.1}
options["backend_options"] = {"always": True} if backend == "fourier" else None
sdkde_core.estimate(x[:5000], **options)  # imports and compiles
signal.signal(signal.SIGPROF, signal.default_int_handler)
for after, progress in ((0.5, False), (1.5, False), (4.0, False), (1.5, lambda done, rows: None)):
    for thread in threading.enumerate():  # what the call before left behind would count for this one
        if thread.name.startswith("sdkde_"):  # not those of a pool, which stay
            thread.join(60)
    start = time.process_time()
    signal.setitimer(signal.ITIMER_PROF, after)
    try:
        sdkde_core.estimate(x, progress=progress, **options)
        raise SystemExit("was not interrupted")
    except KeyboardInterrupt:
        print((time.process_time() - start - after) / threads, flush=True)
os._exit(0)  # what was left behind may go on for seconds
"""


def _run(code, *arguments, **more):
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=900, **more)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_many_interrupts_of_small_calls(backend):
    done = _run(SMALL, backend, "200")
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize("threads", ["1", "2"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_large_call_ends_soon_after_an_interrupt(backend, threads):
    done = _run(LARGE, backend, threads, env={**os.environ, "SDKDE_NUM_THREADS": threads})
    assert done.returncode == 0, done.stderr[-3000:]
    assert all(float(seconds) < 0.5 for seconds in done.stdout.split()), done.stdout


# --- commands ---------------------------------------------------------------------------------------------------

SDKDE = [sys.executable, "-c", "from sdkde_core.cli.main import main; main()"]


@pytest.fixture
def samples(tmp_path, monkeypatch):
    """A folder with samples of which an estimate takes a while."""
    monkeypatch.chdir(tmp_path)
    np.save("x.npy", np.random.default_rng(0).normal(size=(60_000, 8)))
    np.savetxt("x.csv", np.random.default_rng(0).normal(size=(300, 2)), delimiter=",")
    return tmp_path


def _begun(out="out.npy"):
    """Start an estimate, and wait for it to write."""
    how = ["--backend", "numpy", "--bandwidth", "0.5"]
    process = subprocess.Popen([*SDKDE, "estimate", "x.npy", "-o", out, *how])
    while process.poll() is None and not list(Path().glob(f".{out}.*")):
        time.sleep(0.02)
    return process


@pytest.mark.parametrize(("name", "out"), [("SIGINT", "out.npy"), ("SIGTERM", "out.npy"), ("SIGHUP", "out.zarr")])
def test_a_signal_ends_a_command_with_its_status_and_leaves_no_part_of_the_output(samples, name, out):
    if out == "out.zarr":
        pytest.importorskip("zarr")
    process, number = _begun(out), getattr(signal, name)
    process.send_signal(number)
    assert process.wait(60) == 128 + number
    assert not list(Path().glob(f"*{out}*"))


#: A command that a signal meets where its exception gets lost: Python ignores it in a weak reference's callback, which
#: imports make many of, and an except clause may take it. It then works on.
LOST = """
import os, signal, sys, time, weakref
from sdkde_core.cli.console import Group

class Kept: pass

def meet(*_):
    os.kill(os.getpid(), getattr(signal, sys.argv[1]))
    time.sleep(0.1)

def work():
    if sys.argv[2] == "callback":
        kept = Kept()
        reference = weakref.ref(kept, meet)
        del kept
    else:
        try:
            meet()
        except BaseException:
            pass
    open("begun", "w").close()
    time.sleep(60)

main = Group()
main.command("work")(work)
main(["work"])
"""


@pytest.mark.parametrize(
    ("name", "where"), [pytest.param("SIGTERM", "callback", marks=pytest.mark.slow), ("SIGINT", "except")]
)
def test_a_signal_is_not_lost_with_its_exception(tmp_path, name, where):
    done = _run(LOST, name, where, cwd=tmp_path)
    assert done.returncode == 128 + getattr(signal, name), done.stderr
    assert (tmp_path / "begun").exists()  # the exception was lost at first


#: What a signal ends removes its files for longer than the exception waits to be raised again; a second command of the
#: same process meets an alarm that is not sdkde's.
SLOW = """
import os, signal, time
from sdkde_core.cli.console import Group

def work():
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
    finally:
        time.sleep(2.3)
        print("removed")

def wait():
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    time.sleep(0.1)

signal.signal(signal.SIGALRM, lambda *_: print("theirs"))
for one in (work, wait):
    main = Group()
    main.command("it")(one)
    try:
        main(["it"], standalone_mode=False)
    except SystemExit as error:
        print(error.code)
"""


def test_files_are_removed_to_the_end_and_an_alarm_of_the_program_stays_its_own():
    done = _run(SLOW)
    assert done.stdout.split() == ["removed", "143", "theirs"], done.stderr


def test_a_signal_that_is_ignored_stays_so(samples):
    """As nohup has it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        process = _begun()
    finally:
        signal.signal(signal.SIGHUP, before)
    process.send_signal(signal.SIGHUP)
    time.sleep(0.3)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 128 + signal.SIGTERM


def test_a_closed_pipe_ends_a_command_quietly(samples):
    os.symlink("/dev/stdout", "out.csv")
    command = [*SDKDE, "estimate", "x.csv", "-o", "out.csv", "--backend", "numpy", "-q"]
    for words in (command, [*SDKDE, "explain", "300x2"]):
        reading, writing = os.pipe()
        os.close(reading)
        process = subprocess.Popen(words, stdout=writing, stderr=subprocess.PIPE, text=True)
        os.close(writing)
        assert process.communicate(timeout=60)[1] == ""
        assert process.returncode == 1
    assert subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.startswith("density\n")
