"""`stfseb predict` and `stfseb calibrate`: what the model says, and why it would rather not."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from stfseb import MCDropout, SmallCNN, StfsebError, cli, fit, load, save
from stfseb.cli import app
from stfseb.experiments.calibrate import calibrate_model
from stfseb.experiments.jobs import make_job, perform
from stfseb.experiments.predict import counts_in_words, predict_files, rules_in_words, samples_in_words

NAMES = ["T-shirt/top", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot"]


@pytest.fixture(scope="module")
def folder(mini, tmp_path_factory):
    """A model trained for a moment, as `stfseb train` would leave it."""
    torch.manual_seed(0)
    method = MCDropout(SmallCNN(dropout=0.2), samples=2)
    fit(method, mini("train", 1000), mini("validation", 200), epochs=2, batch_size=64, lr=2e-3, progress=False)
    method.provenance |= {"task": "mini", "class_names": NAMES, "input": [1, 28, 28]}
    return save(method, tmp_path_factory.mktemp("model") / "model")


@pytest.fixture
def model(folder, tmp_path):
    """A copy that a test may change."""
    return save(load(folder), tmp_path / "model")


@pytest.fixture
def images(mini, tmp_path):
    """Test images, and noise that is like none of them."""
    noise = np.random.default_rng(0).integers(0, 256, (20, 1, 28, 28), dtype=np.uint8)
    np.save(tmp_path / "images.npy", np.concatenate([mini("test", 100).images.numpy(), noise]))
    return tmp_path / "images.npy"


def test_without_rules_nothing_is_abstained_from(model, images):
    rows = predict_files(load(model), [images])
    assert not any(row["abstains"] or row["unfamiliar"] or row["why"] for row in rows)
    assert rows[0]["rule"].startswith("The model has no threshold")


def test_reasons_name_the_probability_and_the_limit(model, images):
    method = load(model)
    method.ood_threshold(0.05)
    method.abstain(0.8)
    rows = predict_files(method, [images])
    limits = {key: 1 - math.exp(method.calibration[key]["threshold"]) for key in ("unfamiliar", "abstain")}
    assert limits["unfamiliar"] < limits["abstain"]
    kinds = set()
    for row in rows:
        assert row["unfamiliar"] == (row["probability"] < limits["unfamiliar"])
        assert row["abstains"] == (row["probability"] < limits["abstain"])
        if row["unfamiliar"]:
            kinds.add("unfamiliar")
            said, limit = re.match(
                r"looks unfamiliar: the highest probability, ([\d.]+), is below ([\d.]+)", row["why"]
            ).groups()
            assert float(said) == pytest.approx(row["probability"], abs=1e-3)
            assert float(limit) == pytest.approx(limits["unfamiliar"], abs=1e-3)
        elif row["abstains"]:
            kinds.add("unsure")
            assert row["why"].startswith(f"is not certain enough: {row['class']} {row['probability']:.3f}")
        else:
            kinds.add("answered")
            assert row["why"] == ""
    assert kinds == {"unfamiliar", "unsure", "answered"}
    assert "5% of 200 held-out images" in rows[0]["rule"]


def test_coverage_can_be_chosen_when_predicting(model, images):
    few = predict_files(load(model), [images], coverage=0.5)
    many = predict_files(load(model), [images], coverage=0.95)
    assert sum(row["abstains"] for row in few) > sum(row["abstains"] for row in many) + 20


@pytest.mark.parametrize("probabilities", [None, "temperature", "isotonic"])
def test_calibrating_on_images_of_ones_own(model, mini, tmp_path, images, probabilities):
    own = mini("test", 600)
    np.savez(tmp_path / "own.npz", images=own.images.numpy(), labels=own.labels.numpy())
    method, count = calibrate_model(model, str(tmp_path / "own.npz"), probabilities=probabilities)
    assert count == 600
    saved = load(model)
    assert saved.calibration == method.calibration
    assert saved.calibration["conformal"]["rows"] == (600 if probabilities is None else 300)
    assert ("probabilities" in saved.calibration) == (probabilities is not None)
    rows = predict_files(saved, [images])
    assert all(set(row["plausible"]) <= set(NAMES) for row in rows)
    held = [NAMES[label] in row["plausible"] for row, label in zip(rows, mini("test", 100).labels, strict=False)]
    assert np.mean(held) > 0.88
    assert "95% of images" in rules_in_words(saved)


@pytest.mark.parametrize("probabilities", [None, "temperature"])
def test_calibrating_keeps_the_number_of_samples(mini, tmp_path, images, probabilities):
    """Training takes two samples here and validation seven: predictions before and after are of seven."""
    method = MCDropout(SmallCNN(dropout=0.2, hidden=8), samples=2)
    fit(method, mini("train", 64), mini("validation", 64), epochs=1, validation_samples=7, progress=False)
    method.provenance |= {"task": "mini", "class_names": NAMES, "input": [1, 28, 28]}
    want = method.predict_proba(np.load(images), samples=7, seed=0)
    assert torch.equal(method.judged(np.load(images)).prediction, want)  # no rule yet
    own = mini("test", 80)
    np.savez(tmp_path / "own.npz", images=own.images, labels=own.labels)
    found, _ = calibrate_model(save(method, tmp_path / "model"), str(tmp_path / "own.npz"), probabilities=probabilities)
    assert {rule["samples"] for name, rule in found.calibration.items() if name != "held_out"} == {7}
    if probabilities is None:
        torch.testing.assert_close(found.decide(np.load(images)).prediction, want)


def test_the_commands(model, mini, tmp_path, images):
    own = mini("test", 400)
    np.savez(tmp_path / "own.npz", images=own.images.numpy(), labels=own.labels.numpy())
    runner = CliRunner()
    done = runner.invoke(app, ["calibrate", str(model), str(tmp_path / "own.npz"), "--coverage", "0.9"])
    assert done.exit_code == 0, done.output
    assert "Calibrated on 400 images" in done.output
    done = runner.invoke(app, ["predict", str(model), str(images), "--json", "--device", "cpu"])
    rows = json.loads(done.stdout)
    assert len(rows) == 120
    assert {row["abstains"] for row in rows} == {True, False}
    done = runner.invoke(app, ["predict", str(model), str(images), "--device", "cpu", "--coverage", "0.8"])
    assert done.exit_code == 0
    assert "abstains" in done.stdout


def test_images_of_one_name_in_two_folders_are_told_apart(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("a", "b[red]"):  # the second would be markup, were it not escaped
        Path(folder).mkdir()
        Image.fromarray(np.zeros((28, 28), np.uint8)).save(Path(folder) / "x.png")
    np.save("c.npy", np.zeros((1, 1, 28, 28), np.uint8))
    given = ["predict", str(model), "a", "b[red]", "a/x.png", "c.npy", "--device", "cpu"]
    done = CliRunner().invoke(app, [*given, "--json"])
    named = [row["image"] for row in json.loads(done.stdout)]
    assert named == ["a/x.png", "b[red]/x.png", "a/x.png", "c.npy[0]"]
    shown = CliRunner().invoke(app, given).stdout
    assert all(name in shown for name in named)


def test_mistakes_are_named(model, tmp_path, images):
    with pytest.raises(
        StfsebError, match=r"^calibration: 'nowhere' is neither a registered set nor a folder .*: give one of these"
    ):
        calibrate_model(model, "nowhere")
    np.savez(tmp_path / "small.npz", images=np.zeros((4, 1, 8, 8), np.uint8), labels=np.zeros(4, np.int64))
    with pytest.raises(StfsebError, match=r"small.npz has images of 1x8x8, the model takes 1x28x28: give images of"):
        calibrate_model(model, str(tmp_path / "small.npz"))
    with pytest.raises(StfsebError, match="fraction"):
        predict_files(load(model), [images], coverage=2.0)
    torch.manual_seed(0)
    bare = save(MCDropout(SmallCNN()), tmp_path / "bare")
    with pytest.raises(StfsebError, match="what images it takes"):
        calibrate_model(bare, "mini")


def test_a_set_of_other_classes_is_refused(model, tmp_path):
    """Its labels are numbers of the model's classes by chance alone."""
    other = load(model)
    other.provenance["class_names"] = [f"animal {index}" for index in range(10)]
    with pytest.raises(
        StfsebError, match=r"mini has the classes T-shirt/top, .*, the model animal 0, .*: calibrate on"
    ):
        calibrate_model(save(other, tmp_path / "other"), "mini")


