"""The naive way minimises what the library minimises: loss and gradients, written down twice."""

import math

import pytest
import torch
from torch import nn

from stfseb.experiments.naive import METHODS, NaiveTraining
from stfseb.methods.registry import method_class
from stfseb.networks.cnn import SmallCNN

SAMPLES, ROWS, POINTS, DATA = 3, 6, 5, 24


def made(key, dropout=0.0, **settings):
    """Return a method in float64 on a tiny network, and its naive form: all context points are in every step."""
    torch.manual_seed(1)
    net = SmallCNN(1, 4, dropout, 8, hidden=6).double()
    cls = method_class(key)
    names = cls.settings_type.names()
    if "samples" in names:
        settings["samples"] = SAMPLES
    if "num_context" in names:
        settings |= {"num_context": POINTS, "context": torch.rand(POINTS, 1, 8, 8, dtype=torch.float64)}
    method = cls(net, **settings)
    if key == "gfsvi":
        method.prior.set(2.0, 1.3)
    x, y = torch.randint(256, (DATA, 1, 8, 8), dtype=torch.uint8), torch.randint(4, (DATA,))
    return method, NaiveTraining(method, x, y, ROWS)


def minibatch():
    generator = torch.Generator().manual_seed(2)
    x = torch.rand(ROWS, 1, 8, 8, dtype=torch.float64, generator=generator)
    return x, torch.randint(4, (ROWS,), generator=generator)


def same_noise(method, naive, monkeypatch):
    """Have both draw the same weights."""
    size = sum(p.numel() for p in method.means().values())
    noise = torch.randn(SAMPLES, size, dtype=torch.float64)
    turns = iter(noise)

    def flat():
        mean = torch.cat([p.flatten() for p in method.means().values()])
        return mean, torch.cat([scale.flatten() for scale in method.scales().values()])

    def theirs(samples, generator=None):
        mean, scale = flat()
        return mean + scale * noise[:samples]

    def ours():
        mean, scale = flat()
        parts = (mean + scale * next(turns)).split([p.numel() for p in method.means().values()])
        return {name: part.view(p.shape) for (name, p), part in zip(method.means().items(), parts, strict=True)}

    monkeypatch.setattr(method, "draw_weights", theirs)
    monkeypatch.setattr(naive, "draw", ours)


SETTINGS = {
    "stfseb": {"dof": 4.0, "sigma": 0.3, "tau1": 0.7, "tau2": 2.0, "prior_weight": 0.6},
    "mcdropout": {"sigma": 0.3, "prior_weight": 0.6},
    "outlierexposure": {"sigma": 0.3, "prior_weight": 0.6, "strength": 0.8},
    "map": {"sigma": 0.3},
    "mfvi": {"sigma": 0.3},
    "fseb": {"sigma": 0.3, "tau1": 0.7, "tau2": 2.0},
    "gfsvi": {"gamma": 1e-3},
}


@pytest.mark.parametrize("key", METHODS)
def test_the_naive_way_has_the_objective_and_the_gradients_of_the_library(key, monkeypatch):
    method, naive = made(key, **SETTINGS[key])
    method.train()
    if hasattr(method, "draw_weights"):
        same_noise(method, naive, monkeypatch)
    x, y = minibatch()
    parameters = [p for p in method.parameters() if p.requires_grad]
    library = method.objective(x, y, DATA)
    for term in library:  # each that the method has counts: leaving one out would show
        assert term == 0 or abs(term) > 1e-6 * abs(library.total)
    theirs = torch.autograd.grad(library.total, parameters)
    total = naive.objective(x, y)
    ours = torch.autograd.grad(total, parameters)
    assert math.isclose(total.item(), library.total.item(), rel_tol=1e-10)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("key", ["stfseb", "mcdropout", "outlierexposure"])
@pytest.mark.parametrize("weight", ["rate", "keep"])
def test_the_weight_prior_has_the_dropout_rate_of_the_network(key, weight):
    method, naive = made(key, dropout=0.3, prior_weight=weight)
    method.train()
    x, y = minibatch()
    share = ROWS / DATA
    found = method.objective(x, y, DATA).weights.item()
    assert math.isclose(naive._weights().item() * share, found, rel_tol=1e-10)


@pytest.mark.parametrize("key", ["stfseb", "mfvi"])
def test_samples_of_the_naive_way_differ(key):
    method, naive = made(key, dropout=0.5)
    method.train()
    x, _ = minibatch()
    assert not torch.equal(naive._pass(x), naive._pass(x))


@pytest.mark.parametrize("key", METHODS)
def test_a_naive_step_changes_every_parameter_and_goes_on_after_an_epoch(key):
    torch.manual_seed(0)
    _, naive = made(key, dropout=0.1)
    naive.method.float()
    naive.extractor.float()
    before = [p.detach().clone() for p in naive.method.parameters()]
    for _ in range(DATA // ROWS + 1):
        naive.step()
    assert all(not torch.equal(a, b) for a, b in zip(before, naive.method.parameters(), strict=True))


def test_what_the_naive_way_cannot_do_is_said():
    from stfseb.errors import StfsebError

    method, _ = made("map")
    images, labels = torch.zeros(4, 1, 8, 8, dtype=torch.uint8), torch.zeros(4, dtype=torch.int64)
    with pytest.raises(StfsebError, match="batch_size=5 exceeds the 4 images"):
        NaiveTraining(method, images, labels, 5)
    method.__class__ = type("Other", (type(method),), {"key": "other"})
    with pytest.raises(StfsebError, match="'other'"):
        NaiveTraining(method, images, labels, 4)


def test_the_extractor_stays_at_the_initial_weights():
    method, naive = made("stfseb")
    with torch.no_grad():
        nn.init.zeros_(method.net.hidden.weight)
    assert naive.extractor.hidden.weight.abs().sum() > 0
