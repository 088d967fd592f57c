"""Training images as context: all of them, as they are, in a cycling order, and never looked at without need."""

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

from stfseb.data.augmentation import distorted
from stfseb.data.tasks import load_task, with_settings
from stfseb.experiments.jobs import make_job, perform
from stfseb.experiments.paper.carry_out import not_on_disk
from stfseb.experiments.run import RunConfig, make_method, train_and_evaluate
from stfseb.experiments.search.trials import search_data
from stfseb.methods.context import Context
from stfseb.networks.cnn import SmallCNN
from stfseb.training.batches import ResidentBatches
from stfseb.training.engine import _cannot_capture


@pytest.fixture(scope="module")
def data(tiny):
    return make_job(tiny, "map").load()


@pytest.mark.parametrize("name", ["stfseb", "fseb", "gfsvi", "outlierexposure"])
def test_the_context_is_the_training_set_in_a_cycling_order(data, name):
    method = make_method(data, RunConfig(name, settings={"num_context": 8}))
    x = data.train.images[:4].float() / 255
    cycle = len(data.train) // 8
    drawn = torch.cat([method.context.draw(x, step).images for step in range(cycle)])
    assert len(data.train) == 8 * cycle
    known = {image.numpy().tobytes(): 0 for image in data.train.images}
    for image in (drawn * 255).round().to(torch.uint8):
        known[image.numpy().tobytes()] += 1
    assert set(known.values()) == {1}


def test_a_run_sees_no_augmented_image_as_context(data, tmp_path, monkeypatch):
    drawn = []
    real = Context.draw

    def draw(self, x, step):
        found = real(self, x, step)
        drawn.append(found.images)
        return found

    monkeypatch.setattr(Context, "draw", draw)
    augmented = replace(data, task=with_settings(data.task, augment=True))
    train_and_evaluate(augmented, RunConfig("stfseb", settings={"num_context": 4}), tmp_path, progress=False)
    known = {image.numpy().tobytes() for image in data.train.images}
    assert drawn
    assert all(i.numpy().tobytes() in known for i in (torch.cat(drawn) * 255).round().to(torch.uint8))


def test_nothing_stands_against_capturing_it(data):
    """The card's rule, asked of a method that says it is on one."""
    method = make_method(data, RunConfig("stfseb"))
    batches = ResidentBatches(data.train.images, data.train.labels, 32, 0, torch.device("cpu"))
    on_card = SimpleNamespace(
        like=SimpleNamespace(device=torch.device("cuda")), uses_context=True, context=method.context
    )
    assert _cannot_capture(on_card, batches, asked=True) == ""
    on_card.context = Context(SmallCNN(), "train", 32)
    assert "minibatch" in _cannot_capture(on_card, batches, asked=True)


@pytest.mark.parametrize("name", ["stfseb", "fseb"])
def test_without_a_function_term_no_feature_is_computed(tiny, data, tmp_path, monkeypatch, name):
    monkeypatch.setattr(Context, "extract", lambda *_: pytest.fail("features without need"))
    job = make_job(tiny, name, settings={"functional_scale": 0})
    perform(job, tmp_path, data, device="cpu")
    first, second = (make_method(data, job.config("cpu")) for _ in range(2))
    first.take_over(second)  # as in a population on a card


def test_a_search_takes_training_images_as_context(data):
    material = search_data(data)
    assert material.held_back is None
    assert torch.equal(make_method(material.data, RunConfig("stfseb")).context.images, data.train.images)


def test_features_are_computed_as_far_as_steps_have_come(monkeypatch):
    torch.manual_seed(0)
    net, images = SmallCNN(hidden=8, image_size=12).eval(), torch.randint(0, 256, (300, 1, 12, 12), dtype=torch.uint8)
    x = images[:2].float() / 255
    found = []
    net[-1].register_forward_pre_hook(lambda _, inputs: found.append(inputs[0]))
    with torch.no_grad():
        net(images.float() / 255)
    whole = found[0]
    seen = []
    real = Context.extract
    monkeypatch.setattr(Context, "extract", lambda self, some, like: seen.append(len(some)) or real(self, some, like))
    context = Context(net, images, 20, seed=3)
    for step in range(16):  # the last one is in the second cycle
        assert torch.allclose(context.draw(x, step).features, whole[context.stream.indices(step)], atol=1e-6)
        assert seen == [128, 128, 44][: -(-min(300, 20 * (step + 1)) // 128)]
    assert torch.allclose(context.features(x), whole, atol=1e-6)
    assert len(seen) == 3
    early, late = Context(net, images, 20, seed=3), Context(net, images, 20, seed=3)
    early.draw(x, 0)
    early.reseed(4)  # another order: what was computed in the old one is not trusted
    late.reseed(4)
    for step in (0, 9, 40):  # resumed far behind the first cycle
        expected = whole[late.stream.indices(step)]
        assert torch.allclose(early.draw(x, step).features, expected, atol=1e-6)
        assert torch.allclose(late.draw(x, step).features, expected, atol=1e-6)
    normalised = Context(net, images, 20, normalise=True, seed=3).draw(x, 0).features
    norm = whole.square().sum(1).mean().sqrt()  # of the whole set, not of the points of a step
    assert torch.allclose(normalised, whole[context.stream.indices(0)] / norm, atol=1e-6)


@pytest.mark.parametrize("name", ["stfseb", "fseb", "gfsvi"])
def test_without_the_function_term_a_small_training_set_is_enough(data, name):
    config = RunConfig(name, settings={"functional_scale": 0, "num_context": 10 * len(data.train)})
    assert make_method(data, config).context is None


def test_distorted_training_images_serve_as_context(tiny, tmp_path):
    """Made from the rows that are trained on, by name on the command line or in a task's file."""
    plain, made = (make_job(tiny, "stfseb", context=context).load() for context in ("train", "distorted"))
    assert plain.context is None
    assert torch.equal(made.context.images, distorted(made.train.images))
    assert "context: distorted copies of the training images" in made.notes
    method = make_method(made, RunConfig("stfseb", settings={"num_context": 8, "context_copies": 1}))
    assert torch.equal(method.context.originals, made.context.images)
    assert len(method.context.images) == 2 * len(made.train)
    assert not_on_disk(make_job(tiny, "stfseb", context="distorted")) is None
    again = tmp_path / "again.yaml"
    for name in ("train.npz", "test.npz", "other.npy"):
        shutil.copy(Path(tiny).with_name(name), tmp_path)
    again.write_text(yaml.safe_dump({**yaml.safe_load(Path(tiny).read_text()), "context": "distorted"}))
    assert torch.equal(load_task(again).load().context.images, made.context.images)


def test_held_back_context_images_have_no_copies_in_training(data):
    """A search holds images back before they are copied."""
    wide = replace(data, context=replace(data.train, labels=None))
    material = search_data(wide)
    method = make_method(material.data, RunConfig("stfseb", settings={"num_context": 8, "context_copies": 2}))
    kept = material.data.context.images
    assert len(kept) + len(material.held_back) == len(wide.context)
    assert torch.equal(method.context.images, torch.cat([kept, distorted(kept, 2, seed=1)]))
