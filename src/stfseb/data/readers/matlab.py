"""MATLAB 5 files: numeric arrays by name, every declared length held against what is there.

scipy trusts the lengths inside an array, so that a damaged file takes much memory or ends the process.
"""

from __future__ import annotations

import math
import struct
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np

from stfseb.data.readers.bounded import CAP, claim, damaged

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

_HEADER, _MATRIX, _COMPRESSED = 128, 14, 15  # bytes before the first element; element types
_STORED = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}
_NUMERIC = {6: "f8", 7: "f4", 8: "i1", 9: "u1", 10: "i2", 11: "u2", 12: "i4", 13: "u4", 14: "i8", 15: "u8"}
_COMPLEX = 8


def read_arrays(path: Path, wanted: tuple[str, ...], cap: int = CAP) -> dict[str, NDArray[Any]]:
    """Return the `wanted` arrays of a file by name; the others are passed over."""
    found: dict[str, NDArray[Any]] = {}
    names = []
    for element in _elements(path, cap):
        name, array = _array(path, element, wanted)
        names.append(name)
        if array is not None:
            found[name] = array
    for name in wanted:
        if name not in found:
            raise damaged(path, f"it has no variable {name}, only {', '.join(names) or 'none'}")
    return found


def _elements(path: Path, cap: int) -> Iterator[memoryview]:
    """Yield the contents of every array, uncompressed."""
    claim(path, path.stat().st_size)
    raw = path.read_bytes()
    if len(raw) < _HEADER or raw[126:128] != b"IM" or raw[124:126] != b"\x00\x01":
        raise damaged(path, "not a little-endian MATLAB 5 file")
    total, position = 0, _HEADER
    while position < len(raw):
        if position + 8 > len(raw):
            raise damaged(path, "truncated")
        kind, length = struct.unpack_from("<II", raw, position)
        if position + 8 + length > len(raw):
            raise damaged(path, f"truncated: an element of {length:,} bytes is cut short")
        element = raw[position : position + 8 + length]
        position += 8 + length
        if kind == _COMPRESSED:
            unpacker = zlib.decompressobj()
            element = unpacker.decompress(memoryview(element)[8:], cap - total)
            if not unpacker.eof:
                raise damaged(path, "a compressed element is truncated or too large")
            if len(element) < 8:
                raise damaged(path, "an empty compressed element")
            kind, length = struct.unpack_from("<II", element)
        if kind != _MATRIX or length != len(element) - 8:
            raise damaged(path, "an element that is not one whole array")
        total += len(element)
        claim(path, total)
        yield memoryview(element)[8:]


def _array(path: Path, body: memoryview, wanted: tuple[str, ...]) -> tuple[str, NDArray[Any] | None]:
    """Return an array's name, and the array if it is wanted."""
    _, flags, position = _field(path, body, 0)
    kind, sizes, position = _field(path, body, position)
    _, label, position = _field(path, body, position)
    if len(flags) != 8 or kind != 5 or len(sizes) % 4:
        raise damaged(path, "an array without type and shape")
    name = bytes(label).decode("ascii", "replace")
    if not name.isprintable():
        raise damaged(path, "an array without a name")
    if name not in wanted:
        return name, None
    shape = struct.unpack(f"<{len(sizes) // 4}i", sizes)
    if flags[0] not in _NUMERIC or flags[1] & _COMPLEX:
        raise damaged(path, f"variable {name} is not of real numbers")
    kind, values, _ = _field(path, body, position)
    if kind not in _STORED or min(shape, default=0) < 0:
        raise damaged(path, f"variable {name} of shape {shape} has values of type {kind}")
    stored = np.dtype(f"<{_STORED[kind]}")  # small whole numbers may be kept in fewer bytes than their type has
    numeric = np.dtype(f"<{_NUMERIC[flags[0]]}")
    if math.prod(shape) * stored.itemsize != len(values) or not np.can_cast(stored, numeric):
        raise damaged(path, f"variable {name} of shape {shape} has {len(values):,} bytes of {stored}")
    array = np.frombuffer(values, stored).astype(numeric, copy=False)
    return name, array.reshape(shape, order="F")


def _field(path: Path, body: memoryview, position: int) -> tuple[int, memoryview, int]:
    """Return the type and bytes of the part of an array at `position`, and where the next one begins."""
    if position + 8 > len(body):
        raise damaged(path, "an array is cut short")
    kind, length = struct.unpack_from("<II", body, position)
    start, after = position + 8, position + 8 + length + -length % 8
    if kind >> 16:  # up to four bytes: type and length share a word
        kind, length, start, after = kind & 0xFFFF, kind >> 16, position + 4, position + 8
        if length > 4:
            raise damaged(path, "a short part of an array that is too long")
    if start + length > len(body):
        raise damaged(path, f"a part of an array of {length:,} bytes is cut short")
    return kind, body[start : start + length], after
