"""Measure subjects over problems: time with error. What most benchmarks are made of."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import sdkde_core
from sdkde_core.choice import hardware

from . import metrics, timing
from .paper import paper_model
from .problems import Data, pool
from .registry import Case, Setting, Skipped
from .subjects import Task, find, here

__all__ = ["FLASH", "TORCH", "cases", "everybody", "measure", "named", "ours"]

#: Peers that come with variants.
TORCH = ("PyTorch", "torch.compile", "torch.compile TF32")
FLASH = ("flash-sd-kde TF32", "flash-sd-kde fp32")

#: From so many points on, by kind of device, errors are of fewer rows, given a subject's own moved points.
LARGE = {"cpu": 2**16, "cuda": 2**20}

#: Rows that errors are taken over, of a large problem and of others.
ROWS = {"cpu": (64, 512), "cuda": (256, 4096)}


def cases(
    subjects: Iterable[str], methods: Sequence[str], sizes: Iterable[tuple[int, int, int]], kind: str = "eight"
) -> Iterator[Case]:
    """A case for every size (n, m, d), method and subject, in this order."""
    subjects = list(subjects)
    for n, m, d in sizes:
        for method in methods:
            for name in subjects:
                yield {"subject": name, "method": method, "kind": kind, "n": n, "m": m, "d": d}


def ours(setting: Setting, d: int, precisions: tuple[str, ...] = ("fast",)) -> list[str]:
    """Names of our subjects on the device of a run that take d dimensions; those last that compile for long."""
    return sorted(here(setting.device, precisions, d), key=lambda name: name.startswith("keops"))


def everybody(setting: Setting, d: int) -> list[str]:
    """Ours on the device, then the paper's peers."""
    return [*ours(setting, d), *FLASH, "KeOps", *TORCH]


def named(row: dict[str, Any]) -> str:
    """The subject, with the method if that is not sdkde."""
    return row["subject"] if row["method"] == "sdkde" else f"{row['subject']}, {row['method']}"


def measure(setting: Setting, case: Case) -> dict[str, Any]:
    """Time of a subject with its error; a case has ``subject``, ``method``, ``kind``, ``n``, ``m``, ``d``."""
    subject, (n, m, d) = find(case["subject"]), (case["n"], case["m"], case["d"])
    place, method = subject.place(setting.device), case["method"]
    subject.check(method, n * (m + n * (method == "sdkde")), d, setting.device)
    kind = place.partition(":")[0]
    large = n >= LARGE[kind]
    problem = case["kind"], n, m, d
    drawn = pool(*problem, subject.dtype, place, 2 if large or kind == "cpu" else 3)
    task = Task(method, drawn[0], place)
    try:
        call = subject.make(task)
        found, raw = timing.measured(call.whole, drawn, place, setting.seconds, subject.compiles)
        found |= {"h": drawn[0].h, "on": place, "setting": call.setting} | _shares(found, task, place)
        return found | errors(call, raw, problem, task, large, kind)
    except sdkde_core.BackendUnavailable as error:
        raise Skipped(str(error)) from None
    finally:
        _release()


def errors(call: Any, raw: Any, problem: tuple[Any, ...], task: Task, large: bool, kind: str) -> dict[str, Any]:
    """Errors of an answer to the first data; none where they would take too long."""
    n, _, d = task.sizes
    few, many = ROWS[kind]
    if large and task.method == "sdkde":
        if call.debias is None:
            return {}
        truth = metrics.exact(task.data, task.method, few, call.debias(task.data.x, task.data.h))
    else:
        truth = exact(problem, task.method, task.device, few if large else many)
    return metrics.against_exact(raw, call.form, truth, task.method, n, d, task.data.h)


@functools.lru_cache(maxsize=4)
def exact(problem: tuple[Any, ...], method: str, device: str, rows: int) -> metrics.Exact:
    """The truth of the first data of a problem, which all subjects share."""
    (data,) = pool(*problem, "float64", device, 1)
    return metrics.exact(Data(*data), method, rows)


def _shares(found: dict[str, Any], task: Task, place: str) -> dict[str, float]:
    """On a GPU: shares of the time that the exponentials alone take, and of peaks by the paper's count of operations.

    An exponential is 1/16 of a clock of a multiprocessor. The paper counts sdkde of n/8 queries, d ≥ 2.
    """
    if place == "cpu":
        return {}
    import torch

    shares, (n, m, d) = {}, task.sizes
    if "mhz" in found:
        rate = 16e3 * torch.cuda.get_device_properties(place).multi_processor_count * found["mhz"]  # per ms
        shares["of_exp_limit"] = task.pairs / rate / found["ms"]
    on = hardware.processor(place)
    if on is not None and task.method == "sdkde" and d > 1 and n == 8 * m:
        flops = paper_model(n, d).total.flops
        rates = {dtype: on.matrix_flops[dtype] for dtype in ("float16", "tf32") if dtype in on.matrix_flops}
        shares |= {f"share_{dtype}": flops / rate / (1e-3 * found["ms"]) for dtype, rate in rates.items()}
    return shares


def _release() -> None:
    """Give back what a subject took of a GPU's memory, and have products in float32 again."""
    if torch := sys.modules.get("torch"):
        torch.set_float32_matmul_precision("highest")
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
