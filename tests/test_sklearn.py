"""The estimators: scikit-learn's own checks, pipelines and searches, pickles, and rows that do not see each other."""

import pickle
import warnings

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_diabetes, load_digits, load_iris, make_moons
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, cross_val_score, train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator
from torch import nn

from stfseb import StfsebError
from stfseb.likelihoods import GaussianRegression
from stfseb.networks.mlp import MLP
from stfseb.sklearn import (
    ESTIMATORS,
    FSEBClassifier,
    MAPClassifier,
    MAPRegressor,
    MCDropoutRegressor,
    STFSEBClassifier,
    STFSEBRegressor,
)

QUICK = {"epochs": 30, "hidden": (16,), "predict_samples": 4}


def checked(estimator):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the checks' own
        found = check_estimator(estimator, on_fail="raise", on_skip=None)
    return [entry["check_name"] for entry in found if entry["status"] == "passed"]


def test_check_estimator():
    assert len(checked(STFSEBClassifier(epochs=40, samples=2))) > 45  # the least that passes the checks' thresholds


@pytest.mark.slow
@pytest.mark.parametrize("name", ESTIMATORS)
def test_check_estimator_of_every_method(name):
    # Others than these are lighter than their defaults.
    settings = {} if name.startswith(("STFSEB", "MAP")) else {"epochs": 40, "samples": 2}
    settings |= {"kernel_steps": 50} if name.startswith("GFSVI") else {}
    assert len(checked(ESTIMATORS[name](**settings))) > 45


def test_every_method_has_its_estimators():
    for method in ("STFSEB", "MCDropout", "MAP", "MFVI", "FSEB"):
        assert {f"{method}Classifier", f"{method}Regressor"} <= set(ESTIMATORS)
    assert "GFSVIClassifier" in ESTIMATORS


def test_parameters_are_the_methods_settings():
    assert {"tau1", "tau2", "dof", "context", "hidden"} <= set(STFSEBClassifier().get_params())
    assert "context" not in MAPClassifier().get_params()
    assert clone(STFSEBClassifier(tau2=3.0)).tau2 == 3.0
    with pytest.raises(TypeError, match="tau3"):
        STFSEBClassifier(tau3=1.0)


def test_rows_do_not_depend_on_their_order_or_company():
    X, y = load_iris(return_X_y=True)
    model = STFSEBClassifier(**QUICK, random_state=0).fit(X, y)
    together = model.predict_proba(X)
    order = np.random.default_rng(0).permutation(len(X))
    np.testing.assert_allclose(model.predict_proba(X[order]), together[order], atol=1e-12)
    alone = np.concatenate([model.predict_proba(X[i : i + 1]) for i in range(20)])
    np.testing.assert_allclose(alone, together[:20], atol=1e-12)
    again = STFSEBClassifier(**QUICK, random_state=0).fit(X, y)
    np.testing.assert_array_equal(again.predict_proba(X), together)
    assert np.abs(STFSEBClassifier(**QUICK, random_state=1).fit(X, y).predict_proba(X) - together).max() > 1e-3


def test_the_callers_random_state_is_left_alone():
    X, y = load_iris(return_X_y=True)
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    MAPClassifier(**QUICK).fit(X, y).predict(X)
    assert torch.equal(torch.rand(1), expected)


def test_pipeline_grid_search_and_cross_validation():
    X, y = load_iris(return_X_y=True)
    words = np.array(["setosa", "versicolor", "virginica"])[y]
    pipeline = make_pipeline(StandardScaler(), STFSEBClassifier(**QUICK, samples=2, random_state=0))
    search = GridSearchCV(pipeline, {"stfsebclassifier__tau2": [1.0, 100.0]}, cv=2).fit(X, words)
    assert search.best_params_["stfsebclassifier__tau2"] in (1.0, 100.0)
    assert set(search.predict(X)) == set(words)
    scores = cross_val_score(MAPClassifier(**QUICK, random_state=0), X, words, cv=3, scoring="neg_log_loss")
    reference = cross_val_score(
        make_pipeline(StandardScaler(), LogisticRegression()), X, words, cv=3, scoring="neg_log_loss"
    )
    assert scores.mean() > reference.mean() - 0.15


@pytest.mark.parametrize("model", [STFSEBClassifier(**QUICK), FSEBClassifier(**QUICK), MAPClassifier(**QUICK)])
def test_pickles_predict_the_same(model):
    X, y = load_iris(return_X_y=True)
    model = clone(model).fit(X, y)
    again = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(again.predict_proba(X), model.predict_proba(X))
    assert len(pickle.dumps(model)) < 100_000


