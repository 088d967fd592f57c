"""Images that two parts of a task share, which makes results say something else than they seem to."""

from __future__ import annotations

import warnings
from itertools import product
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stfseb.data.images import ImageSet
    from stfseb.data.sources import Source

_LEAST = 0.01  # of the smaller set: a few doubles are in many collections
_MEANING = {
    ("validation", "train"): "early stopping and thresholds would be of images that training sees",
    ("test", "train"): "test results would be of images that training sees",
    ("test", "validation"): "test results would be of images that choose the epoch and the thresholds",
    ("test", "context"): "training would see test images",
    ("ood", "train"): "what training sees is not unfamiliar",
    ("ood", "validation"): "what sets the thresholds is not unfamiliar",
    ("ood", "test"): "they cannot be told apart, and count as familiar and as unfamiliar",
    ("ood", "context"): "its AUROC would be of images that training sees",
}


class OverlapWarning(UserWarning):
    """Two parts of a task that ought to have images of their own share some."""


def warn_of_overlaps(parts: dict[str, tuple[Source, ImageSet]]) -> list[str]:
    """Warn of parts (train, validation, test, context, ood/NAME) that share images; return what was said.

    Published sets are taken at their publishers' word: of two, only the same images under two names are told.
    """
    hashes: dict[str, list[int]] = {}
    said = []
    for name, other in product(parts, parts):
        meaning = _MEANING.get((name.partition("/")[0], other))
        least = _least(parts[name][0], parts[other][0])
        images, others = parts[name][1], parts[other][1]
        if meaning is None or least is None or images.images.shape[1:] != others.images.shape[1:]:
            continue
        for key in (name, other):
            if key not in hashes:
                hashes[key] = _hashes(parts[key][1])
        shared = _shared(images, hashes[name], hashes[other])
        if shared and shared >= least * min(len(images), len(others)):
            said.append(
                f"{name.removeprefix('ood/')} shares {shared} of its {len(images)} images with {other}: {meaning}; "
                "give each its own"
            )
            warnings.warn(said[-1], OverlapWarning, stacklevel=4)
    return said


def _least(one: Source, other: Source) -> float | None:
    """Return which fraction of the smaller set is too many, None where the two are not compared."""
    if not one.kind == other.kind == "set":
        return _LEAST
    return 1.0 if one.where == other.where else None


def _hashes(images: ImageSet) -> list[int]:
    """Return a hash for the pixels of each image; Python's own takes 20 ms for 60,000 of MNIST's."""
    return [hash(pixels.tobytes()) for pixels in images.images.numpy()]


def _shared(images: ImageSet, own: list[int], others: list[int]) -> int:
    """Return how many images are also among others; those of one colour say nothing and do not count."""
    known = set(others)
    rows = [row for row, value in enumerate(own) if value in known]
    pixels = images.images[rows].flatten(2)
    return int((pixels.amin(2) < pixels.amax(2)).any(1).sum()) if rows else 0
