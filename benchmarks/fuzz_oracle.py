"""The oracle of fuzz.py: every reduction by direct differences of the numbers as handed in, in float64, on any device.

Exponents are taken relative to the largest, so that rows far from everything keep their digits; with every result comes
how far off float64 may leave it.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray
from torch import Tensor

from sdkde_core.testing.problems import Truth

Array = NDArray[Any]

#: Numbers in a block of differences, by kind of device.
BLOCK = {"cuda": 1 << 25, "cpu": 1 << 20}

UNIT = {"float32": 2.0**-24, "float64": 2.0**-53}


class Points(NamedTuple):
    """Points where u = x / h + moved, or L⁻¹ x + moved, in bandwidths, up to a centre that differences leave out."""

    x: Tensor  # (n, d) float64, as handed in
    h: Tensor | None = None  # (d,) in x's units; (d, d): L⁻ᵀ for H = L Lᵀ; None: x is whitened, and exact
    unsure: Tensor | None = None  # (n,) how far off u may be once it was whitened, bandwidths
    moved: Tensor | None = None  # (n, d) bandwidths

    def at(self, which: Any) -> Points:
        unsure, moved = (None if t is None else t[which] for t in self[2:])
        return Points(self.x[which], self.h, unsure, moved)


class Sums(NamedTuple):
    """The reductions for every row as the reference has them, and how far off float64 may leave them."""

    log_sum: Tensor  # (m,)
    shift: Tensor  # (m, d) bandwidths
    signed: Tensor  # (m,) L / M
    log_plus: Tensor  # (m,) log M
    log_slack: Tensor  # (m,) of ℓ
    shift_slack: Tensor  # (m,) of the shift, bandwidths
    signed_slack: Tensor  # (m,) of L / M

    @property
    def truth(self) -> Truth:
        return Truth(*map(host, self[:4]))


def sums(
    rows: Points,
    points: Points,
    log_weights: Tensor,
    precise: bool = False,
) -> Sums:
    """Every reduction by direct differences, a block of rows at a time.

    Precise: where exponents decide between far clusters, theirs have no error. For points that are exact.
    """
    n, d = points.x.shape
    height = max(1, BLOCK[points.x.device.type] // (n * d))
    columns = points, log_weights
    blocks = []
    for start in range(0, len(rows.x), height):
        some = rows.at(slice(start, start + height))
        block = _block(some, *columns)
        unclear = torch.nonzero(block.shift_slack > 1e-12)[:, 0] if precise else ()
        for those in unclear.split(max(1, height // 4)) if len(unclear) else ():
            for whole, part in zip(block, _block(some.at(those), *columns, precise)):
                whole[those] = part
        blocks.append(block)
    return Sums(*(torch.cat(parts) for parts in zip(*blocks)))


def _block(rows: Points, points: Points, log_w: Tensor, precise: bool = False) -> Sums:
    d = points.x.shape[1]
    apart = _apart(rows, points)
    r2 = (apart * apart).sum(-1)  # (b, n)
    terms = log_w - 0.5 * r2
    # Far from every point exponents are huge, and only their differences count: with k the largest term,
    # r²_j − r²_k = (u_j − u_k)·(u_j + u_k − 2 u_i) = δ_j·(δ_j + 2 (u_k − u_i)), without the cancellation.
    at_nearest, nearest = terms.max(1)
    away = apart[torch.arange(len(apart), device=apart.device), nearest]  # (b, d)
    delta = _apart(points.at(nearest), points)
    if precise:
        relative = _farther(rows.x, points.x[nearest], points.x)
    else:
        relative = (delta * torch.add(delta, away[:, None], alpha=2.0)).sum(-1)
    relative = relative * -0.5 + (log_w - log_w[nearest, None])
    relative.masked_fill_(terms == -math.inf, -math.inf)
    most = relative.amax(1)  # 0, but for the rounding of huge exponents
    phi = torch.exp(relative - most[:, None])
    top, total = at_nearest + most, phi.sum(1)
    share = phi / total[:, None]
    mean = torch.einsum("bn,bnd->bd", share, delta)
    half, exponent = 1.0 + 0.5 * d, -0.5 * r2
    plus = phi * (half - exponent)
    all_plus = plus.sum(1)
    signed = (phi * (half + exponent)).sum(1)
    # What float64 leaves open, to first order; see the top of the file.
    unsure = torch.zeros_like(r2) if rows.unsure is None else rows.unsure[:, None] + points.unsure
    moves = r2.sqrt() * unsure  # of the exponents
    rounding = (2 + 0.25 * math.sqrt(d)) * UNIT["float64"] * 0.5 * away.square().sum(1, keepdim=True)
    spread = torch.linalg.vector_norm(delta - mean[:, None], dim=-1)  # ‖u_j − ū‖
    # Midway between far clusters rounding decides which one counts: a column's share is any up to what it may be.
    opened = moves + rounding
    may = torch.exp((relative - most[:, None] + 2.0 * opened).clamp(max=0.0)) / total[:, None]
    return Sums(
        log_sum=top + total.log(),
        shift=away + mean,
        signed=signed / all_plus,
        log_plus=top + all_plus.log(),
        log_slack=(share * moves).sum(1),
        shift_slack=(share * unsure + may * opened.clamp(max=1.0) * spread).sum(1),
        signed_slack=2.0 * (plus * moves).sum(1) / all_plus,
    )


def _apart(rows: Points, points: Points) -> Tensor:
    """u_j − u_i, (b, n, d), to a few roundings of each component."""
    apart = points.x - rows.x[:, None]
    if points.h is not None:
        apart = apart / points.h if points.h.ndim == 1 else apart @ points.h
    if points.moved is not None:
        apart += points.moved if rows.moved is None else points.moved - rows.moved[:, None]
    return apart


def _farther(v: Tensor, near: Tensor, u: Tensor) -> Tensor:
    """‖u_j − v_i‖² − ‖near_i − v_i‖², (b, n), rounded once or twice: products of sums as pairs of float64."""
    delta, delta_low = _two_sum(u, -near[:, None])
    total, low = _two_sum(u, near[:, None])
    total, more = _two_sum(total, -2.0 * v[:, None])
    low += more
    product, rest = _two_product(delta, total)
    rest += delta * low + delta_low * total
    while product.shape[-1] > 1:  # in pairs, what is lost kept apart
        if product.shape[-1] % 2:
            product, rest = (torch.nn.functional.pad(t, (0, 1)) for t in (product, rest))
        product, lost = _two_sum(product[..., ::2], product[..., 1::2])
        rest = rest[..., ::2] + rest[..., 1::2] + lost
    return (product + rest)[..., 0]


def _two_sum(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """a + b as a float64 and what that leaves out (Knuth)."""
    s = a + b
    c = s - a
    return s, (a - (s - c)) + (b - c)


def _two_product(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """a · b as a float64 and what that leaves out (Dekker)."""
    (ah, al), (bh, bl) = _halves(a), _halves(b)
    p = a * b
    return p, ((ah * bh - p) + ah * bl + al * bh) + al * bl


def _halves(a: Tensor) -> tuple[Tensor, Tensor]:
    c = 134217729.0 * a  # 2²⁷ + 1
    high = c - (c - a)
    return high, a - high


def host(x: Tensor) -> Array:
    return x.cpu().numpy()
