"""One temperature before the samples are averaged, and one after: `python benchmarks/temperature.py --out FILE`.

Trains methods on a task, fits both temperatures on its validation images, and measures both on its test images and
unfamiliar sets. `calibrate` takes the one after averaging.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from scipy.optimize import minimize_scalar

from stfseb.data.tasks import load_task
from stfseb.evaluation.calibration import raw_outputs
from stfseb.evaluation.metrics import accuracy, ece, log_mean_probs, nll
from stfseb.evaluation.ood import auroc, msp
from stfseb.experiments.machine import origin, script_command
from stfseb.experiments.run import RunConfig, default_device, make_method, protocol_of
from stfseb.files import write_json
from stfseb.training.fit import fit

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from stfseb.data.tasks import TaskData
    from stfseb.evaluation.metrics import Array

WAYS = ("none", "before", "after")


def log_probs(outputs: Tensor, way: str, temperature: float) -> Array:
    """Return the logarithm of the averaged probabilities (N, L) under a temperature."""
    samples = (outputs / temperature if way == "before" else outputs).log_softmax(-1)
    averaged = log_mean_probs(samples.cpu().numpy())
    if way != "after":
        return averaged
    powers = averaged / temperature
    found: Array = powers - np.logaddexp.reduce(powers, axis=1, keepdims=True)
    return found


def best(loss: Callable[[float], float]) -> float:
    """Return the temperature of the lowest loss."""
    return float(math.exp(minimize_scalar(lambda log: loss(math.exp(log)), bounds=(-4, 4), method="bounded").x))


def measure(data: TaskData, method: str, seed: int, device: str, training: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each way, of one trained network."""
    config = RunConfig(method, seed, training=training, device=device)
    trained = make_method(data, config)
    protocol = protocol_of(data.task, config)
    fit(trained, data.train, data.validation, seed=seed, device=device, progress=False, **protocol)
    samples = data.task.training["test_samples"]
    inside = {"validation": data.validation, "test": data.test, **data.ood}
    outputs = {name: raw_outputs(trained, images, samples) for name, images in inside.items()}
    labels = {name: inside[name].labels.numpy() for name in ("validation", "test")}

    def loss(way: str) -> Callable[[float], float]:
        return lambda t: nll(log_probs(outputs["validation"], way, t), labels["validation"])

    rows = []
    for way in WAYS:
        temperature = 1.0 if way == "none" else best(loss(way))
        found = {name: log_probs(values, way, temperature) for name, values in outputs.items()}
        probs = np.exp(found["test"])
        row: dict[str, Any] = {"method": method, "seed": seed, "way": way, "temperature": temperature}
        row |= {"acc": accuracy(probs, labels["test"]), "ece": ece(probs, labels["test"])}
        row |= {"nll": nll(found["test"], labels["test"])}
        row |= {f"auroc/{name}": auroc(msp(found["test"][None]), msp(found[name][None])) for name in data.ood}
        rows.append(row)
    return rows


def main() -> None:
    """Measure, print means over seeds, write all rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--task", default="mini")
    parser.add_argument("--methods", default="stfseb,mcdropout,mfvi,map")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--images", type=int, help="train on the first so many")
    parser.add_argument("--training", type=json.loads, default={}, help='over the task\'s, as JSON: {"epochs": 14}')
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    command = script_command("temperature", {k: v for k, v in vars(asked).items() if v not in (None, {})})
    data, device = load_task(asked.task).load(), default_device()
    data = replace(data, train=data.train.take(slice(asked.images)))
    rows: list[dict[str, Any]] = []
    for method in asked.methods.split(","):
        for seed in range(asked.seeds):
            rows += measure(data, method, seed, device, asked.training)
            made = {"task": asked.task, "images": len(data.train), "training": asked.training}
            write_json(asked.out, origin(torch.device(device), command) | made | {"rows": rows})
        for way in WAYS:
            own = [row for row in rows if (row["method"], row["way"]) == (method, way)]
            means = {key: statistics.mean(row[key] for row in own) for key in own[0] if isinstance(own[0][key], float)}
            print(method, way, " ".join(f"{key} {value:.4f}" for key, value in means.items()), flush=True)


if __name__ == "__main__":
    main()
