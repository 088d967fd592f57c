"""What people give as a context set (a tensor, an array, an image set, a Dataset), and its distorted copies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from stfseb.data.augmentation import distort_into
from stfseb.data.images import fingerprint
from stfseb.errors import StfsebError
from stfseb.inputs import as_tensor, check_pixels

TRAIN = "train"  # context points are rows of the minibatch, for data that are streamed
_COPIES_SEED = 1
# The last set with its copies, for the next run of a search or a table, up to so many bytes. Runs share the tensor: who
# writes into a context's images (`take_over`) does it on a copy of the method.
_KEPT = 2**29
_LAST: dict[str, Tensor] = {}


def as_context(context: Any) -> Tensor | str:
    """Return the context images as a tensor, or "train"."""
    if isinstance(context, str):
        if context != TRAIN:
            raise StfsebError(
                f"context='{context}': give images, 'train' for rows of the minibatch, or distorted training images, "
                "stfseb.data.augmentation.distorted(x)"
            )
        return context
    if context is None:
        raise StfsebError("context is missing: give unlabelled images, 'train', or functional_scale=0 to do without")
    if isinstance(context, tuple) and len(context) == 2 and hasattr(context[0], "shape"):
        context = context[0]  # (x, y): labels are not used
    if not hasattr(context, "shape"):
        if hasattr(context, "__getitem__") and hasattr(context, "__len__") and not isinstance(context, Mapping):
            context = stacked(context)
        elif not hasattr(context, "images"):
            of_it = " (here the loader's .dataset)" if isinstance(context, DataLoader) else ""
            raise StfsebError(
                f"context is a {type(context).__name__}: give a tensor, an array, an image set, a Dataset with a "
                f"length{of_it}, or 'train' for rows of the minibatch"
            )
    tensor = as_tensor(context, "context")
    check_pixels(tensor, "context")
    return tensor


def stacked(dataset: Any) -> Tensor:
    """Stack the images of a map-style data set whose items are images or (image, ...) tuples."""
    items = (dataset[i] for i in range(len(dataset)))
    images = [torch.as_tensor(item[0] if isinstance(item, tuple | list) else item) for item in items]
    if not images:
        raise StfsebError("context is empty: give at least one example")
    shapes = {tuple(image.shape) for image in images}
    if len(shapes) > 1:
        raise StfsebError(f"context images have different shapes, {', '.join(map(str, sorted(shapes)[:3]))}: give one")
    return torch.stack(images)


def with_copies(images: Tensor | str, copies: int) -> Tensor:
    """Return a context set and distorted copies of each of its images."""
    if isinstance(images, str):
        raise StfsebError(
            f"context_copies={copies} with context='{images}': rows of a minibatch cannot be distorted: give "
            "images, for example stfseb.data.augmentation.distorted(x), or leave it at 0"
        )
    if images.ndim != 4:
        raise StfsebError(
            f"context_copies={copies}: only images (N, C, H, W) can be distorted and the context has shape "
            f"{tuple(images.shape)}: leave it at 0"
        )
    images = images.detach()
    keep = images.device.type == "cpu" and (copies + 1) * images.nbytes <= _KEPT
    key = f"{fingerprint(images)}-{copies}" if keep else ""
    if keep and (known := _LAST.get(key)) is not None:
        return known
    _LAST.clear()
    try:
        whole = images.new_empty((copies + 1) * len(images), *images.shape[1:])
    except RuntimeError as error:  # torch's own words run over many lines
        raise StfsebError(
            f"context_copies={copies}: {(copies + 1) * images.nbytes / 1e9:.1f} GB of context images do not fit into "
            "memory: give fewer copies"
        ) from error
    whole[: len(images)] = images
    # Another seed than that of `distorted`: images that were made by it would get the same distortion twice.
    distort_into(whole[len(images) :], images, seed=_COPIES_SEED)
    if keep:
        _LAST[key] = whole
    return whole
