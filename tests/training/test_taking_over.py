"""What a captured step has built in keeps runs apart that differ in it; what it reads comes along."""

import torch
from torch import nn

from stfseb import GFSVI, MAP, STFSEB, MCDropout
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
