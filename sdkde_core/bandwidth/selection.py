"""Bandwidths chosen from the data, for the estimator: multiples of the normal reference, judged on left-out samples.

Two criteria judge a bandwidth by its density at samples that are left out. Least squares, ∫p̂² − 2 Σ w_i p̂₋ᵢ(x_i),
estimates the integrated squared error, less what does not depend on the bandwidth (Rudemo 1982, Bowman 1984). The
likelihood is −Σ w_i log p̂₋ᵢ(x_i). ``"lscv"`` and ``"lcv"`` take their minima, which are noisy. :mod:`.line` has these
criteria for one column, and the one that ``"auto"`` takes there.

In several columns ``"auto"`` weights each bandwidth by exp(−2 z²), z the standard score of the samples' terms in least
squares, paired with those at its minimum. (For a criterion that is a likelihood, this is about the likelihood ratio.)
Bandwidths that the data do not tell apart have large weights. The weights' quantile 0.8, the upper end, is taken: least
squares errs towards narrow bandwidths, and a debiased estimate loses more by these. The best bandwidth for normal
samples is the upper bound.

In many dimensions a few samples make up all of least squares, as densities there differ by powers of ten. Below about a
fifth of the samples, effectively, the maximum of the likelihood is taken instead, unbounded; near a fifth a mean of
both, so that the choice does not jump. A Laplace estimate is signed and has no likelihood: where only a few samples
count, it gets the upper bound.

Values of rounded columns are spread within their unit first: :mod:`.rounding`. Then for ``"auto"`` :mod:`.shapes`
chooses the bandwidth's shape, in whose units the criteria are summed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from ..arrays import Array, quiet
from .distinct import GAP, TIES, Distinct, OnCard, asked_first, bandwidths_of, failed, steps_of, thirds
from .isj import improved_sheather_jones
from .line import FOLDS, STEP, Line, Looks, vertex
from .normal import reference, widest
from .pairs import Left
from .rounding import spread_within, units_of
from .sample import MANY, SEED, Sample, most_of

Chooser = Literal["auto", "lscv", "lcv"]  # rules that choose from the data

CHOOSERS: tuple[str, ...] = get_args(Chooser)


@dataclass(frozen=True, eq=False)
class Selection:
    """A bandwidth that was chosen from the data, and why.

    Parameters
    ----------
    method, rule, reason : str
        The estimator; ``"auto"``, ``"lscv"`` or ``"lcv"``; and why.
    multiple : float
        The choice: a multiple of the normal reference.
    multiples : (k,) array
        The multiples at which the criteria were summed, ascending.
    least_squares, likelihood : (k,) array
        The criteria there less their minimum, so that smaller is better: ∫p̂² − 2 Σ w_i p̂₋ᵢ(x_i), in a unit of its own;
        −Σ w_i log p̂₋ᵢ(x_i), in nats, NaN for laplace. In one column ``"auto"`` takes a third one, between these two.
    used : int
        The number of samples that the criteria were summed over.
    shape : (d, d) array or None
        The bandwidth's shape in the columns' spreads, if one was chosen: diagonal for a scale per column.
    units : (d,) array
        The unit that each column is rounded to, data units; 0 where it is not rounded.
    """

    method: str
    rule: str
    multiple: float
    reason: str
    multiples: Array
    least_squares: Array
    likelihood: Array
    used: int
    shape: Array | None = None
    units: Array | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain lists, numbers and strings; the likelihood of laplace is None."""
        known = {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in vars(self).items()}
        return known | {"likelihood": None if np.isnan(self.likelihood).any() else known["likelihood"]}


class _Losses(NamedTuple):
    """Every sample's terms in the criteria, at k bandwidths."""

    least_squares: Array  # (k, n)
    likelihood: Array | None  # (k, n)

    def carried_by(self, weights: Array) -> float:
        """The effective number of samples that make up least squares at its minimum."""
        terms = self.least_squares[int(np.argmin(self.least_squares @ weights))]
        parts = weights * (terms.max() - terms)
        return float(parts.sum() ** 2 / (parts @ parts)) if parts.any() else 0.0


