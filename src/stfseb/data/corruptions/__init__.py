"""CIFAR-10-C and MNIST-C: the published images where they are on disk, else generated from the clean test set.

    sets = load("cifar10-c", clean, folder, severities=(1, 3, 5), cache=cache)
    sets["fog", 3].images, sets["fog", 3].note

Neither publisher fixed a seed, so generated images follow the published recipes and constants but are not the
published bytes: their note says "generated", and a mixture of the two says so in every note.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from stfseb.data.corruptions.suites import CIFAR10_C, CIFAR10_C_EXTRA, MNIST_C, SUITES, find
from stfseb.errors import StfsebError

# torch and the recipes are imported where they are used: the processes that generate need no torch.
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor

    from stfseb.data.corruptions.suites import Suite
    from stfseb.data.images import ImageSet

__all__ = ["CIFAR10_C", "CIFAR10_C_EXTRA", "MNIST_C", "SUITES", "corrupt", "load"]


def corrupt(
    images: Tensor,
    suite: str,
    type: str,  # noqa: A002
    severity: int,
    seed: int = 0,
    textures: str | Path | None = None,
) -> Tensor:
    """Return uint8 images (N, C, H, W) under one corruption (`mnist-c` has the severity 0 only).

    The result is a function of its arguments alone. `textures` is the folder of the frost pictures.
    """
    import torch

    from stfseb.data.corruptions.recipes import corrupted

    chosen = find(suite)
    chosen.choose([type], [severity])
    if images.dtype != torch.uint8:
        raise StfsebError(f"{suite} is made from uint8 images, not {images.dtype}")
    _check_shape(chosen, images)
    made = corrupted(images.cpu().numpy(), suite, type, severity, seed, textures)
    return torch.from_numpy(made).to(images.device)


def load(
    suite: str,
    clean: ImageSet,
    folder: str | Path,
    severities: Iterable[int] | None = None,
    types: Iterable[str] | None = None,
    cache: str | Path | None = None,
    workers: int | None = None,
    progress: Callable[[int, int, str], None] | None = None,
    seed: int = 0,
) -> dict[tuple[str, int], ImageSet]:
    """Return the test set under each type and severity, as {(type, severity): ImageSet}.

    `clean` is the clean test set, `folder` the data folder, `cache` where generated images are kept and mapped
    into memory from (without one they are made afresh and held in memory), `workers` the number of processes
    (as many as there are cores), `progress` is called with (done, of, type) after each generated set.
    """
    chosen = find(suite)
    kinds, levels = chosen.choose(types, severities)
    _check_shape(chosen, clean.images)
    folder = Path(folder)
    keys = [(kind, level) for kind in kinds for level in levels]
    present = {kind for kind in kinds if _present(suite, folder, kind)}
    sets = {key: _published(suite, clean, folder, *key) for key in keys if key[0] in present}
    absent = [key for key in keys if key[0] not in present]
    made: dict[tuple[str, int], ImageSet] = {}
    if absent:
        count = workers or _cores()
        if cache is None:
            with tempfile.TemporaryDirectory(prefix="stfseb-") as scratch:
                made = _generated(suite, clean, folder, absent, Path(scratch), count, progress, seed, keep=False)
        else:
            made = _generated(suite, clean, folder, absent, Path(cache), count, progress, seed, keep=True)
    return _with_notes({key: (sets | made)[key] for key in keys}, len(present), len(kinds))


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _check_shape(suite: Suite, images: Tensor) -> None:
    if tuple(images.shape[1:]) != suite.shape:
        raise StfsebError(f"{suite.name} is made for images {suite.shape}, not {tuple(images.shape[1:])}")


def _present(suite: str, folder: Path, kind: str) -> bool:
    from stfseb.data.readers import cifar10_c, mnist_c

    return cifar10_c.present(folder, kind) if suite == "cifar10-c" else mnist_c.present(folder, kind)


def _published(suite: str, clean: ImageSet, folder: Path, kind: str, severity: int) -> ImageSet:
    from stfseb.data.readers import cifar10_c, mnist_c

    found = cifar10_c.read(folder, kind, severity) if suite == "cifar10-c" else mnist_c.read(folder, kind)
    count = len(clean)
    if count < len(found):  # a clean set cut short stands for the first images: both keep the test set's order
        found = found.take(slice(count), f"published, the first {count:,} of {len(found):,} images")
    same = len(found) == count
    if same and clean.labels is not None and found.labels is not None:
        same = bool((clean.labels.cpu() == found.labels).all())
    if not same:
        raise StfsebError(
            f"the published {suite} {kind} in {folder} does not belong to the clean set {clean.name} "
            f"({count:,} images): its labels differ; give the test set in its published order"
        )
    return found


def _generated(
    suite: str,
    clean: ImageSet,
    folder: Path,
    keys: list[tuple[str, int]],
    cache: Path,
    workers: int,
    progress: Callable[[int, int, str], None] | None,
    seed: int,
    keep: bool,
) -> dict[tuple[str, int], ImageSet]:
    import torch

    from stfseb.data.corruptions import generate
    from stfseb.data.images import ImageSet
    from stfseb.data.readers.bounded import mapped_npy

    # Only the pixels matter: sets that differ in labels or name share what was generated.
    home = cache / generate.cache_key(suite, _pixels_fingerprint(clean), seed)
    images = clean.images.cpu().contiguous().numpy()

    def whole(key: tuple[str, int]) -> bool:
        try:
            held = mapped_npy(generate.target(home, *key))
        except StfsebError:
            return False
        return bool(held.dtype == images.dtype and held.shape == images.shape)

    missing = [key for key in keys if not whole(key)]
    if missing:
        generate.fill(home, images, suite, missing, seed, folder / "frost", workers, progress)
    sets = {}
    for kind, severity in keys:
        pixels = torch.from_numpy(mapped_npy(generate.target(home, kind, severity)))
        name = f"{suite}/{kind}/{severity}" if severity else f"{suite}/{kind}"
        note = f"generated from {clean.name}" + (f" ({clean.note})" if clean.note else "")
        sets[kind, severity] = ImageSet(name, pixels if keep else pixels.clone(), clean.labels, note, clean.classes)
    return sets


def _pixels_fingerprint(clean: ImageSet) -> str:
    from stfseb.data.images import fingerprint

    return fingerprint(clean.images)


def _with_notes(sets: dict[tuple[str, int], ImageSet], published: int, types: int) -> dict[tuple[str, int], ImageSet]:
    """Say in every note when published and generated types stand side by side."""
    from dataclasses import replace

    if published in {0, types}:
        return sets
    mixture = f"of {types} types {published} are published and {types - published} generated"
    return {key: replace(one, note=f"{one.note}; {mixture}") for key, one in sets.items()}
