"""Picture files as uint8 tensors: one at a time, or a folder with one folder per class."""

from __future__ import annotations

import os
import threading
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from stfseb.data.images import ImageSet
from stfseb.errors import StfsebError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path
    from typing import IO

    from torch import Tensor

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff", ".ppm", ".pgm")  # as torchvision's folders
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "TIFF", "PPM")
KINDS = "PNG, JPEG, WebP, BMP, TIFF or PPM"
_SENT = ("PNG", "JPEG")  # what strangers may send: the fewer decoders they reach, the better
_OTHER_PICTURES = (".gif", ".heic", ".heif", ".avif", ".jfif", ".jp2", ".tga", ".psd", ".dng", ".cr2", ".nef", ".arw")
_QUIET = ("thumbs.db", "desktop.ini")  # what Windows leaves in folders of pictures
_opening = threading.Lock()


class LeftOutWarning(UserWarning):
    """Most pictures of a class are in formats that are not read."""


def read_picture(path: Path, channels: int, size: int) -> Tensor:
    """Read one picture as uint8 (channels, size, size); see `decode_picture`."""
    try:
        with path.open("rb") as file:
            return decode_picture(file, str(path), channels, size, formats=FORMATS)
    except FileNotFoundError:
        raise StfsebError(f"picture '{path}' does not exist: give another") from None
    except OSError as error:
        raise StfsebError(f"picture '{path}' cannot be read ({error.strerror}): replace or remove it") from None


def decode_picture(
    file: IO[bytes],
    name: str,
    channels: int,
    size: int,
    most_pixels: int | None = None,
    formats: tuple[str, ...] = _SENT,
) -> Tensor:
    """Decode PNG or JPEG (or others of Pillow's `formats`) as uint8 (channels, size, size).

    The shorter side is resized to `size`, the longer one is cropped about its middle, and a camera's
    orientation mark is obeyed. One channel means grey, three mean RGB; transparency is dropped. A picture whose
    header declares more than `most_pixels` (or what Pillow takes for an attack) is refused before it is decoded.
    """
    import numpy as np
    import torch
    from PIL import Image, ImageOps

    try:
        # Filters of warnings belong to the whole process, so that only one thread may change them at a time.
        with _opening, warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            opened = Image.open(file, formats=formats)
        with opened:
            if most_pixels is not None and opened.width * opened.height > most_pixels:
                raise StfsebError(
                    f"picture '{name}' has {opened.width} x {opened.height} pixels: at most {most_pixels:,} are taken"
                )
            if opened.mode.startswith(("I", "F")):
                raise StfsebError(f"'{name}' has more than 8 bits a pixel ({opened.mode}): save it with 8")
            picture = ImageOps.exif_transpose(opened).convert("L" if channels == 1 else "RGB")
            if picture.size != (size, size):
                picture = ImageOps.fit(picture, (size, size), Image.Resampling.BICUBIC)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise StfsebError(f"picture '{name}' is too large to be read safely: make it smaller") from None
    except StfsebError:
        raise
    except Exception as error:  # Pillow raises a dozen kinds on damaged or hostile bytes; all mean the same here
        kinds = "PNG or JPEG" if formats == _SENT else KINDS
        raise StfsebError(f"picture '{name}' cannot be read as {kinds}: replace or remove it") from error
    array = np.array(picture).reshape(size, size, channels)
    return torch.from_numpy(array).permute(2, 0, 1).contiguous()


def read_pictures(paths: Sequence[Path], channels: int, size: int) -> Tensor:
    """Read many pictures as uint8 (N, channels, size, size), in the order given; name all that cannot be read."""
    import torch

    read, unread = read_what_can_be(paths, channels, size)
    if unread:
        raise all_unread(unread, len(paths))
    return torch.stack(list(read.values()))


def read_what_can_be(
    paths: Sequence[Path], channels: int, size: int
) -> tuple[dict[Path, Tensor], dict[Path, StfsebError]]:
    """Return the pictures by path, and why others cannot be read, both in the order given."""

    def one(path: Path) -> Tensor | StfsebError:
        try:
            return read_picture(path, channels, size)
        except StfsebError as error:
            return error

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        found = list(zip(paths, pool.map(one, paths), strict=True))
    unread = {path: result for path, result in found if isinstance(result, StfsebError)}
    return {path: result for path, result in found if not isinstance(result, StfsebError)}, unread


def all_unread(unread: dict[Path, StfsebError], of: int) -> StfsebError:
    """Return one error for the pictures that cannot be read: how many, the first few, and why the first."""
    first = next(iter(unread.values()))
    if len(unread) == 1:
        return first
    named = ", ".join(f"'{path}'" for path in [*unread][:3])
    more = ", ..." if len(unread) > 3 else ""
    why = str(first).rpartition(": ")[0]
    return StfsebError(
        f"{len(unread)} of {of} pictures cannot be read ({named}{more}; the first: {why}): replace or remove them"
    )


