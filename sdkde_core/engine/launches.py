"""Launches as a list: for CUDA tensors of one shape they are the same in every call, but for where arrays lie.

What Python does between the launches of a small estimate takes several times as long as the kernels, and follows from
shapes and options. So it is done once: :func:`record` watches a computation, and :meth:`Launches.run` launches the same
kernels for other arrays, and other numbers where these are :class:`Varying`. Only launches that a backend tells of are
in the list.
"""

from __future__ import annotations

import functools
import itertools
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, is_dataclass
from typing import Any, ParamSpec, Protocol, TypeVar

from .devices import captures, current_stream
from .forks import new_lock

P = ParamSpec("P")
R = TypeVar("R")


class Launch(Protocol):
    """One launch of a backend's; where keys are equal, only the addresses differ."""

    key: Any

    def place(self, addresses: Sequence[Any]) -> None: ...  # give the kernel's pointers these, and its varying numbers
    def launch(self, stream: int) -> None: ...  # on the stream of that handle


class _Recording:
    def __init__(self) -> None:
        self.launches: list[tuple[Launch, Sequence[Any]]] = []
        self.made: list[Any] = []  # arrays on the device; kept, so that no two have the same memory
        self.reads: list[tuple[Slots, int, int]] = []
        self.read_after = 0  # how many launches
        self.alone = True  # PyTorch has launched no kernel
        self.name = object()


class _Here(threading.local):
    recording: _Recording | None = None


_here = _Here()


class Varying(float):
    """A number in which calls with the same list differ: the k-th argument of a call, plus ``more``."""

    k, more = 0, 0.0

    @classmethod
    def of(cls, value: float, k: int, more: float = 0.0) -> Varying:
        found = cls(value)
        found.k, found.more = k, more
        return found

    def __add__(self, other: float) -> Varying:
        return Varying.of(float(self) + other, self.k, self.more + other)


def noting() -> bool:
    """Whether launches are being recorded: then :func:`note` must be told of each."""
    return _here.recording is not None


def note(launch: Launch, pointers: Sequence[Any]) -> None:
    """Record a launch and its kernel's pointers, in order: tensors, or addresses (0: none); then varying numbers."""
    assert _here.recording is not None
    _here.recording.launches.append((launch, pointers))


