"""Networks that recompute activations: refused where the gradient would be another function's, else as they are."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import stfseb
from stfseb.errors import StfsebError


class Recomputing(nn.Module):
    def __init__(self, *layers, reentrant=False, on=True):
        super().__init__()
        self.first, self.block, self.last = nn.Linear(8, 8), nn.Sequential(*layers), nn.Linear(8, 3)
        self.reentrant, self.on = reentrant, on

    def forward(self, x):
        x = self.first(x)
        x = checkpoint(self.block, x, use_reentrant=self.reentrant) if self.on else self.block(x)
        return self.last(x)


# torch says so where gradients are off, as in finding features and in predictions.
pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
DATA = (torch.rand(6, 8), torch.arange(6) % 3, 6)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["MAP", "MCDropout", "STFSEB"])
def test_dropout_inside_is_refused(name, reentrant):
    net = Recomputing(nn.Linear(8, 8), nn.Dropout(0.5), reentrant=reentrant)
    method = getattr(stfseb, name)(net, **({"context": torch.rand(40, 8)} if name == "STFSEB" else {}))
    with pytest.raises(StfsebError, match=r"recomputes activations \(torch.utils.checkpoint\).*switch"):
        method.objective(*DATA)
    assert method.predict_proba(DATA[0], samples=2).shape == (6, 3)  # no backward pass follows
    net.on = False
    method.objective(*DATA).total.backward()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["MFVI", "FSEB"])
def test_weights_that_are_gone_in_the_backward_pass_are_refused(name, reentrant):
    net = Recomputing(nn.Linear(8, 8), nn.Tanh(), reentrant=reentrant)
    method = getattr(stfseb, name)(net, **({"context": torch.rand(40, 8)} if name == "FSEB" else {}))
    with pytest.raises(StfsebError, match="recomputes activations"):
        method.objective(*DATA)


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_is_the_same_a_second_time_stays(reentrant):
    """Without dropout inside, MAP's gradient is right, and that of masks drawn outside of the recomputed part."""
    net = Recomputing(nn.Linear(8, 8), nn.Tanh(), reentrant=reentrant)
    gradients = []
    for on in (True, False):
        net.on = on
        net.zero_grad()
        stfseb.MAP(net).objective(*DATA).total.backward()
        gradients.append([p.grad.clone() for p in net.parameters()])
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("block", [nn.Dropout(0.0), nn.Dropout(0.5).eval()], ids=["rate 0", "off"])
def test_dropout_that_drops_nothing_is_recomputed_alike(block):
    """timm's blocks all have an `nn.Dropout(0.0)`."""
    stfseb.MAP(Recomputing(nn.Linear(8, 8), block)).objective(*DATA).total.backward()
