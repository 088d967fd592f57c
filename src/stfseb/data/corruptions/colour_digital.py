"""CIFAR-10-C: brightness, contrast, saturation, elastic deformation, pixelation and JPEG."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import numpy as np

from stfseb.data.corruptions.operators import blurred, sampled, truncated, unit

if TYPE_CHECKING:
    from numpy.random import Generator

    from stfseb.data.corruptions.operators import Bytes, Floats

BRIGHTNESS_ADDED = (0.05, 0.1, 0.15, 0.2, 0.3)
CONTRAST_FACTOR = (0.75, 0.5, 0.4, 0.3, 0.15)
SATURATE_TIMES_PLUS = ((0.3, 0.0), (0.1, 0.0), (1.5, 0.0), (2.0, 0.1), (2.5, 0.2))
# alpha, sigma and the range of the affine map, as fractions of the side
ELASTIC = ((0.0, 0.0, 0.08), (0.05, 0.2, 0.07), (0.08, 0.06, 0.06), (0.1, 0.04, 0.05), (0.1, 0.03, 0.03))
PIXELATE_FACTOR = (0.95, 0.9, 0.85, 0.75, 0.65)
JPEG_QUALITY = (80, 65, 58, 50, 40)


def brightness(pixels: Bytes, severity: int, rng: Generator) -> Bytes:  # noqa: ARG001
    """Raise the HSV value."""
    from skimage.color import hsv2rgb, rgb2hsv

    hsv = rgb2hsv(unit(pixels))
    hsv[..., 2] = np.clip(hsv[..., 2] + BRIGHTNESS_ADDED[severity - 1], 0, 1)
    return truncated(hsv2rgb(hsv))


def saturate(pixels: Bytes, severity: int, rng: Generator) -> Bytes:  # noqa: ARG001
    """Scale and shift the HSV saturation."""
    from skimage.color import hsv2rgb, rgb2hsv

    times, plus = SATURATE_TIMES_PLUS[severity - 1]
    hsv = rgb2hsv(unit(pixels))
    hsv[..., 1] = np.clip(hsv[..., 1] * times + plus, 0, 1)
    return truncated(hsv2rgb(hsv))


def contrast(pixels: Bytes, severity: int, rng: Generator) -> Bytes:  # noqa: ARG001
    """Draw each channel of each image towards its mean."""
    x = unit(pixels)
    mean = x.mean((1, 2), keepdims=True)
    return truncated((x - mean) * CONTRAST_FACTOR[severity - 1] + mean)


def elastic_transform(pixels: Bytes, severity: int, rng: Generator) -> Bytes:
    """Move three points and the image with them, then displace every pixel by a smooth random field."""
    size = pixels.shape[1]
    alpha, sigma, reach = (size * constant for constant in ELASTIC[severity - 1])
    count = len(pixels)
    rows, columns = np.meshgrid(np.arange(float(size)), np.arange(float(size)), indexing="ij")
    back = _backward_affine(size, rng.uniform(-reach, reach, (count, 3, 2)))
    here = np.stack([columns.ravel(), rows.ravel(), np.ones(size * size)])
    source = (back @ here).reshape(count, 2, size, size)
    x = sampled(unit(pixels), source[:, 1], source[:, 0], "mirror")
    if alpha > 0:
        field = blurred(rng.uniform(-1, 1, (2 * count, size, size)), sigma, mode="reflect", truncate=3.0)
        dx, dy = alpha * field.reshape(2, count, size, size)
        x = sampled(x, rows + dy, columns + dx, "reflect")
    return truncated(x)


def _backward_affine(size: int, moves: Floats) -> Floats:
    """Return, for each image, the (2, 3) map from where three points are moved to back to where they were."""
    centre, arm = size // 2, size // 3
    points = np.array([[centre + arm, centre + arm], [centre + arm, centre - arm], [centre - arm, centre - arm]])
    moved = np.concatenate([points + moves, np.ones((len(moves), 3, 1))], axis=2)
    solved = np.linalg.solve(moved, np.broadcast_to(points.astype(float), moves.shape))
    return np.swapaxes(solved, 1, 2)


def pixelate(pixels: Bytes, severity: int, rng: Generator) -> Bytes:  # noqa: ARG001
    """Shrink and enlarge again with a box filter."""
    from PIL import Image

    width, height = pixels.shape[2], pixels.shape[1]
    factor, box = PIXELATE_FACTOR[severity - 1], Image.Resampling.BOX
    small = (int(width * factor), int(height * factor))
    images = (Image.fromarray(image).resize(small, box).resize((width, height), box) for image in pixels)
    return np.stack([np.asarray(image) for image in images])


def jpeg_compression(pixels: Bytes, severity: int, rng: Generator) -> Bytes:  # noqa: ARG001
    """Write each image as a JPEG and read it back."""
    from PIL import Image

    out = np.empty_like(pixels)
    for image, result in zip(pixels, out, strict=True):
        stream = io.BytesIO()
        Image.fromarray(image).save(stream, "JPEG", quality=JPEG_QUALITY[severity - 1])
        result[:] = np.asarray(Image.open(stream))
    return out
