"""What ``support=`` gains on densities that end somewhere or go round, beside mirrored samples by hand.

    python benchmarks/supports.py [--seed 1] [--draws 8] [--sizes 200,2000,16000] [--names exponential,...]

The integrated squared error over that of sdkde without ``support`` on the same draw, geometric means, and the worst
law; in one column on a fine grid that reaches beyond the ends, where an estimate without support has mass, in two
columns on a coarser one within the ends. ``mirrored``: KDEpy's FFTKDE of the samples and their reflections at both
ends, by Silverman's rule and by improved Sheather-Jones of all of these, as its documentation advises; circles have
images one period further. Above 2,000 samples there are at most three draws, and no stacks.
"""

from __future__ import annotations

import argparse
import math
import zlib
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

import sdkde_core

Array = Any
CIRCLE = 2.0 * math.pi


class Law(NamedTuple):
    """A sampler (rng, n), the density, the support, and from where to where errors are integrated; by column."""

    draw: Callable[[Any, int], Array]
    density: Callable[[Array], Array]
    support: Any
    reach: Any


def _of(law: Any, support: Any, reach: tuple[float, float]) -> Law:
    return Law(lambda rng, n: law.rvs(size=n, random_state=rng), law.pdf, support, reach)


def _mixed(parts: list[tuple[float, Any]], support: Any, reach: tuple[float, float], circle: bool = False) -> Law:
    def draw(rng: Any, n: int) -> Array:
        counts = rng.multinomial(n, [share for share, _ in parts])
        x = np.concatenate([law.rvs(size=k, random_state=rng) for k, (_, law) in zip(counts, parts)])
        return np.mod(rng.permutation(x), CIRCLE) if circle else rng.permutation(x)

    def density(y: Array) -> Array:
        values = sum(share * law.pdf(y) for share, law in parts)
        return np.where((y >= 0) & (y <= CIRCLE), values, 0.0) if circle else values

    return Law(draw, density, support, reach)


def _round(kappa: float, at: float = 0.3) -> tuple[float, Any]:
    return 1.0, stats.vonmises(kappa, loc=at)


def _product(*columns: Law) -> Law:
    def density(y: Array) -> Array:
        return np.prod([one.density(y[:, j]) for j, one in enumerate(columns)], axis=0)

    return Law(
        lambda rng, n: np.stack([one.draw(rng, n) for one in columns], axis=1),
        density,
        [one.support for one in columns],
        [one.reach for one in columns],
    )


def _copula(rho: float) -> Law:
    """Beta(1, 3) and beta(2, 2) margins with a normal copula."""
    margins, joint = (stats.beta(1, 3), stats.beta(2, 2)), stats.multivariate_normal([0, 0], [[1, rho], [rho, 1]])

    def density(y: Array) -> Array:
        y = np.clip(y, 1e-9, 1 - 1e-9)
        z = np.stack([stats.norm.ppf(m.cdf(y[:, j])) for j, m in enumerate(margins)], axis=1)
        single = stats.norm.pdf(z).prod(axis=1)
        return joint.pdf(z) / single * margins[0].pdf(y[:, 0]) * margins[1].pdf(y[:, 1])

    def draw(rng: Any, n: int) -> Array:
        z = joint.rvs(size=n, random_state=rng)
        return np.stack([m.ppf(stats.norm.cdf(z[:, j])) for j, m in enumerate(margins)], axis=1)

    return Law(draw, density, [(0, 1), (0, 1)], [(0.0, 1.0), (0.0, 1.0)])


LINE = {
    "exponential": _of(stats.expon(), (0, None), (-2, 14)),
    "beta(1, 3)": _of(stats.beta(1, 3), (0, 1), (-0.3, 1.3)),
    "beta(½, ½)": _of(stats.beta(0.5, 0.5), (0, 1), (-0.3, 1.3)),
    "uniform": _of(stats.uniform(), (0, 1), (-0.3, 1.3)),
    "half a normal": _of(stats.halfnorm(), (0, None), (-1, 6)),
    "normal from −1 to 2": _of(stats.truncnorm(-1, 2), (-1, 2), (-2, 3)),
    "normal from ½": _of(stats.truncnorm(0.5, math.inf), (0.5, None), (-0.5, 6)),
    "gamma(2)": _of(stats.gamma(2), (0, None), (-2, 20)),
    "gamma(3)": _of(stats.gamma(3), (0, None), (-2, 24)),
    "Weibull(1.5)": _of(stats.weibull_min(1.5), (0, None), (-1, 8)),
    "Lomax(3)": _of(stats.lomax(3), (0, None), (-1, 40)),
    "beta(2, 2)": _of(stats.beta(2, 2), (0, 1), (-0.3, 1.3)),
    "beta(3, 1)": _of(stats.beta(3, 1), (0, 1), (-0.3, 1.3)),
    "exponential and gamma(9)": _mixed([(0.5, stats.expon()), (0.5, stats.gamma(9))], (0, None), (-2, 30)),
    "von Mises(½)": _mixed([_round(0.5)], ("circular", CIRCLE), (0, CIRCLE), True),
    "von Mises(4)": _mixed([_round(4.0)], ("circular", CIRCLE), (0, CIRCLE), True),
    "von Mises(50)": _mixed([_round(50.0)], ("circular", CIRCLE), (0, CIRCLE), True),
    "two von Mises": _mixed(
        [(0.6, stats.vonmises(4.0, loc=0.2)), (0.4, stats.vonmises(10.0, loc=3.0))],
        ("circular", CIRCLE),
        (0, CIRCLE),
        True,
    ),
}
FREE = Law(lambda rng, n: rng.normal(size=n), stats.norm.pdf, None, (-5.0, 5.0))
PLANE = {
    "exponential × normal": _product(LINE["exponential"], FREE),
    "beta(1, 3) × exponential": _product(LINE["beta(1, 3)"], LINE["exponential"]),
    "von Mises(4) × exponential": _product(LINE["von Mises(4)"], LINE["exponential"]),
    "betas by a normal copula": _copula(0.6),
}


