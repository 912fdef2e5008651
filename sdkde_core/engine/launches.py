"""Launches as a list: for CUDA tensors of one shape they are the same in every call, but for where arrays lie.

What Python does between the launches of a small estimate takes several times as long as the kernels, and follows from
shapes and options. So it is done once: :func:`record` watches a computation, and :meth:`Launches.run` launches the same
kernels for other arrays. What is made on the way lies in one piece of memory, which every run takes anew.

Only launches that a backend tells of are in the list: where PyTorch has launched any kernel, there is none.
"""

from __future__ import annotations

import functools
import itertools
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from .devices import captures, current_stream
from .forks import new_lock

R = TypeVar("R")


class Launch(Protocol):
    """One launch of a backend's; where keys are equal, only the addresses differ."""

    key: Any

    def place(self, addresses: Sequence[int]) -> None:
        """Give the kernel's pointers these values."""

    def launch(self, stream: int) -> None:
        """Launch the kernel on the stream of that handle."""


class _Recording:
    def __init__(self) -> None:
        self.launches: list[tuple[Launch, Sequence[Any]]] = []
        self.made: list[Any] = []  # arrays on the device; kept, so that no two have the same memory
        self.reads: list[tuple[Slots, int]] = []
        self.read_after = 0  # how many launches
        self.alone = True  # PyTorch has launched no kernel


class _Here(threading.local):
    recording: _Recording | None = None


_here = _Here()


def noting() -> bool:
    """Whether launches are to be told of, by :func:`note`."""
    return _here.recording is not None


def note(launch: Launch, pointers: Sequence[Any]) -> None:
    """Tell of a launch, and its kernel's pointers, in order: tensors, or addresses, 0 for none."""
    assert _here.recording is not None
    _here.recording.launches.append((launch, pointers))


class Slots(threading.local):
    """Numbers that a kernel's programs write to the host's memory, one each: read as soon as all are there.

    To copy a number from the device, and to wait for the copy, takes the host three times as long. Every thread has its
    own, and waits for one kernel before it launches the next. While a CUDA graph is captured nothing can be waited for:
    then the numbers stay on the device, and so does the largest.
    """

    def __init__(self) -> None:
        self.tensor: Any = None
        self.awaited: Any = None  # the device of a kernel whose numbers an interrupt may have left unread
        self.times = 0

    def ready(self, count: int, like: Any) -> tuple[Any, int]:
        """Return room for ``count`` numbers ≥ 0, float64, and for which time; ``like``: a tensor on the device."""
        torch = sys.modules["torch"]
        if (recording := _here.recording) is not None:
            recording.reads.append((self, count))
        if captures(like):
            self.captured = torch.empty(count, dtype=torch.float64, device=like.device)
            return self.captured, 0
        if self.awaited is not None:
            torch.cuda.synchronize(self.awaited)
        if self.tensor is None or self.tensor.shape[0] < count:
            size = 1 << max(count - 1, 1023).bit_length()
            tensor = torch.empty(size, dtype=torch.float64, device="cpu", pin_memory=like.is_cuda)
            self.numbers, self.tensor = tensor.numpy(), tensor
        self.awaited = like.device if like.is_cuda else None
        self.times += 1
        self.numbers[:count] = -1.0
        return self.tensor, self.times

    def largest(self, count: int, device: Any, time: int) -> Any:
        """Wait for so many numbers of that time, and return the largest of them: a tensor while a graph is captured.

        RuntimeError where a signal handler has asked for numbers of its own meanwhile.
        """
        if not time:
            return self.captured.amax()
        if (recording := _here.recording) is not None:
            recording.read_after = len(recording.launches)
        numbers = self.numbers[:count]
        for _ in range(100):  # as a rule they take some ten microseconds
            if numbers.min() >= 0.0:
                break
        else:
            sys.modules["torch"].cuda.current_stream(device).synchronize()  # which lets other threads run
        if time != self.times:
            raise RuntimeError("another kernel has written there")
        self.awaited = None
        return float(numbers.max())


def record(compute: Callable[[], R], given: Sequence[Any], of: Callable[[R], Any]) -> tuple[R, Launches | None]:
    """Return ``compute()``, and the list of its launches; ``of`` that: the tensor that they made, or None.

    ``given``: the tensors that it computes from. There is no list where these overlap, or where not exactly one kernel
    wrote numbers to the host.
    """
    recording = _here.recording = _Recording()
    try:
        with _watch()(recording):
            found = compute()
    finally:
        _here.recording = None
    result, ranges = of(found), sorted((x.data_ptr(), x.data_ptr() + x.nbytes) for x in given)
    apart = all(stop <= start for (_, stop), (start, _) in itertools.pairwise(ranges))
    whole = result is not None and any(x.data_ptr() == result.data_ptr() for x in recording.made)
    listed = whole and apart and recording.alone and len(recording.reads) == 1
    return found, Launches(recording, given, result) if listed else None


@functools.cache
def _watch() -> Any:
    # A mode that sees operations below Python's functions has PyTorch import its compiler: six seconds.
    from torch.overrides import TorchFunctionMode

    views = {"__getitem__", "reshape", "view", "detach", "unsqueeze"}
    looks = {"__get__", "data_ptr", "get_device", "size", "stride", "dim", "numel", "element_size", "is_contiguous"}
    looks |= {"is_pinned", "__len__", "nelement", "is_floating_point", "numpy", "is_inference"}

    class Watch(TorchFunctionMode):
        def __init__(self, recording: _Recording) -> None:
            super().__init__()
            self.recording = recording

        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found, name = function(*args, **(kwargs or {})), function.__name__
            if name in ("empty", "empty_like", "new_empty"):
                self.recording.made.append(found)
            else:
                self.recording.alone &= name in views or name in looks
            return found

    return Watch


