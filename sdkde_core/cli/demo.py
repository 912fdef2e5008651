"""``sdkde demo``: estimates of a known density and of real data. Imports scikit-learn and matplotlib when it runs."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ..api import estimate, explain, prepare
from ..arrays import Array
from ..bandwidth.matrix import Bandwidth
from ..bandwidth.rules import resolve
from ..estimator.request import METHODS
from ..interop.plots import COLOURS, DARK, contours, moves
from ..messages import optional
from .data import picture


def run_demo(output: Path, backend: str, echo: Callable[[str], Any]) -> None:
    """Print errors, held-out likelihoods, the backend and the times; write the plot to ``output``."""
    needs = "the demo needs scikit-learn and matplotlib", "demo"
    optional("sklearn", *needs)
    from sklearn.datasets import load_digits
    from sklearn.decomposition import PCA
    from sklearn.model_selection import train_test_split

    with picture(output, needs, dpi=120) as pyplot:
        known, likelihoods, plane = pyplot.figure(figsize=(17, 5.2), layout="constrained").subfigures(1, 3, wspace=0.03)
        _example(known.subplots(2, 1, sharex=True, height_ratios=[1.4, 1]), backend, echo)
        # Pixels share a unit, so they are not standardised: that would blow up those that are hardly ever inked.
        train, test = train_test_split(load_digits().data, test_size=0.2, random_state=0)
        project = PCA(16).fit(train)
        train, test = project.transform(train), project.transform(test)
        own = _digits(likelihoods.subplots(), train, test, backend, echo)["sdkde"]
        echo(str(explain(train, test, bandwidth=own, backend=backend, measure=True)))
        fit = prepare(train[:, :2], bandwidth="auto", backend=backend)
        axes = moves(fit, train[:, :2], ax=contours(fit, ax=plane.subplots()))
        axes.set(xlabel="first principal component of the digits", ylabel="second")
        axes.set_title("Each sample moves half a mean-shift step", loc="left", fontweight="bold")
    echo(f"\nplot: {output}")


def _over(bandwidth: Bandwidth, base: Bandwidth) -> float:
    """One bandwidth over another: the geometric mean over directions."""
    return float(np.exp((bandwidth.log_determinant - base.log_determinant) / base.d))


def _example(axes: Any, backend: str, echo: Callable[[str], Any]) -> None:
    """Marron and Wand's separated bimodal density, two normals of standard deviation 0.5 at ±1.5, and its estimates."""
    rng = np.random.default_rng(0)
    samples = rng.choice([-1.5, 1.5], 4000) + 0.5 * rng.normal(size=4000)
    points = np.linspace(-4, 4, 801)
    truth = sum(np.exp(-2 * (points - mode) ** 2) for mode in (-1.5, 1.5)) / np.sqrt(2 * np.pi)
    base: Any = resolve("silverman", samples[:, None])
    style = {"color": DARK, "lw": 1.2, "ls": ":"}
    rows: list[tuple[Any, ...]] = [("kde, Silverman's rule", "kde, Silverman's h", "kde", base, style)]
    for method in METHODS:
        line = {"color": COLOURS[method], **({"lw": 1.2, "ls": "--"} if method == "laplace" else {"lw": 2.2})}
        rows.append((f"{method}, its own bandwidth", method, method, "auto", line))
    echo("Two normals, 4000 samples, the density known. h in units of Silverman's; ISE: integrated squared error.")
    echo(f"{'':26} {'h':>5} {'ISE × 1000':>11}   mass below zero")
    upper, lower = axes
    upper.fill_between(points, truth, color="#e9ecef", label="true density")
    for name, label, method, bandwidth, line in rows:
        fit = prepare(samples, method=method, bandwidth=bandwidth, backend=backend)
        multiple, values = _over(fit.bandwidth, base), fit.estimate(points)
        error, below = (0.01 * float(x.sum()) for x in ((values - truth) ** 2, np.maximum(-values, 0)))
        echo(f"{name:26} {multiple:5.2f} {1e3 * error:11.2f}   {below:.2%}")
        upper.plot(points, values, **line)
        lower.plot(points, values - truth, label=f"{label}: {1e3 * error:.2f}", **line)
    echo("")
    upper.set(ylabel="density", ylim=(0, None))
    upper.set_title("Two normals: each method at its own bandwidth", loc="left", fontweight="bold")
    upper.legend(frameon=False, loc="upper right")
    lower.axhline(0, color="#adb5bd", lw=0.8, zorder=0)
    lower.set(ylabel="estimate − truth", xlim=(-4, 4))
    title = "integrated squared error × 1000"
    lower.legend(frameon=False, fontsize=9, title=title, loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=2)


def _digits(axes: Any, train: Array, test: Array, backend: str, echo: Callable[[str], Any]) -> dict[str, Bandwidth]:
    """Print and plot log densities by multiple of Silverman's bandwidth; return each method's own one."""
    factors, silverman = np.geomspace(0.4, 2.4, 13), resolve("silverman", train)
    own = {method: prepare(train, method=method, bandwidth="auto", backend=backend).bandwidth for method in METHODS}
    over, logs = {method: _over(h, silverman) for method, h in own.items()}, {}
    for method in METHODS:
        asked = [*(silverman.scaled(factor) for factor in factors), own[method]]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # the table has Laplace's negative values
            how: Any = {"method": method, "log": True, "backend": backend}
            logs[method] = np.array([estimate(train, test, bandwidth=h, **how) for h in asked])
    kde, sdkde, missed = logs["kde"].mean(axis=1), logs["sdkde"].mean(axis=1), np.isnan(logs["laplace"]).mean(axis=1)
    n, d = train.shape
    echo(f"Handwritten digits: {n} training and {len(test)} held-out images in {d} principal dimensions.")
    echo("Mean held-out log-likelihood, nats per image; h in units of Silverman's. * with the method's own bandwidth,")
    echo("which may have another shape: its h is the mean over directions.")
    echo(f"{'h':>6}  {'kde':>8}  {'sdkde':>8}    laplace: images where its density is not positive")
    for factor, left, right, share in zip(factors, kde, sdkde, missed):
        echo(f"{factor:6.2f}  {left:8.2f}  {right:8.2f}    {share:.1%}")
    best = f"kde {kde[-1]:.2f}* at {over['kde']:.2f}, sdkde {sdkde[-1]:.2f}* at {over['sdkde']:.2f}"
    echo(f"{best}; laplace {missed[-1]:.1%} not positive at {over['laplace']:.2f}\n")
    for method, means in (("kde", kde), ("sdkde", sdkde)):
        axes.plot(factors, means[:-1], color=COLOURS[method], label=method, lw=2.2)
        axes.plot(over[method], means[-1], "o", color=COLOURS[method], ms=9, mec="white")
    axes.plot([], [], "o", color=DARK, ms=9, mec="white", label="its own bandwidth")
    top = max(kde.max(), sdkde.max())
    axes.set(ylim=(top - 8, top + 0.5), ylabel="nats per image", xlabel="bandwidth / Silverman's")
    axes.set_title("Held-out log-likelihood of digits, d = 16", loc="left", fontweight="bold")
    axes.legend(frameon=False, loc="lower center")
    return own
