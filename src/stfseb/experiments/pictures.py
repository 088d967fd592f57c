"""Image files and arrays of a user's own, brought to what a saved model takes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from stfseb.data.arrays import load_arrays
from stfseb.data.pictures import KINDS, listed_endings, read_pictures, read_what_can_be, sorted_out, warn_of_left_out
from stfseb.errors import StfsebError
from stfseb.inputs import as_tensor, check_pixels

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

ARRAYS = (".npy", ".npz")


def read_inputs(
    path: Path, shape: tuple[int, ...], unread: dict[Path, StfsebError] | None = None
) -> tuple[list[str], Tensor]:
    """Return names and images (N, C, H, W) from an image file, a folder of them, or an array of images.

    Names are paths as given: of images in two folders, file names alone would not tell which is which. Pictures that
    cannot be read are left out where `unread` takes what is said of them, else they are an error.
    """
    if path.is_dir():
        files, others = sorted_out(path)
        if not files:
            there = f" (but {listed_endings(others)})" if others else ""
            raise StfsebError(f"{path} holds no {KINDS} file{there}: give another folder, files, or an .npy array")
        warn_of_left_out(str(path), len(files), others, beyond=0)
        return _pictures(files, shape, unread)
    if not path.is_file():
        raise StfsebError(f"{path} does not exist: give image files, a folder of them, or an .npy array")
    if path.suffix.lower() in ARRAYS:
        images = _as_images(_array(path), shape, path)
        return [f"{path}[{i}]" for i in range(len(images))], images
    return _pictures([path], shape, unread)


def _pictures(
    paths: list[Path], shape: tuple[int, ...], unread: dict[Path, StfsebError] | None
) -> tuple[list[str], Tensor]:
    """Read pictures as the folders of a task are read: what a model is asked must look like what it learnt."""
    channels, height, width = shape
    if height != width:
        raise StfsebError(f"the model takes images of {width} x {height} pixels: give them as an .npy array")
    if unread is None:
        return [str(path) for path in paths], read_pictures(paths, channels, height)
    read, failed = read_what_can_be(paths, channels, height)
    unread.update(failed)
    none = torch.empty((0, *shape), dtype=torch.uint8)
    return [str(path) for path in read], torch.stack([*read.values()]) if read else none


def _array(path: Path) -> np.ndarray[Any, Any]:
    arrays = load_arrays(path)  # refuses what a header claims and the file does not hold
    name = "images" if "images" in arrays else next(iter(arrays)) if len(arrays) == 1 else None
    if name is None:
        raise StfsebError(f"{path} holds {', '.join(arrays) or 'no arrays'}: give one array, or name it 'images'")
    return arrays[name]


def _as_images(array: np.ndarray[Any, Any], shape: tuple[int, ...], path: Path) -> Tensor:
    """Accept (N, C, H, W), (N, H, W, C), (N, H, W) for one channel, and a single image."""
    channels, height, width = shape
    if array.dtype != np.uint8 and not np.issubdtype(array.dtype, np.floating):
        raise StfsebError(f"{path} has dtype {array.dtype}: give uint8 pixels or floating point in [0, 1]")
    if array.shape == (height, width):
        array = array[None, None]
    elif array.shape in ((channels, height, width), (height, width, channels)):
        array = array[None]
    elif array.ndim == 3 and array.shape[1:] == (height, width) and channels == 1:
        array = array[:, None]
    if array.shape[1:] == (height, width, channels) and array.shape[1:] != shape:
        array = array.transpose(0, 3, 1, 2)
    if array.shape[1:] != shape:
        raise StfsebError(f"{path} has shape {array.shape}: the model takes images of shape {shape}")
    images = as_tensor(array, str(path))
    if images.is_floating_point() and len(images):
        check_pixels(images, str(path))
        low, high = float(images.min()), float(images.max())
        if low < -0.5 or high > 1.5:
            raise StfsebError(f"{path} has values from {low:g} to {high:g}: give uint8, or floating point in [0, 1]")
    return images
