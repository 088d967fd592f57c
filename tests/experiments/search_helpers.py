"""What the tests of the search share: a tiny task, hand-made trials, and a worker that sleeps instead of training.

As a script it is such a worker: `python search_helpers.py URL TRIALS SECONDS GRACE LOG`.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np

from stfseb.experiments.search.plan import make_plan
from stfseb.experiments.search.store import Store
from stfseb.experiments.search.worker import Watcher, work

TASK = """
title: A few images of Fashion-MNIST
train: {array: train.npz}
validation: {array: validation.npz}
test: {array: test.npz}
context: {array: context.npy}
ood: {digits: {array: digits.npy}}
channels: 1
image_size: 28
classes: 10
network: {name: small, hidden: 32}
training: {epochs: 10, batch_size: 64, train_samples: 2, test_samples: 4, lr: 0.002}
"""


def tiny_task(folder: Path, *, train=600, validation=300, context=400, epochs=10) -> Path:
    """Write a task of a few images of the embedded sets; return its file."""
    from stfseb.data.embedded import read

    folder.mkdir(parents=True, exist_ok=True)
    for part, count in (("train", train), ("validation", validation), ("test", 50)):
        images = read(part).take(slice(0, count))
        np.savez(folder / f"{part}.npz", images=images.images.numpy(), labels=images.labels.numpy())
    np.save(folder / "context.npy", read("kmnist").images[:context].numpy())
    np.save(folder / "digits.npy", read("mnist").images[:50].numpy())
    file = folder / "tiny.yaml"
    file.write_text(TASK.replace("epochs: 10", f"epochs: {epochs}"))
    return file


def trial(index, nll, *, tempered=None, se=0.01, auroc=0.9, outcome="complete", curve=None, accuracy=None, **more):
    """Return a finished trial as a search keeps it."""
    curve = curve or [2.0, nll]
    return {
        "index": index,
        "params": {"tau2": float(index)},
        "outcome": outcome,
        "reason": "epochs",
        "nll": nll,
        "epochs": len(curve),
        "best_epoch": len(curve),
        "seconds": 1.0,
        "collapsed": False,
        "history": {"nll": curve, "accuracy": accuracy or [0.5] * len(curve)},
        "metrics": {
            "temperature": 1.0,
            "nll": nll,
            "nll_se": se,
            "accuracy": 0.8,
            "ece": 0.02,
            "auroc": auroc,
            "tempered_nll": nll if tempered is None else tempered,
            "tempered_nll_se": se,
            "tempered_accuracy": 0.8,
            "tempered_ece": 0.01,
            "tempered_auroc": auroc,
        },
    } | more


def plan():
    """Return a plan that needs no images."""
    return make_plan("mini", "stfseb", "extended")


def sleeper(seconds, log=None):
    """Return a runner that sleeps and gives every trial an NLL that follows from its settings."""

    def run(claims):
        for claim in claims:
            if log is not None:
                with log.open("a") as file:
                    file.write(f"{claim.index}\n")
            time.sleep(seconds)
            found = trial(claim.index, claim.params["sigma"] + 1.0 / claim.params["tau2"])
            yield claim, {name: value for name, value in found.items() if name not in ("index", "params")}

    return run


if __name__ == "__main__":
    url, total, seconds, grace, log = sys.argv[1:]
    with Store(url, plan(), int(total), heartbeat=1, grace=int(grace)) as store:
        work(store, sleeper(float(seconds), Path(log)), Watcher(), poll=0.2)
