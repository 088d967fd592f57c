"""Parts of a task that share images are named when it is loaded; those that may are not."""

from __future__ import annotations

import time
import warnings

import numpy as np
import pytest
import torch
import yaml

from stfseb.data.images import ImageSet
from stfseb.data.overlaps import OverlapWarning, warn_of_overlaps
from stfseb.data.sources import Source
from stfseb.data.tasks import load_task, task_names
from stfseb.errors import StfsebError

FOLDER = Source("folder", "photos")


def drawn(name: str, count: int, seed: int) -> ImageSet:
    pixels = torch.randint(256, (count, 1, 8, 8), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    return ImageSet(name, pixels)


def task_of(tmp_path, **arrays):
    """Return a task whose parts are rows of the same 100 images."""
    images = np.random.default_rng(0).integers(0, 256, (100, 8, 8), dtype=np.uint8)
    keys = {"channels": 1, "image_size": 8, "classes": 2, "ood": {}}
    for name, rows in arrays.items():
        np.savez(tmp_path / f"{name}.npz", images=images[rows], labels=np.arange(len(images[rows])) % 2)
        keys |= {name: {"array": f"{name}.npz"}} if name != "strange" else {"ood": {name: {"array": f"{name}.npz"}}}
    path = tmp_path / "task.yaml"
    path.write_text(yaml.safe_dump(keys))
    return load_task(path)


TRAIN, TEST, OTHER, STRANGE = slice(0, 40), slice(40, 60), slice(60, 80), slice(80, 100)
PARTS = {"train": TRAIN, "test": TEST, "context": OTHER, "strange": STRANGE}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"test": slice(0, 20)}, "test shares 20 of its 20 images with train: test results would be"),
        (
            {"test": slice(39, 60), "validation": TEST, "train": OTHER, "context": STRANGE, "strange": slice(0, 39)},
            "test shares 20 of its 21 images with validation",
        ),
        ({"validation": slice(0, 10)}, "validation shares 10 of its 10 images with train"),
        ({"strange": slice(40, 60)}, "strange shares 20 of its 20 images with test: they cannot be told apart"),
        ({"strange": slice(75, 100)}, "strange shares 5 of its 25 images with context: its AUROC"),
        ({"context": slice(59, 80)}, "test shares 1 of its 20 images with context"),
    ],
)
def test_parts_that_share_images_are_named(tmp_path, change, said):
    task = task_of(tmp_path, **{**PARTS, **change})
    with pytest.warns(OverlapWarning, match=said):
        notes = task.load().notes
    assert any("images with" in note for note in notes)


def test_parts_of_their_own_and_training_images_as_context_are_not(tmp_path):
    assert not any("images with" in note for note in task_of(tmp_path, **PARTS).load().notes)
    task_of(tmp_path, **{**PARTS, "context": TRAIN}).load()
    task_of(tmp_path, **PARTS).load(context="distorted")


def test_a_few_doubles_and_images_of_one_colour_do_not_count():
    train, test = drawn("train", 1000, 0), drawn("test", 300, 1)
    test.images[:2] = train.images[:2]
    assert warn_of_overlaps({"train": (FOLDER, train), "test": (FOLDER, test)}) == []
    blank = ImageSet("blank", torch.zeros(50, 1, 8, 8, dtype=torch.uint8))
    assert warn_of_overlaps({"train": (FOLDER, blank), "test": (FOLDER, blank)}) == []


def test_the_same_published_set_twice_is_named():
    images, test = drawn("fmnist-test", 50, 0), Source("set", "fmnist", ("test",))
    with pytest.warns(OverlapWarning, match="clothes shares 50 of its 50 images with context"):
        warn_of_overlaps({"context": (test, images), "ood/clothes": (test, images)})


@pytest.mark.parametrize("name", task_names())
def test_the_built_in_tasks_say_nothing_of_it(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error", OverlapWarning)
        try:
            notes = load_task(name).load().notes
        except StfsebError as missing:
            if " is not in " not in str(missing):
                raise
            pytest.skip(str(missing))
    assert not any("images with" in note for note in notes)


def test_sixty_thousand_images_take_a_moment():
    train, test = drawn("train", 60_000, 0), drawn("test", 60_000, 1)
    took = []
    for _ in range(3):  # other work may share the machine
        started = time.perf_counter()
        warn_of_overlaps({"train": (FOLDER, train), "test": (FOLDER, test)})
        took.append(time.perf_counter() - started)
    assert min(took) < 1.0
