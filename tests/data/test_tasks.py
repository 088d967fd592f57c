"""Built-in tasks against the paper's facts, loading of real data, and what is said when sets are missing."""

from __future__ import annotations

import json
import math
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from stfseb.data import readers
from stfseb.data.images import ImageSet
from stfseb.data.loading import hold_out
from stfseb.data.sets import all_sets
from stfseb.data.tasks import HeldOut, load_task, merged, task_names, with_settings
from stfseb.errors import StfsebError

# The paper: dof per data set, dropout, network, context, unfamiliar sets, augmentation.
PAPER = {
    "mnist": (5.0, 0.5, "small", "kmnist", {"fmnist", "notmnist"}, False, 10),
    "fmnist": (2.1, 0.5, "small", "kmnist", {"mnist", "notmnist"}, False, 10),
    "cifar10": (20.0, 0.1, "deep", "cifar100", {"svhn"}, True, 10),
    "pathmnist": (20.0, 0.1, "deep", "dermamnist", {"bloodmnist"}, True, 9),
    "organamnist": (3.0, 0.3, "small", "organcmnist", {"organsmnist"}, False, 11),
}
# What searches have chosen since stands in place of the paper's dof and the default sigma and tau.
SEARCHED = {"mnist": "26e84ba3", "fmnist": "37a8b37f-final5of40", "cifar10": "26e84ba3-final5of40"}
COPIES = {"fmnist": "c70fbbe1-final5of40"}  # the searches with distorted copies of the context, where a method has one
NOT_YET = {("cifar10", "gfsvi")}  # its search has not been run
METHODS = ("stfseb", "fseb", "gfsvi", "mcdropout", "mfvi", "map")


def chosen(name, method):
    """Return what a recorded search of 40 trials, or the final of one, chose by our rule, and its copies."""
    which = COPIES.get(name, SEARCHED[name]) if method in ("stfseb", "fseb", "gfsvi") else SEARCHED[name]
    folder = Path(__file__).parents[2] / "results" / "searches" / f"{name}-{method}-extended-{which}"
    found = json.loads((folder / "search.json").read_text())
    copies = {name: value for name, value in found["plan"]["base"].items() if name == "context_copies"}
    assert copies == ({"context_copies": 4} if which == COPIES.get(name) else {})
    assert len(found["trials"]) == found["asked"]
    assert found["plan"].get("shortlist", {"trials": found["asked"]})["trials"] == 40
    return next(t for t in found["trials"] if t["index"] == found["choices"]["ours"]["trial"])["params"] | copies


@pytest.mark.parametrize(("name", "method"), [c for c in product(SEARCHED, METHODS) if c not in NOT_YET])
def test_presets_that_were_searched_are_those_of_the_recorded_search(name, method):
    assert load_task(name).presets[method].items() >= chosen(name, method).items()


@pytest.mark.parametrize("name", PAPER)
def test_the_papers_tasks(name):
    dof, dropout, network, context, ood, augment, classes = PAPER[name]
    task = load_task(name)
    wanted = chosen(name, "stfseb") if name in SEARCHED else {"dof": dof, "sigma": 1.0, "tau1": 1.0, "tau2": 100.0}
    assert task.presets["stfseb"] == {**wanted, "num_context": 32}
    assert (task.dropout, task.network, task.augment, task.classes) == (dropout, network, augment, classes)
    assert task.context.where == context
    assert set(task.ood) == ood
    expected = {"epochs": 100, "batch_size": 128, "lr": 5e-4, "patience": 10, "train_samples": 10, "test_samples": 10}
    assert task.training == expected
    assert task.shifts.rotation == tuple(range(-30, 31, 5))
    own_validation = name in ("pathmnist", "organamnist")
    assert own_validation or task.validation == HeldOut(0.1, 0)
    published = all_sets()[name]
    assert (task.in_channels, task.image_size) == (published.channels, published.image_size)
    assert task.classes == published.classes


def test_corruption_partners():
    assert load_task("mnist").shifts.corruption.suite == "mnist-c"
    assert load_task("cifar10").shifts.corruption.suite == "cifar10-c"
    assert load_task("cifar10").shifts.corruption.severities == (1, 3, 5)
    assert load_task("fmnist").shifts.corruption is None


def test_every_method_has_a_preset_in_every_task():
    assert task_names() == ("mini", *PAPER)
    for name in task_names():
        assert set(load_task(name).presets) == set(METHODS)


