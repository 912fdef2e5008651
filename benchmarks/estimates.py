"""What estimates are worth beside those of other libraries, on laws that are drawn by seed and were tuned on by nobody.

    python benchmarks/estimates.py run --seed 4711 --save FILE.jsonl [--dims 1,2,3,5,8,16,32]
        [--sizes 20,50,200,2000,16000] [--draws 1] [--estimates "sdkde auto,kde auto"] [--jobs N] [--seconds S]
    python benchmarks/estimates.py table FILE.jsonl [--short] [--without mixture,clusters,normal]

In each number of columns ``laws`` makes thirteen laws of a seed: mixtures of normals, clusters, t, skewed and flat
ones; fifteen in the plane. A draw is n samples of a law. Errors are means over 4,000 fresh points of the law p and
4,000 of the estimate p̂ itself, with q = (p + p̂) / 2 the density of both:

    KL   mean of (p log(p / p̂) + p̂ − p) / q, with log p̂ at least −700
    ISE  mean of (p̂ − p)² / q

p̂ − p integrates to zero, and with it no term of KL is negative. No term of ISE is more than twice the larger density,
and peaks that an estimate alone has are not missed. In one column samples are also rounded to multiples of .01, .03, .1
and .3 standard deviations. ``table`` prints geometric means over the laws of the ratios to KDE with Silverman's rule on
the same draw, and the worst law.

Estimates are skipped where they are not for the data: KDEpy's improved Sheather-Jones (its bandwidth, our sums) and R's
logspline beyond one column, R's ks beyond six or above 2,000 samples, scikit-learn's KernelDensity by cross-validation
above 2,000, SciPy's where the covariance is singular, and mixtures by BIC where the fits take more than a minute. Above
2,000 samples SciPy's bandwidth is taken with our sums. The record says what is not installed. FILE.jsonl is as that of
bandwidths.py: one line a draw, and a run that was stopped goes on.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import itertools
import math
import shutil
import subprocess
import tempfile
import time
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from bandwidth_report import geometric, number, read_lines, table, title
from bandwidths import cores, numbers, take, words
from densities import _banana, _clusters, _random, _ring
from numpy.typing import NDArray
from scipy import stats
from step import for_half_a_step, frozen, independent

import sdkde_core

POINTS = 4000  # of the law, and of the estimate
UNITS = (0.01, 0.03, 0.1, 0.3)  # standard deviations to whose multiples samples are rounded
BASE, DEFAULT, PAPER = "kde Silverman", "sdkde auto", "sdkde paper"

Array = NDArray[Any]
Law = tuple[Callable[[np.random.Generator, int], Array], Callable[[Array], Array]]  # a sampler and the log density


# The laws


def laws(d: int, seed: int) -> dict[str, Law]:
    """Return the laws of a seed in d columns, by name."""
    rng = np.random.default_rng([seed, d])
    drawn = [_random(f"mixture {k}", d, 1000 * seed + k) for k in range(4)]
    for k in range(2):
        drawn.append(
            _clusters(f"clusters {k}", d, int(rng.integers(3, 11)), rng.uniform(0.5, 1.0), 1000 * seed + 10 + k)
        )
    if d == 2:
        drawn += [
            _ring(rng.uniform(2, 4), rng.uniform(0.2, 0.5)),
            _banana(rng.uniform(0.4, 1.0), rng.uniform(0.3, 0.6)),
        ]
    found: dict[str, Law] = {law.name.removesuffix("-2"): (law.sample, functools.partial(_log, law)) for law in drawn}
    root = rng.normal(size=(d, d)) / math.sqrt(d) + np.eye(d)
    shape = root @ root.T + 0.05 * np.eye(d)
    found["normal, correlated"] = frozen(stats.multivariate_normal(np.zeros(d), shape))
    for df in (3, 5):
        found[f"t{df}"] = frozen(stats.multivariate_t(np.zeros(d), shape, df))
    products = {"laplace": stats.laplace(), "log-normal": stats.lognorm(rng.uniform(0.3, 0.8))}
    products |= {"gamma": stats.gamma(rng.uniform(1.5, 5.0)), "beta(3, 3)": stats.beta(3, 3)}
    return found | {name: independent(law, d) for name, law in products.items()}


def _log(law: Any, y: Array) -> Array:
    with np.errstate(divide="ignore"):
        return np.log(law.pdf(y))


# The estimates: of samples and a generator, the log density and a sampler; a string says why there is none


def ours(method: str, rule: str, paper: bool = False) -> Callable[..., Any]:
    def fit(x: Array, rng: np.random.Generator) -> Any:
        if paper:
            return _of(x, method, for_half_a_step(x), rng)
        return _of(x, method, sdkde_core.select_bandwidth(x, method=method) if rule == "auto" else rule, rng)

    return fit


def _of(x: Array, method: str, bandwidth: Any, rng: np.random.Generator) -> Any:
    fitted = sdkde_core.prepare(x, method=method, bandwidth=bandwidth, device="cpu")
    return lambda y: fitted.estimate(y, log=True), lambda m: fitted.sample(m, random_state=rng)


def scipy(x: Array, rng: np.random.Generator) -> Any:
    try:
        fitted = stats.gaussian_kde(x.T)
    except (ValueError, np.linalg.LinAlgError):
        return "covariance is singular"
    if len(x) > 2000:
        return _of(x, "kde", fitted.covariance, rng)
    return lambda y: fitted.logpdf(y.T), lambda m: fitted.resample(m, seed=rng).T


def sklearn(x: Array, rng: np.random.Generator) -> Any:
    from sklearn.model_selection import GridSearchCV
    from sklearn.neighbors import KernelDensity

    if len(x) > 2000:
        return "more than 2,000 samples"
    mean, std = x.mean(0), x.std(0)  # it has one bandwidth for all columns
    grid = {"bandwidth": np.geomspace(0.02, 2, 16)}
    fitted = GridSearchCV(KernelDensity(rtol=1e-4), grid, cv=5).fit((x - mean) / std).best_estimator_
    state = int(rng.integers(2**31))
    return (
        lambda y: fitted.score_samples((y - mean) / std) - np.log(std).sum(),
        lambda m: mean + std * fitted.sample(m, random_state=state),
    )


def kdepy(x: Array, rng: np.random.Generator) -> Any:
    from KDEpy.bw_selection import improved_sheather_jones

    try:
        return _of(x, "kde", float(improved_sheather_jones(x)), rng)
    except ValueError:
        return "no solution"


def mixture(x: Array, rng: np.random.Generator) -> Any:
    from sklearn.mixture import GaussianMixture

    start, fits, state = time.perf_counter(), [], int(rng.integers(2**31))
    for k in range(1, min(10, len(x)) + 1):
        fits.append(GaussianMixture(k, n_init=2, random_state=state).fit(x))
        if time.perf_counter() - start > 60:
            return "more than 60 s"
    best = min(fits, key=lambda fit: fit.bic(x))
    return best.score_samples, lambda m: best.sample(m)[0]


def r(package: str, most: float) -> Callable[..., Any]:
    """An estimate of an R package, by the script estimates.R."""

    def fit(x: Array, rng: np.random.Generator) -> Any:
        if len(x) > most:
            return f"more than {most} samples"

        def ask(what: str, given: Array) -> Array:
            with tempfile.TemporaryDirectory() as folder:
                for name, values in (("train", x), ("given", given)):
                    np.savetxt(Path(folder) / f"{name}.csv", values, delimiter=",")
                script = Path(__file__).with_suffix(".R")
                subprocess.run(["Rscript", script, package, what, folder], check=True, capture_output=True)
                return np.loadtxt(Path(folder) / "result.csv", delimiter=",", ndmin=2)

        seed = int(rng.integers(2**31))
        return lambda y: ask("density", y)[:, 0], lambda m: ask("sample", np.array([m, seed]))

    return fit


ESTIMATES: dict[str, Callable[[Array, np.random.Generator], Any]] = {
    BASE: ours("kde", "silverman"),
    DEFAULT: ours("sdkde", "auto"),
    PAPER: ours("sdkde", "auto", paper=True),
    "kde auto": ours("kde", "auto"),
    "kde isj": ours("kde", "isj"),
    "stacked": lambda x, rng: _of(x, "stacked", "auto", rng),
    "SciPy": scipy,
    "scikit-learn CV": sklearn,
    "KDEpy ISJ": kdepy,
    "GMM-BIC": mixture,
    "logspline": r("logspline", math.inf),
    "ks": r("ks", 2000),
}
WIDEST = {"kde isj": 1, "KDEpy ISJ": 1, "logspline": 1, "ks": 6}  # columns that an estimate is for
ROUNDED = [name for name in ESTIMATES if name not in ("scikit-learn CV", "SciPy", "GMM-BIC")]


def missing(estimate: str) -> bool:
    """Whether what the estimate needs is not installed."""
    if estimate == "KDEpy ISJ":
        return importlib.util.find_spec("KDEpy") is None
    if estimate not in ("logspline", "ks"):
        return False
    ask = f'quit(status = !requireNamespace("{estimate}", quietly = TRUE))'
    return shutil.which("Rscript") is None or subprocess.run(["Rscript", "-e", ask], check=False).returncode != 0


# One draw


def errors(law: Law, x: Array, estimate: str, seed: list[int]) -> list[float] | str:
    """The divergence, the squared error, and the share of the law's points where log p̂ is less than −700, if any."""
    fitted = ESTIMATES[estimate](x, np.random.default_rng([*seed, 1]))
    if isinstance(fitted, str):
        return fitted
    both = np.concatenate([law[0](np.random.default_rng([*seed, 2]), POINTS), fitted[1](POINTS)])
    log_p, log_e = law[1](both), fitted[0](both)
    low = np.maximum(log_e, -700.0)
    log_q = np.logaddexp(log_p, low) - math.log(2)
    p, e = np.exp(log_p - log_q), np.exp(low - log_q)  # over q
    terms = np.where(p > 0, p * (np.maximum(log_p, -700.0) - low), 0.0) + e - p
    square = ((np.exp(low) - np.exp(log_p)) * (e - p)).mean()
    floored = (log_e[:POINTS] < -700).mean()
    return [float(f"{value:.3g}") for value in (terms.mean(), square, floored)[: 3 if floored else 2]]


