"""Learnt dof, tau and sigma: the full densities, their gradients, what is found again, and what is kept."""

import json
import math
import warnings

import numpy as np
import pytest
import torch
from scipy import optimize, stats
from torch import nn

from stfseb import STFSEB, SmallCNN, StfsebError, fit, load, save
from stfseb.distributions import MultivariateStudentT
from stfseb.function_prior import FunctionPrior
from stfseb.methods.context import ContextStream
from stfseb.methods.learning import COVARIANCE_DOF, DOF, SCALE, VARIANCE, LearningWarning, Learnt
from stfseb.training.batches import ResidentBatches
from stfseb.training.engine import EagerEngine, make_optimiser
from stfseb.training.static_step import StaticStep

N, B, L = 1000, 12, 3
ALL = ("dof_weights", "dof_function", "tau", "sigma")


def make_net(hidden=16):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, hidden), nn.Tanh(), nn.Dropout(0.0), nn.Linear(hidden, L)).double()


@pytest.fixture
def batch():
    g = torch.Generator().manual_seed(1)
    x = torch.randn(B, 5, generator=g, dtype=torch.float64)
    return x, torch.randint(L, (B,), generator=g), torch.randn(40, 5, generator=g, dtype=torch.float64)


def objective(method, batch):
    method.reseed(3)
    return method.objective(batch[0], batch[1], N)


# --- the densities ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("parametrisation", ["covariance", "scale", "curvature"])
@pytest.mark.parametrize("learn", [("dof",), ("tau",), ("dof", "tau", "sigma"), ALL])
@pytest.mark.parametrize("num_context", [6, 20])
def test_terms_are_whole_negative_log_densities(batch, learn, parametrisation, num_context):
    net, nu, sigma, tau1, tau2 = make_net(), 4.5, 0.7, 2.0, 0.5
    settings = {"num_context": num_context, "samples": 2, "prior_weight": 1.0, "parametrisation": parametrisation}
    terms = objective(STFSEB(net, batch[2], nu, sigma, tau1, tau2, learn=learn, **settings), batch)
    plain = objective(STFSEB(net, batch[2], nu, sigma, tau1, tau2, **settings), batch)
    points = batch[2][ContextStream(40, num_context, 3).indices(0)]
    h, f = net[:2](points).detach(), net(points).detach()
    K = tau1 * h @ h.mT + tau2 * torch.eye(num_context, dtype=torch.float64)
    spread = {"covariance": (nu - 2) / nu, "scale": 1.0, "curvature": (nu + num_context) / nu}[parametrisation]
    scipys = stats.multivariate_t(shape=K.numpy() * spread, df=nu)
    function = -sum(float(scipys.logpdf(f[:, k].numpy())) for k in range(L))
    theta = np.concatenate([p.detach().numpy().ravel() for p in net.parameters()])
    weights = -stats.t(nu, scale=sigma).logpdf(theta).sum() * B / N
    if parametrisation == "covariance":
        ours = MultivariateStudentT(nu, torch.zeros(num_context, dtype=torch.float64), K)
        assert function == pytest.approx(-float(ours.log_prob(f.mT).sum()), rel=1e-9)
    learns_function, learns_weights = learn != ("sigma",), learn != ("tau",)
    assert terms.function.item() == pytest.approx(function if learns_function else plain.function.item(), rel=1e-9)
    assert terms.weights.item() == pytest.approx(weights if learns_weights else plain.weights.item(), rel=1e-9)
    assert terms.data.item() == plain.data.item()


def test_a_term_has_its_normaliser_only_where_something_of_it_is_learnt(batch):
    net = make_net()
    plain, only_weights = (
        objective(STFSEB(net, batch[2], num_context=8, samples=1, prior_weight=1.0, learn=learn), batch)
        for learn in ((), ("sigma",))
    )
    assert torch.equal(plain.function, only_weights.function)
    assert not torch.equal(plain.weights, only_weights.weights)


