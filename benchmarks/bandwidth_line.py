"""What choosing costs in one dimension: many draws, fast, by estimates on a grid (the command ``line``).

Errors are ∫(p̂ − p)² by the trapezoid rule on a grid of 8,192 points, over those of KDE with Silverman's rule on the
same draw, which is not rounded. The estimate is summed on that grid by Fourier transforms, exact to 1e-3 of the error.
"""

from __future__ import annotations

import argparse
import math
import zlib
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import numpy as np
from densities import DEVELOP, ELEVEN, FRESH, named
from numpy.typing import NDArray

import sdkde_core

POINTS = 1 << 13
GROUPS = {
    "eleven": tuple(density.name for density in ELEVEN),
    "fresh": tuple(density.name for density in FRESH),
    "develop": tuple(density.name for density in DEVELOP if density.d == 1),
    "few": ("normal", "exponential", "bimodal", "t3"),
}

Array = NDArray[Any]


class Judge:
    """The squared error of estimates from samples x (n,), of a density on a line."""

    def __init__(self, x: Array, density: Any) -> None:
        spread, middle = self.spread(x), float(np.median(x))
        self.low = max(float(x.min()), middle - 40 * spread) - 5 * spread
        high = min(float(x.max()), middle + 40 * spread) + 5 * spread
        self.width = (high - self.low) / POINTS
        grid = self.low + self.width * np.arange(POINTS)
        self.density = density.pdf(grid[:, None])
        self.frequencies = 2 * np.pi * np.fft.rfftfreq(POINTS)
        inside = x[(x > self.low + 2 * spread) & (x < high - 2 * spread)]
        self.mass = self.shared((inside - self.low) / self.width, np.full(len(inside), 1 / len(x)))
        self.silverman = 0.9 * spread * len(x) ** -0.2

    @staticmethod
    def spread(x: Array) -> float:
        low, high = np.quantile(x, [0.25, 0.75])
        return float(min(x.std(), (high - low) / 1.34) if high > low else x.std())

    @staticmethod
    def shared(places: Array, mass: Array) -> Array:
        low = np.clip(np.floor(places).astype(int), 0, POINTS - 2)
        share = places - low
        return np.bincount(low, mass * (1 - share), POINTS) + np.bincount(low + 1, mass * share, POINTS)

    def moments(self, u: Array, s: Array, c: float) -> float:
        """The step with which the estimate has the samples' variance; places u and shifts s in bandwidths."""
        mass = self.mass / self.mass.sum()
        towards, squares = mass @ u * (mass @ s) - mass @ (u * s), mass @ (s * s) - (mass @ s) ** 2
        if min(towards, squares) < 1e-12:
            return 0.5
        rest = towards**2 - squares
        step = 1 / (towards + math.sqrt(rest)) if rest > 0 else towards / squares
        return float(np.clip(step, 0.5 if c == 1 else 0, 1.2 * c * c))

    def error(self, method: str, h: float, score: float | None = None, moves: Any = "moments") -> float:
        """Of a bandwidth; ``score``: the score's, in bandwidths, of sdkde's step ``moves``, else it is half a step."""
        h, c = h / self.width, score or 1.0
        q = (h * self.frequencies) ** 2
        kernel, spectrum = np.exp(-0.5 * q), np.fft.rfft(self.mass)
        if method == "sdkde":
            wide = spectrum * np.exp(-0.5 * c * c * q)
            near = np.maximum(np.fft.irfft(wide, POINTS), np.maximum(0.3 * self.mass / (c * h), 1e-14))
            shift = np.clip(h * np.fft.irfft(wide * 1j * self.frequencies, POINTS) / near, -8, 8)
            places = np.arange(POINTS, dtype=float)
            step = 0.5 if score is None else self.moments(places / h, shift, c) if moves == "moments" else moves
            places += step * h * shift
            spectrum = np.fft.rfft(self.shared(np.clip(places, 0, POINTS - 1.5), self.mass))
        factor = 1 + 0.5 * q if method == "laplace" else 1.0
        estimate = np.fft.irfft(spectrum * kernel * factor, POINTS) / self.width
        return float(((estimate - self.density) ** 2).sum() * self.width)


def draw(name: str, n: int, index: int, seed: int, methods: tuple[str, ...], rounded: float) -> dict[str, Any]:
    """The logs of one draw's errors over those of KDE with Silverman's rule: auto, and the best of 60 bandwidths."""
    density = named(name)
    x = density.sample(np.random.default_rng([seed, zlib.crc32(name.encode()), n, index]), n)[:, 0]
    judge = Judge(x, density)
    unit = rounded * judge.spread(x)
    given = np.round(x / unit) * unit if unit else x
    base, result = judge.error("kde", judge.silverman), {}
    if unit:
        judge.mass = Judge.shared((given - judge.low) / judge.width, np.full(n, 1 / n))
    for method in methods:
        found = sdkde_core.select_bandwidth(given, method=method)
        others = () if unit else np.geomspace(0.02, 2.5, 60)
        tried = [judge.error(method, judge.silverman * k, found.score_bandwidth) for k in others] or [math.nan]
        error = judge.error(method, float(found.factor[0]), found.score_bandwidth, found.step)
        result[method] = math.log(error / base), math.log(min(tried) / base)
    if "kde" in methods and n > 50:
        h = float(sdkde_core.select_bandwidth(given, method="kde", rule="isj").factor[0])
        result["kde, isj"] = math.log(judge.error("kde", h) / base), result["kde"][1]
    return {"name": name, "n": n, **result}


def line(arguments: argparse.Namespace) -> None:
    """Print geometric means over densities, the worst density, the mean over the best h, and the worst draw."""
    tasks = [
        (name, n, index, arguments.seed, tuple(arguments.methods), arguments.rounded)
        for name in GROUPS[arguments.group]
        for n in arguments.sizes
        for index in range(arguments.draws)
    ]
    with ProcessPoolExecutor(arguments.jobs, mp_context=get_context("spawn")) as pool:
        found = list(pool.map(draw, *zip(*tasks), chunksize=4))
    print("| n | method | geometric mean | worst density | over the best h | worst draw |")
    for n in arguments.sizes:
        for method in [key for key in next(one for one in found if one["n"] == n) if key not in ("name", "n")]:
            logs = defaultdict(list)
            for one in found:
                if one["n"] == n:
                    logs[one["name"]].append(one[method])
            means = {name: np.mean(values, axis=0) for name, values in logs.items()}
            mean, best = np.mean(list(means.values()), axis=0)
            worst = max(means, key=lambda name: means[name][0])
            draws = np.concatenate(list(logs.values()))
            print(
                f"| {n} | {method} | {math.exp(mean):.3f} | {math.exp(means[worst][0]):.2f} {worst} | "
                f"{math.exp(mean - best):.3f} | {math.exp(draws[:, 0].max()):.2f} |"
            )
