"""The operators several corruptions share, each on a batch of images (n, height, width, channels)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy import ndimage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.random import Generator
    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]
    Floats = NDArray[np.floating[Any]]


def unit(pixels: Bytes) -> Floats:
    """Scale bytes to [0, 1]."""
    return pixels / 255.0


def truncated(x: Floats) -> Bytes:
    """Clip to [0, 1] and cast to bytes by truncation, as CIFAR-10-C was."""
    return (np.clip(x, 0.0, 1.0) * 255.0).astype(np.uint8)


def rounded(x: Floats) -> Bytes:
    """Clip to [0, 1] and round to bytes, as MNIST-C was."""
    levels: Floats = np.rint(np.clip(x, 0.0, 1.0) * 255.0)
    return levels.astype(np.uint8)


def salt_and_pepper(x: Floats, amount: float, rng: Generator) -> Floats:
    """Set a fraction `amount` of the values to 0 or 1, each with probability one half."""
    hit = rng.random(x.shape) <= amount
    return np.where(hit, (rng.random(x.shape) <= 0.5).astype(x.dtype), x)


def blurred(x: Floats, sigma: float | Sequence[float], mode: Any = "nearest", truncate: float = 4.0) -> Floats:
    """Gaussian blur over height and width of each image, (n, height, width) or with channels."""
    down, across = (sigma, sigma) if isinstance(sigma, float | int) else sigma
    sides = (0.0, down, across, *([0.0] * (x.ndim - 3)))
    out: Floats = ndimage.gaussian_filter(x, sides, mode=mode, truncate=truncate)
    return out


def plasma(count: int, size: int, decay: float, rng: Generator) -> Floats:
    """Draw `count` diamond-square fractals (size a power of two, edges joined), each scaled to [0, 1].

    At every halving of the grid the wibble is divided by `decay`; the noise is uniform in +-wibble, times the
    wibble once more.
    """
    field = np.zeros((count, size, size))
    step, wibble = size, 100.0

    def noisy_mean(total: Floats) -> Floats:
        return total / 4 + wibble * rng.uniform(-wibble, wibble, total.shape)

    while step >= 2:
        half = step // 2
        corners = field[:, ::step, ::step]
        pairs = corners + np.roll(corners, -1, 1)
        centres = noisy_mean(pairs + np.roll(pairs, -1, 2))
        field[:, half::step, half::step] = centres
        # The middle of an edge has two corners along the edge and the centres on either side of it.
        field[:, ::step, half::step] = noisy_mean(corners + np.roll(corners, -1, 2) + centres + np.roll(centres, 1, 1))
        field[:, half::step, ::step] = noisy_mean(corners + np.roll(corners, -1, 1) + centres + np.roll(centres, 1, 2))
        step, wibble = half, wibble / decay
    field -= field.min((1, 2), keepdims=True)
    peak: Floats = field.max((1, 2), keepdims=True)
    return field / peak


def fogged(x: Floats, fog: Floats, strength: float) -> Floats:
    """Add `strength` times the fog to each image and dim the sum by max / (max + strength)."""
    peak = x.reshape(len(x), -1).max(1).reshape(-1, *([1] * (x.ndim - 1)))
    out: Floats = (x + strength * fog) * (peak / (peak + strength))
    return out


def motion_blurred(pixels: Bytes, radius: float, sigma: float, degrees: Floats) -> Bytes:
    """Blur each image along its own angle with a one-sided Gaussian, edges clamped, floored to bytes.

    Tap i of 2 ceil(radius) + 1 lies at dx = ceil(i cos - 1/2), dy = ceil(i sin - 1/2) and weighs
    exp(-i^2 / (2 sigma^2)); this is the kernel of the image program the published suites were made with.
    """
    taps = np.arange(2 * math.ceil(radius) + 1)
    weights = np.exp(-(taps**2) / (2 * sigma**2))
    weights /= weights.sum()
    angles = np.deg2rad(degrees)[:, None]
    across = np.ceil(taps * np.cos(angles) - 0.5).astype(int)
    down = np.ceil(taps * np.sin(angles) - 0.5).astype(int)
    height, width = pixels.shape[1:3]
    edge = int(max(np.abs(across).max(), np.abs(down).max(), 0))
    sides = [(0, 0), (edge, edge), (edge, edge), (0, 0)][: pixels.ndim]
    padded = np.pad(pixels, sides, mode="edge").astype(np.float64)
    out = np.zeros(pixels.shape)
    for image, total, dxs, dys in zip(padded, out, across + edge, down + edge, strict=True):
        for weight, dx, dy in zip(weights, dxs, dys, strict=True):
            total += weight * image[dy : dy + height, dx : dx + width]
    return np.floor(out + 1e-6).astype(np.uint8)  # weights sum to 1 up to rounding: 255 stays 255


def _folded(index: NDArray[np.int64], size: int, border: str) -> NDArray[np.int64]:
    """Fold indices back into 0 .. size - 1: "mirror" about the edge pixel, "reflect" about the edge itself."""
    period, last = (2 * size - 2, 0) if border == "mirror" else (2 * size, 1)
    position = index % period
    folded: NDArray[np.int64] = np.minimum(position, period - last - position)
    return folded


def sampled(x: Floats, rows: Floats, columns: Floats, border: str) -> Floats:
    """Read each image at its own (row, column) positions (n, height, width), bilinearly."""
    count, height, width, channels = x.shape
    flat = x.reshape(count, height * width, channels)
    top, left = np.floor(rows).astype(np.int64), np.floor(columns).astype(np.int64)
    down, right = rows - top, columns - left
    out = np.zeros_like(x)
    for r, row_weight in ((top, 1 - down), (top + 1, down)):
        for c, column_weight in ((left, 1 - right), (left + 1, right)):
            place = _folded(r, height, border) * width + _folded(c, width, border)
            values = np.take_along_axis(flat, place.reshape(count, -1, 1), 1).reshape(x.shape)
            out += (row_weight * column_weight)[..., None] * values
    return out


def zoom_matrix(size: int, zoom: float) -> Floats:
    """Return A with A x A' = the centre of x enlarged by `zoom` (order 1) and trimmed to its own size."""
    kept = math.ceil(size / zoom)
    start = (size - kept) // 2
    enlarged = ndimage.zoom(np.eye(kept), (zoom, 1), order=1)
    trim = (len(enlarged) - size) // 2
    matrix = np.zeros((size, size))
    matrix[:, start : start + kept] = enlarged[trim : trim + size]
    return matrix
