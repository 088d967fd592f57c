"""Networks that a method cannot go around are refused when it is made."""

import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import stfseb
from stfseb.errors import StfsebError
from stfseb.networks.checks import GroupingWarning

CONTEXT = torch.rand(40, 8)


def method(name, net):
    return getattr(stfseb, name)(net, **({"context": CONTEXT} if name in ("STFSEB", "FSEB", "GFSVI") else {}))


def plain():
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))


@pytest.mark.parametrize("make", [torch.jit.script, lambda net: torch.jit.trace(net, CONTEXT, check_trace=False)])
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_scripted_networks_are_refused(make):
    inner = make(plain())
    for net in (inner, nn.Sequential(inner, nn.Linear(3, 3))):
        with pytest.raises(StfsebError, match=r"is scripted or traced.*give MAP the nn\.Module"):
            method("MAP", net)


@pytest.mark.parametrize("name", ["STFSEB", "FSEB", "GFSVI", "MFVI"])
def test_lazy_networks_are_refused_where_their_weights_are_needed_at_once(name):
    net = nn.Sequential(nn.LazyLinear(8), nn.Dropout(0.5), nn.Linear(8, 3))
    with pytest.raises(StfsebError, match=r"has lazy layers.*call the network on one batch first"):
        method(name, net)
    net(CONTEXT)
    method(name, net)


def test_batch_norm_without_running_statistics_sees_data_rows_only_and_warns():
    """The data term must be that of the data alone, however far away the context lies."""
    norm = nn.BatchNorm2d(2, track_running_stats=False)
    net = nn.Sequential(nn.Unflatten(1, (2, 2, 2)), norm, nn.Dropout(0.0), nn.Flatten(), nn.Linear(8, 3))
    x, y = torch.rand(6, 8), torch.arange(6) % 3
    expected = F.cross_entropy(net(x), y, reduction="sum")
    for name in ("STFSEB", "FSEB", "OutlierExposure"):
        switches = {"variant": "map"} if name == "FSEB" else {"samples": 1}
        with pytest.warns(GroupingWarning, match=r"layer '1' \(BatchNorm2d\) has track_running_stats=False"):
            around = getattr(stfseb, name)(net, context=30 + 50 * CONTEXT, **switches)
        torch.testing.assert_close(around.train().objective(x, y, 6).data, expected)


def test_a_forward_of_the_instance_counts():
    """Libraries wrap `forward` on the instance: a chain's modules are then not the whole network."""
    net = plain()
    expected = 2.0 * stfseb.MCDropout(net).sample_logits(CONTEXT, 2, seed=3)
    net.forward = types.MethodType(lambda self, x: 2.0 * nn.Sequential.forward(self, x), net)
    torch.testing.assert_close(stfseb.MCDropout(net).sample_logits(CONTEXT, 2, seed=3), expected)


@pytest.mark.parametrize(
    ("last", "told"),
    [
        (lambda out: out[:, 0], r"not \(6,\)"),
        (lambda out: out[:, None].expand(-1, 2, -1), r"not \(6, 2, 3\)"),
        (lambda out: (out, out), "not tuple"),
        (lambda out: {"logits": out}, "not dict"),
    ],
)
@pytest.mark.parametrize("name", ["MAP", "MCDropout", "STFSEB", "MFVI"])
def test_outputs_that_are_no_logits_are_refused(name, last, told):
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = plain()

        def forward(self, x):
            return last(self.body(x))

    around = method(name, Own())
    x, y = torch.rand(6, 8), torch.arange(6) % 3
    told = told.replace("6", r"\d+")  # rows of all samples, for some
    for call in (lambda: around.objective(x, y, 6), lambda: around.predict_proba(x, samples=2)):
        with pytest.raises(StfsebError, match=r"must return logits of shape \(N, classes\), " + told):
            call()