def aside(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function that makes values once, or looks ahead: its launches are not recorded."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        before, _here.recording = _here.recording, None
        try:
            return function(*args, **kwargs)
        finally:
            _here.recording = before

    return call


class Slots(threading.local):
    """Numbers that a kernel's programs write to the host's memory, one each: read as soon as all are there.

    Every thread has its own, and waits for one kernel before it launches the next. While a CUDA graph is captured
    nothing can be waited for: then the numbers stay on the device, and so does the largest.
    """

    tensor: Any = None
    awaited: Any = None  # the device of a kernel whose numbers an interrupt may have left unread
    times = 0

    def ready(self, count: int, like: Any, more: int = 0) -> tuple[Any, int]:
        """Return a buffer for ``count`` + ``more`` float64 numbers ≥ 0, and the number of this use (0: captured)."""
        torch = sys.modules["torch"]
        if (recording := _here.recording) is not None:
            recording.reads.append((self, count, more))
        if captures(like):
            self.captured = torch.empty(count, dtype=torch.float64, device=like.device)
            return self.captured, 0
        if self.awaited is not None:
            torch.cuda.synchronize(self.awaited)
        if self.tensor is None or self.tensor.shape[0] < count + more:
            size = 1 << max(count + more - 1, 1023).bit_length()
            tensor = torch.empty(size, dtype=torch.float64, device="cpu", pin_memory=like.is_cuda)
            self.numbers, self.tensor = tensor.numpy(), tensor
        self.awaited = like.device if like.is_cuda else None
        self.times += 1
        self.numbers[: count + more] = -1.0
        return self.tensor, self.times

    def largest(self, count: int, device: Any, time: int, more: int = 0) -> Any:
        """Wait for the first ``count`` numbers of use ``time``; return the largest, a tensor while a graph is captured.

        The ``more`` numbers follow it, in a tuple. RuntimeError where a signal handler has used the buffer meanwhile.
        """
        if not time:
            return self.captured.amax()
        if (recording := _here.recording) is not None:
            recording.read_after = len(recording.launches)
        numbers = self.numbers[: count + more]
        for _ in range(100):  # as a rule they take some ten microseconds
            if numbers.min() >= 0.0:
                break
        else:
            sys.modules["torch"].cuda.current_stream(device).synchronize()  # which lets other threads run
            if numbers.min() < 0.0:
                raise RuntimeError("no kernel has written there")
        if time != self.times:
            raise RuntimeError("another kernel has written there")
        self.awaited = None
        largest = float(numbers[:count].max())
        return (largest, *numbers[count:].tolist()) if more else largest


def record(compute: Callable[[], tuple[Any, Any]], given: Sequence[Any]) -> tuple[Any, Any, Launches | None]:
    """Return the two values of ``compute()``, and the list of its launches or None.

    The values are the result, a tensor, a tuple of them, or None; and the extent that it serves. There is no list where
    ``given``, its tensors and numbers, overlap, where PyTorch has launched a kernel, where several kernels wrote
    numbers to the host, or where a varying number reaches no kernel.
    """
    before, recording = _here.recording, _Recording()
    _here.recording = recording
    try:
        with _watch()():
            result, served = compute()
    finally:
        _here.recording = before
        if before is not None:  # a signal handler's estimate, within another one
            before.alone = False
    ranges = sorted((x.data_ptr(), x.data_ptr() + x.nbytes) for x in given if not isinstance(x, float))
    apart = all(stop <= start for (_, stop), (start, _) in itertools.pairwise(ranges))
    made = {(x.data_ptr(), x.nbytes) for x in recording.made}
    results = result if isinstance(result, tuple) else (result,)
    listed = all(x is not None and x.is_contiguous() and (x.data_ptr(), x.nbytes) in made for x in results)
    if not (listed and apart and recording.alone and len(recording.reads) <= 1):
        return result, served, None
    found = Launches(recording, given, result)
    return result, served, found if found.writes else None


@functools.cache
def _watch() -> Any:
    # A mode that sees operations below Python's functions has PyTorch import its compiler: six seconds.
    from torch.overrides import TorchFunctionMode

    views = {"__getitem__", "reshape", "view", "detach", "unsqueeze"}  # some copy, as with an index that is a tensor
    looks = {"__get__", "data_ptr", "get_device", "size", "stride", "dim", "numel", "element_size", "is_contiguous"}
    looks |= {"is_pinned", "__len__", "nelement", "is_floating_point", "numpy", "is_inference"}

    class Watch(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found, name, recording = function(*args, **(kwargs or {})), function.__name__, _here.recording
            if recording is None:
                return found
            if name in ("empty", "empty_like", "new_empty"):
                recording.made.append(found)
            elif name in views:
                recording.alone &= found.untyped_storage().data_ptr() == args[0].untyped_storage().data_ptr()
            else:
                recording.alone &= name in looks
            return found

    return Watch


class Launches:
    """A list of launches, for one thread at a time. Lists with equal keys are the same launches."""

    def __init__(self, recording: _Recording, given: Sequence[Any], result: Any) -> None:
        self._reads, self._read_after, self.lock = recording.reads, recording.read_after, new_lock()
        results = result if isinstance(result, tuple) else (result,)
        self._like = isinstance(result, tuple), results[0].device, *((tuple(x.shape), x.dtype) for x in results)
        # A pointer's base: 0 none, 1 the host's numbers, 2 the room, then one for each result and each argument.
        arrays, self._size = [(slots.tensor, 1, 0) for slots, *_ in self._reads], 0
        for x in recording.made:
            if all(x.data_ptr() != y.data_ptr() for y in results):
                arrays.append((x, 2, self._size))
                self._size += -(-x.nbytes // 512) * 512
        all_of, self._first = (*results, *given), 3 + len(results)
        arrays += [(x, 3 + k, 0) for k, x in enumerate(all_of) if not isinstance(x, float)]
        ranges = [(x.data_ptr(), x.data_ptr() + x.nbytes, base, offset) for x, base, offset in arrays]

        def place(pointer: Any) -> tuple[int, float]:
            if isinstance(pointer, Varying):
                return self._first + pointer.k, pointer.more
            address = pointer if isinstance(pointer, int) else pointer.data_ptr()
            for start, stop, base, offset in ranges:
                if start <= address < stop:
                    return base, offset + address - start
            return 0, address

        self._steps, self._constants = [], list[Any]()  # kept alive
        for launch, pointers in recording.launches:
            places = tuple(map(place, pointers))
            self._steps.append((launch, places))
            self._constants += [pointer for pointer, (base, _) in zip(pointers, places) if not base]
            launch.place([0] * len(places))  # it may hold other arrays of the recording
        self._at: tuple[float, ...] = ()  # where the bases were last
        reached = {base for _, places in self._steps for base, _ in places}
        written = {base for base, x in enumerate(all_of, 3) if isinstance(x, float) or base < self._first}
        self.writes = written | {1 for _ in self._reads} <= reached  # else not all launches were told of
        self.key = self._like, self._size, tuple((launch.key, places) for launch, places in self._steps)

    def room(self) -> Any:
        """Memory for the launches' intermediate arrays."""
        torch = sys.modules["torch"]
        return torch.empty(self._size, dtype=torch.uint8, device=self._like[1])

    def run(self, given: Sequence[Any], right: Callable[[Any], Any], early: bool) -> Any:
        """Launch for other arguments of the same shapes; return the result, or None if another list was right.

        ``right`` returns the list for what :meth:`Slots.largest` has read (None: nothing). It is asked after the last
        launch or, with ``early``, as soon as that is read: then a wrong guess costs two launches.
        """
        torch, (several, device, *like) = sys.modules["torch"], self._like
        results = tuple(torch.empty(shape, dtype=dtype, device=device) for shape, dtype in like)
        room = self.room()
        ready = [(slots, *slots.ready(count, room, more), count, more) for slots, count, more in self._reads]

        def is_right() -> bool:
            read = [slots.largest(count, device, time, more) for slots, _, time, count, more in ready]
            return right(read[0] if read else None) is self

        values = (x if isinstance(x, float) else x.data_ptr() for x in (*results, *given))
        at = 0, ready[0][1].data_ptr() if ready else 0, room.data_ptr(), *values
        moved = [k for k, (old, new) in enumerate(zip(self._at, at)) if old != new] if self._at else range(len(at))
        stream, self._at = _stream(device), ()
        for k, (launch, places) in enumerate(self._steps):
            if early and k == self._read_after and not is_right():
                return None
            if any(base in moved for base, _ in places):
                launch.place([at[base] + offset for base, offset in places])
            launch.launch(stream)
        self._at = at
        return (results if several else results[0]) if early or is_right() else None


@dataclass(eq=False)
class _Known:
    lists: dict[Any, Launches] = field(default_factory=dict)  # by the extent that they serve
    last: Launches | None = None  # which served last
    tries: int = 2  # a first call may have no list, as it makes what is made once, such as equal weights


class Lists:
    """The lists of launches for calls of one shape, by a key and the extent that they serve; ``early``: as for run."""

    def __init__(self, early: bool) -> None:
        self._early, self._known = early, dict[Any, _Known]()

    def serve(
        self, key: Any, given: Sequence[Any], launch: Callable[[], tuple[Any, Any]], served: Callable[[Any], Any]
    ) -> Any:
        """Return the result of ``launch()``, or of a list of its launches; None where the general way is to answer.

        ``launch()`` returns the result, and the extent that its launches serve. ``served`` returns that extent for what
        was read (None: nothing); None: there is no result.
        """
        place = given[0].device
        key = key, place, _stream(place), *(isinstance(x, float) or x.data_ptr() % 16 for x in given)
        known, extent = self._known.get(key), 0.0
        if known is None:
            if len(self._known) >= 64:
                self._known.pop(next(iter(self._known)), None)
            known = self._known[key] = _Known()
        while known.last is not None:
            last = known.last
            if not last.lock.acquire(blocking=False):  # another thread is at it
                return launch()[0]

            def right(read: Any) -> Any:
                nonlocal extent
                extent = served(read)
                return known.lists.get(extent)

            try:
                result = last.run(given, right, self._early)
            except (MemoryError, RuntimeError):
                known.last, known.tries, known.lists = None, 0, {}
                break
            finally:
                last.lock.release()
            if result is not None or extent is None:
                return result
            if extent not in known.lists:
                break
            known.last = known.lists[extent]
        return self._listed(known, given, launch) if known.tries > 0 else launch()[0]

    def _listed(self, known: _Known, given: Sequence[Any], launch: Callable[[], tuple[Any, Any]]) -> Any:
        try:
            result, extent, found = record(launch, given)
        except (MemoryError, RuntimeError):
            known.tries = 0
            return launch()[0]
        if result is not None and found is None:
            known.tries -= 1
        elif found is not None:
            same = (one for other in list(self._known.values()) for one in list(other.lists.values()))
            known.lists[extent] = known.last = next((one for one in same if one.key == found.key), found)
            found.room()  # PyTorch has that memory for the next call then
        return result


class PerStream:
    """Values made once from tensors, for calls on any CUDA stream: the first on another stream waits for the device."""

    def __init__(self) -> None:
        self._made: dict[Any, tuple[Any, set[int]]] = {}  # values, and the streams that find them whole
        self._of = _here.recording and _here.recording.name  # made while recorded: the list makes the values anew

    def get(self, key: Any, make: Callable[[], Any], like: Any) -> Any:
        """Return the value of a key, which ``make()`` makes the first time; ``like``: a tensor on its device.

        The value is a tensor, or has its tensors in tuples, lists, dictionaries and dataclasses.
        """
        stream = current_stream(like.get_device()) if like.is_cuda else 0
        if key not in self._made:
            if captures(like):
                return make()  # in memory that is the graph's
            of_call = _here.recording is None or _here.recording.name is self._of
            value: Any = make() if of_call else aside(make)()
            self._made.setdefault(key, (value, {stream}))  # of two threads that make it at once one's stays
        value, known = self._made[key]
        if stream not in known:
            cuda = sys.modules["torch"].cuda
            if cuda.is_current_stream_capturing():  # which cannot wait; the caller's warming up has
                return value
            cuda.synchronize(like.device)
            for buffer in _tensors(value):
                buffer.record_stream(cuda.current_stream(like.device))  # keeps the memory until that stream is through
            known.add(stream)
        return value


def _tensors(x: Any) -> list[Any]:
    """The CUDA tensors that a value of :class:`PerStream` holds."""
    if getattr(x, "is_cuda", False):
        return [x]
    if is_dataclass(x):
        x = vars(x)
    if isinstance(x, dict):
        x = [*x.values()]
    return [tensor for part in x for tensor in _tensors(part)] if isinstance(x, tuple | list) else []


def _stream(device: Any) -> int:
    return current_stream(device.index) if device.type == "cuda" else 0
