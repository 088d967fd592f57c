"""CIFAR-10-C as published: one .npy (50,000, 32, 32, 3) for each type, severity 1 first; one labels.npy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from stfseb.data.images import ImageSet
from stfseb.data.readers.bounded import class_indices, damaged, mapped_npy
from stfseb.data.readers.cifar import CLASSES

if TYPE_CHECKING:
    from pathlib import Path

FOLDER = "CIFAR-10-C"
SEVERITIES = 5


def present(folder: Path, kind: str) -> bool:
    """Say whether the published images of a corruption type are on disk."""
    return (folder / FOLDER / f"{kind}.npy").is_file()


def read(folder: Path, kind: str, severity: int) -> ImageSet:
    """Read one severity of one type; only the pages that are used are ever loaded from disk."""
    path = folder / FOLDER / f"{kind}.npy"
    images = mapped_npy(path)
    if images.dtype != np.uint8 or images.shape[1:] != (32, 32, 3) or len(images) % SEVERITIES:
        raise damaged(path, f"images are {images.dtype} {images.shape}, not uint8 (50000, 32, 32, 3)")
    labels = path.with_name("labels.npy")
    targets = class_indices(labels, mapped_npy(labels), len(images), 10)
    block = len(images) // SEVERITIES
    rows = slice((severity - 1) * block, severity * block)
    pixels = torch.from_numpy(images[rows]).permute(0, 3, 1, 2)
    name = f"cifar10-c/{kind}/{severity}"
    return ImageSet(name, pixels, torch.from_numpy(targets[rows]), "published", CLASSES["cifar10"])
