"""Arguments of methods that cannot be, and zeros that are no default: one line each, with the name and the value."""

import math

import pytest
import torch
from torch import nn

from stfseb import FSEB, MAP, STFSEB, MCDropout, StfsebError, calibrate, fit_sets
from stfseb.likelihoods import Binary, GaussianRegression


def net(outputs=3):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, outputs))


@pytest.mark.parametrize("method", [STFSEB, FSEB])
@pytest.mark.parametrize(
    ("name", "value", "named"),
    [
        ("functional_scale", (1.0,), r"functional_scale=\(1.0,\): give 'batch', 'epoch' or a number"),
        ("features", 2, "features=2: give the name of a layer, as net.named_modules"),
        ("prior_weight", None, "prior_weight=None: give 'rate', 'keep' or a number"),
        ("dof", "5", "dof='5': degrees of freedom must be a positive number"),
        ("dof", -1, "dof=-1: degrees of freedom must be a positive number"),
        ("dof", math.nan, "dof=nan: degrees of freedom must be a positive number"),
        ("dof_weights", "5", "dof_weights='5': degrees of freedom must be a positive number"),
        ("likelihood", "binary", r"likelihood='binary' is a name: give stfseb.likelihoods.Binary\(\)"),
        ("likelihood", Binary, r"likelihood=Binary is a class: give Binary\(\)"),
        ("likelihood", "softmax", "likelihood='softmax': give one of stfseb.likelihoods"),
        ("likelihood", 3, "likelihood=3: give one of stfseb.likelihoods"),
    ],
)
def test_arguments_that_cannot_be_are_named(method, name, value, named):
    if method is FSEB and name in ("prior_weight", "dof", "dof_weights"):
        return
    with pytest.raises(StfsebError, match=f"^{named}"):
        method(net(), torch.rand(40, 8), **{name: value})
    if (name, method) == ("functional_scale", STFSEB):
        with pytest.raises(StfsebError, match=r"^functional_scale=None: give"):
            method(net(), torch.rand(40, 8), functional_scale=None)


def test_the_weight_prior_alone_takes_any_positive_dof():
    method = STFSEB(net(), dof=1.0, functional_scale=0)
    assert method.settings.nu_weights == 1.0
    method.objective(torch.rand(6, 8), torch.arange(6) % 3, 60).total.backward()
    with pytest.raises(StfsebError, match="covariance form needs dof > 2"):
        STFSEB(net(), torch.rand(40, 8), dof=1.0)


def test_zero_is_no_default():
    x, y = torch.rand(30, 8), torch.arange(30) % 3
    method = MCDropout(net())
    for call, named in (
        (lambda: method.predict_proba(x, batch_size=0), "batch_size=0"),
        (lambda: method.predict_proba(x, batch_size=-1), "batch_size=-1"),
        (lambda: method.sample_logits(x, batch_size=0), "batch_size=0"),
        (lambda: method.sample_logits(x, batch_size=2.5), "batch_size=2.5"),
        (lambda: method.predict_proba(x, 0), "samples=0"),
        (lambda: method.predict_proba(x, "3"), "samples=3"),
        (lambda: method.judged(x, samples=0), "samples=0"),
        (lambda: method.abstain(0.9, x, samples=0), "samples=0"),
        (lambda: method.ood_threshold(0.1, x, samples=0), "samples=0"),
        (lambda: calibrate(method, (x, y), samples=0), "samples=0"),
        (lambda: fit_sets(method, (x, y), 0.9, samples=0), "samples=0"),
    ):
        with pytest.raises(StfsebError, match=f"^{named}: must be a whole number"):
            call()


@pytest.mark.parametrize("level", [0.0, 1.0, 1.5, -0.1, math.nan])
def test_the_level_of_an_interval_is_named(level):
    with pytest.raises(StfsebError, match=rf"^level={level}: give a number between 0 and 1"):
        MAP(net(1), likelihood=GaussianRegression()).predict_interval(torch.rand(6, 8), level=level)
