"""Density estimates of other libraries at their best settings: of standardised samples, the log density of rows.

Each returns a function from rows (m, d) to log densities (m,), and a word on the setting that was chosen. ``Skipped``
says why an estimate is not for the data. Mixtures and the flow have a limit in seconds of processor time; the best
until then counts, and the word says so.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["LIMIT", "PEERS", "Fitted", "Skipped", "by_bic"]

LIMIT = 120.0  # seconds of processor time
FLOW = 2000  # samples from which on a flow is trained

Array = NDArray[Any]
Fitted = tuple[Callable[[Array], Array], str]


class Skipped(Exception):
    """The estimate is not for these data, or its library is not here."""


def mixture(x: Array, limit: float) -> Fitted:
    """scikit-learn's GaussianMixture, the number and the kind of its components by BIC."""
    best, setting = by_bic(x, limit)
    return best.score_samples, setting


def by_bic(x: Array, limit: float = LIMIT) -> tuple[Any, str]:
    """The mixture with the least BIC, and a word on it."""
    fits: dict[tuple[int, str], Any] = {}

    def bic(k: int, kind: str) -> float:
        fits[k, kind] = _mixture(x, k, kind)
        return fits[k, kind].bic(x)

    best, setting = _search(bic, limit)
    return fits[best], setting


def mixture_left_out(x: Array, limit: float) -> Fitted:
    """The same by what three folds say of left-out samples."""
    from sklearn.model_selection import KFold

    folds = list(KFold(3, shuffle=True, random_state=0).split(x))

    def loss(k: int, kind: str) -> float:
        return -float(np.mean([_mixture(x[kept], k, kind).score(x[out]) for kept, out in folds]))

    best, setting = _search(loss, limit)
    return _mixture(x, *best).score_samples, setting


def _mixture(x: Array, k: int, kind: str) -> Any:
    """Up to 20,000 values have three starts, more have one."""
    from sklearn.mixture import GaussianMixture

    starts = 3 if x.size <= 20_000 else 1
    return GaussianMixture(k, covariance_type=kind, n_init=starts, random_state=0).fit(x)


def _search(loss: Callable[[int, str], float], limit: float) -> tuple[tuple[int, str], str]:
    """Up to 30 full components, then diagonal ones, until the loss was above the least of the kind three times."""
    start, found, late = time.process_time(), dict[tuple[int, str], float](), ""
    for kind, share in (("full", 0.75), ("diag", 1.0)):
        worse, least = 0, math.inf
        for k in (1, 2, 3, 4, 5, 6, 8, 10, 12, 15, 18, 22, 26, 30):
            if k > 1 and time.process_time() - start > share * limit:
                late = ", out of time"
                break
            found[k, kind] = loss(k, kind)
            worse, least = (0, found[k, kind]) if found[k, kind] < least else (worse + 1, least)
            if worse == 3:
                break
    best = min(found, key=found.__getitem__)
    return best, f"{best[0]} {best[1]}{late}"


def cross_validated(x: Array, limit: float) -> Fitted:
    """scikit-learn's KernelDensity, its bandwidth by GridSearchCV."""
    from sklearn.model_selection import GridSearchCV, KFold
    from sklearn.neighbors import KernelDensity

    grid = {"bandwidth": np.geomspace(0.03, 2.0, 12)}
    search = GridSearchCV(KernelDensity(rtol=1e-4), grid, cv=KFold(5, shuffle=True, random_state=0)).fit(x)
    return search.best_estimator_.score_samples, f"h = {search.best_params_['bandwidth']:.3g}"


def abramson(x: Array, limit: float) -> Fitted:
    """Kernels h (p̂(x_i) / g)^−α wide, p̂ the KDE with h and g its geometric mean; h and α by left-out likelihood."""
    n, d = x.shape
    away = _squares(x, x)
    np.fill_diagonal(away, 1e30)
    best = (-math.inf, 0.0, 0.0)
    for h in np.geomspace(0.05, 2.0, 12):
        pilot = _log_mean(away, np.full(n, h), d) + math.log(n / (n - 1))
        for alpha in (0.25, 0.5):
            left_out = _log_mean(away, _widths(pilot, h, alpha), d) + math.log(n / (n - 1))
            best = max(best, (float(np.maximum(left_out, -700.0).mean()), h, alpha))
    _, h, alpha = best
    np.fill_diagonal(away, 0.0)
    widths = _widths(_log_mean(away, np.full(n, h), d), h, alpha)
    return lambda y: _log_mean(_squares(y, x), widths, d), f"h = {h:.3g}, α = {alpha}"


