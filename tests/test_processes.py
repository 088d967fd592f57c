"""The Student's t process against scikit-learn, gpytorch and conditioning by ratios of joint densities."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import torch
from scipy import special, stats
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process import kernels as sk
from torch.distributions import MultivariateNormal

from stfseb.distributions import MultivariateStudentT
from stfseb.errors import StfsebError
from stfseb.kernels import RBF, FeatureKernel, Matern
from stfseb.processes import StudentTProcess

DOUBLE = torch.float64


@pytest.fixture
def data() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(9, 2, dtype=DOUBLE, generator=generator) * 3
    y = torch.sin(x[:, 0]) + x[:, 1] + 0.1 * torch.randn(9, dtype=DOUBLE, generator=generator)
    return x, y, torch.rand(5, 2, dtype=DOUBLE, generator=generator) * 3


def slope(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x[:, 0] - 1


def test_marginal_is_the_multivariate_t_of_the_kernel_matrix(data: tuple[torch.Tensor, ...]) -> None:
    x, y, _ = data
    k = RBF(0.8, 2.0)
    marginal = StudentTProcess(4.0, slope, k).marginal(x, noise=0.1)
    assert isinstance(marginal, MultivariateStudentT)
    matrix = (k(x, x) + 0.1 * torch.eye(9, dtype=DOUBLE)).numpy()
    theirs = stats.multivariate_t(loc=slope(x).numpy(), shape=matrix * 2 / 4, df=4).logpdf(y.numpy())
    assert float(marginal.log_prob(y)) == pytest.approx(theirs, abs=1e-10)
    assert isinstance(StudentTProcess(math.inf, None, k).marginal(x, noise=0.1), MultivariateNormal)


def test_gaussian_limit_equals_scikit_learn(data: tuple[torch.Tensor, ...]) -> None:
    x, y, new = data
    theirs = GaussianProcessRegressor(2.0 * sk.RBF(0.8), alpha=0.05, optimizer=None).fit(x.numpy(), y.numpy())
    mean, covariance = theirs.predict(new.numpy(), return_cov=True)
    posterior = StudentTProcess(math.inf, None, RBF(0.8, 2.0)).posterior(x, y, noise=0.05)
    marginal = posterior.marginal(new)
    np.testing.assert_allclose(marginal.mean.numpy(), mean, atol=1e-10)
    np.testing.assert_allclose(marginal.covariance_matrix.numpy(), covariance, atol=1e-10)
    prior = StudentTProcess(math.inf, None, RBF(0.8, 2.0)).marginal(x, noise=0.05)
    assert float(prior.log_prob(y)) == pytest.approx(theirs.log_marginal_likelihood_value_, abs=1e-9)


@pytest.mark.parametrize("infinite", [torch.tensor(math.inf), torch.tensor([math.inf], dtype=DOUBLE)])
def test_an_infinite_tensor_is_the_gaussian(data: tuple[torch.Tensor, ...], infinite: torch.Tensor) -> None:
    x, y, new = data
    one, other = StudentTProcess(infinite, slope, RBF(0.8, 2.0)), StudentTProcess(math.inf, slope, RBF(0.8, 2.0))
    assert one.gaussian
    torch.manual_seed(0)
    drawn = one.sample(new, 3)
    torch.manual_seed(0)
    assert torch.equal(drawn, other.sample(new, 3))
    ours, theirs = one.posterior(x, y, noise=0.05).marginal(new), other.posterior(x, y, noise=0.05).marginal(new)
    assert torch.equal(ours.covariance_matrix, theirs.covariance_matrix)


@pytest.mark.parametrize("dof", [2.5, 5.0])
@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_posterior_is_the_ratio_of_joint_densities(data: tuple[torch.Tensor, ...], dof: float, noise: float) -> None:
    x, y, new = data
    process = StudentTProcess(dof, slope, Matern(1.5, 0.9, 1.3))
    posterior = process.posterior(x, y, noise)
    assert posterior.dof == dof + 9
    at = posterior.marginal(new, noise)
    for value in torch.randn(4, 5, dtype=DOUBLE) * 2:
        joint = process.marginal(torch.cat([x, new]), noise).log_prob(torch.cat([y, value]))
        evidence = process.marginal(x, noise).log_prob(y)
        assert float(at.log_prob(value)) == pytest.approx(float(joint - evidence), abs=1e-9)


def test_conditioning_in_two_steps_equals_one(data: tuple[torch.Tensor, ...]) -> None:
    x, y, new = data
    noise = torch.linspace(0.05, 0.4, 9, dtype=DOUBLE)
    process = StudentTProcess(3.0, slope, RBF(0.8))
    once = process.posterior(x, y, noise)
    twice = process.posterior(x[:4], y[:4], noise[:4]).posterior(x[4:], y[4:], noise[4:])
    assert once.dof == twice.dof
    for extra in (0.0, 0.3):
        a, b = once.marginal(new, extra), twice.marginal(new, extra)
        torch.testing.assert_close(a.mean, b.mean, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(a.covariance_matrix, b.covariance_matrix, rtol=1e-9, atol=1e-9)


def test_gpytorch_kernels_and_models_agree(data: tuple[torch.Tensor, ...]) -> None:
    x, y, new = data
    with warnings.catch_warnings():  # its linear_operator still scripts functions when imported
        warnings.simplefilter("ignore", DeprecationWarning)
        import gpytorch
    kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel(nu=2.5)).double()
    kernel.outputscale, kernel.base_kernel.lengthscale = 1.3, 0.7
    theirs = StudentTProcess(6.0, None, kernel).posterior(x, y, 0.1).marginal(new)
    ours = StudentTProcess(6.0, None, Matern(2.5, 0.7, 1.3)).posterior(x, y, 0.1).marginal(new)
    torch.testing.assert_close(theirs.mean.detach(), ours.mean, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(theirs.covariance_matrix.detach(), ours.covariance_matrix, rtol=1e-5, atol=1e-6)
    StudentTProcess(6.0, None, kernel).marginal(x, 0.1).log_prob(y).backward()
    assert kernel.raw_outputscale.grad.abs() > 0


@pytest.mark.parametrize("dof", [4.5, math.inf])
def test_prior_samples_follow_the_marginal(dof: float) -> None:
    torch.manual_seed(0)
    x = torch.linspace(0, 1, 200, dtype=DOUBLE)  # singular to rounding: no Cholesky factor exists
    process = StudentTProcess(dof, lambda t: 3 * t, RBF(0.5, 2.0))
    draws = process.sample(x, 8000)
    assert draws.shape == (8000, 200)
    difference = (draws[:, 150] - draws[:, 20] - 3 * (x[150] - x[20])).numpy()
    k = RBF(0.5, 2.0)(x[[20, 150]], x[[20, 150]])
    spread = float(k[0, 0] + k[1, 1] - 2 * k[0, 1])
    law = stats.norm(scale=spread**0.5)
    if math.isfinite(dof):
        law = stats.t(dof, scale=(spread * (dof - 2) / dof) ** 0.5)
    assert stats.kstest(difference, law.cdf).pvalue > 1e-3


@pytest.mark.parametrize("dof", [2.5, math.inf])
def test_one_scale_variable_is_shared_by_a_whole_function(dof: float) -> None:
    """Uncorrelated values are still dependent in size; corr of log|f| is known in closed form."""
    torch.manual_seed(0)
    apart = torch.tensor([0.0, 1.0], dtype=DOUBLE)
    sizes = StudentTProcess(dof, None, RBF(0.01)).sample(apart, 20_000).abs().log()
    shared = float(special.polygamma(1, dof / 2)) / 4 if math.isfinite(dof) else 0.0
    expected = shared / (shared + math.pi**2 / 8)
    assert float(torch.corrcoef(sizes.T)[0, 1]) == pytest.approx(expected, abs=0.03)


def test_learnable_dof_and_kernel(data: tuple[torch.Tensor, ...]) -> None:
    x, y, new = data
    dof = torch.tensor(5.0, dtype=DOUBLE, requires_grad=True)
    scale = torch.tensor(0.8, dtype=DOUBLE, requires_grad=True)

    def evidence(d: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        return StudentTProcess(d, None, RBF(s)).marginal(x, 0.1).log_prob(y)

    def predictive(d: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        return StudentTProcess(d, None, RBF(s)).posterior(x, y, 0.1).marginal(new, 0.1).log_prob(new.sum(1))

    assert torch.autograd.gradcheck(evidence, (dof, scale))
    assert torch.autograd.gradcheck(predictive, (dof, scale))


def test_bad_input_is_named(data: tuple[torch.Tensor, ...]) -> None:
    x, y, _ = data
    with pytest.raises(StfsebError, match=r"dof = 2 must be larger than 2; use a larger value \(math.inf.*\)$"):
        StudentTProcess(2, None, RBF())
    process = StudentTProcess(5.0, None, FeatureKernel(lambda t: t))
    with pytest.raises(StfsebError, match=r"9 points is not positive definite .* noise > 0"):
        process.marginal(x)
    with pytest.raises(StfsebError, match=r"one observation per point: y \(8,\)"):
        process.posterior(x, y[:8])
