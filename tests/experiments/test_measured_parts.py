"""Rotation and corruption: against the record's own evaluation, and against scikit-learn."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.metrics import log_loss, roc_auc_score

import stfseb
from stfseb.data.images import ImageSet
from stfseb.data.tasks import Corruption, Shifts, load_task
from stfseb.evaluation.evaluate import evaluate
from stfseb.evaluation.shifts import rotate
from stfseb.experiments import shifts


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
    assert found["clean"]["acc"] == pytest.approx((clean.argmax(1) == data.test.labels.numpy()).mean())


def test_more_and_fewer_samples_are_evaluations(method, data, monkeypatch):
    monkeypatch.setattr(shifts, "COUNTS", (1, 3))
    few = replace(data, ood={"mnist": data.ood["mnist"].take(slice(50))})
    found = shifts.measure_part("samples", method, few, samples=10)["sets"]
    assert set(found) == {"1", "3"}
    assert found["3"] == evaluate(method, few.test, few.ood, samples=3)
    assert found["1"]["nll"] != found["3"]["nll"]


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
