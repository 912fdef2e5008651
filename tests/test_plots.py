"""Plots show what the densities say: their content is compared, not their looks."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from strange import Frame

from sdkde_core import debias, load, plots, prepare, select_bandwidth
from sdkde_core.estimator.request import METHODS

pytest.importorskip("matplotlib")
from matplotlib import pyplot
from matplotlib.contour import ContourSet
from matplotlib.figure import Figure
from matplotlib.quiver import Quiver

DOCS = Path(__file__).parent.parent / "docs"
FAST = {"backend": "numpy", "bandwidth": 0.4}


@pytest.fixture(autouse=True)
def _nothing_left(monkeypatch):
    """A display is never asked for; what is drawn into given axes leaves pyplot alone."""
    monkeypatch.setenv("MPLBACKEND", "Agg")
    pyplot.switch_backend("Agg")
    pyplot.close("all")  # those of other tests
    before = dict(pyplot.rcParams)
    yield
    assert dict(pyplot.rcParams) == before
    assert not pyplot.get_fignums()


@pytest.fixture
def ax():
    return Figure().subplots()


@pytest.fixture(scope="module")
def x():
    rng = np.random.default_rng(5)
    return rng.normal(size=(500, 3)) * [1, 2, 0.5] + rng.choice([-2, 2], (500, 1)) * [1, 0, 0.5]


def label_of(artist):
    return str(artist.get_label())


def lines(ax):
    return {label_of(line): line for line in ax.get_lines()}


def contour_sets(ax, filled=False):
    return [c for c in ax.collections if isinstance(c, ContourSet) and c.filled == filled and not any(c.hatches)]


def test_curves_are_the_estimates(ax, x):
    densities = {m: prepare(x[:, 0], method=m, **FAST) for m in METHODS}
    assert plots.curves(densities, x[:, 0], ax=ax) is ax
    drawn = lines(ax)
    for name, density in densities.items():
        at, values = drawn[name].get_data()
        np.testing.assert_array_equal(values, density.estimate(at))
        np.testing.assert_allclose(np.trapezoid(values, at), 1, rtol=1e-3)  # the range leaves little out
        assert np.diff(at).max() < 0.4 / 4  # and the steps resolve the bandwidth
    rug = drawn["_samples"].get_xdata()
    assert set(rug) <= set(x[:, 0]) and len(rug) > 0.98 * len(x)
    assert {t.get_text() for t in ax.get_legend().get_texts()} >= {*METHODS, "laplace < 0"}


def test_the_negative_part_is_marked(ax, x):
    densities = {m: prepare(x[:, 0], method=m, **FAST) for m in METHODS}
    plots.curves(densities, ax=ax)
    (marked,) = [c for c in ax.collections if label_of(c).endswith("< 0")]
    at, values = lines(ax)["laplace"].get_data()
    corners = np.concatenate([path.vertices for path in marked.get_paths()])
    assert label_of(marked) == "laplace < 0" and corners[:, 1].max() < 1e-12
    np.testing.assert_allclose(corners[:, 1].min(), values.min())
    assert np.isin(at[values < 0], corners[:, 0]).all() and not np.isin(at[values > 0], corners[:, 0]).any()


def test_heavy_tails_do_not_stretch_a_plot(ax):
    samples = np.append(np.random.default_rng(0).normal(size=2000), [1e6, -1e6])
    plots.curves(prepare(samples, **FAST), samples, ax=ax)
    low, high = ax.get_xlim()
    assert -8 < low < -3 and 3 < high < 8
    plots.curves(prepare(samples, **FAST), limits=(-20, 30), ax=ax)
    assert ax.get_xlim() == (-20, 30)


def test_samples_without_weight_do_not_stretch_a_plot(ax):
    samples, weights = [0.0, 1.0, 100.0], [1.0, 1.0, 0.0]
    plots.curves(prepare(samples, method="kde", weights=weights, **FAST), ax=ax)
    np.testing.assert_allclose(ax.get_xlim(), [-1.6, 2.6])  # four bandwidths beyond the others


def test_a_scatter_has_every_point_in_its_colour_the_densest_last(ax, x):
    density = prepare(x[:, :2], **FAST)
    for given, options in ((density, {}), (None, FAST)):
        assert plots.scatter(x[:, :2], given, ax=ax, colorbar=given is None, **options) is ax
        drawn, values = ax.collections[-1], density.estimate(x[:, :2])
        np.testing.assert_array_equal(drawn.get_array(), np.sort(values))
        np.testing.assert_array_equal(drawn.get_offsets(), x[np.argsort(values, kind="stable"), :2])
        assert drawn.get_rasterized() and len(ax.figure.axes) == 1 + (given is None)
    plots.scatter(np.empty((0, 2)), density, ax=ax)
    with pytest.raises(ValueError, match=r"points has shape \(500, 3\).*pass shape \(n, 2\)"):
        plots.scatter(x, density, ax=ax)
    with pytest.raises(TypeError, match="bandwidth= is for the density of the points"):
        plots.scatter(x[:, :2], density, ax=ax, bandwidth=1.0)
    with pytest.raises(TypeError, match="density is of type dict; pass what"):
        plots.scatter(x[:, :2], {"one": density}, ax=ax)


def test_axes_have_the_names_of_the_columns_unless_they_have_labels(ax, x, tmp_path):
    prepare(Frame(x[:, :2], names=["east", "north"]), **FAST).save(tmp_path / "map.sdkde")
    density = load(tmp_path / "map.sdkde")
    frame = Frame(x[:, :2], names=["east", "north"])
    for draw in (
        lambda at: plots.contours(density, ax=at),
        lambda at: plots.moves(density, x[:, :2], ax=at),
        lambda at: plots.scatter(frame, density, ax=at, colorbar=False),
        lambda at: plots.scatter(frame, ax=at, colorbar=False, **FAST),
    ):
        at = draw(Figure().subplots())
        assert (at.get_xlabel(), at.get_ylabel()) == ("east", "north")
    plots.curves(density.marginal("north"), ax=ax)
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("north", "density")
    ax.set(xlabel="mine", ylabel="")
    plots.contours(density, ax=ax)
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("mine", "north")


def test_of_many_samples_some_are_drawn(ax):
    samples = np.random.default_rng(0).normal(size=5001)
    plots.curves(prepare(samples, method="kde", **FAST), samples, ax=ax)
    rug = lines(ax)["_samples"].get_xdata()
    assert 1500 < len(rug) <= 2000 and set(rug) <= set(samples)


def test_levels_enclose_their_shares_of_a_normal_density(ax):
    """Of a normal density in two dimensions the region with the share s is where p̂ > (1 − s) max p̂."""
    h = np.array([[4.0, 1.0], [1.0, 9.0]])
    plots.contours(prepare([[1.0, -1.0]], method="kde", bandwidth=h), shares=[0.9, 0.3], ax=ax)
    (found,) = contour_sets(ax)
    peak = 1 / (2 * np.pi * np.sqrt(np.linalg.det(h)))
    np.testing.assert_allclose(found.levels, [0.1 * peak, 0.7 * peak], rtol=0.02)
    (filled,) = contour_sets(ax, filled=True)
    np.testing.assert_array_equal(filled.levels[:-1], found.levels)
    assert {t.get_text() for t in found.labelTexts} == {"90%", "30%"}


@pytest.mark.parametrize("method", METHODS)
def test_levels_enclose_their_shares(ax, x, method):
    """Judged by a finer and wider grid, also of the signed estimate."""
    density = prepare(x[:, :2], method=method, **FAST)
    plots.contours(density, ax=ax)
    (found,) = contour_sets(ax)
    step = 0.1
    grid = np.stack(np.meshgrid(np.arange(-8, 8, step), np.arange(-11, 11, step)), axis=-1).reshape(-1, 2)
    values = density.estimate(grid)
    enclosed = [values[values >= level].sum() * step**2 for level in found.levels]
    np.testing.assert_allclose(enclosed, [0.95, 0.8, 0.5], atol=0.004)


def test_contours_of_several_densities_are_lines(ax, x):
    densities = {m: prepare(x[:, :2], method=m, **FAST) for m in METHODS}
    plots.contours(densities, x[:, :2], ax=ax)
    assert len(contour_sets(ax)) == 3 and not contour_sets(ax, filled=True)
    assert set(densities) | {"_samples"} == set(lines(ax))
    hatched = [c for c in ax.collections if isinstance(c, ContourSet) and any(c.hatches)]
    assert len(hatched) == 1 and hatched[0].levels[-1] < 0  # of laplace


def test_arrows_are_the_moves(ax, x):
    weights = np.where(np.arange(500) % 7 == 0, 0.0, 1.0)
    density = prepare(x[:, :2], weights=weights, **FAST)
    assert plots.moves(density, x[:, :2], ax=ax) is ax
    (arrows,) = [c for c in ax.collections if isinstance(c, Quiver)]
    np.testing.assert_array_equal(arrows.get_offsets(), x[:, :2])
    moved = debias(x[:, :2], weights=weights, **FAST)
    step = np.stack([arrows.U, arrows.V], axis=-1)
    np.testing.assert_allclose(x[:, :2] + step, moved, rtol=1e-9, atol=1e-9)
    assert arrows.scale == 1 and arrows.angles == "xy" and arrows.scale_units == "xy"


def test_arrows_of_a_marginal_are_its_dimensions(ax, x):
    plots.moves(prepare(x, **FAST).marginal((2, 0)), x[:, [2, 0]], ax=ax)
    (arrows,) = [c for c in ax.collections if isinstance(c, Quiver)]
    step = np.stack([arrows.U, arrows.V], axis=-1)
    np.testing.assert_allclose(x[:, [2, 0]] + step, debias(x, **FAST)[:, [2, 0]], rtol=1e-9, atol=1e-9)


def test_pairs_are_the_marginals(x):
    figure, densities = Figure(), {m: prepare(x, method=m, **FAST) for m in ("kde", "sdkde")}
    assert plots.pairs(densities, x, labels=["a", "b"], dims=[2, 0], figure=figure) is figure
    a, b, c = figure.axes
    for ax, dim in ((a, 2), (c, 0)):
        for name, density in densities.items():
            at, values = lines(ax)[name].get_data()
            np.testing.assert_array_equal(values, density.marginal(dim).estimate(at))
    alone = plots.contours({m: d.marginal((2, 0)) for m, d in densities.items()}, ax=Figure().subplots())
    for here, there in zip(contour_sets(b), contour_sets(alone)):
        np.testing.assert_array_equal(here.levels, there.levels)
    dots = np.array(lines(b)["_samples"].get_data()).T
    assert {tuple(row) for row in dots} <= {tuple(row) for row in x[:, [2, 0]]}
    assert (b.get_xlabel(), b.get_ylabel(), c.get_xlabel(), a.get_ylabel()) == ("a", "b", "b", "a")
    assert b.get_ylim() == c.get_xlim() and b.get_xlim() == a.get_xlim()


def test_pairs_of_a_data_frame_have_its_names(x):
    frame, figure = Frame(x, ["a", "b", "c"]), Figure()
    plots.pairs(prepare(frame, **FAST), frame, dims=["c", "a"], figure=figure)
    _, below, last = figure.axes
    assert (below.get_xlabel(), below.get_ylabel(), last.get_xlabel()) == ("c", "a", "a")
    assert set(lines(last)["_samples"].get_xdata()) <= set(x[:, 0])


@pytest.mark.parametrize("method", METHODS)
def test_the_selectors_curve(ax, x, method):
    chosen = select_bandwidth(x[:, 0], method=method)
    found = chosen.selection
    density = prepare(x[:, 0], method=method, bandwidth=chosen)
    for one in (chosen, found, density):
        ax.clear()
        assert plots.selection(one, ax=ax) is ax
        drawn = lines(ax)
        for name, curve in (("least squares", found.least_squares), ("likelihood", found.likelihood)):
            if np.isfinite(curve).all():
                np.testing.assert_array_equal(drawn[name].get_xdata(), found.multiples)
                np.testing.assert_allclose(drawn[name].get_ydata() * curve.max(), curve)
        assert ("likelihood" in drawn) == (method != "laplace")
        assert set(drawn[f"auto: {found.multiple:.3g}"].get_xdata()) == {found.multiple}


def test_without_axes_there_is_a_figure(x):
    for draw in (plots.curves, plots.contours, plots.pairs):
        made = draw(prepare(x[:, 0] if draw is plots.curves else x[:, :2], **FAST))
        figure = made if draw is plots.pairs else made.figure
        assert pyplot.get_fignums() == [figure.number]
        pyplot.close(figure)


def test_importing_and_drawing_without_pyplot():
    """Nor without a display."""
    code = """
