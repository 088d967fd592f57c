"""How the calls of a pass lie in memory: networks that `view` their features work, the numbers stay the same."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import stfseb
from stfseb.networks.dropout import Block, MonteCarloDropout, NoDropout
from stfseb.networks.layout import layout_kept, let_through

LAST = torch.channels_last


class Flattening(nn.Module):
    """Two convolutions and a linear layer, with a flattening in between as people write it."""

    def __init__(self, flatten, channels=1):
        super().__init__()
        self.one, self.two = nn.Conv2d(channels, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.drop, self.last, self.flatten = nn.Dropout(0.5), nn.Linear(8 * 16, 3), flatten

    def forward(self, x):
        x = F.max_pool2d(torch.relu(self.one(x)), 2)
        x = F.max_pool2d(torch.relu(self.two(x)), 2)
        return self.last(self.drop(self.flatten(x)))


WAYS = {
    "numbers": lambda x: x.view(-1, 8 * 16),
    "a tuple": lambda x: x.view((x.size(0), -1)),
    "by name": lambda x: x.view(size=(x.size(0), 128)),
    "as another": lambda x: x.view_as(torch.empty(x.size(0), 128)),
    "bits and back": lambda x: (
        x.view(torch.int16 if x.dtype == torch.bfloat16 else torch.int32).view(x.dtype).flatten(1)
    ),
}


def made(flatten, channels=1):
    torch.manual_seed(0)
    return Flattening(flatten, channels)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("kind", [stfseb.MCDropout, stfseb.MAP, stfseb.MFVI])
def test_a_network_that_views_is_one_that_flattens(way, channels, kind):
    x = torch.rand(5, channels, 16, 16)
    theirs, ours = (
        kind(made(flatten, channels)).sample_logits(x, 3, seed=1) for flatten in (lambda x: x.flatten(1), WAYS[way])
    )
    assert torch.equal(theirs, ours)


@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize("kind", [stfseb.STFSEB, stfseb.MCDropout, stfseb.FSEB, stfseb.MAP])
def test_it_trains_and_is_its_owners_afterwards(kind, precision):
    x, y = torch.rand(40, 1, 16, 16), torch.arange(40) % 3
    net = made(WAYS["numbers"])
    context = {"context": torch.rand(20, 1, 16, 16), "num_context": 4} if kind in (stfseb.STFSEB, stfseb.FSEB) else {}
    method = kind(net, **context)
    stfseb.fit(method, (x, y), (x, y), epochs=1, batch_size=16, precision=precision, progress=False)
    assert net(x).shape == (40, 3)  # its own forward, outside of our passes
    assert all(p.is_contiguous() for p in net.parameters())
    assert method.predict_proba(x[:4]).shape == (4, 3)


@pytest.mark.gpu
@pytest.mark.parametrize("capture", [True, False])
def test_it_trains_on_a_card_and_is_its_owners_afterwards(capture):
    x, y = torch.rand(64, 1, 16, 16), torch.arange(64) % 3
    net = made(WAYS["numbers"])
    stfseb.fit(
        stfseb.MCDropout(net), (x, y), (x, y), epochs=1, batch_size=16, device="cuda", capture=capture, progress=False
    )
    assert net(x.cuda()).shape == (64, 3)
    assert all(p.is_contiguous() for p in net.parameters())


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("mode", [NoDropout, lambda: MonteCarloDropout(2, [Block(4, shared=True)], folded=False)])
def test_convolutions_of_a_pass_run_channels_last_on_a_cpu(channels, mode):
    net, seen = made(lambda x: x.flatten(1), channels).eval(), []
    for conv in (net.one, net.two):
        conv.register_forward_hook(lambda m, i, out: seen.append(out.is_contiguous(memory_format=LAST)))
    x = torch.rand(4, channels, 16, 16)
    plain = net(x)
    assert seen == [False, False]
    with mode() as how:
        out = net(x)
    assert seen[2:] == [True, True]
    if how.__class__ is NoDropout:
        torch.testing.assert_close(out, plain)
    assert x.stride() == (channels * 256, 256, 16, 1)  # the caller's own stays as it was


def test_gradients_do_not_depend_on_the_layout():
    net, x = made(lambda x: x.flatten(1)), torch.rand(6, 1, 16, 16)
    net.drop.p = 0.0
    theirs = torch.autograd.grad(net(x).square().sum(), list(net.parameters()))
    with NoDropout():
        ours = torch.autograd.grad(net(x).square().sum(), list(net.parameters()))
    for a, b in zip(theirs, ours, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_where_a_layout_is_not_chosen(dtype):
    """In double precision, under vmap and jvp, for volumes and for what is given by name."""
    conv = nn.Conv2d(3, 4, 3).to(dtype)
    x = torch.rand(2, 3, 8, 8, dtype=dtype)
    laid = let_through(F.conv2d, (x, conv.weight), {}).is_contiguous(memory_format=LAST)
    assert laid == (dtype == torch.float32)
    assert let_through(F.conv2d, (), {"input": x, "weight": conv.weight}).is_contiguous()
    strides = []

    def one(weight):
        out = let_through(F.conv2d, (x, weight), {})
        strides.append(out.stride())
        return F.group_norm(out, 2)  # asks for the layout, which vmap does not tell of any but the plain one

    torch.func.vmap(one)(torch.stack([conv.weight, conv.weight]))
    torch.func.jvp(one, (conv.weight.detach(),), (conv.weight.detach(),))
    assert all(stride[-1] == 1 for stride in strides)
    assert let_through(F.conv3d, (x[None], torch.rand(1, 2, 1, 1, 1, dtype=dtype)), {}).shape == (1, 1, 3, 8, 8)


def test_weights_lie_in_the_end_as_they_were():
    plain, last = nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 3).to(memory_format=LAST)
    net = nn.Sequential(plain, last)
    values = [p.detach().clone() for p in net.parameters()]

    def leave():
        with layout_kept(net):
            for parameter in (plain.weight, last.weight):
                parameter.data = parameter.data.contiguous(memory_format=LAST)
            raise KeyError

    with pytest.raises(KeyError):
        leave()
    assert plain.weight.is_contiguous()
    assert last.weight.is_contiguous(memory_format=LAST)
    assert not last.weight.is_contiguous()
    assert all(torch.equal(a, b) for a, b in zip(values, net.parameters(), strict=True))
