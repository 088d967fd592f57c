"""The function prior against scipy, torch, extended precision and finite differences."""

from __future__ import annotations

import itertools
import math

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch.distributions import MultivariateNormal

from stfseb import distributions
from stfseb.errors import StfsebError
from stfseb.function_prior import FunctionPrior

DOUBLE = torch.float64
GRID = [10.0**k for k in range(-6, 3)]  # the paper's tau1 and tau2


def features(n: int, p: int, seed: int = 0) -> torch.Tensor:
    """Features with the spectrum of a random CNN's: one dominant direction and a long tail."""
    generator = torch.Generator().manual_seed(seed)
    k = min(n, p)
    left = torch.linalg.qr(torch.randn(n, k, dtype=DOUBLE, generator=generator))[0]
    right = torch.linalg.qr(torch.randn(p, k, dtype=DOUBLE, generator=generator))[0]
    spectrum = torch.logspace(0, -2.3 if n >= p else -1.3, k, dtype=DOUBLE)
    spectrum[0] = 4.5 * math.sqrt(n / 32)
    return left * spectrum @ right.mT


def values(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, dtype=DOUBLE, generator=torch.Generator().manual_seed(seed))


def dense(h: torch.Tensor, tau1: float, tau2: float) -> torch.Tensor:
    return tau1 * h @ h.mT + tau2 * torch.eye(len(h), dtype=DOUBLE)


def extended_quadratic(h: torch.Tensor, f: torch.Tensor, tau1: float, tau2: float) -> np.ndarray:
    """c by ridge regression in 80-bit floats with two steps of refinement, independent of the library."""
    wide = np.longdouble
    a, y, ridge = h.numpy().astype(wide), f.numpy().astype(wide), wide(tau2) / wide(tau1)
    m = a.T @ a + ridge * np.eye(a.shape[1], dtype=wide)
    low = m.copy()
    for j in range(len(m)):
        low[j, j] = np.sqrt(low[j, j])
        low[j + 1 :, j] /= low[j, j]
        low[j + 1 :, j + 1 :] -= np.outer(low[j + 1 :, j], low[j + 1 :, j])
    w = np.zeros((a.shape[1], y.shape[1]), dtype=wide)
    for _ in range(3):
        b = a.T @ (y - a @ w) - ridge * w
        for i in range(len(m)):
            b[i] = (b[i] - low[i, :i] @ b[:i]) / low[i, i]
        for i in reversed(range(len(m))):
            b[i] = (b[i] - low[i + 1 :, i] @ b[i + 1 :]) / low[i, i]
        w += b
    return (((y - a @ w) ** 2).sum(0) + ridge * (w**2).sum(0)) / wide(tau2)


