"""`fit`: train a method with the paper's protocol.

Adam (5e-4, betas 0.9 and 0.999, eps 1e-8), batches of 128, at most 100 epochs, early stopping with a
patience of 10 on the validation NLL of the Monte Carlo average, best epoch restored.
"""

from __future__ import annotations

import copy
import math
import time
import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from stfseb.errors import StfsebError
from stfseb.inputs import check_pixels
from stfseb.likelihoods import Categorical
from stfseb.methods.base import Method, Terms, check_count, check_positive
from stfseb.methods.calibrated import PROBABILITIES
from stfseb.methods.context import generator
from stfseb.methods.decisions import ABSTAIN, CONFORMAL, HELD_OUT, UNFAMILIAR, held_out_scores
from stfseb.training.batches import Augment, Batches, ResidentBatches, make_batches, split_off
from stfseb.training.engine import Engine, make_engine, make_optimiser
from stfseb.training.precision import resolve, running
from stfseb.training.progress import TrainingProgress
from stfseb.training.validation import Score, validation_score

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor

_PREPARE = 8192  # examples a streamed data set hands to `prepare`
_VALIDATION_ROWS = 1024


class DivergedError(StfsebError):
    """Training met a value that is not finite."""


class CollapseWarning(UserWarning):
    """The network predicts the same for every image."""