@pytest.mark.parametrize("num_context", [6, 20])
@pytest.mark.parametrize("learn", [ALL, ("dof", "tau", "sigma")])
@pytest.mark.parametrize("parametrisation", ["covariance", "curvature"])
def test_gradients_against_finite_differences(batch, learn, num_context, parametrisation):
    net = make_net()
    method = STFSEB(
        net, batch[2], 3.0, 0.4, 2.0, 0.5, num_context=num_context, samples=2, prior_weight=1.0,
        learn=learn, parametrisation=parametrisation,
    )  # fmt: skip
    method.learning.double()
    objective(method, batch).total.backward()
    for name, raw in method.learning.raw.items():
        values = []
        for step in (1e-5, -1e-5):
            with torch.no_grad():
                raw += step
            values.append(objective(method, batch).total.item())
            with torch.no_grad():
                raw -= step
        assert raw.grad.item() == pytest.approx((values[0] - values[1]) / 2e-5, rel=1e-5), name


def test_weights_get_the_gradient_of_fixed_settings(batch):
    """Learning adds constants in theta: at the same values the network's gradient is the same."""
    net = make_net()
    gradients = []
    for learn in ((), ("dof", "tau", "sigma")):
        terms = objective(STFSEB(net, batch[2], num_context=8, samples=2, prior_weight=1.0, learn=learn), batch)
        gradients.append(torch.cat([g.flatten() for g in torch.autograd.grad(terms.total, list(net.parameters()))]))
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-12)


# --- the values ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("start", "span"), [(5.0, COVARIANCE_DOF), (5.0, DOF), (100.0, VARIANCE), (0.3, SCALE)])
def test_values_start_at_the_settings_and_stay_in_bounds(start, span):
    learnt = Learnt({"v": (start, span)})
    assert learnt.values() == {"v": pytest.approx(start, rel=1e-12)}
    assert not learnt.at_bounds()
    for raw, end in ((-100.0, span.low), (100.0, span.high)):
        with torch.no_grad():
            learnt.raw["v"].fill_(raw)
        assert learnt.values()["v"] == pytest.approx(end, rel=1e-6)
        assert list(learnt.at_bounds()) == ["v"]
        learnt.value("v").backward()  # the way down is open at the upper bound only
        assert (float(learnt.raw["v"].grad) != 0) == (raw > 0)
        learnt.raw["v"].grad = None
        (-learnt.value("v")).backward()
        assert (float(learnt.raw["v"].grad) != 0) == (raw < 0)
        learnt.raw["v"].grad = None


def test_values_move_ten_times_the_learning_rate_and_come_back_from_a_bound():
    learnt = Learnt({"v": (5.0, DOF)})
    optimiser = torch.optim.Adam(learnt.parameters(), 1e-3)
    for sign, expected in ((1.0, 5.0 * math.exp(-0.01)), (-1.0, 5.0)):
        (sign * learnt.value("v")).backward()
        optimiser.step()
        optimiser.zero_grad()
        optimiser = torch.optim.Adam(learnt.parameters(), 1e-3)
        assert learnt.values()["v"] == pytest.approx(expected, rel=1e-3)
    optimiser = torch.optim.Adam(learnt.parameters(), 0.1)
    for _ in range(100):
        optimiser.zero_grad()
        learnt.value("v").log().backward()
        optimiser.step()
    assert learnt.at_bounds()
    back = 0
    while learnt.at_bounds():  # had the hidden value run on, the way back would be a hundred steps long
        optimiser.zero_grad()
        (-learnt.value("v").log()).backward()
        optimiser.step()
        back += 1
        assert back < 40


def test_learnt_values_compile_in_one_graph():
    learnt = Learnt({"dof": (5.0, COVARIANCE_DOF), "tau1": (1.0, VARIANCE)})
    g = torch.Generator().manual_seed(0)
    basis, spectrum = FunctionPrior.decompose(torch.randn(6, 9, generator=g, dtype=torch.float64))
    f = torch.randn(4, 6, 2, generator=g)

    def loss(f):
        prior = FunctionPrior.from_spectrum(basis, spectrum, learnt.value("tau1"), 2.0, learnt.value("dof"))
        return -prior.log_prob(f).mean()

    ours, theirs = torch.compile(loss, fullgraph=True, backend="aot_eager")(f), loss(f)
    torch.testing.assert_close(ours, theirs)
    raw = list(learnt.parameters())
    torch.testing.assert_close(torch.autograd.grad(ours, raw), torch.autograd.grad(theirs, raw))


