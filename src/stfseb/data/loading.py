"""Bringing the images of a task: what must be there, what may be missing, and what has to be said about it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from stfseb.data.augmentation import distorted
from stfseb.data.folder import data_folder
from stfseb.data.images import ImageSet
from stfseb.data.overlaps import warn_of_overlaps
from stfseb.data.sources import OWN_CONTEXTS, NotOnDiskError, Source, own_context, parse, read
from stfseb.data.tasks import HeldOut, TaskData
from stfseb.errors import StfsebError, unknown

if TYPE_CHECKING:
    from pathlib import Path

    from stfseb.data.tasks import Task


def hold_out(images: ImageSet, fraction: float, seed: int) -> tuple[ImageSet, ImageSet]:
    """Split a set into the rest and a random fraction of it; the same images for the same seed, in their order."""
    count = round(fraction * len(images))
    if not 0 < count < len(images):
        raise StfsebError(f"validation: {fraction:g} of {len(images)} training images leaves an empty split")
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    return images.take(order[count:].sort().values), images.take(order[:count].sort().values)


def load(task: Task, folder: str | Path | None = None, context: str | None = None) -> TaskData:
    """Read a task's images from the data folder.

    Training, validation and test images must be there, and the context too unless the training images serve;
    an unfamiliar set that is not on disk is left out and named in the notes.
    """
    where = data_folder(folder)
    notes: list[str] = []

    def bring(source: Source, role: str, name: str) -> ImageSet:
        result = read(source, role, name, task.shape, where)
        if result.note:
            notes.append(f"{role} {result.name}: {result.note}" if role != "ood" else f"{name}: {result.note}")
        return result

    train = bring(task.train, "train", f"{task.name}-train")
    parts = {"train": (task.train, train)}  # with those that are held out of it
    if isinstance(task.validation, HeldOut):
        train, validation = hold_out(train, task.validation.fraction, task.validation.seed)
    else:
        validation = bring(task.validation, "validation", f"{task.name}-validation")
        parts["validation"] = (task.validation, validation)
    test = bring(task.test, "test", f"{task.name}-test")

    chosen = task.context
    if context is not None:
        own = context in OWN_CONTEXTS
        chosen = own_context(context) if own else parse(_with_splits(context), "context", where)
    pool = None
    if chosen is not None and chosen.kind == "distorted":
        pool = ImageSet(f"{train.name}-distorted", distorted(train.images))
        notes.append("context: distorted copies of the training images")
    elif chosen is not None:
        try:
            pool = bring(chosen, "context", f"{task.name}-context")
        except NotOnDiskError as error:
            raise StfsebError(f"context {error}; or use the training images, --context train or distorted") from None
    else:
        notes.append("context: the training images themselves")

    ood: dict[str, ImageSet] = {}
    for name, source in task.ood.items():
        try:
            ood[name] = bring(source, "ood", name)
        except NotOnDiskError:
            notes.append(f"{name}: not on disk, no result")
    parts["test"] = (task.test, test)
    if chosen is not None and pool is not None:
        parts["context"] = (chosen, pool)
    parts |= {f"ood/{name}": (task.ood[name], images) for name, images in ood.items()}
    notes += warn_of_overlaps(parts)
    return TaskData(task, train, validation, test, pool, ood, notes, where)


def _with_splits(name: str) -> dict[str, object]:
    """Take a registered set as context from its first split that is on disk."""
    from stfseb.data import sets

    if name not in sets.all_sets():
        raise unknown("context", name, (*OWN_CONTEXTS, *sets.all_sets()))
    return {"set": name, "split": list(sets.get(name).splits), "fit": True}
