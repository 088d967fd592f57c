"""MFVI against torch.distributions, the exact posterior of a linear model, and MAP in the limit."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence

from stfseb.errors import StfsebError
from stfseb.likelihoods import Likelihood
from stfseb.methods.fs_eb import FSEB
from stfseb.methods.gfsvi import GFSVI
from stfseb.methods.layer_calls import single_use_calls
from stfseb.methods.map import MAP
from stfseb.methods.mean_field import MeanFieldMethod, initial_scales
from stfseb.methods.mfvi import MFVI


class Gaussian(Likelihood):
    """y ~ N(f(x), noise^2)."""

    name = "gaussian-for-tests"

    def __init__(self, noise: float) -> None:
        super().__init__()
        self.noise = noise

    def log_prob(self, outputs: Tensor, y: Tensor) -> Tensor:
        return Normal(outputs[..., 0], self.noise).log_prob(y)

    def predict(self, outputs: Tensor) -> Tensor:
        return outputs.mean(0)

    def check_targets(self, y: Tensor, outputs: int) -> None:
        assert y.is_floating_point()


def mlp(seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(0.5), nn.Linear(6, 3)).to(dtype)


def cnn(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 3)
    ).double()


def batch(rows: int = 7, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(rows, 4, generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (rows,), generator=generator)


def test_kl_equals_torch_distributions_summed_over_parameters():
    method = MFVI(mlp(), sigma=0.7)
    with torch.no_grad():
        for raw in method.raw_scales.values():
            raw.add_(torch.randn_like(raw))
    scales = method.scales()
    expected = sum(
        kl_divergence(Normal(mean, scales[name]), Normal(0.0, torch.full_like(mean, 0.7))).sum()
        for name, mean in method.net.named_parameters()
    )
    assert len(scales) == 4
    torch.testing.assert_close(method.kl(), expected, rtol=1e-12, atol=0)
    x, y = batch()
    weights = method.objective(x, y, num_data=70).weights
    torch.testing.assert_close(weights, expected / 10, rtol=1e-12, atol=0)


def test_temperature_scales_the_kl_alone():
    x, y = batch()
    cold, plain = MFVI(mlp(), temperature=0.25), MFVI(mlp())
    torch.manual_seed(3)
    a = cold.objective(x, y, 70)
    torch.manual_seed(3)
    b = plain.objective(x, y, 70)
    torch.testing.assert_close(a.weights, b.weights / 4)
    torch.testing.assert_close(a.data, b.data)


def test_data_term_is_the_average_over_weight_samples_drawn_around_the_mean():
    method = MFVI(mlp(), samples=3)
    x, y = batch()
    torch.manual_seed(5)
    theta = method.draw_weights(3)
    losses = []
    for row in theta:
        net = mlp(9).eval()
        nn.utils.vector_to_parameters(row.detach(), net.parameters())
        losses.append(nn.functional.cross_entropy(net(x), y, reduction="sum"))
    torch.manual_seed(5)
    terms = method.objective(x, y, 7)
    torch.testing.assert_close(terms.data, torch.stack(losses).mean(), rtol=1e-12, atol=0)
    assert float(terms.function) == 0.0


@pytest.mark.parametrize("estimator", ["reparameterisation", "local"])
def test_recovers_bayesian_linear_regression(estimator: str):
    """Known noise: the mean is the exact posterior's, the variances are 1 / diag(precision)."""
    noise, sigma, rows = 0.5, 0.8, 40
    torch.manual_seed(0)
    mix = torch.tensor([[1.0, 0.5, 0.0], [0.0, 1.0, 0.3], [0.0, 0.0, 1.0]], dtype=torch.float64)
    x = torch.randn(rows, 3, dtype=torch.float64) @ mix
    y = x @ torch.tensor([1.0, -0.5, 0.3], dtype=torch.float64) + noise * torch.randn(rows, dtype=torch.float64)
    precision = x.T @ x / noise**2 + torch.eye(3, dtype=torch.float64) / sigma**2
    exact_mean = torch.linalg.solve(precision, x.T @ y / noise**2)
    net = nn.Linear(3, 1, bias=False).double()
    method = MFVI(net, sigma, samples=8, estimator=estimator, vectorise=True, likelihood=Gaussian(noise))
    optimiser = torch.optim.Adam(method.parameters(), lr=0.05)
    means, log_variances = [], []
    for step in range(1600):
        optimiser.zero_grad()
        method.objective(x, y, rows).total.backward()
        optimiser.step()
        if step == 300:
            optimiser.param_groups[0]["lr"] = 0.004
        if step >= 600:  # the average over the tail of the path: Adam itself jitters around the optimum
            means.append(net.weight.detach()[0].clone())
            log_variances.append(2 * method.scales()["weight"].detach()[0].log())
    mean, variance = torch.stack(means).mean(0), torch.stack(log_variances).mean(0).exp()
    assert float((mean - exact_mean).norm() / exact_mean.norm()) < 0.02
    torch.testing.assert_close(variance, 1 / precision.diagonal(), rtol=0.02, atol=0)


