"""Paired differences against scipy's paired t test, and their coverage."""

import numpy as np
import pytest
from scipy import stats

from stfseb import StfsebError
from stfseb.evaluation.paired import paired


@pytest.mark.parametrize("level", [0.8, 0.95])
@pytest.mark.parametrize("count", [2, 5, 10])
def test_interval_is_scipys(count, level):
    rng = np.random.default_rng(count)
    ours, theirs = rng.normal(1.0, 1.0, count), rng.normal(0.5, 1.0, count)
    found = paired(dict(enumerate(ours)), dict(enumerate(theirs)), level)
    expected = stats.ttest_rel(ours, theirs).confidence_interval(level)
    assert found.mean == pytest.approx(np.mean(ours - theirs), rel=1e-12)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), rel=1e-9)
    assert found.seeds == tuple(range(count))
    assert found.level == level
    assert found.significant == (stats.ttest_rel(ours, theirs).pvalue < 1 - level)


def test_only_common_seeds_count_and_pairs_go_by_seed():
    found = paired({3: 1.0, 1: 5.0, 9: 100.0}, {1: 4.0, 3: 0.5, 7: -100.0})
    assert found.seeds == (1, 3)
    assert found.mean == pytest.approx(0.75)
    half = stats.t.ppf(0.975, 1) * np.std([1.0, 0.5], ddof=1) / np.sqrt(2)
    assert (found.low, found.high) == pytest.approx((0.75 - half, 0.75 + half))


def test_pairing_narrows_the_interval_of_correlated_results():
    rng = np.random.default_rng(0)
    common = rng.normal(0, 10, 10)
    ours, theirs = common + 1 + rng.normal(0, 0.1, 10), common + rng.normal(0, 0.1, 10)
    assert paired(dict(enumerate(ours)), dict(enumerate(theirs))).significant
    assert stats.ttest_ind(ours, theirs).pvalue > 0.5  # unpaired, nothing is seen


def test_the_interval_covers_the_truth_as_often_as_it_says():
    rng = np.random.default_rng(1)
    covered = 0
    for d in rng.normal(0.3, 1.0, (1000, 5)):
        found = paired(dict(enumerate(d)), dict.fromkeys(range(5), 0.0), 0.9)
        covered += found.low <= 0.3 <= found.high
    assert covered == pytest.approx(900, abs=40)  # 4 standard deviations


def test_one_seed_has_no_interval():
    found = paired({0: 0.9, 1: 0.8}, {1: 0.7})
    assert (found.mean, found.low, found.high) == (pytest.approx(0.1), None, None)
    assert not found.significant
    assert "no interval" in str(found)
    assert "[" in str(paired({0: 1.0, 1: 2.0}, {0: 0.0, 1: 0.5}))


@pytest.mark.parametrize(
    ("ours", "theirs", "level", "message"),
    [
        ({0: 1.0}, {1: 1.0}, 0.95, "no common seeds"),
        ({}, {}, 0.95, "no common seeds"),
        ({0: 1.0}, {0: 1.0}, 95, "level=95"),
        ({0: float("nan")}, {0: 1.0}, 0.95, "seed 0"),
    ],
)
def test_errors_name_the_remedy(ours, theirs, level, message):
    with pytest.raises(StfsebError, match=message):
        paired(ours, theirs, level)
