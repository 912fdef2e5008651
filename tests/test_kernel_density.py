"""KernelDensity: scikit-learn's conventions and numbers, and what it adds to them."""

import inspect
import pickle
import sys
import warnings

import cloudpickle
import joblib
import numpy as np
import pyarrow
import pytest
import sklearn
from hypothesis import given, settings
from numpy.testing import assert_allclose, assert_array_equal
from sklearn import neighbors
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils import get_tags
from sklearn.utils.estimator_checks import parametrize_with_checks
from strange import OPTIONS, arrays

import sdkde_core
from sdkde_core import KernelDensity

RNG = np.random.default_rng(0)
X = RNG.normal(size=(60, 2)) * [1.0, 2.0]
Y = RNG.normal(size=(20, 2)) * [1.0, 2.0]
WEIGHTS = RNG.uniform(size=60)
H = np.array([[0.3, 0.1], [0.1, 0.5]])


@parametrize_with_checks([KernelDensity(), KernelDensity(method="sdkde", bandwidth="auto")])
def test_scikit_learns_checks(estimator, check):
    check(estimator)


def test_the_parameters_are_scikit_learns_and_more():
    ours = inspect.signature(KernelDensity).parameters
    theirs = inspect.signature(neighbors.KernelDensity).parameters
    assert [(p.name, p.default, p.kind) for p in ours.values()][: len(theirs)] == [
        (p.name, p.default, p.kind) for p in theirs.values()
    ]
    assert list(inspect.signature(KernelDensity.fit).parameters) == ["self", "X", "y", "sample_weight"]
    assert get_tags(KernelDensity()) == get_tags(neighbors.KernelDensity())


@pytest.mark.parametrize("bandwidth", [1.0, 0.2, 1, np.float32(0.5), "scott", "silverman"])
@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["", "weights"])
def test_the_numbers_are_scikit_learns(bandwidth, weights):
    for x, y in ((X, Y), (X[:, :1], Y[:, :1]), (X.astype(np.float32), Y), (np.rint(X).astype(int), Y.tolist())):
        ours, theirs = (c(bandwidth=bandwidth).fit(x, None, weights) for c in (KernelDensity, neighbors.KernelDensity))
        assert_allclose(ours.score_samples(y), theirs.score_samples(y), rtol=1e-9)
        assert_allclose(ours.score(y), theirs.score(y), rtol=1e-9)
        assert ours.bandwidth_ == theirs.bandwidth_
        assert isinstance(ours.bandwidth_, float)
        assert ours.score_samples(y).dtype == np.float64


@pytest.mark.parametrize("kernel", ["tophat", "epanechnikov", "exponential", "linear", "cosine"])
def test_the_numbers_of_other_kernels_are_scikit_learns(kernel):
    """In an odd number of dimensions: in an even one scikit-learn's cosine does not integrate to 1."""
    x, y, how = X[:, :1], Y[:, :1], {"kernel": kernel, "bandwidth": 1.3}
    ours, theirs = (c(**how).fit(x, None, WEIGHTS) for c in (KernelDensity, neighbors.KernelDensity))
    assert_allclose(ours.score_samples(y), theirs.score_samples(y), rtol=1e-9)
    with pytest.raises(ValueError, match="kernel"):
        KernelDensity(method="sdkde", **how).fit(X)


@pytest.mark.parametrize("method", ["kde", "sdkde", "laplace"])
@pytest.mark.parametrize(
    "bandwidth",
    [0.7, [0.7, 0.7], [0.5, 0.9], H, "auto", "normal-reference", "silverman-iso", sdkde_core.Bandwidth.of(H, 2)],
    ids=["h", "same", "h_j", "H", "auto", "reference", "iso", "Bandwidth"],
)
def test_methods_and_bandwidths_are_those_of_estimate(method, bandwidth):
    how = {"method": method, "bandwidth": bandwidth, "precision": "float64"}
    if method == "laplace":
        how["negative"] = "clip"
    model = KernelDensity(**how).fit(X, sample_weight=WEIGHTS)
    with np.errstate(divide="ignore"):
        want = np.log(sdkde_core.estimate(X, Y, weights=WEIGHTS, **how))
    assert_allclose(model.score_samples(Y), want, rtol=1e-9)
    h = model.density_.bandwidth
    if h.factor.ndim == 2:
        assert_array_equal(model.bandwidth_, H)
    elif (h.factor == h.factor[0]).all():
        assert isinstance(model.bandwidth_, float)
        assert model.bandwidth_ == h.factor[0]
    else:
        assert_array_equal(model.bandwidth_, h.factor)


def test_negative_densities():
    model = KernelDensity(method="laplace", bandwidth=1.0).fit(X)
    far = [[9.0, 9.0]]
    with pytest.warns(RuntimeWarning, match="negative"):
        assert np.isnan(model.score_samples(far))
    assert np.isneginf(clone(model).set_params(negative="renormalise").fit(X).score_samples(far))
    with pytest.raises(ValueError, match="laplace"):
        KernelDensity(negative="clip").fit(X)


