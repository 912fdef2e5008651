"""Which kernels there are to tune for the problems and the card that a command names."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from sdkde_core.choice import hardware, registry
from sdkde_core.choice.cards import GPU, GPUS, gpu
from sdkde_core.plugin import did_you_mean
from sdkde_core.protocol import BackendInfo, BackendUnavailable, Problem, Reduction
from sdkde_core.tuning import Query, Space, space_of

from .key import Key, octave
from .runner import Task

__all__ = ["GRID", "Tunable", "by_value", "card_named", "problems", "tunables"]

#: What is tuned if no problem is named, the most valuable first: the most common precisions and dimensions; sizes that
#: serve most others, as each serves those within three octaves; the reductions of SD-KDE.
GRID: dict[str, tuple[Any, ...]] = {
    "n_train": (32768, 131072, 8192, 1048576),
    "precisions": ("fast", "high"),
    "dims": (16, 2, 64, 1, 8, 32, 128, 3, 4),
    "reductions": (Reduction.MEAN, Reduction.LOG_SUM, Reduction.LAPLACE),
}


class Tunable(NamedTuple):
    """A kernel to tune for a problem, and its search space."""

    task: Task
    space: Space


def card_named(name: str) -> GPU:
    """Return the GPU that a user names.

    Raises
    ------
    ValueError
        No GPU is known by that name, or it has several names.
    """
    card = hardware.card_called(name)
    if card is None:
        several = [found for word in re.split(r"[\s,;/+]+", name) if (found := gpu(word))]
        if len(several) > 1:
            raise ValueError(f"{name!r} names {len(several)} GPUs; pass one, such as {several[0].aliases[0]}")
        hint = did_you_mean(name, (word for card in GPUS for word in (*card.aliases, card.name)))
        known = ", ".join(card.aliases[0] for card in GPUS)
        raise ValueError(f"no GPU is known as {name!r}; pass auto, or one of {known}{hint}")
    return card


def problems(
    reductions: Iterable[str] = tuple(Reduction),
    dims: Iterable[int] = (2, 16, 64),
    n_train: Iterable[int] = (32768,),
    n_query: Sequence[int] = (),
    precisions: Iterable[str] = ("fast",),
    device: str = "cuda:0",
) -> list[Problem]:
    """Return the cross product of the arguments as typical problems; sizes become the nearest powers of two.

    Parameters
    ----------
    reductions : iterable of str
    dims, n_train : iterable of int
    n_query : sequence of int
        Empty: an eighth of the training points. The queries of MEAN are always the training points.
    precisions : iterable of str
    device : str
    """
    found = []
    for reduction, d, n, precision in itertools.product(map(Reduction, reductions), dims, n_train, precisions):
        same = reduction is Reduction.MEAN
        for m in (n,) if same else n_query or (max(1, n // 8),):
            problem = Problem(
                reduction=reduction,
                m=2 ** octave(m),
                n=2 ** octave(n),
                d=d,
                dtype="float32" if precision == "fast" else "float64",
                precision=precision,
                device=device,
                same=same,
                extent=1.2 * math.sqrt(d) + 6,  # normal samples under Silverman's bandwidth, tails included
            )
            found.append(problem)
    return list(dict.fromkeys(found))


def by_value(found: Iterable[Tunable]) -> list[Tunable]:
    """Sort by the order of values in :data:`GRID`: by size first, by reduction last."""

    def place(values: Sequence[Any], value: Any) -> int:
        return values.index(value) if value in values else len(values)

    def worth(tunable: Tunable) -> tuple[int, ...]:
        problem = tunable.task.problem
        each = (problem.n, problem.precision, problem.d, problem.reduction)
        return tuple(place(values, value) for values, value in zip(GRID.values(), each))

    return sorted(found, key=worth)


def tunables(wanted: Iterable[Problem], card: GPU, backend: str | None = None) -> list[Tunable]:
    """Return the kernels to tune for the problems on a card, one per key.

    Parameters
    ----------
    wanted : iterable of Problem
    card : GPU
    backend : str, optional
        None: every installed backend that can be tuned.

    Raises
    ------
    BackendUnavailable, ValueError
        The named backend is not available or cannot be tuned; or there is nothing to tune for any.
    """
    found: dict[Key, Tunable] = {}
    named = (
        [_named(backend)] if backend else [record.info for record in registry.records() if record.ok and record.info]
    )
    refusals = []
    for info in named:
        space = space_of(info)
        if space is None:
            continue
        for problem in wanted:
            reason = _refusal(info, problem)
            if reason:
                refusals.append(f"{info.name}: {reason}")
                continue
            for kernel in space.kernels(problem):
                default = space.default(kernel, problem, card.architecture)
                reason = space.limit(kernel, default, problem, card.architecture)
                if reason:  # it cannot run there at all
                    refusals.append(f"{info.name}: {reason}")
                    continue
                dimension = space.dimension(kernel, problem)
                query = Query(info.name, kernel, space.config_version, dimension, card.name, card.architecture)
                key = Key.of(query, problem)._replace(d=dimension)  # of dimensions that are padded alike the first
                found.setdefault(key, Tunable(Task(query, problem), space))
    if not found:
        names = ", ".join(info.name for info in named if info.tuning)
        why = "; ".join(dict.fromkeys(refusals)) if names else "no installed backend can be tuned"
        raise ValueError(f"nothing to tune: {why or f'{names} has no kernels for these problems'}")
    return list(found.values())


def _named(name: str) -> BackendInfo:
    record = registry.find(name)
    able = [record.name for record in registry.records() if record.ok and record.info and record.info.tuning]
    rest = f"; backends that can be tuned: {', '.join(able) or 'none is installed'}{did_you_mean(name, able)}"
    if record is None:
        raise BackendUnavailable(f"backend {name!r} is unknown{rest}")
    if not record.ok or record.info is None:
        raise BackendUnavailable(f"backend {name!r} is {record.status}: {record.reason}")
    if not record.info.tuning:
        raise ValueError(f"backend {name!r} has nothing to tune{rest}")
    return record.info


def _refusal(info: BackendInfo, problem: Problem) -> str | None:
    kind = problem.device.partition(":")[0]
    if kind not in info.devices:
        return f"does not run on {kind}"
    if problem.precision not in info.precisions:
        return f"has no precision {problem.precision}"
    support = info.supports(problem)
    return None if support.ok else support.reason
