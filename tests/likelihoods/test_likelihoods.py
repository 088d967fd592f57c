"""Likelihoods against scipy and torch's own losses; learnt parameters; saved models."""

import math

import numpy as np
import pytest
import scipy.stats
import torch
import torch.nn.functional as F
from sklearn.metrics import log_loss
from torch import nn

from stfseb import MAP, MLP, STFSEB, MCDropout, StfsebError, fit, load, save
from stfseb.likelihoods import (
    LIKELIHOODS,
    Binary,
    Categorical,
    GaussianRegression,
    MultiLabel,
    StudentTRegression,
    from_spec,
)

DOUBLE = torch.float64


@pytest.fixture
def outputs():
    return torch.randn(4, 9, 3, dtype=DOUBLE, generator=torch.Generator().manual_seed(0)) * 2


def test_binary_is_the_two_class_softmax_and_sklearns_log_loss(outputs):
    logit = outputs[..., :1]
    y = torch.arange(9) % 2
    two = torch.cat([torch.zeros_like(logit), logit], -1)
    binary, softmax = Binary(), Categorical()
    torch.testing.assert_close(binary.log_prob(logit, y), softmax.log_prob(two, y))
    torch.testing.assert_close(binary.predict(logit), softmax.predict(two))
    torch.testing.assert_close(binary.uncertainty(logit), softmax.uncertainty(two))
    expected = log_loss(y.numpy(), torch.sigmoid(logit[..., 0]).mean(0).numpy())
    assert -float(binary.log_predictive(logit, y).mean()) == pytest.approx(expected, rel=1e-12)


def test_uncertainty_of_classes_is_the_log_of_one_minus_the_highest_probability(outputs):
    probs = torch.softmax(outputs, -1).mean(0)
    torch.testing.assert_close(Categorical().uncertainty(outputs), (1 - probs.max(-1).values).log())
    far = torch.tensor([[[0.0, 60.0], [0.0, 61.0]]])  # both read 1.0 as probabilities, even in float64
    assert Categorical().uncertainty(far)[0] > Categorical().uncertainty(far)[1]


@pytest.mark.parametrize(("likelihood", "used"), [(Categorical(), 3), (Binary(), 1), (MultiLabel(), 3)])
def test_pooled_outputs_predict_what_the_samples_predict_on_average(outputs, likelihood, used):
    outputs = outputs[..., :used]
    one = likelihood.pooled(outputs)
    assert one.shape == (1, 9, used)
    torch.testing.assert_close(likelihood.predict(one), likelihood.predict(outputs))
    torch.testing.assert_close(likelihood.uncertainty(one), likelihood.uncertainty(outputs))
    far = likelihood.pooled(
        torch.full((2, 1, used), 50.0, dtype=DOUBLE) * torch.arange(1, used + 1)
    )  # p is 1 in float64
    assert bool(torch.isfinite(far).all())
    if used == 1:
        assert float(far) == pytest.approx(50.0)


def test_regression_has_no_pooled_outputs(outputs):
    with pytest.raises(StfsebError, match="no probabilities"):
        GaussianRegression(targets=3).pooled(outputs)


def test_multilabel_is_binary_cross_entropy_and_leaves_out_unknown_labels(outputs):
    y = torch.randint(0, 2, (9, 3), generator=torch.Generator().manual_seed(1))
    expected = -F.binary_cross_entropy_with_logits(outputs, y.to(DOUBLE).expand(4, 9, 3), reduction="none")
    torch.testing.assert_close(MultiLabel().log_prob(outputs, y), expected.sum(-1))
    some = y.clone()
    some[:, 1] = -1
    torch.testing.assert_close(MultiLabel().log_prob(outputs, some), expected[..., [0, 2]].sum(-1))
    probs = torch.sigmoid(outputs).mean(0)
    torch.testing.assert_close(MultiLabel().predict(outputs), probs)
    torch.testing.assert_close(MultiLabel().uncertainty(outputs), torch.minimum(probs, 1 - probs).max(-1).values.log())


