"""From what people have (arrays, tensors, image sets) to what a network takes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from stfseb.errors import StfsebError


def as_tensor(x: Any, what: str) -> Tensor:
    """Return `x` as a tensor: tensors, arrays and anything with `.images` are taken."""
    x = getattr(x, "images", x)
    if isinstance(x, np.ndarray):
        if x.dtype == object:
            raise StfsebError(f"{what} is an array of objects: give numbers of one shape")
        if x.dtype.kind not in "biuf":
            raise StfsebError(f"{what} is an array of type {x.dtype}: give numbers")
        x = torch.from_numpy(np.require(x, x.dtype.newbyteorder("="), ["C", "W"]))
    if not isinstance(x, Tensor):
        raise StfsebError(f"{what} must be a tensor or an array, not {type(x).__name__}")
    return x


def check_pixels(x: Tensor, what: str) -> None:
    """Raise unless `x` can be scaled into a network's input: uint8, or floating point without NaN."""
    if x.dtype != torch.uint8 and not x.is_floating_point():
        raise StfsebError(f"{what} has dtype {x.dtype}: give uint8 pixels (scaled to [0, 1]) or floating point")
    if x.ndim < 2:
        raise StfsebError(f"{what} has shape {tuple(x.shape)}: the first dimension must be the examples")
    if len(x) == 0:
        raise StfsebError(f"{what} is empty: give at least one example")
    if x.is_floating_point() and not bool(torch.isfinite(x).all()):
        rows = (~torch.isfinite(x)).flatten(1).any(1).nonzero().flatten().tolist()
        raise StfsebError(f"{what} has NaN or infinite values in {len(rows)} rows (first: row {rows[0]})")


def scaled(x: Tensor, like: Tensor) -> Tensor:
    """Return `x` on the device and in the precision of `like`, uint8 pixels scaled to [0, 1]."""
    if x.dtype == torch.uint8:
        return x.to(like.device, non_blocking=True).to(like.dtype).div_(255.0)
    return x.to(like.device, like.dtype, non_blocking=True)
