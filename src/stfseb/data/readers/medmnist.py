"""The MedMNIST family at 28 x 28: one .npz with images and labels of train, val and test; never a pickle."""

from __future__ import annotations

import math
import zipfile
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from stfseb.data.images import ImageSet
from stfseb.data.readers.bounded import (
    claim,
    class_indices,
    damaged,
    exactly,
    no_split,
    npy_header,
    reading,
    subset_note,
)

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

SPLITS = {"train": "train", "validation": "val", "test": "test"}
COLOUR = {"pathmnist", "dermamnist", "bloodmnist"}
# train, validation, test; the organ sets lost a few images between the second and the third release
PUBLISHED: dict[str, tuple[tuple[int, int, int], ...]] = {
    "pathmnist": ((89_996, 10_004, 7_180),),
    "dermamnist": ((7_007, 1_003, 2_005),),
    "bloodmnist": ((11_959, 1_712, 3_421),),
    "organamnist": ((34_561, 6_491, 17_778), (34_581, 6_491, 17_778)),
    "organcmnist": ((12_975, 2_392, 8_216), (13_000, 2_392, 8_268)),
    "organsmnist": ((13_932, 2_452, 8_827), (13_940, 2_452, 8_829)),
    "breastmnist": ((546, 78, 156),),
}
_ORGANS = (
    *("bladder", "femur, left", "femur, right", "heart", "kidney, left", "kidney, right"),
    *("liver", "lung, left", "lung, right", "pancreas", "spleen"),
)
CLASSES: dict[str, tuple[str, ...]] = {
    "pathmnist": (
        *("adipose", "background", "debris", "lymphocytes", "mucus", "smooth muscle"),
        *("normal colon mucosa", "cancer-associated stroma", "colorectal adenocarcinoma epithelium"),
    ),
    "dermamnist": (
        *("actinic keratosis", "basal cell carcinoma", "benign keratosis", "dermatofibroma"),
        *("melanoma", "melanocytic nevus", "vascular lesion"),
    ),
    "bloodmnist": (
        *("basophil", "eosinophil", "erythroblast", "immature granulocyte"),
        *("lymphocyte", "monocyte", "neutrophil", "platelet"),
    ),
    "organamnist": _ORGANS,
    "organcmnist": _ORGANS,
    "organsmnist": _ORGANS,
    "breastmnist": ("malignant", "normal or benign"),
}


def read_member(path: Path, archive: zipfile.ZipFile, name: str, sides: tuple[int, ...]) -> NDArray[Any]:
    """Read one array of an .npz, its header held against the directory and the directory against the file."""
    try:
        entry = archive.getinfo(f"{name}.npy")
    except KeyError:
        held = ", ".join(archive.namelist()[:8])
        raise damaged(path, f"it has no array {name}, only {held or 'none'}") from None
    claim(path, entry.file_size, path.stat().st_size)
    with archive.open(entry) as stream:
        shape, dtype = npy_header(path, stream)
        if len(shape) != 1 + len(sides) or shape[1:] != sides:
            raise damaged(path, f"{name} has shape {shape}, not {('N', *sides)}".replace("'", ""))
        count = math.prod(shape) * dtype.itemsize
        if stream.tell() + count != entry.file_size:
            raise damaged(path, f"{name} of shape {shape} does not fit its {entry.file_size:,} bytes")
        return np.frombuffer(exactly(path, stream, count), dtype).reshape(shape)


def read(name: str, folder: Path, split: str) -> ImageSet:
    """Read a split of a MedMNIST set."""
    if split not in SPLITS:
        raise no_split(name, split, tuple(SPLITS))
    path = folder / "medmnist" / f"{name}.npz"
    sides = (28, 28, 3) if name in COLOUR else (28, 28)
    with reading(path), zipfile.ZipFile(path) as archive:
        labels = read_member(path, archive, f"{SPLITS[split]}_labels", (1,))
        images = read_member(path, archive, f"{SPLITS[split]}_images", sides)
    if images.dtype != np.uint8:
        raise damaged(path, f"{split} images are {images.dtype}, not uint8")
    targets = class_indices(path, labels, len(images), len(CLASSES[name]))
    planar = images.transpose(0, 3, 1, 2) if name in COLOUR else images[:, None]
    pixels = np.ascontiguousarray(planar)
    counts = [release[tuple(SPLITS).index(split)] for release in PUBLISHED[name]]
    note = "" if len(pixels) in counts else subset_note(len(pixels), counts[0], split)
    return ImageSet(name, torch.from_numpy(pixels), torch.from_numpy(targets), note, CLASSES[name])
