"""Picture files (PNG, JPEG) as uint8 tensors: one at a time, or a folder with one folder per class."""

from __future__ import annotations

import os
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from stfseb.data.images import ImageSet
from stfseb.errors import StfsebError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path
    from typing import IO

    from torch import Tensor

SUFFIXES = (".png", ".jpg", ".jpeg")
_opening = threading.Lock()


def read_picture(path: Path, channels: int, size: int) -> Tensor:
    """Read one picture as uint8 (channels, size, size); see `decode_picture`."""
    try:
        with path.open("rb") as file:
            return decode_picture(file, str(path), channels, size)
    except FileNotFoundError:
        raise StfsebError(f"picture '{path}' does not exist: give another") from None
    except OSError as error:
        raise StfsebError(f"picture '{path}' cannot be read ({error.strerror}): replace or remove it") from None


def decode_picture(file: IO[bytes], name: str, channels: int, size: int, most_pixels: int | None = None) -> Tensor:
    """Decode PNG or JPEG as uint8 (channels, size, size).

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
            opened = Image.open(file, formats=("PNG", "JPEG"))
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
        raise StfsebError(f"picture '{name}' cannot be read as PNG or JPEG: replace or remove it") from error
    array = np.array(picture).reshape(size, size, channels)
    return torch.from_numpy(array).permute(2, 0, 1).contiguous()


def read_pictures(paths: Sequence[Path], channels: int, size: int) -> Tensor:
    """Read many pictures as uint8 (N, channels, size, size), in the order given."""
    import torch

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return torch.stack(list(pool.map(lambda path: read_picture(path, channels, size), paths)))


def class_names(folder: Path) -> tuple[str, ...]:
    """Return the names of the class folders, sorted; hidden ones do not count."""
    if not folder.is_dir():
        raise StfsebError(f"folder '{folder}' does not exist: name a folder with one folder of pictures per class")
    return tuple(sorted(entry.name for entry in folder.iterdir() if _is_class(entry)))


def _is_class(entry: Path) -> bool:
    return entry.is_dir() and not entry.name.startswith(".")


def picture_files(folder: Path) -> list[Path]:
    """List the pictures under a folder, sorted by path."""
    found = (p for p in folder.rglob("*") if p.suffix.lower() in SUFFIXES and not p.name.startswith("."))
    return sorted(path for path in found if path.is_file())


def read_unlabelled(name: str, folder: Path, channels: int, size: int) -> ImageSet:
    """Read every picture under a folder, without labels."""
    if not folder.is_dir():
        raise StfsebError(f"{name}: folder '{folder}' does not exist: name one with pictures")
    paths = picture_files(folder)
    if not paths:
        raise StfsebError(f"{name}: no PNG or JPEG under '{folder}': put some there, or name another folder")
    return ImageSet(name, read_pictures(paths, channels, size))


def read_classes(name: str, folder: Path, classes: Sequence[str], channels: int, size: int) -> ImageSet:
    """Read a folder with one folder per class; labels number the sorted `classes`."""
    import torch

    here = class_names(folder)
    if not here:
        raise StfsebError(f"{name}: '{folder}' has no class folders: put the pictures of each class in a folder")
    if strange := sorted(set(here) - set(classes)):
        raise StfsebError(
            f"{name}: '{folder / strange[0]}' is no class of this task ({', '.join(classes)}): rename or remove it"
        )
    paths: list[Path] = []
    labels: list[int] = []
    for label, title in enumerate(classes):
        pictures = picture_files(folder / title)
        if not pictures:
            raise StfsebError(f"{name}: class '{title}' has no PNG or JPEG in '{folder / title}': put some there")
        paths += pictures
        labels += [label] * len(pictures)
    return ImageSet(name, read_pictures(paths, channels, size), torch.tensor(labels), classes=tuple(classes))
