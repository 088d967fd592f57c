"""Batch norm where data rows and context rows go through a network together: statistics of data rows alone."""

import copy

import pytest
import torch
from torch import nn

from stfseb import FSEB, STFSEB, OutlierExposure, fit
from stfseb.networks.batch_statistics import DataStatistics, RegroupedRowsError, can_join

NORMS = {
    "1d": (lambda: nn.BatchNorm1d(4), (4,)),
    "1d of sequences": (lambda: nn.BatchNorm1d(4), (4, 6)),
    "2d": (lambda: nn.BatchNorm2d(4), (4, 3, 2)),
    "3d": (lambda: nn.BatchNorm3d(4), (4, 2, 3, 2)),
    "without weights": (lambda: nn.BatchNorm2d(4, affine=False), (4, 3, 2)),
    "cumulative": (lambda: nn.BatchNorm2d(4, momentum=None), (4, 3, 2)),
    "without averages": (lambda: nn.BatchNorm2d(4, track_running_stats=False), (4, 3, 2)),
}


def rows(folds, data, context, shape, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = 2 + 3 * torch.randn(folds, data, *shape, generator=g, dtype=torch.float64)
    return x, -5 + torch.randn(folds, context, *shape, generator=g, dtype=torch.float64)


@pytest.mark.parametrize("folds", [1, 3])
@pytest.mark.parametrize("kind", NORMS)
def test_data_rows_are_as_without_context_and_context_rows_are_normalised_by_their_statistics(kind, folds):
    make, shape = NORMS[kind]
    norm = make().double().train()
    if norm.affine:
        nn.init.normal_(norm.weight, generator=torch.Generator().manual_seed(1))
        nn.init.normal_(norm.bias, generator=torch.Generator().manual_seed(2))
    alone = copy.deepcopy(norm)
    data, context = rows(folds, 5, 3, shape)
    with DataStatistics(5, 8, 3):
        out = norm(torch.cat([data, context], 1).flatten(0, 1)).unflatten(0, (folds, 8))
    torch.testing.assert_close(out[:, :5].flatten(0, 1), alone(data.flatten(0, 1)), rtol=0, atol=1e-12)
    for (name, one), other in zip(norm.state_dict().items(), alone.state_dict().values(), strict=True):
        torch.testing.assert_close(one, other, msg=name)
    over = [0, 1, *range(3, data.ndim)]
    view = [1, 1, 4, *[1] * (data.ndim - 3)]
    mean, variance = data.mean(over).view(view), data.var(over, correction=0).view(view)
    expected = (context - mean) / (variance + norm.eps).sqrt()
    if norm.affine:
        expected = expected * norm.weight.view(view) + norm.bias.view(view)
    torch.testing.assert_close(out[:, 5:], expected)


def test_gradients_flow_through_the_statistics():
    norm = nn.BatchNorm1d(3).double().train()

    def outside(data, context):
        with DataStatistics(4, 6):
            return norm(torch.cat([data, context]))[4:]

    data, context = (part[0].requires_grad_() for part in rows(1, 4, 2, (3,)))
    assert torch.autograd.gradcheck(outside, (data, context))
    (slope,) = torch.autograd.grad(outside(data, context).square().sum(), data)
    assert float(slope.abs().max()) > 1e-3


def test_half_precision_keeps_its_type_and_frozen_norms_are_left_alone():
    norm = nn.BatchNorm2d(4).train()
    data, context = (part[0].float() for part in rows(1, 5, 3, (4, 3, 2)))
    both = torch.cat([data, context])
    with DataStatistics(5, 8):
        exact, rounded = norm(both), norm(both.bfloat16())
        norm.eval()
        frozen = norm(both)
    assert rounded.dtype == torch.bfloat16
    torch.testing.assert_close(rounded.float(), exact, rtol=0.02, atol=0.03)
    torch.testing.assert_close(frozen, norm(both))


def test_rows_that_cannot_be_told_apart_are_refused():
    with DataStatistics(5, 8, 2), pytest.raises(RegroupedRowsError):
        nn.BatchNorm1d(4)(torch.randn(24, 4))


@pytest.mark.parametrize(
    ("layer", "joined"),
    [(nn.BatchNorm1d(4), True), (nn.SyncBatchNorm(4), False), (nn.InstanceNorm1d(4, track_running_stats=True), False)],
)
def test_which_layers_can_join(layer, joined):
    net = nn.Sequential(nn.Linear(4, 4), layer)
    assert can_join(net, 2) == joined
    assert not can_join(net, 1)


class Patches(nn.Module):
    """Patches of an image as rows of their own, as transformers have them."""

    def __init__(self):
        super().__init__()
        self.norm, self.drop, self.head = nn.BatchNorm1d(4), nn.Dropout(0.2), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.drop(self.norm(x.flatten(0, 1)).unflatten(0, x.shape[:2]).mean(1)))


