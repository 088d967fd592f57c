"""Mistakes that train without an error are said before training."""

import math

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from stfseb import MAP, Ensemble, MCDropout, fit
from stfseb.likelihoods import Binary, GaussianRegression
from stfseb.training.suspicions import SuspiciousWarning

X, Y = torch.randn(24, 5), torch.arange(24) % 3


def net(*last: nn.Module, outputs: int = 3) -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, outputs), *last)


class Functional(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = net()

    def forward(self, x):
        return torch.softmax(self.inner(x), 1)


def trained(method, y=Y):
    fit(method, (X, y), epochs=1, batch_size=8, progress=False)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: MAP(net(nn.Softmax(1))), r"Sequential ends in a softmax, layer '4' \(Softmax\): its outputs are prob"),
        (lambda: MCDropout(net(nn.LogSoftmax(1))), "layer '4' .LogSoftmax.: its outputs are log-probabilities"),
        (lambda: MAP(Functional()), "Functional ends in a softmax: its outputs are probabilities"),
        (lambda: Ensemble([MAP(net()), MAP(net(nn.Softmax(1)))]), "ends in a softmax, layer '4'"),
    ],
)
def test_a_network_that_ends_in_a_softmax_is_named(make, said):
    with pytest.warns(SuspiciousWarning, match=said) as told:
        trained(make())
    assert len(told) == 1


def test_labels_of_one_class_are_named():
    with pytest.warns(SuspiciousWarning, match=r"all \d+ train labels are of class 2: nothing can be learnt"):
        trained(MAP(net()), torch.full((24,), 2))


def test_a_batch_of_one_class_says_nothing_of_the_others():
    loader = DataLoader(TensorDataset(X, Y.sort().values), batch_size=8)
    fit(MAP(net()), loader, (X, Y), epochs=1, progress=False)


def test_logits_and_other_likelihoods_are_left_alone():
    trained(MAP(net()))
    zero = net()
    nn.init.zeros_(zero[-1].weight)
    nn.init.zeros_(zero[-1].bias)
    trained(MAP(zero))
    zero = net()
    nn.init.zeros_(zero[-1].weight)
    nn.init.constant_(zero[-1].bias, math.log(1 / 3))  # the classes' shares: its rows are all alike as yet
    trained(MAP(zero))
    trained(MAP(net(nn.Softmax(1), outputs=2), likelihood=GaussianRegression(targets=2)), torch.rand(24, 2))
    trained(MAP(net(outputs=1), likelihood=Binary()), Y % 2)
