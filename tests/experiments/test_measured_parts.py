"""What is measured beside a record: against the record's own evaluation, scikit-learn and scipy."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from scipy.special import softmax
from sklearn.metrics import log_loss, roc_auc_score

import stfseb
from stfseb.data.images import ImageSet
from stfseb.data.tasks import Corruption, Shifts, load_task
from stfseb.evaluation.evaluate import evaluate
from stfseb.evaluation.shifts import rotate
from stfseb.experiments import shifts
from stfseb.experiments.machine import code_version


@pytest.fixture(scope="module")
def data():
    whole = load_task("mini").load()
    task = replace(whole.task, shifts=Shifts(rotation=(-30.0, 0.0, 15.0), corruption=Corruption("mnist-c")))
    few = {"train": whole.train.take(slice(256)), "test": whole.test.take(slice(120))}
    return replace(whole, task=task, **few)


@pytest.fixture(scope="module")
def method(data):
    torch.manual_seed(0)
    made = stfseb.MCDropout(stfseb.SmallCNN(hidden=16, dropout=0.5))
    stfseb.fit(made, data.train, data.test, epochs=1, progress=False)
    return made


def test_turning_by_nothing_repeats_the_evaluation(method, data):
    found = shifts.measure_part("rotation", method, data, samples=3)
    assert list(found["sets"]) == ["-30", "0", "15"]
    expected = evaluate(method, data.test, samples=3)
    for key in ("acc", "nll", "ece"):
        assert found["sets"]["0"][key] == pytest.approx(expected[key], rel=1e-9)
    turned = ImageSet("turned", rotate(data.test.images, 15.0), data.test.labels)
    assert found["sets"]["15"]["nll"] == pytest.approx(evaluate(method, turned, samples=3)["nll"], rel=1e-9)
    assert found["sets"]["-30"]["nll"] != found["sets"]["0"]["nll"]


def test_corruption_against_scikit_learn(method, data, monkeypatch):
    inverted = ImageSet("mnist-c/inverted", 255 - data.test.images, data.test.labels, "generated")
    dimmed = ImageSet("mnist-c/dimmed", data.test.images // 2, data.test.labels, "generated")
    monkeypatch.setattr(type(data), "corrupted", lambda self: {("inverted", 0): inverted, ("dimmed", 0): dimmed})
    found = shifts.measure_part("corruption", method, data, samples=3)
    assert found["suite"] == "mnist-c"
    assert found["notes"] == ["generated"]
    assert found["code"] == code_version()
    assert found["device"].startswith("cpu: ")
    assert set(found["sets"]) == {"inverted/0", "dimmed/0"}

    def probs(images):
        return method.sample_logits(images, 3, seed=0).double().softmax(-1).mean(0).numpy()

    clean, other = probs(data.test.images), probs(inverted.images)
    truth = np.r_[np.zeros(len(clean)), np.ones(len(other))]
    expected = roc_auc_score(truth, -np.r_[clean.max(1), other.max(1)])
    one = found["sets"]["inverted/0"]
    assert one["auroc"] == pytest.approx(expected, abs=1e-9)
    assert one["nll"] == pytest.approx(log_loss(data.test.labels, other, labels=range(10)), rel=1e-6)
    assert one["confidence"] == pytest.approx(other.max(1).mean(), rel=1e-9)
    monkeypatch.setattr(type(data), "corrupted", lambda self: {("inverted", 0): inverted, ("dimmed", 0): inverted})
    assert shifts.measure_part("corruption", method, data, samples=1)["fingerprint"] != found["fingerprint"]
    assert found["clean"]["acc"] == pytest.approx((clean.argmax(1) == data.test.labels.numpy()).mean())


def test_more_and_fewer_samples_are_evaluations(method, data, monkeypatch):
    monkeypatch.setattr(shifts, "COUNTS", (1, 3))
    few = replace(data, ood={"mnist": data.ood["mnist"].take(slice(50))})
    found = shifts.measure_part("samples", method, few, samples=10)["sets"]
    assert set(found) == {"1", "3"}
    assert found["3"] == evaluate(method, few.test, few.ood, samples=3)
    assert found["1"]["nll"] != found["3"]["nll"]


def test_fewer_samples_are_averaged_over_groups_of_one_pass(method, data, monkeypatch):
    monkeypatch.setattr(shifts, "COUNTS", (1, 3))
    passes = []
    draw = method.sample_logits
    monkeypatch.setattr(method, "sample_logits", lambda x, n, **how: passes.append(len(x)) or draw(x, n, **how))
    few = replace(data, ood={})
    found = shifts.measure_part("samples", method, few, samples=10)["sets"]
    assert sum(passes) == len(few.test)
    logits = draw(few.test.images, 3, seed=0).double().numpy()
    losses = [log_loss(few.test.labels, softmax(one, axis=1), labels=range(10)) for one in logits]
    assert found["1"]["nll"] == pytest.approx(np.mean(losses), rel=1e-6)


@pytest.fixture(scope="module")
def familiar(data):
    few = {"mnist": data.ood["mnist"].take(slice(80))}
    return replace(data, validation=data.validation.take(slice(300)), ood=few)


def test_one_temperature_against_scipy_and_scikit_learn(method, familiar):
    before, kept = method.calibration, copy.deepcopy(method.calibration)
    found = shifts.measure_part("temperature", method, familiar, samples=4)
    assert method.calibration is before  # as it was
    assert method.calibration == kept

    def probs(images, divisor):
        logits = method.sample_logits(images.images, 4, seed=0).double().numpy()
        return softmax(np.log(softmax(logits, axis=2).mean(axis=0)) / divisor, axis=1)

    def loss(log):
        return log_loss(familiar.validation.labels, probs(familiar.validation, np.exp(log[0])), labels=range(10))

    best = minimize(loss, [0.0], method="Nelder-Mead", options={"xatol": 1e-7, "fatol": 1e-12})
    temperature = float(np.exp(best.x[0]))
    assert abs(temperature - 1) > 0.05  # or the test would say nothing
    assert found["temperature"] == pytest.approx(temperature, rel=1e-4)
    assert found["validation_nll_before"] == pytest.approx(loss([0.0]), rel=1e-6)
    assert found["validation_nll_after"] == pytest.approx(best.fun, rel=1e-6)
    assert found["validation_nll_after"] < found["validation_nll_before"]

    clean, other = probs(familiar.test, found["temperature"]), probs(familiar.ood["mnist"], found["temperature"])
    truth = np.r_[np.zeros(len(clean)), np.ones(len(other))]
    told = found["metrics"]
    assert told["nll"] == pytest.approx(log_loss(familiar.test.labels, clean, labels=range(10)), rel=1e-6)
    assert told["acc"] == pytest.approx((clean.argmax(1) == familiar.test.labels.numpy()).mean())
    assert told["auroc/mnist"] == pytest.approx(roc_auc_score(truth, -np.r_[clean.max(1), other.max(1)]), abs=1e-9)
    raw = evaluate(method, familiar.test, familiar.ood, samples=4)
    assert told["nll"] != raw["nll"]
    assert told["acc"] == raw["acc"]
    assert found["of"] == "average"
    assert told["auroc/mnist/mutual_information"] == raw["auroc/mnist/mutual_information"]  # of samples as they are
    assert told["auroc/mnist/entropy"] != raw["auroc/mnist/entropy"]
    assert set(told) == set(raw)


@pytest.mark.parametrize("kind", ["temperature", "isotonic"])
def test_a_calibration_that_is_there_is_neither_stacked_nor_lost(method, familiar, kind):
    expected = shifts.measure_part("temperature", method, familiar, samples=4)
    other = copy.deepcopy(method)
    stfseb.calibrate(other, familiar.validation.take(slice(100)), kind)
    own, kept = other.calibration, copy.deepcopy(other.calibration)
    assert shifts.measure_part("temperature", other, familiar, samples=4) == expected
    assert other.calibration is own
    assert other.calibration == kept


def test_the_calibration_comes_back_after_an_error(method, familiar, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("no more memory")

    before, kept = method.calibration, copy.deepcopy(method.calibration)
    monkeypatch.setattr(shifts, "evaluate", fail)
    with pytest.raises(RuntimeError, match="no more memory"):
        shifts.measure_part("temperature", method, familiar, samples=2)
    assert method.calibration is before
    assert method.calibration == kept


def test_every_part_is_read_by_the_report():
    from stfseb.report import reading

    assert reading.PARTS == shifts.PARTS


def test_a_task_without_corruptions_has_no_sets(method, data):
    plain = replace(data, task=load_task("mini"))
    assert shifts.measure_part("corruption", method, plain, samples=1)["sets"] == {}


def test_unknown_parts_are_named(method, data):
    with pytest.raises(stfseb.StfsebError, match="unknown part 'rotations'"):
        shifts.measure_part("rotations", method, data, samples=1)


def test_tails_are_scipys_fit(method, data):
    from scipy import stats

    few = replace(data, context=data.context.take(slice(200)))
    found = shifts.measure_part("tails", method, few, samples=1)
    assert set(found["sets"]) == {"weights", "context", "test"}
    outputs = method.sample_logits(few.context.images, 1, seed=0).double().numpy().ravel()
    dof, _, _ = stats.t.fit(outputs, floc=0.0)
    assert found["sets"]["context"]["inverse_dof"] == pytest.approx(1 / dof, abs=0.01)
    values = [p.detach().double().numpy().ravel() for p in method.net.parameters()]
    together = np.concatenate([v / np.sqrt((v**2).mean()) for v in values])
    dof, _, _ = stats.t.fit(together, floc=0.0)
    assert found["sets"]["weights"]["inverse_dof"] == pytest.approx(1 / dof, abs=0.01)


class Constant(torch.nn.Module):
    """What a collapsed network is: the same outputs for every image."""

    def __init__(self, outputs):
        super().__init__()
        self.outputs = torch.nn.Parameter(torch.tensor(outputs))
        self.dropout = torch.nn.Dropout(0.5)

    def forward(self, x):
        return self.outputs + 0 * self.dropout(x.flatten(1))[:, :1]


def test_outputs_without_any_information_keep_their_temperature(familiar):
    found = shifts.measure_part("temperature", stfseb.MCDropout(Constant([0.0] * 10)), familiar, samples=2)
    assert found["temperature"] == 1.0  # the same NLL at every one
    assert found["validation_nll_before"] == found["validation_nll_after"] == pytest.approx(np.log(10))
    assert found["metrics"]["auroc/mnist"] == 0.5
    sure = shifts.measure_part("temperature", stfseb.MCDropout(Constant([9.0] + [0.0] * 9)), familiar, samples=2)
    assert sure["temperature"] > 10
    assert sure["validation_nll_after"] < sure["validation_nll_before"]
