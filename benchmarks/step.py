"""What a longer step and a wider score are worth in several dimensions, over half a step.

    python benchmarks/step.py [--samples 1000] [--dims 2,3,5,8,16,32] [--seed 2]

On ten densities, one draw each: the divergence KL(p, p̂), and the integrated squared error. Both are means over fresh
points of p; for the error half of them are of that estimate, and it is the mean of (p̂ − p)² / q, q the density
of both. Printed are geometric means over the
densities of the ratio to half a step, and the largest ratio. Bandwidths are multiples of that chosen for half a step.
"""

import argparse
import math

import numpy as np
from scipy import stats

import sdkde_core

CASES = [(1.0, 0.5, None), (1.15, 0.5, None)]  # a multiple, a step, and the score's bandwidth
CASES += [(g, "moments", c) for g in (0.9, 1.0, 1.15, 1.3) for c in (None, 1.4, 2.0)]


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


def errors(draw, log_density, n, rng):
    """The divergence and the squared error of every case."""
    x, fresh = draw(rng, n), draw(rng, 4000)
    found, h = [], sdkde_core.select_bandwidth(x).for_half_a_step()
    both = np.concatenate([fresh, sdkde_core.prepare(x, bandwidth=h).sample(4000, random_state=rng)])
    with np.errstate(divide="ignore"):
        logs, default = log_density(both), sdkde_core.estimate(x, both, bandwidth=h, log=True)
    p, q = np.exp(logs), 0.5 * np.exp(np.logaddexp(logs, default))
    for g, step, c in CASES:
        got = sdkde_core.estimate(x, both, bandwidth=g * h, step=step, score_bandwidth=c, log=True)
        divergence = float((logs - np.maximum(got, -700.0))[:4000].mean())
        found.append((divergence, float(((np.exp(got) - p) ** 2 / q).mean())))
    return np.array(found)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--dims", type=lambda text: [int(d) for d in text.split(",")], default=[2, 3, 5, 8, 16, 32])
    parser.add_argument("--seed", type=int, default=2)
    given = parser.parse_args()
    for d in given.dims:
        rng = np.random.default_rng((given.seed, d, given.samples))
        found = np.array([errors(*density, given.samples, rng) for density in densities(d).values()])
        ratios = found / found[:, :1]
        means, worst = np.exp(np.log(ratios).mean(0)), ratios.max(0)
        print(f"d = {d}, n = {given.samples}: KL, worst; ISE, worst, over the default")
        for (g, step, c), (kl, ise), (kl_worst, ise_worst) in zip(CASES, means, worst):
            print(
                f"  {g:4} h, step {step}, score at {c or 1.0}: {kl:.2f}, {kl_worst:.2f}; {ise:.2f}, {ise_worst:.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