@pytest.mark.parametrize(
    ("likelihood", "noise"),
    [
        (GaussianRegression(0.7, targets=3), scipy.stats.norm(scale=0.7)),
        (StudentTRegression(0.7, 3.5, targets=3), scipy.stats.t(3.5, scale=0.7)),
        (StudentTRegression(0.7, 3.5, learn_dof=True, targets=3), scipy.stats.t(3.5, scale=0.7)),
    ],
)
def test_regression_against_scipy(outputs, likelihood, noise):
    likelihood = likelihood.double()
    likelihood.log_noise.data.fill_(math.log(0.7))
    y = torch.randn(9, 3, dtype=DOUBLE)
    with torch.no_grad():
        log_prob, std = likelihood.log_prob(outputs, y), likelihood.std(outputs)
    density = noise.logpdf((y - outputs).numpy()).sum(-1)
    np.testing.assert_allclose(log_prob, density, rtol=1e-6)
    np.testing.assert_allclose(
        likelihood.log_predictive(outputs, y).detach(), np.log(np.exp(density).mean(0)), rtol=1e-6
    )
    np.testing.assert_allclose(std, np.sqrt(noise.var() + outputs.numpy().var(0)), rtol=1e-6)
    np.testing.assert_allclose(likelihood.predict(outputs), outputs.mean(0))
    low, high = likelihood.interval(outputs, 0.9)
    for ends, tail in ((low, 0.05), (high, 0.95)):
        np.testing.assert_allclose(noise.cdf((ends - outputs).numpy()).mean(0), tail, rtol=1e-6)


def test_student_t_tends_to_the_gaussian(outputs):
    y = torch.randn(9, 3, dtype=DOUBLE)
    heavy = StudentTRegression(dof=1e6, targets=3).double().log_prob(outputs, y)
    torch.testing.assert_close(heavy, GaussianRegression(targets=3).double().log_prob(outputs, y), rtol=1e-4, atol=1e-4)
    assert torch.isinf(StudentTRegression(dof=1.5, targets=3).std(outputs)).all()


def test_one_target_may_be_a_vector_or_a_column():
    likelihood, outputs, y = GaussianRegression(), torch.randn(2, 5, 1), torch.randn(5)
    assert torch.equal(likelihood.log_prob(outputs, y), likelihood.log_prob(outputs, y[:, None]))


@pytest.mark.parametrize("method", [MAP, MCDropout])
def test_noise_is_learnt_with_the_network(method):
    """y = 2 x + 0.3 noise: the scale moves from 1 to 0.3, and is a parameter of the method."""
    torch.manual_seed(0)
    x = torch.randn(2000, 1)
    y = 2 * x[:, 0] + 0.3 * torch.randn(2000)
    net = nn.Sequential(nn.Dropout(0.0), nn.Linear(1, 1))
    trained = method(net, sigma=10.0, likelihood=GaussianRegression())
    assert any(p is trained.likelihood.log_noise for p in trained.parameters())
    assert all(p is not trained.likelihood.log_noise for p in trained.trainable())
    fit(trained, (x, y), lr=0.03, epochs=20, progress=False)
    assert float(trained.likelihood.noise.detach()) == pytest.approx(0.3, abs=0.02)


def test_student_t_learns_its_degrees_of_freedom_from_heavy_tails():
    torch.manual_seed(0)
    y = torch.from_numpy(scipy.stats.t(3.0).rvs(4000, random_state=0)).float()
    likelihood = StudentTRegression(dof=30.0, learn_dof=True)
    optimiser = torch.optim.LBFGS(likelihood.parameters(), max_iter=100, line_search_fn="strong_wolfe")

    def loss():
        optimiser.zero_grad()
        value = -likelihood.log_prob(torch.zeros(1, 4000, 1), y).mean()
        value.backward()
        return value

    optimiser.step(loss)
    dof, _, scale = scipy.stats.t.fit(y.numpy(), floc=0)
    assert float(likelihood.dof.detach()) == pytest.approx(dof, rel=0.02)
    assert float(likelihood.noise.detach()) == pytest.approx(scale, rel=0.01)


@pytest.mark.parametrize(
    "likelihood",
    [
        Binary(),
        MultiLabel(),
        GaussianRegression(0.5, learn=False),
        StudentTRegression(0.5, 4.0, learn_dof=True),
    ],
    ids=lambda likelihood: likelihood.name,
)
@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
def test_saved_models_keep_settings_and_parameters(tmp_path, likelihood, dtype):
    torch.manual_seed(0)
    method = STFSEB(MLP(3, 1).to(dtype), context=torch.randn(40, 3), likelihood=from_spec(likelihood.spec()))
    for parameter in method.likelihood.parameters():
        parameter.data.add_(0.123456789)
    again = load(save(method, tmp_path / "m"))
    assert again.likelihood.spec() == method.likelihood.spec()
    x = torch.randn(6, 3)
    assert torch.equal(again.predict(x, seed=1), method.predict(x, seed=1))
    for name, value in method.likelihood.state_dict().items():
        assert torch.equal(again.likelihood.state_dict()[name], value)
        assert value.dtype == dtype