def draw(name: str, d: int, n: int, index: int, how: dict[str, Any]) -> dict[str, Any]:
    """Return the record of one draw of a law."""
    start, seed = time.perf_counter(), [how["seed"], zlib.crc32(name.encode()), d, n, index]
    law = laws(d, how["seed"])[name]
    x = law[0](np.random.default_rng([*seed, 0]), n)
    asked = [estimate for estimate in how["estimates"] if d <= WIDEST.get(estimate, d)]
    found = {estimate: errors(law, x, estimate, seed) for estimate in asked}
    line = {"name": name, "d": d, "n": n, "draw": index, "errors": found}
    if d == 1:
        line["rounded"] = rounded = {}
        for unit in UNITS:
            given = np.round(x / (unit * x.std())) * (unit * x.std())
            some = {estimate: errors(law, given, estimate, seed) for estimate in asked if estimate in ROUNDED}
            rounded[str(unit)] = {estimate: values for estimate, values in some.items() if isinstance(values, list)}
    return line | {"seconds": round(time.perf_counter() - start, 1)}


def run(arguments: argparse.Namespace) -> None:
    """Take the draws that the file lacks."""

    def tasks() -> Iterator[tuple[str, int, int, int]]:
        for index, n, d in itertools.product(range(arguments.draws), sorted(arguments.sizes), arguments.dims):
            if n <= 2000 or d <= 5:
                for name in laws(d, arguments.seed):
                    yield name, d, n, index

    absent = [estimate for estimate in arguments.estimates if missing(estimate)]
    how = {"seed": arguments.seed, "estimates": [name for name in arguments.estimates if name not in absent]}
    how["not installed"] = absent
    take(arguments, how, tasks(), draw, lambda line: (line["name"], line["d"], line["n"], line["draw"]))


