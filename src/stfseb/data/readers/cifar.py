"""CIFAR-10 and CIFAR-100, the binary release: records of label bytes and 3072 planar RGB bytes; no pickle."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from stfseb.data.images import ImageSet
from stfseb.data.readers.bounded import claim, class_indices, damaged, no_split, reading, subset_note

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

PIXELS = 3 * 32 * 32
FOLDERS = {"cifar10": "cifar10/cifar-10-batches-bin", "cifar100": "cifar100/cifar-100-binary"}
FILES: dict[str, dict[str, tuple[str, ...]]] = {
    "cifar10": {
        "train": tuple(f"data_batch_{number}.bin" for number in range(1, 6)),
        "test": ("test_batch.bin",),
    },
    "cifar100": {"train": ("train.bin",), "test": ("test.bin",)},
}
PUBLISHED = {"train": 50_000, "test": 10_000}
LABEL_BYTES = {"cifar10": 1, "cifar100": 2}  # CIFAR-100: coarse, then fine; the fine one is the label
_FINE = """apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly
camel can castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup
dinosaur dolphin elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower
leopard lion lizard lobster man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid
otter palm_tree pear pickup_truck pine_tree plain plate poppy porcupine possum rabbit raccoon ray road
rocket rose sea seal shark shrew skunk skyscraper snail snake spider squirrel streetcar sunflower
sweet_pepper table tank telephone television tiger tractor train trout tulip turtle wardrobe whale
willow_tree wolf woman worm"""
CLASSES = {
    "cifar10": ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
    "cifar100": tuple(_FINE.split()),
}


def read_records(path: Path, label_bytes: int) -> NDArray[np.uint8]:
    """Return the records of one file as rows."""
    with reading(path):
        size = claim(path, path.stat().st_size)
        record = label_bytes + PIXELS
        if size == 0 or size % record:
            raise damaged(path, f"{size:,} bytes are not a whole number of records of {record:,}")
        return np.fromfile(path, np.uint8, count=size).reshape(-1, record)


def read(name: str, folder: Path, split: str) -> ImageSet:
    """Read a split of `cifar10` or `cifar100`."""
    if split not in FILES[name]:
        raise no_split(name, split, tuple(FILES[name]))
    width = LABEL_BYTES[name]
    images, labels = [], []
    for file in FILES[name][split]:
        path = folder / FOLDERS[name] / file
        records = read_records(path, width)
        labels.append(class_indices(path, records[:, width - 1], len(records), len(CLASSES[name])))
        images.append(records[:, width:])
    pixels = np.concatenate(images).reshape(-1, 3, 32, 32)
    return ImageSet(
        name,
        torch.from_numpy(pixels),
        torch.from_numpy(np.concatenate(labels)),
        subset_note(len(pixels), PUBLISHED[split], split),
        CLASSES[name],
    )
