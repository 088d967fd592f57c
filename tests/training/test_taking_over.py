"""What a captured step has built in keeps runs apart that differ in it; what it reads comes along."""

import copy

import pytest
import torch
from torch import nn

from stfseb import GFSVI, MAP, MLP, STFSEB, DeepCNN, MCDropout, SmallCNN, fit
from stfseb.likelihoods import StudentTRegression


def make_net(rate=0.5):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(rate), nn.Linear(16, 3))


def test_networks_that_do_other_things_do_not_share_a_step():
    context = torch.randn(20, 6)
    key = STFSEB(make_net(), context, num_context=8, tau2=1.0).captured_key()
    assert STFSEB(make_net(), context, num_context=8, tau2=2.0).captured_key() == key
    assert STFSEB(make_net(0.25), context, num_context=8).captured_key() != key
    frozen = make_net()
    frozen[0].requires_grad_(False)
    assert STFSEB(frozen, context, num_context=8).captured_key() != key


class Scaled(nn.Linear):
    """A layer of somebody's own, whose description says nothing of what it does."""

    def __init__(self, factor):
        super().__init__(6, 6)
        self.factor = factor

    def forward(self, x):
        return super().forward(x) * self.factor


def test_attributes_that_no_description_shows_keep_runs_apart():
    def key(factor, net=None):
        torch.manual_seed(0)
        return MCDropout(net or nn.Sequential(Scaled(factor), *make_net())).captured_key()

    assert key(1.0) == key(1.0) != key(5.0)
    assert key(torch.cos) == key(torch.cos) != key(torch.sin)
    assert key(torch.ones(1)) != key(torch.ones(1))  # in no buffer: nothing would bring it along
    trained = nn.Sequential(Scaled(1.0), *make_net()).eval()
    assert key(1.0) == key(1.0, copy.deepcopy(trained))


@pytest.mark.parametrize("make", [SmallCNN, DeepCNN, lambda: MLP(6, 3, (8, 8))])
def test_networks_made_alike_share_a_step(make):
    """Also a network that has been trained: its place's step is meant for the next run."""
    first, other = MCDropout(make()), MCDropout(make())
    size = {"SmallCNN": (1, 28, 28), "DeepCNN": (3, 32, 32), "MLP": (6,)}[type(first.net).__name__]
    x, y = torch.rand(8, *size), torch.arange(8) % 3
    fit(first, (x, y), (x, y), epochs=1, batch_size=4, progress=False)
    assert copy.deepcopy(first).captured_key() == other.captured_key()


def test_likelihoods_with_other_settings_do_not_share_a_step():
    keys = [
        MCDropout(make_net(), likelihood=StudentTRegression(dof=dof, targets=3)).captured_key()
        for dof in (3.0, 3.0, 30.0)
    ]
    assert keys[0] == keys[1] != keys[2]


def test_buffers_that_are_not_saved_come_along():
    def make(value):
        net = make_net()
        net.register_buffer("shift", torch.full((2,), value), persistent=False)
        return MAP(net)

    first = make(1.0)
    first.take_over(make(2.0))
    assert first.net.shift.tolist() == [2.0, 2.0]


def test_a_gaussian_process_priors_kernel_comes_along():
    context = torch.rand(20, 6)

    def make(kernel, length_scale):
        method = GFSVI(make_net(), context, kernel=kernel, num_context=8)
        method.prior.set(length_scale, 2.0)
        return method

    first, other = make("matern12", 0.5), make("rbf", 1.5)
    assert first.captured_key() == other.captured_key()  # a step sees the kernel's factors alone
    points = torch.rand(3, 8, 6)
    before, wanted = first.context_factors(points)[0], other.context_factors(points)[0]
    first.take_over(other)
    assert torch.equal(first.context_factors(points)[0], wanted)
    assert not torch.allclose(before, wanted)