# The table


def print_table(arguments: argparse.Namespace) -> None:
    lines = [line for line in read_lines([arguments.file]) if "name" in line]
    lines = [line for line in lines if not line["name"].startswith(arguments.without)]
    cells = sorted({(line["d"], line["n"]) for line in lines})
    names = [name for name in ESTIMATES if any(isinstance(line["errors"].get(name), list) for line in lines)]
    others, ratios = [name for name in names if name != BASE], {}
    for (d, n), k in itertools.product(cells, (0, 1)):
        some = [line for line in lines if (line["d"], line["n"]) == (d, n)]
        ratios[d, n, k] = [_ratios(some, name, BASE, k) for name in others] + [_ratios(some, DEFAULT, PAPER, k)]
    heads, rows = [*others, "default over paper"], []
    if arguments.short:
        title("KL / ISE over those of KDE with Silverman's rule, geometric means; of the default the worst law", True)
        for d, n in cells:
            row = [f"{_mean(kl)} / {_mean(ise)}" for kl, ise in zip(ratios[d, n, 0], ratios[d, n, 1])]
            worst = " / ".join(_short(max(ratios[d, n, k][others.index(DEFAULT)].values())) for k in (0, 1))
            rows.append([str(d), f"{n:,}", *(cell.replace("– / –", "–") for cell in [row[0], worst, *row[1:]])])
        table(["d", "n", heads[0], "worst law", *heads[1:]], rows, True)
        return
    for k, what in enumerate(("KL", "ISE")):
        title(f"{what} over that of KDE with Silverman's rule: geometric mean (worst law)", True)
        table(["d, n", *heads], [[f"{d}, {n:,}", *map(_cell, ratios[d, n, k])] for d, n in cells], True)
    title("Draws, and why estimates were skipped", True)
    for d, n in cells:
        some = [line["errors"] for line in lines if (line["d"], line["n"]) == (d, n)]
        skipped = Counter(f"{name}: {why}" for one in some for name, why in one.items() if isinstance(why, str))
        rows.append([f"{d}, {n:,}", str(len(some)), ", ".join(f"{why} ({k})" for why, k in skipped.items())])
    table(["d, n", "draws", "skipped"], rows, True)
    title("Points of the law where log p̂ is less than −700, %, where there are any", True)
    rows = []
    for d, n in cells:
        some = [line["errors"] for line in lines if (line["d"], line["n"]) == (d, n)]
        shares = [_share([one[name] for one in some if isinstance(one.get(name), list)]) for name in names]
        if np.nansum(shares) > 0:
            rows.append([f"{d}, {n:,}", *(number(100 * share) for share in shares)])
    table(["d, n", *names], rows, True)
    _rounded(lines, names)
    _losses(lines, names)