@quiet
def choose(sample: Sample, rule: str, spreads: Array) -> Selection:
    """Choose a multiple of the normal reference, and by ``"auto"`` a shape first.

    ``spreads``: the columns' shares in the bandwidth (d,), data units, where no other shape is chosen.
    """
    if sample.kernels is not None:
        try:
            return _choose(sample, rule, spreads)
        except Exception as error:  # a backend may raise anything
            failed(sample, error)
    return _choose(sample, rule, spreads)


def _choose(sample: Sample, rule: str, spreads: Array) -> Selection:
    method, d = sample.method, sample.d
    if d == 1 and sample.on_card is not None:
        return _on_a_line(sample, rule, sample.on_card, np.zeros(1), 0.0)
    looked = sample.on_card or distinct(sample, spreads)
    weights, units = looked.weights, looked.units
    n = len(weights)
    if n < 5 or (d == 1 and not np.isfinite(looked.u).all()):  # differences overflow: the caller refuses that
        empty = np.empty(0)
        asked = method, d, sample.n_eff
        multiple = widest(*asked) * math.exp(STEP * _usual(method, n)) if d == 1 and rule == "auto" else 1.0
        reason = f"{multiple:.3g} of the normal reference: {n} distinct samples are too few to choose from"
        return Selection(method, rule, multiple, reason, empty, empty, empty, n, units=units)
    if d == 1:
        assert looked.index is not None
        line = Line(looked.u[:, 0], weights, looked.index % min(FOLDS, n), method, sample.moves[1])
        return _on_a_line(sample, rule, line, units, float(units[0] / spreads[0]))
    held = bool(sample.mixed and spreads.min() > 1e-140 and spreads.max() < 1e140)  # by float64, squared
    if sample.kernels is not None and sample.on_card is None:
        looked = OnCard(sample, rule, held, looked)
    shape, why = looked.shaped(held) if rule == "auto" and not sample.common else (None, "")
    steps, few, criteria = looked.steps, asked_first(n), _Criteria(method, d, weights, looked.left_out(n, method))
    if steps is None:
        steps = steps_of(rule)
        if few < n:
            first = _Criteria(method, d, looked.shares(few), looked.left_out(few, method))
            steps = first.narrowed(rule, steps, n)
    if len(steps) >= 10:
        steps = criteria.closely(rule, steps)
    losses = criteria.at(steps)
    squares, logs = losses.least_squares, losses.likelihood
    if rule == "lscv":
        log_multiple, what = _least(squares, weights, steps), "the minimum of least squares"
    elif rule == "lcv" and logs is not None:
        log_multiple, what = _least(logs, weights, steps), "the maximum of the likelihood"
    else:
        log_multiple, what = _of_both(losses, weights, steps, criteria)
    what += f", each of {n} samples left out in turn{why}"
    means = squares @ weights, np.full(len(steps), np.nan) if logs is None else logs @ weights
    return _selected(sample, rule, log_multiple, what, steps, means, used=n, shape=shape, units=units)


def _selected(
    sample: Sample, rule: str, log_multiple: float, what: str, steps: Any, means: tuple[Array, Array], **more: Any
) -> Selection:
    """The selection of a multiple, with the criteria at ``steps``; ``more`` has other fields."""
    unit = widest(sample.method, sample.d, sample.n_eff)
    multiple = unit * math.exp(log_multiple)
    reason = f"{multiple:.3g} of the normal reference, {what}{_rounded(sample, more['units'])}"
    squares, logs = (mean - mean.min() for mean in means)
    return Selection(sample.method, rule, multiple, reason, unit * np.exp(STEP * steps), squares, logs, **more)


