"""A density that is a weighted list of fitted ones, Σ_e π_e p̂_e, and all that a density answers, of the list.

Parts have bandwidths and centres of their own; each is a :class:`.fitted.Fitted`. Logs are joined by log-sum-exp,
scores by the softmax of the parts' logs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from array_api_compat import device

from ..arrays import Argument, Array, array_namespace, quiet, rounded, to_host
from ..bandwidth.matrix import Bandwidth
from ..bandwidth.mixtures import Chosen, Normals, choose, fit, log_density_of, smoothed, stack
from ..bandwidth.rounding import spread_within, units_of
from ..bandwidth.selection import SEED
from ..engine.groups import Group
from ..engine.merge import merge, take_rows
from ..engine.outliers import radii
from ..protocol import Columns, Partial
from .fitted import Fitted, loaded
from .mapped import of_part
from .mixture import draws, marginal
from .plan import plan
from .request import Goal, Request


class Part(NamedTuple):
    """One density of the list: what it is a part of, for people, and the log of its share.

    ``left_out``: the mean log density of left-out samples under what it is a part of; None where that was not asked.
    """

    label: str
    log_share: float
    fitted: Fitted
    left_out: float | None = None


class Stacked:
    """Parts whose shares sum to 1, of n samples; immutable, pickles.

    Where one number describes a density, as its bandwidth, it is the first part's.
    """

    has_second = False
    groups = ()
    coordinates = None

    def __init__(self, request: Request, parts: Iterable[Part], n: int) -> None:
        self.request, self.parts = request, tuple(parts)
        first = self.parts[0].fitted
        self.problem = replace(first.problem, n=n, m=n)
        self.bandwidth, self.names = first.bandwidth, first.names
        self.home, self.centre = first.home, first.centre

    @property
    def choice(self) -> Any:
        """The first part's backend."""
        return self.parts[0].fitted.current.choice

    @property
    def current(self) -> Stacked:
        return self

    def each(self, change: Callable[[Fitted], Fitted], log_terms: Any = None) -> Stacked:
        """Return the list of changed parts; ``log_terms``: added to the logs of their shares, which then sum to 1."""
        logs = np.array([part.log_share for part in self.parts])
        if log_terms is not None:
            logs = logs + np.asarray(log_terms, dtype=float)
            logs -= np.logaddexp.reduce(logs)
        parts = (part._replace(log_share=float(log), fitted=change(part.fitted)) for log, part in zip(logs, self.parts))
        return Stacked(self.request, [part for part in parts if part.log_share > -math.inf], self.problem.n)

    def asked(self, query: Any) -> Argument:
        """Recognise the user's query and validate its shape."""
        return self.parts[0].fitted.asked(query)

    def read(self, query: Argument) -> Argument:
        """A query as :meth:`answer` takes it: parts read it themselves."""
        return query

    def serve(self, compute: Callable[[Stacked], Any]) -> Any:
        """Return ``compute(self)``: parts whose backend fails go on with another one by themselves."""
        return compute(self)

    @quiet
    def answer(self, query: Argument, what: str) -> Any:
        """Return the ``"density"`` (m,), its ``"log"``, or the ``"score"`` (m, d), as :meth:`.Fitted.answer` does."""
        if not query.shape[0]:
            first = self.parts[0].fitted
            return first.answer(first.read(query), what)
        logs, scores = self._terms(query, what == "score")
        dtype, joined = max(query.dtype, self.problem.dtype), merge(list(map(Partial, logs, scores)))
        if what == "score":
            return query.origin.restore(joined.shift, dtype)
        log_sum = joined.log_sum
        return query.origin.restore(log_sum if what == "log" else array_namespace(log_sum).exp(log_sum), dtype)

    def _terms(self, query: Argument, scored: bool) -> tuple[list[Any], list[Any]]:
        """All parts' logs (m,) with their shares, and scores (m, d) or None, float64, where the query is."""
        logs, scores, normals = list[Any](), list[Any](), self._normals
        for k, part in enumerate(self.parts):
            if normals is None or k not in normals[0]:
                logs.append(part.log_share + of_part(part.fitted, query, "log"))
                scores.append(of_part(part.fitted, query, "score") if scored else None)
        if normals is not None:  # parts of many, whose sums would each cost their way
            log, slope = _of_normals(normals[1], query.at(query.origin), scored)
            logs.append(log)
            scores.append(slope)
        return logs, scores

    @functools.cached_property
    def _normals(self) -> tuple[frozenset[int], Normals] | None:
        """Which parts are single normals, but for the first, and their mixture with their shares; None for few."""
        which = [k for k, part in enumerate(self.parts) if k and part.fitted.components.points.shape[0] == 1]
        if len(which) < 2:
            return None
        means, factors = [], []
        for k in which:
            fitted = self.parts[k].fitted
            points, _, scales, centre = fitted.on_host
            means.append(centre + fitted.bandwidth.stretch(points)[0])
            factors.append(np.linalg.cholesky(fitted.bandwidth.matrix) * scales[0])
        shares = np.exp([self.parts[k].log_share for k in which])
        return frozenset(which), Normals(shares, np.array(means), np.array(factors))

    def logs_at(self, dims: Any, values: Array) -> list[float]:
        """The logs of the parts' marginals of the coordinates ``dims`` at values (k,): a conditional's shares."""
        query = Argument.of("given", values[None, :])
        return [float(to_host(of_part(marginal(part.fitted, dims), query, "log"))[0]) for part in self.parts]

    def draws(self, n: int, rng: Any) -> Any:
        """Return draws (n, d), in an order that says nothing."""
        shares = np.exp([part.log_share for part in self.parts])
        counts = rng.multinomial(n, shares / shares.sum())
        drawn = [draws(part.fitted.current, int(k), rng) for part, k in zip(self.parts, counts)]
        if not all(type(x) is type(drawn[0]) for x in drawn):  # backends on several devices
            drawn = [to_host(x) for x in drawn]
        xp = array_namespace(drawn[0])
        return take_rows(xp.concat(drawn), xp.asarray(rng.permutation(n), device=device(drawn[0])))


