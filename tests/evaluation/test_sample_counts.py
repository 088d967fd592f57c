"""Metrics by number of samples: equal to `evaluate`, averaged over groups, in one pass."""

import pytest
import torch
from torch import nn

from stfseb import MCDropout, StfsebError, evaluate
from stfseb.evaluation.sample_counts import sample_counts
from stfseb.likelihoods import GaussianRegression


class Recorded:
    """Logits that depend on the image and on the sample's number; counts its calls."""

    def __init__(self, samples=100):
        generator = torch.Generator().manual_seed(0)
        self.directions = torch.randn(samples, 12, 4, generator=generator, dtype=torch.float64)
        self.calls = []
        self.part = slice(None)

    def sample_logits(self, x, samples=None, *, seed=None):
        self.calls.append((samples, seed))
        return torch.einsum("nd,sdl->snl", x.flatten(1).double() * 3, self.directions)[self.part][:samples]


@pytest.fixture
def data():
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(60, 3, 2, 2, generator=generator)
    return (x, torch.randint(4, (60,), generator=generator)), {"far": torch.rand(40, 3, 2, 2, generator=generator)}


def test_rows_are_means_over_disjoint_groups(data):
    test, ood = data
    method = Recorded()
    table = sample_counts(method, test, ood, counts=(1, 10, 100), repeats=4, seed=7, batch_size=25)
    assert list(table) == [1, 10, 100]
    assert set(method.calls) == {(100, 7)}
    assert len(method.calls) == 3 + 2  # every image once
    for count, groups in ((1, 4), (10, 4), (100, 1)):
        expected = []
        for k in range(groups):
            one = Recorded()
            one.part = slice(k * count, (k + 1) * count)
            expected.append(evaluate(one, test, ood, samples=count))
        assert table[count].keys() == expected[0].keys()
        for name in expected[0]:
            mean = sum(row[name] for row in expected) / groups
            assert table[count][name] == pytest.approx(mean, rel=1e-9), (count, name)


def test_the_largest_row_is_evaluates_own_for_a_real_method(data):
    test, ood = data
    torch.manual_seed(0)
    method = MCDropout(nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 4)))
    table = sample_counts(method, test, ood, counts=[16, 2])
    assert table[16] == pytest.approx(evaluate(method, test, ood, samples=16), rel=1e-9)
    assert table[2]["nll"] > table[16]["nll"]  # the average of more samples is better, on the whole
    assert list(table) == [2, 16]


def test_bad_arguments_are_named(data):
    test, ood = data
    with pytest.raises(StfsebError, match="counts is empty"):
        sample_counts(Recorded(), test, counts=())
    with pytest.raises(StfsebError, match="counts=0"):
        sample_counts(Recorded(), test, counts=(0, 10))
    with pytest.raises(StfsebError, match="batch_size=0"):
        sample_counts(Recorded(), test, batch_size=0)
    with pytest.raises(StfsebError, match="rename"):
        sample_counts(Recorded(), test, {"entropy": ood["far"]})
    net = nn.Sequential(nn.Flatten(), nn.Linear(12, 4), nn.Dropout(0.1))
    with pytest.raises(StfsebError, match="gaussian"):
        sample_counts(MCDropout(net, likelihood=GaussianRegression()), test)