def test_mini_loads_without_any_data_folder(tmp_path):
    task = load_task("mini")
    data = task.load(tmp_path / "nowhere")
    assert (len(data.train), len(data.validation), len(data.test), len(data.context)) == (4000, 1000, 2000, 2000)
    assert {name: len(part) for name, part in data.ood.items()} == {"mnist": 2000, "glyphs": 2000}
    assert data.notes == []
    assert data.class_names[0] == "T-shirt/top"
    assert task.training["epochs"] == 15
    assert task.training["train_samples"] == 3
    assert set(data.fingerprints()) == {"train", "validation", "test", "context", "ood/mnist", "ood/glyphs"}
    assert not (tmp_path / "nowhere").exists()


def test_unknown_task_names_the_nearest():
    with pytest.raises(StfsebError, match=r"unknown task 'fminst': did you mean 'fmnist'\?.*my_task.yaml"):
        load_task("fminst")


def test_missing_sets_say_what_to_do(tmp_path):
    with pytest.raises(StfsebError, match=r"mnist train is not in .*stfseb data download mnist.*stfseb data import"):
        load_task("mnist").load(tmp_path)


def test_real_fmnist(real_data):
    data = load_task("fmnist").load(real_data)
    assert (len(data.train), len(data.validation), len(data.test)) == (54_000, 6_000, 10_000)
    published = readers.read("fmnist", real_data, "train")
    # Nothing lost and nothing twice: the sums of all images, sorted, are those of the whole split.
    sums = [part.images.flatten(1).sum(1) for part in (data.train, data.validation, published)]
    assert torch.equal(torch.cat(sums[:2]).sort().values, sums[2].sort().values)
    assert hold_out(published, 0.1, 0)[1].fingerprint == data.validation.fingerprint == "2a7e10d1490ce6f5"
    assert data.validation.labels.bincount(minlength=10).min() > 500


def test_real_context_falls_back_to_the_test_split_and_says_so(real_data):
    data = load_task("cifar10").load(real_data)
    assert (len(data.train), len(data.validation), len(data.test)) == (45_000, 5_000, 10_000)
    if all_sets()["cifar100"].missing(real_data, "train"):
        assert len(data.context) == 10_000
        assert "context cifar100: test split, as the train split is not on disk" in data.notes


def test_real_task_with_missing_partners(real_data):
    task = load_task("pathmnist")
    if not all_sets()["dermamnist"].missing(real_data):
        pytest.skip("DermaMNIST is on disk here, so nothing is missing")
    with pytest.raises(StfsebError, match=r"context dermamnist train is not in .*--context train"):
        task.load(real_data)
    data = task.load(real_data, context="train")
    assert data.context is None
    assert data.ood == {}
    assert "bloodmnist: not on disk, no result" in data.notes
    assert "context: the training images themselves" in data.notes
    assert any("subset: 7,000 of 89,996" in note for note in data.notes)
    other = task.load(real_data, context="svhn")
    assert other.context.images.shape[1:] == (3, 28, 28)
    assert any("converted from 3x32x32" in note for note in other.notes)


def test_hold_out_is_a_partition_in_order():
    images = ImageSet("x", torch.arange(100, dtype=torch.uint8).view(100, 1, 1, 1), torch.arange(100))
    rest, held = hold_out(images, 0.1, 0)
    assert len(held) == 10
    assert sorted([*rest.labels.tolist(), *held.labels.tolist()]) == list(range(100))
    assert rest.labels.tolist() == sorted(rest.labels.tolist())
    assert held.labels.tolist() == hold_out(images, 0.1, 0)[1].labels.tolist()
    assert held.labels.tolist() != hold_out(images, 0.1, 1)[1].labels.tolist()
    assert held.labels.tolist() != list(range(10))
    # Held-out rows are spread over the set: their mean is within four standard errors of the middle.
    assert abs(np.mean(held.labels.tolist()) - 49.5) < 4 * 28.9 / math.sqrt(10)


def test_hold_out_refuses_an_empty_split():
    images = ImageSet("x", torch.zeros(4, 1, 2, 2, dtype=torch.uint8), torch.zeros(4, dtype=torch.long))
    with pytest.raises(StfsebError, match=r"validation: 0.1 of 4 training images leaves an empty split"):
        hold_out(images, 0.1, 0)


def test_settings_are_merged_not_replaced():
    task = with_settings(load_task("mini"), training={"epochs": 2}, presets={"stfseb": {"dof": 3.0}}, dropout=0.2)
    assert task.training["epochs"] == 2
    assert task.training["batch_size"] == 128
    assert task.presets["stfseb"]["dof"] == 3.0
    assert task.presets["stfseb"]["tau2"] == 100.0
    assert task.dropout == 0.2
    assert load_task("mini").training["epochs"] == 15
    with pytest.raises(StfsebError, match="no field 'epochs'"):
        with_settings(task, epochs=3)
    assert merged({"a": {"b": 1}}, {"a": {"c": 2}}) == {"a": {"b": 1, "c": 2}}
