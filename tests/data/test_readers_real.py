"""The real sets, whole: the publishers' counts, label histograms and checksums, in the time allowed."""

from __future__ import annotations

import hashlib
import shutil
import time

import pytest
import torch

from stfseb.data.readers import read

MNIST_TRAIN = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
MNIST_TEST = [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
SVHN_FIRST_6000 = [405, 1165, 919, 679, 600, 553, 470, 446, 387, 376]
# set, split, published histogram, note, and the mean pixel in [0, 1] where it is widely known
SETS = [
    ("mnist", "train", MNIST_TRAIN, "", 0.1307),
    ("mnist", "test", MNIST_TEST, "", 0.1325),
    ("fmnist", "train", [6000] * 10, "", 0.2860),
    ("fmnist", "test", [1000] * 10, "", 0.2868),
    ("kmnist", "test", [1000] * 10, "", None),
    ("notmnist", "test", [1872, 1873, 1873, 1873, 1873, 1872, 1872, 1872, 1872, 1872], "", None),
    ("cifar10", "train", [5000] * 10, "", 0.4734),
    ("cifar10", "test", [1000] * 10, "", 0.4766),
    ("cifar100", "test", [100] * 100, "", None),
    ("svhn", "test", SVHN_FIRST_6000, "subset: 6,000 of 26,032 test images", None),
    ("pathmnist", "train", None, "subset: 7,000 of 89,996 train images", None),
    ("pathmnist", "validation", None, "subset: 1,000 of 10,004 validation images", None),
    ("pathmnist", "test", None, "subset: 4,000 of 7,180 test images", None),
    ("breastmnist", "train", [147, 399], "", None),
    ("breastmnist", "validation", [21, 57], "", None),
    ("breastmnist", "test", [42, 114], "", None),
]


@pytest.mark.parametrize(
    ("name", "split", "histogram", "note", "mean"), SETS, ids=lambda v: v if isinstance(v, str) else ""
)
def test_real_set(real_data, name, split, histogram, note, mean):
    start, busy = time.perf_counter(), time.process_time()
    got = read(name, real_data, split)
    # Seconds of the processor where they are fewer: other work on the machine does not lengthen those.
    seconds = min(time.perf_counter() - start, time.process_time() - busy)
    assert got.note == note
    assert got.images.dtype == torch.uint8
    assert got.images.is_contiguous()
    if histogram is not None:
        assert got.labels.bincount().tolist() == histogram
    if mean is not None:
        assert abs(float(got.images.double().mean()) / 255 - mean) < 5e-5
    assert seconds < 6, "twice the three seconds allowed: machines differ"


MD5 = {
    "cifar10/cifar-10-batches-bin/data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
    "cifar10/cifar-10-batches-bin/data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
    "cifar10/cifar-10-batches-bin/data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
    "cifar10/cifar-10-batches-bin/data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
    "cifar10/cifar-10-batches-bin/data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
    "cifar10/cifar-10-batches-bin/test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d",
    "cifar100/cifar-100-binary/test.bin": "4499cfba6c016c1be1438163640a0898",
}


@pytest.mark.parametrize("file", MD5)
def test_what_is_read_from_the_cifar_binaries_are_the_published_bytes(real_data, file):
    assert hashlib.md5((real_data / file).read_bytes()).hexdigest() == MD5[file]


def test_the_published_bytes_come_back_from_the_tensors(real_data):
    """Rebuilding the published file from what was read gives its md5: no pixel or label is out of place."""
    got = read("cifar10", real_data, "test")
    records = torch.cat([got.labels.to(torch.uint8)[:, None], got.images.flatten(1)], 1)
    published = MD5["cifar10/cifar-10-batches-bin/test_batch.bin"]
    assert hashlib.md5(records.numpy().tobytes()).hexdigest() == published


def test_a_flipped_byte_changes_the_fingerprint(real_data, tmp_path):
    folder = tmp_path / "cifar10/cifar-10-batches-bin"
    folder.mkdir(parents=True)
    path = folder / "test_batch.bin"
    shutil.copyfile(real_data / "cifar10/cifar-10-batches-bin/test_batch.bin", path)
    clean = read("cifar10", tmp_path, "test").fingerprint
    assert clean == read("cifar10", real_data, "test").fingerprint
    with path.open("r+b") as stream:
        stream.seek(20_000_000)
        byte = stream.read(1)[0]
        stream.seek(20_000_000)
        stream.write(bytes([byte ^ 1]))
    assert read("cifar10", tmp_path, "test").fingerprint != clean
