"""Fitted degrees of freedom against scipy's fit, against draws of known tails, and in coverage."""

import math
import time

import numpy as np
import pytest
import torch
from scipy import optimize, stats
from torch import nn

from stfseb import MAP, STFSEB, MultivariateStudentT, StfsebError
from stfseb.evaluation.tails import context_tails, fit_tails, weight_tails


@pytest.mark.parametrize(("nu", "scale"), [(0.8, 1.0), (2.5, 1e-3), (8.0, 40.0)])
def test_the_fit_is_scipys(nu, scale):
    x = stats.t(nu, scale=scale).rvs(2000, random_state=1)
    found = fit_tails(x**2)
    dof, _, s = stats.t.fit(x, floc=0)
    ours, scipys = (stats.t(*p).logpdf(x).sum() for p in ((found.dof, 0, found.scale), (dof, 0, s)))
    assert ours >= scipys - 1e-6
    assert (found.dof, found.scale) == pytest.approx((dof, s), rel=2e-3)
    gaussian = stats.norm(0, np.sqrt((x**2).mean())).logpdf(x).sum()
    assert found.gain == pytest.approx((ours - gaussian) / len(x), rel=1e-6)
    for end in (found.low, found.high):  # the likelihood's drop at the ends, with scipy's own optimum over the scale
        best = optimize.minimize_scalar(lambda b, end=end: -stats.t(end, scale=math.exp(b)).logpdf(x).sum(),
                                        bracket=(math.log(s), math.log(s) + 0.1))  # fmt: skip
        assert 2 * (ours + best.fun) == pytest.approx(stats.chi2(1).ppf(0.95), rel=1e-2)


def test_the_fit_of_blocks_is_scipys():
    nu, n, count, s = 4.0, 6, 800, 1.7
    x = stats.multivariate_t(shape=s**2 * np.eye(n), df=nu).rvs(count, random_state=2)

    def density(p):
        return -stats.multivariate_t(shape=np.exp(p[1]) * np.eye(n), df=np.exp(p[0])).logpdf(x).mean()

    best = np.exp(optimize.minimize(density, [1.0, 1.0], method="Nelder-Mead", options={"xatol": 1e-6}).x)
    found = fit_tails((x**2).sum(1), n)
    assert (found.dof, found.scale**2) == pytest.approx(tuple(best), rel=1e-3)
    assert found.low < nu < found.high
    assert found.dimension == n


def test_intervals_cover_as_often_as_they_say():
    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(200):
        found = fit_tails(rng.standard_t(4.0, 400) ** 2, level=0.9)
        covered += found.low <= 4.0 <= found.high
    assert covered == pytest.approx(180, abs=17)  # 4 standard deviations


def test_gaussian_values_are_not_told_from_large_dofs():
    found = fit_tails(np.random.default_rng(1).normal(0, 3, 5000) ** 2)
    assert found.high == math.inf
    assert found.low > 15
    assert found.scale == pytest.approx(3, rel=0.1)
    uniform = fit_tails(np.random.default_rng(1).uniform(-1, 1, 500) ** 2)  # lighter tails than any t
    assert (uniform.dof, uniform.high, uniform.gain) == (math.inf, math.inf, 0.0)
    assert uniform.as_dict()["dof"] == "inf"
    many = fit_tails(np.random.default_rng(1).uniform(-1, 1, 500_000) ** 2)  # sure of it: no nu that was tried is left
    assert (many.dof, many.high) == (math.inf, math.inf)
    assert many.low > 9000


def test_half_a_million_weights_are_fitted_in_seconds():
    x = np.random.default_rng(3).standard_t(3.0, 500_000)
    started, busy = time.perf_counter(), time.process_time()
    found = fit_tails(x**2)
    assert min(time.perf_counter() - started, time.process_time() - busy) < 20  # others may share the machine
    assert found.dof == pytest.approx(3.0, rel=0.02)
    assert found.low < 3.0 < found.high


