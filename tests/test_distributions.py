"""The multivariate Student's t against scipy, torch and its own samples."""

from __future__ import annotations

import math

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch.distributions import MultivariateNormal, StudentT

from stfseb.distributions import PARAMETRISATIONS, MultivariateStudentT, energy, fold, log_normaliser
from stfseb.errors import StfsebError

DOUBLE = torch.float64


def covariance(d: int, seed: int = 0, batch: tuple[int, ...] = ()) -> torch.Tensor:
    root = torch.randn(*batch, d, d + 2, dtype=DOUBLE, generator=torch.Generator().manual_seed(seed))
    return root @ root.mT / d + 0.1 * torch.eye(d, dtype=DOUBLE)


@pytest.mark.parametrize("df", [2.1, 3.0, 5.0, 20.0, 150.0])
@pytest.mark.parametrize("d", [1, 2, 7, 32])
def test_log_prob_equals_scipy(df: float, d: int) -> None:
    rng = np.random.default_rng(d)
    k, loc, x = covariance(d), rng.normal(size=d), rng.normal(size=(20, d)) * 3
    ours = MultivariateStudentT(df, torch.from_numpy(loc), k).log_prob(torch.from_numpy(x)).numpy()
    theirs = stats.multivariate_t(loc=loc, shape=k.numpy() * (df - 2) / df, df=df).logpdf(x)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-10)


def test_one_dimension_is_torchs_student_t() -> None:
    df, x = torch.tensor([2.5, 4.0, 30.0], dtype=DOUBLE), torch.linspace(-9, 9, 41, dtype=DOUBLE)
    loc, variance = torch.tensor(0.7, dtype=DOUBLE), torch.tensor(2.3, dtype=DOUBLE)
    ours = MultivariateStudentT(df, loc[None], variance[None, None]).log_prob(x[:, None, None])
    theirs = StudentT(df, loc, (variance * (df - 2) / df).sqrt()).log_prob(x[:, None])
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_infinite_df_is_the_gaussian_exactly_and_mixes_with_finite_ones() -> None:
    k, loc, x = covariance(5), torch.randn(5, dtype=DOUBLE), torch.randn(30, 5, dtype=DOUBLE)
    normal = MultivariateNormal(loc, k)
    ours = MultivariateStudentT(math.inf, loc, k)
    torch.testing.assert_close(ours.log_prob(x), normal.log_prob(x), rtol=1e-14, atol=1e-13)
    torch.testing.assert_close(ours.entropy(), normal.entropy(), rtol=1e-14, atol=1e-13)

    df = torch.tensor([5.0, math.inf], dtype=DOUBLE, requires_grad=True)
    value = x[:, None].clone().requires_grad_()
    mixed = MultivariateStudentT(df, loc, k).log_prob(value)
    torch.testing.assert_close(mixed[:, 1], normal.log_prob(x), rtol=1e-14, atol=1e-13)
    torch.testing.assert_close(mixed[:, 0], MultivariateStudentT(5.0, loc, k).log_prob(x))
    by_df, by_value = torch.autograd.grad(mixed.sum(), (df, value))
    assert torch.isfinite(by_df).all()
    assert by_df[1] == 0
    assert by_df[0] != 0
    assert torch.isfinite(by_value).all()


@pytest.mark.parametrize("df", [1e4, 1e8, 1e12])
def test_large_df_approaches_the_gaussian_without_losing_digits(df: float) -> None:
    k, x = covariance(6), torch.randn(10, 6, dtype=DOUBLE)
    zero = torch.zeros(6, dtype=DOUBLE)
    gap = MultivariateStudentT(df, zero, k).log_prob(x) - MultivariateNormal(zero, k).log_prob(x)
    # The next term of the expansion is of order (c^2 + d^2)/df; differences of lgammas would add 1e-4 at 1e12.
    assert gap.abs().max() < 1e4 / df + 1e-12


@pytest.mark.parametrize("dof", [0.3, 2.1, 50.0, 99.0, 101.0, 1e3, 1e7])
@pytest.mark.parametrize("n", [1, 32, 1024])
@pytest.mark.parametrize("parametrisation", PARAMETRISATIONS)
def test_normaliser_against_many_digits(dof: float, n: int, parametrisation: str) -> None:
    if parametrisation == "covariance":
        dof = max(dof, 2.01)
    with mpmath.workdps(40):
        nu = mpmath.mpf(dof)
        d = {"covariance": nu - 2, "scale": nu, "curvature": nu + n}[parametrisation]
        exact = mpmath.loggamma((nu + n) / 2) - mpmath.loggamma(nu / 2) - mpmath.mpf(n) / 2 * mpmath.log(mpmath.pi * d)
        slope = (mpmath.digamma((nu + n) / 2) - mpmath.digamma(nu / 2)) / 2 - mpmath.mpf(n) / 2 / d
    value = torch.tensor(dof, dtype=DOUBLE, requires_grad=True)
    ours = log_normaliser(value, n, parametrisation)  # type: ignore[arg-type]
    assert float(ours.detach()) == pytest.approx(float(exact), rel=1e-13, abs=1e-12)
    (gradient,) = torch.autograd.grad(ours, value)
    assert float(gradient) == pytest.approx(float(slope), rel=1e-8, abs=1e-12)


