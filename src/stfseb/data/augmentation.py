"""Augmentation of training images as in the paper (mirror and crop), and distorted copies that widen a context set."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from stfseb.errors import StfsebError
from stfseb.inputs import as_tensor, check_pixels


def flip_and_crop(images: Tensor, padding: int = 4, generator: torch.Generator | None = None) -> Tensor:
    """Mirror each image (N, C, H, W) with probability 1/2 and crop it from itself padded with zeros.

    The draws and the gather stay on the images' device, with shapes that do not depend on what is drawn and
    without a host synchronisation, so that a step with it can be captured in a CUDA graph. Any dtype; the
    result has the shape and dtype of `images`.
    """
    if images.ndim != 4:
        raise StfsebError(f"flip_and_crop takes images (N, C, H, W), not a tensor of shape {tuple(images.shape)}")
    if padding < 0:
        raise StfsebError(f"padding {padding} is negative: give 0 or more pixels")
    count, channels, height, width = images.shape
    device = images.device
    flip = torch.rand(count, 1, device=device, generator=generator) < 0.5
    top, left = torch.randint(0, 2 * padding + 1, (2, count, 1), device=device, generator=generator)
    along = torch.arange(width, device=device)
    rows = top + torch.arange(height, device=device)
    columns = left + torch.where(flip, width - 1 - along, along)
    padded = F.pad(images, (padding, padding, padding, padding))
    # One gather over the flattened pixels: the same index for every channel of an image.
    place = rows[:, :, None] * padded.shape[3] + columns[:, None, :]
    index = place.reshape(count, 1, -1).expand(-1, channels, -1)
    return padded.flatten(2).gather(2, index).view(images.shape)


ANGLE, ZOOM, SHIFT, INVERTED = math.pi, 0.5, 0.125, 0.25
_AT_ONCE = 2**20  # pixels that are turned at a time: more are no faster and cost memory


def distorted(images: Any, copies: int = 1, seed: int = 0) -> Tensor:
    """Return `copies` random distortions of each image (N, C, H, W), all first ones before all second ones.

    Images are a tensor, an array or an image set.

    Each is turned by any angle, zoomed by a factor of exp(-0.5) to exp(0.5), shifted by up to an eighth of its width
    and height (what comes into sight is mirrored at the borders), and one in four is inverted: light becomes dark
    (within 0..255; in a floating-point set within the range of each channel). A function of the images and the seed,
    computed in double precision, so that rounding to uint8 hides in which order a processor adds.
    """
    given = as_tensor(images, "images")
    if given.ndim != 4:
        raise StfsebError(f"distorted takes images (N, C, H, W), not a tensor of shape {tuple(given.shape)}")
    if isinstance(copies, bool) or not isinstance(copies, int) or copies < 0:
        raise StfsebError(f"copies={copies}: must be a whole number of at least 0")
    found = given.new_empty(copies * len(given), *given.shape[1:])
    if len(found):
        distort_into(found, given, seed)
    return found


@torch.no_grad()
def distort_into(found: Tensor, images: Tensor, seed: int) -> None:
    """Fill `found` with distortions of images, as many of each as it has room for; see `distorted`."""
    check_pixels(images, "images")
    count, channels, height, width = images.shape
    whole = images.dtype == torch.uint8
    ends = torch.full((channels, 1, 1), 255.0, dtype=torch.float64, device=images.device)
    if not whole:
        ends = (images.amin((0, 2, 3)).double() + images.amax((0, 2, 3)).double()).view(channels, 1, 1)
    generator = torch.Generator().manual_seed(seed)
    rows = max(1, _AT_ONCE // (channels * height * width))
    for copy in range(len(found) // count):
        turn = _affine(count, height / width, generator).to(images.device)
        inverted = (torch.rand(count, 1, 1, 1, generator=generator) < INVERTED).to(images.device)
        for start in range(0, count, rows):
            part = slice(start, start + rows)
            pixels = images[part].double()
            grid = F.affine_grid(turn[part], list(pixels.shape), align_corners=False)
            pixels = F.grid_sample(pixels, grid, padding_mode="reflection", align_corners=False)
            pixels = torch.where(inverted[part], ends - pixels, pixels)
            pixels = pixels.round().clamp(0, 255) if whole else pixels
            found[copy * count + start : copy * count + start + len(pixels)] = pixels.to(images.dtype)


def _affine(count: int, aspect: float, generator: torch.Generator) -> Tensor:
    """Draw maps from places in a copy to places in its image, (count, 2, 3), both in units of half a side."""
    angle, zoom, right, down = (2 * torch.rand(4, count, generator=generator).double() - 1).unbind()
    scale = torch.exp(ZOOM * zoom)
    cos, sin = scale * torch.cos(ANGLE * angle), scale * torch.sin(ANGLE * angle)
    across = torch.stack([cos, -sin * aspect, 2 * SHIFT * right], 1)
    along = torch.stack([sin / aspect, cos, 2 * SHIFT * down], 1)
    return torch.stack([across, along], 1)