@pytest.mark.parametrize(
    "rtol, precision", [(0, "float64"), (9e-6, "float64"), (1e-5, "high"), (4e-4, "high"), (5e-4, "fast")]
)
def test_the_precision_follows_rtol(rtol, precision, monkeypatch):
    monkeypatch.setenv("SDKDE_PRECISION", "fast")
    assert KernelDensity(rtol=rtol).fit(X).density_.precision == precision
    assert KernelDensity(rtol=rtol, precision="high").fit(X).density_.precision == "high"


def _pandas(values, names):
    return pytest.importorskip("pandas").DataFrame(values, columns=names)


def _arrow(values, names):
    return pyarrow.table(dict(zip(names, values.T)))


@pytest.mark.parametrize("frame", [_pandas, _arrow])
def test_columns_of_data_frames_go_by_name(frame):
    model = KernelDensity(method="sdkde").fit(frame(X, ["a", "b"]))
    assert model.feature_names_in_.tolist() == ["a", "b"]
    assert model.n_features_in_ == 2
    assert_array_equal(model.score_samples(frame(Y, ["a", "b"])), KernelDensity(method="sdkde").fit(X).score_samples(Y))
    with pytest.raises(ValueError, match="same order"):
        model.score_samples(frame(Y[:, ::-1], ["b", "a"]))
    with pytest.raises(ValueError, match="unseen at fit time"):
        model.score_samples(frame(Y, ["a", "c"]))
    with pytest.warns(UserWarning, match="does not have valid feature names"):
        model.score_samples(Y)


def test_assume_finite():
    model, holed = KernelDensity().fit(X), np.vstack([Y, [np.nan, 0.0]])
    with pytest.raises(ValueError, match="NaN"):
        model.score_samples(holed)
    with sklearn.config_context(assume_finite=True):
        found = model.score_samples(holed)
    assert np.isnan(found[-1])
    assert_array_equal(found[:-1], model.score_samples(Y))


@pytest.mark.parametrize("count", [60, pytest.param(1500, marks=pytest.mark.slow)])
def test_whatever_people_pass_gets_scikit_learns_answer(count):
    """Its numbers where they are right, its errors; and one of ours where float64 does not hold squared distances."""

    def outcome(estimator, x, y, weights):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return estimator.fit(x, sample_weight=weights).score_samples(y)
        except Exception as error:
            return type(error), str(error)

    @settings(max_examples=count, deadline=None, derandomize=True, database=None)
    @given(arrays(), arrays(), OPTIONS["weights"])
    def check(x, y, weights):
        ours, theirs = (outcome(model, x, y, weights) for model in (KernelDensity(), neighbors.KernelDensity()))
        if isinstance(ours, tuple):
            assert "overflow" in ours[1] or "masked array" in ours[1] or ours == theirs
        else:
            assert_allclose(ours, theirs, rtol=1e-9)

    check()


@pytest.mark.parametrize(
    "parameters",
    [
        {"bandwidth": 0.0},
        {"bandwidth": None},
        {"bandwidth": "best"},
        {"bandwidth": [1.0, 1.0, 1.0]},
        {"metric": "manhattan"},
        {"metric": "mahalanobis"},
        {"metric": "minkowski", "metric_params": {"p": 3}},
        {"metric": "minkowski", "metric_params": {"w": [1.0, 2.0]}},
        {"leaf_size": 0},
        {"method": "best"},
        {"negative": "drop"},
        {"precision": "float16"},
        {"backend": 1},
        {"device": 0},
        {"backend_options": 3},
    ],
    ids=str,
)
def test_parameters_are_refused_by_name(parameters):
    model = KernelDensity(**parameters)  # and nothing earlier than fit
    with pytest.raises(ValueError, match=max(parameters)):
        model.fit(X)


@pytest.mark.parametrize("metric, params", [("l2", None), ("minkowski", None), ("minkowski", {"p": 2}), ("p", {})])
def test_other_names_of_the_euclidean_metric(metric, params):
    model = KernelDensity(metric=metric, metric_params=params).fit(X)
    assert_array_equal(model.score_samples(Y), KernelDensity().fit(X).score_samples(Y))


def test_other_backends():
    model = KernelDensity(backend="numpy", device="cpu", backend_options={"threads": 1}).fit(X)
    assert model.density_.backend == "numpy"
    with pytest.raises(sdkde_core.BackendUnavailable):
        KernelDensity(backend="nope").fit(X)


@pytest.mark.parametrize("through", [pickle, cloudpickle, joblib], ids=lambda module: module.__name__)
def test_pickled_models_give_the_same_numbers(through, tmp_path):
    model = KernelDensity(method="sdkde", bandwidth=H).fit(X)
    if through is joblib:
        joblib.dump(model, tmp_path / "model")
        again = joblib.load(tmp_path / "model", mmap_mode="r")
    else:
        again = through.loads(through.dumps(model))
    assert_array_equal(again.score_samples(Y), model.score_samples(Y))
    assert_array_equal(again.bandwidth_, H)