def class_names(folder: Path) -> tuple[str, ...]:
    """Return the names of the class folders, sorted; hidden ones do not count."""
    if not folder.is_dir():
        raise StfsebError(f"folder '{folder}' does not exist: name a folder with one folder of pictures per class")
    return tuple(sorted(entry.name for entry in folder.iterdir() if _is_class(entry)))


def _is_class(entry: Path) -> bool:
    return entry.is_dir() and not entry.name.startswith(".")


def picture_files(folder: Path) -> list[Path]:
    """List the pictures under a folder, sorted by path."""
    return sorted_out(folder)[0]


def sorted_out(folder: Path) -> tuple[list[Path], Counter[str]]:
    """Return the pictures under a folder, sorted by path, and the endings of its other files with their numbers.

    Hidden files, and those that Windows leaves in folders, are neither.
    """
    found = sorted(path for path in folder.rglob("*") if not path.name.startswith(".") and path.is_file())
    pictures = [path for path in found if path.suffix.lower() in SUFFIXES]
    others = (path for path in found if path.suffix.lower() not in SUFFIXES and path.name.lower() not in _QUIET)
    visible = (path for path in others if not any(part.startswith(".") for part in path.relative_to(folder).parts))
    return pictures, Counter(path.suffix.lower() or "without an ending" for path in visible)


def left_out_in_words(others: dict[str, Counter[str]], most: int = 5) -> str:
    """Say which files of which folders were left out, by their endings; nothing where there are none."""
    named = [f"{listed_endings(endings)} in {folder}" for folder, endings in others.items() if endings]
    more = f", and of {len(named) - most} more folders" if len(named) > most else ""
    return f"left out, as they are not {KINDS}: {', '.join(named[:most])}{more}" if named else ""


def listed_endings(endings: Counter[str]) -> str:
    """Return "140 .heic, 3 .txt"."""
    return ", ".join(f"{count} {ending}" for ending, count in endings.most_common(4))


def read_unlabelled(name: str, folder: Path, channels: int, size: int) -> ImageSet:
    """Read every picture under a folder, without labels."""
    if not folder.is_dir():
        raise StfsebError(f"{name}: folder '{folder}' does not exist: name one with pictures")
    paths, others = sorted_out(folder)
    if not paths:
        there = f" (but {listed_endings(others)})" if others else ""
        raise StfsebError(f"{name}: no {KINDS} under '{folder}'{there}: put some there, or name another folder")
    warn_of_left_out(f"{name}: '{folder}'", len(paths), others, beyond=len(paths))
    return ImageSet(name, read_pictures(paths, channels, size), note=left_out_in_words({folder.name: others}))


def read_classes(name: str, folder: Path, classes: Sequence[str], channels: int, size: int) -> ImageSet:
    """Read a folder with one folder per class; labels number the sorted `classes`."""
    import torch

    here = class_names(folder)
    if not here:
        raise StfsebError(f"{name}: '{folder}' has no class folders: put the pictures of each class in a folder")
    if strange := sorted(set(here) - set(classes)):
        raise StfsebError(
            f"{name}: '{folder / strange[0]}' is no class of this task ({', '.join(classes)}): rename or remove it, "
            "or add pictures of it to train (and its name to 'classes', where the task has them)"
        )
    paths: list[Path] = []
    labels: list[int] = []
    left_out: dict[str, Counter[str]] = {}
    for label, title in enumerate(classes):
        pictures, left_out[title] = sorted_out(folder / title)
        if not pictures:
            there = f" (but {listed_endings(left_out[title])})" if left_out[title] else ""
            raise StfsebError(f"{name}: class '{title}' has no {KINDS} in '{folder / title}'{there}: put some there")
        warn_of_left_out(f"{name}: class '{title}'", len(pictures), left_out[title], beyond=len(pictures))
        paths += pictures
        labels += [label] * len(pictures)
    beside = sum(p.suffix.lower() in SUFFIXES and not p.name.startswith(".") for p in folder.iterdir() if p.is_file())
    notes = [f"left out: {beside} picture{'s' * (beside > 1)} beside the class folders"] if beside else []
    notes += filter(None, [left_out_in_words(left_out)])
    images = read_pictures(paths, channels, size)
    return ImageSet(name, images, torch.tensor(labels), "; ".join(notes), tuple(classes))


def warn_of_left_out(what: str, kept: int, others: Counter[str], *, beyond: int) -> None:
    """Warn where more than so many pictures were left out; files beside them that are no pictures do not count."""
    lost = Counter({ending: count for ending, count in others.items() if ending in _OTHER_PICTURES})
    if lost.total() > beyond:
        said = f"{what} keeps {kept} pictures, {listed_endings(lost)} are left out: convert them to one of {KINDS}"
        warnings.warn(said, LeftOutWarning, stacklevel=3)
