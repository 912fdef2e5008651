"""Densities with a sampler, the exact density, and its closed-form convolution with a normal where there is one.

Names of one dimension are those of Marron and Wand, "Exact mean integrated squared error" (1992), Table 1.
``REPORT`` are the densities that figures are reported on, ``DEVELOP`` those that rules and selectors may be tuned on.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["DENSITIES", "DEVELOP", "ELEVEN", "FRESH", "REPORT", "Density", "Function", "Mixture", "Product", "named"]

Array = NDArray[Any]


@dataclass(frozen=True)
class Density:
    """A density in ``d`` dimensions.

    ``smoothed(y, matrix)`` is its convolution with N(0, matrix) at y, or NotImplemented where no closed form is known.
    """

    name: str
    d: int

    def sample(self, rng: np.random.Generator, n: int) -> Array:
        """n samples, (n, d)."""
        raise NotImplementedError

    def pdf(self, y: Array) -> Array:
        """The density at y (m, d), (m,)."""
        raise NotImplementedError

    def smoothed(self, y: Array, matrix: Array) -> Any:
        return NotImplemented

    def square(self) -> float:
        """∫p²."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class Mixture(Density):
    """A mixture of normals: shares (k,), means (k, d), covariances (k, d, d)."""

    shares: Array = field(repr=False)
    means: Array = field(repr=False)
    covariances: Array = field(repr=False)

    def sample(self, rng: np.random.Generator, n: int) -> Array:
        of = rng.choice(len(self.shares), n, p=self.shares)
        factors = np.linalg.cholesky(self.covariances)
        return self.means[of] + np.einsum("nij,nj->ni", factors[of], rng.normal(size=(n, self.d)))

    def pdf(self, y: Array) -> Array:
        return _normals(y, self.shares, self.means, self.covariances)

    def smoothed(self, y: Array, matrix: Array) -> Array:
        return _normals(y, self.shares, self.means, self.covariances + matrix)

    def square(self) -> float:
        pairs = zip(self.shares, self.means, self.covariances)
        return float(sum(share * (self.shares @ self._overlap(mean, cov)) for share, mean, cov in pairs))

    def _overlap(self, mean: Array, covariance: Array) -> Array:
        one = np.ones(1)
        return np.array(
            [_normals(mean[None], one, m[None], c[None] + covariance)[0] for m, c in zip(self.means, self.covariances)]
        )


def _normals(y: Array, shares: Array, means: Array, covariances: Array) -> Array:
    total = np.zeros(len(y))
    for share, mean, covariance in zip(shares, means, covariances):
        factor = np.linalg.cholesky(covariance)
        u = (y - mean) / factor[0, 0] if len(mean) == 1 else np.linalg.solve(factor, (y - mean).T).T
        scale = share / (math.sqrt(2 * math.pi) ** len(mean) * np.prod(np.diagonal(factor)))
        total += scale * np.exp(-0.5 * np.einsum("ij,ij->i", u, u))
    return total


@dataclass(frozen=True, eq=False)
class Product(Density):
    """Student's t with three degrees of freedom in every dimension, independently.

    t₃ is a mixture of N(0, 3/g), g of the chi-squared distribution with three degrees of freedom; the trapezoid rule in
    log g has converged to 1e-8 with these nodes.
    """

    def sample(self, rng: np.random.Generator, n: int) -> Array:
        return rng.standard_t(3, size=(n, self.d))

    def pdf(self, y: Array) -> Array:
        return (2 / (math.pi * math.sqrt(3)) / (1 + y**2 / 3) ** 2).prod(1)

    def smoothed(self, y: Array, matrix: Array) -> Any:
        if np.count_nonzero(matrix - np.diag(np.diagonal(matrix))):
            return NotImplemented
        logs = np.linspace(-14.0, 4.5, 38)
        shares = np.exp(1.5 * logs - np.exp(logs) / 2)
        result = np.ones(len(y))
        for column, added in zip(y.T, np.diagonal(matrix)):
            variances = 3 * np.exp(-logs) + added
            heights = shares / shares.sum() / np.sqrt(2 * math.pi * variances)
            one = np.zeros(len(y))
            for height, variance in zip(heights, variances):
                one += height * np.exp(-0.5 / variance * column**2)
            result *= one
        return result

    def square(self) -> float:
        return (5 / (4 * math.pi * math.sqrt(3))) ** self.d


@dataclass(frozen=True, eq=False)
class Function(Density):
    """A density given by two functions; integrals of it are taken on a grid."""

    draw: Callable[[np.random.Generator, int], Array] = field(repr=False)
    value: Callable[[Array], Array] = field(repr=False)

    def sample(self, rng: np.random.Generator, n: int) -> Array:
        return self.draw(rng, n)

    def pdf(self, y: Array) -> Array:
        return self.value(y)


def _line(name: str, *components: tuple[float, float, float]) -> Mixture:
    """A mixture in one dimension of components (share, mean, standard deviation)."""
    shares, means, stds = (np.array(column, dtype=float) for column in zip(*components))
    return Mixture(name, 1, shares / shares.sum(), means[:, None], (stds**2)[:, None, None])