import sys, sdkde_core
from sdkde_core import plots
assert plots is sdkde_core.plots and not {"matplotlib"} & set(sys.modules)
from matplotlib.figure import Figure
density = sdkde_core.prepare([[0.0, 1.0], [1.0, 3.0]], bandwidth=1.0, backend="numpy")
axes = Figure().subplots(2)
plots.moves(density, [[0.0, 1.0], [1.0, 3.0]], ax=plots.contours(density, ax=axes[0]))
plots.curves(sdkde_core.prepare([0.0, 1.0], bandwidth=1.0, backend="numpy"), ax=axes[1])
assert "matplotlib.pyplot" not in sys.modules
plots.contours(density).figure.savefig(sys.argv[1])
"""
    environment = {k: v for k, v in os.environ.items() if k not in ("DISPLAY", "WAYLAND_DISPLAY", "MPLBACKEND")}
    subprocess.run([sys.executable, "-c", code, os.devnull], env=environment, check=True)


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch, x):
    one, two = prepare(x[:, 0], **FAST), prepare(x[:, :2], **FAST)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for draw in (
        lambda: plots.curves(one),
        lambda: plots.contours(two),
        lambda: plots.moves(two, x[:, :2]),
        lambda: plots.pairs(two),
        lambda: plots.selection(select_bandwidth(x[:, 0])),
    ):
        with pytest.raises(ImportError, match=r"pip install 'sdkde-core\[plot\]'"):
            draw()


@pytest.mark.parametrize(
    ("draw", "error", "words"),
    [
        (lambda one, two, x: plots.curves(two), ValueError, "2 dimensions instead of 1; pass density.marginal"),
        (lambda one, two, x: plots.contours({"a": two, "b": one}), ValueError, r"densities\['b'\] has 1 dimensions"),
        (lambda one, two, x: plots.curves(x), TypeError, "densities is of type ndarray; pass what .*prepare"),
        (lambda one, two, x: plots.curves({}), TypeError, "densities is an empty dict"),
        (lambda one, two, x: plots.pairs({"a": x}), TypeError, r"densities\['a'\] is of type ndarray"),
        (lambda one, two, x: plots.pairs({"a": one, "b": two}), ValueError, "2 dimensions instead of 1"),
        (lambda one, two, x: plots.curves(one, x), ValueError, r"samples has shape \(500, 3\).*pass shape \(n, 1\)"),
        (lambda one, two, x: plots.curves(one, limits=(1, 0)), ValueError, "limits is .*the lower one first"),
        (lambda one, two, x: plots.contours(two, shares=[0.5, 1.0]), ValueError, "between 0 and 1"),
        (lambda one, two, x: plots.contours(two, shares=[]), ValueError, "between 0 and 1"),
        (lambda one, two, x: plots.moves(two, x[:9, :2]), ValueError, "samples are 9, but density .* from 500"),
        (lambda one, two, x: plots.moves(one, x[:, 0]), ValueError, "1 dimensions instead of 2"),
        (lambda one, two, x: plots.moves(prepare(x[:, :2], method="kde"), x[:, :2]), ValueError, "'kde', which moves"),
        (lambda one, two, x: plots.pairs(prepare(np.c_[x, x, x], **FAST)), ValueError, "9 dimensions, too many.*dims="),
        (lambda one, two, x: plots.pairs(two, dims=[0, 2]), ValueError, "dims has 2; pass indices"),
        (lambda one, two, x: plots.pairs(two, dims=[0, 0]), ValueError, "dims is .*each once"),
        (lambda one, two, x: plots.pairs(two, labels=["a"]), ValueError, "labels are 1, but 2"),
        (lambda one, two, x: plots.selection(one), ValueError, "pass sdkde_core.select_bandwidth"),
        (lambda one, two, x: plots.selection(x), TypeError, "chosen is of type ndarray"),
    ],
)
def test_errors_say_what_to_pass(x, draw, error, words):
    one, two = prepare(x[:, 0], **FAST), prepare(x[:, :2], **FAST)
    with pytest.raises(error, match=words):
        draw(one, two, x)


def test_the_gallerys_code_runs():
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / "plots.md").read_text(encoding="utf-8"), re.S)
    here = {}
    for block in blocks:
        exec(compile(block, "docs/plots.md", "exec"), here)
    assert len(pyplot.get_fignums()) == len(blocks) == 6
    pyplot.close("all")


def test_the_gallerys_pictures_are_small_and_made_by_the_script():
    text = "".join(
        (DOCS.parent / page).read_text(encoding="utf-8") for page in ("docs/plots.md", "docs/support.md", "README.md")
    )
    script = (DOCS / "pictures.py").read_text(encoding="utf-8")
    names = re.findall(r'^    "([a-z-]+)": \w+,$', script, re.M)
    assert len(names) == 7
    for name in names:
        assert f"{name}.png" in text, name
        assert 5_000 < (DOCS / f"{name}.png").stat().st_size < 60_000, name


def test_scatter_takes_data_frames():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(np.random.default_rng(0).normal(size=(50, 2)), columns=["u", "v"])
    ax = plots.scatter(frame, bandwidth=0.5)
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("u", "v") and len(ax.collections[-1].get_array()) == 50
    pyplot.close("all")


def test_contours_of_a_stack_are_where_the_samples_are(ax):
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.normal(size=(80, 2)), [[6.0, 0.0], [0.0, -6.0]]]) * [1.0, 30.0]
    plots.contours(prepare(x, method="stacked"), x, ax=ax)
    (left, right), (bottom, top) = ax.get_xlim(), ax.get_ylim()
    assert left < x[:, 0].min() and x[:, 0].max() < right and bottom < x[:, 1].min() and x[:, 1].max() < top
