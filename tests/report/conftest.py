"""Run records that look like real ones: numbers of a plausible size, drawn from a fixed seed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from stfseb.data.images import ImageSet
from stfseb.evaluation import assess
from stfseb.evaluation.gallery import gallery

CLASSES = ("T-shirt", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")
METHODS = {  # sharpness, spread between samples, margin on unfamiliar images, seconds
    "stfseb": ("ST-FS-EB", 1.5, 0.7, {"mnist": 0.2, "glyphs": 0.6}, 81.0),
    "mcdropout": ("MC Dropout", 1.7, 0.6, {"mnist": 3.1, "glyphs": 3.5}, 62.0),
    "map": ("MAP", 3.4, 0.0, {"mnist": 3.8, "glyphs": 4.1}, 24.0),
}


class Made:
    """A method whose logits are drawn: a margin on the class in the pixel (0, 0), and noise."""

    classes = 10

    def __init__(self, sharpness, noise, seed):
        self.sharpness, self.noise, self.seed = sharpness, noise, seed

    def sample_logits(self, x, samples=None, *, seed=None):
        generator = torch.Generator().manual_seed(self.seed)
        key = x.flatten(1).double().mean(1)[:, None] * torch.arange(1, 11)
        wave = torch.sin(key * 7919 + self.seed)  # noise that belongs to the image, with a few large values
        base = 1.05 * torch.tan(1.25 * wave)
        margin = torch.where(x[:, 0, 0, 1] > 0, x[:, 0, 0, 2] / 10, 4.4)
        logits = base + margin[:, None] * torch.nn.functional.one_hot(x[:, 0, 0, 0].long() % 10, 10)
        count = 1 if self.noise == 0 else (samples or 10)
        return self.sharpness * logits + self.noise * torch.randn(count, len(x), 10, generator=generator).double()


def images(count: int, seed: int, unfamiliar: float | None = None) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(0, 256, (count, 1, 28, 28), generator=generator, dtype=torch.uint8)
    ramp = torch.linspace(0, 1, 28)
    x = (x * (0.25 + 0.75 * ramp[None, :] * ramp[:, None])).to(torch.uint8)
    x[:, 0, 0, 0] = torch.randint(0, 10, (count,), generator=generator, dtype=torch.uint8)
    x[:, 0, 0, 1] = 0 if unfamiliar is None else 1
    x[:, 0, 0, 2] = 0 if unfamiliar is None else int(10 * unfamiliar)
    return x


def make_record(key: str, seed: int, count: int = 400) -> dict:
    label, sharpness, noise, far, seconds = METHODS[key]
    rng = np.random.default_rng(100 * seed + len(key))
    x = images(count, 1)
    test = ImageSet("mini test", x, x[:, 0, 0, 0].long(), classes=CLASSES)
    ood = {name: ImageSet(name, images(count, 5, m + 0.2 * rng.random())) for name, m in far.items()}
    found = assess(Made(sharpness, noise, seed), test, ood, samples=10)
    epochs = np.arange(1, 16)
    history = [
        {
            "epoch": int(e),
            "data": 0.35 + 1.9 * float(np.exp(-e / 3)) + 0.01 * rng.random(),
            "function": 1.4 + 2.0 * float(np.exp(-e / 4)) if key == "stfseb" else 0.0,
            "weights": 0.2 + 0.01 * float(e),
            "validation_nll": 0.38 + 0.9 * float(np.exp(-e / 3)) + 0.004 * float(max(e - 11, 0)) + 0.01 * rng.random(),
            "validation_accuracy": 0.87 - 0.4 * float(np.exp(-e / 3)),
            "seconds": seconds / 15,
        }
        for e in epochs
    ]
    splits = {"train": ("mini train", 4000), "validation": ("mini validation", 1000), "test": ("mini test", 2000)}
    splits |= {"context": ("KMNIST", 2000), "ood/mnist": ("MNIST", 2000), "ood/glyphs": ("glyphs", 2000)}
    return {
        "format": 1,
        "id": f"mini-{key}-{seed}",
        "task": "mini",
        "task_title": "Fashion-MNIST in small",
        "method": key,
        "label": label,
        "seed": seed,
        "settings": {"dof": 5.0, "sigma": 1.0, "tau1": 1.0, "tau2": 100.0, "samples": 3},
        "training": {"epochs": 15, "batch_size": 128, "learning_rate": 5e-4, "patience": 10},
        "data": {
            split: {"name": name, "count": n, "fingerprint": f"{hash_of(name)}", "note": "embedded subset"}
            for split, (name, n) in splits.items()
        },
        "code": {"version": "0.1.0", "commit": "0123abc"},
        "machine": {"platform": "Linux x86_64", "torch": "2.13.0", "device": "cpu", "threads": 2},
        "history": history,
        "best_epoch": 11 + seed,
        "collapsed": False,
        "seconds": seconds + 4 * float(rng.random()),
        "seconds_per_epoch": seconds / 15,
        "peak_memory_mb": 300.0 + seconds,
        "metrics": found.metrics,
        "summary": found.summary,
        "images": gallery(found.summary, test, ood),
    }


def hash_of(name: str) -> str:
    import hashlib

    return hashlib.sha256(name.encode()).hexdigest()[:16]


@pytest.fixture(scope="session")
def records() -> list[dict]:
    """Three methods, two seeds each, on one task with two unfamiliar sets."""
    return [make_record(key, seed) for key in METHODS for seed in (0, 1)]


@pytest.fixture(scope="session")
def single(records) -> list[dict]:
    """The first seed alone."""
    return [r for r in records if r["seed"] == 0]
