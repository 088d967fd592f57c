"""Small files in the publishers' formats, written with other code than the readers use."""

from __future__ import annotations

import gzip
import io
import struct
import tarfile
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image
from scipy.io import savemat

if TYPE_CHECKING:
    from pathlib import Path

MEDICAL = {
    "pathmnist": (9, True),
    "dermamnist": (7, True),
    "bloodmnist": (8, True),
    "breastmnist": (2, False),
}
MEDICAL |= dict.fromkeys(("organamnist", "organcmnist", "organsmnist"), (11, False))


def pixels(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def idx_bytes(array: np.ndarray) -> bytes:
    return struct.pack(f">I{array.ndim}I", 0x0800 + array.ndim, *array.shape) + array.tobytes()


def png_bytes(array: np.ndarray) -> bytes:
    out = io.BytesIO()
    Image.fromarray(array).save(out, "PNG")
    return out.getvalue()


def tar_bytes(members: list[tuple[str, bytes]]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for name, data in members:
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return out.getvalue()


def put(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def write_idx(folder: Path, count: int = 6) -> tuple[np.ndarray, np.ndarray]:
    images, labels = pixels(count, 28, 28), (np.arange(count) % 10).astype(np.uint8)
    put(folder / "t10k-images-idx3-ubyte.gz", gzip.compress(idx_bytes(images)))
    put(folder / "t10k-labels-idx1-ubyte.gz", gzip.compress(idx_bytes(labels)))
    return images, labels


def write_mat(path: Path, count: int = 5, compress: bool = True) -> tuple[np.ndarray, np.ndarray]:
    images, digits = pixels(32, 32, 3, count), (1 + np.arange(count) % 10).astype(np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    savemat(path, {"X": images, "y": digits[:, None]}, do_compression=compress)
    return images, digits


def write_medical(folder: Path, name: str, count: int = 4) -> dict[str, np.ndarray]:
    classes, colour = MEDICAL[name]
    arrays = {}
    for number, split in enumerate(("train", "val", "test")):
        arrays[f"{split}_images"] = pixels(count + number, 28, 28, *((3,) if colour else ()), seed=number)
        arrays[f"{split}_labels"] = (np.arange(count + number) % classes).astype(np.uint8)[:, None]
    folder.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(folder / f"{name}.npz", **arrays)
    return arrays