def _on_a_line(sample: Sample, rule: str, line: Line, units: Array, unit: float) -> Selection:
    """Choose for one column; ``unit``: what its values are rounded to, in spreads."""
    method, n, own = line.method, line.n, reference(line.method, line.n_eff)
    most = min(sample.n_eff, float(most_of(1)))  # the line's n_eff if no samples are equal
    # A device begins before it knows how many samples are equal. Its unit is kept where few are.
    looks = Looks(line, rule, reference(method, most) if line.n_eff > 0.9 * most else own)
    away = math.log(looks.unit / own) / STEP  # from steps of that unit to steps of the line's own
    best, what = looks.best + away, "the maximum of the likelihood"
    if rule == "lscv":
        what = "the minimum of least squares"
    if rule == "auto":
        best, what = looks.refined() + away, "the least expected error, from an estimate that left-out samples chose"
        # With a few hundred samples this is too wide for some densities, improved Sheather-Jones too narrow for others.
        share = min(0.5, 100.0 / line.n_eff - 0.05) if method == "sdkde" and line.n_eff >= MANY else 0.0
        if share > 0.0 and (h := improved_sheather_jones(*line.samples(), line.n_eff)) is not None:
            rate = (1 / 5 - 1 / 9) * math.log(line.n_eff / 200.0)  # from kde's rate to that of sdkde
            best += share * (max((math.log(h / own) + rate) / STEP, -31.0) - best)
            what = "between the least expected error and improved Sheather-Jones"
        # Few samples say little: without evidence h is the usual one, and it is never far below that.
        usual, few = _usual(method, line.n_eff), (126.0 / line.n_eff) ** 3
        share = looks.errors**2 / (looks.errors**2 + few)
        best = min(0.0, max(usual + share * (best - usual), usual - line.n_eff**2 / 1500.0))
        if share < 0.5:
            what = "near what is usual, as the samples say little"
    steps, found = zip(*sorted(looks.known.items()))
    squares = np.array([line.held @ left.least_squares for left in found])
    logs = np.array([line.held @ left.likelihood for left in found])
    what += f", an eighth of {n} samples left out in turn"
    h = max(0.5 * unit, reference(method, sample.n_eff) * math.exp(STEP * best))
    std = sample.unit[0] * sample.measured[0][0] if unit > 0.25 * h and sample.moves[1] else 0.0
    if units[0] < 0.5 * std:  # coarser values are taken for counts
        step = line.moments(h, unit)
        sample.moves, what = (step, sample.moves[1]), f"{what}; the step is {step:.3g}, for what was rounded"
    return _selected(sample, rule, STEP * best, what, np.array(steps) + away, (squares, logs), used=n, units=units)


def _usual(method: str, n_eff: float) -> float:
    """The step, in one column, where samples tell nothing: so few that an estimate had better be like Silverman's."""
    return (-1.8 if method == "kde" else -2.3 - 2.0 / n_eff) * min(1.0, 60.0 / n_eff)


def _rounded(sample: Sample, units: Array) -> str:
    """The part of a reason that is about rounded columns."""
    columns = np.flatnonzero(units)
    if not columns.size:
        return ""
    j = columns[0]
    places = float(sample.given[0, int(j)]) / units[j]
    what = "are" if abs(places - round(places)) < 2e-3 else "differ by"
    more = f" (rounded as well: {columns.size - 1} more columns)" if columns.size > 1 else ""
    where = f" of column {j}" * (sample.d > 1)
    return f"; values{where} {what} multiples of {units[j]:.4g}{more}, and h is at least half of that"


