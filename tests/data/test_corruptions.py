"""Loading the suites: published or generated, cached, in parallel, and always said which."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

from stfseb.data.corruptions import CIFAR10_C, CIFAR10_C_EXTRA, MNIST_C, corrupt, generate, load
from stfseb.data.images import ImageSet
from stfseb.errors import StfsebError


@pytest.fixture
def digits() -> ImageSet:
    images = torch.randint(0, 256, (7, 1, 28, 28), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return ImageSet("mnist", images, torch.arange(7), "", tuple("0123456789"))


@pytest.fixture
def colour() -> ImageSet:
    images = torch.randint(0, 256, (6, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    return ImageSet("cifar10", images, torch.arange(6))


def test_names():
    assert (len(CIFAR10_C), len(CIFAR10_C_EXTRA), len(MNIST_C)) == (15, 4, 15)
    assert len({*CIFAR10_C, *CIFAR10_C_EXTRA}) == 19


def test_mnist_c_is_generated_whole_and_equals_corrupt(digits, tmp_path):
    told = []
    sets = load("mnist-c", digits, tmp_path, cache=tmp_path / "cache", workers=1, progress=lambda *a: told.append(a))
    assert list(sets) == [(kind, 0) for kind in MNIST_C]
    assert told == [(n + 1, 15, kind) for n, kind in enumerate(MNIST_C)]
    for (kind, _), one in sets.items():
        assert torch.equal(one.images, corrupt(digits.images, "mnist-c", kind, 0, 0))
        assert one.note == "generated from mnist"
        assert one.name == f"mnist-c/{kind}"
        assert torch.equal(one.labels, digits.labels)
        assert one.classes == digits.classes
    assert len({one.fingerprint for one in sets.values()}) == 15


def test_processes_change_nothing_and_leave_nothing_behind(digits, tmp_path):
    types = ["fog", "zigzag", "stripe", "shot_noise"]
    one = load("mnist-c", digits, tmp_path, types=types, cache=tmp_path / "one", workers=1)
    told = []
    two = load(
        "mnist-c", digits, tmp_path, types=types, cache=tmp_path / "two", workers=2, progress=lambda *a: told.append(a)
    )
    assert [a[:2] for a in told] == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert sorted(a[2] for a in told) == sorted(types)
    assert {key: s.fingerprint for key, s in one.items()} == {key: s.fingerprint for key, s in two.items()}
    files = sorted(path.name for path in (tmp_path / "two").rglob("*") if path.is_file())
    assert files == ["fog.npy", "shot_noise.npy", "stripe.npy", "zigzag.npy"]


def test_the_processes_need_no_torch():
    code = "import sys, stfseb.data.corruptions.worker; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_cache_is_used_and_mended(digits, tmp_path):
    cache = tmp_path / "cache"
    told = []
    arguments = {"types": ["fog"], "cache": cache, "workers": 1, "progress": lambda *a: told.append(a)}
    first = load("mnist-c", digits, tmp_path, **arguments)["fog", 0].fingerprint
    load("mnist-c", digits, tmp_path, **arguments)
    assert len(told) == 1
    (file,) = cache.rglob("fog.npy")
    file.write_bytes(file.read_bytes()[:-1])
    again = load("mnist-c", digits, tmp_path, **arguments)["fog", 0]
    assert len(told) == 2
    assert again.fingerprint == first
    other = ImageSet("mnist", 255 - digits.images, digits.labels)
    assert load("mnist-c", other, tmp_path, **arguments)["fog", 0].fingerprint != first
    assert load("mnist-c", digits, tmp_path, **arguments, seed=1)["fog", 0].fingerprint != first
    assert len(told) == 4


def test_cached_images_are_mapped_and_cannot_be_changed(digits, tmp_path):
    one = load("mnist-c", digits, tmp_path, types=["stripe"], cache=tmp_path)["stripe", 0]
    (file,) = tmp_path.rglob("stripe.npy")
    before = file.read_bytes()
    one.images.zero_()
    assert file.read_bytes() == before
    plain = tmp_path / "plain"
    plain.touch()
    assert file.stat().st_mode == plain.stat().st_mode, "a shared cache must be readable by others"


def test_without_a_cache_nothing_is_kept(digits, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    one = load("mnist-c", digits, tmp_path, types=["stripe"])["stripe", 0]
    assert list(tmp_path.iterdir()) == []
    assert torch.equal(one.images, corrupt(digits.images, "mnist-c", "stripe", 0, 0))


def test_blocks_are_seeded_by_themselves(monkeypatch):
    """The first images come out the same however many follow, and two equal blocks get different noise."""
    image = torch.full((1, 1, 28, 28), 100, dtype=torch.uint8)
    long = corrupt(image.expand(600, -1, -1, -1), "mnist-c", "impulse_noise", 0, 4)
    short = corrupt(image.expand(250, -1, -1, -1), "mnist-c", "impulse_noise", 0, 4)
    assert torch.equal(long[:250], short)
    assert not torch.equal(long[:250], long[250:500])
    assert not torch.equal(short, corrupt(image.expand(250, -1, -1, -1), "mnist-c", "impulse_noise", 0, 5))


def publish_cifar(folder, colour, kinds, labels=None) -> dict[str, np.ndarray]:
    (folder / "CIFAR-10-C").mkdir()
    arrays = {}
    for number, kind in enumerate(kinds):
        arrays[kind] = np.random.default_rng(number).integers(0, 256, (30, 32, 32, 3), dtype=np.uint8)
        np.save(folder / f"CIFAR-10-C/{kind}.npy", arrays[kind])
    np.save(folder / "CIFAR-10-C/labels.npy", np.tile(colour.labels if labels is None else labels, 5))
    return arrays


def test_published_cifar10_c_is_preferred(colour, tmp_path):
    arrays = publish_cifar(tmp_path, colour, ["fog", "contrast"])
    sets = load("cifar10-c", colour, tmp_path, severities=(1, 3), types=["fog", "contrast"])
    assert list(sets) == [("fog", 1), ("fog", 3), ("contrast", 1), ("contrast", 3)]
    for (kind, severity), one in sets.items():
        rows = arrays[kind][6 * (severity - 1) : 6 * severity]
        np.testing.assert_array_equal(one.images.numpy(), rows.transpose(0, 3, 1, 2))
        assert one.note == "published"


def test_a_mixture_says_so_in_every_note(colour, tmp_path):
    publish_cifar(tmp_path, colour, ["fog"])
    sets = load("cifar10-c", colour, tmp_path, severities=[5], types=["fog", "contrast", "pixelate"], workers=1)
    mixture = "of 3 types 1 are published and 2 generated"
    assert sets["fog", 5].note == f"published; {mixture}"
    assert sets["contrast", 5].note == sets["pixelate", 5].note == f"generated from cifar10; {mixture}"


def test_published_labels_must_be_those_of_the_clean_set(colour, tmp_path):
    publish_cifar(tmp_path, colour, ["fog"], labels=np.array([5, 4, 3, 2, 1, 0]))
    with pytest.raises(StfsebError, match="its labels differ"):
        load("cifar10-c", colour, tmp_path, types=["fog"])


def test_a_clean_set_cut_short_takes_the_first_published_images(colour, tmp_path):
    arrays = publish_cifar(tmp_path, colour, ["fog"])
    one = load("cifar10-c", colour.take(slice(4)), tmp_path, types=["fog"], severities=[2])["fog", 2]
    np.testing.assert_array_equal(one.images.numpy(), arrays["fog"][6:10].transpose(0, 3, 1, 2))
    assert one.note == "published, the first 4 of 6 images"


def test_published_mnist_c(digits, tmp_path):
    (tmp_path / "mnist_c/zigzag").mkdir(parents=True)
    np.save(tmp_path / "mnist_c/zigzag/test_images.npy", np.full((7, 28, 28, 1), 9, np.uint8))
    np.save(tmp_path / "mnist_c/zigzag/test_labels.npy", np.arange(7))
    one = load("mnist-c", digits, tmp_path, types=["zigzag"])["zigzag", 0]
    assert (one.note, int(one.images.unique())) == ("published", 9)


def test_bad_requests_are_named(digits, colour, tmp_path):
    with pytest.raises(StfsebError, match="did you mean 'cifar10-c'"):
        load("cifar10c", colour, tmp_path)
    with pytest.raises(StfsebError, match="did you mean 'fog'"):
        load("cifar10-c", colour, tmp_path, types=["fogg"])
    with pytest.raises(StfsebError, match="no severity 6"):
        load("cifar10-c", colour, tmp_path, severities=[6])
    with pytest.raises(StfsebError, match=r"made for images \(3, 32, 32\), not \(1, 28, 28\)"):
        load("cifar10-c", digits, tmp_path)
    with pytest.raises(StfsebError, match="uint8"):
        corrupt(colour.images.float(), "cifar10-c", "fog", 1)
    with pytest.raises(StfsebError, match="frost needs its textures"):
        corrupt(colour.images, "cifar10-c", "frost", 1)


def test_missing_frost_is_told_before_any_work(colour, tmp_path):
    cache = tmp_path / "cache"
    with pytest.raises(StfsebError, match=r"frost1.png cannot be read: .* leave the type frost out"):
        load("cifar10-c", colour, tmp_path, cache=cache)
    assert not cache.exists()


def test_a_cache_that_cannot_be_written(digits, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StfsebError, match="cannot write to the cache"):
        load("mnist-c", digits, tmp_path, types=["stripe"], cache=tmp_path / "file")


def test_a_process_that_dies_is_told(digits, tmp_path, monkeypatch):
    code = "import os, sys; sys.stdin.readline(); os._exit(9)"

    def start() -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        return subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, text=True)

    monkeypatch.setattr(generate, "_start", start)
    with pytest.raises(StfsebError, match="could not be made: its process ended"):
        load("mnist-c", digits, tmp_path, types=["stripe", "fog"], cache=tmp_path / "cache", workers=2)
    assert [path for path in (tmp_path / "cache").rglob("*") if path.is_file()] == []


def test_an_error_in_a_process_comes_back_as_one_line(digits, tmp_path, monkeypatch):
    """Two jobs whose target lies in a folder that is gone: the process survives and answers."""
    monkeypatch.setattr(generate, "target", lambda folder, kind, severity: folder / "gone" / f"{kind}.npy")
    with pytest.raises(StfsebError, match=r"could not be made: .*No such file") as caught:
        load("mnist-c", digits, tmp_path, types=["stripe", "brightness"], cache=tmp_path / "cache", workers=2)
    assert "\n" not in str(caught.value)