# --- densities -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "p"), [(6, 9), (9, 6), (1, 3), (5, 5)])
@pytest.mark.parametrize("outputs", [1, 4])
def test_infinite_dof_is_the_gaussian_density(n: int, p: int, outputs: int) -> None:
    h, f = features(n, p), values(3, n, outputs)
    ours = FunctionPrior(h, 0.7, 0.2, math.inf)
    normal = MultivariateNormal(torch.zeros(n, dtype=DOUBLE), dense(h, 0.7, 0.2))
    expected = normal.log_prob(f.mT).sum(-1)
    torch.testing.assert_close(ours.log_prob(f), expected, rtol=1e-12, atol=1e-11)
    for huge in (1e10, torch.tensor(1e10, dtype=DOUBLE)):
        torch.testing.assert_close(FunctionPrior(h, 0.7, 0.2, huge).log_prob(f), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(FunctionPrior(h, 0.7, 0.2, torch.tensor(math.inf)).log_prob(f), ours.log_prob(f))


@pytest.mark.parametrize(("n", "p"), [(6, 9), (9, 6)])
@pytest.mark.parametrize("dof", [2.1, 5.0, 20.0])
@pytest.mark.parametrize("parametrisation", distributions.PARAMETRISATIONS)
def test_finite_dof_equals_scipy(n: int, p: int, dof: float, parametrisation: str) -> None:
    h, f = features(n, p), values(n, 3)
    k = dense(h, 0.5, 2.0).numpy()
    factor = {"covariance": dof - 2, "scale": dof, "curvature": dof + n}[parametrisation] / dof
    expected = stats.multivariate_t(shape=k * factor, df=dof).logpdf(f.mT.numpy()).sum()
    prior = FunctionPrior(h, 0.5, 2.0, dof, parametrisation=parametrisation)  # type: ignore[arg-type]
    assert float(prior.log_prob(f)) == pytest.approx(expected, abs=1e-10)
    constant = prior.log_prob(torch.zeros_like(f))
    torch.testing.assert_close(prior.penalty(f), constant - prior.log_prob(f), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(("n", "p"), [(6, 9), (9, 6)])
def test_bias_term_log_det_and_condition_number(n: int, p: int) -> None:
    h, f = features(n, p), values(n, 2)
    k = dense(h, 0.5, 2.0) + 0.5 * 1.7 * torch.ones(n, n, dtype=DOUBLE)
    prior = FunctionPrior(h, 0.5, 2.0, math.inf, bias_variance=1.7)
    torch.testing.assert_close(prior.quadratic(f), (f * torch.linalg.solve(k, f)).sum(0))
    torch.testing.assert_close(prior.log_det, torch.linalg.slogdet(k)[1])
    exact = float(torch.linalg.cond(k))
    assert exact <= float(prior.condition_number) <= exact * n
    rebuilt = FunctionPrior.from_factor(
        FunctionPrior.factorise(h, 0.25, 1.7), 0.5, 2.0, math.inf, features=h, bias_variance=1.7
    )
    torch.testing.assert_close(rebuilt.quadratic(f), prior.quadratic(f))


def test_penalties_are_as_written() -> None:
    h, f = features(32, 128), values(32, 10)
    c = (f * torch.linalg.solve(dense(h, 1.0, 100.0), f)).sum(0)
    for parametrisation, d in (("covariance", 3.0), ("scale", 5.0), ("curvature", 37.0)):
        prior = FunctionPrior(h, 1.0, 100.0, 5.0, parametrisation=parametrisation)  # type: ignore[arg-type]
        torch.testing.assert_close(prior.penalty(f), (37 / 2 * torch.log1p(c / d)).sum())
    torch.testing.assert_close(FunctionPrior(h, 1.0, 100.0, math.inf).penalty(f), c.sum() / 2)
    # near zero the curvature form is the Gaussian's for every dof
    small = f * 1e-5
    ours = FunctionPrior(h, 1.0, 100.0, 2.1, parametrisation="curvature").penalty(small)
    torch.testing.assert_close(ours, FunctionPrior(h, 1.0, 100.0, math.inf).penalty(small), rtol=1e-8, atol=0)


# --- accuracy --------------------------------------------------------------------------------------------


def test_the_reference_itself_against_fifty_digits() -> None:
    h, f = features(12, 7), values(12, 1)
    with mpmath.workdps(50):
        a, y = mpmath.matrix(h.tolist()), mpmath.matrix(f.tolist())
        k = mpmath.mpf(100) * a * a.T + mpmath.mpf(1e-6) * mpmath.eye(12)
        exact = (y.T * mpmath.lu_solve(k, y))[0]
        assert abs(extended_quadratic(h, f, 100.0, 1e-6)[0] / np.longdouble(str(exact)) - 1) < 1e-15


@pytest.mark.parametrize(("n", "bound"), [(32, 1e-12), (128, 1e-9), (256, 1e-13), (1024, 1e-13)])
def test_worst_error_over_the_papers_grid(n: int, bound: float) -> None:
    h = features(n, 128)
    f = torch.cat([h @ values(128, 2), values(n, 2)], 1)  # in the span of the features, and anywhere
    worst = 0.0
    ratios: dict[float, np.ndarray] = {}
    for tau1, tau2 in itertools.product(GRID, GRID):
        ratio = round(math.log10(tau1 / tau2))  # c tau2 depends on the ratio alone: 17 references for 81 pairs
        if ratio not in ratios:
            ratios[ratio] = extended_quadratic(h, f, 10.0**ratio, 1.0)
        ours = FunctionPrior(h, tau1, tau2, math.inf).quadratic(f).numpy()
        worst = max(worst, float(np.max(np.abs(ours * tau2 / ratios[ratio] - 1))))
    assert worst < bound


@pytest.mark.parametrize(("n", "p"), [(32, 128), (160, 128)])
@pytest.mark.parametrize("dof", [5.0, math.inf])
def test_gradient_at_condition_number_1e9(n: int, p: int, dof: float) -> None:
    h, f = features(n, p), values(n, 3).requires_grad_()
    h[-1] = h[0]  # a duplicate, so that the smallest eigenvalue is tau2
    ratio = 1e9 / float(torch.linalg.matrix_norm(h, 2)) ** 2
    prior = FunctionPrior(h, ratio * 1e-2, 1e-2, dof)
    assert float(torch.linalg.cond(dense(h, ratio * 1e-2, 1e-2))) == pytest.approx(1e9, rel=1e-2)
    (gradient,) = torch.autograd.grad(prior.penalty(f), f)
    generator = torch.Generator().manual_seed(5)
    point = f.detach()
    for direction in (torch.randn(n, 3, dtype=DOUBLE, generator=generator), h[:, :3], gradient):
        direction = direction / direction.norm()
        step = 1e-4
        up, down = prior.penalty(point + step * direction), prior.penalty(point - step * direction)
        numeric = float(up - down) / (2 * step)
        scale = float(gradient.norm())
        assert float((gradient * direction).sum()) == pytest.approx(numeric, rel=1e-6, abs=1e-8 * scale)


@pytest.mark.parametrize(("n", "p"), [(32, 128), (160, 128)])
def test_gradient_is_the_closed_form_and_euler_identity_holds(n: int, p: int) -> None:
    h, f, nu = features(n, p), values(n, 4).requires_grad_(), 5.0
    prior = FunctionPrior(h, 1.0, 1e-3, nu)
    (gradient,) = torch.autograd.grad(prior.penalty(f), f)
    alpha = torch.linalg.solve(dense(h, 1.0, 1e-3), f.detach())
    c = prior.quadratic(f.detach())
    torch.testing.assert_close(gradient, (nu + n) / (nu - 2 + c) * alpha, rtol=1e-7, atol=1e-9)
    torch.testing.assert_close((f.detach() * gradient).sum(0), (nu + n) * c / (nu - 2 + c), rtol=1e-9, atol=0)


@pytest.mark.parametrize(("n", "p"), [(4, 6), (7, 3)])
def test_second_derivatives(n: int, p: int) -> None:
    h, f = features(n, p), values(n, 2).requires_grad_()
    assert torch.autograd.gradgradcheck(FunctionPrior(h, 0.5, 0.3, 4.0).penalty, (f,))


def test_no_backward_through_cholesky_unless_something_is_learnt() -> None:
    h, f = features(8, 12).requires_grad_(), values(8, 2).requires_grad_()

    def names(result: torch.Tensor) -> set[str]:
        seen, queue = set(), [result.grad_fn]
        while queue:
            node = queue.pop()
            if node is not None:
                seen.add(type(node).__name__)
                queue += [parent for parent, _ in node.next_functions]
        return seen

    assert not any("Cholesky" in name for name in names(FunctionPrior(h, 1.0, 1.0, 5.0).penalty(f)))
    learnt = FunctionPrior(h, torch.tensor(1.0, requires_grad=True), 1.0, 5.0).penalty(f)
    assert any("Cholesky" in name for name in names(learnt))
    learnt.backward()
    assert h.grad is None


@pytest.mark.parametrize("n", [32, 256])
def test_low_precision_values_only_lose_their_own_rounding(n: int) -> None:
    h, f = features(n, 128), values(2, n, 5)
    prior = FunctionPrior(h, 1.0, 1e-6, 5.0)
    single = prior.penalty(f.float())
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), prior.penalty(f.float().double()), rtol=1e-7, atol=0)
    half = prior.penalty(f.bfloat16())
    assert half.dtype == torch.float32
    torch.testing.assert_close(half.double(), prior.penalty(f.bfloat16().double()), rtol=1e-7, atol=0)
    with torch.autocast("cpu", torch.bfloat16):
        inside = FunctionPrior(h, 1.0, 1e-6, 5.0).penalty(f)
    torch.testing.assert_close(inside, prior.penalty(f), rtol=0, atol=0)
    # float32 features are taken as exact numbers, not rounded further
    exact = FunctionPrior(h.float().double(), 1.0, 1e-6, 5.0).penalty(f)
    torch.testing.assert_close(FunctionPrior(h.float(), 1.0, 1e-6, 5.0).penalty(f), exact, rtol=0, atol=0)


