"""One pass over the test set and the unfamiliar sets: every number of the tables, and the plots' data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from stfseb.errors import StfsebError
from stfseb.evaluation import metrics
from stfseb.evaluation import ood as unfamiliarity
from stfseb.evaluation.inputs import Split, chunks
from stfseb.evaluation.other_targets import evaluate_targets
from stfseb.evaluation.summary import Predictions, summarise
from stfseb.likelihoods import Categorical, Classification
from stfseb.methods.base import Method
from stfseb.methods.calibrated import PROBABILITIES, mapped, tempered
from stfseb.methods.settings import check_count
from stfseb.networks.memory import memory_kept

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

CPU_BATCH, DEVICE_BATCH = 128, 2048


class SamplesLogits(Protocol):
    """What evaluation asks of a method: logits under weight samples that a seed fixes for all chunks."""

    def sample_logits(self, x: Tensor, samples: int | None = None, *, seed: int | None = None) -> Tensor:
        """Return logits (S, B, L)."""


@dataclass(frozen=True)
class Evaluation:
    """The metrics (fractions) of one pass and what plots need of it."""

    metrics: dict[str, float]
    summary: dict[str, Any]


def evaluate(
    method: SamplesLogits,
    test: Split,
    ood: Mapping[str, Split] | None = None,
    *,
    samples: int | None = 10,
    seed: int | None = 0,
    bins: int = 15,
    batch_size: int | None = None,
) -> dict[str, float]:
    """Return how good `method` is on `test`, and how well it sets the sets of `ood` apart, as fractions.

    `acc`, `nll` (nats), `ece` (over `bins` bins) and `brier` (sum over classes) are of the probabilities
    averaged over `samples` weight samples. For every set of `ood`, `auroc/NAME`, `aupr/NAME` and `fpr95/NAME`
    use the maximum softmax probability, `auroc/NAME/entropy` and `auroc/NAME/mutual_information` (and so on)
    the other scores; unfamiliar images are the positives. `test` is (images, labels), an ImageSet, a Dataset
    or a DataLoader; the values of `ood` may also be images alone.

    Where `stfseb.calibrate` fitted a temperature, all numbers are of the tempered probabilities. Isotonic maps
    count for `acc`, `nll`, `ece` and `brier` alone: their steps would tie what the scores must rank.
    Regression and multi-label methods have metrics of their own: see `stfseb.evaluation.other_targets`.
    """
    return assess(
        method, test, ood, samples=samples, seed=seed, bins=bins, batch_size=batch_size, summary=False
    ).metrics


@memory_kept()
def assess(
    method: SamplesLogits,
    test: Split,
    ood: Mapping[str, Split] | None = None,
    *,
    samples: int | None = 10,
    seed: int | None = 0,
    bins: int = 15,
    batch_size: int | None = None,
    summary: bool = True,
) -> Evaluation:
    """Do what `evaluate` does and return also the summary for plots, from the same single pass."""
    for what, value in (("samples", samples), ("bins", bins), ("batch_size", batch_size)):
        if value is not None:
            check_count(**{what: value})
    if not hasattr(method, "sample_logits"):
        kind = type(method).__name__
        raise StfsebError(f"method is a {kind}, which gives no samples: wrap it, stfseb.MAP(net) or another method")
    sets = unfamiliar_sets(ood)
    size = batch_size or batch_size_of(method)
    if isinstance(method, Method) and not isinstance(method.likelihood, Classification):
        found = evaluate_targets(method, test, sets, samples=samples, seed=seed, batch_size=size)
        return Evaluation(metrics=found, summary={})
    familiar, labels = _predict(method, test, "test", size, samples, seed, labels=True)
    unfamiliar = {}
    for name, images in sets.items():
        unfamiliar[name], _ = _predict(method, images, f"ood '{name}'", size, samples, seed, shape=familiar.image_shape)
    return Evaluation(
        metrics=metrics_of(familiar, labels, unfamiliar, bins),
        summary=summarise(familiar, labels, unfamiliar, bins=bins) if summary else {},
    )


def metrics_of(
    test: Predictions, labels: NDArray[np.int64], unfamiliar: Mapping[str, Predictions], bins: int
) -> dict[str, float]:
    """Return every metric of one set of predictions; see `evaluate`."""
    probs = np.exp(test.log_probs)
    found = {
        "acc": metrics.accuracy(probs, labels),
        "nll": metrics.nll(test.log_probs, labels),
        "ece": metrics.ece(probs, labels, bins),
        "brier": metrics.brier(probs, labels),
    }
    for name, other in unfamiliar.items():
        for score in unfamiliarity.SCORES:
            pair = test.scores[score], other.scores[score]
            suffix = name if score == "msp" else f"{name}/{score}"
            found[f"auroc/{suffix}"] = unfamiliarity.auroc(*pair)
            found[f"aupr/{suffix}"] = unfamiliarity.aupr(*pair)
            found[f"fpr95/{suffix}"] = unfamiliarity.fpr95(*pair)
    return found


def _predict(
    method: SamplesLogits,
    split: Split,
    name: str,
    batch_size: int,
    samples: int | None,
    seed: int | None,
    *,
    labels: bool = False,
    shape: tuple[int, ...] = (),
) -> tuple[Predictions, NDArray[np.int64]]:
    (found,), targets = predict_groups(
        method, split, name, batch_size, samples, seed, [slice(None)], labels=labels, shape=shape
    )
    return found, targets


@torch.no_grad()
def predict_groups(
    method: SamplesLogits,
    split: Split,
    name: str,
    batch_size: int,
    samples: int | None,
    seed: int | None,
    groups: Sequence[slice],
    *,
    labels: bool = False,
    shape: tuple[int, ...] = (),
) -> tuple[list[Predictions], NDArray[np.int64]]:
    """Make one pass over a split and return the predictions of each group of its samples, and the labels."""
    classes = getattr(method, "classes", None)
    likelihood = getattr(method, "likelihood", None) or Categorical()
    calibration = getattr(method, "calibration", {})
    targets = []
    log_probs: list[list[metrics.Array]] = [[] for _ in groups]
    scores: list[dict[str, list[metrics.Array]]] = [{score: [] for score in unfamiliarity.SCORES} for _ in groups]
    drawn = [0 for _ in groups]
    for x, y in chunks(split, name, batch_size, labels=labels, classes=classes):
        if shape and tuple(x.shape[1:]) != shape:
            raise StfsebError(f"{name}: image shape {tuple(x.shape[1:])}, but the test images are {shape}")
        shape = tuple(x.shape[1:])
        if isinstance(method, Method):
            method.seen.check(x, name)  # under the name of the split
        logits = method.sample_logits(x, samples, seed=seed)
        if not bool(torch.isfinite(logits).all()):
            raise StfsebError(f"{name}: the network's outputs are not finite; check its training")
        # To the CPU before float64, which some devices do not have.
        outputs = logits.detach().cpu().double()
        values = likelihood.class_log_probs(outputs)
        if values.ndim != 3 or values.shape[1] != len(x) or values.shape[2] < 2:
            raise StfsebError(
                f"{name}: sample_logits gave shape {tuple(logits.shape)} for {len(x)} images; "
                "(samples, images, classes) with at least two classes is needed"
            )
        if y is not None and int(y.max()) >= values.shape[2]:
            raise StfsebError(f"{name}: label {int(y.max())} is outside the {values.shape[2]} classes")
        for index, group in enumerate(groups):
            sampled = values[group].numpy()
            one = tempered(calibration, likelihood, part := outputs[group])
            averaged = sampled if one is part else likelihood.class_log_probs(one).numpy()
            drawn[index] = len(sampled)
            log_probs[index].append(_calibrated(calibration, metrics.log_mean_probs(averaged)))
            for score, function in unfamiliarity.SCORES.items():
                # How far samples disagree is a matter of the samples as they are.
                scores[index][score].append(function(sampled if score == "mutual_information" else averaged))
        if y is not None:
            targets.append(y.numpy())
    predictions = [
        Predictions(
            log_probs=np.concatenate(log_probs[index]),
            scores={score: np.concatenate(parts) for score, parts in scores[index].items()},
            samples=drawn[index],
            image_shape=shape,
        )
        for index in range(len(groups))
    ]
    return predictions, np.concatenate(targets) if targets else np.empty(0, np.int64)


def _calibrated(calibration: dict[str, Any], log_probs: metrics.Array) -> metrics.Array:
    if "maps" not in calibration.get(PROBABILITIES, {}):
        return log_probs
    return mapped(calibration, torch.from_numpy(log_probs).exp()).log().numpy()


def batch_size_of(method: SamplesLogits) -> int:
    """Choose chunks that fit a CPU's memory S-fold, larger ones on an accelerator."""
    parameters = method.parameters() if isinstance(method, torch.nn.Module) else iter(())
    first = next(parameters, None)
    return CPU_BATCH if first is None or first.device.type == "cpu" else DEVICE_BATCH


def unfamiliar_sets(ood: Mapping[str, Split] | None) -> dict[str, Split]:
    """Return the OOD sets by name; raise unless they are a mapping whose names cannot be read as a score."""
    if ood is None:
        return {}
    if not isinstance(ood, Mapping):
        raise StfsebError(f"ood is a {type(ood).__name__}: give sets by name, for example {{'letters': images}}")
    for name in ood:
        if not isinstance(name, str):
            raise StfsebError(f"ood set name {name!r} is a {type(name).__name__}: give a string")
        if not name or name.rpartition("/")[2] in unfamiliarity.SCORES:
            raise StfsebError(f"ood set name '{name}' would be read as a score in 'auroc/{name}'; rename it")
    return dict(ood)
