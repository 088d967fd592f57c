"""Outlier exposure against a direct computation and MC Dropout."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from stfseb.errors import StfsebError
from stfseb.methods.mc_dropout import MCDropout
from stfseb.methods.outlier_exposure import OutlierExposure


def net(rate: float = 0.5) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(rate), nn.Linear(6, 3)).double()


def batch() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, context = (torch.rand(n, 4, generator=generator, dtype=torch.float64) for n in (8, 5))
    return x, torch.randint(3, (8,), generator=generator), context


def test_function_term_is_the_cross_entropy_to_the_uniform():
    x, y, context = batch()
    method = OutlierExposure(net(0.0), context, strength=0.7, num_context=5, samples=2)
    logits = method.net(context)
    uniform = torch.full((5, 3), 1 / 3, dtype=torch.float64)
    expected = 0.7 * 8 * nn.functional.cross_entropy(logits, uniform)
    torch.testing.assert_close(method.objective(x, y, 80).function, expected)


def test_without_strength_it_is_mc_dropout():
    x, y, _ = batch()
    ours, theirs = OutlierExposure(net(), sigma=0.4, strength=0.0), MCDropout(net(), sigma=0.4)
    found = []
    for method in (ours, theirs):
        torch.manual_seed(2)
        found.append(method.objective(x, y, 80))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_parts_of_a_step_add_up():
    x, y, context = batch()
    whole, parts = (OutlierExposure(net(), context, num_context=3) for _ in range(2))
    whole.reseed(0)
    parts.reseed(0)
    expected = whole.objective(x, y, 80)
    found = [parts.objective(x[s], y[s], 80, batch_size=8) for s in (slice(0, 3), slice(3, 8))]
    for name in ("function", "weights"):
        torch.testing.assert_close(sum(getattr(part, name) for part in found), getattr(expected, name))


def test_training_makes_context_images_undecided():
    torch.manual_seed(0)
    x = torch.rand(60, 4, dtype=torch.float64)
    y = (x[:, 0] > 0.5).long()
    context = torch.rand(40, 4, dtype=torch.float64) + 2.0
    certainty = {}
    for strength in (0.0, 0.5):
        method = OutlierExposure(net(0.1), context, strength=strength, num_context=20, samples=3)
        optimiser = torch.optim.Adam(method.parameters(), lr=0.05)
        for _ in range(80):
            optimiser.zero_grad()
            (method.objective(x, y, 60).total / 60).backward()
            optimiser.step()
        certainty[strength] = float(method.predict_proba(context, seed=0).amax(1).mean())
        assert float((method.predict_proba(x, seed=0).argmax(1) == y).double().mean()) > 0.9
    assert certainty[0.5] < 0.5 < 0.8 < certainty[0.0]


def test_settings_are_checked():
    with pytest.raises(StfsebError, match="strength=-1"):
        OutlierExposure(net(), batch()[2], strength=-1)
    with pytest.raises(StfsebError, match="context is missing"):
        OutlierExposure(net())
    restored = OutlierExposure.restore(net(), OutlierExposure(net(), batch()[2], num_context=2).settings, None)
    assert restored.predict_proba(batch()[0]).shape == (8, 3)
    with pytest.raises(StfsebError, match="no context images"):
        restored.objective(*batch()[:2], 80)
