"""FS-EB against a direct computation, MFVI and MAP."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from stfseb.errors import StfsebError
from stfseb.methods.fs_eb import FSEB
from stfseb.methods.map import MAP
from stfseb.methods.mfvi import MFVI


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(0.5), nn.Linear(6, 3)).double()


def batch(rows: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(rows, 4, generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (rows,), generator=generator)


CONTEXT = torch.rand(5, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def test_function_term_is_the_gaussian_negative_log_density_up_to_its_constant():
    tau1, tau2, bias = 0.7, 0.3, 0.4
    method = FSEB(net(), CONTEXT, tau1=tau1, tau2=tau2, num_context=5, samples=3, bias_variance=bias)
    x, y = batch()
    start = net()  # h comes from the network as it was at construction
    with torch.no_grad():
        for p in method.net.parameters():
            p.add_(0.1)
    draw = method.context.draw(x, 0)
    theta = method.draw_weights(3, draw.masks)
    h = torch.tanh(start[0](draw.images))
    k = tau1 * (h @ h.T + bias) + tau2 * torch.eye(5, dtype=torch.float64)
    density = torch.distributions.MultivariateNormal(torch.zeros(5, dtype=torch.float64), k)
    values = []
    for row in theta:
        sampled = net(7).eval()
        nn.utils.vector_to_parameters(row.detach(), sampled.parameters())
        logits = sampled(draw.images)
        values.append(-(density.log_prob(logits.T) - density.log_prob(torch.zeros(5, dtype=torch.float64))).sum())
    terms = method.objective(x, y, 80)
    torch.testing.assert_close(terms.function, torch.stack(values).mean(), rtol=1e-10, atol=0)
    torch.testing.assert_close(terms.weights, method.kl() / 10)


def test_without_the_function_term_it_is_mfvi():
    x, y = batch()
    for estimator in ("reparameterisation", "flipout"):
        ours = FSEB(net(), sigma=0.5, samples=4, functional_scale=0, temperature=0.3, estimator=estimator)
        theirs = MFVI(net(), sigma=0.5, samples=4, temperature=0.3, estimator=estimator)
        gradients, found = [], []
        for method in (ours, theirs):
            torch.manual_seed(3)
            found.append(method.objective(x, y, 80))
            found[-1].total.backward()
            gradients.append([p.grad for p in method.parameters()])
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)
        for a, b in zip(*gradients, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)
        torch.testing.assert_close(ours.sample_logits(x, 3, seed=1), theirs.sample_logits(x, 3, seed=1), rtol=0, atol=0)


def test_map_form_without_the_function_term_is_map():
    x, y = batch()
    ours, theirs = FSEB(net(), sigma=0.5, variant="map", functional_scale=0), MAP(net(), sigma=0.5)
    for a, b in zip(ours.objective(x, y, 80), theirs.objective(x, y, 80), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=0)
    assert ours.samples == 1
    assert not list(ours.raw_scales)


def test_map_form_has_one_function_and_the_same_function_term():
    x, y = batch()
    method = FSEB(net(), CONTEXT, variant="map", tau1=2.0, tau2=0.5, num_context=4)
    draw = method.context.draw(x, 0)
    expected = method.function_prior(draw).penalty(method.net.eval()(draw.images))
    torch.testing.assert_close(method.objective(x, y, 80).function, expected)
    logits = method.sample_logits(x, 3, seed=0)
    assert torch.equal(logits[0], logits[1])


def test_official_means_once_an_epoch_and_a_bias():
    x, y = batch()
    plain, official = (FSEB(net(), CONTEXT, num_context=5, official=flag) for flag in (False, True))
    assert plain.settings.kappa == "batch"
    assert plain.settings.bias == 0.0
    assert official.settings.kappa == "epoch"
    assert official.settings.bias == 1.0
    spelled = FSEB(net(), CONTEXT, num_context=5, functional_scale="epoch", bias_variance=1.0)
    for method in (official, spelled):
        method.reseed(4)
    torch.testing.assert_close(official.objective(x, y, 80).function, spelled.objective(x, y, 80).function)
    explicit = FSEB(net(), CONTEXT, num_context=5, official=True, functional_scale=2.0, bias_variance=0.0)
    plain.reseed(4)
    explicit.reseed(4)
    torch.testing.assert_close(explicit.objective(x, y, 80).function, 2 * plain.objective(x, y, 80).function)


@pytest.mark.parametrize("scale", ["batch", "epoch", 0.5])
def test_parts_of_a_step_add_up(scale):
    x, y = batch()
    whole, parts = (FSEB(net(), CONTEXT, num_context=3, samples=2, functional_scale=scale) for _ in range(2))
    whole.reseed(0)
    parts.reseed(0)
    expected = whole.objective(x, y, 80)
    found = [parts.objective(x[s], y[s], 80, batch_size=8) for s in (slice(0, 3), slice(3, 8))]
    for name in ("data", "function", "weights"):
        total = sum(getattr(part, name) for part in found)
        torch.testing.assert_close(total, getattr(expected, name), rtol=1e-10, atol=1e-12)


def test_context_rows_do_not_enter_batch_norm():
    torch.manual_seed(0)
    normed = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)).double()
    other = FSEB(normed, CONTEXT * 100, num_context=5, samples=2).train()
    x, y = batch()
    other.objective(x, y, 80)
    assert float(normed[1].running_mean.abs().max()) < 1.0
    assert int(normed[1].num_batches_tracked) == 2


def test_a_flipped_estimator_keeps_context_functions_whole():
    x, y = batch()
    flipped, plain = (
        FSEB(net(), CONTEXT, num_context=5, samples=3, estimator=e) for e in ("flipout", "reparameterisation")
    )
    flipped.reseed(1)
    plain.reseed(1)
    torch.testing.assert_close(flipped.objective(x, y, 80).function, plain.objective(x, y, 80).function)


def test_train_context_and_missing_context():
    x, y = batch()
    terms = FSEB(net(), "train", num_context=4, samples=2).objective(x, y, 80)
    assert float(terms.function.detach()) > 0
    with pytest.raises(StfsebError, match="context is missing"):
        FSEB(net())
    restored = FSEB.restore(net(), FSEB(net(), CONTEXT, num_context=2).settings, None)
    assert restored.sample_logits(x, 2, seed=0).shape == (2, 8, 3)
    with pytest.raises(StfsebError, match="no context images"):
        restored.objective(x, y, 80)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"variant": "mop"}, "did you mean 'map'"),
        ({"tau2": 0.0}, "tau2=0.0"),
        ({"functional_scale": "epochs"}, "functional_scale='epochs'"),
        ({"bias_variance": -1.0}, "bias_variance=-1.0"),
        ({"functionalscale": 1}, "did you mean 'functional_scale'"),
        ({"num_context": 6}, "num_context=6 exceeds the 5 context images"),
    ],
)
def test_settings_are_checked(settings, message):
    with pytest.raises(StfsebError, match=message):
        FSEB(net(), CONTEXT, **{"num_context": 5, **settings})
