"""The host's memory: what is free by every limit, claims, and backends under limits from generous to tight."""

import os
import subprocess
import sys
import threading

import pytest

from sdkde_core import plugin
from sdkde_core.engine import memory

MIB = 1 << 20


def _host(root, available=4000, swap=0, total=8000):
    """A root folder with the files of a Linux host that is in no control group; all in MiB."""
    (root / "proc/self").mkdir(parents=True)
    lines = {"MemTotal": total, "MemFree": 10, "MemAvailable": available, "SwapTotal": swap, "SwapFree": swap}
    (root / "proc/meminfo").write_text("".join(f"{name}:  {value << 10} kB\n" for name, value in lines.items()))
    (root / "proc/self/cgroup").write_text("")
    return root


def _group(root, line, folder, limit, used, cached):
    """Put the process in a control group: its line in /proc/self/cgroup, its folder, and its files' text or MiB."""
    path = root / "proc/self/cgroup"
    path.write_text(f"{path.read_text()}{line}\n")
    place = root / "sys/fs/cgroup" / folder
    place.mkdir(parents=True, exist_ok=True)
    version_2 = "memory.max", "memory.current", "inactive_file"
    version_1 = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
    names = version_1 if "memory" in line else version_2
    for name, value in zip(names[:2], (limit, used)):
        (place / name).write_text(value if isinstance(value, str) else str(value * MIB))
    (place / "memory.stat").write_text(f"anon 1\n{names[2]} {cached * MIB}\n")


def found(root):
    """The least that is free."""
    return min(limit.free for limit in memory.limits(root))


def test_the_machine_s_memory_and_swap(tmp_path):
    root = _host(tmp_path, swap=1000)
    assert found(root) == 5000 * MIB


@pytest.mark.parametrize(
    ("line", "folder"),
    [
        ("0::/", ""),  # version 2, as a container sees itself
        ("0::/batch.slice/job_7/task_0", "batch.slice/job_7"),  # the limit is that of a group around
        ("0::/outside/of/the/container", ""),  # the path is the host's
        ("4:memory:/job", "memory/job"),
        ("11:cpu,memory:/", "memory"),
    ],
)
def test_the_limits_of_control_groups(tmp_path, line, folder):
    root = _host(tmp_path)
    _group(root, line, folder, 1000, 700, 200)
    assert found(root) == 500 * MIB


@pytest.mark.parametrize("limit", ["max\n", "9223372036854771712"])
def test_control_groups_without_a_limit(tmp_path, limit):
    root = _host(tmp_path)
    _group(root, "4:memory:/" if limit.isdecimal() else "0::/", "memory" if limit.isdecimal() else "", limit, 700, 200)
    assert found(root) == 4000 * MIB


def test_elsewhere_it_is_not_known(tmp_path):
    assert memory.limits(tmp_path) == []


@pytest.fixture
def limited(monkeypatch):
    """Memory of 1000 MiB, 300 of them in use; and a limit on address space, if one is given, in MiB."""

    def limit(space=None):
        own = [] if space is None else [memory.Limit("ulimit -v", space * MIB, 16 * MIB, 104 * MIB)]
        monkeypatch.setattr(memory, "_address_space", lambda: own)
        machine = memory.Limit("the machine's memory", 700 * MIB)
        monkeypatch.setattr(memory, "limits", lambda: [*own, machine])

    return limit


def test_as_many_tasks_side_by_side_as_fit(limited):
    limited()
    for each, want in ((100, 4), (200, 3), (350, 2), (600, 1)):
        with plugin.claim_memory("a sum", each=each * MIB, tasks=4) as together:
            assert together == want
    limited(500)  # each of several threads takes 104 MiB, a call 16
    for each, want in ((0, 4), (50, 3), (100, 2), (350, 1)):
        with plugin.claim_memory("a sum", each=each * MIB, tasks=4) as together:
            assert together == want


