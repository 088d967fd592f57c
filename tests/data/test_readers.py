"""Every published format, from small files written independently: pixels, labels, layout and notes."""

from __future__ import annotations

import gzip

import numpy as np
import pytest
import torch
from published_files import MEDICAL, pixels, png_bytes, put, tar_bytes, write_idx, write_mat, write_medical

from stfseb.data.readers import READERS, cifar10_c, mnist_c, read
from stfseb.errors import StfsebError


@pytest.mark.parametrize(("name", "folder"), [("mnist", "mnist"), ("fmnist", "fashion-mnist"), ("kmnist", "kmnist")])
def test_idx(tmp_path, name, folder):
    images, labels = write_idx(tmp_path / folder)
    got = read(name, tmp_path, "test")
    np.testing.assert_array_equal(got.images[:, 0].numpy(), images)
    np.testing.assert_array_equal(got.labels.numpy(), labels)
    assert got.labels.dtype == torch.int64
    assert got.note == "subset: 6 of 10,000 test images"
    assert len(got.classes) == 10


def test_cifar10_train_joins_its_five_batches(tmp_path):
    expected, targets = [], []
    for number in range(1, 6):
        records = pixels(2, 3073, seed=number)
        records[:, 0] %= 10
        put(tmp_path / f"cifar10/cifar-10-batches-bin/data_batch_{number}.bin", records.tobytes())
        expected += [
            [[[row[1 + 1024 * c + 32 * h + w] for w in range(32)] for h in range(32)] for c in range(3)]
            for row in records
        ]
        targets += [row[0] for row in records]
    got = read("cifar10", tmp_path, "train")
    np.testing.assert_array_equal(got.images.numpy(), np.array(expected))
    assert got.labels.tolist() == targets
    (tmp_path / "cifar10/cifar-10-batches-bin/data_batch_3.bin").unlink()
    with pytest.raises(StfsebError, match=r"data_batch_3.bin is not there"):
        read("cifar10", tmp_path, "train")


def test_cifar100_takes_the_fine_label(tmp_path):
    records = pixels(3, 3074)
    records[:, 0], records[:, 1] = 19, [0, 57, 99]
    put(tmp_path / "cifar100/cifar-100-binary/train.bin", records.tobytes())
    got = read("cifar100", tmp_path, "train")
    assert [got.classes[label] for label in got.labels] == ["apple", "pear", "worm"]
    np.testing.assert_array_equal(got.images.flatten(1).numpy(), records[:, 2:])


@pytest.mark.parametrize("compress", [True, False])
@pytest.mark.parametrize("count", [1, 12])
def test_svhn(tmp_path, count, compress):
    images, digits = write_mat(tmp_path / "svhn/train_32x32.mat", count, compress)
    got = read("svhn", tmp_path, "train")
    for n in range(count):
        for channel in range(3):
            np.testing.assert_array_equal(got.images[n, channel].numpy(), images[:, :, channel, n])
    assert got.labels.tolist() == [digit % 10 for digit in digits]
    assert got.note == f"subset: {count} of 73,257 train images"


def test_notmnist_sorts_by_name_and_counts_unreadable_images(tmp_path):
    images = pixels(3, 28, 28)
    members = [
        ("notMNIST_small/B/b.png", png_bytes(images[2])),
        ("notMNIST_small/A/z.png", png_bytes(images[1])),
        ("notMNIST_small/A/empty.png", b""),
        ("notMNIST_small/A/a.png", png_bytes(images[0])),
        ("notMNIST_small/A/cut.png", png_bytes(images[0])[:60]),
    ]
    put(tmp_path / "notmnist/notMNIST_small.tar.gz", gzip.compress(tar_bytes(members)))
    got = read("notmnist", tmp_path, "test")
    np.testing.assert_array_equal(got.images[:, 0].numpy(), images)
    assert got.labels.tolist() == [0, 0, 1]
    assert got.note == "subset: 3 of 18,724 test images; 2 unreadable images"


@pytest.mark.parametrize("name", MEDICAL)
@pytest.mark.parametrize(("split", "key"), [("train", "train"), ("validation", "val"), ("test", "test")])
def test_medmnist(tmp_path, name, split, key):
    arrays = write_medical(tmp_path / "medmnist", name)
    got = read(name, tmp_path, split)
    images = arrays[f"{key}_images"].reshape(len(got), 28, 28, -1)
    np.testing.assert_array_equal(got.images.numpy(), np.moveaxis(images, 3, 1))
    assert got.labels.tolist() == arrays[f"{key}_labels"][:, 0].tolist()
    assert got.note.startswith(f"subset: {len(got)} of ")
    assert len(got.classes) == MEDICAL[name][0]


def test_an_earlier_release_of_an_organ_set_is_whole(tmp_path):
    (tmp_path / "medmnist").mkdir()
    notes = {}
    for count in (8_829, 8_827, 8_800, 8_900):
        images, labels = np.zeros((count, 28, 28), np.uint8), np.zeros((count, 1), np.uint8)
        np.savez_compressed(tmp_path / "medmnist/organsmnist.npz", test_images=images, test_labels=labels)
        notes[count] = read("organsmnist", tmp_path, "test").note
    assert notes[8_829] == notes[8_827] == ""
    assert notes[8_800] == "subset: 8,800 of 8,827 test images"
    assert notes[8_900] == "8,900 test images, where 8,827 are published"


def test_mnist_c(tmp_path):
    images, labels = pixels(4, 28, 28, 1), np.arange(4)
    (tmp_path / "mnist_c/fog").mkdir(parents=True)
    np.save(tmp_path / "mnist_c/fog/test_images.npy", images)
    np.save(tmp_path / "mnist_c/fog/test_labels.npy", labels)
    got = mnist_c.read(tmp_path, "fog")
    np.testing.assert_array_equal(got.images.numpy(), images.transpose(0, 3, 1, 2))
    assert got.labels.tolist() == [0, 1, 2, 3]
    assert (got.note, got.name) == ("published", "mnist-c/fog")


def test_cifar10_c_is_mapped_not_loaded_and_cannot_be_changed(tmp_path):
    images, labels = pixels(15, 32, 32, 3), np.tile([7, 0, 3], 5)
    (tmp_path / "CIFAR-10-C").mkdir()
    path = tmp_path / "CIFAR-10-C/fog.npy"
    np.save(path, images)
    np.save(tmp_path / "CIFAR-10-C/labels.npy", labels)
    before = path.read_bytes()
    got = cifar10_c.read(tmp_path, "fog", 4)
    np.testing.assert_array_equal(got.images.numpy(), images[9:12].transpose(0, 3, 1, 2))
    assert got.labels.tolist() == [7, 0, 3]
    got.images.zero_()
    assert path.read_bytes() == before


@pytest.mark.parametrize("name", READERS)
def test_missing_files_and_splits_are_named(tmp_path, name):
    with pytest.raises(StfsebError, match=r"is not there: .*stfseb data"):
        read(name, tmp_path, "test")
    if name not in MEDICAL:
        with pytest.raises(StfsebError, match=r"has no split 'validation'"):
            read(name, tmp_path, "validation")


def test_unknown_names(tmp_path):
    with pytest.raises(StfsebError, match=r"did you mean 'mnist'"):
        read("minst", tmp_path, "test")
    with pytest.raises(StfsebError, match=r"unknown split 'tset'"):
        read("mnist", tmp_path, "tset")
