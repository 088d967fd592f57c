"""What every reader shares: bounds kept before memory is asked for, and one-line errors that name the file.

A header is a claim. It is held against the size of the real file, and against a cap, before anything is
allocated; compressed streams are read to the declared length plus one byte, never to their end.
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from stfseb.errors import StfsebError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

CAP = 2**29  # bytes; the largest published array of any set here has 225 million
DEFLATE_RATIO = 1032  # no DEFLATE stream expands further, so a larger claim is false
_PIECE = 1 << 22


class Readable(Protocol):
    """Anything bytes can be read from: a file, a gzip stream, a member of a zip."""

    def read(self, size: int = -1, /) -> bytes:
        """Read up to `size` bytes."""


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn whatever a parser raises on damaged or hostile bytes into one line that names the file."""
    try:
        yield
    except StfsebError:
        raise
    except FileNotFoundError as fault:
        raise missing(path) from fault
    except Exception as fault:  # parsers raise a dozen types on bad bytes; all mean the same to the user
        raise damaged(path, str(fault) or type(fault).__name__) from fault


def missing(path: Path) -> StfsebError:
    """Return the error for a file that is not on disk."""
    return StfsebError(
        f"{path} is not there: fetch it with `stfseb data download`, put a copy in its place with "
        "`stfseb data import PATH`, or set STFSEB_DATA to the folder that holds it"
    )


def damaged(path: Path, reason: str) -> StfsebError:
    """Return the error for a file that is not what its name says."""
    short = " ".join(reason.split())[:200]
    return StfsebError(f"{path} cannot be used ({short}): replace it with the published file")


def claim(path: Path, count: int, compressed: int | None = None) -> int:
    """Return the number of bytes a header declares if the real size of its file can bear it."""
    if count < 0 or count > CAP:
        raise damaged(path, f"its header declares {count:,} bytes, more than the {CAP:,} ever read")
    if compressed is not None and count > DEFLATE_RATIO * compressed + 64:
        raise damaged(path, f"its header declares {count:,} bytes, which {compressed:,} cannot hold")
    return count


def exactly(path: Path, stream: Readable, count: int) -> bytearray:
    """Read the `count` bytes left in `stream`; one fewer or one more is an error."""
    data = bytearray()
    while len(data) < count:
        piece = stream.read(min(_PIECE, count - len(data)))
        if not piece:
            raise damaged(path, f"truncated: {len(data):,} of {count:,} bytes")
        data += piece
    if stream.read(1):  # also makes gzip and zip compare their checksums
        raise damaged(path, f"it holds more than the {count:,} bytes its header declares")
    return data


def npy_header(path: Path, stream: Readable) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Read a .npy header: shape and plain numeric type in C order; anything else is refused."""
    version = np.lib.format.read_magic(stream)
    if version == (1, 0):
        shape, fortran, dtype = np.lib.format.read_array_header_1_0(stream)
    elif version == (2, 0):
        shape, fortran, dtype = np.lib.format.read_array_header_2_0(stream)
    else:
        raise damaged(path, f"unknown .npy version {version}")
    if dtype.hasobject:
        raise damaged(path, "it holds pickled Python objects, which are never loaded")
    if dtype.kind not in "iu":
        raise damaged(path, f"integers are expected, not {dtype}")
    if fortran and len(shape) > 1:
        raise damaged(path, "arrays in Fortran order are not read")
    if any(isinstance(side, bool) or side < 0 for side in shape):
        raise damaged(path, f"impossible shape {shape}")
    return shape, dtype


def mapped_npy(path: Path) -> NDArray[Any]:
    """Map a .npy file into memory after its header has been held against its size; nothing is copied."""
    with reading(path):
        size = path.stat().st_size
        with path.open("rb") as stream:
            shape, dtype = npy_header(path, stream)
            start = stream.tell()
        count = claim(path, math.prod(shape) * dtype.itemsize)
        if start + count != size:
            raise damaged(path, f"shape {shape} needs {start + count:,} bytes, the file has {size:,}")
        if count == 0:
            return np.zeros(shape, dtype)
        # Copy-on-write: tensors over the map count as writable, yet the file cannot be changed.
        return np.memmap(path, dtype, mode="c", offset=start, shape=shape)


def class_indices(path: Path, labels: NDArray[Any], count: int, classes: int) -> NDArray[np.int64]:
    """Return `count` labels as int64 if each is one of the classes 0 .. classes - 1."""
    flat = labels.reshape(-1)
    if len(flat) != count or (labels.ndim > 1 and labels.shape[0] != count):
        raise damaged(path, f"{count:,} images but labels of shape {labels.shape}")
    if count and (int(flat.min()) < 0 or int(flat.max()) >= classes):
        raise damaged(path, f"labels from {flat.min()} to {flat.max()}, not within 0 to {classes - 1}")
    return flat.astype(np.int64)


def subset_note(count: int, published: int, split: str) -> str:
    """Say when fewer (or more) images are on disk than were published."""
    if count == published:
        return ""
    if count < published:
        return f"subset: {count:,} of {published:,} {split} images"
    return f"{count:,} {split} images, where {published:,} are published"


def no_split(name: str, split: str, splits: tuple[str, ...]) -> StfsebError:
    """Return the error for a split that a set was never published with."""
    return StfsebError(f"{name} has no split '{split}': it was published with {', '.join(splits)}")