def test_unfamiliar_rows_are_less_certain_with_a_context():
    """Two moons: far from both, the network with noise as context is less sure than the one without."""
    X, y = make_moons(400, noise=0.1, random_state=0)
    angle = np.linspace(0, 2 * np.pi, 100)
    far = np.stack([0.5 + 5 * np.cos(angle), 0.25 + 5 * np.sin(angle)], 1)
    ours = STFSEBClassifier(random_state=0, samples=4, hidden=(64, 64)).fit(X, y)
    without = STFSEBClassifier(random_state=0, samples=4, hidden=(64, 64), functional_scale=0).fit(X, y)
    assert ours.score(X, y) > 0.98
    assert ours.predict_proba(far).max(1).mean() < without.predict_proba(far).max(1).mean() - 0.1
    assert ours.uncertainty(far).mean() > ours.uncertainty(X).mean()


@pytest.mark.parametrize("context", [None, "noise", "held-back", "train", np.zeros((50, 4))])
def test_contexts(context):
    X, y = load_iris(return_X_y=True)
    assert STFSEBClassifier(**QUICK, context=context, random_state=0).fit(X, y).score(X, y) > 0.6


def test_images_own_networks_and_words_for_mistakes():
    digits = load_digits()
    images = (digits.images[:, None] * 15).astype(np.uint8)[:300]
    model = STFSEBClassifier(epochs=4, samples=2, predict_samples=4, random_state=0).fit(images, digits.target[:300])
    assert type(model.method_.net).__name__ == "SmallCNN"
    assert model.score(images, digits.target[:300]) > 0.5
    with pytest.raises(StfsebError, match="fitted on"):
        model.predict(images[:, :, :4, :4])
    turned = STFSEBClassifier(epochs=2, samples=2, context="distorted", context_copies=1, random_state=0)
    assert turned.fit(images, digits.target[:300]).score(images, digits.target[:300]) > 0.2
    X, y = load_iris(return_X_y=True)
    own = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 3))
    before = own[0].weight.clone()
    assert type(MAPClassifier(net=own, epochs=3).fit(X, y).method_.net[1]).__name__ == "Tanh"
    assert torch.equal(own[0].weight, before)
    made = MAPClassifier(net=lambda shape, outputs: MLP(shape[0], outputs, (5,)), epochs=3).fit(X, y)
    assert made.method_.net.hidden1.out_features == 5
    with pytest.raises(StfsebError, match="noise"):
        STFSEBClassifier(context="nois").fit(X, y)
    with pytest.raises(StfsebError, match=r"distorted takes images \(N, C, H, W\)"):
        STFSEBClassifier(context="distorted").fit(X, y)
    with pytest.raises(StfsebError, match="gaussian"):
        MAPRegressor(likelihood="gausian").fit(X, y)


def test_regression_intervals_and_units():
    X, y = load_diabetes(return_X_y=True)
    train, test, y_train, y_test = train_test_split(X, y, test_size=0.25, random_state=0)
    model = STFSEBRegressor(random_state=0, epochs=60, samples=4).fit(train, y_train)
    mean, std = model.predict(test, return_std=True)
    low, high = model.predict_interval(test, 0.9)
    assert model.score(test, y_test) > 0.25
    assert ((low < mean) & (mean < high)).all()
    assert 0.8 < ((low < y_test) & (y_test < high)).mean() <= 1.0
    np.testing.assert_allclose((high - low) / 2 / 1.645, std, rtol=0.1)
    shifted = STFSEBRegressor(random_state=0, epochs=60, samples=4).fit(train, 1000 * y_train + 7)
    np.testing.assert_allclose(shifted.predict(test), 1000 * mean + 7, rtol=1e-6)


def test_two_targets_and_other_likelihoods():
    X, y = load_diabetes(return_X_y=True)
    both = np.stack([y, -2 * y], 1)
    model = MCDropoutRegressor(**QUICK, likelihood="student_t", random_state=0).fit(X, both)
    assert model.predict(X).shape == (442, 2)
    assert np.corrcoef(*model.predict(X).T)[0, 1] < -0.9
    fixed = MAPRegressor(**QUICK, likelihood=GaussianRegression(0.5, learn=False)).fit(X, y)
    _, std = fixed.predict(X, return_std=True)
    np.testing.assert_allclose(std, 0.5 * y.std(), rtol=1e-6)
