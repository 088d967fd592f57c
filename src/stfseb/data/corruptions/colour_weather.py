"""CIFAR-10-C: snow, frost, fog and spatter."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from scipy import ndimage

from stfseb.data.corruptions.operators import (
    blurred,
    fogged,
    motion_blurred,
    plasma,
    truncated,
    unit,
    zoom_matrix,
)
from stfseb.errors import StfsebError

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.random import Generator

    from stfseb.data.corruptions.operators import Bytes, Floats

# loc, scale, zoom, threshold, blur radius, blur sigma, mix
SNOW = (
    (0.1, 0.2, 1.0, 0.6, 8, 3, 0.95),
    (0.1, 0.2, 1.0, 0.5, 10, 4, 0.9),
    (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
    (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
    (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
)
FROST_IMAGE_TEXTURE = ((1.0, 0.2), (1.0, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45))
FOG_STRENGTH_DECAY = ((0.2, 3.0), (0.5, 3.0), (0.75, 2.5), (1.0, 2.0), (1.5, 1.75))
# loc, scale, sigma, threshold, intensity (water) or sigma of the mask (mud), mud?
SPATTER = (
    (0.62, 0.1, 0.7, 0.7, 0.5, False),
    (0.65, 0.1, 0.8, 0.7, 0.5, False),
    (0.65, 0.3, 1.0, 0.69, 0.5, False),
    (0.65, 0.1, 0.7, 0.69, 0.6, True),
    (0.65, 0.1, 0.5, 0.68, 0.6, True),
)
GREY = np.array([0.299, 0.587, 0.114])
MUD = np.array([63, 42, 20]) / 255
WATER = np.array([175, 238, 238]) / 255
TEXTURES = ("frost1.png", "frost2.png", "frost3.png", "frost4.jpg", "frost5.jpg")  # a sixth was never drawn


def snow(pixels: Bytes, severity: int, rng: Generator) -> Bytes:
    """Whiten the image and add a field of streaks, once as drawn and once turned by 180 degrees."""
    loc, scale, zoom, threshold, radius, sigma, mix = SNOW[severity - 1]
    x = unit(pixels)
    enlarge = zoom_matrix(pixels.shape[1], zoom)
    layer = enlarge @ rng.normal(loc, scale, pixels.shape[:3]) @ enlarge.T
    layer = np.where(layer < threshold, 0, layer)
    streaks = unit(motion_blurred(truncated(layer), radius, sigma, rng.uniform(-135, -45, len(x))))
    pale = np.maximum(x, (x @ GREY)[..., None] * 1.5 + 0.5)
    return truncated(mix * x + (1 - mix) * pale + (streaks + streaks[:, ::-1, ::-1])[..., None])


def read_textures(folder: Path) -> tuple[Bytes, ...]:
    """Read the frost textures at a fifth of their size.

    Bilinear reduction by exactly 5 without smoothing reads every fifth pixel, starting at 2.
    """
    from PIL import Image

    textures = []
    for name in TEXTURES:
        path = folder / name
        try:
            with Image.open(path, formats=("PNG", "JPEG")) as image:
                if image.width > 4000 or image.height > 4000:
                    raise StfsebError(f"{path} declares {image.width} x {image.height} pixels: not a frost texture")
                texture = np.asarray(image.convert("RGB"))[2::5, 2::5]
        except (OSError, SyntaxError, ValueError) as fault:
            if isinstance(fault, StfsebError):
                raise
            raise StfsebError(
                f"frost texture {path} cannot be read: put {TEXTURES[0]} to {TEXTURES[-1]} there, "
                "or leave the type frost out"
            ) from fault
        if min(texture.shape[:2]) <= 32:
            raise StfsebError(f"{path} is too small for a frost texture: more than 160 pixels a side are needed")
        textures.append(texture)
    return tuple(textures)


def frost(pixels: Bytes, severity: int, rng: Generator, textures: tuple[Bytes, ...]) -> Bytes:
    """Mix the image with a random crop of a random texture."""
    keep, weight = FROST_IMAGE_TEXTURE[severity - 1]
    height, width = pixels.shape[1:3]
    crops = np.empty_like(pixels)
    for crop, choice, place in zip(
        crops, rng.integers(len(textures), size=len(pixels)), rng.random((len(pixels), 2)), strict=True
    ):
        texture = textures[choice]
        top = int(place[0] * (texture.shape[0] - height))
        left = int(place[1] * (texture.shape[1] - width))
        crop[:] = texture[top : top + height, left : left + width]
    return truncated(keep * unit(pixels) + weight * unit(crops))


def fog(pixels: Bytes, severity: int, rng: Generator) -> Bytes:
    """Add a diamond-square fractal, the same for the three channels, and dim."""
    strength, decay = FOG_STRENGTH_DECAY[severity - 1]
    return truncated(fogged(unit(pixels), plasma(len(pixels), pixels.shape[1], decay, rng)[..., None], strength))


def spatter(pixels: Bytes, severity: int, rng: Generator) -> Bytes:
    """Drops of water (severities 1 to 3) or specks of mud (4 and 5)."""
    loc, scale, sigma, threshold, last, mud = SPATTER[severity - 1]
    field = blurred(rng.normal(loc, scale, pixels.shape[:3]), sigma)
    if mud:
        mask = blurred((field > threshold).astype(float), last)
        mask = np.where(mask < 0.8, 0, mask)[..., None]
        return truncated(unit(pixels) * (1 - mask) + mask * MUD)
    field = np.where(field < threshold, 0, field)
    drops = np.stack([_drops(truncated(one)) for one in field])
    peak = drops.max((1, 2), keepdims=True)
    drops = last * drops / np.where(peak > 0, peak, 1)
    return truncated(unit(pixels) + drops[..., None] * WATER)


def _drops(field: Bytes) -> Floats:
    """Shade one field of drops by the distance to their edges.

    The published images were made with OpenCV's operators; these are scikit-image's and scipy's, near, not equal.
    """
    from skimage import feature

    canny: Any = feature.canny
    edges = canny(field.astype(float), sigma=0, low_threshold=50, high_threshold=150)
    distance = ndimage.distance_transform_edt(~edges) if edges.any() else np.full(field.shape, 20.0)
    near = ndimage.uniform_filter(np.minimum(distance, 20), 3, mode="mirror").astype(np.uint8)
    light = ndimage.correlate(
        _equalised(near).astype(float), np.array([[-2, -1, 0], [-1, 1, 1], [0, 1, 2]]), mode="mirror"
    )
    shade = np.floor(ndimage.uniform_filter(np.clip(light, 0, 255), 3, mode="mirror") + 0.5)
    drops: Floats = field.astype(float) * shade
    return drops


def _equalised(image: Bytes) -> Bytes:
    """Equalise a histogram: the lowest level present becomes 0, the cumulative share above it spans 0 .. 255."""
    counts = np.bincount(image.ravel(), minlength=256)
    lowest = int(np.flatnonzero(counts)[0])
    if counts[lowest] == image.size:
        return image
    above = np.cumsum(counts) - counts[lowest]
    table = np.rint(np.clip(above, 0, None) * 255 / (image.size - counts[lowest])).astype(np.uint8)
    equal: Bytes = table[image]
    return equal