def test_devices_without_float64_work_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = torch.empty(2, device="meta")
    assert distributions.workplace(stand_in).type == "meta"
    monkeypatch.setattr(distributions, "_WITHOUT_FLOAT64", ("meta",))
    assert distributions.workplace(stand_in) == torch.device("cpu")


# --- symmetries and properties ---------------------------------------------------------------------------


@settings(max_examples=50, deadline=None)
@given(
    n=st.integers(1, 9),
    p=st.integers(1, 9),
    outputs=st.integers(1, 4),
    tau1=st.floats(1e-6, 1e2),
    tau2=st.floats(1e-6, 1e2),
    dof=st.one_of(st.floats(2.05, 50), st.just(math.inf)),
    seed=st.integers(0, 10_000),
)
def test_orders_signs_and_duplicates(
    n: int, p: int, outputs: int, tau1: float, tau2: float, dof: float, seed: int
) -> None:
    h, f = features(n, p, seed), values(n, outputs, seed=seed)
    h = torch.cat([h, h[:1]])  # a context image drawn twice: a singular Gram matrix
    f = torch.cat([f, f[:1] + 1])
    prior = FunctionPrior(h, tau1, tau2, dof)
    c, penalty = prior.quadratic(f), prior.penalty(f)
    assert (c >= 0).all()
    assert torch.isfinite(penalty)
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randperm(n + 1, generator=generator)
    columns = torch.randperm(outputs, generator=generator)
    moved = FunctionPrior(h[rows], tau1, tau2, dof)
    torch.testing.assert_close(moved.quadratic(f[rows]), c, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(moved.log_prob(f[rows]), prior.log_prob(f), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(prior.quadratic(-f[:, columns]), c[columns], rtol=1e-9, atol=0)
    rotation = torch.linalg.qr(torch.randn(p, p, dtype=DOUBLE, generator=generator))[0]
    torch.testing.assert_close(FunctionPrior(h @ rotation, tau1, tau2, dof).quadratic(f), c, rtol=1e-6, atol=1e-9)
    scaled = FunctionPrior(h * 3, tau1 / 9, tau2, dof).quadratic(f)
    torch.testing.assert_close(scaled, c, rtol=1e-6, atol=1e-9)


def test_saturated_gradient_ignores_a_common_factor_on_both_taus() -> None:
    h, f = features(32, 128), 1e3 * values(32, 10).requires_grad_()

    def gradient(factor: float, dof: float) -> torch.Tensor:
        return torch.autograd.grad(FunctionPrior(h, factor * 1e-3, factor * 1e-2, dof).penalty(f), f)[0]

    assert FunctionPrior(h, 1e-3, 1e-2, 5.0).quadratic(f.detach()).min() > 1e6
    torch.testing.assert_close(gradient(1.0, 5.0), gradient(1e-3, 5.0), rtol=1e-5, atol=0)
    torch.testing.assert_close(gradient(1.0, math.inf) * 1e3, gradient(1e-3, math.inf), rtol=1e-9, atol=0)


def test_ridge_and_gram_form_meet_where_they_change_over() -> None:
    """Zero columns do not change the prior, but they change which form is used."""
    h, f = features(20, 10), values(20, 3)
    padded = torch.cat([h, torch.zeros(20, 15, dtype=DOUBLE)], 1)
    a, b = FunctionPrior(h, 3.0, 0.1, 5.0), FunctionPrior(padded, 3.0, 0.1, 5.0)
    assert a._factor.shape == (10, 10)
    assert b._factor.shape == (20, 20)
    torch.testing.assert_close(a.log_prob(f), b.log_prob(f), rtol=1e-11, atol=0)
    torch.testing.assert_close(a.condition_number, b.condition_number)


# --- batches and factors ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "p"), [(6, 9), (9, 6)])
def test_batched_equals_looped(n: int, p: int) -> None:
    runs, samples = 3, 4
    h = torch.stack([features(n, p, seed) for seed in range(runs)])
    f = values(runs, samples, n, 2)
    tau1 = torch.tensor([0.1, 1.0, 10.0], dtype=DOUBLE)
    tau2 = torch.tensor([1.0, 0.3, 2.0], dtype=DOUBLE)
    dof = torch.tensor([3.0, math.inf, 8.0], dtype=DOUBLE)
    together = FunctionPrior(h[:, None], tau1[:, None], tau2[:, None], dof[:, None])
    assert together.quadratic(f).shape == (runs, samples, 2)
    factors = FunctionPrior.factorise(h, tau1 / tau2)
    assert factors.shape == (runs, min(n, p), min(n, p))
    for i in range(runs):
        settings_ = float(tau1[i]), float(tau2[i]), float(dof[i])
        alone = FunctionPrior(h[i], *settings_)
        torch.testing.assert_close(together.penalty(f)[i], alone.penalty(f[i]), rtol=1e-10, atol=0)
        torch.testing.assert_close(together.log_prob(f)[i], alone.log_prob(f[i]), rtol=1e-10, atol=0)
        for s in range(samples):
            torch.testing.assert_close(alone.penalty(f[i])[s], alone.penalty(f[i, s]), rtol=1e-11, atol=0)
        again = FunctionPrior.from_factor(factors[i], *settings_, features=h[i])
        torch.testing.assert_close(again.log_prob(f[i]), alone.log_prob(f[i]), rtol=1e-11, atol=0)
        torch.testing.assert_close(again.condition_number, alone.condition_number)
    shared = FunctionPrior(h[0], tau1[:, None], tau2[:, None], 5.0).penalty(f)
    single = FunctionPrior(h[0], float(tau1[2]), float(tau2[2]), 5.0).penalty(f[2])
    torch.testing.assert_close(shared[2], single)
    assert FunctionPrior(h[0], 1.0, 1.0, 5.0).penalty(f[0, 0]).shape == ()


def test_a_factor_alone_is_enough_with_few_points() -> None:
    h, f = features(6, 9), values(5, 6, 2)
    whole = FunctionPrior(h, 2.0, 0.5, 5.0)
    light = FunctionPrior.from_factor(FunctionPrior.factorise(h, 4.0), 2.0, 0.5, 5.0)
    torch.testing.assert_close(light.log_prob(f), whole.log_prob(f))
    torch.testing.assert_close(light.condition_number, whole.condition_number)


@pytest.mark.parametrize(("n", "p"), [(6, 9), (9, 6), (1, 3)])
@pytest.mark.parametrize("bias", [0.0, 0.7])
def test_the_spectral_form_is_the_same_prior(n: int, p: int, bias: float) -> None:
    """Values, determinant and gradients in the taus, for one decomposition and for a batch of them."""
    h, f = torch.stack([features(n, p, seed) for seed in range(2)]), values(2, 5, n, 3)
    basis, spectrum = FunctionPrior.decompose(h, bias)
    for tau1, tau2, dof in ((2.0, 0.5, 5.0), (1e3, 1e-3, 2.1), (1e-4, 50.0, math.inf)):
        taus = [torch.tensor(t, dtype=DOUBLE, requires_grad=True) for t in (tau1, tau2)]
        gradients = []
        for i in range(2):
            built = FunctionPrior(h[i], *taus, dof, bias_variance=bias)
            light = FunctionPrior.from_spectrum(basis[i], spectrum[i], *taus, dof)
            torch.testing.assert_close(light.quadratic(f[i]), built.quadratic(f[i]), rtol=1e-9, atol=0)
            torch.testing.assert_close(light.log_det, built.log_det, rtol=1e-10, atol=1e-10)
            torch.testing.assert_close(light.log_prob(f[i]), built.log_prob(f[i]), rtol=1e-9, atol=1e-9)
            torch.testing.assert_close(light.condition_number, built.condition_number, rtol=1e-10, atol=0)
            gradients = [torch.autograd.grad(prior.log_prob(f[i]).sum(), taus) for prior in (light, built)]
            torch.testing.assert_close(*gradients, rtol=1e-7, atol=1e-9)
        together = FunctionPrior.from_spectrum(basis[:, None], spectrum[:, None], tau1, tau2, dof)
        both = torch.stack([FunctionPrior(h[i], tau1, tau2, dof, bias_variance=bias).log_prob(f[i]) for i in range(2)])
        torch.testing.assert_close(together.log_prob(f), both, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("n", [6, 32])
def test_the_spectral_form_keeps_its_digits_over_the_papers_grid(n: int) -> None:
    h, f = features(n, 128), values(n, 2)
    inside = h @ values(128, 2, seed=3)  # in the span of the features: the hard case
    basis, spectrum = FunctionPrior.decompose(h)
    for tau1, tau2 in itertools.product(GRID[::2], GRID[::2]):
        for outputs in (f, inside):
            expected = extended_quadratic(h, outputs, tau1, tau2).astype(float)
            found = FunctionPrior.from_spectrum(basis, spectrum, tau1, tau2, 5.0).quadratic(outputs)
            np.testing.assert_allclose(found.numpy(), expected, rtol=1e-6)


def test_the_determinant_of_a_whitened_prior() -> None:
    h, f = features(6, 9), values(5, 6, 2)
    whitener = FunctionPrior.whiten(FunctionPrior.factorise(h, 4.0))
    light = FunctionPrior.from_factor(whitener, 2.0, 0.5, 5.0, whitener=whitener)  # what an engine hands over
    torch.testing.assert_close(light.log_prob(f), FunctionPrior(h, 2.0, 0.5, 5.0).log_prob(f))


def test_all_samples_share_one_solve(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = []
    solve = torch.linalg.solve_triangular

    def spy(a: torch.Tensor, b: torch.Tensor, *, upper: bool) -> torch.Tensor:
        shapes.append((tuple(a.shape), tuple(b.shape)))
        return solve(a, b, upper=upper)

    monkeypatch.setattr(torch.linalg, "solve_triangular", spy)
    FunctionPrior(features(32, 128), 1.0, 1.0, 5.0).penalty(values(10, 32, 7))
    assert shapes == [((32, 32), (32, 70))]


def test_vmap_over_runs() -> None:
    h = torch.stack([features(6, 9, seed) for seed in range(3)])
    f, tau = values(3, 4, 6, 2), torch.tensor([0.1, 1.0, 5.0], dtype=DOUBLE)

    def penalty(a: torch.Tensor, b: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return FunctionPrior(a, t, 0.5, 5.0).penalty(b)

    together = torch.func.vmap(penalty)(h, f, tau)
    for i in range(3):
        torch.testing.assert_close(together[i], penalty(h[i], f[i], tau[i]))


# --- learnable settings, compilation, errors -------------------------------------------------------------


@pytest.mark.parametrize(("n", "p"), [(5, 8), (8, 5)])
@pytest.mark.parametrize("parametrisation", distributions.PARAMETRISATIONS)
@pytest.mark.parametrize("what", ["log_prob", "penalty"])
def test_gradients_in_the_hyperparameters(n: int, p: int, parametrisation: str, what: str) -> None:
    h, f = features(n, p), values(3, n, 2).requires_grad_()
    raw = [torch.tensor(v, dtype=DOUBLE, requires_grad=True) for v in (0.7, 0.4, 4.0, 0.6)]

    def call(
        tau1: torch.Tensor, tau2: torch.Tensor, dof: torch.Tensor, bias: torch.Tensor, f: torch.Tensor
    ) -> torch.Tensor:
        prior = FunctionPrior(h, tau1, tau2, dof, parametrisation=parametrisation, bias_variance=bias)  # type: ignore[arg-type]
        return getattr(prior, what)(f)

    assert torch.autograd.gradcheck(call, (*raw, f))


def test_float32_hyperparameters_on_the_side_of_float64_work() -> None:
    h, f = features(8, 12), values(8, 3).float()
    dof, tau1 = torch.tensor(5.0, requires_grad=True), torch.tensor(0.3, requires_grad=True)
    FunctionPrior(h, tau1, 2.0, dof).log_prob(f).backward()
    assert dof.grad is not None
    assert dof.grad.dtype == torch.float32
    assert tau1.grad is not None
    assert torch.isfinite(dof.grad)


def test_maximum_likelihood_finds_the_taus_again() -> None:
    torch.manual_seed(0)
    h = features(64, 16) * 3
    f = torch.linalg.cholesky(dense(h, 0.5, 0.02)) @ torch.randn(64, 400, dtype=DOUBLE)
    raw = torch.zeros(2, dtype=DOUBLE, requires_grad=True)
    optimiser = torch.optim.LBFGS([raw], max_iter=60, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimiser.zero_grad()
        value = -FunctionPrior(h, raw[0].exp(), raw[1].exp(), math.inf).log_prob(f) / f.numel()
        value.backward()
        return value

    optimiser.step(loss)  # type: ignore[no-untyped-call]
    assert raw.detach().exp().tolist() == pytest.approx([0.5, 0.02], rel=0.05)


@pytest.mark.parametrize(("n", "p"), [(6, 9), (9, 6)])
def test_compiles_in_one_graph(n: int, p: int) -> None:
    h, f = features(n, p).float(), values(4, n, 2).float().requires_grad_()
    tau1, tau2, dof = torch.tensor(0.5), torch.tensor(2.0), torch.tensor(5.0)

    def loss(h: torch.Tensor, f: torch.Tensor, *taus: torch.Tensor) -> torch.Tensor:
        built = FunctionPrior(h, *taus).penalty(f).mean()
        factor = FunctionPrior.factorise(h, taus[0] / taus[1])
        return built + FunctionPrior.from_factor(factor, *taus, features=h).log_prob(f).mean()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    ours, theirs = compiled(h, f, tau1, tau2, dof), loss(h, f, tau1, tau2, dof)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(torch.autograd.grad(ours, f), torch.autograd.grad(theirs, f))


def test_a_failed_factorisation_shows_as_nan_and_nothing_stops() -> None:
    h = torch.randn(6, 9, dtype=DOUBLE) * 1e160  # the Gram matrix overflows
    assert FunctionPrior(h, 1.0, 1.0, 5.0).penalty(values(6, 2)).isnan()


def test_bad_settings_are_named() -> None:
    h = features(4, 3)
    for make in (lambda: FunctionPrior(h.numpy(), 1.0, 1.0, 5.0), lambda: FunctionPrior.factorise(h.tolist(), 1.0)):
        with pytest.raises(StfsebError, match=r"^features are a (ndarray|list): give a tensor"):
            make()
    with pytest.raises(StfsebError, match=r"^values are a ndarray: give a tensor"):
        FunctionPrior(h, 1.0, 1.0, 5.0).penalty(values(4, 2).numpy())
    with pytest.raises(StfsebError, match=r"dof = 2 must be larger than 2; .*parametrisation='scale'"):
        FunctionPrior(h, 1.0, 1.0, 2.0)
    with pytest.raises(StfsebError, match=r"dof = 1\.5"):
        FunctionPrior(h, 1.0, 1.0, torch.tensor(1.5))
    FunctionPrior(h, 1.0, 1.0, 0.5, parametrisation="scale")
    with pytest.raises(StfsebError, match=r"dof = 0 must be larger than 0"):
        FunctionPrior(h, 1.0, 1.0, 0, parametrisation="curvature")
    with pytest.raises(StfsebError, match=r"tau1 = 0 "):
        FunctionPrior(h, 0.0, 1.0, 5.0)
    with pytest.raises(StfsebError, match=r"tau2 = nan"):
        FunctionPrior(h, 1.0, math.nan, 5.0)
    with pytest.raises(StfsebError, match=r"bias_variance = -1"):
        FunctionPrior(h, 1.0, 1.0, 5.0, bias_variance=-1.0)
    with pytest.raises(StfsebError, match=r"unknown parametrisation 'scales': did you mean 'scale'"):
        FunctionPrior(h, 1.0, 1.0, 5.0, parametrisation="scales")  # type: ignore[arg-type]
    with pytest.raises(StfsebError, match="NaN"):
        FunctionPrior(h * math.nan, 1.0, 1.0, 5.0)
    with pytest.raises(StfsebError, match=r"shape \(3,\)"):
        FunctionPrior(h[0], 1.0, 1.0, 5.0)
    with pytest.raises(StfsebError, match=r"\(\.\.\., 4, outputs\).* not \(5, 2\)"):
        FunctionPrior(h, 1.0, 1.0, 5.0).penalty(torch.zeros(5, 2))
    with pytest.raises(StfsebError, match="does not belong"):
        FunctionPrior.from_factor(torch.eye(5, dtype=DOUBLE), 1.0, 1.0, 5.0, features=h)


@pytest.mark.parametrize("ratio", [0.5, 1e9])
def test_products_replace_the_solves_with_more_points_than_features(ratio: float) -> None:
    torch.manual_seed(3)
    h, values = torch.randn(40, 6, dtype=torch.float64), torch.randn(3, 40, 2, dtype=torch.float64)
    values[0] = h @ torch.randn(6, 2, dtype=torch.float64)  # within the span of the features, where c is smallest
    values.requires_grad_(True)
    tau1, tau2 = ratio * 0.3, 0.3
    factor = FunctionPrior.factorise(h, ratio)
    whitener = FunctionPrior.whiten(factor)
    light = FunctionPrior.from_factor(whitener, tau1, tau2, 5.0, features=h, whitener=whitener)
    dense = tau1 * h @ h.T + tau2 * torch.eye(40, dtype=torch.float64)
    u, s, _ = torch.linalg.svd(h)
    eigenvalues = torch.full((40,), tau2, dtype=torch.float64)
    eigenvalues[:6] += tau1 * s.square()
    wanted = ((u.T @ values).square() / eigenvalues[:, None]).sum(-2)
    found = light.quadratic(values)
    torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(light.log_det, eigenvalues.log().sum())
    (slope,) = torch.autograd.grad(found[1:].sum(), values)
    (exact,) = torch.autograd.grad(wanted[1:].sum(), values)
    torch.testing.assert_close(slope[1:], exact[1:], rtol=1e-7, atol=1e-8)
    if ratio < 1:
        torch.testing.assert_close(found, (values * torch.linalg.solve(dense, values)).sum(-2))
