"""A user's own images in .npy or .npz: integers 0 to 255 or floats 0 to 1, never pickled objects.

Shapes (N, H, W), (N, C, H, W) and (N, H, W, C) with one or three channels are understood. A header is held
against the size of its file before memory is asked for.
"""

from __future__ import annotations

import math
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from stfseb.data.images import ImageSet
from stfseb.errors import StfsebError, unknown

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from stfseb.data.sources import Source

CAP = 2**33  # bytes of one array inside an .npz
DEFLATE_RATIO = 1032  # no DEFLATE stream expands further


def read_array(source: Source, name: str, labelled: bool) -> ImageSet:
    """Read the images of a source and, where it has them, the labels."""
    path = Path(source.where)
    arrays = load_arrays(path)
    labels: NDArray[Any] | None = None
    if path.suffix == ".npz":
        image_key = source.images or _only(path, "images", [k for k, a in arrays.items() if a.ndim >= 3])
        images = _named(path, arrays, image_key)
        key = source.labels
        if key is None and labelled:
            key = _only(path, "labels", [k for k, a in arrays.items() if k != image_key and _is_labels(a)])
        if key is not None and key.endswith(".npy"):
            labels = load_arrays(Path(key))[""]
        elif key is not None:
            labels = _named(path, arrays, key)
    else:
        images = arrays[""]
        if source.labels is not None:
            labels = load_arrays(Path(source.labels))[""]
    if labelled and labels is None:
        raise StfsebError(f"{name}: '{path}' has no labels: name an array file with 'labels:'")
    return ImageSet(name, _pixels(path, images), None if labels is None else _labels(path, labels, len(images)))


def load_arrays(path: Path) -> dict[str, NDArray[Any]]:
    """Load a .npy (under the name "") or every array of an .npz."""
    try:
        if path.suffix == ".npy":
            return {"": np.load(path, mmap_mode="r", allow_pickle=False)}
        with zipfile.ZipFile(path) as archive:
            return {
                entry.filename.removesuffix(".npy"): _member(path, archive, entry)
                for entry in archive.infolist()
                if entry.filename.endswith(".npy")
            }
    except FileNotFoundError:
        raise StfsebError(f"array file '{path}' does not exist") from None
    except StfsebError:
        raise
    except Exception as fault:  # numpy and zipfile raise a dozen types on bad bytes
        reason = " ".join(str(fault).split())[:160]
        raise StfsebError(f"array file '{path}' cannot be read ({reason}): save it again with numpy") from None


def _member(path: Path, archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> NDArray[Any]:
    if entry.file_size > min(CAP, DEFLATE_RATIO * path.stat().st_size + 64):
        raise StfsebError(f"array file '{path}' declares {entry.file_size:,} bytes for '{entry.filename}': refused")
    with archive.open(entry) as stream:
        version = np.lib.format.read_magic(stream)
        read_header = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }.get(version)
        if read_header is None:
            raise StfsebError(f"array file '{path}': unknown .npy version {version} in '{entry.filename}'")
        shape, fortran, dtype = read_header(stream)
        if dtype.hasobject:
            raise StfsebError(f"array file '{path}' holds pickled objects in '{entry.filename}': refused")
        data = stream.read(math.prod(shape) * dtype.itemsize)
    return np.frombuffer(data, dtype).reshape(shape, order="F" if fortran else "C")


def _is_labels(array: NDArray[Any]) -> bool:
    return array.dtype.kind in "iu" and (array.ndim == 1 or (array.ndim == 2 and array.shape[1] == 1))


def _only(path: Path, what: str, found: list[str]) -> str:
    if what in found:
        return what
    if len(found) != 1:
        raise StfsebError(f"'{path}' has {len(found)} arrays that could be {what}: name one with '{what}: NAME'")
    return found[0]


def _named(path: Path, arrays: dict[str, NDArray[Any]], key: str) -> NDArray[Any]:
    if key not in arrays:
        raise unknown(f"array in '{path}'", key, arrays)
    return arrays[key]


def _pixels(path: Path, images: NDArray[Any]) -> torch.Tensor:
    if images.ndim == 3:
        images = images[:, None]
    elif images.ndim == 4 and images.shape[1] not in (1, 3) and images.shape[-1] in (1, 3):
        images = images.transpose(0, 3, 1, 2)
    if images.ndim != 4 or images.shape[1] not in (1, 3):
        raise StfsebError(f"'{path}': shape {images.shape} is no set of grey or RGB images (N, H, W[, C])")
    if not len(images):
        raise StfsebError(f"'{path}' is empty: at least one image is needed")
    low, high = images.min(), images.max()
    if images.dtype.kind == "f":
        if not (low >= 0 and high <= 1):  # NaN fails as well
            raise StfsebError(f"'{path}': float pixels must be finite and from 0 to 1, not {low} to {high}")
        images = np.rint(images * 255)
    elif images.dtype.kind not in "iu" or low < 0 or high > 255:
        raise StfsebError(f"'{path}': pixels must be integers from 0 to 255, not {images.dtype} {low} to {high}")
    return torch.from_numpy(np.array(images, dtype=np.uint8, order="C"))


def _labels(path: Path, labels: NDArray[Any], count: int) -> torch.Tensor:
    if not _is_labels(labels) or len(labels) != count:
        raise StfsebError(
            f"'{path}': {count} images need {count} integer labels, not {labels.dtype} of shape {labels.shape}"
        )
    return torch.from_numpy(labels.reshape(-1).astype(np.int64))