def mirrored(x: Array, y: Array, support: Any, rule: str) -> Array:
    """KDEpy's estimate of one column of samples with their images, at y."""
    from KDEpy import FFTKDE

    low, high = support
    if low == "circular":
        whole, ends = np.concatenate([x, x - high, x + high]), (0.0, high)
    else:
        images = [x, *([2 * low - x] if low is not None else []), *([2 * high - x] if high is not None else [])]
        whole, ends = np.concatenate(images), (-math.inf if low is None else low, math.inf if high is None else high)
    width = FFTKDE(bw=rule).fit(x if rule == "silverman" else whole).bw
    grid, values = FFTKDE(bw=width).fit(whole).evaluate(1 << 14)
    inside = (y >= ends[0]) & (y <= ends[1])
    return np.where(inside, np.interp(y, grid, values) * len(whole) / len(x), 0.0)


def errors(law: Law, n: int, seed: list[int]) -> dict[str, float]:
    """The squared error of each estimate on one draw."""
    rng = np.random.default_rng(seed)
    x = law.draw(rng, n)
    if x.ndim == 1:
        low, high = law.reach
        y = low + (high - low) * (np.arange(16_000) + 0.5) / 16_000
        size = (high - low) / len(y)
    else:
        axes = [low + (high - low) * (np.arange(160) + 0.5) / 160 for low, high in law.reach]
        y = np.stack([a.ravel() for a in np.meshgrid(*axes, indexing="ij")], axis=1)
        size = math.prod((high - low) / 160 for low, high in law.reach)
    p, ends = law.density(y), {"support": law.support}
    found = {
        "sdkde, no support": sdkde_core.estimate(x, y),
        "sdkde": sdkde_core.estimate(x, y, **ends),
        "kde": sdkde_core.estimate(x, y, method="kde", **ends),
    }
    circular = any(isinstance(one, tuple) and one[0] == "circular" for one in [law.support, *(law.support or ())])
    if n <= 2000 and not circular:
        found["stacked"] = sdkde_core.estimate(x, y, method="stacked", **ends)
    if x.ndim == 1:
        found |= {f"mirrored, {rule}": mirrored(x, y, law.support, rule) for rule in ("silverman", "ISJ")}
    return {name: float(((values - p) ** 2).sum() * size) for name, values in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--draws", type=int, default=8)
    parser.add_argument("--sizes", type=lambda text: [int(n) for n in text.split(",")], default=[200, 2000, 16_000])
    parser.add_argument("--names", type=lambda text: text.split(","), default=list(LINE | PLANE))
    given, base = parser.parse_args(), "sdkde, no support"
    for n in given.sizes:
        ratios: dict[str, dict[str, float]] = defaultdict(dict)
        for name in given.names:
            law, logs = (LINE | PLANE)[name], defaultdict(list)
            for k in range(given.draws if n <= 2000 else min(3, given.draws)):
                found = errors(law, n, [given.seed, zlib.crc32(name.encode()), n, k])
                for estimate, error in found.items():
                    logs[estimate].append(math.log(error / found[base]))
            for estimate, values in logs.items():
                ratios[estimate][name] = math.exp(np.mean(values))
            shown = ", ".join(f"{estimate} {ratios[estimate][name]:.2f}" for estimate in logs if estimate != base)
            print(f"{n} {name}: {shown}", flush=True)
        for estimate, by_law in ratios.items():
            if estimate != base:
                mean, worst = math.exp(np.mean(np.log(list(by_law.values())))), max(by_law, key=lambda law: by_law[law])
                print(
                    f"{n} {estimate}: mean {mean:.3f}, worst {by_law[worst]:.2f} ({worst}), {len(by_law)} laws",
                    flush=True,
                )


if __name__ == "__main__":
    main()