def test_map_is_the_limit_of_vanishing_scales():
    x, y = batch()
    method = MFVI(mlp(), sigma=0.6, samples=2)
    with torch.no_grad():
        for raw in method.raw_scales.values():
            raw.fill_(-40.0)
    terms = method.objective(x, y, 70)
    terms.total.backward()
    variational = [p.grad for p in method.net.parameters()]
    reference = MAP(mlp(), sigma=0.6)
    expected = reference.objective(x, y, 70)
    expected.total.backward()
    torch.testing.assert_close(terms.data, expected.data, rtol=1e-12, atol=0)
    # The KL is the MAP penalty plus what depends on the scales alone.
    count = sum(p.numel() for p in method.net.parameters())
    scale = math.exp(-40.0)
    offset = count * (math.log(0.6 / scale) + scale**2 / (2 * 0.6**2) - 0.5) / 10
    torch.testing.assert_close(terms.weights - offset, expected.weights, rtol=1e-9, atol=0)
    for got, want in zip(variational, reference.net.parameters(), strict=True):
        torch.testing.assert_close(got, want.grad, rtol=1e-9, atol=1e-12)


def test_vectorised_and_looped_samples_agree():
    x = torch.rand(5, 1, 4, 4, dtype=torch.float64)
    y = torch.tensor([0, 1, 2, 0, 1])
    totals, gradients = [], []
    for vectorise in (True, False):
        method = MFVI(cnn(), samples=4, vectorise=vectorise)
        torch.manual_seed(2)
        total = method.objective(x, y, 50).total
        total.backward()
        totals.append(total)
        gradients.append(torch.cat([p.grad.flatten() for p in method.parameters()]))
    torch.testing.assert_close(*totals, rtol=1e-12, atol=0)
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("estimator", ["local", "flipout"])
def test_estimators_agree_in_expectation_and_have_less_noise(estimator: str):
    x = torch.rand(32, 1, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y = (x.mean((1, 2, 3)) > 0.5).long()

    def gradients(estimator: str, repeats: int) -> Tensor:
        method = MFVI(cnn(), samples=1, rel_sigma_init=0.5, estimator=estimator)
        found = []
        for seed in range(repeats):
            torch.manual_seed(seed)
            method.zero_grad()
            method.objective(x, y, 32).data.backward()
            found.append(torch.cat([p.grad.flatten() for p in method.parameters()]))
        return torch.stack(found)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        ours, plain = gradients(estimator, 600), gradients("reparameterisation", 600)
    standard_error = ((ours.var(0) + plain.var(0)) / 600).sqrt() + 1e-12
    z = (ours.mean(0) - plain.mean(0)) / standard_error
    assert float(z.square().mean()) < 1.5  # chi-square per degree of freedom; a bias would show
    assert float(ours.var(0).sum()) < 0.9 * float(plain.var(0).sum())


def test_local_reparameterisation_says_what_it_does_not_cover():
    method = MFVI(cnn(), estimator="local", samples=2)
    with pytest.warns(UserWarning, match=r"'local' does not apply to 2 parameters \(0.weight, 0.bias\)"):
        method.objective(torch.rand(3, 1, 4, 4, dtype=torch.float64), torch.tensor([0, 1, 2]), 3)


def test_prediction_depends_on_the_seed_alone_and_draws_whole_functions():
    method = MFVI(mlp(dtype=torch.float32), rel_sigma_init=1.0)
    x = torch.rand(9, 4)
    whole = method.sample_logits(x, 5, seed=3)
    parts = method.sample_logits(x, 5, seed=3, batch_size=2)
    torch.testing.assert_close(whole, parts)
    assert float(whole.std(0).mean()) > 0.01
    assert not torch.equal(whole, method.sample_logits(x, 5, seed=4))


def test_initial_scales_follow_each_tensor():
    net = nn.Sequential(nn.Linear(50, 20), nn.LayerNorm(20), nn.Linear(20, 1))
    scales = initial_scales(net, 0.1)
    torch.testing.assert_close(float(scales["0.weight"][0, 0]), 0.1 * float(net[0].weight.detach().std(correction=0)))
    assert float(scales["1.weight"][0]) == pytest.approx(0.1)  # ones: their root mean square
    everything = torch.cat([p.flatten() for p in net.parameters()]).detach().std(correction=0)
    for single in ("1.bias", "2.bias"):  # zeros, and one number
        assert float(scales[single][0]) == pytest.approx(0.1 * float(everything), rel=1e-5)
    method = MFVI(net, rel_sigma_init=0.1)
    torch.testing.assert_close(method.scales()["0.weight"], scales["0.weight"])


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.last = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.second(torch.tanh(self.first(x)))))