def method_of(kind, net, context):
    if kind == "fseb":
        return FSEB(net, context, num_context=6, samples=2)
    if kind == "oe":
        return OutlierExposure(net, context, num_context=6, samples=2)
    return STFSEB(net, context, num_context=6, samples=2, prior_weight=1.0)


@pytest.mark.parametrize("kind", ["stfseb", "oe", "fseb"])
@pytest.mark.parametrize("regroups", [False, True])
def test_averages_are_of_data_rows_whatever_the_context(kind, regroups):
    """Also where rows cannot be told apart, and the pass is made again in two: nothing of the first one stays."""
    torch.manual_seed(0)
    shape = (7, 4) if regroups else (4,)
    x, y = torch.randn(8, *shape), torch.arange(8) % 3
    plain = nn.Sequential(nn.Dropout(0.2), nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    net = nn.Sequential(nn.BatchNorm1d(7), Patches()) if regroups else plain
    found = []
    for context in (torch.randn(20, *shape), 50 + torch.randn(20, *shape)):
        torch.manual_seed(0)  # of context points and masks, or of weights
        method = method_of(kind, copy.deepcopy(net), context).train()
        for seed in (1, 2):
            torch.manual_seed(seed)
            assert torch.isfinite(method.objective(x, y, 80).total)
        found.append({k: v for k, v in method.net.state_dict().items() if "running" in k or "tracked" in k})
    passes = 2 * (2 if kind == "fseb" else 1)  # each of its weight samples is a pass
    assert {int(value) for name, value in found[0].items() if "tracked" in name} == {passes}
    for name, value in found[0].items():
        torch.testing.assert_close(value, found[1][name], msg=name)
    assert method._together.possible is not regroups


def normed(hidden=32):
    layers = [
        nn.Linear(6, hidden),
        nn.BatchNorm1d(hidden),
        nn.ReLU(),
        nn.Linear(hidden, hidden),
        nn.BatchNorm1d(hidden),
    ]
    return nn.Sequential(*layers, nn.ReLU(), nn.Dropout(0.1), nn.Linear(hidden, 3))


def test_the_function_term_does_not_feel_the_scale_of_weights_before_batch_norm():
    """The data term does not either; were it otherwise, weights would drift away from their running averages."""
    torch.manual_seed(0)
    net = normed().double()
    method = STFSEB(net, 3 * torch.randn(40, 6), num_context=8, samples=2, tau2=1.0).double().train()
    function = method.objective(torch.randn(32, 6).double(), torch.arange(32) % 3, 32).function
    slope, weight = torch.autograd.grad(function, net[3].weight)[0], net[3].weight.detach()
    assert abs(float((slope * weight).sum())) < 1e-3 * float(slope.norm() * weight.norm())


def test_a_network_with_batch_norm_predicts_as_it_was_trained():
    """With context rows under the running averages: 0.05 nats in training, 1.07 (chance is 1.10) in evaluation."""
    g = torch.Generator().manual_seed(0)
    centres, y = 1.5 * torch.randn(3, 6, generator=g), torch.arange(96) % 3
    x = centres[y] + 0.5 * torch.randn(96, 6, generator=g)
    context = 2 * torch.randn(200, 6, generator=g)
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(k, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU()) for k in (6, 16, 16, 16)]
    net = nn.Sequential(*layers, nn.Dropout(0.1), nn.Linear(16, 3))
    method = STFSEB(net, context, num_context=16, samples=2, tau2=1.0, prior_weight=1.0)
    result = fit(method, (x, y), (x, y), epochs=15, patience=15, batch_size=32, lr=0.03, progress=False)
    assert result.history[-1]["data"] < 0.4
    assert result.history[-1]["validation_nll"] < result.history[-1]["data"] + 0.2
    probs, outside = method.predict_proba(x, seed=0), method.predict_proba(context, seed=0)
    assert float(-probs[torch.arange(96), y].log().mean()) < 0.4
    assert float(outside.amax(1).mean()) < float(probs.amax(1).mean()) - 0.1


def test_a_compiler_follows_it():
    torch.manual_seed(0)
    net = normed().double().train()
    plain, both = copy.deepcopy(net), torch.randn(12, 6).double()

    def run(module, x):
        with DataStatistics(8, 12):
            return module(x)

    net[6].eval(), plain[6].eval()  # without dropout
    torch.testing.assert_close(torch.compile(run, backend="eager", fullgraph=True)(net, both), run(plain, both))
    torch._dynamo.reset()
