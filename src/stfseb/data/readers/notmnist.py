"""notMNIST (small): a .tar.gz of 28 x 28 grey PNGs, the letter in the folder's name; read in one pass.

Nothing is unpacked to disk. The published archive has a few empty PNGs; they are counted in the note.
"""

from __future__ import annotations

import gzip
import io
import struct
import tarfile
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

import numpy as np
import torch
from PIL import Image

from stfseb.data.images import ImageSet
from stfseb.data.readers.bounded import DEFLATE_RATIO, damaged, no_split, reading, subset_note

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from stfseb.data.readers.bounded import Readable

PUBLISHED = 18_724  # readable images
CLASSES = tuple("ABCDEFGHIJ")
UNPACKED = 2**27  # bytes of tar; the published archive has about a quarter
MEMBERS = 100_000
MEMBER = 2**16  # bytes; a 28 x 28 PNG has a few hundred
UNREADABLE = 100  # more than this is a damaged archive, not the publisher's handful of empty files


class _Bounded(io.RawIOBase):
    """A stream that ends in an error once it has given `limit` bytes, whoever asks for them."""

    def __init__(self, path: Path, stream: Readable, limit: int) -> None:
        self.path, self.stream, self.left = path, stream, limit

    def read(self, size: int = -1) -> bytes:
        """Read up to `size` bytes."""
        data = self.stream.read(min(size, 1 << 16) if size >= 0 else 1 << 16)
        self.left -= len(data)
        if self.left < 0:
            raise damaged(self.path, "it unpacks to more than a notMNIST archive can hold")
        return data


def _letter(path: Path, member: tarfile.TarInfo) -> int | None:
    """Return the class of a member, None for folders and hidden files; refuse what is not a plain image."""
    name = PurePosixPath(member.name)
    if name.is_absolute() or ".." in name.parts:
        raise damaged(path, f"member {member.name!r} points outside the archive")
    if member.isdir():
        return None
    if not member.isreg() or member.issparse():
        raise damaged(path, f"member {member.name!r} is not a regular file")
    if member.size > MEMBER:
        raise damaged(path, f"member {member.name!r} declares {member.size:,} bytes, more than {MEMBER:,}")
    if name.name.startswith("."):
        return None
    if name.suffix != ".png" or name.parent.name not in CLASSES:
        raise damaged(path, f"member {member.name!r} is not LETTER/NAME.png with a letter from A to J")
    return CLASSES.index(name.parent.name)


def _pixels(path: Path, name: str, data: bytes) -> NDArray[np.uint8] | None:
    """Decode one PNG; None when it is damaged. Its declared size is checked before it is decoded."""
    if len(data) < 29 or not data.startswith(b"\x89PNG\r\n\x1a\n"):
        return None
    sides = struct.unpack_from(">II", data, 16)
    if sides != (28, 28):
        raise damaged(path, f"member {name!r} declares {sides[0]} x {sides[1]} pixels, not 28 x 28")
    try:
        image = Image.open(io.BytesIO(data), formats=("PNG",))
        pixels = np.asarray(image)
    except Exception:  # a damaged PNG fails in many ways; all count as one unreadable image
        return None
    if pixels.shape != (28, 28) or pixels.dtype != np.uint8:
        raise damaged(path, f"member {name!r} is not an 8-bit grey image")
    return pixels


def read_archive(path: Path) -> tuple[NDArray[np.uint8], NDArray[np.int64], int]:
    """Return images and labels in the order of the members' names, and how many were unreadable."""
    found: list[tuple[str, int, NDArray[np.uint8]]] = []
    unreadable = 0
    with reading(path):
        limit = min(UNPACKED, DEFLATE_RATIO * path.stat().st_size + 64)
        with gzip.open(path, "rb") as unzipped:
            stream = _Bounded(path, unzipped, limit)
            with tarfile.open(fileobj=stream, mode="r|") as archive:
                for number, member in enumerate(archive):
                    if number >= MEMBERS:
                        raise damaged(path, f"more than {MEMBERS:,} members")
                    letter = _letter(path, member)
                    body = archive.extractfile(member)
                    if letter is None or body is None:
                        continue
                    pixels = _pixels(path, member.name, body.read())
                    if pixels is None:
                        unreadable += 1
                    else:
                        found.append((f"{letter}/{PurePosixPath(member.name).name}", letter, pixels))
                    archive.members = []  # type: ignore[attr-defined]  # a stream needs no index
            while stream.read(1 << 16):  # to the end, where gzip compares its checksum
                pass
    if not found:
        raise damaged(path, "it holds no readable image")
    if unreadable > UNREADABLE:
        raise damaged(path, f"{unreadable:,} of its images cannot be read")
    found.sort(key=lambda entry: entry[0])
    images = np.stack([pixels for _, _, pixels in found])
    return images, np.array([letter for _, letter, _ in found], np.int64), unreadable


def read(name: str, folder: Path, split: str) -> ImageSet:
    """Read `notmnist`; its one split is `test`."""
    if split != "test":
        raise no_split(name, split, ("test",))
    images, labels, unreadable = read_archive(folder / "notmnist" / "notMNIST_small.tar.gz")
    notes = [
        subset_note(len(images), PUBLISHED, split),
        f"{unreadable} unreadable images" if unreadable else "",
    ]
    return ImageSet(
        name,
        torch.from_numpy(images).unsqueeze(1),
        torch.from_numpy(labels),
        "; ".join(note for note in notes if note),
        CLASSES,
    )
