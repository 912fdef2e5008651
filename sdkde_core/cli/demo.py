"""``sdkde demo``: estimates of a known density and of real data. Imports scikit-learn and matplotlib when it runs."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..api import debias, estimate, explain, prepare
from ..bandwidth.matrix import Bandwidth
from ..bandwidth.rules import resolve
from ..estimator.request import METHODS
from ..files import FileError, no_folder
from ..interop.plots import COLOURS, DARK, STYLE
from ..storage import write_atomically

__all__ = ["run_demo"]

Array = NDArray[Any]


class Example(NamedTuple):
    """A known density in one dimension, its samples, and estimates at each method's own bandwidth."""

    points: Array  # (m,), evenly spaced
    truth: Array  # (m,)
    estimates: dict[str, Array]  # by method, (m,)
    multiples: dict[str, float]  # by method: its bandwidth over Silverman's
    silverman: Array  # (m,) kde with Silverman's bandwidth

    def error(self, values: Array) -> float:
        """The integrated squared error."""
        return float(np.sum((values - self.truth) ** 2) * (self.points[1] - self.points[0]))

    def negative(self, values: Array) -> float:
        """The mass below zero."""
        return float(np.sum(np.maximum(-values, 0)) * (self.points[1] - self.points[0]))


class Digits(NamedTuple):
    """The digits in principal components, which are fitted on the training part only."""

    train: Array  # (n, d)
    test: Array  # (m, d)
    images: Array  # (m, 8, 8) of the test part


class Score(NamedTuple):
    """What a method makes of the held-out digits."""

    curve: Array  # mean log density for every factor; NaN where one is not positive
    missed: Array  # for every factor the share of the images where the density is not positive
    bandwidth: Bandwidth  # the method's own
    multiple: float  # of Silverman's
    logs: Array  # (m,) log densities at the method's own bandwidth, NaN where not positive


FACTORS = np.geomspace(0.4, 2.4, 13)  # of Silverman's bandwidth


def fit_example(backend: str, n: int = 4000, seed: int = 0) -> Example:
    """Estimate Marron and Wand's separated bimodal density, two normals of standard deviation 0.5 at ±1.5."""
    rng = np.random.default_rng(seed)
    samples = rng.choice([-1.5, 1.5], n) + 0.5 * rng.normal(size=n)
    points = np.linspace(-4, 4, 801)
    truth = sum(np.exp(-2 * (points - mode) ** 2) for mode in (-1.5, 1.5)) / np.sqrt(2 * np.pi)
    fits = {method: prepare(samples, method=method, bandwidth="auto", backend=backend) for method in METHODS}
    base = resolve("silverman", samples[:, None])
    estimates = {method: fit.estimate(points) for method, fit in fits.items()}
    silverman = estimate(samples, points, method="kde", bandwidth=base, backend=backend)
    return Example(points, truth, estimates, {m: _over(fit.bandwidth, base) for m, fit in fits.items()}, silverman)


def load_digits(d: int = 16, seed: int = 0) -> Digits:
    """Return scikit-learn's 1797 digits in ``d`` principal components; a fifth is held out.

    Pixels share a unit, so they are not standardised: that would blow up those that are hardly ever inked.
    """
    try:
        from sklearn.datasets import load_digits as bundled
        from sklearn.decomposition import PCA
        from sklearn.model_selection import train_test_split
    except ImportError as error:
        raise ImportError(
            f"the demo needs scikit-learn and matplotlib: pip install 'sdkde-core[demo]' ({error})"
        ) from error

    bunch = bundled()
    train, test, _, images = train_test_split(bunch.data, bunch.images, test_size=0.2, random_state=seed)
    project = PCA(d).fit(train)
    return Digits(project.transform(train), project.transform(test), images)


def score_digits(data: Digits, backend: str) -> dict[str, Score]:
    """Evaluate every method at multiples of Silverman's bandwidth and at its own."""
    silverman, result = resolve("silverman", data.train), {}
    for method in METHODS:
        fit = prepare(data.train, method=method, bandwidth="auto", backend=backend)
        asked = [*(silverman.scaled(factor) for factor in FACTORS), fit.bandwidth]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # Laplace's negative values are told in the table
            logs = np.array(
                [estimate(data.train, data.test, method=method, bandwidth=h, log=True, backend=backend) for h in asked]
            )
        missed = np.isnan(logs).mean(axis=1)
        multiple = _over(fit.bandwidth, silverman)
        result[method] = Score(logs[:-1].mean(axis=1), missed, fit.bandwidth, multiple, logs[-1])
    return result


