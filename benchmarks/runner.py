"""Runs benchmarks: a case after the other, each written as soon as it is measured."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .records import Run, about
from .registry import Benchmark, Case, Setting, Skipped

__all__ = ["Lost", "run"]


class Lost(RuntimeError):
    """The GPU's context is unusable after an error: only another process can go on."""


def run(
    benchmarks: Sequence[Benchmark],
    setting: Setting,
    folder: Path,
    seconds: float = float("inf"),
    again: bool = False,
    say: Callable[[str], None] = print,
) -> None:
    """Measure what the folder lacks, until ``seconds`` are over.

    Each benchmark may take a part of what is left, by its weight, so that the first leave time for the last. A case
    that has begun is finished.

    Raises
    ------
    ValueError
        The folder has records of another machine.
    Lost
        After an error of the GPU that no other case would survive. The case counts as failed; call again in another
        process.
    """
    if setting.kind == "cuda":
        import torch

        torch.cuda.set_device(setting.device)
    here, end = about(setting.device, setting.scale), time.monotonic() + seconds
    for i, benchmark in enumerate(benchmarks):
        now, share = time.monotonic(), benchmark.weight / sum(b.weight for b in benchmarks[i:])
        file = Run(folder / f"{benchmark.name}.jsonl", here)
        _run(benchmark, setting, file, again, now + (end - now) * share, say)


def _run(
    benchmark: Benchmark, setting: Setting, file: Run, again: bool, end: float, say: Callable[[str], None]
) -> None:
    say(f"{benchmark.name}: {benchmark.about}")
    try:
        cases = [case for case in benchmark.cases(setting) if _wanted(case, setting)]
    except Exception as error:  # a card that nobody knows, say: other benchmarks go on
        say(f"  has no cases here: {type(error).__name__}: {error}")
        return
    left = [case for case in cases if not file.has(case, again)]
    told: set[str] = set()
    for i, case in enumerate(left):
        if time.monotonic() >= end:
            say(f"  time is up: {len(left) - i} cases are left for another run")
            return
        result = _measured(benchmark, setting, case)
        file.add(case, result)
        text = f"  {_words(case)}: {_words(result)}"
        if "skipped" not in result:
            say(text)
        elif result["skipped"] not in told:
            told.add(result["skipped"])
            say(f"  {case.get('subject', _words(case))}: skipped, {result['skipped']}")
        if _lost(result.get("failed", "")):
            raise Lost(f"{_words(case)}: {result['failed']}; the same command goes on from there")


def _wanted(case: Case, setting: Setting) -> bool:
    name = case.get("subject")
    return name is None or (name.startswith(setting.subjects or "") and not name.startswith(setting.without))


def _measured(benchmark: Benchmark, setting: Setting, case: Case) -> dict[str, Any]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of peers; ours that a Laplace estimate is negative
            return benchmark.measure(setting, case)
    except Skipped as reason:
        return {"skipped": str(reason)}
    except Exception as error:  # a peer may raise anything: the others go on
        return {"failed": f"{type(error).__name__}: {error}".split("\n")[0][:200]}


def _lost(failed: str) -> bool:
    return any(
        words in failed for words in ("illegal memory access", "unspecified launch failure", "device-side assert")
    )


def _words(fields: dict[str, Any]) -> str:
    shown = (f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in fields.items() if v not in (None, ""))
    return ", ".join(shown)[:240]
