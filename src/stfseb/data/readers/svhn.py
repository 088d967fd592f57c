"""SVHN, cropped digits: MATLAB 5 files with X (32, 32, 3, N) and y (N, 1), the digit 0 written as 10."""

from __future__ import annotations

import io
import math
import struct
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from stfseb.data.images import ImageSet
from stfseb.data.readers.bounded import CAP, claim, class_indices, damaged, no_split, reading, subset_note

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

PUBLISHED = {"train": 73_257, "test": 26_032}
CLASSES = tuple("0123456789")
_HEADER, _MATRIX, _COMPRESSED = 128, 14, 15  # bytes before the first element; element types
_NUMERIC = {"uint8", "int8", "uint16", "int16", "uint32", "int32", "int64", "uint64", "single", "double"}


def _inflated(path: Path) -> bytes:
    """Return the file with every element uncompressed and every declared length checked.

    scipy trusts the lengths inside compressed elements, so they are unpacked here, under a bound, first.
    """
    claim(path, path.stat().st_size)
    raw = path.read_bytes()
    if len(raw) < _HEADER or raw[126:128] != b"IM" or raw[124:126] != b"\x00\x01":
        raise damaged(path, "not a little-endian MATLAB 5 file")
    parts, total, position = [raw[:_HEADER]], 0, _HEADER
    while position < len(raw):
        if position + 8 > len(raw):
            raise damaged(path, "truncated")
        kind, length = struct.unpack_from("<II", raw, position)
        if position + 8 + length > len(raw):
            raise damaged(path, f"truncated: an element of {length:,} bytes is cut short")
        element = raw[position : position + 8 + length]
        if kind == _COMPRESSED:
            unpacker = zlib.decompressobj()
            element = unpacker.decompress(memoryview(element)[8:], CAP - total)
            if not unpacker.eof:
                raise damaged(path, "a compressed element is truncated or too large")
            if len(element) < 8:
                raise damaged(path, "an empty compressed element")
            kind, length = struct.unpack_from("<II", element)
        if kind != _MATRIX or length != len(element) - 8:
            raise damaged(path, "an element that is not one whole array")
        total += len(element)
        claim(path, total)
        parts.append(element)
        position += 8 + struct.unpack_from("<I", raw, position + 4)[0]
    return b"".join(parts)


def read_mat(path: Path) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return X as (N, 3, 32, 32) and y as int64, 10 still standing for 0."""
    from scipy.io import loadmat, whosmat

    with reading(path):
        data = _inflated(path)
        stream: Any = io.BytesIO(data)  # scipy takes streams; its stubs know of paths only
        held = {name: (shape, kind) for name, shape, kind in whosmat(stream)}
        for name in ("X", "y"):
            if name not in held:
                raise damaged(path, f"it has no variable {name}, only {', '.join(held) or 'none'}")
            shape, kind = held[name]
            if kind not in _NUMERIC or math.prod(shape) > len(data):
                raise damaged(path, f"variable {name} is {kind} of shape {shape}")
        if len(held["X"][0]) == 3:  # MATLAB drops a last dimension of 1
            held["X"] = ((*held["X"][0], 1), held["X"][1])
        if held["X"][1] != "uint8" or held["X"][0][:3] != (32, 32, 3) or len(held["X"][0]) != 4:
            raise damaged(path, f"X is {held['X'][1]} of shape {held['X'][0]}, not uint8 (32, 32, 3, N)")
        stream.seek(0)
        arrays = loadmat(stream, variable_names=["X", "y"])
        pixels, labels = np.asarray(arrays["X"]), np.asarray(arrays["y"])
        if pixels.dtype != np.uint8 or labels.dtype.kind not in "iuf":
            raise damaged(path, f"X is {pixels.dtype} and y is {labels.dtype}")
        whole = labels.astype(np.int64)
        if not np.array_equal(whole, labels):
            raise damaged(path, "labels that are not whole numbers")
        images = np.ascontiguousarray(pixels.reshape(32, 32, 3, -1).transpose(3, 2, 0, 1))
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