def test_few_held_back_images_still_set_the_rule_that_they_can_promise(tiny, tmp_path):
    job = make_job(tiny, "map", training={"epochs": 1})
    data = job.load()
    few = data.validation.take(slice(0, 12))  # 5 % cannot be told from fewer than 19 images, 10 % from fewer than 9
    record = perform(job, tmp_path, replace(data, validation=few), device="cpu")
    assert set(record["calibration"]) == {"abstain"}
    assert record["calibration"]["abstain"]["images"] == 12
    assert rules_in_words(load(job.folder(tmp_path) / "model")).startswith("Below ")


def test_a_number_of_samples_that_the_thresholds_were_not_set_with_is_said(model):
    method = load(model)
    assert samples_in_words(method, 3) == ""
    method.ood_threshold(0.05)
    method.abstain(0.8)
    own = method.calibration["abstain"]["samples"]
    assert samples_in_words(method, None) == samples_in_words(method, own) == ""
    assert f"set with {own} samples and are used with 7" in samples_in_words(method, 7)


def test_predict_counts_the_unfamiliar_and_names_what_it_cannot_read(model, mini, tmp_path, monkeypatch, capsys):
    method = load(model)
    method.ood_threshold(0.05)
    method.abstain(0.8)
    save(method, model)
    photos = tmp_path / "photos"
    photos.mkdir()
    for number, image in enumerate(mini("test", 6).images[:, 0].numpy()):
        Image.fromarray(image).save(photos / f"{number}.png")
    for name in ("bad1.png", "bad2.png"):
        (photos / name).write_text("no picture")
    rows = predict_files(load(model), [photos], unread={})
    words = ["stfseb", "predict", str(model), str(photos), "--samples", "7"]
    monkeypatch.setattr("sys.argv", words)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    said = capsys.readouterr()
    assert ended.value.code == 2
    assert "5.png" in said.out
    assert re.search(r"\d of 6 unfamiliar, \d more without an answer\.", said.out)
    assert counts_in_words(rows).startswith(f"{sum(row['unfamiliar'] for row in rows)} of 6 unfamiliar, ")
    assert said.err.splitlines()[0].startswith("note: the model's thresholds were set with 2 samples")
    assert said.err.splitlines()[-1].startswith("stfseb: error: 2 of 8 pictures cannot be read (")
    monkeypatch.setattr("sys.argv", [*words, "--json"])
    with pytest.raises(SystemExit):
        cli.main()
    assert len(json.loads(capsys.readouterr().out)) == 6
