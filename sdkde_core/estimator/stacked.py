"""A density that is a weighted list of fitted ones, Σ_e π_e p̂_e, and all that a density answers, of the list.

Parts have bandwidths and centres of their own; each is a :class:`.fitted.Fitted`. Logs are joined by log-sum-exp,
scores by the softmax of the parts' logs.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from array_api_compat import device, is_torch_array

from ..arrays import Argument, Array, Data, Origin, array_namespace, convert, ingest, quiet, rounded, to_host
from ..bandwidth.matrix import Bandwidth
from ..bandwidth.mixtures import Chosen, Normals, choose, fit, smoothed, smoothed_logs, stack
from ..bandwidth.rounding import spread_within, units_of
from ..bandwidth.selection import SEED
from ..coordinates import Coordinates, candidates, listed, without_ends
from ..coordinates import fit as fit_maps
from ..engine.forks import cached_property
from ..engine.groups import Group
from ..engine.merge import concatenate, each, put, take_rows
from ..engine.outliers import radii
from ..protocol import Columns, Partial, Reduction
from .batches import ROWS
from .fitted import Fitted, loaded
from .joint import Joint, Together
from .mapped import Composed, Mapped, mapped, of_both, of_part
from .mixture import draws
from .plan import plan
from .request import Goal, Request


class Part(NamedTuple):
    """One density of the list; ``left_out``: the mean log density of left-out samples under what it is a part of."""

    label: str  # what it is a part of, for people
    log_share: float
    fitted: Any  # Fitted, or Mapped
    left_out: float | None = None


class Stacked(Composed):
    """Parts whose shares sum to 1, of n samples."""

    def __init__(self, request: Request, parts: Iterable[Part], n: int) -> None:
        self.parts = tuple(parts)
        super().__init__(self.parts[0].fitted, request, n)

    def __reduce__(self) -> Any:
        return Stacked, (self.request, self.parts, self.problem.n)  # not what a GPU has

    def each(self, changed: Sequence[Fitted], log_terms: Any = 0.0) -> Stacked:
        """The list of changed parts; ``log_terms``: added to the logs of their shares, which then sum to 1."""
        logs = np.array([part.log_share for part in self.parts]) + log_terms
        logs -= np.logaddexp.reduce(logs)
        parts = (part._replace(log_share=float(log), fitted=f) for part, log, f in zip(self.parts, logs, changed))
        return Stacked(self.request, [part for part in parts if part.log_share > -math.inf], self.problem.n)

    @quiet
    def answer(self, query: Argument, what: str) -> Any:
        if not query.shape[0]:
            first = self.parts[0].fitted
            return first.answer(first.read(query), what)
        scored, dtype, asked = what in ("score", "both"), max(query.dtype, self.problem.dtype), [query]
        if query.origin.on_host:
            host = query._replace(array=query.at(Origin()), dtype="float64", origin=Origin())
            asked = [host.rows(i, i + ROWS) for i in range(0, query.shape[0], ROWS)]
        sums = concatenate([self._summed(rows, scored) for rows in asked])
        log, score = sums.log_sum, sums.shift
        if score is not None:
            score = score + 0.0 * log[:, None]  # NaN where the density is 0
        if what == "both":
            return log, score
        result = score if scored else log if what == "log" else array_namespace(log).exp(log)
        return query.origin.restore(result, dtype)

    def _summed(self, query: Argument, scored: bool, at_once: bool = True) -> Partial:
        """The log (m,) and the score (m, d), float64, where the query is.

        Groups are asked all at once where a backend can; on the host else, only about rows to which they add more than
        1e-15 of what the other parts have.
        """
        y, (normals, groups, together), host = query.at(query.origin), self._joint, query.origin.on_host
        y, reduction = y[:, None] if y.ndim == 1 else y, Reduction.MEAN if scored else Reduction.LOG_SUM
        if together and (not at_once or together.on_host != host or not together.limit(reduction)):
            together = None
        joint = {k for some in (normals, together) if some for k in some.which}
        alone = set(groups.which if groups and host else ()) - joint
        rest = (part for k, part in enumerate(self.parts) if k not in joint | alone)
        found = [_of(part, query, scored) for part in rest] + ([normals.normals(y, scored)] if normals else [])
        if together:
            known = functools.reduce(_added, found).log_sum if found else np.full(len(y), -math.inf)
            whole = together.summed(y, scored, known)
            if whole is None:  # also where something is wrong with the query, which the first part finds
                return self._summed(query, scored, False)
            found.append(whole)
        sums = functools.reduce(_added, found)
        for k, most in zip(groups.which, groups.bounds(y).T) if groups and alone else ():
            rows = np.flatnonzero(~(most < sums.log_sum - 35.0))  # of NaN too
            if rows.size and k in alone:
                more = _of(self.parts[k], query._replace(array=y[rows]), scored)
                put(sums, rows, _added(each(sums, operator.itemgetter(rows)), more))
        return sums

    @cached_property
    def _joint(self) -> tuple[Joint | None, Joint | None, Together | None]:
        """Parts of one sample, of one group on the host (but the first, which finds what is wrong), and together."""
        single = [k for k, part in enumerate(self.parts) if k and len(part.fitted.groups) == 1]
        normals = [k for k in single if self.parts[k].fitted.groups[0].n == 1]
        groups = [k for k in single if k not in normals and self.parts[k].fitted.choice.device == "cpu"]
        return Joint.of(self.parts, normals), Joint.of(self.parts, groups), Together.of(self.parts)

    def draws(self, n: int, rng: Any) -> Any:
        shares = np.exp([part.log_share for part in self.parts])
        counts = rng.multinomial(n, shares / shares.sum())
        drawn = [draws(part.fitted.current, int(k), rng) for part, k in zip(self.parts, counts)]
        if not all(type(x) is type(drawn[0]) for x in drawn):  # backends on several devices
            drawn = [to_host(x) for x in drawn]
        xp = array_namespace(drawn[0])
        return take_rows(xp.concat(drawn), xp.asarray(rng.permutation(n), device=device(drawn[0])))


def _of(part: Part, query: Argument, scored: bool) -> Partial:
    """A part's weighted log density and its score, on the query's device."""
    if not scored:
        return Partial(part.log_share + of_part(part.fitted, query, "log"))
    if query.origin.on_host:
        log, score = of_both(part.fitted, query)
    else:
        log, score = of_part(part.fitted, query, "log"), of_part(part.fitted, query, "score")
    return Partial(part.log_share + log, score)


def _added(sums: Partial, more: Partial) -> Partial:
    """Return the sum of two densities."""
    xp = array_namespace(more.log_sum)
    log, shift = xp.logaddexp(sums.log_sum, more.log_sum), None
    if more.shift is not None:  # where a density is 0 it has none
        shares = ((one, xp.exp(one.log_sum - log)[:, None]) for one in (sums, more))
        shift = sum(xp.where(share > 0.0, share * one.shift, 0.0 * share) for one, share in shares)
    return Partial(log, shift)


def kernels(first: Fitted, request: Request, points: Array, weights: Array, factor: Array) -> Fitted:
    """A KDE of weighted points (n, d), in data units on the host, with H = L Lᵀ, ``factor`` being L (d, d)."""
    n, d = points.shape
    bandwidth = Bandwidth.of(float(factor[0, 0]), 1) if d == 1 else Bandwidth(d, factor)
    centre = weights @ points
    whitened, logs = bandwidth.whiten(points, centre), np.log(weights)
    requires = first.problem.requires - {"weights"} | ({"weights"} if (logs != logs[0]).any() else set())
    extent = rounded(float(radii(whitened).max()))
    rows = max(n, first.problem.n)  # a query is of all parts
    asked = replace(first.problem, device="cpu", extent=extent, n=n, m=rows, d=d, requires=frozenset(requires))
    place = first.choice.device
    request = replace(request, method="kde", calls=100, device=request.device if place == "cpu" else place)
    groups = (Group(Columns(np.ascontiguousarray(whitened), logs)),)
    return loaded(request.settled, bandwidth, asked, "auto", centre, groups, first.names)


FOLDS, HEARD = 5, 2000  # folds, and how many samples the parts are judged by at most
Cut = tuple[Array, Array, Any, Array, Array, Any]  # sdkde's samples, points, log Jacobian there; the mixtures' too
Cutting = Callable[[Array], Cut]
Sending = Callable[[Array], Any]  # to where mixtures are fitted


class _Family(NamedTuple):
    """Parts in the same coordinates (None: the samples' own): sdkde, and mixtures of samples z.

    ``judged`` (n, 1 + mixtures): their log densities at samples when these are left out, NaN at those of no fold.
    """

    coordinates: Coordinates | None
    whole: Any  # Fitted, or Mapped where columns end
    found: list[Chosen]
    z: Array
    judged: Array


def stacked(request: Request, train: Any) -> tuple[Stacked, str, Any]:
    """Fit the parts of ``method="stacked"``; return them, the samples' dtype, and their origin.

    Parts are judged by what they say of the same samples, when a fifth of these is left out: sdkde with the bandwidth
    chosen from all samples; mixtures, and maps to other coordinates, fitted to the other fifths.
    """
    own = replace(request, goal=Goal.DENSITY, method="sdkde", coordinates=None)
    whole, data = _fitted(own, train)
    x, logs = to_host(data.train).astype(np.float64), data.log_weights
    weights = np.full(len(x), 1.0 / len(x)) if logs is None else np.exp(to_host(logs))
    carrying = np.lexsort((weights, *x.T))  # nothing is to follow from the order of the rows
    carrying = carrying[weights[carrying] > 0.0]
    x, weights = x[carrying], weights[carrying]
    n, settled = whole.problem.n, replace(request.settled, precision=whole.problem.precision)
    alone = Stacked(settled, [Part("sdkde", 0.0, whole)], n), data.dtype, data.origin
    same = np.unique(x, axis=0, return_inverse=True)[1].reshape(-1)  # equal samples are left out together
    unit = abs(x - x[0]).max(axis=0)
    known = min(1.0 / float(weights @ weights), same.max() + 1.0)  # too few have no covariance in every fold
    if known < 3 * (x.shape[1] + 1) or not (np.isfinite(unit) & (unit > 0.0)).all():
        return alone
    z = (x - x[0]) / unit
    if (units := units_of(np.sort(z, axis=0))).any():  # of equal values the likelihood has no bound
        z = spread_within(z, units, None if logs is None else weights)
    y, size = x[0] + unit * z, float(np.log(unit).sum())
    specs: list[list[Any]] = []
    if request.support is not None:
        own = replace(own, support=listed(request.support, x.shape[1], data.names, "support"))
        y, specs = without_ends(y, weights, own.support)
    elif request.coordinates is None:
        specs = [list[Any](spec) for spec in candidates(y, weights)]
    place = np.random.default_rng(SEED).permutation(same.max() + 1)[same]
    folds = np.where(place < HEARD, place % FOLDS, -1)
    heard, own = folds >= 0, replace(own, weights=None if logs is None else weights)
    there: Sending = np.asarray
    if is_torch_array(data.train) and not data.origin.on_host:
        there = functools.partial(convert, library="torch", device=data.device)
    found = [] if request.support is not None else choose(z, weights, folds, SEED, there)  # else mass beyond the ends

    def plain(kept: Array) -> Cut:
        return x[kept], y[~kept], 0.0, z[kept], z[~kept], -size

    judged = _left_out(replace(own, bandwidth=whole.bandwidth), found, weights, folds, plain, there, not heard.all())
    for k, one in enumerate(found if heard.all() else ()):
        judged[:, k + 1] = one.left_out - size
    families = [_Family(None, whole, found, z, judged)]
    elsewhere = replace(own, bandwidth="auto", support=None)
    families += [_elsewhere(elsewhere, spec, y, weights, folds, data, there) for spec in specs]
    table = np.concatenate([family.judged for family in families], axis=1)[heard]
    counted = weights[heard] / weights[heard].sum()
    # Three samples are counted for the parts, half of them for sdkde: in one column, n = 500, where shares are hardly
    # known, that takes a sixth off the squared error.
    kinds = [k == 0 for family in families for k in range(family.judged.shape[1])]
    prior = 1.5 / len(kinds) + 1.5 * np.array(kinds) / sum(kinds)
    kernels = [k == 0 or f.found[k - 1].h < 1.0 for f in families for k in range(f.judged.shape[1])]
    shares, means, parts = _brief(table, counted, prior, np.flatnonzero(kernels)[1:]), counted @ table, list[Part]()
    if request.support is not None:  # in logs a density is 0 at the end: such parts have to say clearly more
        # Clipped, as a few samples where sdkde is nearly 0 would have all of the standard error.
        more = np.clip(_logs(table, shares) - table[:, 0], -2.0, 2.0)
        gain = float(counted @ more)
        if gain < max(0.02, 3.0 * math.sqrt(counted**2 @ (more - gain) ** 2)):
            return alone
    shares[0] = max(shares[0], 0.01)  # for what is so rare that no other part has it
    shares /= shares.sum()
    for family in families:
        many = family.judged.shape[1]
        more = _parts(family, own, x[0], unit, weights, shares[:many], means[:many])
        shares, means = shares[many:], means[many:]
        if family.coordinates is not None and more:
            total = float(np.logaddexp.reduce([part.log_share for part in more]))
            inner = Stacked(settled, [part._replace(log_share=part.log_share - total) for part in more], n)
            more = [Part("", total, Mapped(inner, family.coordinates, n))]
        parts += more
    return Stacked(settled, parts, n), data.dtype, data.origin


def _brief(table: Array, weights: Array, prior: Array, kernels: Array) -> Array:
    """The parts' shares, as :func:`.stack` has them, but without those of the parts ``kernels`` that say little.

    These have kernels at all samples, which is what a query costs. They go, the one with the smallest share first, as
    long as the mean log density of left-out samples falls by less than .005 in all.
    """
    kept, shares = np.ones(len(prior), bool), stack(table, weights, prior)
    least = weights @ _logs(table, shares) - 0.005
    for k in kernels[np.argsort(shares[kernels], kind="stable")]:
        tried, fewer = kept & (np.arange(len(kept)) != k), np.zeros(len(prior))
        fewer[tried] = stack(table[:, tried], weights, prior[tried])
        if weights @ _logs(table, fewer) >= least:
            kept, shares = tried, fewer
    return shares


def _logs(table: Array, shares: Array) -> Array:
    """The log of the parts' sum (n,), by the logs of each, (n, e)."""
    return np.logaddexp.reduce(table + np.log(np.maximum(shares, 1e-300)), axis=1)


def _fitted(request: Request, train: Any) -> tuple[Any, Data]:
    """A density that is no list, Fitted or Mapped, and what its samples were read as."""
    if not request.mapped:
        ready = plan(request, train)
        return Fitted.of(ready), ready.data
    data = ingest(train, None, request.weights, check_finite=request.check_finite, device="cpu")
    inner, z, coordinates, n = mapped(request, train)
    return Mapped(Fitted.of(plan(inner, z)), coordinates, n), data


def _elsewhere(
    own: Request, spec: Sequence[Any], y: Array, weights: Array, folds: Array, data: Data, there: Sending
) -> _Family:
    """The parts in coordinates ``spec``, of samples y (n, d)."""

    def cut(kept: Array) -> Cut:
        maps = fit_maps(spec, y[kept], weights[kept] / weights[kept].sum())
        samples, points = maps.forward(y[kept]), maps.forward(y[~kept])
        change = maps.log_slopes(y[~kept]).sum(axis=1)
        return samples, points, change, samples, points, change

    maps = fit_maps(spec, y, weights, data.names)
    z = maps.forward(y)
    ready = plan(own, Argument("train", z, data.dtype, data.origin, data.names))
    found = choose(z, weights, folds, SEED, there)
    fixed = replace(own, bandwidth=ready.bandwidth)
    return _Family(maps, Fitted.of(ready), found, z, _left_out(fixed, found, weights, folds, cut, there))


def _left_out(
    own: Request, found: Sequence[Chosen], weights: Array, folds: Array, cut: Cutting, there: Sending, anew: bool = True
) -> Array:
    """Log densities (n, 1 + mixtures) of sdkde and of mixtures at each fold's samples, fitted to all others.

    ``cut``: the samples where a mask (n,) is true, and the others. A mixture's fit starts from that to all samples.
    """
    result = np.full((len(folds), 1 + len(found)), math.nan)
    for fold in range(FOLDS):
        out = folds == fold
        kept, points, change, z, left, of_z = cut(~out)
        given = own if own.weights is None else replace(own, weights=weights[~out])
        result[out, 0] = of_part(_fitted(given, kept)[0], Argument.of("query", points), "log") + change
        z, w, left = (there(a) for a in (z, weights[~out] / weights[~out].sum(), left))
        for k, one in enumerate(found if anew else (), 1):
            normals = fit(z, w[None], Normals(*(a[None] for a in one.normals)), shrink=one.shrink)[0].one(0)
            result[out, k] = to_host(smoothed_logs(z, w, normals, [one.h], left))[0] + of_z
    return result


def _parts(
    family: _Family, own: Request, origin: Array, unit: Array, weights: Array, shares: Array, means: Array
) -> list[Part]:
    maps = family.coordinates
    where = "" if maps is None else f" in {maps if len(str(maps)) < 30 else 'other coordinates'}"
    parts = [Part(f"sdkde{where}", math.log(shares[0]), family.whole, float(means[0]))] if shares[0] else []
    for share, mean, one in zip(shares[1:], means[1:], family.found):
        kind = f"{'smoothed ' if one.h < 1.0 else ''}mixture of {len(one.normals.shares)}"
        label = f"{kind}{' without correlations' if math.isinf(one.shrink) else ''}{where}"
        for points, w, factor, part in smoothed(family.z, weights, one.normals, one.h) if share else ():
            if family.coordinates is None:
                points, factor = origin + unit * points, unit[:, None] * factor
            fitted = kernels(family.whole, own, points, w, factor)
            parts.append(Part(label, math.log(share * part), fitted, float(mean)))
    return parts
