"""The written-out backward pass of chains against the general linearisation, in value and gradient."""

import pytest
import torch
from torch import nn

from stfseb.methods.chain_linearisation import chain_linearisation
from stfseb.methods.linearisation import Linearisation
from stfseb.networks.cnn import DeepCNN, SmallCNN

CHAINS = {
    "small": lambda: SmallCNN(in_channels=2, classes=3, image_size=8, hidden=5),
    "deep": lambda: DeepCNN(in_channels=2, classes=3, image_size=8, hidden=5),
    "strided": lambda: nn.Sequential(
        nn.Conv2d(2, 4, 3, stride=2, bias=False), nn.Identity(), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3)
    ),
    "dilated": lambda: nn.Sequential(
        nn.ReLU(), nn.Conv2d(2, 4, 3, dilation=2, padding=(2, 1)), nn.Dropout(0.5), nn.Flatten(), nn.Linear(192, 3)
    ),
}


@pytest.mark.parametrize("name", CHAINS)
def test_law_and_gradient_are_the_general_ones(name):
    torch.manual_seed(0)
    net = CHAINS[name]().double()
    x = torch.randn(4, 2, 8, 8, dtype=torch.float64)
    scales = {n: torch.rand_like(p).requires_grad_() for n, p in net.named_parameters()}
    classes = torch.tensor([2, 0])
    own = chain_linearisation(net, x[:1])
    assert own is not None
    parameters = [*net.parameters(), *scales.values()]
    found = []
    for linearised in (own, Linearisation(net, x[:1])):
        mean, covariance = linearised.law(x, scales, classes, create_graph=True)
        weight = torch.arange(covariance.numel(), dtype=torch.float64).view_as(covariance).cos()
        slopes = torch.autograd.grad((covariance * weight).sum() + mean.square().sum(), parameters, allow_unused=True)
        found.append((mean, covariance, *slopes))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "net",
    [
        nn.Sequential(nn.Conv2d(2, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(144, 3)),
        nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 3)),
        nn.Sequential(nn.Conv2d(2, 4, 3), nn.MaxPool2d(3), nn.Flatten(), nn.Linear(16, 3)),
        nn.Sequential(nn.Conv2d(2, 4, 3, padding="same"), nn.Flatten(), nn.Linear(256, 3)),
        nn.Sequential(nn.Conv2d(2, 4, 3, groups=2), nn.Flatten(), nn.Linear(144, 3)),
    ],
    ids=["tanh", "norm", "pool", "padding", "groups"],
)
def test_other_networks_are_left_to_the_general_form(net):
    assert chain_linearisation(net.eval(), torch.randn(1, 2, 8, 8)) is None
