"""MNIST, Fashion-MNIST and KMNIST: gzip-compressed IDX files, big-endian header, then one byte a pixel."""

from __future__ import annotations

import gzip
import math
import struct
from typing import TYPE_CHECKING

import numpy as np
import torch

from stfseb.data.images import ImageSet
from stfseb.data.readers.bounded import (
    claim,
    class_indices,
    damaged,
    exactly,
    no_split,
    reading,
    subset_note,
)

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

FOLDERS = {"mnist": "mnist", "fmnist": "fashion-mnist", "kmnist": "kmnist"}
CLASSES = {
    "mnist": tuple("0123456789"),
    "fmnist": (
        "T-shirt/top",
        "trouser",
        "pullover",
        "dress",
        "coat",
        "sandal",
        "shirt",
        "sneaker",
        "bag",
        "ankle boot",
    ),
    "kmnist": ("o", "ki", "su", "tsu", "na", "ha", "ma", "ya", "re", "wo"),
}
PREFIXES = {"train": "train", "test": "t10k"}
PUBLISHED = {"train": 60_000, "test": 10_000}


def read_idx(path: Path, sides: tuple[int, ...]) -> NDArray[np.uint8]:
    """Read one .gz file of unsigned bytes, items of the given sides along its first dimension."""
    ndim = 1 + len(sides)
    with reading(path):
        size = path.stat().st_size
        with gzip.open(path, "rb") as stream:
            header = stream.read(4 + 4 * ndim)
            if len(header) < 4 + 4 * ndim:
                raise damaged(path, "truncated in its header")
            magic, *shape = struct.unpack(f">{1 + ndim}I", header)
            if magic != 0x0800 + ndim:  # 0x08: unsigned bytes; the last byte counts the dimensions
                raise damaged(path, f"IDX magic number {magic:#010x}, not {0x0800 + ndim:#010x}")
            if tuple(shape[1:]) != sides:
                raise damaged(path, f"items of shape {tuple(shape[1:])}, not {sides}")
            data = exactly(path, stream, claim(path, math.prod(shape), size))
        return np.frombuffer(data, np.uint8).reshape(shape)


def read(name: str, folder: Path, split: str) -> ImageSet:
    """Read a split of `mnist`, `fmnist` or `kmnist`."""
    if split not in PREFIXES:
        raise no_split(name, split, tuple(PREFIXES))
    start = folder / FOLDERS[name] / PREFIXES[split]
    labels_path = start.with_name(f"{start.name}-labels-idx1-ubyte.gz")
    images_path = start.with_name(f"{start.name}-images-idx3-ubyte.gz")
    labels = read_idx(labels_path, ())
    images = read_idx(images_path, (28, 28))
    targets = class_indices(labels_path, labels, len(images), len(CLASSES[name]))
    return ImageSet(
        name,
        torch.from_numpy(images).unsqueeze(1),
        torch.from_numpy(targets),
        subset_note(len(images), PUBLISHED[split], split),
        CLASSES[name],
    )
