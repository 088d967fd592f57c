"""Where the images of a task come from: a registered set, a folder of pictures, or an array on disk."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from stfseb.data import embedded, pictures, sets
from stfseb.errors import StfsebError, unknown

if TYPE_CHECKING:
    from torch import Tensor

    from stfseb.data.images import ImageSet

# What images are for: in a task, or to calibrate a model on.
SPLIT_OF_ROLE = {
    "train": "train",
    "validation": "validation",
    "test": "test",
    "context": "train",
    "ood": "test",
    "calibration": "test",
}
UNLABELLED = ("context", "ood")
KEYS = {
    "set": {"set", "split", "fit"},
    "folder": {"folder"},
    "array": {"array", "images", "labels", "fit"},
}


class NotOnDiskError(StfsebError):
    """A registered set whose files are not in the data folder."""


@dataclass(frozen=True)
class Source:
    """One place that images come from; `where` is a set's name or a path."""

    kind: Literal["set", "folder", "array", "distorted"]
    where: str
    splits: tuple[str, ...] = ()  # in order of preference
    images: str | None = None  # names inside an .npz
    labels: str | None = None  # a name inside an .npz, or an .npy file beside the images
    fit: bool = False  # bring the images to the task's channels and size

    def __str__(self) -> str:
        if self.kind == "distorted":
            return f"distorted {self.where}"
        return f"{self.where} {self.splits[0]}" if self.kind == "set" else self.where


# Context that is made of the training images: as they are, or distorted copies of them.
TRAIN, DISTORTED = "train", "distorted"
OWN_CONTEXTS = (TRAIN, DISTORTED)


def own_context(name: str) -> Source | None:
    """Return where context that is made of the training images comes from, None: the images as they are."""
    return None if name == TRAIN else Source("distorted", TRAIN)


@dataclass(frozen=True)
class Shape:
    """What a task's network takes."""

    channels: int
    image_size: int
    classes: tuple[str, ...]


def parse(value: Any, role: str, base: Path) -> Source:
    """Read one source of a task file; relative paths are relative to `base`, the file's folder."""
    if isinstance(value, str):
        value = _guess(value, role, base)
    if not isinstance(value, dict) or not (kinds := [kind for kind in KEYS if kind in value]):
        raise StfsebError(f"{role}: {value!r} is no source of images: give 'set:', 'folder:' or 'array:'")
    kind = kinds[0]
    for key in value:
        if key not in KEYS[kind]:
            raise unknown(f"key in {role} ({kind})", str(key), KEYS[kind])
    where, fit = str(value[kind]), value.get("fit", False)
    if not isinstance(fit, bool):
        raise StfsebError(f"{role}: fit: {fit!r} must be true or false")
    if kind == "set":
        return Source("set", where, _splits(where, value.get("split", SPLIT_OF_ROLE[role])), fit=fit)
    path = (base / Path(where).expanduser()).resolve()
    if kind == "folder":
        return Source("folder", str(path))
    labels = value.get("labels")
    if labels is not None and str(labels).endswith(".npy"):
        labels = str((base / Path(str(labels)).expanduser()).resolve())
    return Source("array", str(path), images=value.get("images"), labels=labels, fit=fit)


def _guess(text: str, role: str, base: Path) -> dict[str, str]:
    """Understand a plain string: a registered set, an array file or a folder."""
    named = ["mini", *sets.all_sets()]  # the embedded images are no published set, but are named like one
    if text in named:
        return {"set": text}
    if text.endswith((".npy", ".npz")):
        return {"array": text}
    if (base / Path(text).expanduser()).is_dir():
        return {"folder": text}
    near = difflib.get_close_matches(text, [*(OWN_CONTEXTS if role == "context" else ()), *named], n=1, cutoff=0.5)
    hint = f" (did you mean '{near[0]}'?)" if near else ""
    own = f", {' or '.join(map(repr, OWN_CONTEXTS))}" if role == "context" else ""
    raise StfsebError(
        f"{role}: '{text}' is neither a registered set{hint} nor a folder in '{base}': "
        f"give one of these{own}, or an .npz or .npy file"
    )


