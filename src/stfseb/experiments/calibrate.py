"""Set a saved model's decisions up on labelled images that its training has not seen."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from stfseb.data import sources
from stfseb.data.folder import data_folder
from stfseb.errors import StfsebError
from stfseb.evaluation.calibration import calibrate
from stfseb.evaluation.conformal import fit_sets
from stfseb.experiments.models import load_model
from stfseb.methods.decisions import UNFAMILIAR
from stfseb.methods.saving import save

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stfseb.data.images import ImageSet
    from stfseb.methods.base import Method


def calibrate_model(
    model: Path,
    where: str,
    *,
    coverage: float = 0.95,
    answer: float = 0.9,
    false_alarms: float = 0.05,
    probabilities: str | None = None,
    network: Path | None = None,
) -> tuple[Method, int]:
    """Calibrate the model in the folder `model` and save it there again; return it and the number of images.

    `where` is a folder with a folder per class, an .npz of images and labels, or the name of a set (its test
    split; what is measured there afterwards is no longer of images that nothing has seen). With `probabilities`
    ("temperature" or "isotonic"), one half of the images fits them and the other half the prediction sets, whose
    promise needs images that nothing else has seen. Samples are those of the rules that the model has: training
    often takes fewer than prediction. `network` is the Python file of the model's network, where that is one of the
    user's own.
    """
    method = load_model(model, network)
    images = read_labelled(method, where)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    rest = images
    samples, _ = method.draw_of(UNFAMILIAR)
    if probabilities is not None:
        half = len(images) // 2
        calibrate(method, images.take(order[:half]), probabilities, samples=samples)
        rest = images.take(order[half:])
    fit_sets(method, rest, coverage, samples=samples)
    method.ood_threshold(false_alarms, rest, samples=samples)
    method.abstain(answer, rest, samples=samples)
    save(method, model)
    return method, len(images)


def read_labelled(method: Method, where: str) -> ImageSet:
    """Read labelled images of the kind that a saved model takes."""
    shape, classes = method.provenance.get("input"), method.provenance.get("class_names")
    if not shape or not classes:
        raise StfsebError("the model does not say what images it takes: train it with 'stfseb train' or 'compare'")
    source = sources.parse(where, "calibration", Path.cwd())
    wanted = sources.Shape(shape[0], shape[1], tuple(classes))
    images = sources.read(source, "calibration", where, wanted, data_folder())
    if source.kind == "set" and images.classes and tuple(images.classes) != wanted.classes:
        raise StfsebError(
            f"{where} has the classes {_listed(images.classes)}, the model {_listed(classes)}: calibrate on images of "
            "the model's own classes"
        )
    return images


def _listed(classes: Sequence[str]) -> str:
    return ", ".join(classes[:3]) + (", ..." if len(classes) > 3 else "")
