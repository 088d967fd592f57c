"""OOD scores and rank statistics against scikit-learn and brute force."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import log_softmax
from scipy.stats import entropy as scipy_entropy
from sklearn.metrics import auc, average_precision_score, roc_auc_score, roc_curve

from stfseb.evaluation import ood

scores = st.lists(st.integers(-3, 3).map(float), min_size=1, max_size=40)  # few values, so many ties


def both(familiar, unfamiliar):
    return np.r_[np.zeros(len(familiar)), np.ones(len(unfamiliar))], np.r_[familiar, unfamiliar]


@settings(deadline=None)
@given(familiar=scores, unfamiliar=scores)
def test_rank_statistics_agree_with_scikit_learn_under_ties(familiar, unfamiliar):
    truth, values = both(familiar, unfamiliar)
    assert ood.auroc(familiar, unfamiliar) == pytest.approx(roc_auc_score(truth, values), abs=1e-12)
    assert ood.aupr(familiar, unfamiliar) == pytest.approx(average_precision_score(truth, values), abs=1e-12)
    fpr, tpr, _ = roc_curve(truth, values, drop_intermediate=False)
    np.testing.assert_allclose(ood.roc(familiar, unfamiliar), (fpr, tpr), atol=1e-12)
    assert ood.fpr95(familiar, unfamiliar) == pytest.approx(fpr[tpr >= 0.95 - 1e-12].min(), abs=1e-12)


def test_auroc_by_counting_pairs():
    rng = np.random.default_rng(0)
    familiar, unfamiliar = rng.normal(0, 1, 70).round(1), rng.normal(1, 1, 50).round(1)
    wins = sum((u > f) + 0.5 * (u == f) for u in unfamiliar for f in familiar)
    assert ood.auroc(familiar, unfamiliar) == pytest.approx(wins / 3500)


@pytest.mark.parametrize("count", [1, 19, 20, 21, 100, 1000, 1540])
def test_fpr95_flags_at_least_95_percent_and_not_one_more(count):
    """Brute force over every threshold, with whole-number arithmetic for the 95 %."""
    rng = np.random.default_rng(count)
    familiar, unfamiliar = rng.normal(0, 1, 500), rng.normal(1, 1, count)
    allowed = [t for t in unfamiliar if 100 * int((unfamiliar >= t).sum()) >= 95 * count]
    assert ood.fpr95(familiar, unfamiliar) == np.mean(familiar >= max(allowed))


@pytest.mark.parametrize(("familiar", "unfamiliar", "rate"), [(40, 12, 0.4), (12, 40, 0.4), (200, 50, 0.02)])
def test_the_standard_error_of_an_auroc_is_the_spread_over_draws(familiar, unfamiliar, rate):
    """Of exponential scores, for which the formula is exact: P(unfamiliar > familiar) = 1 / (1 + rate)."""
    g, draws = np.random.default_rng(0), 20_000
    one, other = g.exponential(1.0, (draws, familiar)), g.exponential(1 / rate, (draws, unfamiliar))
    found = [ood.auroc(a, b) for a, b in zip(one, other, strict=True)]
    value = 1 / (1 + rate)
    assert np.mean(found) == pytest.approx(value, abs=4 * np.std(found) / draws**0.5)
    assert np.std(found) == pytest.approx(ood.auroc_error(value, familiar, unfamiliar), rel=0.05)


def test_the_standard_error_of_an_auroc_at_its_ends():
    assert ood.auroc_error(0.7, 1, 1) == pytest.approx((0.7 * 0.3) ** 0.5)  # one pair: a coin
    assert ood.auroc_error(1.0, 6000, 1000) == ood.auroc_error(0.0, 6000, 1000) == 0.0


def test_roc_thins_to_exact_points():
    rng = np.random.default_rng(1)
    familiar, unfamiliar = rng.normal(0, 1, 4000), rng.normal(2, 1, 3000)
    fpr, tpr = ood.roc(familiar, unfamiliar)
    assert len(fpr) <= 200
    assert (fpr[0], tpr[0], fpr[-1], tpr[-1]) == (0, 0, 1, 1)
    exact = set(zip(*(v.round(12) for v in ood.roc(familiar, unfamiliar, points=10**6)), strict=True))
    assert set(zip(fpr.round(12), tpr.round(12), strict=True)) <= exact
    assert auc(fpr, tpr) == pytest.approx(ood.auroc(familiar, unfamiliar), abs=1e-3)
    assert np.diff(fpr + tpr).max() < 0.02


def test_scores_agree_with_their_definitions():
    sampled = log_softmax(np.random.default_rng(2).normal(0, 2, (6, 50, 4)), axis=-1)
    probs = np.exp(sampled)
    mean = probs.mean(0)
    np.testing.assert_allclose(ood.msp(sampled), np.log1p(-mean.max(-1)), atol=1e-12)
    np.testing.assert_allclose(ood.entropy(sampled), scipy_entropy(mean, axis=-1), atol=1e-12)
    expected = scipy_entropy(mean, axis=-1) - scipy_entropy(probs, axis=-1).mean(0)
    np.testing.assert_allclose(ood.mutual_information(sampled), expected, atol=1e-12)


def test_mutual_information_of_one_sample_is_zero():
    sampled = log_softmax(np.random.default_rng(3).normal(0, 9, (1, 50, 4)), axis=-1)
    assert ood.mutual_information(sampled).tolist() == [0.0] * 50


def test_saturated_probabilities_do_not_tie():
    """Logit gaps of 20, 50 and 300 are all probability 1.0 in float32 (the last two in float64 as well)."""
    logits = np.array([[[300.0, 0, 0], [50, 0, 0], [20, 0, 0]]])
    sampled = log_softmax(logits, axis=-1)
    assert np.exp(sampled).max(-1).astype(np.float32).tolist() == [[1.0, 1.0, 1.0]]
    score = ood.msp(sampled)
    np.testing.assert_allclose(score, np.log(2) - np.array([300.0, 50, 20]), rtol=1e-6)
    assert ood.auroc(score[:1], score[1:]) == 1.0
