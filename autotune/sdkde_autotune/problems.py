"""Which kernels there are to tune for the problems and the processor that a command names."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from sdkde_core.choice import hardware, registry
from sdkde_core.choice.cards import GPU, GPUS
from sdkde_core.choice.judge import judge
from sdkde_core.choice.select import require_known
from sdkde_core.messages import did_you_mean
from sdkde_core.protocol import Problem, Reduction
from sdkde_core.tuning import Query, space_of, this_cpu

from .records import Key, Task, octave

#: What is tuned if no problem is named, the most valuable first: sizes that serve most others, as each serves those
#: within three octaves; the most common precisions and dimensions.
GRID: dict[str, tuple[Any, ...]] = {
    "n_train": (32768, 131072, 8192, 1048576),
    "precision": ("fast", "high"),
    "dim": (16, 2, 64, 1, 8, 32, 128, 3, 4),
    "reduction": (Reduction.MEAN, Reduction.LOG_SUM, Reduction.LAPLACE),
}


class Place(NamedTuple):
    """The processor that kernels are tuned for: this CPU, or a GPU, which need not be here."""

    name: str
    architecture: str
    device: str | None  # None: it is not here
    card: GPU | None  # None: a CPU


def place_of(name: str) -> Place:
    """Return the processor that a user names: ``"cpu"``, ``"auto"`` for the first GPU here, or a GPU by name."""
    if name.lower() == "cpu":
        return Place(*this_cpu(), "cpu", None)
    here, auto = hardware.local_cards(), name.lower() == "auto"
    card = next(iter(here), None) if auto else hardware.card_called(name)
    if card is None and not auto:
        hint = did_you_mean(name, (word for card in GPUS for word in (*card.aliases, card.name)))
        known = ", ".join(card.aliases[0] for card in GPUS)
        raise ValueError(f"no GPU is known as {name!r}; pass auto, cpu, or one of {known}{hint}")
    if card is None:
        why = "no NVIDIA GPU is visible here"
        if here:
            why = f"the rates of {hardware.visible_gpus()[0].name!r} are not known, as NVML does not answer, or the "
            why += "card is older than compute capability 7.0"
        raise ValueError(f"{why}; name one to predict for, such as --gpu a6000, or pass --gpu cpu")
    found = next((i for i, other in enumerate(here) if other is not None and other.name == card.name), None)
    return Place(card.name, card.architecture, None if found is None else f"cuda:{found}", card)


def problems(
    reduction: Iterable[str] = GRID["reduction"], dim: Iterable[int] = (2, 16, 64), n_train: Iterable[int] = (32768,),
    n_query: Sequence[int] = (), precision: Iterable[str] = ("fast",), requires: Iterable[str] = (),
    device: str = "cuda:0",
) -> list[Problem]:  # fmt: skip
    """Return the cross product of the arguments as typical problems, by size first; sizes become powers of two.

    Queries are by default an eighth of the training points; those of MEAN always the training points. ``requires`` has
    features: ``"weights"``.
    """
    found, features = [], frozenset(requires)
    for n, level, d, kind in itertools.product(n_train, precision, dim, map(Reduction, reduction)):
        same, dtype = kind is Reduction.MEAN, "float32" if level == "fast" else "float64"
        extent = 1.2 * math.sqrt(d) + 6  # normal samples under Silverman's bandwidth, tails included
        for m in (n,) if same else n_query or (max(1, n // 8),):
            size = 2 ** octave(m), 2 ** octave(n), d
            found.append(Problem(kind, *size, dtype, level, device, same, features, extent))
    return list(dict.fromkeys(found))


def tasks(wanted: Sequence[Problem], place: Place, backend: str | None = None) -> list[Task]:
    """Return the kernels to tune for the problems on a processor, one per key, in the order of the problems.

    Without a backend's name every installed one that can be tuned is. A kernel that is tuned without weights is not
    tuned with them too. BackendUnavailable or ValueError: the named backend is not available or cannot be tuned; or
    there is nothing to tune for any.
    """
    able = {x.name: x.info for x in registry.records() if x.ok and x.info and x.info.tuning}
    if backend is not None and backend not in able:
        require_known(backend, "")
        others = ", ".join(able) or "none is installed"
        raise ValueError(f"backend {backend!r} has nothing to tune; backends that can be tuned: {others}")
    found: dict[Key, Task] = {}
    refusals: list[str] = []
    for problem, info in itertools.product(wanted, able.values() if backend is None else [able[backend]]):
        space, kind = space_of(info), problem.device.partition(":")[0]
        assert space is not None
        candidate = judge(info, (problem,), problem.device, None, None) if kind in info.devices else None
        if candidate is None or not candidate.ok:
            refusals.append(f"{info.name}: {candidate.reason if candidate else f'does not run on {kind}'}")
            continue
        for kernel in space.kernels(problem):
            size = space.dimension(kernel, problem)
            query = Query(info.name, kernel, space.config_version, size, place.name, place.architecture)
            task = Task(query, problem, space)
            key = task.key._replace(d=size)  # of dimensions padded alike the first is tuned
            if reason := task.limit(task.default()):  # it cannot run there at all
                refusals.append(f"{info.name}: {reason}")
            elif key._replace(requires="") not in found:
                found.setdefault(key, task)
    if not found:
        why = "; ".join(dict.fromkeys(refusals)) or f"{', '.join(able)} has no kernels for these problems"
        if not able:
            could = [record.info for record in registry.records() if record.info and record.info.tuning]
            commands = "; or ".join(info.install for info in could if info.install)
            why = f"no installed backend can be tuned{'; install one: ' if commands else ''}{commands}"
        raise ValueError(f"nothing to tune: {why}")
    return list(found.values())