def test_what_does_not_fit_is_an_error_that_says_so(limited):
    limited()
    message = "^a sum takes 1.17 GiB of memory, and 700 MiB is free under the machine's memory; pass fewer rows$"
    with pytest.raises(MemoryError, match=message), plugin.claim_memory("a sum", 1200 * MIB, mend="pass fewer rows"):
        pass
    limited(300)
    with plugin.claim_memory("a sum", tasks=4) as together:
        assert together == 2
    message = r"^a sum takes 432 MiB of memory, and 300 MiB is free under ulimit -v; free memory, or raise that limit$"
    with pytest.raises(MemoryError, match=message), plugin.claim_memory("a sum", tasks=4, fewest=4):
        pass


def test_claims_of_other_threads_count(limited):
    limited()
    found = []

    def other():
        with plugin.claim_memory("another sum", each=200 * MIB, tasks=3) as together:
            found.append(together)

    for _ in range(2):
        with plugin.claim_memory("a sum", 300 * MIB):
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()
        other()
    assert found == [2, 3, 2, 3]


#: Run by a fresh interpreter: for every limit on address space, in MiB beyond what is in use, a process of its own
#: estimates. Prints how it ended.
STEPS = """
import os, resource, signal, sys
import numpy as np
import array_api_compat.numpy, sdkde_core  # a library that cannot be mapped at all is an ImportError
from sdkde_core.choice import registry

name, d, method, *sizes = sys.argv[1:]
n, m, threads = map(int, sizes[:3])
registry.find(name).info.load({})
rng = np.random.default_rng(0)
x, y = rng.normal(size=(n, int(d))), rng.normal(size=(m, int(d)))
os.environ["SDKDE_NUM_THREADS"] = str(threads)
how = {"method": method, "bandwidth": "silverman", "backend": name, "device": "cpu"}
how["backend_options"] = {"always": True} if name == "fourier" else {}
for step in [None, *map(int, sizes[3:])]:
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        signal.alarm(100)
        if step is not None:
            used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + (step << 20),) * 2)
        try:
            found = sdkde_core.estimate(x, y, **how)
            print("right", found.tobytes().hex()[:2000], flush=True)
        except MemoryError as error:
            print("MemoryError", error, flush=True)
        except BaseException as error:
            print("wrong", step, type(error), error, flush=True)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code:
        print("wrong", step, "ended with", code)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits on address space are Linux's")
@pytest.mark.parametrize(
    ("backend", "module", "d", "method", "n", "m", "threads"),
    [
        ("fourier", "finufft", 1, "kde", 400_000, 100_000, 2),
        ("fourier", "finufft", 2, "laplace", 300_000, 70_000, 3),
        ("fourier", "finufft", 3, "sdkde", 20_000, 5_000, 2),
        ("fourier", "finufft", 3, "kde", 40_000, 70_000, 2),
        ("numpy", "numpy", 5, "sdkde", 5_000, 1_000, 4),
        ("numba", "numba", 3, "sdkde", 5_000, 1_000, 2),
        ("torch", "torch", 5, "sdkde", 5_000, 1_000, 4),
    ],
)
def test_little_address_space_ends_in_a_right_result_or_a_memory_error(backend, module, d, method, n, m, threads):
    pytest.importorskip(module)
    steps = [1200, 700, 500, 400, 320, 260, 220, 180, 150, 120, 90, 70, 50, 30, 12, 3]
    arguments = [sys.executable, "-c", STEPS, backend, str(d), method, *map(str, [n, m, threads, *steps])]
    done = subprocess.run(
        arguments, capture_output=True, text=True, check=True, env={**os.environ, "OMP_NUM_THREADS": "2"}
    )
    ends = done.stdout.splitlines()
    assert len(ends) == 1 + len(steps)
    assert not [end for end in ends if end.startswith("wrong")], done.stderr
    assert len({end for end in ends if end.startswith("right")}) == 1  # the same bits, however little is free
    assert ends[0].startswith("right") and ends[1].startswith("right") and ends[-1].startswith("MemoryError")
