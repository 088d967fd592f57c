"""The weight prior against scipy and torch.distributions."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import nn
from torch.distributions import Normal, StudentT

from stfseb.errors import StfsebError
from stfseb.weight_prior import WeightPrior

DOUBLE = torch.float64


def parameters(dtype: torch.dtype = DOUBLE) -> list[torch.Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(36, 5)).to(dtype)
    return [p.detach() for p in net.parameters()]


@pytest.mark.parametrize("dof", [0.5, 2.1, 5.0, 300.0, math.inf])
@pytest.mark.parametrize("sigma", [1e-3, 1.0, 10.0])
def test_log_prob_equals_scipy_and_torch(dof: float, sigma: float) -> None:
    theta = parameters()
    flat = torch.cat([p.flatten() for p in theta])
    law = stats.t(dof, scale=sigma) if math.isfinite(dof) else stats.norm(scale=sigma)
    df, zero, scale = torch.tensor([dof, 0.0, sigma], dtype=DOUBLE)
    torchs = StudentT(df, zero, scale) if math.isfinite(dof) else Normal(zero, scale)
    ours = float(WeightPrior(dof, sigma).log_prob(iter(theta)))
    assert ours == pytest.approx(law.logpdf(flat.numpy()).sum(), rel=1e-11)
    assert ours == pytest.approx(float(torchs.log_prob(flat).sum()), rel=1e-11)


@pytest.mark.parametrize("dof", [2.1, 5.0, math.inf])
def test_penalty_is_minus_log_prob_up_to_a_constant(dof: float) -> None:
    prior, theta = WeightPrior(dof, 0.3), parameters()
    zeros = [torch.zeros_like(p) for p in theta]
    difference = prior.log_prob(zeros) - prior.log_prob(theta)
    torch.testing.assert_close(prior.penalty(theta), difference, rtol=1e-10, atol=1e-10)
    assert prior.penalty(zeros) == 0


def test_penalty_is_the_papers_formula_and_its_gradient() -> None:
    theta, nu, sigma = torch.linspace(-3, 3, 50, dtype=DOUBLE).requires_grad_(), 3.0, 0.2
    penalty = WeightPrior(nu, sigma).penalty([theta])
    values = theta.detach().numpy()
    expected = (nu + 1) / 2 * np.log1p(values**2 / (nu * sigma**2)).sum()
    assert float(penalty.detach()) == pytest.approx(expected, rel=1e-13)
    (gradient,) = torch.autograd.grad(penalty, theta)
    closed = (nu + 1) * values / (nu * sigma**2 + values**2)
    np.testing.assert_allclose(gradient.numpy(), closed, rtol=1e-12)


@pytest.mark.parametrize("dof", [2.1, 1e9, math.inf])
@pytest.mark.parametrize("sigma", [1e-6, 1.0, 1e3])
def test_float32_agrees_with_float64_on_two_million_parameters(dof: float, sigma: float) -> None:
    theta = torch.randn(2_000_000, generator=torch.Generator().manual_seed(0)) * 0.05
    prior = WeightPrior(dof, sigma)
    single, double = prior.penalty([theta]), prior.penalty([theta.double()])
    assert single.dtype == torch.float32
    assert float(single) == pytest.approx(float(double), rel=2e-6)


def test_half_precision_parameters_are_summed_in_float32() -> None:
    theta = [torch.full((70_000,), 0.25, dtype=torch.bfloat16), torch.full((3,), 0.5, dtype=torch.bfloat16)]
    penalty = WeightPrior(5.0, 1.0).penalty(theta)
    assert penalty.dtype == torch.float32
    expected = WeightPrior(5.0, 1.0).penalty([p.double() for p in theta])
    assert float(penalty) == pytest.approx(float(expected), rel=1e-5)


def test_learnable_dof_and_sigma_have_the_right_gradients() -> None:
    theta = [p.requires_grad_() for p in parameters()]
    dof = torch.tensor(4.0, dtype=DOUBLE, requires_grad=True)
    sigma = torch.tensor(0.3, dtype=DOUBLE, requires_grad=True)

    def log_prob(d: torch.Tensor, s: torch.Tensor, *p: torch.Tensor) -> torch.Tensor:
        return WeightPrior(d, s).log_prob(p)

    assert torch.autograd.gradcheck(log_prob, (dof, sigma, *theta))


def test_maximum_likelihood_finds_dof_and_sigma_again() -> None:
    """Type-II learning with the full normaliser recovers the law the weights were drawn from."""
    theta = torch.from_numpy(stats.t(4.0, scale=0.05).rvs(40_000, random_state=0))
    raw = torch.tensor([math.log(20.0), 0.0], dtype=DOUBLE, requires_grad=True)
    optimiser = torch.optim.LBFGS([raw], max_iter=60, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimiser.zero_grad()
        value = -WeightPrior(raw[0].exp(), raw[1].exp()).log_prob([theta]) / len(theta)
        value.backward()
        return value

    optimiser.step(loss)  # type: ignore[no-untyped-call]
    dof, sigma = raw.detach().exp().tolist()
    fitted, _, scale = stats.t.fit(theta.numpy(), floc=0)
    assert dof == pytest.approx(fitted, rel=1e-2)
    assert sigma == pytest.approx(scale, rel=1e-2)
    assert dof == pytest.approx(4.0, rel=0.1)


def test_infinite_dof_tensor_is_the_gaussian_with_finite_gradients() -> None:
    theta = torch.linspace(-1, 1, 9, dtype=DOUBLE).requires_grad_()
    dof = torch.tensor(math.inf, dtype=DOUBLE, requires_grad=True)
    value = WeightPrior(dof, 0.5).log_prob([theta])
    torch.testing.assert_close(value, Normal(0.0, 0.5).log_prob(theta).sum())
    by_dof, by_theta = torch.autograd.grad(value, (dof, theta))
    assert by_dof == 0
    torch.testing.assert_close(by_theta, -theta.detach() / 0.25)


@settings(max_examples=40, deadline=None)
@given(dof=st.floats(0.1, 100), sigma=st.floats(1e-3, 1e3), split=st.integers(1, 9))
def test_grouping_and_signs_do_not_matter(dof: float, sigma: float, split: int) -> None:
    theta = torch.linspace(-2, 3, 10, dtype=DOUBLE)
    prior = WeightPrior(dof, sigma)
    whole = prior.penalty([theta])
    assert whole >= 0
    torch.testing.assert_close(prior.penalty([-theta[:split], theta[split:].reshape(1, -1)]), whole)
    torch.testing.assert_close(prior.penalty([theta.flip(0)]), whole)


def test_compiles_in_one_graph() -> None:
    theta = parameters(torch.float32)

    def loss(dof: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        return WeightPrior(dof, sigma).penalty(theta) + WeightPrior(dof, 0.5).log_prob(theta)

    arguments = torch.tensor(5.0), torch.tensor(0.1)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*arguments), loss(*arguments))


def test_bad_settings_are_named() -> None:
    with pytest.raises(StfsebError, match=r"dof = 0 must be larger than 0"):
        WeightPrior(0, 1.0)
    with pytest.raises(StfsebError, match=r"dof = nan"):
        WeightPrior(math.nan, 1.0)
    with pytest.raises(StfsebError, match=r"sigma = -0\.1"):
        WeightPrior(5.0, -0.1)
    with pytest.raises(StfsebError, match="no parameters"):
        WeightPrior(5.0, 1.0).penalty([])
