"""Steps of one process are compiled one after another, whatever methods came before."""

import math

import pytest
import torch
from torch import nn

from stfseb import FSEB, GFSVI, MFVI, STFSEB
from stfseb.methods.divergence import GaussianDivergence
from stfseb.training.batches import ResidentBatches
from stfseb.training.engine import CapturedEngine, make_optimiser
from stfseb.training.static_step import StaticStep

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def nothing_compiled_yet():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def make(name, device=CPU):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Dropout(0.1), nn.Linear(144, 3)).to(device)
    context, how = torch.rand(40, 1, 8, 8), {"num_context": 8, "samples": 2}
    if name == "mfvi":
        return MFVI(net, samples=2).to(device).train()
    if name in ("gfsvi", "fseb"):
        method = {"gfsvi": GFSVI, "fseb": FSEB}[name](net, context, **how)
        if name == "gfsvi":
            method.prior.set(3.0, 2.0)
        return method.to(device).train()
    dof = math.inf if name == "gaussian" else 5.0
    return STFSEB(net, context, dof, prior_weight=1.0, **how).to(device).train()


def data_on(device):
    g = torch.Generator().manual_seed(1)
    x, y = torch.rand(40, 1, 8, 8, generator=g), torch.randint(3, (40,), generator=g)
    return ResidentBatches(x, y, 10, 0, device)


def static_step(name):
    method, batches = make(name), data_on(CPU)
    method.make_live(method.like)
    step = StaticStep(method, batches, make_optimiser(method, lr=1e-3), "float32", steps=4, size=10)
    step.load(torch.arange(40))
    step.learn_plan()
    return step


def test_a_method_is_compiled_after_any_other(monkeypatch):
    """Of one code in common, `gaussian` ended in a KeyError of Dynamo's for what GFSVI alone has."""
    whole = torch.linalg.cholesky_ex  # on a card the step asks nothing of the host, and is one graph
    monkeypatch.setattr(GaussianDivergence, "_cholesky", lambda self, covariance, what: whole(covariance)[0])
    graphs, seen = [], set()

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    for name in ("gfsvi", "gaussian", "mfvi", "fseb", "stfseb", "gfsvi"):
        step, plain = static_step(name), static_step(name)
        step.forward = torch.compile(step.terms_to_compile(), dynamic=False, backend=backend)
        before = len(graphs)
        torch.manual_seed(3)
        step()
        torch.manual_seed(3)
        plain()
        torch.testing.assert_close(step.sums, plain.sums)
        assert len(graphs) > before or name in seen  # a second one may be served by the first one's
        seen.add(name)


def test_code_is_shared_by_steps_of_one_kind_alone():
    kinds = ("stfseb", "stfseb", "gaussian", "mfvi")
    codes = [static_step(name).terms_to_compile().__func__.__code__ for name in kinds]
    assert codes[0] is codes[1]
    assert len({id(code) for code in codes}) == 3


@pytest.mark.gpu
def test_a_method_is_captured_after_any_other_on_the_gpu():
    device = torch.device("cuda")
    for name in ("gfsvi", "gaussian", "mfvi", "stfseb"):
        method = make(name, device)
        CapturedEngine(method, data_on(device), make_optimiser(method, lr=1e-3), "float32", compiled=True)
