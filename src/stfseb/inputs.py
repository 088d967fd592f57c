"""From what people have (arrays, tensors, image sets) to what a network takes."""

from __future__ import annotations

import math
from contextlib import contextmanager
from numbers import Integral
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from stfseb.errors import StfsebError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Found = TypeVar("Found")
Span = tuple[float, float]
# What layers raise at a tensor of a shape that is not theirs.
REFUSALS = (RuntimeError, ValueError, IndexError)
ONE_ROW = "more than 1 value per channel"  # what batch norm says of it
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


def check_kind(x: Tensor, what: str) -> None:
    """Raise where dtype or shape alone tell that `x` is no input: no value is read."""
    if x.dtype != torch.uint8 and not x.is_floating_point():
        raise StfsebError(f"{what} has dtype {x.dtype}: give uint8 pixels (scaled to [0, 1]) or floating point")
    if x.ndim < 2:
        raise StfsebError(f"{what} has shape {tuple(x.shape)}: the first dimension must be the examples")
    if len(x) == 0:
        raise StfsebError(f"{what} is empty: give at least one example")


def as_minibatch(x: Any, y: Any, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return what a step trains on: `x` as prediction takes it, scaled like there, and the targets beside it."""
    x, y = as_tensor(x, "x"), as_tensor(y, "y")
    check_kind(x, "x")
    return scaled(x, like), y.to(like.device)


def check_pixels(x: Tensor, what: str) -> Span:
    """Return the least and the greatest value that the network gets of `x` (uint8 counts as 0 to 1).

    Raise unless `x` can be scaled into a network's input: uint8, or floating point without NaN.
    """
    check_kind(x, what)
    if x.dtype == torch.uint8:
        return 0.0, 1.0
    if not x.numel():
        raise StfsebError(f"{what} has shape {tuple(x.shape)}: each example must have a value")
    low, high = torch.stack(x.detach().aminmax()).tolist()  # NaN in, NaN out
    if not (math.isfinite(low) and math.isfinite(high)):
        rows = (~torch.isfinite(x)).flatten(1).any(1).nonzero().flatten().tolist()
        raise StfsebError(f"{what} has NaN or infinite values in {len(rows)} rows (first: row {rows[0]})")
    return low, high


def place_of(device: Any) -> torch.device:
    """Return the device, or raise an error of one line where there is none of that name here."""
    try:
        place = torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise StfsebError(f"device={device!r}: give 'cpu', 'cuda' or 'cuda:0', as torch.device takes them") from error
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        found = torch.cuda.device_count() or "no"
        raise StfsebError(f"device={str(device)!r}: torch finds {found} CUDA devices here; give one of them, or 'cpu'")
    return place


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
    if batch_size is not None and batch_size < examples:
        raise StfsebError(f"batch_size={batch_size} is less than the {examples} examples: give that of the whole step")
    step = batch_size or examples
    if num_data < step:
        raise StfsebError(
            f"num_data={num_data} is less than the {step} examples of a step: give the number of examples in the data "
            "set, not of its minibatches"
        )


@contextmanager
def one_row_named() -> Iterator[None]:
    """Put torch's error at one row in training, of which batch norm cannot take statistics, into one line."""
    try:
        yield
    except ValueError as error:
        if isinstance(error, StfsebError) or ONE_ROW not in str(error):
            raise
        remedy = "give two at least, or call net.eval()"
        raise StfsebError(f"batch norm cannot take statistics of one row ({error}): {remedy}") from error


def scaled(x: Tensor, like: Tensor) -> Tensor:
    """Return `x` on the device and in the precision of `like`, uint8 pixels scaled to [0, 1]."""
    if x.dtype == torch.uint8:
        return x.to(like.device, non_blocking=True).to(like.dtype).div_(255.0)
    return x.to(like.device, like.dtype, non_blocking=True)
