"""Rules that choose a bandwidth from the samples, and what the argument ``bandwidth`` means."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..arrays import Array, array_namespace, columns_are_points, to_host
from ..arrays.frames import Values
from ..messages import did_you_mean, warn_once
from .distinct import look
from .isj import improved_sheather_jones
from .matrix import Bandwidth
from .normal import normal_reference
from .sample import Sample, on_gpu
from .selection import CHOOSERS, Chooser, choose


def _silverman(s: Sample) -> Array:
    """h_j = 0.9 σ₁_j n_eff^(−1/(d+4)): Silverman (1986), eq. 3.31, with the rate for d dimensions."""
    return 0.9 * s.spread() * s.n_eff ** (-1 / (s.d + 4))


def _isj(s: Sample) -> Array:
    """Improved Sheather–Jones per column, with the rate n_eff^(−1/(d+4)); Silverman's where it has no solution."""
    x, weights = to_host(s.given), None if s.weights is None else to_host(s.weights)
    powers = np.frexp(abs(x).max(axis=0))[1]  # units are powers of two in which no length overflows
    x = np.ldexp(x, -powers)
    found = [improved_sheather_jones(x[:, j], weights, s.n_eff) for j in range(s.d)]
    without = np.array([j for j, h in enumerate(found) if h is None])
    result = np.ldexp(np.array([h or 0.0 for h in found]) * s.n_eff ** (1 / 5 - 1 / (s.d + 4)), powers)
    if without.size:
        result[without] = _silverman(s)[without]
        s.note = f" (silverman in column {without[0]}{_others(without)})"
        why = "too few samples, one value too frequent, or scales too far apart; Silverman's rule is taken there"
        warn_once(f"bandwidth='isj' has no solution for column {without[0]} of train{_others(without)}: {why}")
    return result


def _chosen(rule: str, s: Sample) -> Array:
    """A multiple of the normal reference, chosen from the data: see :mod:`.selection`."""
    spreads = s.spread()
    if s.common:
        spreads = np.full(s.d, np.exp(np.log(spreads).mean()))
    s.selection = choose(s, rule, spreads)
    if s.moves[0] and s.d > 1:  # one column is judged by the step itself
        wider = 1.08 if s.d <= 3 else 1.15 if s.d <= 10 else 1.0  # benchmarks/step.py
        reason = f"{s.selection.reason}; times {wider}, for the step that keeps the samples' variance"
        s.selection = replace(s.selection, multiple=wider * s.selection.multiple, reason=reason)
    h, shape = s.selection.multiple * normal_reference(s.method, s.d, s.n_eff) * spreads, s.selection.shape
    scales = 1.0 if shape is None else np.sqrt(np.diagonal(shape))
    least = np.maximum(1.0, 0.5 * s.selection.units / (h * scales))  # half a unit of rounded columns
    h = h * (least.max() if s.common else least)
    if shape is None or (shape == np.diag(np.diagonal(shape))).all():
        return h * scales
    return shape * h[:, None] * h


Rule = Literal[Chooser, "silverman", "silverman-iso", "sdkde", "scott", "silverman-full", "normal-reference", "isj"]
BandwidthLike: TypeAlias = Rule | float | Values | Bandwidth

RULES: dict[str, Callable[[Sample], Array]] = {
    **{rule: functools.partial(_chosen, rule) for rule in CHOOSERS},
    "silverman": _silverman,
    # h = 0.9 · mean_j σ₁_j · n_eff^(−1/(d+4)): the isotropic rule behind the paper's tables
    "silverman-iso": lambda s: np.asarray(0.9 * s.spread().mean() * s.n_eff ** (-1 / (s.d + 4))),
    # h_j = 0.4 σ₁_j n_eff^(−1/(d+8)): the constant is the SD-KDE paper's for d = 1; none is published beyond
    "sdkde": lambda s: 0.4 * s.spread() * s.n_eff ** (-1 / (s.d + 8)),
    # as scipy.stats.gaussian_kde has them
    "scott": lambda s: s.covariance() * s.n_eff ** (-2 / (s.d + 4)),
    "silverman-full": lambda s: s.covariance() * (s.n_eff * (s.d + 2) / 4) ** (-2 / (s.d + 4)),
    # the best h for normal samples to leading order, of independent columns; docs/mathematics.md derives the constants
    "normal-reference": lambda s: s.spread() * normal_reference(s.method, s.d, s.n_eff),
    "isj": _isj,
}

FULL_RULES = ("scott", "silverman-full")  # a multiple of the covariance


def check_rule(rule: str, method: str, kernel: str = "gaussian") -> None:
    """Raise ValueError where there is no such rule, or not for the method or the kernel."""
    if rule not in RULES:
        known = ", ".join(map(repr, RULES))
        raise ValueError(f"bandwidth is {rule!r}; pass one of {known}, or values{did_you_mean(rule, RULES)}")
    if kernel != "gaussian":
        instead = "pass bandwidth as a number, one per dimension, or a matrix H"
        raise ValueError(f"bandwidth={rule!r} is a rule for kernel='gaussian', but kernel is {kernel!r}; {instead}")
    if rule == "lcv" and method == "laplace":
        instead = "pass 'lscv' or 'auto'"
        raise ValueError(f"bandwidth='lcv' needs a density that is positive, and laplace's is signed; {instead}")
    if rule == "isj" and method != "kde":
        instead = "pass 'normal-reference', 'silverman', or method='kde'"
        raise ValueError(f"bandwidth='isj' is made for the bias of method='kde', but method is {method!r}; {instead}")