GRID = {"kerneldensity__bandwidth": [0.2, "scott", "auto"], "kerneldensity__method": ["kde", "sdkde", "stacked"]}


@pytest.mark.parametrize("backend", ["threading", pytest.param("loky", marks=pytest.mark.slow)])
def test_pipelines_and_grid_searches(backend):
    with joblib.parallel_backend(backend):
        search = GridSearchCV(make_pipeline(StandardScaler(), KernelDensity()), GRID, n_jobs=2, cv=2).fit(X)
    model = search.best_estimator_
    assert search.best_params_["kerneldensity__method"] == model[-1].density_.method
    assert np.isfinite(search.cv_results_["mean_test_score"]).all()
    assert model.score_samples(Y).shape == (20,)


def test_weighted_scores():
    model, weights = KernelDensity(kernel="tophat").fit(X), np.arange(20) % 3
    assert model.score(np.repeat(X[:20], weights, axis=0)) == pytest.approx(model.score(X[:20], None, weights))
    assert np.isfinite(model.score([[0.0, 0.0], [99.0, 0.0]], sample_weight=[1.0, 0.0]))
    for wrong, message in ((-weights, "Negative values"), (weights[:5], r"shape == \(5,\)"), (weights * np.nan, "NaN")):
        with pytest.raises(ValueError, match=message):
            model.score(X[:20], sample_weight=wrong)
    with pytest.raises(TypeError, match="sample_weight is a masked array"):
        model.score(X[:20], sample_weight=np.ma.masked_greater(weights, 1))


def test_searches_route_weights_to_scores():
    grid = {"method": ["kde", "sdkde", "stacked"]}
    with sklearn.config_context(enable_metadata_routing=True):
        model = KernelDensity(bandwidth="auto").set_fit_request(sample_weight=True)
        search = GridSearchCV(model.set_score_request(sample_weight=True), grid, cv=2).fit(X, sample_weight=WEIGHTS)
    first = clone(model).set_params(**search.cv_results_["params"][2]).fit(X[30:], sample_weight=WEIGHTS[30:])
    assert search.cv_results_["split0_test_score"][2] == pytest.approx(WEIGHTS[:30] @ first.score_samples(X[:30]))


@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["", "weights"])
def test_samples_are_scikit_learns(weights):
    ours, theirs = (c(bandwidth=0.5).fit(X, None, weights) for c in (KernelDensity, neighbors.KernelDensity))
    assert_allclose(ours.sample(50, random_state=3), theirs.sample(50, random_state=3), rtol=1e-9, atol=1e-12)


def test_what_cannot_be_sampled():
    with pytest.raises(ValueError, match="laplace"):
        KernelDensity(method="laplace").fit(X).sample()
    model = KernelDensity(kernel="epanechnikov").fit(X)
    with pytest.raises(NotImplementedError, match="epanechnikov"):
        model.sample()
    assert model.density_.sample(3).shape == (3, 2)


def test_without_scikit_learn(monkeypatch):
    monkeypatch.delitem(sys.modules, "sdkde_core.interop.kernel_density")
    monkeypatch.delitem(vars(sdkde_core), "KernelDensity", raising=False)  # found there from the first time on
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(ImportError, match=r"pip install 'sdkde-core\[sklearn\]'"):
        _ = sdkde_core.KernelDensity
    with pytest.raises(AttributeError, match="Kernel_Density"):
        _ = sdkde_core.Kernel_Density


def test_masked_arrays_are_refused():
    """As plain arrays they would lose their mask."""
    masked, model = np.ma.masked_greater(X, 0.5), KernelDensity()
    for call in (
        lambda: model.fit(masked),
        lambda: model.fit(X, sample_weight=np.ma.masked_greater(np.ones(len(X)), 2)),
    ):
        with pytest.raises(TypeError, match="is a masked array"):
            call()
    with pytest.raises(TypeError, match="X is a masked array"):
        model.fit(X).score_samples(masked)


def test_numbers_of_numpys_are_saved_and_far_positions_are_summed(tmp_path, untold):
    x = np.random.default_rng(0).normal(size=(60, 2))
    model = KernelDensity(bandwidth=np.int64(1), leaf_size=np.int64(30), breadth_first=np.bool_(True)).fit(x)
    model.save(tmp_path / "a.sdkde")
    assert np.array_equal(sdkde_core.load(tmp_path / "a.sdkde").score_samples(x), model.score_samples(x))
    times = 1.7e9 + np.repeat(3e7 * x, 9, axis=0)[:, :1] + 200.0 * np.random.default_rng(1).normal(size=(540, 1))
    with pytest.warns(sdkde_core.SdkdeWarning, match="fewer digits"):
        got = KernelDensity(bandwidth=60.0).fit(times).score_samples(times)
    np.testing.assert_allclose(got, neighbors.KernelDensity(bandwidth=60.0).fit(times).score_samples(times), atol=1e-8)
