"""Run the tests that start processes, threads, clusters or servers again and again: none may fail by chance.

    python tests/repeat.py            # 100 times, every second time beside four busy processes
    python tests/repeat.py 10 --slow  # 10 times, with those marked slow
    python tests/repeat.py 100 -k tuning

What follows the number goes to pytest.
"""

import collections
import re
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

TESTS = Path(__file__).parent

#: Files most of whose tests start something, and single tests of other files.
STARTING = """
    test_autotune_search.py test_checkpoints.py test_cli.py test_dask.py test_distributed.py test_fork.py
    test_fresh.py test_hardware.py test_interrupts.py test_long_work.py test_memory.py test_messages.py
    test_package.py test_platforms.py test_scale.py test_start_up.py test_storage.py test_threads.py
    test_tuning_lookup.py test_tuning_store.py
    test_conformance_fourier.py::TestFourier::test_forked_child
    test_conformance_numba.py::TestNumba::test_forked_child test_conformance_numpy.py::TestNumpy::test_forked_child
    test_conformance_torch.py::TestTorch::test_forked_child test_conformance_numba.py::TestNumba::test_threads
    test_conformance_torch.py::TestTorch::test_threads test_fourier_backend.py::test_same_bits_with_threads
    test_numpy_backend.py::test_blas_keeps_the_threads_that_the_user_gave_it
    test_persistence.py::test_it_travels_to_another_process test_plots.py::test_importing_and_drawing_without_pyplot
"""

BUSY, TIMES = 4, 100


def main(times: int, more: list[str]) -> int:
    """Run them so many times, and say what failed how often."""
    slow = "--slow" in more
    chosen = "not gpu" if slow else "not gpu and not slow"
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "-m", chosen, "-p", "no:cacheprovider"]
    command += [str(TESTS / name) for name in STARTING.split()] + [word for word in more if word != "--slow"]
    failed, passed = collections.Counter[str](), 0
    for run in range(times):
        with ExitStack() as kept:
            for _ in range(BUSY * (run % 2)):
                kept.callback(subprocess.Popen([sys.executable, "-c", "while True: pass"]).kill)
            begun = time.monotonic()
            done = subprocess.run(command, capture_output=True, text=True, cwd=TESTS.parent)
        found = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
        found = found or ["pytest itself"] * (done.returncode != 0)
        failed.update(found)
        passed += int((re.findall(r"(\d+) passed", done.stdout) or ["0"])[-1])
        load = "beside a load" if run % 2 else "alone"
        print(f"run {run + 1}, {load}: {time.monotonic() - begun:.0f} s, {len(found)} failed", flush=True)
        if done.returncode:
            print(done.stdout[-6000:], done.stderr[-2000:], flush=True)
        if done.returncode > 1:  # a test of the list is not there any more, say
            break
    print(f"{times} runs: {passed} passed, {sum(failed.values())} failed", *failed.most_common(), sep="\n")
    return 1 if failed else 0


if __name__ == "__main__":
    number = [sys.argv.pop(1)] if len(sys.argv) > 1 and sys.argv[1].isdecimal() else []
    raise SystemExit(main(int(number[0]) if number else TIMES, sys.argv[1:]))
