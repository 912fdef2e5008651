"""Negative mass of Laplace and heavy tails: errors of every method on densities that are known."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from sdkde_core import select_bandwidth

from ..densities import named
from ..density_errors import HELD_OUT, errors_of
from ..problems import placed
from ..registry import REGISTRY, Benchmark, Case, Setting
from ..report import Table

#: Normal, heavy-tailed, spiky, bounded; in one, two and five dimensions.
DENSITIES = ("normal", "t3", "outlier", "claw", "gamma", "uniform", "t3-2", "separated-2", "t3-5", "separated-5")


def cases(setting: Setting) -> Iterator[Case]:
    for name in DENSITIES[:2] if setting.scale == "small" else DENSITIES:
        for n in setting.at((200,), (500, 4000), (500, 4000, 32_000)):
            for rule in ("silverman", "auto"):
                for method in ("kde", "sdkde", "laplace"):
                    yield {"density": name, "n": n, "bandwidth": rule, "method": method}


def measure(setting: Setting, case: Case) -> dict[str, Any]:
    density, method = named(case["density"]), case["method"]
    rng = np.random.default_rng([7, case["n"]])
    samples, held_out = density.sample(rng, case["n"]), density.sample(rng, HELD_OUT)
    x = placed(samples, setting.device)
    bandwidth = select_bandwidth(x, method=method, rule=case["bandwidth"])
    found = errors_of(density).all(x, method, bandwidth, held_out, device=setting.device)
    return dataclasses.asdict(found) | {"h": np.sqrt(np.diagonal(bandwidth.matrix)).tolist()}


REGISTRY.add(
    Benchmark(
        "tails",
        "readers",
        "Negative mass and heavy tails: errors of every method on known densities.",
        cases,
        measure,
        (
            Table(
                "Integrated squared error",
                ("density", "n", "bandwidth"),
                {"ISE": "ise"},
                "method",
            ),
            Table(
                "Mass of Laplace below zero",
                ("density", "n"),
                {"": "negative"},
                "bandwidth",
                keep=lambda row: row["method"] == "laplace",
            ),
            Table(
                "Mean of log p̂ over held-out samples; none where it is negative at one of them",
                ("density", "n", "bandwidth"),
                {"": "likelihood"},
                "method",
            ),
        ),
    )
)
