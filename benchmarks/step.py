"""What a longer step and a wider score are worth in several dimensions, over half a step.

    python benchmarks/step.py [--samples 1000] [--dims 2,3,5,8,16,32] [--seed 2]    the ten densities of the choice
    python benchmarks/step.py --report --dims 3,5,8,10,16 --samples 400 --seed 99   the default, on other densities
    python benchmarks/step.py --study --dims 5,16      the default and half a step over KDE with Silverman's rule
    python benchmarks/step.py --real [--keel DIR]      the default, on scikit-learn's sets and KEEL's raw files in DIR

One draw of each density: the divergence KL(p, p̂), and the integrated squared error. Both are means over fresh points of
p. For the error half of the points are of the estimate with half a step instead: it is the mean of (p̂ − p)² / q, q the
density of both halves. Printed are geometric means over the densities of the ratio to half a step with the bandwidth
that is chosen for it, and the largest ratio. Cases are multiples of that bandwidth. The sets: held-out log density per
sample, at least −700, less that with half a step and without a guard: the mean of five folds of up to 10,000 rows, and
the least fold; of the columns of numbers with more than ten values.
"""

import argparse
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
from densities import DEVELOP, REPORT, Product, _clusters, _random
from density_errors import errors_of
from scipy import stats
from sklearn import datasets

import sdkde_core
from sdkde_core.bandwidth.rules import resolve

CASES = [(1.0, 0.5, None), (1.15, 0.5, None)]  # a multiple, a step, and the score's bandwidth
CASES += [(g, "moments", c) for g in (0.9, 1.0, 1.15, 1.3) for c in (None, 1.4, 2.0)]
KEEL = ("banana", "phoneme", "magic", "segment", "abalone19", "satimage")
SETS = ("iris", "wine", "breast_cancer", "diabetes", "digits")
DEFAULT = [(1.0, 0.5, None), (None, None, None)]  # the second: what "auto" chooses


def clusters(k, d):
    rng = np.random.default_rng(31 * k + d)
    means, widths = 2.0 * rng.normal(size=(k, d)), rng.uniform(0.4, 1.2, size=(k, d))

    def log_density(y):
        away = ((y[:, None] - means) / widths) ** 2
        logs = -0.5 * away.sum(-1) - np.log(widths).sum(1) - 0.5 * d * np.log(2 * np.pi) - np.log(k)
        return np.logaddexp.reduce(logs, axis=1)

    def draw(rng, n):
        which = rng.integers(k, size=n)
        return means[which] + widths[which] * rng.normal(size=(n, d))

    return draw, log_density


def frozen(law):
    return lambda rng, n: law.rvs(n, random_state=rng).reshape(n, -1), law.logpdf


def independent(law, d):
    return lambda rng, n: law.rvs((n, d), random_state=rng), lambda y: law.logpdf(y).sum(1)


def two_scales(d):
    wide, narrow = independent(stats.norm(0, 3), d), independent(stats.norm(), d)

    def draw(rng, n):
        return rng.normal(size=(n, d)) * rng.choice([1.0, 3.0], size=(n, 1))

    return draw, lambda y: np.logaddexp(wide[1](y), narrow[1](y)) - math.log(2.0)


def densities(d):
    laws = {"normal": stats.norm(), "gamma": stats.gamma(3), "laplace": stats.laplace(), "beta": stats.beta(2, 3)}
    found = {name: independent(law, d) for name, law in laws.items()} | {
        "log-normal": independent(stats.lognorm(0.5), d)
    }
    correlation = 0.8 + 0.2 * np.eye(d)
    found["correlated"] = frozen(stats.multivariate_normal(np.zeros(d), correlation))
    found["t5"] = frozen(stats.multivariate_t(np.zeros(d), np.eye(d), 5))
    return found | {"two": clusters(2, d), "four": clusters(4, d), "two scales": two_scales(d)}


def others(d):
    """Densities that the factors were not chosen on."""
    found = [density for density in REPORT + DEVELOP if density.d == d]
    found += [_clusters(f"clusters {k}", d, k, std, seed) for k, std, seed in ((4, 0.8, 11), (10, 0.6, 12))]
    found += [_random("random", d, 21), Product("t3", d)]
    return {i: (density.sample, lambda y, of=density: np.log(of.pdf(y))) for i, density in enumerate(found)}


def for_half_a_step(x):
    """What "auto" chooses for the paper's estimate, without a guard."""
    return replace(resolve("auto", x, steps=False), tails=None)