def _over(bandwidth: Bandwidth, base: Bandwidth) -> float:
    """One bandwidth over another: the geometric mean over directions."""
    return float(np.exp((bandwidth.log_determinant - base.log_determinant) / base.d))


def run_demo(output: Path, backend: str, echo: Callable[[str], Any]) -> None:
    """Print errors, held-out likelihoods, the backend and the times; write the plot to ``output``.

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
    digits = load_digits()
    example = fit_example(backend)
    _tell_example(example, echo)
    scores = score_digits(digits, backend)
    _tell_digits(digits, scores, echo)
    _tell_passes(digits, scores, backend, echo)
    _plot(output, example, digits, scores, backend)
    echo(f"\nplot: {output}")


def _tell_example(example: Example, echo: Callable[[str], Any]) -> None:
    echo("Two normals, 4000 samples, the density known. h in units of Silverman's; ISE: integrated squared error.")
    echo(f"{'':26} {'h':>5} {'ISE × 1000':>11}   mass below zero")
    for name, multiple, values in [
        ("kde, Silverman's rule", 1.0, example.silverman),
        *((f"{m}, its own bandwidth", example.multiples[m], example.estimates[m]) for m in METHODS),
    ]:
        echo(f"{name:26} {multiple:5.2f} {1e3 * example.error(values):11.2f}   {example.negative(values):.2%}")
    echo("")


def _tell_digits(data: Digits, scores: dict[str, Score], echo: Callable[[str], Any]) -> None:
    n, d = data.train.shape
    kde, sdkde, laplace = (scores[method] for method in ("kde", "sdkde", "laplace"))
    echo(f"Handwritten digits: {n} training and {len(data.test)} held-out images in {d} principal dimensions.")
    echo("Mean held-out log-likelihood, nats per image; h in units of Silverman's. * with the method's own bandwidth,")
    echo("which may have another shape: its h is the mean over directions.")
    echo(f"{'h':>6}  {'kde':>8}  {'sdkde':>8}    laplace: images where its density is not positive")
    for factor, left, right, missed in zip(FACTORS, kde.curve, sdkde.curve, laplace.missed):
        echo(f"{factor:6.2f}  {left:8.2f}  {right:8.2f}    {missed:.1%}")
    own = f"kde {kde.logs.mean():.2f}* at {kde.multiple:.2f}, sdkde {sdkde.logs.mean():.2f}* at {sdkde.multiple:.2f}"
    echo(f"{own}; laplace {laplace.missed[-1]:.1%} not positive at {laplace.multiple:.2f}\n")


def _tell_passes(data: Digits, scores: dict[str, Score], backend: str, echo: Callable[[str], Any]) -> None:
    for method, score in scores.items():
        h = score.bandwidth
        e = explain(data.train, data.test, method=method, bandwidth=h, backend=backend, measure=True)
        if method == METHODS[0]:
            echo(f"backend: {e.backend} on {e.device}, {e.reason}")
            for c in e.candidates:
                echo(f"  {'→' if c.chosen else ' '} {c.name}: {c.reason}")
            echo("passes:")
        for p in e.passes:
            echo(f"  {method:8} {p.reduction:8} {p.m:5} × {p.n}: {(p.measured_seconds or 0.0) * 1e3:7.1f} ms")


def _plot(output: Path, example: Example, data: Digits, scores: dict[str, Score], backend: str) -> None:
    """The known density with its errors; the debiasing moves; likelihoods of the digits; typical and odd ones."""
    import matplotlib.pyplot as plt

    with plt.rc_context(STYLE):
        figure = plt.figure(figsize=(13, 10), layout="constrained")
        (known, moves), (likelihoods, ends) = figure.subfigures(2, 2, wspace=0.03, hspace=0.03)
        _plot_example(known.subplots(2, 1, sharex=True, height_ratios=[1.4, 1]), example)
        _plot_plane(moves.subplots(), data, backend)
        _plot_likelihoods(likelihoods.subplots(2, 1, sharex=True, height_ratios=[2.2, 1]), scores)
        _plot_ends(ends, data.images, scores["sdkde"].logs)
        with write_atomically(output) as temporary, temporary.open("wb") as file:
            figure.savefig(file, format=output.suffix.lstrip("."), dpi=120)
        plt.close(figure)


def _plot_example(axes: Any, example: Example) -> None:
    upper, lower = axes
    upper.fill_between(example.points, example.truth, color="#e9ecef", label="true density")
    styles: dict[str, dict[str, Any]] = {"kde": {"lw": 2.2}, "sdkde": {"lw": 2.2}, "laplace": {"lw": 1.2, "ls": "--"}}
    curves = [("kde, Silverman's h", example.silverman, {"color": DARK, "lw": 1.2, "ls": ":"})]
    curves += [(m, example.estimates[m], {"color": COLOURS[m], **styles[m]}) for m in METHODS]
    for name, values, style in curves:
        upper.plot(example.points, values, **style)
        label = f"{name}: {1e3 * example.error(values):.2f}"
        lower.plot(example.points, values - example.truth, label=label, **style)
    upper.set(ylabel="density", ylim=(0, None))
    upper.set_title("A density that is known: each method at its own bandwidth", loc="left", fontweight="bold")
    upper.legend(frameon=False, loc="upper right")
    lower.axhline(0, color="#adb5bd", lw=0.8, zorder=0)
    lower.set(ylabel="estimate − truth", xlim=(-4, 4))
    lower.legend(
        frameon=False,
        fontsize=9,
        title="integrated squared error × 1000",
        loc="upper center",
        bbox_to_anchor=(0.5, -0.08),
        ncols=4,
    )


def _plot_likelihoods(axes: Any, scores: dict[str, Score]) -> None:
    upper, lower = axes
    for method in ("kde", "sdkde"):
        score = scores[method]
        upper.plot(FACTORS, score.curve, color=COLOURS[method], label=method, lw=2.2)
        upper.plot(score.multiple, score.logs.mean(), "o", color=COLOURS[method], ms=9, mec="white")
    upper.plot([], [], "o", color=DARK, ms=9, mec="white", label="its own bandwidth")
    top = max(scores["kde"].curve.max(), scores["sdkde"].curve.max())
    upper.set(ylim=(top - 7, top + 1), ylabel="nats per image", xscale="log")
    upper.set_title("Held-out log-likelihood of digits in 16 dimensions", loc="left", fontweight="bold")
    upper.legend(frameon=False, loc="lower center")
    laplace = scores["laplace"]
    lower.plot(FACTORS, 100 * laplace.missed[:-1], color=COLOURS["laplace"], lw=2.2)
    lower.plot(laplace.multiple, 100 * laplace.missed[-1], "o", color=COLOURS["laplace"], ms=9, mec="white")
    lower.set(xlabel="bandwidth / Silverman's", ylabel="% of the images", ylim=(0, None))
    lower.set_title("laplace is signed: not positive at", loc="left", fontsize=10, color=COLOURS["laplace"])
    lower.xaxis.set_major_formatter("{x:g}")
    lower.set_xticks([0.4, 0.6, 1.0, 1.5, 2.4], minor=False)
    lower.minorticks_off()


def _plot_plane(axes: Any, data: Digits, backend: str) -> None:
    points = data.train[:, :2]
    fit = prepare(points, bandwidth="auto", backend=backend)
    span = [np.linspace(points[:, k].min() - 1, points[:, k].max() + 1, 160) for k in (0, 1)]
    grid = np.stack(np.meshgrid(*span), axis=-1)
    axes.contourf(*span, fit.estimate(grid.reshape(-1, 2)).reshape(grid.shape[:2]), levels=14, cmap="Reds", alpha=0.75)
    step = debias(points, bandwidth=fit.bandwidth, backend=backend) - points
    axes.quiver(*points.T, *step.T, angles="xy", scale_units="xy", scale=1, width=0.0022, color=DARK, alpha=0.75)
    axes.set(xlabel="first principal component of the digits", ylabel="second")
    axes.set_title("sdkde: each sample moves half a mean-shift step", loc="left", fontweight="bold")


def _plot_ends(figure: Any, images: Array, log_density: Array) -> None:
    """The held-out images of the highest and of the lowest density."""
    order = np.argsort(-log_density)
    rows, columns = 3, 8
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
