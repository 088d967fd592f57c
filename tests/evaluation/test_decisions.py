"""Calibration, abstaining, risk and coverage, prediction sets: promises kept on data that was not used to make them."""

import itertools
import json
import math

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar
from sklearn.isotonic import IsotonicRegression
from torch import nn

from stfseb import MAP, STFSEB, MCDropout, SmallCNN, StfsebError, calibrate, evaluate, fit, fit_sets, load, save
from stfseb.evaluation.calibration import isotonic_map
from stfseb.evaluation.conformal import conformal_scores, conformal_threshold, prediction_sets
from stfseb.evaluation.selective import risk_coverage, selective
from stfseb.likelihoods import Binary, GaussianRegression, MultiLabel
from stfseb.methods.decisions import NoRuleWarning


class Table(nn.Module):
    """A network that returns its input times a factor: probabilities as one likes."""

    def __init__(self, factor=1.0):
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(factor))

    def forward(self, x):
        return x * self.factor


def drawn(rows, classes=4, seed=0, factor=1.0):
    """Return logits and labels drawn from their softmax: calibrated at factor 1, overconfident above."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, classes, generator=generator) * 2
    labels = torch.multinomial(torch.softmax(logits, -1), 1, generator=generator).flatten()
    return logits, labels


@pytest.fixture
def overconfident():
    return MAP(Table(3.0))


def test_temperature_finds_the_factor_and_is_applied_everywhere(overconfident, tmp_path):
    x, y = drawn(20_000)
    fresh = drawn(5000, seed=1)
    before = evaluate(overconfident, fresh)
    found = calibrate(overconfident, (x, y))

    def nll(log):
        return nn.functional.cross_entropy(x.double() * 3 / math.exp(log), y).item()

    assert found["temperature"] == pytest.approx(math.exp(minimize_scalar(nll).x), rel=1e-4)
    assert found["temperature"] == pytest.approx(3.0, rel=0.05)
    assert found["nll_after"] < found["nll_before"]
    after = evaluate(overconfident, fresh)
    assert after["ece"] < 0.015 < 0.1 < before["ece"]
    assert after["acc"] == before["acc"]
    probs = overconfident.predict_proba(fresh[0])
    torch.testing.assert_close(probs, torch.softmax(fresh[0] * 3 / found["temperature"], -1))
    assert torch.equal(overconfident.sample_logits(fresh[0])[0], fresh[0] * 3)
    again = load(save(overconfident, tmp_path / "m"), net=Table())
    assert torch.equal(again.predict_proba(fresh[0]), probs)


class Disagreeing(nn.Module):
    """Outputs that are the inputs, each row's times a dropout mask of its own classes."""

    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.4)
        self.factor = nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return self.drop(x * self.factor)


@pytest.mark.parametrize("likelihood", [None, Binary(), MultiLabel()])
def test_a_temperature_is_of_the_average_of_samples_that_disagree(likelihood):
    x, y = drawn(400, classes=5 if likelihood is None else 1)
    method = MCDropout(Disagreeing(), likelihood=likelihood, samples=8)
    if likelihood is not None:
        y = torch.bernoulli(torch.sigmoid(x), generator=torch.Generator().manual_seed(2)).long()
        y = y[:, 0] if isinstance(likelihood, Binary) else y
    logits = method.sample_logits(x, 8, seed=3).double()
    raw = method.predict_proba(x, 8, seed=3).double()
    found = calibrate(method, (x, y), samples=8, seed=3)
    assert abs(found["temperature"] - 1) > 0.05
    assert found["of"] == "average"
    both = [raw, 1 - raw] if isinstance(likelihood, MultiLabel) else [raw]
    powers = [p ** (1 / found["temperature"]) for p in both]
    total = sum(powers) if len(both) == 2 else powers[0].sum(-1, keepdim=True)
    torch.testing.assert_close(method.predict_proba(x, 8, seed=3).double(), powers[0] / total, atol=1e-6, rtol=1e-5)
    assert torch.equal(method.sample_logits(x, 8, seed=3).double(), logits)  # single samples stay as they are

    def nll(temperature):
        parts = [p.log() / temperature for p in both]
        if len(both) == 2:
            losses = torch.logaddexp(*parts) - torch.where(y == 1, parts[0], parts[1])
        else:
            losses = nn.functional.cross_entropy(parts[0], y, reduction="none")
        return losses.mean().item()

    best = minimize_scalar(lambda log: nll(math.exp(log)), bounds=(-4, 4), method="bounded")
    assert found["temperature"] == pytest.approx(math.exp(best.x), rel=1e-3)
    assert found["nll_after"] == pytest.approx(best.fun, rel=1e-5)


