"""SVHN, cropped digits: MATLAB 5 files with X (32, 32, 3, N) and y (N, 1), the digit 0 written as 10."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from stfseb.data.images import ImageSet
from stfseb.data.readers.bounded import CAP, class_indices, damaged, no_split, reading, subset_note
from stfseb.data.readers.matlab import read_arrays

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

PUBLISHED = {"train": 73_257, "test": 26_032}
CLASSES = tuple("0123456789")


def read_mat(path: Path) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return X as (N, 3, 32, 32) and y as int64, 10 still standing for 0."""
    with reading(path):
        arrays = read_arrays(path, ("X", "y"), CAP)
        pixels, labels = arrays["X"], arrays["y"]
        shape = pixels.shape if pixels.ndim != 3 else (*pixels.shape, 1)  # MATLAB drops a last dimension of 1
        if pixels.dtype != np.uint8 or shape[:3] != (32, 32, 3) or len(shape) != 4:
            raise damaged(path, f"X is {pixels.dtype} of shape {shape}, not uint8 (32, 32, 3, N)")
        with np.errstate(invalid="ignore"):  # NaN, which is no whole number
            whole = labels.astype(np.int64)
        if not np.array_equal(whole, labels):
            raise damaged(path, "labels that are not whole numbers")
        images = np.ascontiguousarray(pixels.reshape(shape).transpose(3, 2, 0, 1))
        return images, whole


def read(name: str, folder: Path, split: str) -> ImageSet:
    """Read a split of `svhn`."""
    if split not in PUBLISHED:
        raise no_split(name, split, tuple(PUBLISHED))
    path = folder / "svhn" / f"{split}_32x32.mat"
    images, digits = read_mat(path)
    labels = class_indices(path, np.where(digits == 10, 0, digits), len(images), len(CLASSES))
    return ImageSet(
        name,
        torch.from_numpy(images),
        torch.from_numpy(labels),
        subset_note(len(images), PUBLISHED[split], split),
        CLASSES,
    )
