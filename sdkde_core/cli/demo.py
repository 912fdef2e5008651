"""``sdkde demo``: debiased densities of real data. Imports scikit-learn and matplotlib when it runs."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..api import debias, estimate, explain
from ..bandwidth.rules import resolve
from ..estimator.request import METHODS
from ..storage import write_atomically
from .files import FileError, no_folder

__all__ = ["run_demo"]

Array = NDArray[Any]

COLOURS = {"kde": "#8d99ae", "sdkde": "#d1495b", "laplace": "#00798c"}


class Digits(NamedTuple):
    """The digits in principal components, which are fitted on the training part only."""

    train: Array  # (n, d)
    test: Array  # (m, d)
    labels: Array  # (n,) 0 … 9
    images: Array  # (m, 8, 8) of the test part


def load_digits(d: int = 16, seed: int = 0) -> Digits:
    """Return scikit-learn's 1797 digits, standardised, in ``d`` principal components; a fifth is held out."""
    try:
        from sklearn.datasets import load_digits as bundled
        from sklearn.decomposition import PCA
        from sklearn.model_selection import train_test_split
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler
    except ImportError as error:
        raise ImportError(
            f"the demo needs scikit-learn and matplotlib: pip install 'sdkde-core[demo]' ({error})"
        ) from error

    bunch = bundled()
    train, test, labels, _, _, images = train_test_split(
        bunch.data, bunch.target, bunch.images, test_size=0.2, random_state=seed
    )
    project = make_pipeline(StandardScaler(), PCA(d)).fit(train)
    return Digits(project.transform(train), project.transform(test), labels, images)