def test_a_temperature_of_single_samples_is_not_taken_for_one_of_the_average(overconfident, tmp_path):
    x, y = drawn(200)
    calibrate(overconfident, (x, y))
    folder = save(overconfident, tmp_path / "m")
    file = next(folder.glob("*.json"))
    told = json.loads(file.read_text())
    del told["calibration"]["probabilities"]["of"]
    file.write_text(json.dumps(told))
    with pytest.warns(UserWarning, match="calibrate the model again"):
        again = load(folder, net=Table())
    assert again.calibration == {}
    torch.testing.assert_close(again.predict_proba(x), torch.softmax(x * 3, -1))


def test_isotonic_is_scikit_learns_and_calibrates(overconfident, tmp_path):
    x, y = drawn(20_000)
    probs = torch.softmax((x * 3).double(), -1)
    calibrate(overconfident, (x, y), "isotonic")
    for k, found in enumerate(overconfident.calibration["probabilities"]["maps"]):
        column = probs[:, k].numpy()
        reference = IsotonicRegression(y_min=1 / 20_002, y_max=1 - 1 / 20_002).fit(column, (y == k).numpy())
        np.testing.assert_allclose(np.interp(column, found["from"], found["to"]), reference.predict(column), atol=1e-6)
        assert len(found["from"]) < 2000
    fresh = drawn(5000, seed=1)
    assert evaluate(overconfident, fresh)["ece"] < 0.02
    predicted = overconfident.predict_proba(fresh[0])
    torch.testing.assert_close(predicted.sum(1), torch.ones(5000))
    assert torch.equal(load(save(overconfident, tmp_path / "m"), net=Table()).predict_proba(fresh[0]), predicted)


def test_isotonic_map_of_constant_scores_is_their_mean():
    found = isotonic_map(np.full(8, 0.3), np.array([1.0, 0, 0, 0, 0, 0, 0, 1]))
    assert found == {"from": [0.3], "to": [0.25]}


def test_calibration_of_binary_labels_and_refusals():
    logits = torch.randn(4000, 1, generator=torch.Generator().manual_seed(0)) * 2
    y = torch.bernoulli(torch.sigmoid(logits), generator=torch.Generator().manual_seed(1)).long()
    binary, labels = MAP(Table(2.0), likelihood=Binary()), MAP(Table(2.0), likelihood=MultiLabel())
    one = calibrate(binary, (logits, y[:, 0]))["temperature"]
    assert one == pytest.approx(calibrate(labels, (logits, y))["temperature"], rel=1e-6)
    with pytest.raises(StfsebError, match="temperature"):
        calibrate(labels, (logits, y), "isotonic")
    with pytest.raises(StfsebError, match="noise"):
        calibrate(MAP(Table(), likelihood=GaussianRegression()), (logits, logits[:, 0]))
    with pytest.raises(StfsebError, match="isotonic"):
        calibrate(binary, (logits, y[:, 0]), "isotnic")