def test_gradients_match_finite_differences_in_every_argument() -> None:
    df = torch.tensor([2.3, 5.0, 130.0], dtype=DOUBLE, requires_grad=True)
    loc = torch.randn(3, 4, dtype=DOUBLE, requires_grad=True)
    root = torch.randn(4, 4, dtype=DOUBLE, requires_grad=True)
    value = torch.randn(2, 3, 4, dtype=DOUBLE, requires_grad=True)

    def log_prob(*args: torch.Tensor) -> torch.Tensor:
        k = args[2] @ args[2].mT + torch.eye(4, dtype=DOUBLE)
        return MultivariateStudentT(args[0], args[1], k).log_prob(args[3])

    assert torch.autograd.gradcheck(log_prob, (df, loc, root, value))


@pytest.mark.parametrize("df", [2.5, 6.0, math.inf])
def test_entropy_equals_scipy(df: float) -> None:
    k = covariance(3)
    shape = k.numpy() * ((df - 2) / df if math.isfinite(df) else 1.0)
    theirs = stats.multivariate_t(shape=shape, df=df).entropy()
    ours = MultivariateStudentT(df, torch.zeros(3, dtype=DOUBLE), k).entropy()
    assert float(ours) == pytest.approx(float(theirs), rel=1e-10)


@pytest.mark.parametrize("df", [5.0, 12.0, math.inf])
def test_samples_have_the_law_they_claim(df: float) -> None:
    torch.manual_seed(1)
    k, loc, n = covariance(3), torch.tensor([1.0, -2.0, 0.5], dtype=DOUBLE), 40_000
    distribution = MultivariateStudentT(df, loc, k)
    x = distribution.sample((n,))
    # Every linear projection is a univariate t with the same df; Mahalanobis distances follow an F law.
    for direction in torch.tensor([[1.0, 0, 0], [0.3, -1, 2]], dtype=DOUBLE):
        variance = float(direction @ k @ direction)
        z = ((x - loc) @ direction).numpy()
        scale = math.sqrt(variance * ((df - 2) / df if math.isfinite(df) else 1.0))
        law = stats.t(df, scale=scale) if math.isfinite(df) else stats.norm(scale=scale)
        assert stats.kstest(z, law.cdf).pvalue > 1e-3
    c = torch.einsum("ni,ij,nj->n", x - loc, torch.linalg.inv(k), x - loc).numpy()
    if math.isfinite(df):
        assert stats.kstest(c / 3 * df / (df - 2), stats.f(3, df).cdf).pvalue > 1e-3
    else:
        assert stats.kstest(c, stats.chi2(3).cdf).pvalue > 1e-3
    spread = x.sub(loc).mT @ x.sub(loc) / n
    torch.testing.assert_close(spread, k, rtol=0.12, atol=0.05)
    torch.testing.assert_close(distribution.variance, k.diagonal())


def test_batch_members_are_sampled_independently() -> None:
    torch.manual_seed(2)
    x = MultivariateStudentT(8.0, torch.zeros(2, 1, dtype=DOUBLE), torch.eye(1, dtype=DOUBLE)).sample((20_000,))
    a, b = x[:, 0, 0].square(), x[:, 1, 0].square()
    assert abs(float(torch.corrcoef(torch.stack([a, b]))[0, 1])) < 0.04


def test_rsample_is_differentiable_in_df() -> None:
    """Under a common stream, d/d df of E|x|^4 follows from the closed form of the kurtosis."""
    torch.manual_seed(3)
    df = torch.tensor(12.0, dtype=DOUBLE, requires_grad=True)
    loc = torch.zeros(1, dtype=DOUBLE, requires_grad=True)
    root = torch.ones(1, 1, dtype=DOUBLE, requires_grad=True)
    x = MultivariateStudentT(df, loc, covariance_tril=root).rsample((400_000,))
    slope, shift, _ = torch.autograd.grad(x.pow(4).mean() + x.sum() * 0, (df, loc, root))
    # E x^4 = 3 (df-2)/(df-4) at unit variance, so the slope is -6/(df-4)^2.
    assert float(slope) == pytest.approx(-6 / 64, rel=0.25)
    assert torch.isfinite(shift).all()