class Identity(nn.Module):
    """A network whose outputs are its inputs, so that a context set can be any values one likes."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.dropout = nn.Dropout(0.0)

    def forward(self, x):
        return self.dropout(x * self.scale)


@pytest.mark.parametrize("nu", [3.0, 20.0])
def test_type_two_likelihood_finds_dof_and_tau_again(nu):
    """Outputs drawn from the prior itself, one draw a class: the learnt values against scipy's optimum."""
    points, classes, tau1, tau2 = 8, 1500, 2.0, 0.5
    torch.manual_seed(0)
    h = torch.randn(points, 5, dtype=torch.float64)
    K = tau1 * h @ h.mT + tau2 * torch.eye(points, dtype=torch.float64)
    f = MultivariateStudentT(nu, torch.zeros(points, dtype=torch.float64), K).rsample((classes,)).mT
    method = STFSEB(
        Identity(), f, 6.0, tau1=1.0, tau2=1.0, num_context=points, samples=1, prior_weight=0.0,
        learn=("dof_function", "tau"), extractor=lambda x: h[(x[:, None, 0] == f[None, :, 0]).int().argmax(1)],
    )  # fmt: skip
    optimiser = torch.optim.LBFGS(method.learning.double().parameters(), max_iter=60, line_search_fn="strong_wolfe")

    def loss():
        optimiser.zero_grad()
        value = method.objective(f[:2], torch.zeros(2, dtype=torch.int64), N).function / classes
        value.backward()
        return value

    optimiser.step(loss)
    found = method.learnt()

    def density(log):
        dof, one, two = 2 + np.exp(log[0]), *np.exp(log[1:])
        shape = (one * h @ h.mT + two * torch.eye(points)).numpy() * (dof - 2) / dof
        return -stats.multivariate_t(shape=shape, df=dof).logpdf(f.mT.numpy()).mean()

    best = optimize.minimize(density, np.log([4.0, 1.0, 1.0]), method="Nelder-Mead", options={"xatol": 1e-5}).x
    expected = {"dof_function": 2 + np.exp(best[0]), "tau1": np.exp(best[1]), "tau2": np.exp(best[2])}
    assert found == pytest.approx(expected, rel=2e-3)
    assert found["dof_function"] == pytest.approx(nu, rel=0.35)
    assert [found["tau1"], found["tau2"]] == pytest.approx([tau1, tau2], rel=0.25)


def test_a_tied_dof_listens_to_both_priors(batch):
    net = make_net()
    method = STFSEB(net, batch[2], 5.0, num_context=8, samples=1, prior_weight=1.0, learn=("dof",))
    terms = objective(method, batch)
    raw = method.learning.raw["dof"]
    for term in (terms.function, terms.weights):
        (gradient,) = torch.autograd.grad(term, raw, retain_graph=True)
        assert gradient.item() != 0
    assert torch.equal(method.hyper("nu_function"), method.hyper("nu_weights"))


# --- training, saving ------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_context", [8, 20])
@pytest.mark.parametrize("live", [False, True])
def test_static_steps_are_the_eager_ones(batch, num_context, live):
    """Decompositions made for a whole epoch, as the captured engine does it, give the steps that eager ones give."""
    g = torch.Generator().manual_seed(1)
    x = torch.randn(70, 5, generator=g, dtype=torch.float64)
    y = torch.randint(L, (70,), generator=g)
    trained = []
    for static in (False, True):
        method = STFSEB(
            make_net(), batch[2], num_context=num_context, samples=2, prior_weight=1.0, learn=("dof", "tau", "sigma")
        ).train()
        method.reseed(5)
        batches = ResidentBatches(x, y, 10, 5, torch.device("cpu"))
        optimiser = make_optimiser(method, lr=1e-2)
        if static:
            if live:
                method.make_live(method.like)
            step = StaticStep(method, batches, optimiser, "float32", steps=7, size=10)
            step.load(batches.order(1))
            for _ in range(7):
                optimiser.zero_grad()
                step()
        else:
            EagerEngine(method, batches, optimiser, "float32").epoch(1, lambda _: None, lambda _: None)
        trained.append(method)
    assert trained[0].learnt() == pytest.approx(trained[1].learnt(), rel=1e-6)
    assert all(abs(value - start) > 0.01 * start for value, start in zip(
        trained[0].learnt().values(), trained[0].learning.starts.values(), strict=True
    ))  # fmt: skip
    for one, two in zip(trained[0].net.parameters(), trained[1].net.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-8)


