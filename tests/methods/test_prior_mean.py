"""The prior mean, the function prior on its own, and extractors that are not the network's own copy."""

import math

import pytest
import torch
from torch import nn

from stfseb import MLP, STFSEB, FunctionPrior, StfsebError, fit, load, save
from stfseb.likelihoods import GaussianRegression
from stfseb.methods.function_term import PriorMean


def made(prior_mean=None, **settings):
    torch.manual_seed(0)
    net = MLP(3, 2, dropout=0.0).double()
    context = torch.randn(50, 3, dtype=torch.float64)
    method = STFSEB(
        net, context, prior_mean=prior_mean, likelihood=GaussianRegression(targets=2), samples=1, **settings
    )
    method.reseed(0)
    return method


def function_term(method):
    x, y = torch.zeros(4, 3, dtype=torch.float64), torch.zeros(4, 2, dtype=torch.float64)
    return method.objective(x, y, 4).function


def test_the_prior_mean_shifts_what_the_outputs_are_pulled_towards():
    method = made(1.5)
    draw = method.context.draw(torch.zeros(1, 3, dtype=torch.float64), 0)
    expected = FunctionPrior(draw.features, 1.0, 100.0, 5.0).penalty(method.net(draw.images) - 1.5)
    torch.testing.assert_close(function_term(made(1.5)), expected)
    torch.testing.assert_close(function_term(made(lambda x: torch.full((2,), 1.5))), expected)
    torch.testing.assert_close(function_term(made(lambda x: torch.full((len(x), 2), 1.5))), expected)
    torch.testing.assert_close(function_term(made(0.0)), function_term(made()))
    assert not torch.isclose(function_term(made()), expected)


def test_a_network_that_equals_its_prior_mean_pays_nothing():
    method = made()
    method.centred = PriorMean(method.net)
    assert float(function_term(method).detach()) == pytest.approx(0.0, abs=1e-12)


def test_mean_functions_are_checked_shown_and_not_trained(tmp_path):
    with pytest.raises(StfsebError, match="shape"):
        function_term(made(lambda x: torch.zeros(7)))
    with pytest.raises(StfsebError, match="finite"):
        made(math.nan)
    mean = nn.Linear(3, 2).double()
    method = made(mean)
    assert method.settings.prior_mean == "Linear"
    assert all(p is not q for p in method.parameters() for q in mean.parameters())
    assert load(save(method, tmp_path / "m")).settings == method.settings


def mean_net(rate=0.5):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(rate), nn.Linear(8, 2))


@pytest.mark.parametrize("way", ["module", "method", "function"])
def test_a_mean_with_dropout_in_another_precision_is_a_constant(way):
    mean = mean_net()
    given = {"module": mean, "method": mean.forward, "function": lambda x: mean(x.float())}[way]
    quiet = mean_net().eval()
    expected = function_term(made(lambda x: quiet(x.float())))
    before = mean[1].running_mean.clone()
    method = made(given)
    for _ in range(2):
        method.reseed(0)
        torch.testing.assert_close(function_term(method), expected, rtol=1e-5, atol=1e-6)
    assert mean.training
    assert mean[0].weight.dtype == torch.float32
    assert torch.equal(mean[1].running_mean, before)


def test_training_does_not_move_the_mean():
    mean = nn.Linear(3, 2).double()
    method = made(mean)
    before = function_term(method)
    with torch.no_grad():
        mean.weight.add_(1.0)
    method.reseed(0)
    assert torch.equal(function_term(method), before)


@pytest.mark.parametrize("context", ["train", "images"])
def test_a_pretrained_module_as_extractor_is_neither_trained_nor_saved(tmp_path, context):
    torch.manual_seed(0)
    backbone = nn.Sequential(nn.Linear(3, 8), nn.ReLU())
    net = nn.Sequential(backbone, nn.Dropout(0.1), nn.Linear(8, 2))
    points = torch.randn(40, 3)
    method = STFSEB(net, "train" if context == "train" else points, extractor=backbone, num_context=8, samples=2)
    before = method.context._callable[0](points)
    assert [name for name, _ in method.named_parameters() if not name.startswith("net.")] == []
    x, y = torch.randn(64, 3), torch.arange(64) % 2
    fit(method, (x, y), epochs=2, lr=0.1, progress=False)
    assert not torch.allclose(backbone(points), before)  # fine-tuned
    assert torch.equal(method.context._callable[0](points), before)  # the prior stayed where it was
    again = load(save(method, tmp_path / "m"), net=net)
    assert torch.equal(again.predict_proba(x, seed=0), method.predict_proba(x, seed=0))


def test_fine_tuning_with_a_frozen_backbone_leaves_it_alone():
    torch.manual_seed(0)
    backbone = nn.Sequential(nn.Linear(3, 8), nn.ReLU())
    backbone.requires_grad_(False)
    weights = backbone[0].weight.clone()
    net = nn.Sequential(backbone, nn.Dropout(0.1), nn.Linear(8, 2))
    method = STFSEB(net, torch.randn(40, 3), extractor=backbone, num_context=8, samples=2)
    assert len(method.trainable()) == 2
    fit(method, (torch.randn(64, 3), torch.arange(64) % 2), epochs=2, lr=0.1, progress=False)
    assert torch.equal(backbone[0].weight, weights)


def test_the_function_prior_alone_regularises_a_deterministic_network():
    """In anyone's loop: a penalty at context points makes the network less sure there, and only there."""
    torch.manual_seed(0)
    x = torch.cat([torch.randn(100, 2) - 3, torch.randn(100, 2) + 3])
    y = torch.arange(200) // 100
    far = torch.randn(200, 2) + torch.tensor([6.0, -6.0])
    certainty = {}
    for strength in (0.0, 1.0):
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2))
        extractor = nn.Sequential(nn.Linear(2, 32), nn.ReLU()).requires_grad_(False)
        prior = FunctionPrior(extractor(far[:32]), 1.0, 1.0, 5.0)
        optimiser = torch.optim.Adam(net.parameters(), lr=0.01)
        for _ in range(200):
            loss = nn.functional.cross_entropy(net(x), y, reduction="sum") + strength * prior.penalty(net(far[:32]))
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        with torch.no_grad():
            certainty[strength] = [torch.softmax(net(points), -1).amax(-1).mean().item() for points in (x, far[32:])]
    assert certainty[1.0][0] > 0.99
    assert certainty[1.0][1] < certainty[0.0][1] - 0.2
