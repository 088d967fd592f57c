"""The prior of GFSVI: its covariance for inputs of any shape, and hyper-parameters set by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from stfseb import fit
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