def _widths(log_density: Array, h: float, alpha: float) -> Array:
    low = np.maximum(log_density, -700.0)
    return np.clip(h * np.exp(-alpha * (low - low.mean())), 1e-6, 1e6)


def _squares(y: Array, x: Array) -> Array:
    return np.maximum((y**2).sum(1)[:, None] - 2.0 * y @ x.T + (x**2).sum(1), 0.0).astype(np.float32)


def _log_mean(away: Array, widths: Array, d: int) -> Array:
    """The log of the mean over columns of normal densities of these widths, 500 rows at a time."""
    scale, constant = (-0.5 / widths**2).astype(np.float32), (-d * np.log(widths)).astype(np.float32)
    found = []
    for rows in np.split(away, range(500, len(away), 500)):
        logs = rows * scale + constant
        top = logs.max(1)
        found.append(top + np.log(np.exp(logs - top[:, None]).mean(1)))
    return np.concatenate(found).astype(float) - 0.5 * d * math.log(2.0 * math.pi)


def scipy(x: Array, limit: float) -> Fitted:
    """SciPy's gaussian_kde as it is."""
    from scipy import stats

    try:
        fitted = stats.gaussian_kde(x.T)
    except np.linalg.LinAlgError:
        raise Skipped("the covariance is singular") from None
    return lambda y: fitted.logpdf(y.T), f"h = {fitted.factor:.3g}"


def vine(x: Array, limit: float) -> Fitted:
    """pyvinecopulib's vine of local-likelihood pair copulas ("tll"), and its Kde1d margins."""
    try:
        import pyvinecopulib as pv
    except ImportError:
        raise Skipped("pyvinecopulib is not installed") from None
    fitted = pv.Vinedist.from_data(x, controls=pv.core.FitControlsVinecop(family_set=[pv.tll]))
    return fitted.logpdf, "tll"


def flow(x: Array, limit: float) -> Fitted:
    """zuko's NSF at its defaults: Adam, 1e-3, batches of 256, up to 60 epochs, the best on a tenth that is held out."""
    if len(x) < FLOW:
        raise Skipped(f"fewer than {FLOW:,} samples")
    try:
        import torch
        import zuko
    except ImportError:
        raise Skipped("zuko is not installed") from None
    torch.set_num_threads(1)
    torch.manual_seed(0)
    start, data = time.process_time(), torch.as_tensor(x, dtype=torch.float32)
    held, train = data[: len(data) // 10], data[len(data) // 10 :]
    model = zuko.flows.NSF(data.shape[1])
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-3)
    least, best, waited, epochs, late = math.inf, model.state_dict(), 0, 0, False
    while epochs < 60 and waited < 8 and not late:
        epochs += 1
        for batch in torch.randperm(len(train)).split(256):
            optimiser.zero_grad()
            (-model().log_prob(train[batch]).mean()).backward()
            optimiser.step()
        with torch.no_grad():
            loss = -model().log_prob(held).mean().item()
        waited = 0 if loss < least else waited + 1
        if loss < least:
            least, best = loss, {name: value.clone() for name, value in model.state_dict().items()}
        late = time.process_time() - start > limit
    model.load_state_dict(best)

    def log_density(y: Array) -> Array:
        with torch.no_grad():
            return model().log_prob(torch.as_tensor(y, dtype=torch.float32)).double().numpy()

    return log_density, f"{epochs} epochs" + ", out of time" * late


PEERS: dict[str, Callable[[Array, float], Fitted]] = {
    "GMM-BIC": mixture,
    "GMM-CV": mixture_left_out,
    "KDE-CV": cross_validated,
    "Abramson-CV": abramson,
    "SciPy": scipy,
    "vine": vine,
    "NSF": flow,
}
