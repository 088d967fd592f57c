"""Readers of the published formats: `read("mnist", folder, "test")` gives one `ImageSet`, whatever the file.

All give uint8 images (N, C, H, W) and int64 labels. What is on disk is told in the set's note when it is not
all that was published. Damaged, mislabelled and hostile files end in a one-line `StfsebError`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from stfseb.data.readers import cifar, idx, medmnist, notmnist, svhn
from stfseb.errors import unknown

if TYPE_CHECKING:
    from collections.abc import Callable

    from stfseb.data.images import ImageSet

READERS: dict[str, Callable[[str, Path, str], ImageSet]] = {
    **dict.fromkeys(idx.FOLDERS, idx.read),
    "notmnist": notmnist.read,
    **dict.fromkeys(cifar.FOLDERS, cifar.read),
    "svhn": svhn.read,
    **dict.fromkeys(medmnist.CLASSES, medmnist.read),
}
SPLITS = ("train", "validation", "test")


def read(set_name: str, folder: str | Path, split: str) -> ImageSet:
    """Read one split (`train`, `validation` or `test`) of a set from the data folder."""
    if set_name not in READERS:
        raise unknown("image set", set_name, READERS)
    if split not in SPLITS:
        raise unknown("split", split, SPLITS)
    return READERS[set_name](set_name, Path(folder), split)
