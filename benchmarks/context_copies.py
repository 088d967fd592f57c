"""Does a wider context help on unfamiliar images of other kinds? `python benchmarks/context_copies.py --out FILE`.

Trains methods on some of Fashion-MNIST with KMNIST as context, alone and with distorted copies of its images, and with
distorted training images in its place, at one setting for all. Measured on the task's unfamiliar sets (glyphs, as the
context has them) and on photographs in grey (CIFAR-100, SVHN), which are of no kind that is in the context.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from stfseb import evaluate
from stfseb.data.augmentation import distorted
from stfseb.data.tasks import load_task
from stfseb.experiments.machine import origin, script_command
from stfseb.experiments.run import RunConfig, default_device, make_method, protocol_of
from stfseb.files import write_json
from stfseb.training.fit import fit

if TYPE_CHECKING:
    from stfseb.data.images import ImageSet
    from stfseb.data.tasks import TaskData

# ST-FS-EB's are what the newest search of Fashion-MNIST chose, the others' their defaults.
SETTINGS: dict[str, dict[str, float]] = {"stfseb": {"dof": 3.0, "sigma": 10.0, "tau1": 300.0, "tau2": 0.03}}


def some(images: ImageSet, count: int) -> ImageSet:
    """Return so many images, drawn with a fixed seed."""
    return images.take(torch.randperm(len(images), generator=torch.Generator().manual_seed(0))[:count])


def grey(images: ImageSet, size: int) -> ImageSet:
    """Return colour images in grey and of another size."""
    pixels = F.interpolate(images.images.float().mean(1, keepdim=True), size=size, mode="bilinear", antialias=True)
    return replace(images, images=pixels.round().clamp(0, 255).to(torch.uint8), labels=None)


def prepared(images: int, test_images: int) -> TaskData:
    """Return Fashion-MNIST, cut down, with photographs among its unfamiliar sets."""
    data, photos = load_task("fmnist").load(), load_task("cifar10").load()
    assert photos.context is not None
    more = {"cifar100": photos.context, "svhn": photos.ood["svhn"]}
    ood = data.ood | {name: grey(some(found, test_images), 28) for name, found in more.items()}
    return replace(
        data,
        train=some(data.train, images),
        validation=some(data.validation, test_images),
        test=some(data.test, test_images),
        ood={name: some(found, test_images) for name, found in ood.items()},
    )


def measure(data: TaskData, method: str, context: str, seed: int, training: dict[str, Any]) -> dict[str, Any]:
    """Train once and return what was measured."""
    settings: dict[str, Any] = dict(SETTINGS.get(method, {}))
    if context.endswith("copies"):
        settings["context_copies"] = int(context.split()[0])
    elif context == "distorted":
        data = replace(data, context=replace(data.train, images=distorted(data.train.images), labels=None))
    config = RunConfig(method, seed, settings, training=training, device=default_device())
    trained = make_method(data, config)
    result = fit(trained, data.train, data.validation, seed=seed, progress=False, **protocol_of(data.task, config))
    found = evaluate(trained, test=data.test, ood=data.ood)
    kept = {
        k: float(v)
        for k, v in found.items()
        if k in ("acc", "nll", "ece") or (k.startswith("auroc") and k.count("/") == 1)
    }
    return {"method": method, "context": context, "seed": seed, "best_epoch": result.best_epoch, **kept}


def main() -> None:
    """Measure, print means over seeds, write all rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--methods", default="stfseb")
    parser.add_argument("--contexts", default="plain,4 copies,distorted")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--images", type=int, default=8000)
    parser.add_argument("--test-images", type=int, default=2000)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    training = {"epochs": asked.epochs, "train_samples": 3, "lr": 0.001}  # few images: as in the task `mini`
    data = prepared(asked.images, asked.test_images)
    made = origin(torch.device(default_device()), script_command("context_copies", vars(asked)))
    rows: list[dict[str, Any]] = []
    for method in asked.methods.split(","):
        for context in asked.contexts.split(","):
            for seed in range(asked.seeds):
                rows.append(measure(data, method, context, seed, training))
                write_json(asked.out, made | {"training": training, "settings": SETTINGS, "rows": rows})
            own = rows[-asked.seeds :]
            means = {key: statistics.mean(row[key] for row in own) for key in own[0] if isinstance(own[0][key], float)}
            print(method, context, " ".join(f"{key} {value:.4f}" for key, value in means.items()), flush=True)


if __name__ == "__main__":
    main()
