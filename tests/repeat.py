"""Run the tests that start processes, threads, clusters or servers again and again: none may fail by chance.

    python tests/repeat.py                  # 100 times, every second time beside four busy processes
    python tests/repeat.py 10 -m "not gpu"  # 10 times, with those marked slow
    python tests/repeat.py 100 -k tuning

What follows the number goes to pytest.
"""

import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent

#: Files most of whose tests start something, and single tests of other files.
STARTING = """
    test_autotune_search.py test_checkpoints.py test_cli.py test_dask.py test_distributed.py test_fork.py
    test_fresh.py test_hardware.py test_interrupts.py test_long_work.py test_messages.py
    test_package.py test_platforms.py test_scale.py test_start_up.py test_storage.py test_threads.py
    test_tuning_lookup.py test_tuning_store.py
    test_conformance_fourier.py::TestFourier::test_forked_child
    test_conformance_numba.py::TestNumba::test_forked_child test_conformance_numpy.py::TestNumpy::test_forked_child
    test_conformance_torch.py::TestTorch::test_forked_child test_conformance_numba.py::TestNumba::test_threads
    test_conformance_torch.py::TestTorch::test_threads test_fourier_backend.py::test_same_bits_with_threads
    test_numpy_backend.py::test_blas_keeps_the_threads_that_the_user_gave_it
    test_persistence.py::test_it_travels_to_another_process test_plots.py::test_importing_and_drawing_without_pyplot
"""


def main(times: int, more: list[str]) -> int:
    """Run them so many times, say what failed, and return in how many runs."""
    files = [str(TESTS / name) for name in STARTING.split()]
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider", *files]
    bad = 0
    for run in range(times):
        busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4 * (run % 2))]
        try:
            done = subprocess.run([*command, "-m", "not gpu and not slow", *more], capture_output=True, text=True)
        finally:
            for process in busy:
                process.kill()
        print(f"run {run + 1}, {'beside a load' if busy else 'alone'}:", done.stdout.splitlines()[-1:], flush=True)
        if done.returncode:
            bad += 1
            print(done.stdout[-6000:], done.stderr[-2000:], flush=True)
        if done.returncode > 1:  # a test of the list is not there any more, say
            break
    return bad


if __name__ == "__main__":
    number = sys.argv.pop(1) if len(sys.argv) > 1 and sys.argv[1].isdecimal() else "100"
    raise SystemExit(main(int(number), sys.argv[1:]) > 0)
