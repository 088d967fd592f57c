"""From what people have (arrays, tensors, image sets) to what a network takes."""

from __future__ import annotations

import math
from numbers import Integral
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from stfseb.errors import StfsebError

if TYPE_CHECKING:
    from collections.abc import Callable

Found = TypeVar("Found")
Span = tuple[float, float]
# What layers raise at a tensor of a shape that is not theirs.
REFUSALS = (RuntimeError, ValueError, IndexError)
_BROKEN = (torch.OutOfMemoryError, torch.AcceleratorError)  # says nothing of the shape


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


def check_pixels(x: Tensor, what: str) -> Span:
    """Return the least and the greatest value that the network gets of `x` (uint8 counts as 0 to 1).

    Raise unless `x` can be scaled into a network's input: uint8, or floating point without NaN.
    """
    if x.dtype != torch.uint8 and not x.is_floating_point():
        raise StfsebError(f"{what} has dtype {x.dtype}: give uint8 pixels (scaled to [0, 1]) or floating point")
    if x.ndim < 2:
        raise StfsebError(f"{what} has shape {tuple(x.shape)}: the first dimension must be the examples")
    if len(x) == 0:
        raise StfsebError(f"{what} is empty: give at least one example")
    if x.dtype == torch.uint8:
        return 0.0, 1.0
    if not x.numel():
        raise StfsebError(f"{what} has shape {tuple(x.shape)}: each example must have a value")
    low, high = torch.stack(x.detach().aminmax()).tolist()  # NaN in, NaN out
    if not (math.isfinite(low) and math.isfinite(high)):
        rows = (~torch.isfinite(x)).flatten(1).any(1).nonzero().flatten().tolist()
        raise StfsebError(f"{what} has NaN or infinite values in {len(rows)} rows (first: row {rows[0]})")
    return low, high


def check_seed(seed: Any) -> None:
    """Raise unless `seed` is a whole number that torch's generators take."""
    if isinstance(seed, bool) or not isinstance(seed, Integral) or not -(2**63) <= int(seed) < 2**64:
        raise StfsebError(f"seed={seed!r}: must be a whole number of at most 64 bits")


def check_fits(network: Callable[[Tensor], Found], x: Tensor, what: str) -> Found:
    """Return network(first row of `x`), or raise an error of one line with the shape that it does not take."""
    try:
        return network(x[:1])
    except (StfsebError, *_BROKEN):
        raise
    except REFUSALS as error:
        said = (str(error) or type(error).__name__).splitlines()[0].rstrip(" .:")
        remedy = _remedy(network, x, what.split()[-1])
        raise StfsebError(f"{what} of shape {tuple(x.shape)} does not fit the network ({said}): {remedy}") from error


def _remedy(network: Callable[[Tensor], Any], x: Tensor, name: str) -> str:
    """Find out whether a dimension is missing or misplaced, which are the usual mistakes."""
    guesses = (
        (x[None], f"for one example give {name}[None], as the first dimension must be the examples"),
        (x[:1, None], f"give {name}[:, None], with a dimension for the channels"),
        (x[:1].movedim(-1, 1), f"give {name}.movedim(-1, 1), with the channels before height and width"),
    )
    for guess, words in guesses[x.ndim > 3 :]:  # a whole set is not one example
        try:
            network(guess)
        except (*REFUSALS, *_BROKEN):
            continue
        return words
    return "give examples of the shape that it takes"


def check_sizes(examples: int, targets: int, num_data: int, batch_size: int | None) -> None:
    """Raise a one-line error unless a minibatch's sizes fit each other, its data set and the step it is a part of."""
    if targets != examples:
        raise StfsebError(f"{examples} examples have {targets} targets: give one target an example")
    if num_data < 1:
        raise StfsebError(f"num_data={num_data}: give the number of examples in the data set")
    if batch_size is not None and batch_size < examples:
        raise StfsebError(f"batch_size={batch_size} is less than the {examples} examples: give that of the whole step")


def scaled(x: Tensor, like: Tensor) -> Tensor:
    """Return `x` on the device and in the precision of `like`, uint8 pixels scaled to [0, 1]."""
    if x.dtype == torch.uint8:
        return x.to(like.device, non_blocking=True).to(like.dtype).div_(255.0)
    return x.to(like.device, like.dtype, non_blocking=True)
