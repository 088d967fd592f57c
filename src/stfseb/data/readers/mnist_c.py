"""MNIST-C as published: for each type a folder with test_images.npy (10,000, 28, 28, 1) and its labels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from stfseb.data.images import ImageSet
from stfseb.data.readers.bounded import class_indices, damaged, mapped_npy

if TYPE_CHECKING:
    from pathlib import Path

FOLDER = "mnist_c"


def present(folder: Path, kind: str) -> bool:
    """Say whether the published images of a corruption type are on disk."""
    return (folder / FOLDER / kind / "test_images.npy").is_file()


def read(folder: Path, kind: str) -> ImageSet:
    """Read one corruption type; its images stay on disk, mapped into memory."""
    path = folder / FOLDER / kind / "test_images.npy"
    images = mapped_npy(path)
    if images.dtype != np.uint8 or images.shape[1:] not in {(28, 28, 1), (28, 28)}:
        raise damaged(path, f"images are {images.dtype} {images.shape}, not uint8 (N, 28, 28, 1)")
    labels = path.with_name("test_labels.npy")
    targets = class_indices(labels, mapped_npy(labels), len(images), 10)
    pixels = torch.from_numpy(images).reshape(-1, 1, 28, 28)
    return ImageSet(f"mnist-c/{kind}", pixels, torch.from_numpy(targets), "published", tuple("0123456789"))
