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
            return _suite_sheet(name, folder, columns, seed)
        chosen = split or ("test" if not data_set.missing(folder, "test") else next(iter(data_set.splits)))
        if chosen not in data_set.splits:
            raise unknown(f"split of {name}", chosen, data_set.splits)
        if data_set.missing(folder, chosen):
            raise StfsebError(f"{name} {chosen} is not in '{folder}': {data_set.remedy(folder)}")
        from stfseb.data import readers

        return _class_sheet(readers.read(name, folder, chosen), f"{data_set.title}, {chosen}", columns, seed)
    if name in task_names() or name.endswith((".yaml", ".yml")):
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


def _suite_sheet(name: str, folder: Path, columns: int, seed: int) -> bytes:
    from stfseb.data import corruptions, readers

    suite = sets.get(name)
    clean_name = "mnist" if name == "mnist-c" else "cifar10"
    if sets.get(clean_name).missing(folder, "test"):
        raise StfsebError(f"{name} needs {clean_name} test: {sets.get(clean_name).remedy(folder)}")
    clean = readers.read(clean_name, folder, "test")
    severities = tuple(range(1, 6)) if name == "cifar10-c" else (1,)
    examples = 2 if name == "cifar10-c" else columns
    order = torch.randperm(len(clean), generator=torch.Generator().manual_seed(seed))[:examples]
    few = clean.take(order)
    corrupted = corruptions.load(name, clean=few, folder=folder, severities=severities, types=None)
    kinds = list(dict.fromkeys(kind for kind, _ in corrupted))
    rows = [few.images if name == "mnist-c" else few.images.repeat_interleave(5, 0)]
    notes = set()
    for kind in kinds:
        versions = [part for (one, _), part in sorted(corrupted.items()) if one == kind]
        notes |= {part.note for part in versions}
        # Published arrays come whole, generated ones for the few images that were given.
        rows.append(
            torch.stack([part.images[order if len(part) > examples else slice(None)] for part in versions], 1).flatten(
                0, 1
            )
        )
    titles = ["clean", *(kind.replace("_", " ") for kind in kinds)]
    across = examples * len(severities)
    column_titles = [str(s) for s in severities] * examples if len(severities) > 1 else ()
    return contact_sheet(
        torch.cat(rows),
        len(titles),
        across,
        titles,
        column_titles,
        heading=f"{suite.title}: {len(kinds)} types" + (", severity 1 to 5" if len(severities) > 1 else ""),
        footnote="; ".join(sorted(filter(None, notes))),
    )