def _beside_normals(density: Mixture, d: int) -> Mixture:
    """The first dimension as ``density``, independent standard normals in the others."""
    k = len(density.shares)
    means, covariances = np.zeros((k, d)), np.tile(np.eye(d), (k, 1, 1))
    means[:, :1], covariances[:, :1, :1] = density.means, density.covariances
    return Mixture(f"{density.name}-{d}", d, density.shares, means, covariances)


def _clusters(name: str, d: int, k: int, std: float, seed: int) -> Mixture:
    """k equal normals with means 2·N(0, I)."""
    means = 2.0 * np.random.default_rng([seed, d]).normal(size=(k, d))
    return Mixture(name, d, np.full(k, 1 / k), means, np.tile(std**2 * np.eye(d), (k, 1, 1)))


def _random(name: str, d: int, seed: int) -> Mixture:
    """Two to seven normals with random shares, means, scales and correlations."""
    rng = np.random.default_rng([seed, d])
    k = int(rng.integers(2, 8))
    shapes = rng.normal(size=(k, d, d)) / math.sqrt(d) + np.eye(d)
    covariances = np.exp(rng.normal(-0.5, 0.8, k))[:, None, None] * (
        shapes @ shapes.transpose(0, 2, 1) + 0.05 * np.eye(d)
    )
    return Mixture(name, d, rng.dirichlet(np.full(k, 2.0)), 2.0 * rng.normal(size=(k, d)), covariances)


def _correlated(d: int) -> Mixture:
    """One normal, the correlation of columns i and j 0.9^|i − j|."""
    covariance = 0.9 ** np.abs(np.subtract.outer(np.arange(d), np.arange(d)))
    return Mixture(f"correlated-{d}", d, np.ones(1), np.zeros((1, d)), covariance[None])


def _ring(radius: float = 3.0, width: float = 0.3) -> Function:
    def draw(rng: np.random.Generator, n: int) -> Array:
        r, angle = rng.normal(radius, width, n), rng.uniform(0, 2 * math.pi, n)
        return np.stack([r * np.cos(angle), r * np.sin(angle)], axis=1)

    def value(y: Array) -> Array:
        r = np.maximum(np.hypot(*y.T), 1e-300)
        bell = np.exp(-0.5 * ((r - radius) / width) ** 2) / (width * math.sqrt(2 * math.pi))
        return bell / (2 * math.pi * r)

    return Function("ring-2", 2, draw, value)


def _banana(bend: float = 0.7, width: float = 0.5) -> Function:
    def draw(rng: np.random.Generator, n: int) -> Array:
        x = rng.normal(size=n)
        return np.stack([x, bend * x**2 + width * rng.normal(size=n)], axis=1)

    def value(y: Array) -> Array:
        across = (y[:, 1] - bend * y[:, 0] ** 2) / width
        return np.exp(-0.5 * (y[:, 0] ** 2 + across**2)) / (2 * math.pi * width)

    return Function("banana-2", 2, draw, value)


def _gamma() -> Function:
    def value(y: Array) -> Array:
        return np.where(y > 0, y * np.exp(-np.abs(y)), 0.0)[:, 0]

    return Function("gamma", 1, lambda rng, n: rng.gamma(2.0, size=(n, 1)), value)


def _uniform() -> Function:
    def value(y: Array) -> Array:
        return ((y >= 0) & (y <= 1))[:, 0].astype(float)

    return Function("uniform", 1, lambda rng, n: rng.uniform(size=(n, 1)), value)


def _curve(name: str, draw: str, arguments: tuple[float, ...], value: Callable[[Array], Array]) -> Function:
    """A density on a line: a method of NumPy's generator and its arguments, and the value."""
    return Function(
        name,
        1,
        lambda rng, n: getattr(rng, draw)(*arguments, size=(n, 1)),
        lambda y: np.nan_to_num(value(y[:, 0])),
    )


def _positive(y: Array, value: Array) -> Array:
    return np.where(y > 0, value, 0.0)


_SEPARATED = _line("separated", (0.5, -1.5, 0.5), (0.5, 1.5, 0.5))

ELEVEN: tuple[Density, ...] = (
    _line("normal", (1, 0, 1)),
    _line("skewed", (1 / 5, 0, 1), (1 / 5, 1 / 2, 2 / 3), (3 / 5, 13 / 12, 5 / 9)),
    _line("strongly skewed", *((1 / 8, 3 * ((2 / 3) ** k - 1), (2 / 3) ** k) for k in range(8))),
    _line("kurtotic", (2 / 3, 0, 1), (1 / 3, 0, 1 / 10)),
    _line("outlier", (1 / 10, 0, 1), (9 / 10, 0, 1 / 10)),
    _line("bimodal", (1 / 2, -1, 2 / 3), (1 / 2, 1, 2 / 3)),
    _SEPARATED,
    _line("asymmetric", (3 / 4, 0, 1), (1 / 4, 3 / 2, 1 / 3)),
    _line("trimodal", (9 / 20, -6 / 5, 3 / 5), (9 / 20, 6 / 5, 3 / 5), (1 / 10, 0, 1 / 4)),
    _line("claw", (1 / 2, 0, 1), *((1 / 10, k / 2 - 1, 1 / 10) for k in range(5))),
    Product("t3", 1),
)

