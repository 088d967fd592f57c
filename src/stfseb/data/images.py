"""One layout for every image set: uint8 images (N, C, H, W) with integer labels and a fingerprint."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from stfseb.errors import StfsebError


def fingerprint(*tensors: Tensor) -> str:
    """Return the first 16 hexadecimal digits of the SHA-256 of shapes, types and bytes."""
    digest = hashlib.sha256()
    for tensor in tensors:
        tensor = tensor.detach().cpu().contiguous()
        half = tensor.dtype == torch.bfloat16  # which numpy does not know
        array = (tensor.view(torch.int16) if half else tensor).numpy()
        digest.update(f"{'bfloat16' if half else array.dtype.str}{array.shape}".encode())
        digest.update(array.data)
    return digest.hexdigest()[:16]


@dataclass(frozen=True)
class ImageSet:
    """Images, their labels (if any) and what must be said about where they come from."""

    name: str
    images: Tensor
    labels: Tensor | None = None
    note: str = ""  # "subset: 6,000 of 26,032 test images", "generated from the clean test set", ...
    classes: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        if self.images.dtype != torch.uint8 or self.images.ndim != 4:
            raise StfsebError(
                f"{self.name}: images must be uint8 of shape (N, C, H, W), not {self.images.dtype} "
                f"{tuple(self.images.shape)}"
            )
        if self.labels is not None and self.labels.shape != self.images.shape[:1]:
            raise StfsebError(f"{self.name}: {len(self.images)} images but labels of shape {tuple(self.labels.shape)}")

    def __len__(self) -> int:
        return len(self.images)

    def __repr__(self) -> str:
        """Say what the set is, not what its pixels are."""
        size = "x".join(map(str, self.images.shape[1:]))
        labelled = "no labels" if self.labels is None else f"labels of {len(self.labels.unique())} classes"
        note = f", {self.note}" if self.note else ""
        return f"ImageSet({self.name!r}, {len(self)} images {size}, {labelled}{note})"

    @cached_property
    def fingerprint(self) -> str:
        """Identify the exact pixels and labels in every result made from them."""
        return fingerprint(self.images) if self.labels is None else fingerprint(self.images, self.labels)

    def take(self, index: Tensor | slice, note: str = "") -> ImageSet:
        """Return the rows of `index` as a set of their own."""
        labels = None if self.labels is None else self.labels[index]
        return replace(self, images=self.images[index], labels=labels, note=note or self.note)
