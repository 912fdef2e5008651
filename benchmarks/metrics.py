"""What an answer is worth: against float64 sums of the same numbers, and against the density that is true."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from array_api_compat import array_namespace
from numpy.typing import NDArray

from sdkde_core.protocol import TOLERANCES, Reduction

from .problems import Data, Oracle

__all__ = ["Exact", "against_exact", "against_truth", "exact", "host", "log_constant", "sums"]

Array = NDArray[Any]

#: Pairs of a block, by kind of device.
BLOCK = {"cpu": 2**22, "cuda": 2**27}


def log_constant(d: int, h: float) -> float:
    """log p̂ less the log of the mean of φ."""
    return -d * math.log(h) - 0.5 * d * math.log(2 * math.pi)


def host(array: Any) -> Array:
    """As NumPy's float64 array."""
    return np.asarray(array.detach().cpu() if hasattr(array, "detach") else array, dtype=np.float64)


def sums(rows: Any, points: Any, h: float, what: str) -> Any:
    """Sums over all points for each row, in float64.

    Parameters
    ----------
    rows, points : (m, d) and (n, d) arrays of one kind, on one device
    what : {"log", "shift", "laplace"}
        log of the mean of φ (m,); the shift in bandwidths (m, d); the means of φ (1 + d/2 ∓ r²/2) (m, 2).

    Notes
    -----
    By expanded squares of centred numbers, off by some R² · 1e-16, R the extent in bandwidths.
    """
    xp = array_namespace(points)
    centre = xp.mean(xp.astype(points, xp.float64), axis=0)
    u, v = ((xp.astype(z, xp.float64) - centre) / h for z in (points, rows))
    norms, c, found = 0.5 * xp.sum(u * u, axis=1), 1 + 0.5 * u.shape[1], []
    height = max(1, BLOCK["cpu" if isinstance(u, np.ndarray) else "cuda"] // len(u))
    for start in range(0, len(v), height):
        part = v[start : start + height]
        e = part @ u.T  # then −r²/2
        e -= norms
        e -= 0.5 * xp.sum(part * part, axis=1)[:, None]
        e = xp.where(e > 0, 0.0 * e, e)
        top = xp.max(e, axis=1, keepdims=True)
        phi = xp.exp(e - top)
        total = xp.sum(phi, axis=1)
        if what == "log":
            found.append(xp.log(total) + top[:, 0] - math.log(len(u)))
        elif what == "shift":
            found.append((phi @ u) / total[:, None] - part)
        else:
            scale = xp.exp(top[:, 0]) / len(u)
            found.append(
                xp.stack([xp.sum(phi * (c + e), axis=1) * scale, xp.sum(phi * (c - e), axis=1) * scale], axis=1)
            )
    return xp.concat(found)


class Exact(NamedTuple):
    """The truth of a method at some of the queries: ``sums`` of the last pass."""

    rows: Array  # which
    want: Array  # (k,) logs, or (k, 2) of Laplace
    shift_error: float | None = None  # of the points that a subject moved itself, in bandwidths


def exact(data: Data, method: str, most: int, moved: Any = None) -> Exact:
    """The truth at up to ``most`` queries; of ``moved``, a subject's own points (n, d), if n² sums are too many."""
    x, y, h = data
    rows, off = np.unique(np.linspace(0, len(y) - 1, min(most, len(y))).astype(int)), None
    points = x
    if moved is not None:
        some = np.linspace(0, len(x) - 1, min(most, len(x))).astype(int)
        own = 2 * (host(moved[some]) - host(x[some])) / h
        off = float(np.linalg.norm(own - host(sums(x[some], x, h, "shift")), axis=1).max())
        points = moved
    elif method == "sdkde":
        points = x + 0.5 * h * sums(x, x, h, "shift")
    return Exact(rows, host(sums(y[rows], points, h, "laplace" if method == "laplace" else "log")), off)


def against_exact(raw: Any, form: str, truth: Exact, method: str, n: int, d: int, h: float) -> dict[str, Any]:
    """Errors of an answer (m,) at the rows that are known, by the form in which it came (see ``subjects.Call``)."""
    got, constant = host(raw)[truth.rows], log_constant(d, h)
    with np.errstate(all="ignore"):
        if method == "laplace":
            p = got / n if form == "sum" else got * math.exp(-constant)
            q, scale = truth.want.T
            error, size = np.abs(p - q) / scale, np.log(scale)
        else:
            log = got if form == "log" else np.log(got)
            log = log - (math.log(n) if form == "sum" else constant)
            error, size = np.abs(log - truth.want), truth.want
            p, q = np.exp(log - truth.want.max()), np.exp(truth.want - truth.want.max())
        allowed = (2 if method == "sdkde" else 1) * TOLERANCES["fast"][Reduction.LOG_SUM].at(size)
        found = {"worst": error.max(), "beyond": np.mean(~(error <= allowed)), "l2": _norm(p - q) / _norm(q)}
    found = {key: float(value) if np.isfinite(value) else None for key, value in found.items()}
    return found | ({} if truth.shift_error is None else {"shift": truth.shift_error})


def _norm(x: Array) -> float:
    return float(np.sqrt((x * x).sum()))


def against_truth(density: Any, oracle: Oracle) -> dict[str, float]:
    """Integrated squared and absolute errors of p̂ (m,), the weights of an Oracle being those of an integral by dy.

    In 16 dimensions those weights are 1 / (m p): what is published there are means over queries drawn from p of
    (p̂ − p)² / p and |p̂ − p| / p.
    """
    off = host(density) - oracle.truth
    return {"mise": float(oracle.weights @ off**2), "miae": float(oracle.weights @ np.abs(off))}
