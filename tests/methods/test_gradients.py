"""Gradients of every objective against central differences, in float64 on a tiny network."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor, nn

from stfseb.methods.ensemble import Ensemble
from stfseb.methods.fs_eb import FSEB
from stfseb.methods.gfsvi import GFSVI
from stfseb.methods.map import MAP
from stfseb.methods.mc_dropout import MCDropout
from stfseb.methods.mfvi import MFVI
from stfseb.methods.outlier_exposure import OutlierExposure
from stfseb.methods.st_fs_eb import STFSEB

if TYPE_CHECKING:
    from stfseb.methods.base import Method


def net(seed: int = 0) -> nn.Sequential:
    """Smooth, so that a finite difference never crosses a kink."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 2, 2),
        nn.Tanh(),
        nn.Dropout(0.5),
        nn.Flatten(),
        nn.Linear(8, 4),
        nn.Tanh(),
        nn.LayerNorm(4),
        nn.Linear(4, 3),
    ).double()


def batch() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, context = (torch.rand(n, 1, 3, 3, generator=generator, dtype=torch.float64) for n in (5, 4))
    return x, torch.randint(3, (5,), generator=generator), context


def gfsvi(**settings) -> GFSVI:
    method = GFSVI(net(), batch()[2], num_context=4, samples=2, gamma=1e-4, **settings)
    method.prior.set(1.5, 2.0)
    return method


METHODS = {
    "map": lambda: MAP(net(), 0.7),
    "mcdropout": lambda: MCDropout(net(), 0.7, 3),
    "stfseb": lambda: STFSEB(net(), batch()[2], tau1=0.7, tau2=0.2, num_context=4, samples=3),
    "stfseb-gaussian": lambda: STFSEB(net(), batch()[2], float("inf"), tau2=0.2, num_context=4, samples=3),
    "mfvi": lambda: MFVI(net(), 0.7, 3),
    "mfvi-vmap": lambda: MFVI(net(), 0.7, 3, vectorise=True),
    "mfvi-flipout": lambda: MFVI(net(), 0.7, 3, estimator="flipout"),
    "mfvi-local": lambda: MFVI(net(), 0.7, 3, estimator="local"),
    "fseb": lambda: FSEB(net(), batch()[2], 0.7, 0.5, 0.2, num_context=4, samples=3),
    "fseb-map": lambda: FSEB(net(), batch()[2], 0.7, 0.5, 0.2, num_context=4, variant="map", official=True),
    "gfsvi": gfsvi,
    "gfsvi-last-layer": lambda: gfsvi(linearise="last_layer"),
    "gfsvi-subset": lambda: gfsvi(linearise="subset", subset_classes=2, functional_scale="batch"),
    "outlierexposure": lambda: OutlierExposure(net(), batch()[2], 0.7, num_context=4, samples=3),
    "ensemble": lambda: Ensemble([MAP(net()), FSEB(net(1), batch()[2], num_context=4, samples=2)]),
}


def value(method: Method) -> Tensor:
    """Return the objective under fixed masks, noise and context points."""
    x, y, _ = batch()
    torch.manual_seed(11)
    method.reseed(3)
    return method.objective(x, y, 50).total


@pytest.mark.filterwarnings("ignore:estimator=:UserWarning")
@pytest.mark.parametrize("name", METHODS)
def test_gradient_of_the_objective(name: str):
    method = METHODS[name]()
    if name.startswith(("mfvi", "gfsvi")) or name == "fseb":
        with torch.no_grad():  # scales of ordinary size, so that their gradients are seen
            for raw in method.raw_scales.values():
                raw.copy_(torch.randn_like(raw) - 1.0)
    value(method).backward()
    generator = torch.Generator().manual_seed(0)
    step = 1e-5
    for label, p in method.named_parameters():
        for index in torch.randperm(p.numel(), generator=generator)[:3].tolist():
            flat = p.data.view(-1)
            original = flat[index].item()
            ends = []
            for shift in (step, -step):
                flat[index] = original + shift
                with torch.no_grad():
                    ends.append(float(value(method)))
            flat[index] = original
            numeric = (ends[0] - ends[1]) / (2 * step)
            exact = 0.0 if p.grad is None else float(p.grad.view(-1)[index])
            assert exact == pytest.approx(numeric, rel=2e-5, abs=2e-7), (label, index)
