"""Splits as people have them (tensors, arrays, an ImageSet, a Dataset, a DataLoader), read chunk by chunk."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from stfseb.data.images import ImageSet
from stfseb.errors import StfsebError
from stfseb.inputs import as_tensor, check_pixels

Images = Tensor | NDArray[Any]
Split = Images | ImageSet | Dataset[Any] | DataLoader[Any] | Sequence[Any]
Chunk = tuple[Tensor, Tensor | None]


def chunks(
    split: Split, name: str, batch_size: int, *, labels: bool, classes: int | None, real: bool = False
) -> Iterator[Chunk]:
    """Yield checked (images, labels) pieces of `split` in order; labels are None unless asked for.

    Labels are one class a row, or, with `real`, whatever the likelihood will check.
    """
    shape: tuple[int, ...] | None = None
    for images, targets in _pieces(split, name, batch_size):
        if not len(images):
            continue
        check_pixels(images, name)
        if shape not in (None, tuple(images.shape[1:])):
            raise StfsebError(f"{name}: images of shapes {shape} and {tuple(images.shape[1:])} in one split")
        shape = tuple(images.shape[1:])
        if not labels:
            yield images, None
            continue
        if targets is None:
            raise StfsebError(f"{name}: no labels; give (images, labels) or a set that has them")
        if real:
            yield images, as_tensor(targets, f"{name} targets").detach()
        else:
            yield images, _check_labels(targets, len(images), name, classes)
    if shape is None:
        raise StfsebError(f"{name}: the split is empty; give at least one image")


def _pieces(split: Split, name: str, batch_size: int) -> Iterator[tuple[Tensor, Any]]:
    if isinstance(split, TensorDataset):
        split = split.tensors
    if isinstance(split, ImageSet):
        split = (split.images, split.labels)
    if isinstance(split, Tensor | np.ndarray):
        split = (split, None)
    if isinstance(split, Sequence) and not isinstance(split, str):
        if not 1 <= len(split) <= 2 or not isinstance(split[0], Tensor | np.ndarray):
            raise StfsebError(f"{name}: expected (images, labels) as tensors or arrays, not {_kinds(split)}")
        images = _tensor(split[0], name)
        targets = split[1] if len(split) == 2 else None
        if targets is not None:
            targets = _tensor(targets if isinstance(targets, Tensor) else np.asarray(targets), f"{name} labels")
        if targets is not None and len(targets) != len(images):
            raise StfsebError(f"{name}: {len(images)} images but {len(targets)} labels")
        for start in range(0, len(images), batch_size):
            stop = start + batch_size
            yield images[start:stop], None if targets is None else targets[start:stop]
        return
    if isinstance(split, Dataset):
        split = DataLoader(split, batch_size=batch_size)
    if not isinstance(split, DataLoader):
        raise StfsebError(
            f"{name}: cannot read a {type(split).__name__}; give tensors, arrays, an ImageSet, "
            "a Dataset or a DataLoader"
        )
    for batch in split:
        pair = batch if isinstance(batch, Sequence) else (batch, None)
        if not isinstance(pair[0], Tensor):
            raise StfsebError(f"{name}: batches must be (images, labels) tensors, not {_kinds(pair)}")
        yield pair[0], pair[1] if len(pair) > 1 else None


def _kinds(values: Sequence[Any]) -> str:
    return "(" + ", ".join(type(v).__name__ for v in values[:4]) + (", ...)" if len(values) > 4 else ")")


def _tensor(values: Images, name: str) -> Tensor:
    if isinstance(values, np.ndarray) and not values.flags.writeable:
        values = values.copy()  # torch would share the memory, and warns that it is read-only
    return as_tensor(values, name)


def _check_labels(targets: Any, count: int, name: str, classes: int | None) -> Tensor:
    if not isinstance(targets, Tensor) or targets.shape != (count,):
        shape = tuple(targets.shape) if isinstance(targets, Tensor) else type(targets).__name__
        raise StfsebError(f"{name}: labels must be one integer an image, shape ({count},), not {shape}")
    if targets.is_floating_point() or targets.is_complex():
        raise StfsebError(f"{name}: labels must be integers, not {targets.dtype}: give labels.long()")
    found: Tensor = targets.detach().cpu().long()
    outside = found[(found < 0) | (found >= (classes or math.inf))]
    if len(outside):
        known = f"0..{classes - 1}" if classes else "0, 1, ..."
        raise StfsebError(f"{name}: label {int(outside[0])} is outside the classes {known}")
    return found
