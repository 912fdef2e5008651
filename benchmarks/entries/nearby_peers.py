"""KDE where few pairs matter: backends of ours beside trees and block-sparse sums of others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from .. import metrics, timing
from ..problems import data, placed
from ..registry import REGISTRY, Benchmark, Case, Setting, Skipped
from ..report import Table
from ..subjects import Task, find, here

#: Peers with the most pairs that they are asked for: within minutes on two cores.
PEERS = {
    "mlpack, rel_error 0.0001": 2e10,
    "mlpack, rel_error 1e-05": 2e10,
    "scikit-learn, rtol 0.0001": 2e9,
    "KeOps, ranges": 2e11,
    "KeOps": 2e10,
}

#: Ours, by kind of device.
WANTED = {"cpu": ("numba", "fourier"), "cuda": ("triton", "hopper", "numba-cuda", "fourier")}

KINDS = ("eight", "normal", "three")

#: Outermost rows, and others, whose errors are taken.
ROWS = 100


def cases(setting: Setting) -> Iterator[Case]:
    for kind in setting.at(("eight",), KINDS, KINDS):
        for n in setting.at((2**11,), (10**5,), (10**5, 10**6)):
            for d in setting.at((3,), (4, 3, 6), (4, 3, 6)):
                ours = [
                    name for name in here(setting.device, ("fast", "high"), d) if name.startswith(WANTED[setting.kind])
                ]
                for subject in (*ours, *PEERS):
                    yield {"subject": subject, "kind": kind, "n": n, "m": n // 8, "d": d}


def measure(setting: Setting, case: Case) -> dict[str, Any]:
    """Time of a call, and the worst of the outermost rows and of others."""
    subject, (n, m, d) = find(case["subject"]), (case["n"], case["m"], case["d"])
    place = subject.place(setting.device)
    subject.check("kde", 0, d, setting.device)
    if place == "cpu" and n * m > PEERS.get(case["subject"], np.inf):
        raise Skipped(f"{n * m:.1e} pairs would take it too long")
    drawn = data(case["kind"], n, m, d, dtype=subject.dtype)
    call = subject.make(Task("kde", drawn._replace(x=placed(drawn.x, place), y=placed(drawn.y, place)), place))
    pool = [drawn._replace(x=placed(drawn.x + shift, place), y=placed(drawn.y + shift, place)) for shift in (0, 1)]
    found, raw = timing.measured(call.whole, pool, place, setting.seconds, subject.compiles)
    outer = np.argsort(-((drawn.y - drawn.x.mean(axis=0)) ** 2).sum(axis=1))[:ROWS]
    rows = np.unique(np.concatenate([outer, np.linspace(0, m - 1, min(m, ROWS)).astype(int)]))
    truth = metrics.Exact(rows, metrics.sums(drawn.y[rows], drawn.x, drawn.h, "log"))
    found |= {"s": 1e-3 * found.get("cpu_ms", found["ms"]), "on": place, "setting": call.setting}
    return found | metrics.against_exact(raw, call.form, truth, "kde", n, d, drawn.h)


REGISTRY.add(
    Benchmark(
        "nearby-peers",
        "ours",
        "KDE in three to six dimensions, where few pairs matter, beside scikit-learn, mlpack and block-sparse KeOps.",
        cases,
        measure,
        (
            Table(
                "Seconds (of a processor, on a CPU) and the worst row's error of log p",
                ("n", "d", "kind", "subject"),
                {"s": "s", "by the clock": lambda row: 1e-3 * row["ms"], "worst row": "worst", "setting": "setting"},
            ),
        ),
        gpu=True,
        weight=0.5,
    )
)