#: Marron and Wand's eleventh to fifteenth.
_COMBS: tuple[Density, ...] = (
    _line("double claw", (0.49, -1, 2 / 3), (0.49, 1, 2 / 3), *((1 / 350, (k - 3) / 2, 1 / 100) for k in range(7))),
    _line("asymmetric claw", (1 / 2, 0, 1), *((2 ** (1 - k) / 31, k + 1 / 2, 2**-k / 10) for k in range(-2, 3))),
    _line(
        "asymmetric double claw",
        *((46 / 100, 2 * k - 1, 2 / 3) for k in range(2)),
        *((1 / 300, -k / 2, 1 / 100) for k in range(1, 4)),
        *((7 / 300, k / 2, 7 / 100) for k in range(1, 4)),
    ),
    _line("smooth comb", *((2 ** (5 - k) / 63, (65 - 96 * 0.5**k) / 21, 32 / 63 / 2**k) for k in range(6))),
    _line(
        "discrete comb",
        *((2 / 7, (12 * k - 15) / 7, 2 / 7) for k in range(3)),
        *((1 / 21, 2 * k / 7, 1 / 21) for k in range(8, 11)),
    ),
)

REPORT: tuple[Density, ...] = (
    *ELEVEN,
    *(
        density
        for d in (2, 5)
        for density in (
            _beside_normals(ELEVEN[0], d),  # type: ignore[arg-type]
            _beside_normals(_SEPARATED, d),
            _clusters(f"mixture-{d}", d, k=6, std=0.7, seed=0),
            Product(f"t3-{d}", d),
        )
    ),
    _clusters("mixture-16", 16, k=6, std=0.7, seed=0),
    _clusters("wide mixture-16", 16, k=8, std=1.0, seed=1),
)

DEVELOP: tuple[Density, ...] = (
    _gamma(),
    _uniform(),
    *_COMBS,
    *(_random(f"random {seed}-{d}", d, seed) for d in (1, 2, 5, 16) for seed in (1, 2, 3)),
    _ring(),
    _banana(),
    _curve("exponential", "exponential", (), lambda y: _positive(y, np.exp(-np.abs(y)))),
    _curve("laplace", "laplace", (), lambda y: np.exp(-np.abs(y)) / 2),
    _curve("logistic", "logistic", (), lambda y: 0.25 / np.cosh(np.clip(y / 2, -300, 300)) ** 2),
    _curve("gumbel", "gumbel", (), lambda y: np.exp(-y - np.exp(np.clip(-y, None, 300)))),
    _curve("beta", "beta", (2.0, 5.0), lambda y: 30 * np.clip(y, 0, 1) * np.clip(1 - y, 0, 1) ** 4),
    _curve(
        "lognormal",
        "lognormal",
        (0.0, 0.5),
        lambda y: _positive(
            y, np.exp(-2 * np.log(np.maximum(y, 1e-9)) ** 2) / (0.5 * np.maximum(y, 1e-9) * math.sqrt(2 * math.pi))
        ),
    ),
    _curve("triangular", "triangular", (0.0, 0.5, 1.0), lambda y: np.clip(2 - 4 * np.abs(y - 0.5), 0, None)),
    _correlated(5),
    _correlated(16),
    _beside_normals(ELEVEN[0], 16),  # type: ignore[arg-type]
    Product("t3-16", 16),
)

#: What the choice in one dimension is reported on beside the eleven.
FRESH: tuple[Density, ...] = (
    *(_random(f"random {seed}-1", 1, seed) for seed in (11, 12, 13, 14, 15)),
    _curve("rayleigh", "rayleigh", (), lambda y: np.clip(y, 0, None) * np.exp(-(y**2) / 2)),
    _curve("symmetric beta", "beta", (3.0, 3.0), lambda y: 30 * (np.clip(y, 0, 1) * np.clip(1 - y, 0, 1)) ** 2),
    _curve("weibull", "weibull", (3.0,), lambda y: 3 * y**2 * _positive(y, np.exp(-(np.clip(y, 0, 9) ** 3)))),
    _curve("gamma 4", "gamma", (4.0,), lambda y: np.clip(y, 0, None) ** 3 * np.exp(-np.abs(y)) / 6),
    _curve("sawtooth", "power", (2.0,), lambda y: np.where((y >= 0) & (y <= 1), 2 * y, 0.0)),
)

DENSITIES: tuple[Density, ...] = REPORT + DEVELOP + FRESH


def named(name: str) -> Density:
    """Return the density of that name."""
    return next(density for density in DENSITIES if density.name == name)
