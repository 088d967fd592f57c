"""The counted floor against torch's own counter of operations, and against sums by hand."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from stfseb.experiments.floor import Count, floor_seconds, layers_of, rates, step_count
from stfseb.experiments.naive import METHODS
from stfseb.function_prior import FunctionPrior
from stfseb.methods.registry import method_class
from stfseb.methods.row_gram import row_gram, row_slopes
from stfseb.networks.cnn import DeepCNN, SmallCNN

SAMPLES, ROWS, POINTS, CLASSES = 3, 6, 4, 5


def made(key, network):
    torch.manual_seed(0)
    net = network(1, CLASSES, 0.3, 8, hidden=6)
    cls = method_class(key)
    names, settings = cls.settings_type.names(), {}
    if "samples" in names:
        settings["samples"] = SAMPLES
    if "num_context" in names:
        settings |= {"num_context": POINTS, "context": torch.rand(20, 1, 8, 8)}
    method = cls(net, **settings).train()
    if key == "gfsvi":
        method.prior.set(2.0, 1.0)
    return method, torch.rand(ROWS, 1, 8, 8), torch.randint(CLASSES, (ROWS,))


def products(jacobian, *_, **__):
    """Return what torch would count in GFSVI's products over weights, which are operators of our own."""
    rows, classes, weights = jacobian
    return 2 * classes * rows**2 * weights


def counted(method, x, y):
    """Return what torch counts in a step of the library, after one that fills its caches."""
    method.objective(x, y, 20)
    ours = {operator._opoverload.overloadpacket: products for operator in (row_gram, row_slopes)}
    counter = FlopCounterMode(display=False, custom_mapping=ours)
    with counter:
        method.objective(x, y, 20).total.backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("network", [SmallCNN, DeepCNN])
@pytest.mark.parametrize("key", [key for key in METHODS if key != "gfsvi"])
def test_operations_are_those_that_torch_counts(key, network, monkeypatch):
    # The algebra of the function prior is left out of the floor.
    monkeypatch.setattr(FunctionPrior, "__init__", lambda *_, **__: None)
    monkeypatch.setattr(FunctionPrior, "failure", lambda _: "")
    monkeypatch.setattr(FunctionPrior, "penalty", lambda _, values: values.square().sum((-2, -1)))
    method, x, y = made(key, network)
    assert step_count(method, x).flops == counted(method, x, y)


@pytest.mark.parametrize("network", [SmallCNN, DeepCNN])
def test_operations_of_gfsvi_are_those_that_torch_counts_but_for_what_is_done_twice(network):
    method, x, y = made("gfsvi", network)
    convolutions = [layer for layer in layers_of(method.net, x) if not layer.linear]
    # To save memory Jacobians are made again in the backward pass, and the first layer's patches get a gradient.
    again = CLASSES * POINTS * sum(layer.operations for layer in [*convolutions, convolutions[0]])
    found = counted(method, x, y) - again
    assert 0.995 * found < step_count(method, x).flops <= found


def test_dense_layers_of_gfsvi_are_products_over_pairs_of_rows():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(512, 8), nn.ReLU(), nn.Linear(8, 2))
    points = 16
    method = method_class("gfsvi")(net, torch.rand(20, 512), num_context=points, samples=1).train()
    method.prior.set(2.0, 1.0)
    x, y = torch.rand(ROWS, 512), torch.randint(2, (ROWS,))
    found = counted(method, x, y)
    assert 0.95 * found < step_count(method, x).flops <= found
    data = step_count(method_class("mfvi")(net, samples=1), x).flops
    assert found > 5 * data  # so that the pairs are most of it


def test_a_linear_network_by_hand():
    net = nn.Sequential(nn.Flatten(), nn.Linear(8, 3), nn.ReLU(), nn.Linear(3, 2))
    x = torch.rand(10, 8)
    map_ = step_count(method_class("map")(net), x)
    # Forward and the weights' gradient of both layers, the input's of the second, ten rows.
    assert map_.flops == 10 * 2 * (2 * 8 * 3 + 3 * 3 * 2)
    weights = (8 * 3 + 3, 3 * 2 + 2)
    first = 2 * (10 * 8 + 10 * 3 + weights[0])  # read and written forward; read or written backward
    second = 2 * (10 * 3 + 10 * 2 + weights[1]) + 10 * 3 + weights[1]
    assert map_.bytes == 2 * (first + second)
    mfvi = step_count(method_class("mfvi")(net, samples=4), x)
    assert mfvi.flops == 4 * map_.flops
    first = 2 * (10 * 8 + 4 * (10 * 3 + weights[0]))  # the input is shared by the samples
    drawn = 2 * 4 * sum(weights)  # weights written, their gradients read
    assert mfvi.bytes == 2 * (first + 4 * second + drawn)


def test_layers_before_the_first_dropout_are_shared_and_the_mode_is_kept():
    net = DeepCNN(1, CLASSES, 0.3, 8, hidden=6).train()
    layers = layers_of(net, torch.rand(3, 1, 8, 8))
    assert [layer.shared for layer in layers] == [True, True] + [False] * 6
    assert [layer.first for layer in layers] == [True] + [False] * 7
    assert net.training
    assert not any(module._forward_hooks for module in net.modules())


@pytest.mark.parametrize("key", ["stfseb", "fseb"])
def test_context_points_and_samples_are_rows(key):
    method, x, _ = made(key, SmallCNN)
    alone, x = step_count(method, x).flops, torch.rand(2 * ROWS + POINTS, 1, 8, 8)
    assert step_count(method, x).flops == 2 * alone


def test_a_method_that_is_not_written_down_is_not_counted():
    method, x, _ = made("map", SmallCNN)
    method.__class__ = type("Other", (type(method),), {"key": "other"})
    assert step_count(method, x) is None


def test_the_floor_is_the_larger_of_arithmetic_and_traffic():
    measured = {"operations": 100.0, "bytes": 10.0}
    assert floor_seconds(Count(1000.0, 10.0), measured) == 10.0
    assert floor_seconds(Count(1000.0, 1000.0), measured) == 100.0
    assert Count(1.0, 2.0) + Count(3.0, 4.0) * 2 == Count(7.0, 10.0)


def test_the_rates_of_this_machine_are_possible():
    found = rates(torch.device("cpu"))
    assert 1e9 < found["operations"] < 1e15
    assert 1e8 < found["bytes"] < 1e13
