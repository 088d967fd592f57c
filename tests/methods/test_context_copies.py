"""Distorted copies of the context images: which images a method sees, and what it says about them."""

import json

import pytest
import torch

import stfseb
from stfseb.data.augmentation import distorted
from stfseb.data.images import fingerprint
from stfseb.errors import StfsebError
from stfseb.evaluation.tails import context_tails
from stfseb.methods import context_set
from stfseb.methods.context import Context
from stfseb.training.batches import ResidentBatches
from stfseb.training.loop import Protocol
from stfseb.training.resuming import identity_of

METHODS = (stfseb.STFSEB, stfseb.FSEB, stfseb.GFSVI, stfseb.OutlierExposure)


def network(classes=3):
    return stfseb.SmallCNN(1, classes, 0.5, image_size=8, hidden=8)


@pytest.fixture
def images():
    return torch.randint(0, 256, (20, 1, 8, 8), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)


@pytest.mark.parametrize("cls", METHODS)
def test_a_cycle_sees_every_image_and_every_copy_once(cls, images):
    method = cls(network(), images, num_context=5, samples=2, context_copies=2)
    assert method.settings.context_copies == 2
    everything = torch.cat([images, distorted(images, 2, seed=1)])
    assert torch.equal(method.context.images, everything)
    assert torch.equal(method.context.originals, images)
    x = torch.zeros(1, 1, 8, 8)
    drawn = torch.cat([method.context.draw(x, step).images for step in range(12)])
    found = sorted(image.numpy().tobytes() for image in (drawn * 255).round().to(torch.uint8))
    assert found == sorted(image.numpy().tobytes() for image in everything)


@pytest.mark.parametrize("cls", METHODS)
def test_without_copies_nothing_changes(cls, images):
    torch.manual_seed(0)
    plain = cls(network(), images, num_context=5, samples=2)
    assert plain.settings.context_copies == 0
    assert plain.context.images.data_ptr() == images.data_ptr()
    assert len(plain.context.originals) == len(images)


def test_features_are_those_of_each_copy(images):
    torch.manual_seed(0)
    net = network()
    wide = stfseb.STFSEB(net, images, num_context=5, context_copies=1)
    alone = stfseb.STFSEB(net, distorted(images, 1, seed=1), num_context=5)
    x = torch.zeros(1, 1, 8, 8)
    assert torch.allclose(wide.context.features(x)[20:], alone.context.features(x), atol=1e-6)


def test_training_saving_and_tails_speak_of_the_images_that_were_given(images, tmp_path):
    torch.manual_seed(0)
    y = torch.arange(40) % 3
    x = torch.randint(0, 256, (40, 1, 8, 8), dtype=torch.uint8)
    method = stfseb.STFSEB(network(), images, num_context=5, samples=2, context_copies=3)
    stfseb.fit(method, (x, y), (x, y), epochs=1, batch_size=16, progress=False)
    stfseb.save(method, tmp_path / "model")
    meta = json.loads(next((tmp_path / "model").glob("*.json")).read_text())
    assert meta["context"] == {"count": 20, "fingerprint": fingerprint(images)}
    loaded = stfseb.load(tmp_path / "model")
    assert loaded.settings.context_copies == 3
    torch.testing.assert_close(loaded.predict_proba(x, samples=2, seed=1), method.predict_proba(x, samples=2, seed=1))
    assert context_tails(method, samples=2) == context_tails(method, images, samples=2)


def test_a_streamed_context_or_rows_of_numbers_cannot_be_distorted():
    with pytest.raises(StfsebError, match=r"context_copies=4 with context='train'.*leave it at 0"):
        stfseb.STFSEB(network(), "train", context_copies=4)
    rows = stfseb.MLP(3, 2)
    with pytest.raises(StfsebError, match=r"context_copies=1: only images .* the context has shape \(50, 3\)"):
        stfseb.STFSEB(rows, torch.randn(50, 3), context_copies=1)


