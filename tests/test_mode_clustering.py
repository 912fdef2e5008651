"""Clusters by modes: labels of a prepared density, and the estimator with scikit-learn's conventions."""

import pickle
import sys

import numpy as np
import pytest
import sklearn
from sklearn.cluster import MeanShift
from sklearn.metrics import adjusted_rand_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

import sdkde_core
from sdkde_core import ModeClustering, prepare

RNG = np.random.default_rng(0)
CENTRES = np.array([[0.0, 0.0], [10.0, 0.0], [0.0, 10.0], [10.0, 10.0], [5.0, 5.0]])
TRUE = RNG.integers(5, size=1000)
X = CENTRES[TRUE] + RNG.normal(size=(1000, 2))


@parametrize_with_checks([ModeClustering(method="kde", bandwidth=1.0)])
def test_scikit_learns_checks(estimator, check):
    check(estimator)


@pytest.mark.slow
@parametrize_with_checks([ModeClustering()])
def test_scikit_learns_checks_with_a_chosen_bandwidth(estimator, check):
    check(estimator)


def climbed(x, h, y):
    """Where plain mean shift of Gaussian kernels at x takes each point, (m, d)."""
    y = np.array(y)
    for _ in range(100):
        shares = np.exp(-0.5 * ((y[:, None] - x) ** 2).sum(-1) / h**2)
        y = shares @ x / shares.sum(1, keepdims=True)
    return y


def test_labels_are_those_of_a_climb_from_every_point():
    density = prepare(X, method="kde", bandwidth=1.0)
    labels, modes = density.labels(X, return_modes=True)
    ends = climbed(X, 1.0, X[::10])
    agree = np.square(modes[labels[::10]] - ends).sum(1) < 1e-4
    assert agree.mean() >= 0.999 and len(modes) == 5
    assert (np.diff(density.pdf(modes)) <= 0).all() and abs(density.grad_log_density(modes)).max() < 1e-3
    assert adjusted_rand_score(TRUE, labels) > 0.97
    np.testing.assert_array_equal(density.labels(), labels)  # the samples, in their order
    np.testing.assert_array_equal(density.labels(X[:7]), labels[:7])
    assert labels.dtype.kind == "i"


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"method": "stacked"}, marks=pytest.mark.slow),
        {"adaptive": 0.5, "method": "kde"},
        {"coordinates": "asinh"},
        {"weights": TRUE + 1.0},
    ],
    ids=str,
)
def test_labels_of_other_densities(options):
    options = options | ({"weights": options["weights"][::2]} if "weights" in options else {})
    x, true = X[::2], TRUE[::2]
    density = prepare(x, **options)
    labels, modes = density.labels(x, return_modes=True)
    assert adjusted_rand_score(true, labels) > 0.92
    largest = np.bincount(labels).argsort()[-5:]
    assert np.sqrt(np.square(modes[largest][:, None] - CENTRES).sum(-1)).min(axis=0).max() < 0.6
    if "adaptive" in options:
        with pytest.raises(ValueError, match="query is None, but an adaptive"):
            density.labels()
    else:
        assert np.mean(density.labels() == labels) > 0.98
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(density)).labels(x[:50]), density.labels(x[:50]))


def test_labels_where_columns_end_or_go_round():
    angles = np.mod(np.r_[RNG.normal(0.0, 0.05, 300), RNG.normal(0.5, 0.05, 200)], 1.0)
    labels, modes = prepare(angles, support=("circular", 1.0)).labels(angles, return_modes=True)
    assert len(modes) == 2 and (labels[:300] == 0).all() and (labels[300:] == 1).all()
    ended = prepare(abs(RNG.normal(size=300)), support=(0, None))
    assert ended.labels([0.5, -1.0]).tolist() == [0, -1]
    assert set(ended.labels()) >= {0} and len(ended.labels()) == 300


def test_labels_in_many_dimensions_and_of_few_points():
    x = np.repeat(np.eye(8) * 20.0, 15, axis=0) + RNG.normal(size=(120, 8))
    labels = prepare(x, method="kde", bandwidth=1.5).labels(x)
    assert adjusted_rand_score(np.repeat(np.arange(8), 15), labels) == 1.0
    assert prepare([[1.0, 2.0]], bandwidth=1.0).labels([[1.0, 2.0], [50.0, 2.0]]).tolist() == [0, 0]
    assert prepare([1.0, 1.0, 1.0, 9.0], bandwidth=1.0).labels([1.0, 8.0]).tolist() == [0, 1]


@pytest.mark.parametrize(
    ("query", "message"),
    [(np.empty((0, 2)), "query is empty"), ([[0.0, np.inf]], "query is"), ([[0.0]], "query has 1 dimensions")],
)
def test_labels_refuse(query, message):
    with pytest.raises(ValueError, match=message):
        prepare(X).labels(query)
    with pytest.raises(ValueError, match="laplace"):
        prepare(X, method="laplace").labels()


def test_the_estimator():
    model = ModeClustering(method="kde", bandwidth=1.0)
    assert adjusted_rand_score(MeanShift(bandwidth=2.0, bin_seeding=True).fit_predict(X), model.fit_predict(X)) > 0.97
    assert model.cluster_centers_.shape == (5, 2) and model.n_features_in_ == 2
    np.testing.assert_array_equal(model.predict(X), model.labels_)
    np.testing.assert_array_equal(model.predict(model.cluster_centers_), range(5))
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(model)).predict(X[:9]), model.labels_[:9])
    assert isinstance(model.density_, sdkde_core.Prepared)
    heavy = ModeClustering(method="kde", bandwidth=1.0).fit(X, sample_weight=1.0 + 9.0 * (TRUE == 3))
    assert np.square(heavy.cluster_centers_[0] - [10.0, 10.0]).sum() < 0.1  # the highest mode
    scaled = make_pipeline(StandardScaler(), ModeClustering(bandwidth=0.25)).fit(X)
    assert adjusted_rand_score(TRUE, scaled[-1].labels_) > 0.95
    for wrong in ({"method": "laplace"}, {"bandwidth": None}, {"bandwidth": -1.0}, {"precision": "half"}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            ModeClustering(**wrong).fit(X)
    with pytest.raises(TypeError, match="X is a masked array"):
        model.fit(np.ma.masked_greater(X, 3.0))
    with pytest.raises(sklearn.exceptions.NotFittedError):
        ModeClustering().predict(X)


def test_without_scikit_learn(monkeypatch):
    monkeypatch.delitem(sys.modules, "sdkde_core.interop.mode_clustering", raising=False)
    monkeypatch.delitem(vars(sdkde_core), "ModeClustering", raising=False)
    monkeypatch.setitem(sys.modules, "sklearn.base", None)
    with pytest.raises(ImportError, match=r"pip install 'sdkde-core\[sklearn\]'"):
        _ = sdkde_core.ModeClustering