def test_parts_of_a_step_add_up_to_the_whole(batch):
    x, y, context = batch
    method = STFSEB(
        make_net(), context, num_context=8, samples=2, prior_weight=1.0, learn=("dof", "tau", "sigma")
    )  # fmt: skip
    raw = list(method.learning.parameters())
    whole = torch.autograd.grad(objective(method, batch).total, raw)
    method.reseed(3)
    parts = [method.objective(x[i : i + 5], y[i : i + 5], N, batch_size=B).total for i in range(0, B, 5)]
    torch.testing.assert_close(torch.autograd.grad(sum(parts), raw), whole, rtol=1e-5, atol=1e-6)


def test_learning_nothing_changes_nothing(batch):
    """No parameters, no entries, the very same numbers as a method that never heard of it."""
    net = make_net()
    plain, empty = (STFSEB(net, batch[2], num_context=8, samples=2, **more) for more in ({}, {"learn": ()}))
    assert [name for name, _ in empty.named_parameters()] == [f"net.{name}" for name, _ in net.named_parameters()]
    assert empty.learnt() == {}
    assert not empty.spectral
    for one, two in zip(objective(plain, batch), objective(empty, batch), strict=True):
        assert torch.equal(one, two)


@pytest.fixture(scope="module")
def fitted():
    from stfseb.data.tasks import load_task

    data = load_task("mini").load()
    torch.manual_seed(0)
    method = STFSEB(
        SmallCNN(hidden=16), data.context, num_context=16, samples=2, learn="dof_weights, dof_function, tau, sigma"
    )
    result = fit(method, data.train.take(slice(0, 512)), data.validation.take(slice(0, 64)), epochs=1, progress=False)
    return method, result


def test_fit_moves_what_it_learns_and_says_so(fitted):
    method, result = fitted
    starts = {"dof_function": 5.0, "dof_weights": 5.0, "tau1": 1.0, "tau2": 100.0, "sigma": 1.0}
    assert method.settings.learn == ("dof_weights", "dof_function", "tau", "sigma")
    assert method.learnt().keys() == starts.keys()
    assert result.history[-1]["learnt"] == method.learnt()
    for name, value in method.learnt().items():
        assert abs(math.log(value / starts[name])) > 1e-3, name
    assert "dof_function=" in str(method.learning)


def test_learnt_values_are_saved_and_loaded(fitted, tmp_path):
    method, _ = fitted
    save(method, tmp_path / "model")
    again = load(tmp_path / "model")
    assert again.learnt() == method.learnt()
    assert again.settings == method.settings
    assert {k for k in again.state_dict() if k.startswith("learning")} == {
        f"learning.raw.{name}" for name in method.learnt()
    }
    x = torch.rand(3, 1, 28, 28)
    torch.testing.assert_close(again.predict_proba(x, seed=0), method.predict_proba(x, seed=0), rtol=1e-5, atol=1e-6)
    described = json.loads((tmp_path / "model" / "model.json").read_text())
    assert described["settings"]["learn"] == ["dof_weights", "dof_function", "tau", "sigma"]


def test_a_value_at_its_bound_is_warned_of(batch):
    method = STFSEB(make_net(), batch[2], num_context=8, samples=1, prior_weight=1.0, learn=("sigma",))
    x, y, _ = batch
    data = (x.repeat(4, 1), y.repeat(4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit(method, data, data, epochs=1, progress=False)
    with torch.no_grad():
        method.learning.raw["sigma"].fill_(-100.0)
    with pytest.warns(LearningWarning, match="sigma was learnt to its bound, 1e-07"):
        fit(method, data, data, epochs=1, progress=False, lr=1e-6)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"learn": ("nu",)}, "nu"),
        ({"learn": ("dof", "dof_weights")}, "one value for both"),
        ({"learn": ("dof",), "dof_function": 3.0}, "one value for both"),
        ({"learn": ("dof",), "dof": math.inf}, "dof=inf cannot be learnt"),
        ({"learn": ("tau",), "functional_scale": 0}, "no function term"),
        ({"learn": ("sigma",), "prior_weight": 0}, "no weight prior"),
        ({"learn": ("tau",), "tau1": 1e-9}, "tau1=1e-09 cannot be learnt"),
    ],
)
def test_bad_settings_are_named(batch, settings, match):
    with pytest.raises(StfsebError, match=match):
        STFSEB(make_net(), batch[2], num_context=8, **settings)
