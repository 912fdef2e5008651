"""Who answers: our backends by name and precision, and peers.

A subject is asked for a :class:`Call` for a task: a function of (x, y, h), and in which form its answer comes. Peers
are in ``peers/``, a file a library, and import it when they are asked.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from sdkde_core.protocol import PRECISIONS, Problem, Reduction

from .problems import Data
from .registry import Skipped

__all__ = ["Call", "Subject", "Task", "find", "here", "leaves_out", "ours"]

ALL = ("kde", "sdkde", "laplace")


class Task(NamedTuple):
    """What a subject is asked to compute, and the first data that it will get."""

    method: str
    data: Data
    device: str

    @property
    def sizes(self) -> tuple[int, int, int]:
        """n, m and d."""
        return len(self.data.x), len(self.data.y), self.data.x.shape[1]

    @property
    def pairs(self) -> int:
        n, m, _ = self.sizes
        return n * (m + n * (self.method == "sdkde"))


class Call(NamedTuple):
    """How a subject answers.

    Parameters
    ----------
    whole : function of (x, y, h)
        (m,) of what ``form`` says.
    form : {"log", "density", "sum"}
        log p̂; p̂; or Σφ over the points, of Laplace its sum.
    debias : function of (x, h), optional
        The moved points (n, d), for errors where n² sums in float64 take too long.
    setting : str
        Which of its own ways was the fastest.
    """

    whole: Callable[..., Any]
    form: str
    debias: Callable[..., Any] | None = None
    setting: str = ""


@dataclass(frozen=True)
class Subject:
    """One who answers.

    Parameters
    ----------
    name : str
    make : function of a Task
        A Call. Raises Skipped where it cannot.
    modules, install : tuple of str, str
        What it imports, and the command that installs that.
    methods, dimensions : tuple
        What it computes; all dimensions if empty.
    devices : tuple of str
        Kinds. Without "cuda" it gets host data wherever the benchmark runs.
    most : mapping of str to float
        Pairs by kind of device from which on it is left out.
    dtype : str
        In which it gets the data.
    compiles : bool
        Whether its first call takes longer than others.
    """

    name: str
    make: Callable[[Task], Call]
    modules: tuple[str, ...] = ()
    install: str = ""
    methods: tuple[str, ...] = ALL
    dimensions: tuple[int, ...] = ()
    devices: tuple[str, ...] = ("cpu", "cuda")
    most: Mapping[str, float] = field(default_factory=dict)
    dtype: str = "float32"
    compiles: bool = True

    def place(self, device: str) -> str:
        """The device on which it computes in a run on ``device``."""
        return device if device.partition(":")[0] in self.devices else "cpu"

    def check(self, method: str, pairs: float, d: int, device: str) -> None:
        """Raise Skipped if it cannot answer there."""
        kind = self.place(device).partition(":")[0]
        for module in self.modules:
            if not _installed(module):
                raise Skipped(f"{module} is missing: {self.install}")
        if kind not in self.devices:
            raise Skipped(f"it needs a device of kind {' or '.join(self.devices)}")
        if method not in self.methods or (self.dimensions and d not in self.dimensions):
            raise Skipped(f"it does not compute {method} in {d} dimensions")
        if pairs > self.most.get(kind, float("inf")):
            raise Skipped(f"{pairs:.1e} pairs would take it too long, or too much memory")


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package that it is in is not
        return False


def find(name: str) -> Subject:
    """The subject of that name: "triton, fast" is ours, "triton, fast, untuned" with SDKDE_TUNING=off.

    Raises
    ------
    ValueError
        There is none.
    """
    for peer in peers():
        if peer.name == name:
            return peer
    words = [*name.split(", "), ""]
    if len(words) < 3 or words[1] not in PRECISIONS:
        raise ValueError(f"no subject {name!r}; pass a backend with a precision, or one of {[p.name for p in peers()]}")
    return ours(*words[:3])


@functools.cache
def peers() -> tuple[Subject, ...]:
    """All peers, whether installed or not."""
    import pkgutil

    from . import peers as folder

    modules = (importlib.import_module(m.name) for m in pkgutil.iter_modules(folder.__path__, f"{folder.__name__}."))
    return tuple(subject for module in modules for subject in module.SUBJECTS)


# --- ours -----------------------------------------------------------------------------------------------------------


def here(device: str, precisions: tuple[str, ...] = ("fast",), d: int = 1) -> list[str]:
    """Names of our subjects for a device and a dimension, backend by backend; none whose kernels a CPU interprets."""
    import sdkde_core

    kind, found = device.partition(":")[0], []
    for record in sdkde_core.backends():
        info = record.info
        if info is None or kind not in info.devices or (kind == "cpu" and "cuda" in info.devices[:1]):
            continue  # kernels for a GPU run on a CPU in an interpreter
        for precision in precisions:
            problem = Problem(Reduction.LOG_SUM, 1024, 1024, d, precision=precision, device=device, extent=10.0)
            if precision in info.precisions and (not record.ok or info.supports(problem).ok):
                found.append(f"{record.name}, {precision}")
    return found


def leaves_out(backend: str) -> bool:
    """Whether a backend of ours can leave out pairs that cannot matter: by its option ``skip``."""
    import sdkde_core

    record = next((r for r in sdkde_core.backends() if r.name == backend), None)
    if record is None or record.info is None or not record.ok:
        return False
    return "skip" in inspect.signature(type(record.info.load())).parameters


def ours(backend: str, precision: str, how: str = "") -> Subject:
    """A backend of ours at a precision, or "auto"; "untuned" goes without what the tuner found."""
    import sdkde_core

    record = next((r for r in sdkde_core.backends() if r.name == backend), None)
    if record is None and backend != "auto":
        raise ValueError(f"no backend {backend!r}")
    info = record.info if record else None

    def make(task: Task) -> Call:
        if record and not record.ok:
            raise Skipped(f"{record.reason}")
        options = {"backend": backend, "precision": precision, "device": task.device, "method": task.method}
        log = task.method != "laplace"  # p̂ underflows in many dimensions

        def whole(x: Any, y: Any, h: float) -> Any:
            with _tuning(how):
                return sdkde_core.estimate(x, y, bandwidth=h, log=log, **options)

        def debias(x: Any, h: float) -> Any:
            with _tuning(how):
                return sdkde_core.debias(x, bandwidth=h, **{k: v for k, v in options.items() if k != "method"})

        return Call(whole, "log" if log else "density", debias if task.method == "sdkde" else None)

    return Subject(
        name=", ".join(filter(None, (backend, precision, how))),
        make=make,
        modules=info.requires_modules if info else (),
        install=info.install if info else "",
        devices=tuple(info.devices) if info else ("cpu", "cuda"),
        most={"cpu": 2e11 if backend.startswith("fourier") else 6e9} if backend != "auto" else {},
        dtype="float32" if precision == "fast" else "float64",
    )


@contextmanager
def _tuning(how: str) -> Iterator[None]:
    if how != "untuned":
        yield
        return
    before = os.environ.get("SDKDE_TUNING")
    os.environ["SDKDE_TUNING"] = "off"
    try:
        yield
    finally:
        os.environ.pop("SDKDE_TUNING") if before is None else os.environ.update(SDKDE_TUNING=before)