class Launches:
    """What :func:`record` has found; for one thread at a time. Lists with equal keys are the same launches."""

    def __init__(self, recording: _Recording, given: Sequence[Any], result: Any) -> None:
        ((self._slots, self._count),), self._read_after = recording.reads, recording.read_after
        self._like, self._lock = (tuple(result.shape), result.dtype, result.device), new_lock()
        # Where arrays lie: at address 0 (what stays where it is), in the host's numbers, the result, the room, …
        arrays, self._room = [(self._slots.tensor, 1, 0), (result, 2, 0)], 0
        for x in recording.made:
            if x.data_ptr() != result.data_ptr():
                arrays.append((x, 3, self._room))
                self._room += -(-x.nbytes // 512) * 512
        arrays += [(x, 4 + k, 0) for k, x in enumerate(given)]
        ranges = [(x.data_ptr(), x.data_ptr() + x.nbytes, base, offset) for x, base, offset in arrays]

        def place(pointer: Any) -> tuple[int, int]:
            address = pointer if isinstance(pointer, int) else pointer.data_ptr()
            for start, stop, base, offset in ranges:
                if start <= address < stop:
                    return base, offset + address - start
            return 0, address

        self._steps, self._kept = [], list[Any]()  # what stays where it is, is not to go
        for launch, pointers in recording.launches:
            places = tuple(map(place, pointers))
            self._steps.append((launch, places))
            self._kept += [pointer for pointer, (base, _) in zip(pointers, places) if not base]
            launch.place([0] * len(places))  # and no other array of the recording is kept
        self._at: tuple[int, ...] = ()  # what the pointers are relative to
        self.key = self._like, self._room, tuple((launch.key, places) for launch, places in self._steps)

    def run(self, given: Sequence[Any], right: Callable[[float], Any], early: bool) -> tuple[Any, Any]:
        """Launch for other tensors of the same shapes; return the result and the list that is the right one for them.

        ``right`` tells that of the largest number that the card writes to the host. It is read after the last launch,
        or ``early``, as soon as it is there: then another list's data cost two launches. The result is None where this
        is not the right list, and where another thread is at it.
        """
        if not self._lock.acquire(blocking=False):
            return None, None
        try:
            torch, (shape, dtype, device) = sys.modules["torch"], self._like
            result = torch.empty(shape, dtype=dtype, device=device)
            room = torch.empty(self._room, dtype=torch.uint8, device=device)
            numbers, time = self._slots.ready(self._count, result)
            at = 0, numbers.data_ptr(), result.data_ptr(), room.data_ptr(), *(x.data_ptr() for x in given)
            moved = [k for k, (old, new) in enumerate(zip(self._at, at)) if old != new] if self._at else range(len(at))
            stream, self._at, found = _stream(device), (), None
            for k, (launch, places) in enumerate(self._steps):
                if early and k == self._read_after:
                    found = right(self._slots.largest(self._count, device, time))
                    if found is not self:
                        return None, found
                if any(base in moved for base, _ in places):
                    launch.place([at[base] + offset for base, offset in places])
                launch.launch(stream)
            self._at = at
        finally:
            self._lock.release()
        found = found or right(self._slots.largest(self._count, device, time))
        return result if found is self else None, found


class Lists:
    """Lists of launches of calls of one shape: by what else they depend on, and the extent that they serve."""

    def __init__(self, early: bool) -> None:
        self._early = early  # see Launches.run
        self._lists: dict[tuple[Any, Any], Launches] = {}
        self._last: dict[Any, Launches] = {}  # of the extent that came last
        self._heard: dict[Any, bool] = {}  # whether calls can have a list

    def serve(
        self, key: Any, given: Sequence[Any], launch: Callable[[], tuple[Any, Any]], served: Callable[[float], Any]
    ) -> Any:
        """Return the result of ``launch()``, or of a list of its launches; None where the general way is to answer.

        With its result it returns which extents a list of its launches serves: ``served`` says that of the largest
        distance. A list runs before that is known. It is made where there is none yet, and where the key has come
        before: otherwise data whose bandwidths all differ would have one made in every call.
        """
        key = key, _stream(given[0].device), tuple(x.data_ptr() % 16 for x in given)
        launches = self._last.get(key)
        while launches is not None:
            result, right = launches.run(given, lambda x: self._lists.get((key, served(x))), self._early)
            if result is not None:
                return result
            if right is not None:
                self._last[key] = right
            launches = right
        if self._heard.get(key, not self._last):
            return self._listed(key, given, launch)
        self._heard.setdefault(key, True)
        return launch()[0]

    def _listed(self, key: Any, given: Sequence[Any], launch: Callable[[], tuple[Any, Any]]) -> Any:
        if launch()[0] is None:
            return None
        # Now there is what is made once, such as prepared columns: it stays where it is, and is not in the list.
        (result, extent), found = record(launch, given, lambda got: got[0])
        if max(len(self._lists), len(self._heard)) >= 64:
            for kept in (self._lists, self._last, self._heard):
                kept.clear()
        self._heard[key] = found is not None
        if found is not None:
            same = (known for known in self._lists.values() if known.key == found.key)
            self._lists[key, extent] = self._last[key] = found = next(same, found)
            found.run(given, lambda _: found, True)  # now PyTorch has memory for it: to get it takes as long as a call
        return result


def _stream(device: Any) -> int:
    return current_stream(device.index) if device.type == "cuda" else 0
