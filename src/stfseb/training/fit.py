"""`fit`: train a method with the paper's protocol.

Adam (5e-4, betas 0.9 and 0.999, eps 1e-8), batches of 128, at most 100 epochs, early stopping with a
patience of 10 on the validation NLL of the Monte Carlo average, best epoch restored.
"""

from __future__ import annotations

import math
import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from stfseb.errors import DivergedError, StfsebError
from stfseb.inputs import place_of
from stfseb.methods.calibrated import PROBABILITIES
from stfseb.methods.chance import REMEDY, at_chance, classes_of
from stfseb.methods.decisions import ABSTAIN, CONFORMAL, HELD_OUT, NLL, UNFAMILIAR, held_out_scores
from stfseb.methods.learning import LearningWarning
from stfseb.methods.settings import check_count
from stfseb.networks.layout import layout_kept
from stfseb.networks.memory import memory_kept
from stfseb.training.batches import Augment, make_batches, split_off
from stfseb.training.interrupts import Interrupted
from stfseb.training.loop import FitResult, Protocol, Training, check_split, validation_batches
from stfseb.training.progress import TrainingProgress
from stfseb.training.resuming import resumed_at

if TYPE_CHECKING:
    from collections.abc import Callable

    from stfseb.methods.base import Method

__all__ = ["CollapseWarning", "DivergedError", "FitResult", "Interrupted", "fit"]

_VALIDATION_ROWS = 1024


class CollapseWarning(UserWarning):
    """The network predicts the same for every image."""


def fit(
    method: Method,
    train: Any,
    validation: Any = None,
    *,
    epochs: int = 100,
    batch_size: int = 128,
    lr: float = 5e-4,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    patience: int = 10,
    validation_samples: int | None = None,
    seed: int = 0,
    device: str | torch.device | None = None,
    augment: Augment | None = None,
    precision: str = "auto",
    capture: bool | None = None,
    compiled: bool | None = None,
    progress: bool = True,
    callback: Callable[[dict[str, Any]], None] | None = None,
    checkpoint: str | Path | None = None,
    checkpoint_every: float | None = None,
) -> FitResult:
    """Train `method` and leave it at its best epoch.

    SIGTERM and Ctrl-C finish the step under way, write the checkpoint where there is one, and raise `Interrupted`;
    a second Ctrl-C ends at once. A step that does not fit into memory is run in parts, which the log says.

    Args:
        method: any `Method`; its network is trained in place.
        train: (x, y) tensors or arrays, an image set, a Dataset or a DataLoader. uint8 pixels are scaled
            to [0, 1]. The data set is what a DataLoader's sampler draws from, and the prior's weight follows from
            how many these are: `SubsetRandomSampler` draws from its own rows, `RandomSampler`, `DistributedSampler`
            and `WeightedRandomSampler` (but for rows of weight 0) from all, however many they draw in an epoch;
            any other sampler from as many rows as it has (one that draws others in each epoch: give the rows as a
            `Subset`). `drop_last` leaves it as it is; a `batch_sampler` is refused.
        validation: the same, for early stopping; by default a tenth of `train` (the same rows for every seed).
        epochs: at most this many passes over the data.
        batch_size: minibatch size (a DataLoader keeps its own).
        lr: Adam's learning rate.
        betas: Adam's momentum parameters.
        eps: Adam's numerical stability parameter.
        patience: stop after this many epochs without a better validation NLL.
        validation_samples: Monte Carlo samples of the validation score (by default the method's own).
        seed: of the order of the data, the masks and the context; the initial weights are the network's own.
        device: where to train; by default where the network is.
        augment: applied to each training minibatch, for example `stfseb.data.augmentation.flip_and_crop`.
        precision: "float32", "tf32", "bf16" or "auto"; see `stfseb.networks.precision`.
        capture: run each step as one CUDA graph; by default wherever that can be done.
        compiled: compile the captured step; by default where the run is long enough to earn it back.
        progress: show a bar (terminal) or a line an epoch.
        callback: called after each epoch with its history entry.
        checkpoint: a file in which the run is kept while it trains. Where it exists, the run goes on from it, on the
            CPU to the same weights, bit for bit, as if it had never stopped; another run's is refused. It is
            left there in the end, and `fit` then returns the finished run; remove it when nobody needs it.
        checkpoint_every: seconds between checkpoints. By default after every epoch, or, where epochs are so short
            that this would take more than a fiftieth of the time, after several.
    """
    check_count(batch_size=batch_size)
    protocol = Protocol(epochs, patience, lr, betas, eps, validation_samples, seed, precision, capture, compiled)
    if device is not None:
        method.to(place_of(device))
    place = method.like.device
    if validation is None:
        if isinstance(train, torch.utils.data.DataLoader):
            raise StfsebError("validation is missing: with a DataLoader give validation=(x, y) or another DataLoader")
        train, validation = split_off(train, 0.1)
    batches = make_batches(train, batch_size, seed, place, augment)
    held_out = make_batches(validation, _VALIDATION_ROWS, seed, place, what="validation")
    # The caller's random state is left alone, and every epoch starts from its own (so that it can be resumed).
    with torch.random.fork_rng(devices=[place] if place.type == "cuda" else []):
        check_split(method, batches, "train")
        check_split(method, held_out, "validation")
        file = None if checkpoint is None else Path(checkpoint).expanduser()
        with ExitStack() as ending:
            # The captured step's, on its device: from the end on the settings themselves count.
            ending.callback(method.live.clear)
            ending.enter_context(memory_kept(place.type == "cpu"))
            ending.enter_context(layout_kept(method.net))  # after the checks: lazy layers have their weights now
            training = Training(method, batches, held_out, protocol, checkpoint=file, checkpoint_every=checkpoint_every)
            with TrainingProgress(method.label, epochs, training.steps, show=progress) as display, training.interrupts:
                if training.completed or training.partial is not None:
                    made = 0 if training.partial is None else training.partial.steps
                    display.resumed(training.completed * training.steps + made, f"resumed {resumed_at(training)}")
                while not training.done:
                    number = training.completed + 1
                    training.begin(number, display.step)
                    entry = training.finish(number)
                    display.epoch(entry, training.result.best_epoch == number)
                    if callback is not None:
                        callback(entry)
                    training.keep()
            return conclude(training, training.restore_best())


def conclude(training: Training, result: FitResult) -> FitResult:
    """Forget decisions fitted to earlier weights, keep the validation scores that new ones need, warn of collapse."""
    method = training.method
    for stale in (PROBABILITIES, ABSTAIN, UNFAMILIAR, CONFORMAL):
        method.calibration.pop(stale, None)
    scores = held_out_scores(method, validation_batches(training.held_out), training.samples)
    method.calibration[HELD_OUT] = scores | ({NLL: nll} if math.isfinite(nll := result.best_validation_nll) else {})
    result.collapsed = _collapsed(training)
    for line in method.complaints():
        warnings.warn(line, LearningWarning, stacklevel=3)
    return result


def _collapsed(training: Training) -> bool:
    """Tell (and warn) whether the network predicts the same for every image: NLL of about log L."""
    method, result = training.method, training.result
    classes = classes_of(method.likelihood, method.outputs(training.batches.examples(1)[0]))
    if len(result.history) < 5 or not at_chance(result.best_validation_nll, classes):
        return False
    warnings.warn(
        f"{method.label} collapsed to a constant predictor (validation NLL {result.best_validation_nll:.3f}, "
        f"chance is {math.log(classes):.3f}): {REMEDY}",
        CollapseWarning,
        stacklevel=4,
    )
    return True
