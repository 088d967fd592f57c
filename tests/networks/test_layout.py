"""The card's layout computes what the plain calls compute, values and gradients."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from stfseb import DeepCNN, SmallCNN
from stfseb.networks.dropout import Block
from stfseb.networks.folding import FoldedNetwork, chain, rearranged
from stfseb.networks.layout import CardLayout, MaxPool2x2


def test_pooling_with_ties_and_nan():
    x = torch.randint(-2, 3, (4, 3, 6, 8)).float()  # many ties
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    g = torch.randn(4, 3, 3, 4)
    left = F.max_pool2d(a, 2)
    right = MaxPool2x2.apply(b.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
    assert torch.equal(left, right)
    left.backward(g)
    right.backward(g)
    assert torch.equal(a.grad, b.grad)
    x[0, 0, 1, 1] = float("nan")
    assert MaxPool2x2.apply(x.permute(0, 2, 3, 1))[0, 0, 0, 0].isnan()


@pytest.mark.parametrize("channels", [1, 3, 16, 32, 64, 96])
@pytest.mark.parametrize("bias", [True, False])
def test_convolutions_and_their_gradients(channels, bias):
    torch.manual_seed(channels)
    conv = nn.Conv2d(channels, 8, 3, padding=1, bias=bias)
    x = torch.randn(2, channels, 6, 6, requires_grad=True)
    g = torch.randn(2, 8, 6, 6)

    def gradients(context):
        conv.zero_grad()
        x.grad = None
        with context, torch.autocast("cpu", torch.bfloat16):
            out = conv(x)
        out.backward(g.to(out.dtype))
        return [out.float(), x.grad, *(p.grad.clone() for p in conv.parameters())]

    from contextlib import nullcontext

    for plain, ours in zip(gradients(nullcontext()), gradients(CardLayout()), strict=True):
        assert torch.allclose(plain, ours, rtol=2e-2, atol=2e-2 * plain.abs().max().item())


@pytest.mark.parametrize(("network", "shape"), [(SmallCNN, (1, 28, 28)), (DeepCNN, (3, 32, 32))])
def test_rearranged_chains_are_the_same_function(network, shape):
    torch.manual_seed(0)
    net = network(dropout=0.5).double()
    x = torch.randn(3, *shape, dtype=torch.float64)
    modules = chain(net.eval())
    steps = rearranged(modules)
    assert len(steps) == len(modules) - 1  # flatten went into the Linear
    for memory in (torch.contiguous_format, torch.channels_last):
        out = x.contiguous(memory_format=memory)
        for step in steps:
            out = step(out)
        expected = net(x)
        assert torch.allclose(out, expected, rtol=1e-12, atol=1e-13)
        ours = torch.autograd.grad(out.square().sum(), list(net.parameters()))
        theirs = torch.autograd.grad(expected.square().sum(), list(net.parameters()))
        assert all(torch.allclose(a, b, rtol=1e-9, atol=1e-12) for a, b in zip(ours, theirs, strict=True))


def test_hooked_modules_are_left_where_they_are():
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.5), nn.Flatten(), nn.Linear(8, 2))
    seen = []
    net[1].register_forward_hook(lambda m, i, o: seen.append(o.shape))
    FoldedNetwork(net)(torch.rand(2, 1, 6, 6), 3, [Block(2, shared=False)])
    assert seen == [(2, 2, 4, 4)]


def test_whole_pass_in_the_cards_layout_is_near_float32():
    torch.manual_seed(0)
    net = SmallCNN(dropout=0.0)
    x = torch.rand(4, 1, 28, 28)
    exact, _ = FoldedNetwork(net)(x, 2, [Block(4, shared=False)])
    with torch.autocast("cpu", torch.bfloat16), CardLayout():
        rounded, _ = FoldedNetwork(net)(x, 2, [Block(4, shared=False)])
    assert rounded.dtype == torch.float32
    assert torch.allclose(exact, rounded, atol=0.02)
