"""GFSVI against dense references: Jacobians, divergences, Dirichlet targets and marginal likelihoods."""

from __future__ import annotations

import copy
import json
import math

import numpy as np
import pytest
import scipy.stats
import torch
from torch import Tensor, nn
from torch.distributions import MultivariateNormal, kl_divergence
from torch.func import functional_call, jacrev

from stfseb.errors import StfsebError
from stfseb.methods import gfsvi, kernel_fit
from stfseb.methods.divergence import GaussianDivergence
from stfseb.methods.gfsvi import GFSVI
from stfseb.methods.gp_prior import GPPrior
from stfseb.methods.kernel_fit import KernelFit, cached_fit, centred, dirichlet_targets, fit_kernel
from stfseb.methods.linearisation import Linearisation
from stfseb.networks.cnn import SmallCNN


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("STFSEB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(kernel_fit, "_memory", {})


def cnn(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(0.5), nn.Linear(27, 3)
    ).double()


class Zoo(nn.Module):
    """Grouped, strided, dilated and flat convolutions, a norm, a sequence layer, a tied weight, in-place ReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, stride=2, padding=(1, 0), groups=2)
        self.norm = nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)
        self.wide = nn.Conv2d(4, 2, 2, dilation=(1, 2), bias=False)
        self.flat = nn.Conv1d(2, 3, 2, stride=2, padding=1, padding_mode="circular")
        self.each = nn.Linear(3, 4)
        self.same = nn.Conv2d(1, 1, 3, padding="same")
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.offset = nn.Parameter(torch.randn(3))
        self.out = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.norm(self.conv(x)))
        x = torch.tanh(self.wide(x)).flatten(2)
        x = torch.tanh(self.flat(x)).mT
        x = torch.tanh(self.each(x))
        x = self.same(x.unsqueeze(1)).squeeze(1).mean(1)
        x = torch.tanh(self.second(torch.tanh(self.first(x))))
        out: Tensor = self.out(x) * self.offset
        return out


def zoo(seed: int = 0) -> Zoo:
    torch.manual_seed(seed)
    net = Zoo().double().train()
    net(torch.rand(16, 2, 8, 8, dtype=torch.float64))  # running statistics of their own
    return net


def images(net: nn.Module, rows: int = 5) -> Tensor:
    shape = (rows, 2, 8, 8) if isinstance(net, Zoo) else (rows, 1, 6, 6)
    return torch.rand(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def brute_force(net: nn.Module, x: Tensor, scales: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return means (L, N) and covariances (L, N, N) from the whole Jacobian."""
    net.eval()
    parameters = {name: p.detach() for name, p in net.named_parameters() if name in scales}
    jacobian = jacrev(lambda p: functional_call(net, p, (x,)))(parameters)
    flat = torch.cat([(jacobian[name] * scales[name]).flatten(2) for name in scales], dim=2)
    return net(x).T.detach(), torch.einsum("nlp,mlp->lnm", flat, flat)


@pytest.mark.parametrize("make", [cnn, zoo])
def test_law_equals_the_brute_force_jacobian(make):
    net = make().train()
    x = images(net)
    torch.manual_seed(3)
    scales = {name: torch.rand_like(p) for name, p in net.named_parameters()}
    linearised = Linearisation(net, x[:1])
    mean, covariance = linearised.law(x, scales, torch.tensor([2, 0]), create_graph=False)
    assert net.training  # evaluation mode inside only
    expected_mean, expected = brute_force(net, x, {name: s.detach() for name, s in scales.items()})
    torch.testing.assert_close(mean, expected_mean[[2, 0]], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(covariance, expected[[2, 0]], rtol=1e-9, atol=1e-12)
    if make is zoo:  # both routes were taken
        assert {"conv.weight", "wide.weight", "flat.weight", "each.weight", "out.weight"} <= set(linearised.calls)
        assert {"norm.weight", "first.weight", "offset", "same.weight"} <= set(linearised.rest)


def test_law_of_the_last_layer():
    net = cnn()
    x = images(net)
    scales = {name: torch.rand_like(p) for name, p in net.named_parameters()}
    mean, covariance = Linearisation(net, x[:1], last_layer=True).law(x, scales, torch.arange(3), create_graph=False)
    last = {name: s.detach() for name, s in scales.items() if name.startswith("5.")}
    expected_mean, expected = brute_force(net, x, last)
    torch.testing.assert_close(mean, expected_mean, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(covariance, expected, rtol=1e-10, atol=1e-12)
    with pytest.raises(StfsebError, match="the output of Zoo is not that of a linear layer"):
        Linearisation(zoo(), images(zoo())[:1], last_layer=True)


def dense_divergence(mean: Tensor, covariance: Tensor, k: Tensor, gamma: float) -> Tensor:
    jitter = gamma * k.diagonal().mean() * torch.eye(len(k), dtype=torch.float64)
    prior = MultivariateNormal(torch.zeros(len(k), dtype=torch.float64), k + jitter)
    parts = [kl_divergence(MultivariateNormal(m, c + jitter), prior) for m, c in zip(mean, covariance, strict=True)]
    return torch.stack(parts).sum()


@pytest.mark.parametrize("make", [cnn, zoo])
@pytest.mark.parametrize("kernel", ["matern12", "matern32", "matern52", "rbf"])
def test_divergence_equals_a_dense_reference(make, kernel):
    net = make()
    context = images(net)
    method = GFSVI(net, context, kernel, gamma=1e-5, num_context=5, samples=2, rel_sigma_init=1.0)
    method.prior.set(2.0, 1.5)
    draw = method.context.draw(context, 0)
    distance = torch.from_numpy(scipy.spatial.distance.cdist(*[draw.images.flatten(1).numpy()] * 2)) / 2.0
    r = {"matern12": 1.0, "matern32": math.sqrt(3.0), "matern52": math.sqrt(5.0)}.get(kernel, 0.0) * distance
    k = {
        "matern12": torch.exp(-r),
        "matern32": (1 + r) * torch.exp(-r),
        "matern52": (1 + r + r**2 / 3) * torch.exp(-r),
        "rbf": torch.exp(-(distance**2) / 2),
    }[kernel] * 1.5
    scales = {name: s.detach() for name, s in method.scales().items()}
    expected = dense_divergence(*brute_force(net, draw.images, scales), k, 1e-5)
    found = method.divergence(draw)
    torch.testing.assert_close(found.detach(), expected, rtol=1e-8, atol=0)
    with torch.no_grad():
        torch.testing.assert_close(method.divergence(draw), expected, rtol=1e-8, atol=0)
    x, y = images(net, 4), torch.tensor([0, 1, 2, 0])
    terms = method.objective(x, y, 40)
    torch.testing.assert_close(terms.function.detach(), expected * (4 / 40), rtol=1e-8, atol=0)
    assert float(terms.weights) == 0.0


def test_128_context_points_in_single_precision():
    """More points than a step has by default, some of them twice: J is float32, all that follows float64."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(54, 3))
    points = torch.rand(120, 1, 6, 6)
    method = GFSVI(net, torch.cat([points, points[:8]]), num_context=128, samples=2, rel_sigma_init=1.0)
    method.prior.set(2.0, 1.5)
    draw = method.context.draw(points, 0)
    found = method.divergence(draw)
    found.backward()
    assert all(torch.isfinite(p.grad).all() for p in method.parameters())
    double = copy.deepcopy(net).double()
    x = draw.images.double()
    law = brute_force(double, x, {name: s.detach().double() for name, s in method.scales().items()})
    expected = dense_divergence(*law, method.prior.covariance(x), method.settings.gamma)
    assert float(found.detach()) == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize("gamma", [1e-8, 1e-2])
def test_divergence_is_zero_when_the_laws_are_equal(gamma):
    root = torch.randn(4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    k = root @ root.T
    equal = GaussianDivergence(k, gamma)(torch.zeros(2, 4, dtype=torch.float64), k.expand(2, 4, 4))
    assert abs(float(equal)) < 1e-9
    assert float(GaussianDivergence(k, gamma)(torch.zeros(2, 4, dtype=torch.float64), 1.1 * k.expand(2, 4, 4))) > 0.01


def test_divergence_of_a_linear_model_whose_law_is_the_prior_is_zero():
    """A linear network with zero mean has covariance s^2 (x x' + 1); as a prior kernel it makes D vanish."""
    torch.manual_seed(0)
    net = nn.Linear(6, 2).double()
    nn.init.zeros_(net.weight)
    nn.init.zeros_(net.bias)
    x = torch.rand(4, 6, dtype=torch.float64)
    scales = {name: torch.full_like(p, 0.7) for name, p in net.named_parameters()}
    mean, covariance = Linearisation(net, x[:1]).law(x, scales, torch.arange(2), create_graph=False)
    k = 0.49 * (x @ x.T + 1)
    assert abs(float(GaussianDivergence(k, 1e-6)(mean, covariance).detach())) < 1e-9


def test_classes_in_pieces_make_the_same_value_and_gradient(monkeypatch):
    found = []
    for budget in (1, 2**40):
        monkeypatch.setattr(gfsvi, "_CLASSES_BUDGET", budget)
        net = zoo()
        method = GFSVI(net, images(net), num_context=4)
        method.reseed(0)
        method.prior.set(2.0, 1.5)
        value = method.divergence(method.context.draw(images(net), 0))
        (3 * value).backward()
        found.append([value.detach(), *(p.grad for p in method.parameters())])
    assert len(found[0]) == 1 + 2 * len(list(zoo().parameters()))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10)


def test_subset_of_classes_is_unbiased():
    net = cnn()
    x = images(net)
    full = GFSVI(net, x, num_context=5)
    some = GFSVI(net, x, num_context=5, linearise="subset", subset_classes=1)
    for method in (full, some):
        method.reseed(0)
        method.prior.set(2.0, 1.0)
    with torch.no_grad():
        draws = [some.context.draw(x, 0)._replace(masks=torch.Generator().manual_seed(k)) for k in range(60)]
        values = {round(float(some.divergence(draw)), 9) for draw in draws}
        expected = float(full.divergence(draws[0]))
    assert len(values) == 3
    assert sum(values) / 3 == pytest.approx(expected, rel=1e-9)
    bad = GFSVI(net, x, num_context=5, linearise="subset", subset_classes=9)
    bad.prior.set(1.0, 1.0)
    with pytest.raises(StfsebError, match="subset_classes=9 exceeds the network's 3 outputs"):
        bad.objective(x, torch.zeros(5, dtype=torch.int64), 10)


def test_parts_of_a_step_add_up():
    x, y = images(cnn(), 6), torch.tensor([0, 1, 2, 0, 1, 2])
    whole, parts = (GFSVI(cnn(), images(cnn()), num_context=3, samples=2) for _ in range(2))
    for method in (whole, parts):
        method.reseed(0)
        method.prior.set(2.0, 1.0)
    expected = whole.objective(x, y, 60)
    found = [parts.objective(x[s], y[s], 60, batch_size=6) for s in (slice(0, 2), slice(2, 6))]
    for name in ("data", "function"):
        torch.testing.assert_close(sum(getattr(part, name) for part in found), getattr(expected, name))


def test_dirichlet_transform_equals_a_direct_computation():
    y = torch.tensor([0, 2, 2, 1])
    targets, noise = dirichlet_targets(y, 4, 0.01)  # class 3 never occurs
    for i in range(4):
        for label in range(4):
            alpha = (1.0 if y[i] == label else 0.0) + 0.01
            variance = math.log(1 + 1 / alpha)
            assert float(noise[label, i]) == pytest.approx(variance, rel=1e-12)
            assert float(targets[label, i]) == pytest.approx(math.log(alpha) - variance / 2, rel=1e-12)
    shifted = centred(targets, y)
    assert float(shifted.mean()) == pytest.approx(0.0, abs=1e-12)
    difference = (targets - shifted)[:, 0]
    assert float(difference[2] - difference[0]) == pytest.approx(math.log(2.0))  # class 2 is twice as frequent


def test_marginal_likelihood_equals_scipy():
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(12, 5, generator=generator, dtype=torch.float64)
    y = torch.randint(3, (12,), generator=generator)
    targets, noise = dirichlet_targets(y, 3, 0.1)
    prior = GPPrior("matern32")
    prior.set(0.8, 2.0)
    k = prior.covariance(x)
    found = kernel_fit.log_marginal_likelihood(k, targets, noise)
    for label in range(3):
        direct = scipy.stats.multivariate_normal(np.zeros(12), k.numpy() + np.diag(noise[label].numpy()))
        assert float(found[label]) == pytest.approx(direct.logpdf(targets[label].numpy()), rel=1e-10)
    function = lambda c: kernel_fit.log_marginal_likelihood((c + c.T) / 2, targets, noise)  # noqa: E731
    assert torch.autograd.gradcheck(function, k.clone().requires_grad_())


@pytest.mark.parametrize("name", ["matern12", "matern32", "matern52", "rbf"])
def test_the_step_s_kernel_is_the_fitted_one(name):
    x = torch.rand(6, 1, 3, 3, dtype=torch.float64)
    fitted = kernel_fit._kernel(name, 0.7, 1.3)
    prior = GPPrior(name)
    prior.set(0.7, 1.3)
    flat = x.flatten(1)
    torch.testing.assert_close(prior.covariance(x), fitted.forward(flat, flat).detach(), rtol=1e-9, atol=1e-9)


def labelled(rows: int = 120) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    centres = torch.randint(0, 200, (3, 1, 4, 4), generator=generator)
    y = torch.randint(3, (rows,), generator=generator)
    noise = torch.randint(0, 56, (rows, 1, 4, 4), generator=generator)
    return (centres[y] + noise).to(torch.uint8), y


def test_kernel_fit_raises_the_likelihood_and_uses_pixels_in_the_unit_interval():
    x, y = labelled()
    short, long = (fit_kernel(x, y, 3, KernelFit(steps=n, batch=64)) for n in (1, 60))
    assert long.log_likelihood > short.log_likelihood
    floats = fit_kernel(x.double() / 255, y, 3, KernelFit(steps=60, batch=64))
    assert floats.length_scale == pytest.approx(long.length_scale, rel=1e-6)
    # The optimum on all points, found by another optimiser, is not better by more than the subsets' noise.
    targets, noise = dirichlet_targets(y, 3, 0.01)
    targets = centred(targets, y)

    def negative(raw: np.ndarray) -> float:
        prior = GPPrior("matern52")
        prior.set(*np.exp(raw))
        return -float(kernel_fit.log_marginal_likelihood(prior.covariance(x.double() / 255), targets, noise).mean())

    best = scipy.optimize.minimize(negative, np.log([1.0, 3.0]), method="Nelder-Mead").fun
    ours = negative(np.log([long.length_scale, long.variance]))
    assert ours - best < 0.05 * len(x) / 3


def test_a_diverging_fit_is_an_error():
    x, y = labelled()
    with pytest.raises(StfsebError, match=r"fit of the rbf kernel diverged .* lower kernel_lr=1000000"):
        fit_kernel(x, y, 3, KernelFit("rbf", steps=20, batch=64, lr=1e6))


def test_the_fit_is_kept_by_the_data_s_fingerprint(tmp_path, monkeypatch):
    x, y = labelled()
    how = KernelFit(steps=2, batch=32)
    first = cached_fit(x, y, 3, how)
    (file,) = (tmp_path / "cache" / "kernels").iterdir()
    assert json.loads(file.read_text())["length_scale"] == first.length_scale

    def never(*_: object) -> None:
        raise AssertionError("fitted again")

    with monkeypatch.context() as patch:
        patch.setattr(kernel_fit, "fit_kernel", never)
        assert cached_fit(x, y, 3, how) == first  # memory
        kernel_fit._memory.clear()
        assert cached_fit(x, y, 3, how) == first  # disk
        with pytest.raises(AssertionError, match="fitted again"):
            cached_fit(x.flip(0), y, 3, how)
        with pytest.raises(AssertionError, match="fitted again"):
            cached_fit(x, y, 3, KernelFit(steps=2, batch=32, a_eps=0.1))
    kernel_fit._memory.clear()
    file.write_text("{damaged")
    assert cached_fit(x, y, 3, how) == first
    assert json.loads(file.read_text())["variance"] == first.variance
    kernel_fit._memory.clear()
    assert cached_fit(x, y, 3, how, folder=False) == first


def test_prepare_fits_once_and_training_needs_it():
    x, y = labelled()
    torch.manual_seed(0)
    net = SmallCNN(1, 3, image_size=4, hidden=8)
    method = GFSVI(net, x[:20], num_context=4, samples=2, kernel_steps=2, kernel_batch=32)
    with pytest.raises(StfsebError, match="kernel has not been fitted"):
        method.objective(x, y, len(x))
    method.prepare(x, y)
    terms = method.objective(x, y, len(x))
    terms.total.backward()
    assert all(p.grad is not None for p in method.parameters())
    assert method.provenance["kernel"]["length_scale"] == float(method.prior.length_scale)
    assert method.like.dtype == terms.function.dtype == torch.float32


def test_linearised_prediction_is_gaussian_with_the_law_of_the_divergence():
    net = cnn()
    x = images(net, 3)
    method = GFSVI(net, functional_scale=0, prediction="linearised", rel_sigma_init=0.5)
    drawn = method.sample_logits(x, 1000, seed=0)
    mean, covariance = brute_force(net, x, {name: s.detach() for name, s in method.scales().items()})
    standard_error = covariance.diagonal(dim1=1, dim2=2).sqrt() / math.sqrt(1000)
    assert float(((drawn.mean(0).T - mean).abs() / standard_error).max()) < 4.5
    for label in range(3):
        empirical = torch.cov(drawn[:, :, label].T)
        torch.testing.assert_close(empirical, covariance[label], rtol=0.2, atol=0.1 * float(covariance[label].max()))


def test_a_context_that_memory_does_not_allow_is_refused_with_the_numbers(monkeypatch):
    net = cnn()
    method = GFSVI(net, images(net), num_context=5)
    method.prior.set(1.0, 1.0)
    monkeypatch.setattr(gfsvi, "available_bytes", lambda device: 1000)
    with pytest.raises(
        StfsebError, match=r"num_context=5: one class's covariance needs about .* GB and 0\.0 GB are free"
    ):
        method.objective(images(net), torch.zeros(5, dtype=torch.int64), 10)


def test_labels_say_what_was_cut_short():
    assert GFSVI(cnn(), functional_scale=0).label == "GFSVI"
    short = GFSVI(cnn(), functional_scale=0, linearise="last_layer", kernel_steps=60, kernel_batch=256)
    assert short.label == "GFSVI (last layer, 60 kernel steps on 256 points)"
    assert GFSVI.restore(cnn(), short.settings, None).label == short.label


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kernel": "matern53"}, "did you mean 'matern52'"),
        ({"gamma": 0.0}, "gamma=0.0"),
        ({"a_eps": -1.0}, "a_eps=-1.0"),
        ({"linearise": "half"}, "unknown linearise 'half'"),
        ({"linearise": "subset"}, "subset_classes=None"),
        ({"subset_classes": 2}, "linearise='full' with subset_classes=2"),
        ({"prediction": "linear"}, "did you mean 'linearised'"),
        ({"kernel_steps": 0}, "kernel_steps=0"),
        ({"kl_scales": 1.0}, "did you mean 'kl_scale'"),
    ],
)
def test_settings_are_checked(settings, message):
    with pytest.raises(StfsebError, match=message):
        GFSVI(cnn(), images(cnn()), num_context=5, **{k: v for k, v in settings.items() if k != "num_context"})
