"""One corruption of a whole array of images, block by block, each block with a generator of its own.

What comes out depends on the images, the type, the severity and the seed, and on nothing else: not on the
number of processes, nor on which other corruptions were made.
"""

from __future__ import annotations

import zlib
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from stfseb.data.corruptions import colour_digital, colour_noise_blur, colour_weather, digits
from stfseb.errors import StfsebError

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.random import Generator

    from stfseb.data.corruptions.operators import Bytes

VERSION = 1  # part of every cache key: raise it when a recipe or the drawing of its numbers changes
BLOCK = 250


def corrupted(
    images: Bytes, suite: str, kind: str, severity: int, seed: int = 0, textures: str | Path | None = None
) -> Bytes:
    """Return uint8 images (N, C, H, W) under one corruption; `textures` is the folder of the frost pictures."""
    recipe = _recipe(suite, kind, severity, textures)
    name = zlib.crc32(f"{suite}/{kind}".encode())
    out = np.empty_like(images)
    for block, start in enumerate(range(0, len(images), BLOCK)):
        rng = np.random.default_rng(np.random.SeedSequence([seed, name, severity, block]))
        part = images[start : start + BLOCK]
        if suite == "mnist-c":
            out[start : start + BLOCK, 0] = recipe(part[:, 0], rng)
        else:
            last = np.ascontiguousarray(np.moveaxis(part, 1, 3))
            out[start : start + BLOCK] = np.moveaxis(recipe(last, rng), 3, 1)
    return out


def _recipe(suite: str, kind: str, severity: int, textures: str | Path | None) -> Callable[[Bytes, Generator], Bytes]:
    if suite == "mnist-c":
        found: Callable[[Bytes, Generator], Bytes] = getattr(digits, kind)
        return found
    if kind == "frost":
        if textures is None:
            raise StfsebError("frost needs its textures: give the folder that holds frost1.png to frost5.jpg")
        pictures = _textures(Path(textures))
        return lambda pixels, rng: colour_weather.frost(pixels, severity, rng, pictures)
    for module in (colour_noise_blur, colour_weather, colour_digital):
        recipe: Any = getattr(module, kind, None)
        if recipe is not None:
            return lambda pixels, rng: recipe(pixels, severity, rng)
    raise StfsebError(f"no recipe for {suite} corruption '{kind}'")


@lru_cache(maxsize=2)
def _textures(folder: Path) -> tuple[Bytes, ...]:
    return colour_weather.read_textures(folder)