def modes(fitted: Any, starts: Array | None) -> Array:
    """Return the local maxima (k, d) of a list, or in other coordinates, highest first; all in data units.

    A row moves by ∇log p̂ in the unit Σ_e r_e H_e⁻¹, r_e the parts' shares there: with one part, to the mean of the
    samples under its kernel weights. By less where that would lower the density, as it may in other coordinates.
    """
    rows = to_host(draws(fitted, 512, np.random.default_rng(0))) if starts is None else np.array(starts, dtype=float)
    going = np.arange(len(rows))
    log, slope, unit, narrowest = local(fitted, Argument.of("query", rows))
    going = going[np.isfinite(log)]
    rows, log, slope, unit = rows[going], log[going], slope[going], unit[going]
    part, going = np.ones(len(rows)), np.arange(len(rows))
    for _ in range(5000):
        step = narrowest * np.linalg.solve(unit[going], slope[going][:, :, None])[:, :, 0]
        small = np.sqrt(np.einsum("mi,mij,mj->m", step, unit[going], step)) <= 1e-7
        tried = rows[going] + part[going, None] * step
        there = local(fitted, Argument.of("query", tried))
        better = there[0] >= log[going] - 1e-12 * (1.0 + abs(log[going]))
        part[going] = np.where(better, np.minimum(1.0, 2.0 * part[going]), 0.5 * part[going])
        moved = going[better]
        rows[moved], log[moved], slope[moved], unit[moved] = (x[better] for x in (tried, *there[:3]))
        going = going[~small & (part[going] > 1e-9)]
        if not going.size:
            break
    if 0 < going.size < len(rows):  # rows that are still on their way are at no maximum
        rows, log, unit = (np.delete(x, going, axis=0) for x in (rows, log, unit))
    kept: list[int] = []
    for i in np.argsort(-log, kind="stable"):
        away = (rows[i] - rows[k] for k in kept)
        if all(v @ unit[i] @ v > 1e-4 * narrowest for v in away):  # else it is the same mode
            kept.append(int(i))
    return rows[kept]


