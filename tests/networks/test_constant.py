"""Functions that people give for h: training moves none of them, and none draws dropout or moves batch norm."""

import functools

import pytest
import torch
from torch import nn

from stfseb import STFSEB, StfsebError, fit
from stfseb.networks.constant import detached, owner, quietly, reachable


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.norm, self.drop = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.5)
        self.head = nn.Linear(16, 3)

    def features(self, x, scale=1.0):
        return scale * self.drop(torch.relu(self.norm(self.body(x))))

    def forward(self, x):
        return self.head(self.features(x))


class Holder:
    def __init__(self, net):
        self.net = net

    def features(self, x):
        return self.net.features(x)

    def __call__(self, x):
        return self.features(x)


WAYS = {
    "method": lambda net: net.features,
    "partial": lambda net: functools.partial(net.features, scale=1.0),
    "partial twice": lambda net: functools.partial(functools.partial(net.features), scale=1.0),
    "closure": lambda net: lambda x: net.features(x),
    "default": lambda net: lambda x, net=net: net.features(x),
    "object": Holder,
    "method of an object": lambda net: Holder(net).features,
}


@pytest.fixture
def data():
    generator = torch.Generator().manual_seed(0)
    return torch.rand(128, 8, generator=generator), torch.randint(3, (128,), generator=generator)


@pytest.fixture
def context():
    return torch.rand(300, 8, generator=torch.Generator().manual_seed(1))


def quiet_features(net, x):
    with torch.no_grad():
        training = net.training
        found = net.eval().features(x)
        net.train(training)
    return found


@pytest.mark.parametrize("way", WAYS)
def test_features_are_those_of_the_network_as_it_was(way, data, context):
    torch.manual_seed(0)
    net = Net().train()
    expected = quiet_features(net, context)
    method = STFSEB(net, context, samples=2, extractor=WAYS[way](net))
    method.train()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    draw = method.context.draw(data[0], 0)
    torch.testing.assert_close(draw.features, expected[method.context.stream.indices(0)])
    assert not draw.features.requires_grad
    assert net.training
    assert net.drop.training
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())  # batch norm's, too
    fit(method, data, data, epochs=2, batch_size=32, lr=0.05, progress=False)
    torch.testing.assert_close(method.context.features(method.like), expected)


@pytest.mark.parametrize("way", ["method", "partial", "partial twice"])
def test_a_copy_is_taken_only_of_what_is_trained(way, context):
    net, backbone = Net(), Net()
    assert owner(detached(WAYS[way](net), net)) is not net
    assert owner(detached(WAYS[way](backbone), net)) is backbone
    assert owner(detached(WAYS[way](backbone))) is not backbone


@pytest.mark.parametrize("way", ["method", "partial"])
def test_rows_of_the_minibatch_have_features_of_the_network_as_it_was(way, data):
    torch.manual_seed(0)
    net = Net()
    method = STFSEB(net, "train", samples=2, num_context=8, extractor=WAYS[way](net))
    method.reseed(0)
    before = method.context.draw(data[0], 0).features
    fit(method, data, epochs=1, batch_size=32, lr=0.05, progress=False)
    assert torch.equal(method.context.draw(data[0], 0).features, before)


def test_a_copied_method_follows_the_network_to_its_precision(data, context):
    net = Net()
    method = STFSEB(net, context, samples=2, extractor=net.features)
    net.double()
    assert method.context.draw(data[0].double(), 0).features.dtype == torch.float64


def test_global_networks_are_reached_too(monkeypatch):
    net = Net()
    monkeypatch.setitem(globals(), "NETWORK", net)
    assert reachable(lambda x: NETWORK.features(x)) == [net]  # noqa: F821
    assert reachable(torch.flatten) == []
    assert reachable(lambda x: nn.functional.relu(x)) == []


def test_modes_come_back_after_an_error():
    net = Net().train()
    net.norm.eval()

    def fails():
        with quietly([net]):
            assert not net.drop.training
            assert torch.equal(nn.functional.dropout(torch.ones(9), 0.5, True), torch.ones(9))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert net.drop.training
    assert not net.norm.training


def test_a_module_that_refuses_to_be_copied_is_named(context):
    class Refuses(Net):
        def __deepcopy__(self, memo):
            raise TypeError("no")

    net = Refuses()
    with pytest.raises(StfsebError, match="Refuses cannot be copied") as caught:
        STFSEB(net, context, extractor=net.features)
    assert "\n" not in str(caught.value)


def test_a_module_of_ones_own_stays_in_its_precision(data):
    """A backbone that sees to its inputs itself, given by a method: it shares nothing with the network."""

    class Backbone(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 4).double()

        def features(self, x):
            return self.layer(x.double())

    backbone = Backbone()
    method = STFSEB(Net(), data[0][:40], extractor=backbone.features, samples=1)
    fit(method, (data[0][:32], data[1][:32]), (data[0][:8], data[1][:8]), epochs=1, progress=False)
    assert backbone.layer.weight.dtype == torch.float64
    expected = backbone.features(data[0][:40])
    torch.testing.assert_close(method.context.features(data[0]).double(), expected, rtol=1e-6, atol=1e-6)


def test_a_function_without_a_module_name_is_a_function():
    made = {}
    exec("def features(x):\n    return x", {}, made)
    made["features"].__module__ = None
    assert reachable(made["features"]) == []