def run_demo(output: Path, backend: str, echo: Callable[[str], Any]) -> None:
    """Print the held-out likelihoods, the backend and the times; write the plot to ``output``.

    Raises
    ------
    ImportError
        scikit-learn or matplotlib is missing.
    BackendUnavailable
        The backend named cannot do it.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError(
            f"the demo needs scikit-learn and matplotlib: pip install 'sdkde-core[demo]' ({error})"
        ) from error
    matplotlib.use("Agg")
    from matplotlib.backend_bases import FigureCanvasBase

    if not output.parent.is_dir():
        raise no_folder(output)
    if output.suffix.lstrip(".").lower() not in FigureCanvasBase.filetypes:
        raise FileError(f"{output}: unknown extension {output.suffix!r}; pass one of .png, .pdf, .svg")
    data = load_digits()
    n, d = data.train.shape
    echo(f"Handwritten digits: {n} training and {len(data.test)} held-out images in {d} principal dimensions.\n")

    silverman = resolve("silverman", data.train)
    factors = np.geomspace(0.4, 2.4, 13)
    scores: dict[str, Array] = {}  # method -> (factors, held-out rows) log densities, NaN where p̂ < 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # Laplace's negative values are in the table
        for method in METHODS:
            scores[method] = np.array(
                [
                    estimate(
                        data.train, data.test, method=method, bandwidth=silverman.scaled(f), log=True, backend=backend
                    )
                    for f in factors
                ]
            )
    means = {method: np.nanmean(log, axis=1) for method, log in scores.items()}
    negative = np.isnan(scores["laplace"]).mean(axis=1)
    gain = scores["sdkde"] - scores["kde"]  # (factors, held-out rows), paired

    echo("Mean held-out log-likelihood, nats per image, by bandwidth in units of Silverman's (* best):")
    echo(f"{'h':>6} {'kde':>9} {'sdkde':>9} {'sdkde - kde':>13} {'laplace':>9}   left out of its mean: p < 0")
    best = {m: int(np.argmax(means[m])) for m in ("kde", "sdkde")}
    for i, f in enumerate(factors):
        cells = " ".join(f"{means[m][i]:8.2f}{'*' if i == best[m] else ' '}" for m in best)
        echo(f"{f:6.2f} {cells} {gain[i].mean():+13.3f} {means['laplace'][i]:9.2f}   {negative[i]:5.1%} of the images")
    echo("")
    best["laplace"] = best["sdkde"]

    for method in METHODS:
        chosen = silverman.scaled(factors[best[method]])
        e = explain(data.train, data.test, method=method, bandwidth=chosen, backend=backend, measure=True)
        if method == METHODS[0]:
            echo(f"backend: {e.backend} on {e.device}, {e.reason}")
            for c in e.candidates:
                echo(f"  {'→' if c.chosen else ' '} {c.name}: {c.reason}")
            echo("passes:")
        for p in e.passes:
            echo(f"  {method:8} {p.reduction:8} {p.m:5} × {p.n}: {(p.measured_seconds or 0.0) * 1e3:7.1f} ms")

    _plot(output, data, factors, means, gain, best["sdkde"], backend)
    echo(f"\nplot: {output}")


def _plot(
    output: Path, data: Digits, factors: Array, means: dict[str, Array], gain: Array, best: int, backend: str
) -> None:
    """Likelihood curves; the density of the first two dimensions with the debiasing moves; typical and odd digits."""
    import matplotlib.pyplot as plt

    with plt.rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}):
        figure = plt.figure(figsize=(15, 5.2), layout="constrained")
        left, middle, right = figure.subfigures(1, 3, width_ratios=[1.05, 1.05, 0.9])
        _plot_likelihoods(left.subplots(2, 1, sharex=True, height_ratios=[2.2, 1]), factors, means, gain)
        _plot_plane(middle.subplots(), data, backend)
        h = resolve("silverman", data.train).scaled(factors[best])
        _plot_ends(right, data.images, estimate(data.train, data.test, bandwidth=h, log=True, backend=backend))
        with write_atomically(output) as temporary, temporary.open("wb") as file:
            figure.savefig(file, format=output.suffix.lstrip("."), dpi=140)
        plt.close(figure)


def _plot_likelihoods(axes: Any, factors: Array, means: dict[str, Array], gain: Array) -> None:
    upper, lower = axes
    for method, mean in means.items():
        style = {"ls": ":", "lw": 1.4} if method == "laplace" else {"lw": 2.2}
        label = "laplace, only where positive" if method == "laplace" else method
        upper.plot(factors, mean, color=COLOURS[method], label=label, **style)
    top = max(means["kde"].max(), means["sdkde"].max())
    upper.set(ylim=(top - 7, top + 1.5), ylabel="nats per image", xscale="log")
    upper.set_title("Held-out log-likelihood of digits in 16 dimensions", loc="left", fontweight="bold")
    upper.legend(frameon=False, loc="lower center")
    mean, error = gain.mean(axis=1), gain.std(axis=1) / np.sqrt(gain.shape[1])
    lower.fill_between(factors, mean - error, mean + error, color=COLOURS["sdkde"], alpha=0.25, lw=0)
    lower.plot(factors, mean, color=COLOURS["sdkde"], lw=2.2)
    lower.axhline(0, color=COLOURS["kde"], lw=1)
    lower.set(xlabel="bandwidth / Silverman's", ylabel="sdkde − kde")
    lower.xaxis.set_major_formatter("{x:g}")
    lower.set_xticks([0.4, 0.6, 1.0, 1.5, 2.4], minor=False)
    lower.minorticks_off()


def _plot_plane(axes: Any, data: Digits, backend: str) -> None:
    points = data.train[:, :2]
    span = [np.linspace(points[:, k].min() - 1, points[:, k].max() + 1, 160) for k in (0, 1)]
    grid = np.stack(np.meshgrid(*span), axis=-1)
    density = estimate(points, grid.reshape(-1, 2), backend=backend).reshape(grid.shape[:2])
    axes.contourf(*span, density, levels=14, cmap="Reds", alpha=0.75)
    moved = debias(points, backend=backend)
    step = moved - points
    axes.quiver(*points.T, *step.T, angles="xy", scale_units="xy", scale=1, width=0.0022, color="#2b2d42", alpha=0.75)
    axes.set(xlabel="first principal component", ylabel="second")
    axes.set_title("Each sample moves half a mean-shift step", loc="left", fontweight="bold")


def _plot_ends(figure: Any, images: Array, log_density: Array) -> None:
    """The held-out images of the highest and of the lowest density."""
    order = np.argsort(-log_density)
    rows, columns = 3, 6
    figure.suptitle("Held-out digits of highest, lowest density", x=0.02, ha="left", fontsize=12, fontweight="bold")
    grid = figure.subplots(2 * rows, columns)
    picks = np.concatenate([order[: rows * columns], order[-rows * columns :]])
    for axes, i in zip(grid.ravel(), picks):
        high = i in order[: rows * columns]
        axes.imshow(images[i], cmap="Reds" if high else "Greys")
        axes.set(xticks=[], yticks=[])
        for spine in axes.spines.values():
            spine.set_visible(False)
        axes.set_title(f"{log_density[i]:.0f}", fontsize=7, pad=1.5, color="#555555")