def _splits(name: str, split: Any) -> tuple[str, ...]:
    known = embedded.SPLITS if name == "mini" else tuple(sets.get(name).splits)
    splits = tuple(map(str, split)) if isinstance(split, list) else (str(split),)
    for one in splits:
        if one not in known:
            raise unknown(f"split of {name}", one, known)
    return splits


def read(source: Source, role: str, name: str, shape: Shape, folder: Path) -> ImageSet:
    """Read a source for a role of a task, and check it against what the task's network takes."""
    labelled = role not in UNLABELLED
    if source.kind == "set":
        result = _read_set(source, folder)
    elif source.kind == "folder" and labelled:
        path = Path(source.where)
        result = pictures.read_classes(name, path, shape.classes, shape.channels, shape.image_size)
    elif source.kind == "folder":
        result = pictures.read_unlabelled(name, Path(source.where), shape.channels, shape.image_size)
    else:
        from stfseb.data.arrays import read_array

        result = read_array(source, name, labelled)
    if source.fit:
        result = fitted(result, shape.channels, shape.image_size)
    _check(result, role, shape, labelled)
    return result


def _read_set(source: Source, folder: Path) -> ImageSet:
    if source.where == "mini":
        return embedded.read(source.splits[0])
    from stfseb.data import readers

    published = sets.get(source.where)
    for split in source.splits:
        if not published.missing(folder, split):
            result = readers.read(source.where, folder, split)
            if split == source.splits[0]:
                return result
            said = f"{split} split, as the {source.splits[0]} split is not on disk"
            return replace(result, note=f"{said}; {result.note}" if result.note else said)
    raise NotOnDiskError(f"{source} is not in '{folder}': {published.remedy(folder)}")


def _check(result: ImageSet, role: str, shape: Shape, labelled: bool) -> None:
    if not len(result):
        raise StfsebError(f"{role}: {result.name} is empty: at least one image is needed")
    channels, height, width = result.images.shape[1:]
    wanted = (shape.channels, shape.image_size, shape.image_size)
    if (channels, height, width) != wanted:
        whose, remedy = "task has", "mend channels/image_size, or add 'fit: true' to this source"
        if role == "calibration":
            whose, remedy = "model takes", "give images of that shape"
        raise StfsebError(
            f"{role}: {result.name} has images of {channels}x{height}x{width}, the {whose} "
            f"{wanted[0]}x{wanted[1]}x{wanted[2]}: {remedy}"
        )
    if not labelled:
        return
    if result.labels is None:
        raise StfsebError(f"{role}: {result.name} has no labels")
    low, high = int(result.labels.min()), int(result.labels.max())
    if low < 0 or high >= len(shape.classes):
        wrong = low if low < 0 else high
        raise StfsebError(
            f"{role}: {result.name} has label {wrong}, outside the {len(shape.classes)} classes "
            f"(0 to {len(shape.classes) - 1}): mend the labels or 'classes'"
        )


def fitted(result: ImageSet, channels: int, size: int) -> ImageSet:
    """Return the set in other channels (grey by luma, RGB by repetition) and another size (bilinear, antialiased)."""
    import torch
    from torch.nn import functional as F

    images = result.images
    before = tuple(images.shape[1:])
    if before == (channels, size, size):
        return result
    if before[0] not in (1, 3):
        raise StfsebError(f"{result.name}: images of {before[0]} channels cannot be brought to {channels}")

    def convert(part: Tensor) -> Tensor:
        pixels = part.float()
        if before[0] == 3 and channels == 1:
            luma = torch.tensor([0.299, 0.587, 0.114]).view(1, 3, 1, 1)
            pixels = (pixels * luma).sum(1, keepdim=True)
        elif before[0] == 1 and channels == 3:
            pixels = pixels.expand(-1, 3, -1, -1)
        if before[1:] != (size, size):
            pixels = F.interpolate(pixels, (size, size), mode="bilinear", antialias=True, align_corners=False)
        return pixels.round().clamp(0, 255).to(torch.uint8)

    converted = torch.cat([convert(part) for part in images.split(1024)])
    said = f"converted from {before[0]}x{before[1]}x{before[2]}"
    return replace(result, images=converted, note=f"{result.note}; {said}" if result.note else said)