def test_weights_tensor_by_tensor_and_pooled():
    """Gaussian tensors of unlike spread look heavy-tailed together, and Gaussian again at unit scale."""
    net = nn.Sequential(nn.Linear(50, 60), nn.ReLU(), nn.Linear(60, 40, bias=False))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        net[0].weight.normal_(0, 1, generator=generator)
        net[0].bias.zero_()
        net[2].weight.normal_(0, 0.05, generator=generator)
    rows = {row.name: row for row in weight_tails(MAP(net))}
    assert list(rows) == ["0.weight", "2.weight", "all", "all, unit scale"]  # a tensor of zeros has no tails
    assert rows["all"].count == 3000 + 2400
    assert rows["all"].high < 3
    assert rows["0.weight"].high == rows["2.weight"].high == rows["all, unit scale"].high == math.inf
    assert rows["2.weight"].scale == pytest.approx(0.05, rel=0.05)
    with torch.no_grad():
        net[2].weight.copy_(torch.from_numpy(stats.t(3.0, scale=0.1).rvs((40, 60), random_state=0)))
    heavy = weight_tails(MAP(net))[1]
    assert heavy.low < 3.0 < heavy.high < 5
    assert "2.weight: dof" in str(heavy)


class Identity(nn.Module):
    """A network whose outputs are its inputs."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.dropout = nn.Dropout(0.0)

    def forward(self, x):
        return self.dropout(x * self.scale)


@pytest.mark.parametrize("nu", [3.0, 12.0])
def test_outputs_alone_and_in_blocks(nu):
    """With one constant feature the blocks are exchangeable; each draw of a block has one scale for its points."""
    points, draws, classes = 4, 500, 2
    h = torch.ones(points, 1, dtype=torch.float64)
    K = 2.0 * h @ h.mT + 0.5 * torch.eye(points, dtype=torch.float64)
    torch.manual_seed(0)
    blocks = MultivariateStudentT(nu, torch.zeros(points, dtype=torch.float64), K).rsample((draws, classes))
    order = torch.randperm(draws * points, generator=torch.Generator().manual_seed(5))
    images = torch.empty(draws * points, classes, dtype=torch.float64)
    images[order] = blocks.transpose(1, 2).reshape(-1, classes)  # so that the function's own order finds the blocks
    method = STFSEB(Identity(), images, tau1=2.0, tau2=0.5, num_context=points, samples=1, prior_weight=1.0,
                    extractor=lambda x: torch.ones(len(x), 1, dtype=torch.float64))  # fmt: skip
    rows = {row.name: row for row in context_tails(method, seed=5)}
    assert list(rows) == [
        "class 0", "class 1", "all classes", "class 0, blocks", "class 1, blocks", "all classes, blocks",
    ]  # fmt: skip
    whole = rows["all classes, blocks"]
    assert (whole.count, whole.dimension) == (draws * classes, points)
    assert whole.low < nu < whole.high
    assert whole.scale == pytest.approx(math.sqrt((nu - 2) / nu), rel=0.1)  # K is the covariance of the draws
    single = rows["class 0"]
    assert (single.count, single.dimension) == (draws * points, 1)
    assert nu / 1.5 < single.dof < 1.5 * nu  # no interval: a block's points are not independent
    mixed = {row.name: row for row in context_tails(method, seed=6)}["all classes, blocks"]
    assert mixed.scale > 1.5 * whole.scale  # points of unlike blocks are not correlated as K says


def test_methods_without_a_kernel_have_rows_of_single_outputs():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    images = torch.rand(100, 1, 2, 2)
    names = [row.name for row in context_tails(MAP(net), images)]
    assert names == ["class 0", "class 1", "class 2", "all classes"]
    with pytest.raises(StfsebError, match="give images"):
        context_tails(MAP(net))


def test_a_prior_mean_is_taken_off():
    images = torch.from_numpy(stats.t(4.0).rvs((400, 2), random_state=0))
    settings = {"num_context": 8, "samples": 1, "prior_weight": 1.0, "extractor": lambda x: x}
    moved = context_tails(STFSEB(Identity(), images + 7.0, prior_mean=7.0, **settings))
    plain = context_tails(STFSEB(Identity(), images, **settings))
    for one, two in zip(moved[:3], plain[:3], strict=True):
        assert one.dof == pytest.approx(two.dof, rel=1e-4)


@pytest.mark.parametrize("bad", [[1.0], [0.0, 0.0], [1.0, math.nan], [1.0, -1.0]])
def test_what_cannot_be_fitted_is_named(bad):
    with pytest.raises(StfsebError, match="squared values"):
        fit_tails(bad)


EXTREME = {
    "one spike": np.r_[np.zeros(10_000), 1.0, 4.0],
    "two scales": np.r_[np.full(1000, 1e-200), 1.0],
    "ends of the range": np.array([1e-300, 1e300, 1.0]),
    "sums overflow": np.array([1e308, 1.5e308, 1.7e308, 1e307]),
    "below normal numbers": np.array([5e-324, 1e-322, 0.0, 4e-320]),
    "heavier than any t": np.exp(50 * np.random.default_rng(0).standard_normal(500)),
    "no spread": np.full(50, 3.0),
    "a third far smaller": np.square(np.random.default_rng(1).standard_normal(1000)) * np.r_[[1e-8] * 300, [1.0] * 700],
    "two values far apart": np.array([1e-320, 1e300]),
}


@pytest.mark.parametrize("n", [1, 32])
@pytest.mark.parametrize("case", EXTREME)
def test_extreme_samples_are_fitted_without_a_warning(case, n):
    """Warnings are errors here. No point of a fine grid over nu and s is better than the fit."""
    found = fit_tails(EXTREME[case], n)
    logs = np.log(EXTREME[case][EXTREME[case] > 0])
    assert found.count == len(logs)

    def likelihood(nu, b):
        constant = math.lgamma((nu + n) / 2) - math.lgamma(nu / 2) - n / 2 * (math.log(nu * math.pi) + b)
        return constant - (nu + n) / 2 * np.logaddexp(0, logs - math.log(nu) - b).mean()

    unit = np.logaddexp.reduce(logs) - math.log(len(logs) * n)  # the Gaussian's log s^2
    gaussian = -n / 2 * (math.log(2 * math.pi) + unit + 1)
    scales = np.linspace(logs.min() - math.log(n) - 1, logs.max() - math.log(n) + 1, 800)
    grid = max(likelihood(nu, b) for nu in np.geomspace(0.05, 1e4, 40) for b in scales)
    tolerance = 2e-4 * max(1.0, n)  # a step of nu, and the bound 1e4 in place of infinity
    assert gaussian + found.gain >= grid - tolerance
    assert found.dof >= 0.05
    assert found.low <= found.dof <= found.high
    own = gaussian if math.isinf(found.dof) else likelihood(found.dof, 2 * math.log(found.scale))
    assert own == pytest.approx(gaussian + found.gain, abs=1e-6 * n * max(1.0, found.gain))


def test_zeros_are_left_out_and_the_unit_does_not_matter():
    x = np.random.default_rng(5).standard_t(3.0, 3000)
    plain = fit_tails(x**2)
    with_zeros = fit_tails(np.r_[np.zeros(9000), x**2])
    assert (with_zeros.dof, with_zeros.scale, with_zeros.count) == (plain.dof, plain.scale, 3000)
    for unit in (1e-150, 1e140):
        other = fit_tails((unit * x) ** 2)
        assert other.dof == pytest.approx(plain.dof, rel=1e-6)
        assert other.scale == pytest.approx(unit * plain.scale, rel=1e-6)
        assert other.gain == pytest.approx(plain.gain, rel=1e-6)