def _share(errors: list[list[float]]) -> float:
    return float(np.mean([sum(values[2:]) for values in errors])) if errors else math.nan


def _ratios(lines: list[dict[str, Any]], name: str, over: str, k: int) -> dict[str, float]:
    """The geometric mean over the draws of each law."""
    found = defaultdict(list)
    for line in lines:
        one, other = line["errors"].get(name), line["errors"].get(over)
        if isinstance(one, list) and isinstance(other, list):
            found[line["name"]].append(one[k] / other[k])
    return {law: geometric(ratios) for law, ratios in found.items()}


def _mean(ratios: dict[str, float]) -> str:
    return _short(geometric(ratios.values()))


def _cell(ratios: dict[str, float]) -> str:
    return f"{_mean(ratios)} ({_short(max(ratios.values()))})" if ratios else "–"


def _short(value: float) -> str:
    return f"{value:.0e}" if value >= 999.5 else number(value)  # number() has a dash for NaN


def _rounded(lines: list[dict[str, Any]], names: list[str]) -> None:
    rows, names = [], [name for name in names if name in ROUNDED]
    for n in sorted({line["n"] for line in lines if "rounded" in line}):
        for unit in map(str, UNITS):
            row = []
            for name, k in itertools.product(names, (0, 1)):
                found = defaultdict(list)
                for line in lines:
                    if line["n"] == n and name in line.get("rounded", {}).get(unit, {}):
                        found[line["name"]].append(line["rounded"][unit][name][k] / line["errors"][name][k])
                row.append(_cell({law: geometric(ratios) for law, ratios in found.items()}))
            rows.append([f"{n:,}, {unit}", *(f"{kl}; {ise}" for kl, ise in zip(row[::2], row[1::2]))])
    if rows:
        title("One column, rounded to multiples of so many standard deviations, over unrounded: KL; ISE", True)
        table(["n, unit", *names], rows, True)


def _losses(lines: list[dict[str, Any]], names: list[str]) -> None:
    """Where the default is worse by more than 5 %, law by law."""
    title("Laws on which the default is more than 5 % worse", True)
    rows = []
    for d, n in sorted({(line["d"], line["n"]) for line in lines}):
        some = [line for line in lines if (line["d"], line["n"]) == (d, n)]
        row = []
        for over, k in itertools.product([name for name in names if name != DEFAULT], (0, 1)):
            ratios = _ratios(some, DEFAULT, over, k)
            worse = [f"{law} {number(ratio)}" for law, ratio in ratios.items() if ratio > 1.05]
            row.append(", ".join(worse) if over == BASE else f"{len(worse)} of {len(ratios)}" if ratios else "–")
        rows.append([f"{d}, {n:,}", *(f"{kl or 'none'}; {ise or 'none'}" for kl, ise in zip(row[::2], row[1::2]))])
    table(["d, n: KL; ISE", *(f"than {name}" for name in names if name != DEFAULT)], rows, True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="run | table")
    command = commands.add_parser("run", help="take draws")
    command.set_defaults(call=run, device="cpu")
    command.add_argument("--dims", type=numbers, default=(1, 2, 3, 5, 8, 16, 32))
    command.add_argument("--sizes", type=numbers, default=(20, 50, 200, 2000, 16000), help="16,000 up to five columns")
    command.add_argument("--draws", type=int, default=1)
    command.add_argument("--estimates", type=words, default=tuple(ESTIMATES), help=", ".join(ESTIMATES))
    command.add_argument("--seed", type=int, required=True)
    command.add_argument("--save", type=Path, required=True)
    command.add_argument("--jobs", type=int, default=cores())
    command.add_argument("--seconds", type=float, default=math.inf)
    command = commands.add_parser("table", help="print the tables of a record, as markdown")
    command.set_defaults(call=print_table)
    command.add_argument("file", type=Path)
    command.add_argument("--short", action="store_true", help="one table, with the worst law of the default alone")
    command.add_argument("--without", type=words, default=(), help="laws whose names begin so are left out")
    arguments = parser.parse_args()
    arguments.call(arguments)


if __name__ == "__main__":
    main()
