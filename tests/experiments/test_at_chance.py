"""A saved model that has learnt nothing is named as such by whatever reads it."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from stfseb import MAP, calibrate, fit, load, save
from stfseb.experiments.models import chance_in_words
from stfseb.likelihoods import Binary, GaussianRegression
from stfseb.methods.chance import at_chance
from stfseb.training.fit import CollapseWarning

REMEDY = "train longer if these were few steps; else try another seed, a larger sigma"


def trained(stfseb, task, out, *more):
    """Return the folder of a model and the validation NLL in its record."""
    code, _, said = stfseb("train", task, "--method", "map", "--device", "cpu", "--quiet", "--out", out, *more)
    assert code == 0, said
    (run,) = out.iterdir()
    history = json.loads((run / "record.json").read_text())["history"]
    return run / "model", min(entry["validation_nll"] for entry in history)


def notes(said):
    return [line for line in said.splitlines() if line.startswith("note: ")]


def commands(model, task):
    folder = Path(task).parent
    images = np.load(folder / "test.npz")["images"]
    np.save(model.parent / "images.npy", images)
    return (
        ["evaluate", model, "--task", task, "--json", "--device", "cpu"],
        ["predict", model, model.parent / "images.npy", "--json", "--device", "cpu"],
        ["calibrate", model, folder / "test.npz", "--coverage", "0.8"],
        ["calibrate", model, folder / "test.npz", "--coverage", "0.8", "--probabilities", "temperature"],
        ["predict", model, model.parent / "images.npy", "--json", "--device", "cpu"],  # after the temperature
    )


def test_a_model_at_chance_is_named_with_figure_and_remedy(stfseb, tiny, tmp_path):
    slow = Path(tiny).with_name("slow.yaml")
    slow.write_text(Path(tiny).read_text().replace("training: {", "training: {lr: 1e-9, "))
    model, nll = trained(stfseb, slow, tmp_path)
    assert nll >= math.log(4) - 0.01  # it has not been trained to speak of
    for words in commands(model, slow):
        code, out, said = stfseb(*words)
        assert code == 0, said
        (line,) = notes(said)
        assert f"validation NLL is {nll:.3f} and guessing among 4 classes gives 1.386: {REMEDY}" in line
        assert "note:" not in out
        if "--json" in words:
            json.loads(out)


def test_a_model_that_has_learnt_is_not(stfseb, tiny, tmp_path):
    model, nll = trained(stfseb, tiny, tmp_path, "--epochs", "30")
    assert nll < math.log(4) - 0.01
    for words in commands(model, tiny):
        code, _, said = stfseb(*words)
        assert code == 0, said
        assert notes(said) == []


def test_older_models_are_known_by_the_record_of_their_run_alone(stfseb, tiny, tmp_path):
    model, _ = trained(stfseb, tiny, tmp_path / "runs")
    about = json.loads((model / "model.json").read_text())
    assert about["calibration"]["held_out"].pop("validation_nll") > 0
    (model / "model.json").write_text(json.dumps(about))
    file = model.parent / "record.json"
    record = json.loads(file.read_text())

    def said(**changes):
        file.write_text(json.dumps(record | changes))
        return chance_in_words(load(model), model)

    bad, good = ([{"epoch": 1, "validation_nll": nll}] for nll in (1.5, 0.5))
    assert "validation NLL is 1.500" in said(history=bad)
    assert said(history=bad + good) == said(history=good) == ""
    # Another's record, of which this model may have been put beside; what is no record at all; none.
    assert said(history=bad, method="mcdropout") == said(history=bad, settings={"sigma": 77.0}) == ""
    assert said(history=[]) == said(history=None) == said(settings=None) == ""
    file.write_text("{")
    assert chance_in_words(load(model), model) == ""
    file.unlink()
    assert chance_in_words(load(model), model) == ""


@pytest.mark.parametrize(
    ("likelihood", "outputs", "guess"),
    [(None, 4, math.log(4)), (Binary(), 1, math.log(2)), (GaussianRegression(), 1, None)],
)
def test_what_counts_as_chance(likelihood, outputs, guess, tmp_path):
    method = MAP(nn.Linear(3, outputs), likelihood=likelihood)
    method.outputs(torch.zeros(1, 3))
    for away, named in ((1.0, True), (-0.009, True), (-0.011, False)):
        method.calibration["held_out"] = {"validation_nll": (guess or 1.0) + away}
        assert bool(chance_in_words(method, tmp_path)) == (named and guess is not None)
    method.calibration.clear()
    assert chance_in_words(method, tmp_path) == ""
    assert not at_chance(9.0, 1)


def test_training_keeps_the_figure_of_its_best_epoch_and_warns_of_two_classes_too():
    x = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
    y = torch.arange(60) % 2
    method = MAP(nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1)), sigma=1e-4, likelihood=Binary())
    with pytest.warns(CollapseWarning, match=r"chance is 0\.693"):
        result = fit(method, (x, y), (x, y), epochs=6, lr=0.05, progress=False)
    assert method.calibration["held_out"]["validation_nll"] == result.best_validation_nll
    calibrate(method, (x, y))
    assert method.calibration["held_out"]["validation_nll"] == result.best_validation_nll
    fresh = MAP(nn.Linear(3, 1), likelihood=Binary())
    assert "validation_nll" not in calibrate(fresh, (x, y)) | fresh.calibration["held_out"]


def test_a_model_of_a_loop_of_ones_own_says_nothing(tmp_path):
    model = save(MAP(nn.Linear(3, 2)), tmp_path / "model")
    assert chance_in_words(load(model, nn.Linear(3, 2)), model) == ""
