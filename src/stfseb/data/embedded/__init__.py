"""The arrays of the task `mini`, inside the package: see NOTICE.md beside this file for their licences."""

from __future__ import annotations

from functools import cache
from importlib import resources

from stfseb.data.images import ImageSet
from stfseb.errors import unknown

FASHION = (
    "T-shirt/top", "trouser", "pullover", "dress", "coat",
    "sandal", "shirt", "sneaker", "bag", "ankle boot",
)  # fmt: skip
DIGITS = tuple("0123456789")
CLASSES = {
    "train": FASHION,
    "validation": FASHION,
    "test": FASHION,
    "kmnist": ("o", "ki", "su", "tsu", "na", "ha", "ma", "ya", "re", "wo"),
    "mnist": DIGITS,
    "glyphs": tuple("ABCDEFGHIJ"),
}
SPLITS = tuple(CLASSES)


@cache
def read(split: str) -> ImageSet:
    """Return one part of `mini`: train, validation, test, kmnist, mnist or glyphs."""
    import numpy as np
    import torch

    if split not in CLASSES:
        raise unknown("part of mini", split, SPLITS)
    with (
        resources.files(__name__).joinpath("mini.npz").open("rb") as file,
        np.load(file, allow_pickle=False) as arrays,
    ):
        images = torch.from_numpy(arrays[f"{split}_images"]).unsqueeze(1)
        labels = torch.from_numpy(arrays[f"{split}_labels"]).long()
    return ImageSet(f"mini-{split}", images, labels, classes=CLASSES[split])