def test_tied_parameters_are_one_parameter():
    torch.manual_seed(0)
    net = Tied().double()
    method = MFVI(net, samples=1)
    assert "second.weight" not in method.scales()
    x, y = batch()
    torch.manual_seed(1)
    data = method.objective(x, y, 7).data
    torch.manual_seed(1)
    theta = method._named(method.draw_weights(1)[0])
    hidden = torch.tanh(x @ theta["first.weight"].T + theta["first.bias"])
    hidden = torch.tanh(hidden @ theta["first.weight"].T + theta["second.bias"])
    logits = hidden @ theta["last.weight"].T + theta["last.bias"]
    torch.testing.assert_close(data, nn.functional.cross_entropy(logits, y, reduction="sum"))
    # A weight that is used twice cannot be flipped row by row: it is sampled instead, and said so.
    assert [call.weight for call in single_use_calls(net, x)] == ["last.weight"]
    flipped = MFVI(net, samples=1, estimator="flipout")
    with pytest.warns(UserWarning, match="first.weight"):
        flipped.objective(x, y, 7)


def test_a_module_in_two_places_keeps_its_parameters():
    torch.manual_seed(0)
    twice = nn.Linear(4, 4)
    net = nn.Sequential(twice, nn.Tanh(), twice, nn.Linear(4, 3)).double()
    weight, before = twice.weight, twice.weight.detach().clone()
    method = MFVI(net, samples=2)
    x, y = batch()
    torch.manual_seed(1)
    data = method.objective(x, y, 7).data
    assert twice.weight is weight
    assert torch.equal(weight, before)
    torch.manual_seed(1)
    losses = []
    for theta in map(method._named, method.draw_weights(2)):
        hidden = torch.tanh(x @ theta["0.weight"].T + theta["0.bias"]) @ theta["0.weight"].T + theta["0.bias"]
        logits = hidden @ theta["3.weight"].T + theta["3.bias"]
        losses.append(nn.functional.cross_entropy(logits, y, reduction="sum"))
    torch.testing.assert_close(data, torch.stack(losses).mean())
    data.backward()
    assert weight.grad is not None


def test_integer_parameters_stay_constant_and_complex_ones_are_refused():
    class Lookup(nn.Module):
        def __init__(self, dtype: torch.dtype) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.ones(4, dtype=dtype), requires_grad=dtype.is_complex)
            self.linear = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x * self.table.real)

    method = MFVI(Lookup(torch.int64))
    assert list(method.scales()) == ["linear.weight", "linear.bias"]
    method.objective(batch()[0].float(), batch()[1], 7).total.backward()
    assert method.net.table.tolist() == [1, 1, 1, 1]
    with pytest.raises(StfsebError, match=r"'table' has type torch\.complex64"):
        MFVI(Lookup(torch.complex64))


