"""Problems with their data: what is estimated from what, at which bandwidth. Shared with the tests."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Data", "Oracle", "data", "oracle_1d", "oracle_16d", "placed", "pool"]

Array = NDArray[Any]


class Data(NamedTuple):
    """Samples x (n, d), queries y (m, d) and the bandwidth h, one number. NumPy's arrays, or tensors on a device."""

    x: Any
    y: Any
    h: float


def data(kind: str, n: int, m: int, d: int, seed: int = 0, dtype: str = "float32") -> Data:
    """Draw a problem.

    Parameters
    ----------
    kind : str
        ========== ============================================================================================
        ``eight``  eight equal normals, means 2·N(0, I), standard deviation 1
        ``two``    the paper's mixture for times, ½ N(−1.5, 0.25 I) + ½ N(1.5, I)
        ``grid``   ``eight``, with queries on a grid over the bounding box of the samples, about m
        ``t3``     ``eight``, one point in a hundred thrown by Student's t with three degrees of freedom
        ``far``    ``eight``, ten samples moved by 10⁴ bandwidths
        ``normal`` one normal
        ``three``  a normal in three dimensions, lying in d, and 0.01 of one in all of them
        ``heavy``  Student's t with two degrees of freedom
        ``unlike`` ``eight`` with standard deviations from 1/32 to 1
        ``coarse`` ``eight``, rounded to quarters
        ``often``  ``eight``, each point ten times
        ========== ============================================================================================
    dtype : str
        The numbers are those of float32 whatever it is, so both have the same truth.

    Returns
    -------
    Data
        h = 0.9 · mean standard deviation · n^(−1/(d + 4)), that of ``eight`` for ``t3`` and ``far``.
    """
    rng = np.random.default_rng([seed, n, m, d])
    if kind == "two":
        x, y = (_two(rng, k, d) for k in (n, m))
    elif kind in SHAPES:
        x, y = (z for z in SHAPES[kind](rng, d, (n, m)))
    else:
        means = 2.0 * rng.normal(size=(8, d))
        x, y = (means[rng.integers(0, 8, k)] + rng.normal(size=(k, d)) for k in (n, m))
    h = float(0.9 * x.std(axis=0).mean() * n ** (-1 / (d + 4)))
    if kind == "t3":
        for z in (x, y):
            thrown = rng.choice(len(z), len(z) // 100, replace=False)
            z[thrown] += rng.standard_t(3, (len(thrown), d)) * x.std(axis=0)
    elif kind == "grid":
        axes = [np.linspace(*ends, max(1, round(m ** (1 / d)))) for ends in zip(x.min(axis=0), x.max(axis=0))]
        y = np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1).reshape(-1, d)
    elif kind == "far":
        x[: min(10, n // 2)] += 1e4 * h
    elif kind not in ("eight", "two", *SHAPES):
        raise ValueError(f"kind is {kind!r}; pass eight, two, grid, t3, far, {', '.join(SHAPES)}")
    return Data(*(np.ascontiguousarray(z, np.float32).astype(dtype, copy=False) for z in (x, y)), h)


def _two(rng: np.random.Generator, n: int, d: int) -> Array:
    wide = rng.random((n, 1)) < 0.5
    return np.where(wide, 1.5, -1.5) + np.where(wide, 1.0, 0.5) * rng.normal(size=(n, d))


def _three(rng: np.random.Generator, d: int, counts: tuple[int, ...]) -> list[Array]:
    plane = np.linalg.qr(rng.normal(size=(d, d)))[0][: min(3, d)]
    return [rng.normal(size=(k, len(plane))) @ plane + 0.01 * rng.normal(size=(k, d)) for k in counts]


def _heavy(rng: np.random.Generator, d: int, counts: tuple[int, ...]) -> list[Array]:
    return [rng.normal(size=(k, d)) / np.sqrt(0.5 * rng.chisquare(2, (k, 1))) for k in counts]


def _mixture(rng: np.random.Generator, d: int, counts: tuple[int, ...], least: float = 1.0) -> list[Array]:
    means, stds, found = 2.0 * rng.normal(size=(8, d)), np.exp(np.log(least) * rng.random((8, 1))), []
    for k in counts:
        which = rng.integers(0, 8, k)
        found.append(means[which] + stds[which] * rng.normal(size=(k, d)))
    return found


def _often(rng: np.random.Generator, d: int, counts: tuple[int, ...], times: int = 10) -> list[Array]:
    drawn = _mixture(rng, d, tuple(-(-k // times) for k in counts))
    return [rng.permutation(np.repeat(x, times, axis=0)[:k]) for x, k in zip(drawn, counts)]


#: How kinds are drawn for which few pairs matter, from a generator, d and the numbers of points.
SHAPES: dict[str, Callable[[np.random.Generator, int, tuple[int, ...]], list[Array]]] = {
    "normal": lambda rng, d, counts: [rng.normal(size=(k, d)) for k in counts],
    "three": _three,
    "heavy": _heavy,
    "unlike": functools.partial(_mixture, least=1 / 32),
    "coarse": lambda rng, d, counts: [np.round(4 * x) / 4 for x in _mixture(rng, d, counts)],
    "often": _often,
}


def placed(array: Array, device: str) -> Any:
    """The array on a device: itself on the CPU, else a tensor."""
    if device == "cpu":
        return array
    import torch

    return torch.as_tensor(array, device=device)


@functools.lru_cache(maxsize=6)
def pool(kind: str, n: int, m: int, d: int, dtype: str, device: str, count: int) -> tuple[Data, ...]:
    """Several draws of a problem on a device: a call gets others than the call before. The last are kept."""
    drawn = (data(kind, n, m, d, seed, dtype) for seed in range(count))
    return tuple(Data(placed(x, device), placed(y, device), h) for x, y, h in drawn)


# --- densities that are known ---------------------------------------------------------------------------------------


class Oracle(NamedTuple):
    """Samples, and points with the true density there and a weight for sums over them."""

    x: Array  # (n, d)
    y: Array  # (m, d)
    truth: Array  # (m,)
    weights: Array  # (m,)


def oracle_1d(n: int, repeats: int = 3, largest: int = 4096) -> list[Oracle]:
    """The paper's mixture of three normals, and 2048 points of [−6, 6].

    Repeats come from one generator. Up to ``largest``, n are the first of so many; more are drawn anew.
    """
    shares, means, stds = np.array([0.3, 0.4, 0.3]), np.array([-2.0, 0.0, 2.0]), np.array([0.4, 0.7, 0.3])
    grid, rng, found = np.linspace(-6, 6, 2048), np.random.default_rng(0), []
    z = (grid[:, None] - means) / stds
    truth = (shares / (stds * np.sqrt(2 * np.pi)) * np.exp(-0.5 * z * z)).sum(1)
    weights = np.gradient(grid)
    weights[[0, -1]] /= 2  # the trapezoid rule
    for _ in range(repeats):
        component = rng.choice(3, size=max(n, largest), p=shares)
        x = rng.normal(means[component], stds[component])[:n]
        found.append(Oracle(x[:, None], grid[:, None], truth, weights))
    return found


@functools.lru_cache(maxsize=3)
def oracle_16d(n: int, seed: int, m: int = 10_000, d: int = 16) -> Oracle:
    """The paper's mixture of eight normals, standardised by the samples, the density with them; m queries from it."""
    means = np.random.default_rng(seed).normal(size=(8, d)) * 2
    x, y = (_eight(np.random.default_rng(seed + k), count, means) for k, count in ((0, n), (1, m)))
    centre, scale = x.mean(0), x.std(0, ddof=1)
    x, y, means = (x - centre) / scale, (y - centre) / scale, (means - centre) / scale
    exponents = -0.5 * np.stack([((y - mean) ** 2 * scale**2).sum(1) for mean in means])
    truth = np.exp(exponents).mean(0) * np.prod(scale / np.sqrt(2 * np.pi))
    return Oracle(x, y, truth, 1 / (m * truth))


def _eight(rng: np.random.Generator, n: int, means: Array) -> Array:
    component = rng.choice(8, size=n, p=np.full(8, 1 / 8))
    return means[component] + rng.normal(size=(n, means.shape[1]))
