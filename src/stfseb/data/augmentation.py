"""Augmentation of the paper: a random mirror image and a random crop after zero padding, per image and minibatch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from stfseb.errors import StfsebError


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