def test_calibrating_drops_rules_made_before_it(overconfident):
    x, y = drawn(2000)
    overconfident.abstain(0.9, (x, y))
    fit_sets(overconfident, (x, y))
    calibrate(overconfident, (x, y))
    assert set(overconfident.calibration) == {"probabilities", "held_out"}
    rule = overconfident.abstain(0.9)
    decisions = overconfident.decide(x)
    assert float(decisions.abstains.float().mean()) == pytest.approx(0.1, abs=0.003)
    torch.testing.assert_close(
        (1 - overconfident.predict_proba(x).double().amax(1)).log(), decisions.uncertainty, atol=1e-3, rtol=1e-3
    )
    assert rule["risk"] < 1 - evaluate(overconfident, (x, y))["acc"]


# Abstaining ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("coverage", [0.5, 0.9, 0.95])
def test_a_new_familiar_row_is_answered_with_the_promised_probability(coverage):
    """Exactly: of n + 1 exchangeable rows each is the new one in turn; ceil((n + 1) c) of them are answered."""
    rows, _ = drawn(40)
    method = MAP(Table())
    answered = 0
    for new in range(40):
        others = torch.cat([rows[:new], rows[new + 1 :]])
        method.abstain(coverage, others)
        answered += int(~method.decide(rows[new : new + 1]).abstains)
    assert answered == math.ceil(round(40 * coverage, 9))


def test_fit_makes_rules_possible_without_data_also_after_loading(mini, tmp_path):
    torch.manual_seed(0)
    method = MCDropout(SmallCNN(), samples=2)
    with pytest.raises(StfsebError, match="held-out"):
        method.abstain()
    validation = mini("validation", 200)
    fit(method, mini("train", 256), validation, epochs=1, progress=False)
    again = load(save(method, tmp_path / "m"))
    assert again.abstain(coverage=0.95) == method.abstain(0.95, validation)
    assert again.ood_threshold(fpr=0.1) == method.ood_threshold(0.1, validation)
    decisions = again.decide(validation.images)
    # The row that is the threshold itself may fall on either side: layouts differ in the last digits.
    assert abs(int(decisions.unfamiliar.sum()) - (200 - math.ceil(201 * 0.9))) <= 1
    assert abs(int(decisions.abstains.sum()) - (200 - math.ceil(201 * 0.95))) <= 1
    wrong = decisions.prediction.argmax(1) != validation.labels
    answered = ~decisions.abstains
    assert again.abstain(0.95)["risk"] == pytest.approx(float(wrong[answered].float().mean()), abs=0.01)
    assert json.loads(json.dumps(again.calibration)) == again.calibration
    with pytest.raises(StfsebError, match="at least 999"):
        again.abstain(0.999)
    with pytest.raises(StfsebError, match="fraction"):
        again.ood_threshold(1.5)


def test_large_held_out_sets_are_kept_as_a_few_order_statistics():
    x, y = drawn(30_000)
    method = MAP(Table())
    method.abstain(0.95, (x, y))
    answered = float((~method.decide(x).abstains).float().mean())
    assert 0.95 <= answered < 0.953  # never less than promised


# Risk and coverage -----------------------------------------------------------------------------------


def test_risk_coverage_is_the_mean_over_all_orders_of_ties():
    uncertainty, errors = np.array([0.1, 0.5, 0.5, 0.5, 0.9]), np.array([0.0, 1.0, 0.0, 0.0, 1.0])
    curves = []
    for order in itertools.permutations(range(5)):
        order = np.array(order)
        if (np.diff(uncertainty[order]) >= 0).all():
            curves.append(np.cumsum(errors[order]) / np.arange(1, 6))
    found = risk_coverage(uncertainty, errors)
    np.testing.assert_allclose(found.risk, np.mean(curves, 0))
    assert found.aurc == pytest.approx(np.mean(curves))
    np.testing.assert_allclose(found.coverage, [0.2, 0.4, 0.6, 0.8, 1.0])
    assert found.risk_at(0.8) == found.risk[3]
    assert found.risk_at(0.61) == found.risk[3]
    with pytest.raises(StfsebError):
        found.risk_at(0.0)


