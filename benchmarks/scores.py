"""Errors of scores ∇log p̂, and what the true score would make of a debiased KDE.

    python benchmarks/scores.py [--dims 2,10,100] [--samples 16384] [--draws 3] [--methods stacked,sdkde,kde,GMM-BIC]
    python benchmarks/scores.py --oracle [--dims 1,2] [--sizes 250,1000,4000,16000] [--draws 10]

The first is in the manner of DiScoFormer (arXiv 2511.05924), a network that is trained on mixtures of normals and given
samples of a density estimates its score: a random mixture of two to seven normals, independent Laplace columns, and
Student's t with three degrees of freedom, columns independent or spherical. Printed is 100 · mean‖ŝ − s‖² / mean‖s‖² at
4,000 fresh points, the mean over draws; each draw of the mixture is another mixture. Their mixtures, the shape of their
Laplace and t₃ in several dimensions, and the number of their points are not known to us: these are settings of our own.

The second gives ``debias`` the true score, as in the SD-KDE paper's theory. Printed is the mean integrated squared
error at the bandwidth that makes it least: of KDE, of SD-KDE with the score of the KDE at that bandwidth, and of SD-KDE
with the true score; then at the default bandwidth, which is chosen from the data. The slopes are of log error against
log n over the three largest n. In theory they are −4/(d + 4) for KDE and −8/(d + 8) for SD-KDE.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import time
import zlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from bandwidth_report import table, title
from bandwidths import numbers, words
from densities import Mixture, _random, named
from density_errors import Grid, errors_of
from numpy.typing import NDArray
from real_peers import by_bic
from scipy import stats
from scipy.optimize import minimize_scalar
from scipy.special import softmax

import sdkde_core

POINTS = 4000
# What arXiv 2511.05924 has, %, for mixtures of normals and 2¹⁴ samples.
PUBLISHED = {2: "6.8", 10: "2.8; their KDE 53"}
DENSITIES = {1: ("normal", "bimodal", "trimodal"), 2: ("normal-2", "separated-2", "mixture-2")}

Array = NDArray[Any]


class Law(NamedTuple):
    """A sampler, and the score at rows."""

    sample: Callable[[np.random.Generator, int], Array]
    score: Callable[[Array], Array]


def of_mixture(shares: Array, means: Array, covariances: Array, y: Array) -> Array:
    """The score of a mixture of normals at y, (m, d)."""
    logs, pulls = [], []
    for share, mean, covariance in zip(shares, means, covariances):
        pull = np.linalg.solve(covariance, (mean - y).T).T
        logs.append(math.log(share) - 0.5 * np.linalg.slogdet(covariance)[1] - 0.5 * ((mean - y) * pull).sum(1))
        pulls.append(pull)
    return np.einsum("km,kmd->md", softmax(logs, axis=0), pulls)


def law_of(mixture: Mixture) -> Law:
    parts = mixture.shares, mixture.means, mixture.covariances
    return Law(mixture.sample, functools.partial(of_mixture, *parts))


def laws(d: int, draw: int) -> dict[str, Law]:
    """The laws of a draw, by name."""
    spherical = stats.multivariate_t(np.zeros(d), np.eye(d), 3)
    return {
        "mixture of normals": law_of(_random("", d, 100 + draw)),
        "Laplace": Law(lambda rng, n: rng.laplace(size=(n, d)), lambda y: -np.sign(y)),
        "t₃, independent": Law(lambda rng, n: rng.standard_t(3, size=(n, d)), lambda y: -4.0 * y / (3.0 + y**2)),
        "t₃, spherical": Law(
            lambda rng, n: spherical.rvs(n, random_state=rng).reshape(n, d),
            lambda y: -(3.0 + d) * y / (3.0 + (y**2).sum(1, keepdims=True)),
        ),
    }


def ours(method: str) -> Callable[[Array], Callable[[Array], Array]]:
    return lambda x: sdkde_core.prepare(x, method=method, device="cpu").grad_log_density


def by_mixture(x: Array) -> Callable[[Array], Array]:
    """scikit-learn's mixture by BIC, of standardised samples."""
    mean, std = x.mean(0), x.std(0)
    fit = by_bic((x - mean) / std)[0]
    full = fit.covariances_ if fit.covariance_type == "full" else [np.diag(row) for row in fit.covariances_]
    return lambda y: of_mixture(fit.weights_, fit.means_, full, (y - mean) / std) / std


METHODS = {name: ours(name) for name in ("stacked", "sdkde", "kde")} | {"GMM-BIC": by_mixture}


