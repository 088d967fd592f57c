"""Metrics against torchmetrics, scikit-learn and brute force."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import log_softmax, logsumexp
from sklearn.metrics import accuracy_score, brier_score_loss, log_loss
from torchmetrics.functional.classification import multiclass_calibration_error

from stfseb.evaluation import metrics


def draw(seed: int, samples: int = 4, count: int = 300, classes: int = 5, scale: float = 3.0):
    rng = np.random.default_rng(seed)
    log_probs = log_softmax(rng.normal(0, scale, (samples, count, classes)), axis=-1)
    labels = np.where(rng.random(count) < 0.6, log_probs.mean(0).argmax(-1), rng.integers(0, classes, count))
    return log_probs, labels


@pytest.mark.parametrize("seed", range(3))
def test_agree_with_scikit_learn(seed):
    sampled, labels = draw(seed)
    log_probs = metrics.log_mean_probs(sampled)
    np.testing.assert_allclose(log_probs, logsumexp(sampled, axis=0) - math.log(4), atol=1e-13)
    probs = np.exp(sampled).mean(axis=0)
    assert metrics.accuracy(probs, labels) == accuracy_score(labels, probs.argmax(-1))
    assert metrics.nll(log_probs, labels) == pytest.approx(log_loss(labels, probs, labels=range(5)), abs=1e-12)
    assert metrics.brier(probs, labels) == pytest.approx(
        brier_score_loss(labels, probs, labels=range(5), scale_by_half=False), abs=1e-12
    )


@pytest.mark.parametrize("bins", [1, 7, 10, 15])
def test_ece_agrees_with_torchmetrics_below_confidence_one(bins):
    sampled, labels = draw(11, scale=1.0)
    probs = np.exp(metrics.log_mean_probs(sampled))
    expected = multiclass_calibration_error(
        torch.from_numpy(probs), torch.from_numpy(labels), num_classes=5, n_bins=bins, norm="l1"
    )
    assert metrics.ece(probs, labels, bins) == pytest.approx(float(expected), abs=1e-6)


@settings(deadline=None, max_examples=60)
@given(
    confidences=st.lists(st.sampled_from([0.5, 0.6, 2 / 3, 0.7, 0.8, 0.9, 1.0]), min_size=1, max_size=20),
    bins=st.integers(1, 20),
    data=st.data(),
)
def test_ece_by_brute_force_with_confidences_on_the_edges(confidences, bins, data):
    """Right-closed bins in exact words: the smallest b with confidence <= edge_b."""
    labels = np.array(data.draw(st.lists(st.integers(0, 1), min_size=len(confidences), max_size=len(confidences))))
    probs = np.array([[c, 1 - c] for c in confidences])
    edges = np.linspace(0, 1, bins + 1)
    groups: dict[int, list[int]] = {}
    for i, c in enumerate(confidences):
        groups.setdefault(next(b for b in range(1, bins + 1) if c <= edges[b]), []).append(i)
    expected = 0.0
    for members in groups.values():
        hits = np.mean([labels[i] == 0 for i in members])
        expected += len(members) / len(labels) * abs(hits - np.mean([confidences[i] for i in members]))
    assert metrics.ece(probs, labels, bins) == pytest.approx(expected, abs=1e-12)


def test_confidence_of_exactly_one_stays_in_the_last_bin():
    """0.97 (right) and 1.0 (wrong) share a bin: |0.5 - 0.985|. Two bins would give 0.515."""
    probs = np.array([[0.97, 0.03], [1.0, 0.0]])
    labels = np.array([0, 1])
    assert metrics.ece(probs, labels, 15) == pytest.approx(0.485)
    bins = metrics.reliability(probs, labels, 15)
    assert bins.count.tolist() == [0] * 14 + [2]
    assert bins.as_dict()["accuracy"][:2] == [None, None]


def test_nll_is_of_the_averaged_probability_and_clamped():
    sampled = np.log(np.array([[[0.9, 0.1]], [[0.1, 0.9]]]))
    assert metrics.nll(metrics.log_mean_probs(sampled), [0]) == pytest.approx(math.log(2))
    hopeless = log_softmax(np.array([[0.0, 800.0]]), axis=-1)
    assert metrics.nll(hopeless, [0]) == pytest.approx(-math.log(1e-10))


def test_log_mean_probs_does_not_underflow():
    sampled = np.full((3, 1, 2), -1e4)
    sampled[0, 0, 0] = -2e4
    np.testing.assert_allclose(metrics.log_mean_probs(sampled), [[-1e4 + math.log(2 / 3), -1e4]])


def test_brier_does_not_change_its_input():
    probs = np.array([[0.25, 0.75]])
    assert metrics.brier(probs, [1]) == pytest.approx(2 * 0.0625)
    assert probs.tolist() == [[0.25, 0.75]]
