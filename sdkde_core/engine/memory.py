"""The host's memory: what this process may use, what of it is free, and an error before a library ends the process.

OpenBLAS, OpenMP, FFTW and finufft end the process where memory does not suffice or a thread does not start. So what
they are about to take is compared with what is free before they are called.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

if sys.platform != "win32":
    import resource

__all__ = ["claim_memory", "free_memory", "total_memory"]

#: Claims below this are compared with the process's own limits only: to read the others takes some 0.2 ms.
SMALL = 64 << 20

#: Address space that a call takes besides its claim, and that each thread takes: a stack (8 MiB), the C library's heap
#: (64 MiB), a buffer of OpenBLAS (32 MiB).
CALL, THREAD = 16 << 20, 104 << 20

#: Files of a control group, by the controller's name in /proc/self/cgroup: limit, use, and the line of memory.stat that
#: says how much of the use is cache of files, which the kernel takes back. Version 1, then version 2.
GROUPS = {
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    "": ("memory.max", "memory.current", "inactive_file"),
}

_lock = threading.Lock()
_claimed = 0


def _begin_again() -> None:
    """In a forked child, where no other thread is, nor its claim."""
    global _lock, _claimed
    _lock, _claimed = threading.Lock(), 0


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_again)


class _Limit(NamedTuple):
    """Something that limits memory, and what it counts beside a claim: for a call, and for each thread."""

    name: str
    total: int
    free: int
    call: int = 0
    thread: int = 0

    def needs(self, size: int, each: int, tasks: int) -> int:
        """What so many tasks side by side take."""
        return self.call + size + tasks * (each + self.thread)

    def room(self, size: int, each: int, tasks: int) -> int:
        """How many tasks it has room for side by side, at most ``tasks``."""
        left = self.free - _claimed - self.needs(size, each, 0)
        return max(0, min(tasks, left // max(1, each + self.thread)))


def total_memory(root: Path = Path("/")) -> int | None:
    """Return the bytes that this process may use at most; None where that is not known (macOS, Windows).

    The least of the machine's memory with swap, the limits of its control groups (containers, batch systems) and its
    own (``ulimit -v``).
    """
    return min((limit.total for limit in (*_own(root), *_others(root))), default=None)


def free_memory(root: Path = Path("/")) -> int | None:
    """Return how many bytes more this process may use now; None where that is not known."""
    return min((limit.free for limit in (*_own(root), *_others(root))), default=None)


@contextmanager
def claim_memory(
    purpose: str, size: int = 0, *, each: int = 0, tasks: int = 1, fewest: int = 1, mend: str = ""
) -> Iterator[int]:
    """Claim memory as long as the context lasts, and yield how many of ``tasks`` may run side by side.

    Claims of other threads count as taken. No result may depend on the number.

    Parameters
    ----------
    purpose : str
        What takes the memory, the subject of the error's message.
    size, each : int
        Bytes that are taken in any case, and by each task.
    tasks : int
        How many there are at most, each on a thread.
    fewest : int
        How many there must be room for.
    mend : str
        What the user may do, for the message.

    Raises
    ------
    MemoryError
        There is no room for so few. The message says how much they take, and how much is free.
    """
    global _claimed
    with _lock:
        limits = _own()
        if size + tasks * each >= SMALL:
            limits += _others()
        tightest = min(limits, key=lambda limit: limit.room(size, each, tasks), default=None)
        together = tasks if tightest is None else tightest.room(size, each, tasks)
        if tightest is not None and together < fewest:
            free = _text(tightest.free - _claimed)
            raise MemoryError(
                f"{purpose} takes {_text(tightest.needs(size, each, fewest))} of memory, and {free} is free under "
                f"{tightest.name}; {mend or 'free memory, or raise that limit'}"
            )
        mine = size + together * each
        _claimed += mine
    try:
        yield together
    finally:
        with _lock:
            _claimed -= mine


def _text(size: int) -> str:
    return f"{max(size, 0) / 2**30:.2f} GiB" if size >= 1 << 30 else f"{max(size, 0) / 2**20:.0f} MiB"


def _own(root: Path = Path("/")) -> list[_Limit]:
    """The process's limits on address space and on data, where it has any."""
    found: list[_Limit] = []
    if sys.platform == "win32":
        return found
    for name, kind, field in (("ulimit -v", resource.RLIMIT_AS, 0), ("ulimit -d", resource.RLIMIT_DATA, 5)):
        total = resource.getrlimit(kind)[0]
        if total != resource.RLIM_INFINITY:
            try:
                pages = int((root / "proc/self/statm").read_text().split()[field])
            except OSError:  # macOS: such limits do nothing there
                continue
            found.append(_Limit(name, total, total - pages * resource.getpagesize(), CALL, THREAD))
    return found


def _others(root: Path = Path("/")) -> list[_Limit]:
    """The limits of the process's control groups, of version 1 or 2, and the machine's memory."""
    found: list[_Limit] = []
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        kib = {name: int(rest.split()[0]) for name, rest in (line.split(":") for line in lines)}
        total, free = kib["MemTotal"] + kib["SwapTotal"], kib["MemAvailable"] + kib["SwapFree"]
        found.append(_Limit("the machine's memory", total << 10, free << 10))
        groups = [line.split(":", 2)[1:] for line in (root / "proc/self/cgroup").read_text().splitlines()]
    except (OSError, ValueError, KeyError):  # not Linux
        return found
    for controllers, path in groups:
        for name in GROUPS.keys() & set(controllers.split(",")):
            mount = root / "sys/fs/cgroup" / name
            folder = mount / path.lstrip("/")
            # The limits of all groups around it hold, too. In a container the path may be the host's, and not there.
            for place in (folder, *folder.parents):
                found += _group(place, found[0].total, *GROUPS[name])
                if place == mount:
                    break
    return found


def _group(folder: Path, machine: int, limit: str, use: str, cache: str) -> list[_Limit]:
    """The limit of a control group, if it has one that is less than the machine's memory."""
    try:
        total = int((folder / limit).read_text())
        if total >= machine:
            return []
        used = int((folder / use).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # not there, or "max"
        return []
    free = total - used + int(stat.get(cache, 0))
    return [_Limit("the control group's limit (a container's, a batch system's)", total, free)]