def errors(draw, log_density, n, rng, cases):
    """The divergence and the squared error of every case."""
    x, fresh = draw(rng, n), draw(rng, 4000)
    chosen = sdkde_core.select_bandwidth(x)
    found, h = [], for_half_a_step(x)
    both = np.concatenate([fresh, sdkde_core.prepare(x, bandwidth=h).sample(4000, random_state=rng)])
    with np.errstate(divide="ignore"):
        logs, default = log_density(both), sdkde_core.estimate(x, both, bandwidth=h, log=True)
    p, q = np.exp(logs), 0.5 * np.exp(np.logaddexp(logs, default))
    for g, step, c in cases:
        bandwidth = chosen if g is None else g * h
        got = sdkde_core.estimate(x, both, bandwidth=bandwidth, step=step, score_bandwidth=c, log=True)
        divergence = float((logs - np.maximum(got, -700.0))[:4000].mean())
        found.append((divergence, float(((np.exp(got) - p) ** 2 / q).mean())))
    return np.array(found)


def study(d, draws=4):
    """The integrated squared errors of kde, sdkde and half a step of it, on the densities of the study."""
    for n in (200, 2000, 16000):
        found = {}
        for density in (density for density in REPORT if density.d == d):
            loss = errors_of(density).loss
            for draw in range(draws if n < 16000 else draws // 2):
                x = density.sample(np.random.default_rng((31415, draw, n, d, len(density.name))), n)
                kde, sdkde = (sdkde_core.select_bandwidth(x, method=method) for method in ("kde", "sdkde"))
                rules = ("kde", kde), ("sdkde", sdkde), ("sdkde", for_half_a_step(x))
                errors = [loss(x, *rule) for rule in (("kde", resolve("silverman", x, method="kde")), *rules)]
                found.setdefault(density.name, []).append(np.log(errors[1:]) - math.log(errors[0]))
        logs = np.array([np.mean(draws, axis=0) for draws in found.values()])
        means, worst = np.exp(logs.mean(0)), np.exp(logs.max(0))
        print(f"d = {d}, n = {n}: kde, sdkde, half a step: {means.round(3)}, worst {worst.round(2)}", flush=True)


def keel(folder, name):
    """A raw file of KEEL's, in the folder or in one named raw below it: numbers, less the class in the last column."""
    found = [*folder.glob(f"{name}.dat"), *sorted(folder.rglob(f"raw/{name}.dat"))]
    if not found:
        raise SystemExit(f"--keel {folder}: there is no {name}.dat in it, nor in a folder named raw below it")
    lines = found[0].read_text(encoding="utf-8").splitlines()
    rows = [line.split(",")[:-1] for line in lines if line.strip() and not line.startswith("@")]
    return np.array([column for column in zip(*rows) if all(map(is_number, column))], dtype=float).T


def is_number(text):
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def real(folder=None):
    """Held-out nats per sample over half a step without a guard."""
    sets = {name: keel(folder, name) for name in KEEL} if folder else {}
    sets |= {name: getattr(datasets, f"load_{name}")().data for name in SETS}
    means = []
    for name, x in sets.items():
        x = x[:, [len(np.unique(column)) > 10 for column in x.T]]
        order, gains = np.random.default_rng(7).permutation(len(x))[:10_000], []
        for fold in range(5):
            out = order[fold::5]
            kept = np.setdiff1d(order, out)
            h = sdkde_core.select_bandwidth(x[kept])
            logs = [sdkde_core.estimate(x[kept], x[out], bandwidth=b, log=True) for b in (for_half_a_step(x[kept]), h)]
            gains.append(np.subtract(*[np.maximum(values, -700.0).mean() for values in reversed(logs)]))
        means.append(np.mean(gains))
        print(f"{name}, {x.shape[0]} × {x.shape[1]}: {means[-1]:+.3f}, {min(gains):+.3f}", flush=True)
    print(f"mean {np.mean(means):+.3f}, median {np.median(means):+.3f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--dims", type=lambda text: [int(d) for d in text.split(",")], default=[2, 3, 5, 8, 16, 32])
    parser.add_argument("--seed", type=int, default=2)
    parser.add_argument("--report", action="store_true")
    parser.add_argument("--real", action="store_true")
    parser.add_argument(
        "--keel", type=Path, metavar="DIR", help=f"with --real: a folder with {', '.join(KEEL)} as .dat"
    )
    parser.add_argument("--study", action="store_true")
    given = parser.parse_args()
    if given.real:
        real(given.keel)
        return
    if given.study:
        for d in given.dims:
            study(d)
        return
    cases, laws = (DEFAULT, others) if given.report else (CASES, densities)
    for d in given.dims:
        rng = np.random.default_rng((given.seed, d, given.samples))
        found = np.array([errors(*density, given.samples, rng, cases) for density in laws(d).values()])
        ratios = found / found[:, :1]
        means, worst = np.exp(np.log(ratios).mean(0)), ratios.max(0)
        print(f"d = {d}, n = {given.samples}, {len(found)} densities: KL, worst; ISE, worst, over half a step")
        for (g, step, c), (kl, ise), (kl_worst, ise_worst) in zip(cases, means, worst):
            what = "the default" if g is None else f"{g:4} h, step {step}, score at {c or 1.0}"
            print(f"  {what}: {kl:.2f}, {kl_worst:.2f}; {ise:.2f}, {ise_worst:.2f}", flush=True)


if __name__ == "__main__":
    main()
