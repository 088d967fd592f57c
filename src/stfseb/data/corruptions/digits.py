"""MNIST-C: fifteen corruptions of 28 x 28 digits (n, 28, 28), each at the one severity that was published.

Mu and Gilmer, "MNIST-C: A Robustness Benchmark for Computer Vision", 2019. Output is rounded to bytes.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from stfseb.data.corruptions.operators import (
    blurred,
    fogged,
    motion_blurred,
    plasma,
    rounded,
    salt_and_pepper,
    truncated,
    unit,
)

if TYPE_CHECKING:
    from numpy.random import Generator

    from stfseb.data.corruptions.operators import Bytes, Floats

SIZE, CENTRE = 28, 13.5
ANGLE = 0.4  # radians, of shear and rotate
TOOTH = 2.0  # zigzag: pixels from the axis to a tip, along the axis and away from it
FRACTAL = 256


def shot_noise(pixels: Bytes, rng: Generator) -> Bytes:
    """Poisson(3 x) / 3."""
    return rounded(rng.poisson(3 * unit(pixels)) / 3)


def impulse_noise(pixels: Bytes, rng: Generator) -> Bytes:
    """Salt and pepper on a fraction 0.17 of the pixels."""
    return rounded(salt_and_pepper(unit(pixels), 0.17, rng))


def glass_blur(pixels: Bytes, rng: Generator) -> Bytes:
    """Blur, two passes of exchanges with a neighbour at {-1, 0}, blur; the blur runs down the rows only.

    Here pixels are truly exchanged (unlike CIFAR-10-C's), so places are visited one by one, all images at once.
    """
    x = truncated(blurred(unit(pixels), (0.7, 0.0)))
    every = np.arange(len(x))
    for _ in range(2):
        for row in range(SIZE - 1, 1, -1):
            for column in range(SIZE - 1, 1, -1):
                shift = rng.integers(-1, 1, (2, len(x))) * rng.integers(0, 2, len(x))
                other = (every, row + shift[0], column + shift[1])
                here = x[:, row, column].copy()
                x[:, row, column] = x[other]
                x[other] = here
    return rounded(blurred(unit(x), (0.7, 0.0)))


def motion_blur(pixels: Bytes, rng: Generator) -> Bytes:
    """One-sided Gaussian, radius 10 and sigma 3, along an angle drawn from U(-45, 45) degrees."""
    return motion_blurred(pixels, 10, 3.0, rng.uniform(-45, 45, len(pixels)))


def _warped(pixels: Bytes, matrix: Floats, shift: Floats | None = None) -> Bytes:
    """Read every image at `matrix` (x, y) about the centre, plus `shift`; order 1, zero outside."""
    from skimage import transform

    full = np.eye(3)
    full[:2, :2] = matrix
    full[:2, 2] = CENTRE - matrix @ [CENTRE, CENTRE] + (0 if shift is None else shift)
    stacked = np.moveaxis(unit(pixels), 0, 2)  # images as channels: one warp for all of them
    library: Any = transform
    read = library.warp(stacked, library.AffineTransform(full), order=1, mode="constant", cval=0)
    return rounded(np.moveaxis(read, 2, 0))


def _with_drawn_sign(pixels: Bytes, rng: Generator, matrices: tuple[Floats, Floats]) -> Bytes:
    second = rng.integers(0, 2, len(pixels)).astype(bool)
    out = np.empty_like(pixels)
    for chosen, matrix in ((~second, matrices[0]), (second, matrices[1])):
        if chosen.any():
            out[chosen] = _warped(pixels[chosen], matrix)
    return out


def shear(pixels: Bytes, rng: Generator) -> Bytes:
    """Shear by +-0.4 rad with the matrix of the scikit-image the set was made with, [[1, -sin], [0, cos]]."""
    one, two = (np.array([[1, -math.sin(c)], [0, math.cos(c)]]) for c in (ANGLE, -ANGLE))
    return _with_drawn_sign(pixels, rng, (one, two))


def rotate(pixels: Bytes, rng: Generator) -> Bytes:
    """Rotate by +-0.4 rad."""
    one, two = (np.array([[math.cos(c), -math.sin(c)], [math.sin(c), math.cos(c)]]) for c in (ANGLE, -ANGLE))
    return _with_drawn_sign(pixels, rng, (one, two))


def scale(pixels: Bytes, rng: Generator) -> Bytes:  # noqa: ARG001
    """Zoom out by 1 / 0.7."""
    return _warped(pixels, np.eye(2) / 0.7)


def translate(pixels: Bytes, rng: Generator) -> Bytes:
    """Shift by +-3 pixels on each axis; whole pixels, so nothing is interpolated."""
    signs = rng.integers(0, 2, (len(pixels), 2)) * 2 - 1
    padded = np.pad(pixels, ((0, 0), (3, 3), (3, 3)))
    rows, columns = (3 + 3 * signs[:, axis, None] + np.arange(SIZE) for axis in (0, 1))
    moved: Bytes = padded[np.arange(len(pixels))[:, None, None], rows[:, :, None], columns[:, None, :]]
    return moved


def brightness(pixels: Bytes, rng: Generator) -> Bytes:  # noqa: ARG001
    """x + 0.5, which is the HSV value of a grey image."""
    return rounded(unit(pixels) + 0.5)


def stripe(pixels: Bytes, rng: Generator) -> Bytes:  # noqa: ARG001
    """Invert the first and the last seven columns."""
    out = pixels.copy()
    out[:, :, :7] = 255 - out[:, :, :7]
    out[:, :, 21:] = 255 - out[:, :, 21:]
    return out


def fog(pixels: Bytes, rng: Generator) -> Bytes:
    """Add three times the corner of a 256-pixel diamond-square fractal, and dim."""
    parts = []
    for start in range(0, len(pixels), 50):  # fifty whole fractals at a time keep memory small
        part = unit(pixels[start : start + 50])
        fractal = plasma(len(part), FRACTAL, 1.4, rng)[:, :SIZE, :SIZE]
        parts.append(rounded(fogged(part, fractal, 3.0)))
    return np.concatenate(parts)


def spatter(pixels: Bytes, rng: Generator) -> Bytes:
    """Specks of mud."""
    field = blurred(rng.normal(0.65, 0.3, pixels.shape), 1.0)
    mask = blurred((field > 0.65).astype(float), 1.5)
    mask = np.where(mask < 0.8, 0, mask)
    return rounded(unit(pixels) * (1 - mask) + mask * 63 / 255)


def _lines(start: Floats, end: Floats) -> Floats:
    """Draw one line per image between points (column, row): 1 + ln(1 - d / 2.3), d the vertical distance."""
    (c0, r0), (c1, r1) = (point.T[:, :, None, None] for point in (start, end))
    row, column = np.arange(SIZE)[:, None], np.arange(SIZE)
    slope = (r1 - r0) / np.where(c1 == c0, 1, c1 - c0)
    distance = np.minimum(np.abs(row - (r0 + slope * (column - c0))), 2.3 - 1e-10)
    within = (column >= np.floor(c0)) & (column <= np.ceil(c1)) & (c1 > c0)
    return np.where(within, np.clip(1 + np.log(1 - distance / 2.3), 0, 1), 0)


def dotted_line(pixels: Bytes, rng: Generator) -> Bytes:
    """A line from the first to the last column, kept in alternating pairs of columns."""
    count = len(pixels)
    ends = rng.integers(0, 27, (2, count))
    line = _lines(np.stack([np.zeros(count), ends[0]], 1), np.stack([np.full(count, SIZE - 1.0), ends[1]], 1))
    return rounded(unit(pixels) + line * (np.arange(SIZE) // 2 % 2 == 0))


def zigzag(pixels: Bytes, rng: Generator) -> Bytes:
    """Teeth on either side of a line from column 2 to column 25."""
    count = len(pixels)
    first = rng.integers(0, 27, count).astype(float)
    last = first + rng.integers(-5, 5, count)
    origin, across = np.stack([np.full(count, 2.0), first], 1), np.stack([np.full(count, 23.0), last - first], 1)
    length = np.linalg.norm(across, axis=1)
    along = across / length[:, None]
    away = np.stack([-along[:, 1], along[:, 0]], 1)
    drawn = np.zeros(pixels.shape)
    point, tip, sign = origin, TOOTH, 1.0
    while tip < length.max() + 2 * TOOTH:
        inside = (tip < length)[:, None]
        corner = np.where(inside, origin + tip * along + sign * TOOTH * away, origin + across)
        drawn = np.maximum(drawn, _lines(point, corner))
        point, tip, sign = corner, tip + 2 * TOOTH, -sign
    return rounded(unit(pixels) + drawn)


def canny_edges(pixels: Bytes, rng: Generator) -> Bytes:  # noqa: ARG001
    """Canny edges at sigma 1, as black and white."""
    from skimage import feature

    canny: Any = feature.canny
    return np.stack([canny(image, sigma=1) for image in unit(pixels)]).astype(np.uint8) * np.uint8(255)