def test_expand_shares_the_factor_and_agrees() -> None:
    k = covariance(4)
    small = MultivariateStudentT(torch.tensor(5.0, dtype=DOUBLE), torch.zeros(4, dtype=DOUBLE), k)
    large = small.expand((6, 3))
    assert large.batch_shape == (6, 3)
    assert large.event_shape == (4,)
    assert large._factor is small._factor
    assert large.sample((2,)).shape == (2, 6, 3, 4)
    assert large.covariance_matrix.shape == (6, 3, 4, 4)
    assert large.covariance_tril.shape == (6, 3, 4, 4)
    assert large.variance.shape == (6, 3, 4)
    assert large.mean.shape == large.mode.shape == (6, 3, 4)
    assert large.entropy().shape == (6, 3)
    x = torch.randn(6, 3, 4, dtype=DOUBLE)
    torch.testing.assert_close(large.log_prob(x), small.log_prob(x))
    torch.testing.assert_close(large.covariance_tril @ large.covariance_tril.mT, large.covariance_matrix)


def test_broadcast_batch_equals_a_loop() -> None:
    df = torch.tensor([[3.0], [9.0]], dtype=DOUBLE)
    loc, k = torch.randn(3, 4, dtype=DOUBLE), covariance(4, batch=(3,))
    x = torch.randn(5, 2, 3, 4, dtype=DOUBLE)
    batched = MultivariateStudentT(df, loc, k)
    assert batched.batch_shape == (2, 3)
    result = batched.log_prob(x)
    for i in range(2):
        for j in range(3):
            single = MultivariateStudentT(float(df[i, 0]), loc[j], k[j]).log_prob(x[:, i, j])
            torch.testing.assert_close(result[:, i, j], single, rtol=1e-12, atol=1e-12)


def test_validation(monkeypatch: pytest.MonkeyPatch) -> None:
    # torch.compile switches the default off for the whole process, and another test may have compiled something.
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)
    eye = torch.eye(2)
    with pytest.raises(StfsebError, match=r"df = 2 must be larger than 2; use a larger value \(math.inf.*\)$"):
        MultivariateStudentT(2.0, torch.zeros(2), eye)
    with pytest.raises(StfsebError, match="df"):
        MultivariateStudentT(torch.tensor([5.0, 1.0]), torch.zeros(2), eye)
    with pytest.raises(ValueError, match="covariance_matrix"):
        MultivariateStudentT(5.0, torch.zeros(2), -eye)
    with pytest.raises(StfsebError, match="exactly one"):
        MultivariateStudentT(5.0, torch.zeros(2))
    with pytest.raises(StfsebError, match=r"\(3,\) and \(2, 2\)"):
        MultivariateStudentT(5.0, torch.zeros(3), eye)
    with pytest.raises(ValueError, match=r"event|shape|size"):
        MultivariateStudentT(5.0, torch.zeros(2), eye).log_prob(torch.zeros(3))
    MultivariateStudentT(1.5, torch.zeros(2), eye, validate_args=False)
    with pytest.raises(AttributeError, match="nothing"):
        _ = MultivariateStudentT(5.0, torch.zeros(2), eye).nothing


def test_energy_uses_log1p() -> None:
    """In float32 log(1 + c/nu) vanishes at nu = 1e9; the right answer is c/2."""
    c = torch.tensor([0.5, 1.0, 4.0])
    for dof in (1e9, torch.tensor(1e9)):
        torch.testing.assert_close(energy(c, dof, 32), c / 2, rtol=1e-6, atol=0)


@settings(max_examples=60, deadline=None)
@given(
    lead=st.lists(st.integers(1, 3), max_size=3),
    mask=st.lists(st.booleans(), max_size=3),
    extra=st.integers(0, 1),
)
def test_fold_solves_as_broadcasting_does(lead: list[int], mask: list[bool], extra: int) -> None:
    batch = tuple(size if keep else 1 for size, keep in zip(reversed(lead), mask, strict=False))[::-1]
    batch = (2,) * extra + (1,) * (len(lead) - len(batch)) * extra + batch
    generator = torch.Generator().manual_seed(len(lead))
    values = torch.randn(*lead, 4, 2, dtype=DOUBLE, generator=generator)
    factor = torch.randn(*batch, 4, 4, dtype=DOUBLE, generator=generator).tril() + 4 * torch.eye(4, dtype=DOUBLE)
    columns, unfold = fold(values, batch)
    kept = [size for size in batch if size != 1]
    ours = unfold(torch.linalg.solve_triangular(factor.reshape(*kept, 4, 4), columns, upper=False).sum(-2))
    theirs = torch.linalg.inv(factor) @ values
    torch.testing.assert_close(ours, theirs.sum(-2))