def test_every_likelihood_rebuilds_from_its_spec():
    for kind in LIKELIHOODS.values():
        assert from_spec(kind().spec()).spec() == kind().spec()
        assert from_spec(kind.name).spec() == kind().spec()
    with pytest.raises(StfsebError, match="did you mean 'gaussian'"):
        from_spec("gausian")


def test_intervals_of_a_method_are_its_likelihoods(tmp_path):
    torch.manual_seed(0)
    method = MCDropout(MLP(2, 1, dropout=0.3), likelihood=GaussianRegression(0.2))
    x = torch.randn(3000, 2)  # more rows than one chunk
    outputs = method.sample_logits(x, 20, seed=3)
    low, high = method.predict_interval(x, 0.8, samples=20, seed=3)
    with torch.no_grad():
        expected = method.likelihood.interval(outputs, 0.8)
        torch.testing.assert_close(method.predict_std(x, samples=20, seed=3), method.likelihood.std(outputs))
    torch.testing.assert_close((low, high), expected)
    torch.testing.assert_close(method.predict(x, samples=20, seed=3), outputs.mean(0))
    with pytest.raises(StfsebError, match="predict_std"):
        method.predict_proba(x)
    with pytest.raises(StfsebError, match="predict_proba"):
        MCDropout(MLP(2, 2)).predict_std(x)


@pytest.mark.parametrize(
    ("likelihood", "y", "outputs", "words"),
    [
        (Categorical(), torch.tensor([0, 1]), 1, r"one output.*Binary\(\)"),
        (Binary(), torch.tensor([0, 1]), 2, "Categorical"),
        (Binary(), torch.tensor([0, 2]), 1, "label 2"),
        (MultiLabel(), torch.tensor([0, 1]), 2, "column"),
        (MultiLabel(), torch.tensor([[0, 2]]), 2, "label 2"),
        (GaussianRegression(), torch.tensor([1, 2]), 1, "dtype"),
        (GaussianRegression(), torch.tensor([1.0, math.nan]), 1, "NaN"),
        (GaussianRegression(), torch.zeros(2, 2), 2, "targets=2"),
        (GaussianRegression(targets=2), torch.zeros(2, 3), 2, r"\(N, 2\)"),
    ],
)
def test_wrong_targets_are_refused_in_words(likelihood, y, outputs, words):
    with pytest.raises(StfsebError, match=words):
        likelihood.check_targets(y, outputs)


def test_wrong_settings_are_refused():
    for wrong in (
        lambda: GaussianRegression(0.0),
        lambda: StudentTRegression(dof=math.inf),
        lambda: StudentTRegression(dof=2.0, learn_dof=True),
        lambda: GaussianRegression(targets=0),
        lambda: GaussianRegression().quantile(torch.zeros(1, 1, 1), 1.0),
    ):
        with pytest.raises(StfsebError):
            wrong()


def test_no_row_is_left_out_where_labels_are_not_read(outputs):
    """Under vmap (and compiled, and on a card) values are not looked at; torch's own check is then there."""
    y = torch.tensor([0, -100])

    def one(row, label):
        return Categorical().log_prob(row[:, None], label[None])

    labels = torch.arange(9) % 3
    rowwise = torch.func.vmap(one, (1, 0), 1)(outputs, labels)
    torch.testing.assert_close(rowwise.squeeze(-1), Categorical().log_prob(outputs, labels))
    compiled = torch.compile(Categorical().log_prob, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(outputs, labels), Categorical().log_prob(outputs, labels))
    with pytest.raises(IndexError, match="out of bounds"):
        compiled(outputs[:, :2], y)


@pytest.mark.parametrize(
    ("likelihood", "outputs", "targets", "told"),
    [
        (Binary(), 3, torch.zeros(6, dtype=torch.int64), "the network has 3 outputs, but the binary likelihood"),
        (MultiLabel(), 3, torch.zeros(6, 2, dtype=torch.int64), r"labels of shape \(6, 2\) do not fit: give \(N, 3\)"),
        (GaussianRegression(), 3, torch.zeros(6), "the network has 3 outputs and the likelihood 1 targets"),
        (StudentTRegression(targets=2), 2, torch.zeros(6, 3), r"targets of shape \(6, 3\) do not fit: give \(N, 2\)"),
    ],
)
def test_a_step_of_ones_own_loop_refuses_another_likelihoods_network(likelihood, outputs, targets, told):
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, outputs))
    with pytest.raises(StfsebError, match=told):
        MCDropout(net, likelihood=likelihood).objective(torch.rand(6, 4), targets, 6)
