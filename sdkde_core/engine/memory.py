"""The host's memory: OpenBLAS, OpenMP, FFTW and finufft end the process where it does not suffice.

So what they are about to take is compared with what is free before they are called.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

if sys.platform != "win32":
    import resource

from .forks import in_child, new_lock

_lock = new_lock()
_claims: dict[object, int] = {}  # bytes, by call
in_child(_claims.clear)  # no other thread is there, nor its claim


class Limit(NamedTuple):
    """Something that limits memory, in bytes."""

    name: str
    free: int
    call: int = 0  # what it counts beside a claim, for a call
    thread: int = 0  # for each thread


def limits(root: Path = Path("/")) -> list[Limit]:
    """Return the process's own limit (``ulimit -v``), the machine's memory with swap, and control groups' limits.

    Empty where that is not known (macOS, Windows). Control groups are those of containers and batch systems.
    """
    found = _address_space(root)
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        kib = {name: int(rest.split()[0]) for name, rest in (line.split(":") for line in lines)}
        groups = [line.split(":", 2)[1:] for line in (root / "proc/self/cgroup").read_text().splitlines()]
    except (OSError, ValueError):  # not Linux
        return found
    machine, top = (kib["MemTotal"] + kib["SwapTotal"]) << 10, root / "sys/fs/cgroup"
    found.append(Limit("the machine's memory", (kib["MemAvailable"] + kib["SwapFree"]) << 10))
    for controllers, path in groups:
        mount, limit, use, cached = top, "memory.max", "memory.current", "inactive_file"
        if controllers:  # version 1
            mount, cached = top / "memory", "total_inactive_file"
            limit, use = "memory.limit_in_bytes", "memory.usage_in_bytes"
        if controllers and "memory" not in controllers.split(","):
            continue
        folder = mount / path.lstrip("/")
        # The limits of all groups around it hold, too. In a container the path may be the host's, and not there.
        for place in filter(lambda place: place.is_relative_to(mount), (folder, *folder.parents)):
            with suppress(OSError, ValueError):  # not there, or "max"
                total, used = (int((place / name).read_text()) for name in (limit, use))
                stat = dict(line.split() for line in (place / "memory.stat").read_text().splitlines())
                free = total - used + int(stat.get(cached, 0))  # the kernel takes back what caches files
                if total < machine:
                    found.append(Limit("the control group's limit (a container's, a batch system's)", free))
    return found


def _address_space(root: Path = Path("/")) -> list[Limit]:
    total = resource.RLIM_INFINITY if sys.platform == "win32" else resource.getrlimit(resource.RLIMIT_AS)[0]
    if total == resource.RLIM_INFINITY:
        return []
    try:
        used = int((root / "proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:  # macOS: such limits do nothing there
        return []
    # Besides its claim a call takes some 16 MiB of it, and each thread a stack (8 MiB), the C library's heap (64) and a
    # buffer of OpenBLAS (32).
    return [Limit("ulimit -v", total - used, 16 << 20, 104 << 20)]


@contextmanager
def claim_memory(
    purpose: str, size: int = 0, *, each: int = 0, tasks: int = 1, fewest: int = 1, mend: str = ""
) -> Iterator[int]:
    """Claim memory as long as the context lasts, and yield how many of ``tasks`` may run side by side.

    ``size`` bytes are taken in any case, and ``each`` by each task, which has a thread. Claims of other threads count
    as taken. No result may depend on the number. MemoryError where there is no room for ``fewest`` tasks: the message
    begins with the ``purpose``, says how much they take and how much is free, and ends with ``mend``, what may help.
    """
    mine = object()
    try:  # before the claim: Ctrl-C may come right after it
        with _lock:
            claimed, together = sum(list(_claims.values())), tasks
            # To read all limits takes some 0.2 ms.
            for limit in limits() if size + tasks * each >= 64 << 20 else _address_space():
                left = limit.free - claimed - limit.call - size
                together = max(0, min(together, left // max(1, each + limit.thread)))
                if together < fewest:
                    needed = limit.call + size + fewest * (each + limit.thread)
                    raise MemoryError(
                        f"{purpose} takes {_text(needed)} of memory, and {_text(limit.free - claimed)} is free under "
                        f"{limit.name}; {mend or 'free memory, or raise that limit'}"
                    )
            _claims[mine] = size + together * each
        yield together
    finally:
        _claims.pop(mine, None)  # without the lock, for which a second Ctrl-C might come


def _text(size: int) -> str:
    return f"{max(size, 0) / 2**30:.2f} GiB" if size >= 1 << 30 else f"{max(size, 0) / 2**20:.0f} MiB"
