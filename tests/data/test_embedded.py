"""The arrays of `mini`: counts, balance, disjointness, fingerprints, size, and that they are the published pixels."""

from __future__ import annotations

import gzip
from importlib import resources

import numpy as np
import pytest
import torch

from stfseb.data import embedded
from stfseb.errors import StfsebError

COUNTS = {"train": 4000, "validation": 1000, "test": 2000, "kmnist": 2000, "mnist": 2000, "glyphs": 2000}
FINGERPRINTS = {
    "train": "fe49a4880bd74895",
    "validation": "d412fe116b8fdbd6",
    "test": "672c400b65c7ba7d",
    "kmnist": "a73d1b71444f4f11",
    "mnist": "02a0cc5b61b60875",
    "glyphs": "28ca02cbf73ec456",
}


@pytest.mark.parametrize("part", COUNTS)
def test_counts_balance_and_fingerprints(part):
    images = embedded.read(part)
    assert images.images.shape == (COUNTS[part], 1, 28, 28)
    assert images.images.dtype == torch.uint8
    assert images.labels.dtype == torch.int64
    assert images.labels.bincount().tolist() == [COUNTS[part] // 10] * 10
    assert len(images.classes) == 10
    assert images.fingerprint == FINGERPRINTS[part]
    assert images.images.flatten(1).unique(dim=0).shape[0] == COUNTS[part]


def test_splits_are_disjoint():
    rows = [{row.numpy().tobytes() for row in embedded.read(p).images} for p in ("train", "validation", "test")]
    assert len(rows[0] | rows[1] | rows[2]) == 7000


def test_at_most_six_megabytes_with_notices():
    folder = resources.files("stfseb.data.embedded")
    assert sum(len(f.read_bytes()) for f in folder.iterdir() if f.is_file()) < 6e6
    notice = folder.joinpath("NOTICE.md").read_text()
    for text in ("MIT License", "CC BY-SA 3.0", "CC BY-SA 4.0", "Zalando", "CODH"):
        assert text in notice


def test_unknown_part():
    with pytest.raises(StfsebError, match="did you mean 'glyphs'"):
        embedded.read("glyph")


@pytest.mark.parametrize(
    ("part", "file"),
    [
        ("train", "fashion-mnist/train"),
        ("validation", "fashion-mnist/train"),
        ("test", "fashion-mnist/t10k"),
        ("kmnist", "kmnist/t10k"),
        ("mnist", "mnist/t10k"),
    ],
)
def test_pixels_and_labels_are_the_published_ones(real_data, part, file):
    raw = np.frombuffer(gzip.decompress((real_data / f"{file}-images-idx3-ubyte.gz").read_bytes()), np.uint8)[16:]
    labels = gzip.decompress((real_data / f"{file}-labels-idx1-ubyte.gz").read_bytes())[8:]
    published: dict[bytes, set[int]] = {}
    for pixels, label in zip(raw.reshape(-1, 784), labels, strict=True):
        published.setdefault(pixels.tobytes(), set()).add(label)
    mine = embedded.read(part)
    for pixels, label in zip(mine.images, mine.labels.tolist(), strict=True):
        assert label in published[pixels.numpy().tobytes()]


def test_letters_are_letters():
    """Each letter's mean image is nearer to itself than to any other letter's, and ink is neither absent nor full."""
    glyphs = embedded.read("glyphs")
    pixels = glyphs.images.float().flatten(1) / 255
    ink = pixels.mean(1)
    assert 0.02 < ink.min() < ink.max() < 0.5
    half = torch.arange(2000) % 2 == 0
    means = torch.stack([pixels[half & (glyphs.labels == k)].mean(0) for k in range(10)])
    other = torch.stack([pixels[~half & (glyphs.labels == k)].mean(0) for k in range(10)])
    assert torch.cdist(other, means).argmin(1).tolist() == list(range(10))