def print_scores(given: argparse.Namespace) -> None:
    rows, names = [], given.methods or tuple(METHODS)
    for d in given.dims or (2, 10, 100):
        for law in laws(d, 0):
            errors = {name: [] for name in names}
            for draw in range(given.draws):
                rng = np.random.default_rng([zlib.crc32(law.encode()), d, draw])
                sample, score = laws(d, draw)[law]
                x, y = sample(rng, given.samples), sample(rng, POINTS)
                true = score(y)
                for name in names:
                    start = time.process_time()
                    off = METHODS[name](x)(y) - true
                    errors[name].append(100 * float((off**2).sum() / (true**2).sum()))
                    seconds = time.process_time() - start
                    print(
                        f"{law}, d = {d}, draw {draw}, {name}: {errors[name][-1]:.2f} % in {seconds:.0f} s", flush=True
                    )
            published = PUBLISHED.get(d, "") if law.startswith("mixture") and given.samples == 16384 else ""
            rows.append([law, str(d), *(f"{np.mean(errors[name]):.3g}" for name in names), published or "–"])
    title(f"Relative squared error of scores, %, of {given.samples:,} samples, {given.draws} draws", True)
    table(["density", "d", *names, "DiScoFormer as published"], rows, True)


# The true score


def moved(x: Array, h: float, score: Any) -> Array:
    return sdkde_core.debias(x, bandwidth=h, score=score, device="cpu")


def estimators(score: Callable[[Array], Array]) -> dict[str, Callable[[Grid, Array, Any], float]]:
    """Of a draw and a bandwidth, the integrated squared error."""
    return {
        "KDE": lambda grid, x, h: grid.loss(x, "kde", h, device="cpu"),
        "SD-KDE": lambda grid, x, h: grid.loss(x, "sdkde", h, device="cpu"),
        "true score": lambda grid, x, h: grid.loss(moved(x, h, score), "kde", h, device="cpu"),
    }


def least(grid: Grid, draws: list[Array], error: Callable[[Grid, Array, Any], float]) -> tuple[float, float]:
    """The mean error over draws at the bandwidth that makes it least, and this bandwidth."""
    n, d = draws[0].shape
    middle = math.log(draws[0].std() * n ** (-1 / (d + 8)))

    def mean(log_h: float) -> float:
        return float(np.mean([error(grid, x, math.exp(log_h)) for x in draws]))

    found = minimize_scalar(mean, bounds=(middle - 3.0, middle + 0.7), method="bounded", options={"xatol": 0.02})
    return float(found.fun), math.exp(found.x)


def print_oracle(given: argparse.Namespace) -> None:
    rows = []
    for d, name in of_dims(given.dims or (1, 2)):
        density = named(name)
        grid, tried = errors_of(density), estimators(law_of(density).score)
        found: dict[str, list[float]] = {}
        for n in given.sizes:
            draws = [
                density.sample(np.random.default_rng([zlib.crc32(name.encode()), n, k]), n) for k in range(given.draws)
            ]
            cells = []
            for what, error in tried.items():
                value, h = least(grid, draws, error)
                found.setdefault(what, []).append(value)
                cells.append(f"{value:.2e} ({h:.2g})")
            for method in ("kde", "sdkde"):
                value = float(np.mean([grid.loss(x, method, "auto", device="cpu") for x in draws]))
                found.setdefault(f"{method} auto", []).append(value)
                cells.append(f"{value:.2e}")
            rows.append([name, str(d), f"{n:,}", *cells])
            print(*rows[-1], flush=True)
        last = np.log(given.sizes[-3:])
        rows.append(
            ["slope", str(d), "", *(f"{np.polyfit(last, np.log(values[-3:]), 1)[0]:.2f}" for values in found.values())]
        )
    title(f"Mean integrated squared error of {given.draws} draws, and the bandwidth where it is least", True)
    table(["density", "d", "n", "KDE", "SD-KDE", "SD-KDE, true score", "kde auto", "sdkde auto"], rows, True)


def of_dims(dims: tuple[int, ...]) -> Iterator[tuple[int, str]]:
    return itertools.chain.from_iterable(((d, name) for name in DENSITIES[d]) for d in dims)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dims", type=numbers, default=())
    parser.add_argument("--samples", type=int, default=16384)
    parser.add_argument("--draws", type=int, default=3)
    parser.add_argument("--methods", type=words, default=(), help=f"of {', '.join(METHODS)}")
    parser.add_argument("--oracle", action="store_true")
    parser.add_argument("--sizes", type=numbers, default=(250, 1000, 4000, 16000), help="with --oracle")
    given = parser.parse_args()
    (print_oracle if given.oracle else print_scores)(given)


if __name__ == "__main__":
    main()