@dataclass
class FitResult:
    """What a run did: one entry an epoch (terms in nats per example), and how it ended."""

    history: list[dict[str, Any]] = field(default_factory=list)
    best_epoch: int = 0
    best_validation_nll: float = math.inf
    stopped: str = ""  # "patience" or "epochs"
    engine: str = ""  # how the steps were run, in words
    collapsed: bool = False
    seconds: float = 0.0

    def __str__(self) -> str:
        return (
            f"{len(self.history)} epochs in {self.seconds:.0f} s (stopped by {self.stopped}), best epoch "
            f"{self.best_epoch} with validation NLL {self.best_validation_nll:.4f}"
        )


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
) -> FitResult:
    """Train `method` and leave it at its best epoch.

    Args:
        method: any `Method`; its network is trained in place.
        train: (x, y) tensors or arrays, an image set, a Dataset or a DataLoader. uint8 pixels are scaled
            to [0, 1].
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
        precision: "float32", "tf32", "bf16" or "auto"; see `stfseb.training.precision`.
        capture: run each step as one CUDA graph; by default wherever that can be done.
        compiled: compile the captured step; by default where the run is long enough to earn it back.
        progress: show a bar (terminal) or a line an epoch.
        callback: called after each epoch with its history entry.
    """
    check_count(epochs=epochs, batch_size=batch_size, patience=patience)
    check_positive(lr=lr)
    if device is not None:
        method.to(device)
    place = method.like.device
    if validation is None:
        if isinstance(train, torch.utils.data.DataLoader):
            raise StfsebError("validation is missing: with a DataLoader give validation=(x, y) or another DataLoader")
        train, validation = split_off(train, 0.1)
    batches = make_batches(train, batch_size, seed, place, augment)
    held_out = make_batches(validation, _VALIDATION_ROWS, seed, place)
    _check(method, batches, "train")
    _check(method, held_out, "validation")
    result = FitResult()
    started = time.perf_counter()
    # The caller's random state is left alone, and every epoch starts from its own (so that it can be resumed).
    with torch.random.fork_rng(devices=[place] if place.type == "cuda" else []):
        torch.manual_seed(generator(seed, 4, 0).initial_seed())
        method.reseed(seed)
        method.prepare(*batches.examples(batches.num_data if isinstance(batches, ResidentBatches) else _PREPARE))
        method.train()
        optimiser = make_optimiser(method, lr=lr, betas=betas, eps=eps)
        engine = make_engine(
            method, batches, optimiser, precision=precision, capture=capture, compiled=compiled, epochs=epochs
        )
        result.engine = engine.description
        chosen = resolve(precision, method.net)
        best = copy.deepcopy(method.state_dict())
        steps = -(-batches.num_data // batches.batch_size)
        with TrainingProgress(method.label, epochs, steps, show=progress) as display:
            for number in range(1, epochs + 1):
                torch.manual_seed(generator(seed, 4, number).initial_seed())
                entry = _train_epoch(method, engine, batches.num_data, number, display)
                score = validate(method, held_out, validation_samples or method.samples, chosen)
                entry |= {"validation_nll": score.nll, "validation_accuracy": score.accuracy}
                result.history.append(entry)
                better = score.nll < result.best_validation_nll
                if better:
                    result.best_epoch, result.best_validation_nll = number, score.nll
                    best = copy.deepcopy(method.state_dict())
                display.epoch(entry, better)
                if callback is not None:
                    callback(entry)
                if number - result.best_epoch >= patience:
                    result.stopped = "patience"
                    break
            else:
                result.stopped = "epochs"
        method.load_state_dict(best)
    method.eval()
    for stale in (PROBABILITIES, ABSTAIN, UNFAMILIAR, CONFORMAL):
        method.calibration.pop(stale, None)
    method.calibration[HELD_OUT] = held_out_scores(
        method, _validation_batches(held_out), validation_samples or method.samples
    )
    result.seconds = time.perf_counter() - started
    result.collapsed = _collapsed(method, batches, result)
    return result


def _train_epoch(
    method: Method, engine: Engine, num_data: int, number: int, display: TrainingProgress
) -> dict[str, Any]:
    """Make one pass over the data and return its figures, the terms in nats per example."""
    started = time.perf_counter()
    method.train()
    sums = engine.epoch(number, display.step, lambda terms: _check_finite(method, terms, number))
    figures = (sums / num_data).tolist()
    if not all(map(math.isfinite, figures)):
        _check_finite(method, Terms(*sums), number)
    entry: dict[str, Any] = {"epoch": number, **dict(zip(Terms._fields, figures, strict=True))}
    entry["seconds"] = time.perf_counter() - started
    return entry


def _check_finite(method: Method, terms: Terms, epoch: int) -> None:
    for name, value in zip(Terms._fields, (float(term.detach()) for term in terms), strict=True):
        if not math.isfinite(value):
            settings = ", ".join(f"{k}={v}" for k, v in method.settings.as_dict().items())
            raise DivergedError(
                f"the {name} term became {value} in epoch {epoch} of {method.label} ({settings}): "
                "lower the learning rate, or weaken the prior (larger sigma, tau2)"
            )


def _check(method: Method, batches: Batches, what: str) -> None:
    x, y = batches.examples(batches.num_data if isinstance(batches, ResidentBatches) else batches.batch_size)
    check_pixels(x, f"{what} x")
    try:
        outputs = method.outputs(x)
    except RuntimeError as error:
        raise StfsebError(
            f"{what} x of shape {tuple(x.shape)} does not fit the network: {str(error).splitlines()[0]}"
        ) from error
    method.likelihood.check_targets(y, outputs)


def validate(method: Method, batches: Batches, samples: int, precision: str) -> Score:
    """Return the validation score in the precision of the training."""
    with running(precision, method.like.device):
        return validation_score(method, _validation_batches(batches), samples)


def _validation_batches(batches: Batches) -> Iterable[tuple[Tensor, Tensor]]:
    if isinstance(batches, ResidentBatches):
        return zip(batches.x.split(batches.batch_size), batches.y.split(batches.batch_size), strict=True)
    return batches.epoch(0)


def _collapsed(method: Method, batches: Batches, result: FitResult) -> bool:
    """Tell (and warn) whether the network predicts the same for every image: NLL of about log L."""
    if not isinstance(method.likelihood, Categorical):
        return False
    classes = method.outputs(batches.examples(1)[0])
    chance = math.log(classes)
    if classes == 1 or len(result.history) < 5 or result.best_validation_nll < chance - 0.01:
        return False
    warnings.warn(
        f"{method.label} collapsed to a constant predictor (validation NLL {result.best_validation_nll:.3f}, "
        f"chance is {chance:.3f}): try another seed, a larger sigma or tau2, or a lower learning rate",
        CollapseWarning,
        stacklevel=3,
    )
    return True
