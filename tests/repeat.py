"""Run tests that start processes, threads, clusters or servers again and again: none may fail by chance.

    python tests/repeat.py 100 tests/test_fork.py tests/test_threads.py

Every second run is beside four busy processes. What follows the number goes to pytest.
"""

import collections
import re
import subprocess
import sys
import time
from contextlib import ExitStack


def main(times: int, arguments: list[str]) -> int:
    """Run the tests so many times, and say what failed how often."""
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "-m", "not gpu", "-p", "no:cacheprovider", *arguments]
    failed = collections.Counter[str]()
    for run in range(times):
        with ExitStack() as kept:
            for _ in range(4 * (run % 2)):
                kept.callback(subprocess.Popen([sys.executable, "-c", "while True: pass"]).kill)
            begun = time.monotonic()
            done = subprocess.run(command, capture_output=True, text=True)
        found = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
        failed.update(found or ["pytest itself"] * (done.returncode != 0))
        load = "beside a load" if run % 2 else "alone"
        print(f"run {run + 1}, {load}: {time.monotonic() - begun:.0f} s, {len(found)} failed", flush=True)
        if done.returncode:
            print(done.stdout[-6000:], done.stderr[-2000:], flush=True)
    print(f"{times} runs: {sum(failed.values())} failed", *failed.most_common(), sep="\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
