"""The prior of GFSVI: its covariance for inputs of any shape, and hyper-parameters set by hand."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from stfseb import StfsebError, fit, load, save
from stfseb.likelihoods import GaussianRegression
from stfseb.methods.gfsvi import GFSVI
from stfseb.methods.gp_prior import GPPrior


def test_covariances_of_sets_are_those_of_each():
    torch.manual_seed(0)
    prior = GPPrior("matern32")
    prior.set(0.8, 2.0)
    sets = torch.rand(3, 5, 2, 4)
    found = prior.covariances(sets.flatten(2))
    assert found.shape == (3, 5, 5)
    for one, points in zip(found, sets, strict=True):
        torch.testing.assert_close(one, prior.covariance(points))


@pytest.mark.parametrize("num_context", [2, 4])  # 2: as many points as channels
def test_signals_are_what_the_same_numbers_in_rows_are(num_context: int):
    torch.manual_seed(0)
    x, y = torch.rand(12, 2, 6), torch.arange(12) % 3
    layers = nn.Conv1d(2, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(16, 3)
    found = []
    for net, inputs in ((nn.Sequential(*layers), x), (nn.Sequential(nn.Unflatten(1, (2, 6)), *layers), x.flatten(1))):
        method = GFSVI(net, inputs, num_context=num_context, samples=1, cache=False)
        method.prior.set(2.0, 1.5)
        method.reseed(0)
        found.append(method.objective(inputs, y, 12).function)
        assert method.prior.covariance(inputs).shape == (12, 12)
    assert float(found[0].detach()) == pytest.approx(float(found[1].detach()), rel=1e-6)
    fit(GFSVI(nn.Sequential(*layers), x, num_context=2, kernel_steps=2, cache=False), (x, y), epochs=1, progress=False)


def regression(**settings) -> GFSVI:
    torch.manual_seed(0)
    context = torch.rand(20, 5)
    return GFSVI(nn.Linear(5, 1), context, num_context=4, likelihood=GaussianRegression(), cache=False, **settings)


def test_a_kernel_set_by_hand_serves_regression():
    method, x = regression(), torch.rand(30, 5)
    with pytest.raises(StfsebError, match=r"gaussian.*method\.prior\.set\(length_scale, variance\) before training"):
        fit(method, (x, x.sum(1)), epochs=1, progress=False)
    method.prior.set(1.5, 0.7)
    result = fit(method, (x, x.sum(1)), epochs=2, progress=False)
    assert result.history[-1]["function"] > 0
    assert (float(method.prior.length_scale), float(method.prior.variance)) == (1.5, 0.7)


def classifier(seed: int = 0) -> GFSVI:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    return GFSVI(net, torch.rand(20, 5), num_context=4, kernel_steps=2, cache=False)


def test_a_kernel_set_by_hand_is_kept_and_survives(tmp_path):
    x, y = torch.rand(30, 5), torch.arange(30) % 3
    method = classifier()
    method.prior.set(1.5, 0.7)
    fit(method, (x, y), epochs=1, progress=False)
    assert method.provenance["kernel"] == {"length_scale": 1.5, "variance": 0.7, "set": "by hand"}
    again = load(save(method, tmp_path / "m"), net=classifier().net)
    copied, taken = copy.deepcopy(method), classifier(1)
    taken.take_over(method)
    for other in (again, copied, taken):
        other.prepare(x, y)
        assert (float(other.prior.length_scale), float(other.prior.variance)) == (1.5, 0.7)


def test_a_fitted_kernel_is_fitted_anew_to_other_data():
    x, y = torch.rand(30, 5), torch.arange(30) % 3
    method = classifier()
    method.prepare(x, y)
    first = method.provenance["kernel"]
    method.prepare(0.2 * x, y)
    assert method.provenance["kernel"] != first
    assert "log_likelihood" in first
    method.prior.set(1.5, 0.7)
    method.take_over(classifier(1))  # whose kernel is to be fitted
    method.prepare(x, y)
    assert method.provenance["kernel"] == first
