"""The Fourier backend on this CPU: a million samples in one to three dimensions, and beside its peers.

    python benchmarks/fourier.py [headline] [peers] [auto] [oracle] [--repeat 3] [--largest 1e6]

Data: mixtures of eight normals, Silverman's bandwidth.

- headline: SD-KDE of 1,000,000 × 131,072, queries drawn like the data, on a grid over their bounding box, and with 1 %
  of the samples thrown by Student's t3; errors of single passes against float64 sums, over the tolerance, at the 12
  outermost rows and 12 others.
- peers: KDE, beside KDEpy's FFTKDE and, in one dimension, statsmodels' FFT at their default grids (by linear
  interpolation), scikit-learn at rtol 1e-4 and the NumPy backend.
- auto: what it chooses, and what the other choice would have cost.
- oracle: the paper's one-dimensional experiment, the mean integrated squared error on its mixture of three normals,
  from its 4096 samples on.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from cpu import machine

import sdkde_core
from sdkde_core.choice import registry
from sdkde_core.protocol import Columns, Partial, Problem, Reduction
from sdkde_core.testing import reference
from sdkde_core.testing.problems import errors

N, M = 1_000_000, 131_072
KINDS = ("like the data", "grid", "1 % t3")


def data(kind: str, d: int, n: int, m: int) -> tuple[np.ndarray, np.ndarray]:
    """Samples (n, d) and about m queries."""
    rng = np.random.default_rng(d)
    means = 2.0 * rng.normal(size=(8, d))
    x, y = (means[rng.integers(0, 8, k)] + rng.normal(size=(k, d)) for k in (n, m))
    if kind == "1 % t3":
        for z in (x, y):
            thrown = rng.choice(len(z), len(z) // 100, replace=False)
            z[thrown] += rng.standard_t(3, (len(thrown), d)) * x.std(axis=0)
    if kind == "grid":
        axes = [np.linspace(*ends, round(m ** (1 / d))) for ends in zip(x.min(axis=0), x.max(axis=0))]
        y = np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1).reshape(-1, d)
    return x, y


def bandwidth(x: np.ndarray) -> np.ndarray:
    return 0.9 * x.std(axis=0) * len(x) ** (-1 / (x.shape[1] + 4))


def timed(call: Callable[[], Any], repeat: int) -> tuple[float, Any]:
    """Least time of a few runs, and the last result."""
    times, result = [], None
    for _ in range(repeat):
        start = time.perf_counter()
        result = call()
        times.append(time.perf_counter() - start)
    return min(times), result


def worst(x: np.ndarray, y: np.ndarray) -> Iterator[str]:
    """The worst of 24 rows over the tolerance of "high", reduction by reduction."""
    info = registry.find("fourier").info
    assert info is not None
    backend, (n, d) = info.load(), x.shape
    h, centre = bandwidth(x), np.median(x, axis=0)
    u, v = (x - centre) / h, (y - centre) / h
    columns = Columns(u, np.full(n, -math.log(n)))
    before: Any = None
    for reduction, rows in ((Reduction.MEAN, u), (Reduction.LOG_SUM, v), (Reduction.LAPLACE, v)):
        if rows is not before:
            radii = np.sqrt((rows**2).sum(axis=1))
            those = np.unique([*np.argsort(radii)[-12:], *np.linspace(0, len(rows) - 1, 12).astype(int)])
            want = reference.sums(rows[those], u, log_weights=columns.log_weights)
            before = rows
        problem = Problem(reduction, len(rows), n, d, extent=float(radii.max()), same=rows is u)
        got = backend.reduce(problem, None if rows is u else rows, backend.prepare(problem, columns))
        arrays = (got.log_sum, got.shift, got.sign, got.log_magnitude)
        some = Partial(*(None if a is None else a[those] for a in arrays))
        yield f"{reduction} {errors(problem, some, want).max():.0e}"


def headline(repeat: int, n: int) -> None:
    for kind in KINDS:
        for d in (1, 2, 3):
            x, y = data(kind, d, n, M)
            seconds, _ = timed(
                lambda x=x, y=y: sdkde_core.estimate(x, y, bandwidth="silverman", backend="fourier"), repeat
            )
            print(f"SD-KDE {n} × {len(y)}, d = {d}, {kind}: {seconds:.2f} s; ", end="", flush=True)
            print("worst row over its tolerance:", ", ".join(worst(x, y)), flush=True)


def statsmodels_fft(x: np.ndarray, y: np.ndarray, h: float) -> np.ndarray:
    """statsmodels' binned FFT at its default grid, by linear interpolation."""
    from statsmodels.nonparametric.kde import KDEUnivariate

    found = KDEUnivariate(x)
    found.fit(bw=h, fft=True)
    return np.log(np.interp(y, found.support, found.density))


