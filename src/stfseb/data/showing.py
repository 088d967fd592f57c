"""What `stfseb data show` draws: a set by class, a corruption suite by type, a task by role."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from stfseb.data import sets
from stfseb.data.sheet import contact_sheet
from stfseb.data.tasks import load_task, task_names
from stfseb.errors import StfsebError, unknown

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from stfseb.data.images import ImageSet

MOST_ROWS = 20


def sheet_of(name: str, folder: Path, split: str | None = None, columns: int = 12, seed: int = 0) -> bytes:
    """Return the contact sheet of a registered set, a corruption suite, a built-in task or a task file, as PNG."""
    if name in sets.all_sets():
        data_set = sets.get(name)
        if data_set.types:
            return _suite_sheet(name, folder, columns)
        chosen = split or ("test" if not data_set.missing(folder, "test") else next(iter(data_set.splits)))
        if chosen not in data_set.splits:
            raise unknown(f"split of {name}", chosen, data_set.splits)
        if data_set.missing(folder, chosen):
            raise StfsebError(f"{name} {chosen} is not in '{folder}': {data_set.remedy(folder)}")
        from stfseb.data import readers

        return _class_sheet(readers.read(name, folder, chosen), f"{data_set.title}, {chosen}", columns, seed)
    if name in task_names() or name.endswith((".yaml", ".yml")):
        if split is not None:
            raise StfsebError(f"--split {split}: '{name}' is a task, of which all parts are shown; leave --split out")
        return _task_sheet(name, folder, columns, seed)
    raise unknown("data set or task", name, [*sets.all_sets(), *task_names()])


def _draw(images: Tensor, count: int, seed: int) -> Tensor:
    """Take `count` images at random; a set that is smaller is filled up with black."""
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))[:count]
    taken = images[order]
    if len(taken) < count:
        taken = torch.cat([taken, taken.new_zeros(count - len(taken), *taken.shape[1:])])
    return taken


def _class_sheet(images: ImageSet, heading: str, columns: int, seed: int) -> bytes:
    heading = f"{heading}: {len(images):,} images"
    if images.labels is None:
        return contact_sheet(_draw(images.images, 8 * columns, seed), 8, columns, heading=heading, footnote=images.note)
    present = images.labels.unique().tolist()[:MOST_ROWS]
    rows = torch.cat([_draw(images.images[images.labels == label], columns, seed) for label in present])
    names = [images.classes[label] if images.classes else str(label) for label in present]
    return contact_sheet(rows, len(present), columns, names, heading=heading, footnote=images.note)


def _task_sheet(name: str, folder: Path, columns: int, seed: int) -> bytes:
    task = load_task(name)
    data = task.load(folder)
    parts = {"train": data.train, "validation": data.validation, "test": data.test}
    if data.context is not None:
        parts[f"context: {data.context.name}"] = data.context
    parts |= {f"unfamiliar: {key}": part for key, part in data.ood.items()}
    rows = torch.cat([_draw(part.images, columns, seed) for part in parts.values()])
    titles = [f"{title} ({len(part):,})" for title, part in parts.items()]
    footnote = "; ".join(data.notes)
    return contact_sheet(rows, len(parts), columns, titles, heading=f"Task {name}: {task.title}", footnote=footnote)


def _suite_sheet(name: str, folder: Path, columns: int) -> bytes:
    """Every type a row: CIFAR-10-C with two images at each severity, MNIST-C with as many digits as columns."""
    from stfseb.data import corruptions, readers

    clean_name = "mnist" if name == "mnist-c" else "cifar10"
    if sets.get(clean_name).missing(folder, "test"):
        raise StfsebError(f"{name} needs {clean_name} test: {sets.get(clean_name).remedy(folder)}")
    graded = name == "cifar10-c"
    examples, severities = (2, (1, 2, 3, 4, 5)) if graded else (columns, (0,))
    clean = readers.read(clean_name, folder, "test").take(slice(examples))
    types = (*corruptions.CIFAR10_C, *corruptions.CIFAR10_C_EXTRA) if graded else corruptions.MNIST_C
    corrupted = corruptions.load(name, clean, folder, severities, types)
    rows = [clean.images.repeat_interleave(len(severities), 0)]
    rows += [torch.stack([corrupted[kind, s].images for s in severities], 1).flatten(0, 1) for kind in types]
    return contact_sheet(
        torch.cat(rows),
        1 + len(types),
        examples * len(severities),
        ["clean", *(kind.replace("_", " ") for kind in types)],
        [str(s) for s in severities] * examples if graded else (),
        heading=f"{sets.get(name).title}: {len(types)} types" + (", severity 1 to 5" if graded else ""),
        footnote="; ".join(sorted({part.note for part in corrupted.values()} - {""})),
    )