def distinct(sample: Sample, spreads: Array) -> Distinct:
    """Distinct samples in spreads, their weights, an order in which they may be cut short, and the columns' units.

    A GPU does the same for samples that need no joining, spreading or shortening: :class:`.OnCard`.

    Values of rounded columns are spread within their unit, as a bandwidth is chosen for the values before rounding.
    Samples that are still equal are joined, with their summed weight: else a left-out one would find its copy.
    """
    rng = np.random.default_rng(SEED)
    x, counts = sample.thinned(most_of(sample.d), rng)
    ordered, line = np.sort(x.T, axis=1).T, sample.d == 1  # contiguous rows sort in a third of the time
    x = ordered if line and counts is None else x  # sorted values sort again in a tenth of the time
    scale, units = spreads / sample.unit, units_of(ordered)
    units[units > 100.0 * scale] = 0.0  # the gap to a far sample is no unit
    if units.any():
        x = spread_within(x, units, counts)
        ordered = np.sort(x.T, axis=1).T
    places = [0, (len(x) - 1) // 2, len(x) // 2, -1]
    u, (low, *middle, high) = (np.clip(some / scale, -1e150, 1e150) for some in (x, ordered[places]))  # no overflow
    u = _without_gaps(u - 0.5 * (middle[0] + middle[1]), high - low)
    first = np.argsort(u[:, 0], kind="stable")
    equal = (np.diff(u[first, 0]) == 0.0).any()  # rare, and only then the other columns decide
    first = np.lexsort(u.T[::-1]) if equal else first
    u, together = u[first], np.ones(len(u)) if counts is None else counts[first]
    if equal:
        starts = np.flatnonzero((np.diff(u, axis=0, prepend=-math.inf) != 0.0).any(axis=1))  # NaN are kept
        u, together = u[starts], np.add.reduceat(together, starts)
    together = together / together.sum()
    if counts is not None:
        heard = together > 1e-16  # less adds nothing to sums of float32
        u, together = u[heard], together[heard]
    index = rng.permutation(len(x))
    index = index[index < len(u)]
    if line:
        return Distinct(u, together, units * sample.unit, index)
    _spread_ties(u, together, np.flatnonzero((ordered[1:] == ordered[:-1]).sum(axis=0) > TIES * len(x)), rng)
    return Distinct(u[index], together[index], units * sample.unit)


def _spread_ties(u: Array, weights: Array, columns: NDArray[np.intp], rng: np.random.Generator) -> None:
    """Spread a value that several samples share, in a column, as widely as so many normal samples lie at their mode.

    Otherwise a column of categories, counts or zeros would have the criteria ask for the narrowest bandwidth in all.
    """
    for j in columns:
        _, inverse, counts = np.unique(u[:, j], return_inverse=True, return_counts=True)
        if (counts > 1).any():  # not only in samples that are equal, and count as one
            share = np.where(counts > 1, np.bincount(inverse, weights=weights), 0.0)[inverse]
            u[:, j] += math.sqrt(2 * math.pi) * share * (rng.random(len(u)) - 0.5)


def _without_gaps(u: Array, ranges: Array) -> Array:
    """Shorten stretches of each column without samples to :data:`GAP` spreads, for the digits of float32."""
    for j in np.flatnonzero(ranges > GAP):
        order = np.argsort(u[:, j], kind="stable")
        steps = np.diff(u[order, j], prepend=u[order[0], j])
        u[order, j] = np.cumsum(np.minimum(steps, GAP))
        u[:, j] -= np.median(u[:, j])
    return u


class _Criteria:
    """The criteria of samples with these weights; the terms at every step so far are kept."""

    def __init__(self, method: str, d: int, weights: Array, ask: Callable[[list[float]], list[Left]]) -> None:
        self.method, self.weights, self.ask = method, weights, ask
        self.share, self.d = float(weights @ weights), d  # of one sample, effectively
        self.known: dict[int, Left] = {}

    def narrowed(self, rule: str, steps: NDArray[np.intp], n: int) -> NDArray[np.intp]:
        """The steps that may be plausible for n samples, by a search among every third step."""
        some, _, plausible = self._wide(rule, steps, max(1.0, n / len(self.weights)))
        if not len(plausible):
            return steps
        first, last = plausible[[0, -1]]
        return steps[(steps >= some[first] - 3) & (steps <= some[last] + 3)]

    def closely(self, rule: str, steps: NDArray[np.intp]) -> NDArray[np.intp]:
        """The plausible steps and their neighbours: from every third, until no new step is plausible."""
        looked, losses, _ = self._wide(rule, steps)
        low, high = steps[-1], steps[0]
        while True:
            carried = losses.carried_by(self.weights) * self.share
            enough = rule == "auto" and carried >= 0.25  # then "auto" will not need the likelihood
            plausible = self._plausible("lscv" if enough else rule, losses)
            if not len(plausible):  # the criteria overflowed: the error message is made from all steps
                return steps
            first, last = plausible[[0, -1]]
            low = min(low, looked[max(first - 1, 0)])
            high = max(high, looked[min(last + 1, len(looked) - 1)])
            about = steps[(steps >= low) & (steps <= high)]
            if np.isin(about, looked).all():
                return about
            losses = self.at(looked := np.array(sorted({*looked.tolist(), *about.tolist()})))

    def _wide(self, rule: str, steps: NDArray[np.intp], more: float = 1.0) -> tuple[Any, _Losses, NDArray[np.intp]]:
        """Every third step from the widest, until no narrower one is plausible; their terms; the plausible indices."""
        some = thirds(steps)
        for k in range(6, len(some) + 3, 3):
            losses = self.at(some[-k:])
            plausible = self._plausible(rule, losses, more)
            if not len(plausible) or plausible[0] >= 3:
                break
        return some[-k:], losses, plausible

    def _plausible(self, rule: str, losses: _Losses, more: float = 1.0) -> NDArray[np.intp]:
        """Indices of the plausible steps by a criterion of the rule, for ``more`` times as many samples."""
        asked = {"lscv": (losses.least_squares,), "lcv": (losses.likelihood,)}.get(rule, losses)
        scores = [more * _plausible(loss, self.weights) for loss in asked if loss is not None]
        return np.flatnonzero(np.max(scores, axis=0) > -6.0)

    def at(self, steps: NDArray[np.intp]) -> _Losses:
        """Return every sample's terms in the criteria at these steps."""
        if new := [step for step in steps.tolist() if step not in self.known]:
            bandwidths = bandwidths_of(np.array(new), self.method, self.d, self.weights)
            self.known.update(zip(new, self.ask(bandwidths)))
        left = [self.known[step] for step in steps.tolist()]
        logs = np.stack([one.log_density for one in left])
        squares = np.array([one.log_square for one in left])
        signs = np.stack([one.sign for one in left]) if self.method == "laplace" else 1.0

        # In many dimensions narrow bandwidths have terms so large that in their unit those of others underflow.
        units = np.maximum(np.max(logs, axis=1), squares)
        near = np.exp((logs - units[:, None]).astype(np.float32))  # float32 takes a fifth of the time
        least_squares = np.exp(squares - units)[:, None] - 2.0 * signs * near.astype(np.float64)
        worthwhile = least_squares @ self.weights < 0
        largest = float(np.max(units[worthwhile]) if worthwhile.any() else np.min(units))
        least_squares *= np.exp(np.minimum(units - largest, 300))[:, None]
        likelihood = None if self.method == "laplace" else -np.maximum(logs, largest - 1e4)
        return _Losses(least_squares, likelihood)


def _plausible(loss: Array, weights: Array) -> Array:
    """The log weight of each bandwidth (k,): −2 z², z the standard score of its losses less those of the best."""
    means = loss @ weights
    differences = loss - loss[int(np.argmin(means))]
    ends = differences.max(axis=1), -differences.min(axis=1)
    differences /= np.maximum(np.maximum(*ends), 1e-300)[:, None]  # for their squares
    mean = differences @ weights
    differences -= mean[:, None]
    variance = np.maximum(np.square(differences, out=differences) @ weights, 0.0)
    n_eff = 1.0 / float(weights @ weights)
    return np.where(mean == 0, 0.0, -2.0 * n_eff * mean**2 / variance)  # minus infinity where all lose the same


def _of_both(losses: _Losses, weights: Array, steps: NDArray[np.intp], criteria: _Criteria) -> tuple[float, str]:
    """The log multiple that ``"auto"`` takes, and why; ``criteria`` evaluates wider bandwidths too."""
    squares, logs, carried = losses.least_squares, losses.likelihood, losses.carried_by(weights)
    shares = np.exp(_plausible(squares, weights))
    upper = min(0.0, float(np.interp(0.8, np.cumsum(shares) / shares.sum(), STEP * (steps + 0.5))))
    if logs is None:
        if carried < min(10, 0.5 / criteria.share):
            return 0.0, "as a few samples make up all of least squares"
        return upper, "the upper end of what least squares allows"
    # The likelihood takes over where less than a quarter to 0.15 of the samples make up least squares, effectively.
    share = float(np.clip((carried * criteria.share - 0.15) / (0.25 - 0.15), 0.0, 1.0))
    if share == 1.0:
        return upper, "the upper end of what least squares allows"
    if steps[-1] == 0 and np.argmin(logs @ weights) == len(steps) - 1:  # or it is found already
        beyond = np.arange(1, 6)
        logs, steps = np.concatenate([logs, criteria.at(beyond).likelihood]), np.concatenate([steps, beyond])
    most = _least(logs, weights, steps)
    if share == 0.0:
        return most, "the maximum of the likelihood, as few samples make up least squares"
    return share * upper + (1.0 - share) * most, "between least squares and the likelihood"


def _least(loss: Array, weights: Array, steps: NDArray[np.intp]) -> float:
    """The log multiple at the least of a criterion, by a parabola through its neighbours."""
    means = loss @ weights
    best = int(np.argmin(means))
    inside = 0 < best < len(means) - 1
    return STEP * (vertex(int(steps[best]), *means[best - 1 : best + 2]) if inside else float(steps[best]))