def peers(repeat: int, largest: int) -> None:
    from KDEpy import FFTKDE
    from scipy.interpolate import RegularGridInterpolator
    from sklearn.neighbors import KernelDensity

    for d in (1, 2, 3):
        for n in (10**k for k in range(3, 8) if 10**k <= largest):
            x, y = data("like the data", d, n, min(n, M))
            h = float(bandwidth(x).mean())
            rows = np.linspace(0, len(y) - 1, 100).astype(int)
            want = reference.estimate(x, y[rows], method="kde", bandwidth=h, log=True)

            def fft(x: np.ndarray = x, y: np.ndarray = y, h: float = h, d: int = d) -> np.ndarray:
                grid, p = FFTKDE(bw=h).fit(x).evaluate()
                if d == 1:
                    return np.log(np.interp(y[:, 0], grid, p))
                axes = [np.unique(grid[:, a]) for a in range(d)]
                field = RegularGridInterpolator(axes, p.reshape([len(a) for a in axes]), bounds_error=False)
                return np.log(field(y))

            def ours(name: str, x: np.ndarray = x, y: np.ndarray = y, h: float = h) -> Callable[[], np.ndarray]:
                return lambda: sdkde_core.estimate(x, y, method="kde", bandwidth=h, log=True, backend=name)

            calls: dict[str, Callable[[], np.ndarray]] = {"fourier": ours("fourier"), "FFTKDE": fft}
            if d == 1:
                calls["statsmodels"] = lambda x=x, y=y, h=h: statsmodels_fft(x[:, 0], y[:, 0], h)
            if n * len(y) <= 2 * 10**9:
                calls["numpy"] = ours("numpy")
            if n * len(y) <= 10**9:
                calls["scikit-learn"] = lambda x=x, y=y, h=h: (
                    KernelDensity(bandwidth=h, rtol=1e-4).fit(x).score_samples(y)
                )
            print(f"KDE {n} × {len(y)}, d = {d}: ", end="")
            for name, call in calls.items():
                with np.errstate(all="ignore"):
                    seconds, got = timed(call, repeat)
                off = np.abs(got[rows] - want).max()
                print(f"{name} {seconds:.4f} s, {off:.0e}; ", end="", flush=True)
            print()


def auto(repeat: int) -> None:
    def run(x: np.ndarray, y: np.ndarray, name: str) -> float:
        return timed(lambda: sdkde_core.estimate(x, y, bandwidth="silverman", backend=name), repeat)[0]

    for d in (1, 2, 3):
        for n in (1000, 3000, 10_000, 20_000, 40_000):
            x, y = data("like the data", d, n, n // 8)
            chosen = next(c.name for c in sdkde_core.explain(x, y, bandwidth="silverman").candidates if c.chosen)
            text = ", ".join(f"{name} {run(x, y, name):.4f} s" for name in ("fourier", "numpy"))
            print(f"SD-KDE {n} × {n // 8}, d = {d}: auto takes {chosen}; {text}", flush=True)


def oracle(largest: int) -> None:
    """Three repeats from one generator; the trapezoid rule on 2048 points of [−6, 6]; Silverman's bandwidth."""
    weights, means, stds = np.array([0.3, 0.4, 0.3]), np.array([-2.0, 0.0, 2.0]), np.array([0.4, 0.7, 0.3])
    grid, rule = np.linspace(-6, 6, 2048), {"bandwidth": "silverman"}
    z = (grid[:, None] - means) / stds
    truth = (weights / (stds * math.sqrt(2.0 * math.pi)) * np.exp(-0.5 * z * z)).sum(1)
    for n in (4**k for k in range(6, 13) if 4**k <= largest):
        rng, rows = np.random.default_rng(0), []
        for _ in range(3):
            component = rng.choice(3, size=n, p=weights)
            x = rng.normal(means[component], stds[component])
            densities = [sdkde_core.estimate(x, grid, method=method, **rule) for method in ("kde", "sdkde", "laplace")]
            rows.append([np.trapezoid((p - truth) ** 2, grid) for p in densities])
        found = np.mean(rows, axis=0)
        seconds = timed(lambda x=x: sdkde_core.estimate(x, grid, method="sdkde", **rule), 3)[0]
        chosen = next(c.name for c in sdkde_core.explain(x, grid, **rule).candidates if c.chosen)
        line = ", ".join(f"{name} {e:.3e}" for name, e in zip(("KDE", "SD-KDE", "Laplace"), found))
        print(f"oracle, n = {n}: {line}; SD-KDE {seconds:.4f} s ({chosen})", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", default=["headline", "peers", "auto", "oracle"], help="any of the default")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--largest", type=float, default=1e6)
    options = parser.parse_args()
    for key, value in machine().items():
        print(f"{key}: {value}")
    if "headline" in options.what:
        headline(options.repeat, N)
    if "peers" in options.what:
        peers(options.repeat, int(options.largest))
    if "auto" in options.what:
        auto(options.repeat)
    if "oracle" in options.what:
        oracle(int(options.largest))


if __name__ == "__main__":
    main()
