"""Rotation as a distribution shift: -30 to 30 degrees in steps of 5, on the device of the images."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from stfseb.errors import StfsebError

ANGLES: tuple[int, ...] = tuple(range(-30, 31, 5))
_PART = 4096  # images at a time: bounds the float copies of a large uint8 set


def rotate(images: Tensor, degrees: float) -> Tensor:
    """Rotate images (N, C, H, W) counter-clockwise about their centre, bilinear, zeros outside, the same size.

    The direction is that of `skimage.transform.rotate`: positive angles turn the picture counter-clockwise as
    it is seen, the first row on top. Floats keep their dtype; uint8 images are interpolated on [0, 1] and
    rounded back to uint8.
    """
    if images.ndim != 4:
        raise StfsebError(f"rotate takes images (N, C, H, W), not a tensor of shape {tuple(images.shape)}")
    if not math.isfinite(degrees):
        raise StfsebError(f"cannot rotate by {degrees} degrees: give a finite angle")
    if images.dtype != torch.uint8 and not images.dtype.is_floating_point:
        raise StfsebError(f"rotate takes uint8 or floating-point images, not {images.dtype}")
    _, channels, height, width = images.shape
    dtype = torch.float32 if images.dtype == torch.uint8 else images.dtype
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    # Coordinates of grid_sample span [-1, 1] on each axis whatever its length, hence the ratios of the sides.
    back = [[cos, -sin * height / width, 0.0], [sin * width / height, cos, 0.0]]
    theta = torch.tensor([back], dtype=dtype, device=images.device)
    grid = F.affine_grid(theta, [1, channels, height, width], align_corners=False)
    out = torch.empty_like(images, memory_format=torch.contiguous_format)
    for start in range(0, len(images), _PART):
        part = images[start : start + _PART]
        turned = F.grid_sample(
            part.to(dtype) / 255 if images.dtype == torch.uint8 else part,
            grid.expand(len(part), -1, -1, -1),
            mode="bilinear",
            padding_mode="zeros",
            align_corners=False,
        )
        out[start : start + _PART] = (turned * 255).round().clamp(0, 255) if images.dtype == torch.uint8 else turned
    return out