def test_perfect_and_useless_uncertainty():
    errors = np.repeat([0.0, 1.0], [80, 20])
    assert risk_coverage(errors, errors).risk_at(0.8) == 0.0
    flat = risk_coverage(np.zeros(100), errors)
    np.testing.assert_allclose(flat.risk, 0.2)
    assert risk_coverage(errors, errors).aurc < flat.aurc < risk_coverage(-errors, errors).aurc


def test_unfamiliar_images_are_errors_unless_they_are_left_out():
    x, y = drawn(500)
    method = MAP(Table())
    curve = selective(method, (x, y), torch.zeros(100, 4))
    own = evaluate(method, (x, y))["acc"]
    assert curve.risk_at(1.0) == pytest.approx(((1 - own) * 500 + 100) / 600)
    assert curve.risk_at(500 / 600) == pytest.approx(1 - own)  # all-zero logits are the least certain of all
    assert curve.risk_at(1.0, of_familiar=True) == pytest.approx(1 - own)
    half = selective(method, (x, y)).risk_at(0.5)
    assert curve.risk_at(0.5, of_familiar=True) == half
    assert selective(method, (x, y)).risk_at(0.5, of_familiar=True) == half


# Prediction sets -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["lac", "aps"])
@pytest.mark.parametrize("coverage", [0.8, 0.95])
def test_sets_hold_the_true_class_exactly_as_often_as_promised(kind, coverage):
    """Leave one out of 60 rows without ties: exactly ceil(60 c) of the true classes are in their sets."""
    x, y = drawn(60)
    log_probs = torch.log_softmax(x.double(), -1).numpy()
    own = conformal_scores(log_probs, kind)[np.arange(60), y]
    held = sum(own[i] <= conformal_threshold(np.delete(own, i), coverage) for i in range(60))
    assert held == math.ceil(round(60 * coverage, 9))


def test_scores_by_hand():
    probs = np.array([[0.5, 0.3, 0.2], [0.4, 0.2, 0.4]])
    np.testing.assert_allclose(conformal_scores(np.log(probs), "lac"), -np.log(probs))
    np.testing.assert_allclose(conformal_scores(np.log(probs), "aps"), [[0.5, 0.8, 1.0], [0.8, 1.0, 0.8]])
    assert conformal_threshold([3.0, 1.0, 2.0], 0.5) == 2.0
    assert conformal_threshold([3.0, 1.0, 2.0], 0.75) == 3.0
    assert conformal_threshold([3.0, 1.0, 2.0], 0.76) == math.inf


def test_sets_are_saved_calibrated_and_refused_where_they_make_no_sense(tmp_path):
    method = MAP(Table(2.0))
    x, y = drawn(4000)
    with pytest.raises(StfsebError, match="fit_sets"):
        prediction_sets(method, x)
    calibrate(method, (x[:2000], y[:2000]), "isotonic")
    rule = fit_sets(method, (x[2000:], y[2000:]), 0.9, "aps")
    assert rule["rows"] == 2000
    sets = prediction_sets(method, x)
    assert 0.9 <= sets[np.arange(4000), y][2000:].mean() < 0.92
    again = load(save(method, tmp_path / "m"), net=Table())
    assert (prediction_sets(again, x) == sets).all()
    with pytest.raises(StfsebError, match="at least 19"):
        fit_sets(method, (x[:18], y[:18]), 0.95)
    with pytest.raises(StfsebError, match="classes"):
        fit_sets(MAP(Table(), likelihood=GaussianRegression(targets=4)), (x, x))


# The embedded task -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(mini):
    """A network trained for a moment on a part of `mini`; its test images are untouched."""
    torch.manual_seed(0)
    method = STFSEB(SmallCNN(dropout=0.2), mini("kmnist", 500), samples=2)
    fit(method, mini("train", 1500), mini("validation", 200), epochs=2, batch_size=64, lr=2e-3, progress=False)
    return method