def resolve(
    bandwidth: Any, train: Any, log_weights: Any = None, *, method: str = "sdkde", kernel: str = "gaussian",
    common: bool = False, steps: bool = True, mixed: bool = True,
) -> Bandwidth:  # fmt: skip
    """Return the bandwidth that ``bandwidth`` means for ``train``: a rule's name, or values in the data's units.

    ``train`` (n, d) is of any library, log weights (n,) are normalised, −inf for weight zero. ``common``: a rule that
    chooses from the data chooses one number for all columns. ``steps``: it may choose a step and the score's bandwidth,
    too; ``mixed``: a matrix that couples columns. Errors are those of :meth:`Bandwidth.of`, and of the rules.
    """
    n, d = int(train.shape[0]), int(train.shape[1])
    turned = columns_are_points(n, d, "train")
    if not isinstance(bandwidth, str):
        try:
            return Bandwidth.of(bandwidth, d)
        except ValueError as error:
            if turned and np.shape(bandwidth)[:1] == (n,) and n > 1:
                raise ValueError(f"{error}{turned}") from None
            raise
    check_rule(bandwidth, method, kernel)
    there = on_gpu(train) and log_weights is None
    if d == 1 and n <= 1 << 16 and bandwidth in CHOOSERS and not there:  # a copy takes less time than a device's calls
        train, log_weights = to_host(train), None if log_weights is None else to_host(log_weights)
    xp = array_namespace(train)
    train = xp.astype(train, xp.float64, copy=False)
    weights, carrying, n_eff = None, None, float(train.shape[0])
    if log_weights is not None:
        weights = xp.exp(log_weights)
        n_eff = 1.0 / float(xp.sum(weights**2))
        if bool(xp.any(weights == 0)):  # a point without weight must not widen the range of a column
            carrying = xp.nonzero(weights)[0]
            train, weights = xp.take(train, carrying, axis=0), xp.take(weights, carrying)
    sample = Sample(train, weights, n_eff, method)
    sample.steps, sample.common, sample.mixed = steps and not common and bandwidth == "auto", common, mixed
    if bandwidth in CHOOSERS:
        look(sample, bandwidth)
    low, high = sample.ends[:2]
    if not (np.isfinite(low) & np.isfinite(high)).all():
        values = to_host(train)
        i, j = (int(k) for k in np.argwhere(~np.isfinite(values))[0])
        row = i if carrying is None else int(to_host(carrying)[i])
        has = f"which has {values[i, j]} at row {row}, column {j}; drop or fill it, or pass bandwidth as a number"
        raise ValueError(f"bandwidth={bandwidth!r} is chosen from train, {has}")
    check_spread(bandwidth, int(train.shape[0]), n_eff, low, high, turned)
    return by_rule(bandwidth, sample, low, high)


def check_spread(rule: str, n: int, n_eff: float, low: Array, high: Array, turned: str = "") -> None:
    """Raise ValueError where n samples with weight, with these ends per column (d,), are not enough for a rule."""
    if n == 1 or n_eff <= 1.0 + 1e-12:
        needs = "more than one sample with weight; pass bandwidth as a number"
        raise ValueError(f"bandwidth={rule!r} needs {needs}{turned}")
    constant = np.flatnonzero(low == high)
    if constant.size:
        needs = f"columns that vary, but column {constant[0]} of train is constant{_others(constant)}"
        raise ValueError(f"bandwidth={rule!r} needs {needs}; drop it, or pass bandwidth as a number{turned}")
    if rule in FULL_RULES and n <= len(low):
        why = f"for a covariance of full rank, but there are {n} in {len(low)}; pass 'silverman' or numbers{turned}"
        raise ValueError(f"bandwidth={rule!r} needs more samples with weight than dimensions {why}")


def by_rule(rule: str, sample: Sample, low: Array, high: Array) -> Bandwidth:
    """Return the bandwidth of a rule for a sample, with these ends per column (d,)."""
    d = sample.d
    value = RULES[rule](sample)
    per_column = np.diagonal(value) if value.ndim == 2 else np.broadcast_to(value, (d,))
    beyond = np.flatnonzero(~((per_column > 0) & (per_column < np.inf)))
    if beyond.size:
        j = int(np.argmax(high - low)) if value.ndim == 0 else beyond[0]
        where = f"in column {j} of train, which goes from {low[j]:.3g} to {high[j]:.3g}: float64 does not hold it"
        instead = "rescale that column, or pass bandwidth as numbers"
        raise ValueError(f"bandwidth={rule!r} would be {per_column[j]} {where}; {instead}")
    result = Bandwidth.of(value, d, rule=rule + sample.note)
    step, score_bandwidth = sample.moves
    tails = None
    if rule == "auto" and sample.method == "sdkde" and not sample.common:
        tails = 0.02 * min(1.0, (100.0 / sample.n_eff) ** (4.0 / (d + 3.0)))  # benchmarks/notes/tails.md
    return replace(result, selection=sample.selection, step=step, score_bandwidth=score_bandwidth, tails=tails)


def _others(indices: NDArray[Any]) -> str:
    return f" (and {indices.size - 1} more: {indices[1:6].tolist()})" if indices.size > 1 else ""