@pytest.mark.parametrize("copies", [-1, 1.5, True, "4"])
@pytest.mark.parametrize("cls", METHODS)
def test_copies_are_a_whole_number(cls, copies, images):
    with pytest.raises(StfsebError, match=f"context_copies={copies}: must be a whole number of at least 0"):
        cls(network(), images, num_context=5, context_copies=copies)


def test_the_last_set_is_kept_for_the_next_run_if_it_is_small(images, monkeypatch):
    made = []
    real = context_set.distort_into
    monkeypatch.setattr(
        context_set,
        "distort_into",
        lambda found, given, seed: made.append(len(found) // len(given)) or real(found, given, seed),
    )
    monkeypatch.setattr(context_set, "_LAST", {})
    first, second = (Context(network(), images, 5, copies=2).images for _ in range(2))
    assert made == [2]
    assert first.data_ptr() == second.data_ptr()
    changed = images.clone()
    changed[0] = 255 - changed[0]
    assert torch.equal(Context(network(), changed, 5, copies=2).images[:20], changed)
    Context(network(), images, 5, copies=3)
    assert made == [2, 2, 3]
    assert len(context_set._LAST) == 1
    monkeypatch.setattr(context_set, "_KEPT", 100)
    Context(network(), images, 5, copies=1)
    assert context_set._LAST == {}


@pytest.mark.parametrize("copies", [1, 3])
def test_images_that_are_distorted_already_get_other_distortions(copies):
    """Inverted twice is not inverted: with the same draws no first copy of them would be white."""
    black = distorted(torch.zeros(2000, 1, 4, 4, dtype=torch.uint8))
    context = Context(stfseb.SmallCNN(1, 3, 0.5, image_size=4, hidden=8), black, 5, copies=copies)
    for copy in context.images.split(2000)[1:]:
        turned_over = copy[:, 0, 0, 0] != black[:, 0, 0, 0]
        for kind in (black[:, 0, 0, 0] == 0, black[:, 0, 0, 0] == 255):
            assert 0.15 < turned_over[kind].float().mean() < 0.35


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_contexts_of_other_types_and_such_as_have_a_gradient(dtype, images, tmp_path):
    given = (images.double() / 255).to(dtype).requires_grad_()
    method = stfseb.STFSEB(network(), given, num_context=5, samples=2, context_copies=1)
    assert method.context.images.dtype == dtype
    assert not method.context.images.requires_grad
    x, y = torch.rand(8, 1, 8, 8), torch.arange(8) % 3
    for _ in range(2):
        method.objective(x, y, 8).total.backward()
    stfseb.save(method, tmp_path / "model")
    assert json.loads(next((tmp_path / "model").glob("*.json")).read_text())["context"]["count"] == 20


def test_a_checkpoint_goes_by_the_images_that_were_given(images):
    """Copies follow from them; a last digit that another processor rounds otherwise must not end a run."""
    x = torch.randint(0, 256, (8, 1, 8, 8), dtype=torch.uint8)
    batches = ResidentBatches(x, torch.arange(8) % 3, 4, 0, torch.device("cpu"))
    torch.manual_seed(0)
    method = stfseb.STFSEB(network(), images, num_context=5, samples=2, context_copies=1)
    known = identity_of(method, batches, batches, Protocol())
    assert known["context"] == [fingerprint(images)]
    assert known["settings"]["context_copies"] == 1


def test_copies_that_do_not_fit_end_in_one_line(images):
    with pytest.raises(StfsebError, match=r"context_copies=1000000000000: \d+\.\d GB of context images do not fit"):
        Context(network(), images, 5, copies=10**12)


def test_a_misspelt_context_is_helped():
    with pytest.raises(StfsebError, match=r"context='distorted': give images.*augmentation\.distorted\(x\)"):
        stfseb.STFSEB(network(), "distorted")