@pytest.mark.parametrize("kind", ["lac", "aps"])
def test_mean_coverage_over_200_splits_of_minis_test_images(trained, mini, kind):
    """95 % sets: the mean coverage over random re-splits of test images is 95 % +- 0.5 %."""
    test = mini("test", 2000)
    outputs = trained.sample_logits(test.images, 3, seed=0)
    log_probs = torch.log_softmax(outputs.double(), -1).logsumexp(0) - math.log(3)
    scores = conformal_scores(log_probs.numpy(), kind)[np.arange(2000), test.labels]
    generator = np.random.default_rng(0)
    coverages = []
    for _ in range(200):
        order = generator.permutation(2000)
        threshold = conformal_threshold(scores[order[:1000]], 0.95)
        coverages.append((scores[order[1000:]] <= threshold).mean())
    assert abs(np.mean(coverages) - 0.95) < 0.005
    # One split through the public door gives the same rule.
    half = test.take(torch.from_numpy(order[:1000]))
    assert fit_sets(trained, half, 0.95, kind, samples=3)["threshold"] == pytest.approx(threshold, rel=1e-9)
    held = prediction_sets(trained, test.images[order[1000:]])[np.arange(1000), test.labels[order[1000:]]]
    assert held.mean() == pytest.approx(coverages[-1], abs=0.002)


def test_risk_under_the_unfamiliar_mix_is_lower_than_maximum_a_posterioris_after_a_moment(trained, mini):
    """Answering 90 % of the familiar images, test and unfamiliar ones half and half: the curve and `abstain` agree."""
    torch.manual_seed(0)
    other = MAP(SmallCNN(dropout=0.2))
    fit(other, mini("train", 1500), mini("validation", 200), epochs=2, batch_size=64, lr=2e-3, progress=False)
    test, digits = mini("test", 500), mini("mnist", 500)
    ours, theirs = (selective(method, test, digits, samples=s) for method, s in ((trained, 3), (other, 1)))
    assert ours.risk_at(0.9, of_familiar=True) < theirs.risk_at(0.9, of_familiar=True) - 0.1
    for curve in (ours, theirs):  # 90 % of the mix: at least 400 of the 900 answers are to digits, whatever the method
        assert curve.risk_at(0.9) > 1 - 0.5 / 0.9
    trained.abstain(0.9, test, samples=3)  # the same rule by the public door: of 501 rows 451, one more than 90 %
    found = trained.decide(torch.cat([test.images, digits.images]))
    wrong = torch.cat([found.prediction[:500].argmax(1) != test.labels, torch.ones(500, dtype=torch.bool)])
    risk = float(wrong[~found.abstains].double().mean())
    assert risk == pytest.approx(ours.risk_at(0.9, of_familiar=True), abs=0.01)


@pytest.mark.slow
def test_risk_under_the_unfamiliar_mix_is_lower_than_maximum_a_posterioris(mini):
    """The same at `mini`'s learning rate, with all its images."""
    curves = {}
    for make in (lambda net: STFSEB(net, mini("kmnist", 2000), samples=3), MAP):
        torch.manual_seed(0)
        method = make(SmallCNN())
        fit(method, mini("train", 4000), mini("validation", 1000), epochs=4, lr=1e-3, progress=False)
        curves[method.key] = {
            name: selective(method, mini("test", 1000), mini(name, 1000), samples=10 if method.samples > 1 else 1)
            for name in ("mnist", "glyphs")
        }
    for name in ("mnist", "glyphs"):
        ours, theirs = curves["stfseb"][name], curves["map"][name]
        assert ours.risk_at(0.9, of_familiar=True) < theirs.risk_at(0.9, of_familiar=True) - 0.05
        assert ours.aurc < theirs.aurc


def test_deciding_without_rules_warns_and_one_rule_is_enough(overconfident):
    x, y = drawn(200)
    with pytest.warns(NoRuleWarning, match=r"no rule is set.*abstain\(coverage=0\.95\) or ood_threshold"):
        decisions = overconfident.decide(x)
    assert not (decisions.abstains | decisions.unfamiliar).any()
    overconfident.abstain(0.9, (x, y))
    assert overconfident.decide(x).abstains.any()