def local(fitted: Any, query: Argument) -> tuple[Array, Array, Array, float]:
    """The log (m,) and the score (m, d) at a query; Σ_e r_e H_e⁻¹ there (m, d, d); the least squared scale of a group.

    On the host; r_e are the shares of the kernels' parts there.
    """
    if fitted.coordinates is not None:
        return fitted.local(query)
    if fitted.parts:
        each, scores, units, scales = zip(*(local(part.fitted, query) for part in fitted.parts))
        logs = np.stack([part.log_share + log for part, log in zip(fitted.parts, each)])  # (e, m)
        log = np.logaddexp.reduce(logs)
        shares = np.exp(logs - log)
        score = np.einsum("em,emd->md", shares, np.stack(scores))
        return log, score, np.einsum("em,emij->mij", shares, np.stack(units)), min(scales)
    log, score = (to_host(of_part(fitted, query, what)) for what in ("log", "score"))
    unit = np.linalg.inv(fitted.bandwidth.matrix)
    return log, score, np.broadcast_to(unit, (len(log), *unit.shape)), min(group.scale for group in fitted.groups) ** 2


def _of_normals(normals: Normals, y: Any, scored: bool) -> tuple[Any, Any]:
    """The log (m,) and the score (m, d) or None of a mixture of normals at y, where that is, float64."""
    xp, where = array_namespace(y), {} if isinstance(y, np.ndarray) else {"device": device(y)}
    y = xp.astype(y[:, None] if y.ndim == 1 else y, xp.float64, copy=False)
    k, d = normals.means.shape
    inverses = np.linalg.inv(normals.factors)
    constants = np.log(normals.shares) + np.log(np.diagonal(inverses, axis1=1, axis2=2)).sum(1)
    offsets = np.einsum("kij,kj->ki", inverses, normals.means).reshape(-1)
    flat, offsets, constants, back = (
        xp.asarray(np.ascontiguousarray(a), **where)
        for a in (inverses.reshape(k * d, d).T, offsets, constants - 0.5 * d * math.log(2.0 * math.pi), inverses)
    )
    logs, slopes, step = [], [], max(1, (1 << 22) // (k * d))
    for start in range(0, max(1, y.shape[0]), step):
        u = xp.reshape(y[start : start + step, :] @ flat - offsets, (-1, k, d))
        terms = constants - 0.5 * xp.sum(u * u, axis=-1)
        top = xp.max(terms, axis=-1, keepdims=True)
        shares = xp.exp(terms - top)
        total = xp.sum(shares, axis=-1, keepdims=True)
        logs.append((xp.log(total) + top)[:, 0])
        if scored:  # Σ_k r_k −L_k⁻ᵀ u_k
            pulled = xp.matmul(u[:, :, None, :], back)[:, :, 0, :]
            slopes.append(-xp.sum((shares / total)[:, :, None] * pulled, axis=1))
    return xp.concat(logs), xp.concat(slopes) if scored else None


def kernels(first: Fitted, request: Request, points: Array, weights: Array, factor: Array) -> Fitted:
    """Return a KDE of weighted points (n, d), in data units on the host, with H = L Lᵀ, ``factor`` being L (d, d)."""
    n, d = points.shape
    bandwidth = Bandwidth.of(float(factor[0, 0]), 1) if d == 1 else Bandwidth.of(factor @ factor.T, d)
    centre = weights @ points
    whitened, logs = bandwidth.whiten(points, centre), np.log(weights)
    equal = bool((logs == logs[0]).all())
    requires = first.problem.requires - {"weights"} | (set() if equal else {"weights"})
    fields = {"n": n, "m": n, "d": d, "requires": frozenset(requires), "extent": rounded(float(radii(whitened).max()))}
    asked = replace(first.problem, device="cpu", **fields)
    place = first.choice.device
    request = replace(request, method="kde", device=request.device if place == "cpu" else place)
    groups = (Group(Columns(np.ascontiguousarray(whitened), logs)),)
    return loaded(request.settled, bandwidth, asked, "auto", centre, groups, first.names)


FOLDS, HEARD = 5, 2000  # folds, and how many samples the parts are judged by at most


def stacked(request: Request, train: Any) -> tuple[Stacked, str, Any]:
    """Fit the parts of ``method="stacked"``; return them, the samples' dtype, and their origin.

    All parts are judged by what they say of the same samples, when a fifth of these is left out: sdkde with the
    bandwidth that is chosen from all samples, mixtures fitted to the other fifths.
    """
    own = replace(request, goal=Goal.DENSITY, method="sdkde")
    ready = plan(own, train)
    whole, data = Fitted.of(ready), ready.data
    x, logs = to_host(data.train).astype(np.float64), data.log_weights
    weights = np.full(len(x), 1.0 / len(x)) if logs is None else np.exp(to_host(logs))
    carrying = weights > 0.0
    x, weights = x[carrying], weights[carrying]
    n, settled = whole.problem.n, replace(request.settled, precision=whole.problem.precision)
    alone = Stacked(settled, [Part("sdkde", 0.0, whole)], n), data.dtype, data.origin
    same = np.unique(x, axis=0, return_inverse=True)[1].reshape(-1)  # equal samples are left out together
    unit = abs(x - x[0]).max(axis=0)
    known = min(1.0 / float(weights @ weights), same.max() + 1.0)  # too few have no covariance in every fold
    if known < 10 * (x.shape[1] + 1) or not (np.isfinite(unit) & (unit > 0.0)).all():
        return alone
    z = (x - x[0]) / unit
    if (units := units_of(np.sort(z, axis=0))).any():  # of equal values the likelihood has no bound
        z = spread_within(z, units, None if logs is None else weights)
    place = np.random.default_rng(SEED).permutation(same.max() + 1)[same]
    folds = np.where(place < HEARD, place % FOLDS, -1)
    heard, size = folds >= 0, float(np.log(unit).sum())
    found = choose(z, weights, folds, SEED)
    judged = [_left_out(own, ready.bandwidth, x, x[0] + unit * z, None if logs is None else weights, folds)]
    for one in found:
        judged.append((one.left_out if heard.all() else _refitted(one, z, weights, folds)) - size)
    table, counted = np.stack(judged, axis=1)[heard], weights[heard] / weights[heard].sum()
    shares, means = stack(table, counted), counted @ table
    shares = np.append(max(shares[0], 0.01), shares[1:])  # for what is so rare that no other part has it
    shares /= shares.sum()
    parts = [Part("sdkde", math.log(shares[0]), whole, float(means[0]))]
    for share, mean, one in zip(shares[1:], means[1:], found):
        label = f"{'smoothed ' if one.h < 1.0 else ''}mixture of {len(one.normals.shares)}"
        for points, w, factor, part in smoothed(z, weights, one.normals, one.h) if share else ():
            fitted = kernels(whole, own, x[0] + unit * points, w, unit[:, None] * factor)
            parts.append(Part(label, math.log(share * part), fitted, float(mean)))
    return Stacked(settled, parts, n), data.dtype, data.origin


def _refitted(one: Chosen, x: Array, weights: Array, folds: Array) -> Array:
    """The log density (n,) at the samples of every fold of a mixture that is fitted to all others; NaN at the rest.

    It starts from the fit to all samples, and is then judged by as many samples as sdkde is.
    """
    result = np.full(len(x), math.nan)
    for fold in range(FOLDS):
        out = folds == fold
        kept, w = x[~out], weights[~out] / weights[~out].sum()
        normals = fit(kept, w, len(one.normals.shares), one.normals, shrink=one.shrink)
        result[out] = log_density_of(smoothed(kept, w, normals, one.h), x[out])
    return result


def _left_out(request: Request, bandwidth: Bandwidth, x: Array, y: Array, weights: Any, folds: Array) -> Array:
    """The log density (n,) at y, the samples of every fold, of the estimate from all others; NaN at other samples."""
    result = np.full(len(x), math.nan)
    for fold in range(FOLDS):
        out = folds == fold
        given = replace(request, bandwidth=bandwidth, weights=None if weights is None else weights[~out])
        fitted = Fitted.of(plan(given, x[~out]))
        result[out] = of_part(fitted, Argument.of("query", y[out]), "log")
    return result