class Counting(nn.Module):
    """A buffer that is replaced in every training pass."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3).double()
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x)
        if self.training:
            self.seen = self.seen + out.detach().sum() * 0 + 1
        return out


@pytest.mark.parametrize("make", [Counting, lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).double()])
def test_buffers_that_change_run_in_a_loop_or_are_refused(make):
    x, y = batch()
    net = make()
    before = {name: buffer.clone() for name, buffer in net.named_buffers()}
    with pytest.raises(StfsebError, match="vectorise=True, but buffers"):
        MFVI(net, vectorise=True).objective(x, y, 7)
    for name, buffer in net.named_buffers():
        torch.testing.assert_close(buffer, before[name])
    method = MFVI(net, samples=3)
    method.objective(x, y, 7).total.backward()
    counter = net.seen if isinstance(net, Counting) else net[1].num_batches_tracked
    assert int(counter) == 3
    again = {name: buffer.clone() for name, buffer in net.named_buffers()}
    method.sample_logits(x, 4, seed=0)
    for name, buffer in net.named_buffers():
        torch.testing.assert_close(buffer, again[name])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sigma": 0.0}, "sigma=0.0"),
        ({"samples": 0}, "samples=0"),
        ({"rel_sigma_init": -1.0}, "rel_sigma_init=-1.0"),
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"estimator": "flipout2"}, "did you mean 'flipout'"),
    ],
)
def test_settings_are_checked(settings, message):
    with pytest.raises(StfsebError, match=message):
        MFVI(mlp(), **settings)


def partly_frozen() -> nn.Sequential:
    net = mlp()
    next(iter(net.children())).requires_grad_(False)
    return net


def mean_field(kind: str, net: nn.Module) -> MeanFieldMethod:
    if kind == "mfvi":
        return MFVI(net, samples=2)
    context = batch(9)[0]
    if kind.startswith("fseb"):
        return FSEB(net, context, num_context=4, samples=2, variant="map" if kind == "fseb-map" else "vi")
    method = GFSVI(net, context, num_context=4, samples=2, cache=False)
    method.prior.set(1.0, 1.0)
    return method


def unfreeze(net: nn.Sequential) -> None:
    net.requires_grad_(True)


def freeze(net: nn.Sequential) -> None:
    net[0].requires_grad_(False)


def wider_head(net: nn.Sequential) -> None:
    net[-1] = nn.Linear(net[-1].in_features, 7).double()


@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize("kind", ["mfvi", "fseb", "gfsvi"])
@pytest.mark.parametrize(
    ("make", "change", "message"),
    [
        (partly_frozen, unfreeze, r"trainable, but not when MFVI was made: 0\.weight, 0\.bias"),
        (mlp, freeze, r"no longer trainable: 0\.weight, 0\.bias"),
        (mlp, wider_head, r"of another shape: .*\.weight, .*\.bias"),
    ],
)
def test_a_network_that_changes_afterwards_is_refused(kind, make, change, message, stepped):
    net = make()
    method = mean_field(kind, net)
    x, y = batch()
    if stepped:
        method.objective(x, y, 20)
    change(net)
    message = message.replace("MFVI", type(method).__name__)
    for use in (lambda: method.objective(x, y, 20), lambda: method.sample_logits(x, 2, seed=0)):
        with pytest.raises(StfsebError, match=message + r".*make .* anew") as caught:
            use()
        assert "\n" not in str(caught.value)


def test_a_network_frozen_in_time_keeps_its_constants():
    net = partly_frozen()
    method = mean_field("mfvi", net)
    x, y = batch()
    method.objective(x, y, 20).total.backward()
    assert net[0].weight.grad is None
    assert set(method.scales()) == {name for name, p in net.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("kind", ["mfvi", "fseb", "fseb-map", "gfsvi"])
def test_a_method_frozen_as_a_whole_still_predicts(kind):
    method, x = mean_field(kind, mlp()), batch()[0]
    wanted = method.sample_logits(x, 2, seed=0)
    method.requires_grad_(False)
    assert torch.equal(method.sample_logits(x, 2, seed=0), wanted)
