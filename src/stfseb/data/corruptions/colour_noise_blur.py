"""CIFAR-10-C: noises and blurs, with the severity constants made for 32 x 32 images.

Hendrycks and Dietterich, "Benchmarking Neural Network Robustness to Common Corruptions and Perturbations", 2019.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from stfseb.data.corruptions.operators import (
    blurred,
    motion_blurred,
    salt_and_pepper,
    truncated,
    unit,
    zoom_matrix,
)

if TYPE_CHECKING:
    from numpy.random import Generator

    from stfseb.data.corruptions.operators import Bytes, Floats

GAUSSIAN_STD = (0.04, 0.06, 0.08, 0.09, 0.10)
SHOT_RATE = (500, 250, 100, 75, 50)
IMPULSE_AMOUNT = (0.01, 0.02, 0.03, 0.05, 0.07)
SPECKLE_STD = (0.06, 0.1, 0.12, 0.16, 0.2)
GAUSSIAN_SIGMA = (0.4, 0.6, 0.7, 0.8, 1.0)
DEFOCUS_RADIUS_ALIAS = ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1.0, 0.2), (1.5, 0.1))
GLASS_SIGMA_PASSES = ((0.05, 1), (0.25, 1), (0.4, 1), (0.25, 2), (0.4, 2))
MOTION_RADIUS_SIGMA = ((6, 1.0), (6, 1.5), (6, 2.0), (8, 2.0), (9, 2.5))
ZOOM_END = (1.06, 1.11, 1.16, 1.21, 1.26)


def gaussian_noise(pixels: Bytes, severity: int, rng: Generator) -> Bytes:
    """x + N(0, std^2)."""
    return truncated(unit(pixels) + rng.normal(0, GAUSSIAN_STD[severity - 1], pixels.shape))


def shot_noise(pixels: Bytes, severity: int, rng: Generator) -> Bytes:
    """Poisson(rate x) / rate."""
    rate = SHOT_RATE[severity - 1]
    return truncated(rng.poisson(unit(pixels) * rate) / rate)


def impulse_noise(pixels: Bytes, severity: int, rng: Generator) -> Bytes:
    """Salt and pepper, on each channel's values by themselves."""
    return truncated(salt_and_pepper(unit(pixels), IMPULSE_AMOUNT[severity - 1], rng))


def speckle_noise(pixels: Bytes, severity: int, rng: Generator) -> Bytes:
    """x + x N(0, std^2)."""
    x = unit(pixels)
    return truncated(x + x * rng.normal(0, SPECKLE_STD[severity - 1], x.shape))


def gaussian_blur(pixels: Bytes, severity: int, rng: Generator) -> Bytes:  # noqa: ARG001
    """Gaussian blur."""
    return truncated(blurred(unit(pixels), GAUSSIAN_SIGMA[severity - 1]))


def defocus_blur(pixels: Bytes, severity: int, rng: Generator) -> Bytes:  # noqa: ARG001
    """Correlate with a disk whose edge is softened by a 3 x 3 Gaussian."""
    radius, alias = DEFOCUS_RADIUS_ALIAS[severity - 1]
    reach = 3  # the disk and its softened edge end within 3 pixels at every radius here
    axis = np.arange(-reach, reach + 1)
    disk = (axis[:, None] ** 2 + axis**2 <= radius**2).astype(float)
    tap = np.exp(-1 / (2 * alias**2))
    soft = np.array([tap, 1, tap]) / (1 + 2 * tap)
    kernel = sum(
        soft[dy + 1] * soft[dx + 1] * np.roll(disk / disk.sum(), (dy, dx), (0, 1))
        for dy in (-1, 0, 1)
        for dx in (-1, 0, 1)
    )
    padded = np.pad(unit(pixels), ((0, 0), (reach, reach), (reach, reach), (0, 0)), mode="reflect")
    height, width = pixels.shape[1:3]
    out = np.zeros(pixels.shape)
    for dy, dx in zip(*np.nonzero(kernel), strict=True):
        out += kernel[dy, dx] * padded[:, dy : dy + height, dx : dx + width]
    return truncated(out + 1e-9)  # the weights sum to 1 up to rounding: a flat image stays flat


def glass_blur(pixels: Bytes, severity: int, rng: Generator) -> Bytes:
    """Blur, displace pixels by one, blur.

    Offsets come from {-1, 0} and the published exchange of neighbours copied instead, while rows and columns
    ran downwards from 31 to 2: a pixel reads one that was not yet touched, so a pass is a gather.
    """
    sigma, passes = GLASS_SIGMA_PASSES[severity - 1]
    x = truncated(blurred(unit(pixels), sigma))
    count, height, width = x.shape[:3]
    image = np.arange(count)[:, None, None]
    row, column = np.arange(height)[:, None], np.arange(width)
    inside = (row >= 2) & (column >= 2)
    for _ in range(passes):
        shift = rng.integers(-1, 1, (2, count, height, width)) * inside
        x = x[image, row + shift[0], column + shift[1]]
    return truncated(blurred(unit(x), sigma))


def motion_blur(pixels: Bytes, severity: int, rng: Generator) -> Bytes:
    """One-sided Gaussian along an angle drawn from U(-45, 45) degrees."""
    radius, sigma = MOTION_RADIUS_SIGMA[severity - 1]
    return motion_blurred(pixels, radius, sigma, rng.uniform(-45, 45, len(pixels)))


def zoom_blur(pixels: Bytes, severity: int, rng: Generator) -> Bytes:  # noqa: ARG001
    """Mean of the image and its enlargements; all of it is one linear map of the 1024 pixels."""
    size = pixels.shape[1]
    planes = np.moveaxis(unit(pixels), 3, 1).reshape(-1, size * size)
    mean = planes @ _zoom_mean(size, ZOOM_END[severity - 1]).T
    return truncated(np.moveaxis(mean.reshape(-1, 3, size, size), 1, 3) + 1e-9)


@lru_cache(maxsize=len(ZOOM_END))
def _zoom_mean(size: int, end: float) -> Floats:
    zooms = np.arange(1, end, 0.01)  # rounding lets the first two severities include the end
    total = np.eye(size * size)
    for zoom in zooms:
        enlarge = zoom_matrix(size, float(zoom))
        total += np.kron(enlarge, enlarge)
    mean: Floats = total / (len(zooms) + 1)
    return mean
