"""Predictions for a user's own images, in words: class, probability, and whether the image looks unfamiliar."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from stfseb.errors import StfsebError
from stfseb.evaluation.threshold import scores
from stfseb.experiments.pictures import read_inputs

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from stfseb.methods.base import Method


def predict_files(method: Method, paths: Sequence[Path], samples: int | None = None) -> list[dict[str, Any]]:
    """Return one row an image; all files are read before the first prediction."""
    shape = method.provenance.get("input")
    if not shape:
        raise StfsebError("the model does not say what images it takes: train it with 'stfseb train' or 'compare'")
    names, images = [], []
    for path in paths:
        found, pixels = read_inputs(path, tuple(shape))
        names += found
        images.append(pixels if pixels.is_floating_point() else pixels.float() / 255.0)
    if not names:
        raise StfsebError("no images were given")
    rule = method.calibration.get("unfamiliar", {})
    log_probs, unfamiliarity = scores(
        method, torch.cat(images), samples or rule.get("samples", method.samples), rule.get("seed", 0)
    )
    threshold = rule.get("threshold", math.inf)
    classes = method.provenance.get("class_names") or [str(i) for i in range(log_probs.shape[1])]
    words = (
        f"An image looks unfamiliar when its probability is below {math.exp(-threshold):.3f}; "
        f"{rule['false_alarms']:.0%} of {rule['images']} validation images are."
        if rule
        else "The model has no threshold for unfamiliar images."
    )
    return [
        {
            "image": name,
            "class": classes[int(row.argmax())],
            "probability": float(math.exp(row.max())),
            "unfamiliar": bool(score > threshold),
            "rule": words,
        }
        for name, row, score in zip(names, log_probs, unfamiliarity, strict=True)
    ]
