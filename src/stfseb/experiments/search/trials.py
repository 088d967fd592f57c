"""Training the trials of a search as a population, and measuring each of them.

A trial sees training images, validation images and context images, and nothing else: test images and unfamiliar
sets are taken out of the task's data before the first trial starts. A tenth of the context images (500 at least)
is held back from every trial, whatever its method, and stands for what is unfamiliar.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from stfseb.data.loading import hold_out
from stfseb.errors import StfsebError
from stfseb.evaluation.calibration import best_temperature, raw_outputs
from stfseb.evaluation.metrics import ece
from stfseb.evaluation.ood import auroc
from stfseb.experiments.machine import code_version, machine
from stfseb.experiments.run import augmentation, make_method, protocol_of
from stfseb.experiments.search.pruning import NEVER, Frontier, Pruning
from stfseb.methods.calibrated import PROBABILITIES, tempered
from stfseb.training.engine import worth_compiling
from stfseb.training.fit import CollapseWarning
from stfseb.training.population import Member, Outcome, fit_population

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from stfseb.data.images import ImageSet
    from stfseb.data.tasks import TaskData
    from stfseb.experiments.search.plan import Plan
    from stfseb.experiments.search.store import Claim
    from stfseb.methods.base import Method

_HELD_BACK, _AT_LEAST, _SEED = 0.1, 500, 11  # of the context images; which ones never changes
_CHECKPOINT = 60.0  # seconds
_HUGE = 1e6  # stands for an NLL that is not finite
History = list[dict[str, Any]]


@dataclass(frozen=True)
class SearchData:
    """What a search may look at: no test image is in it, and no unfamiliar set."""

    data: TaskData
    held_back: ImageSet | None  # None: the training images serve as context

    def facts(self) -> dict[str, Any]:
        """Return the fingerprints by which workers see that they have the same images."""
        roles = self.data.fingerprints()
        found = {role: roles[role] for role in ("train", "validation", "context") if role in roles}
        return found | ({} if self.held_back is None else {"held_back": self.held_back.fingerprint})


def search_data(data: TaskData) -> SearchData:
    """Hold back context images, and take the test images and unfamiliar sets away."""
    without = replace(data, test=data.validation, ood={})
    if data.context is None:
        return SearchData(without, None)
    count = len(data.context)
    held = max(round(_HELD_BACK * count), min(_AT_LEAST, count // 2))
    if not 0 < held < count:
        raise StfsebError(f"context: {count} images are too few to hold some back; use --context train")
    rest, back = hold_out(data.context, held / count, _SEED)
    return SearchData(replace(without, context=rest), back)


@dataclass
class Trainer:
    """Trains trials on a device, `width` at a time where it is a CUDA device."""

    plan: Plan
    material: SearchData
    device: str = "cpu"
    width: int = 3
    pruning: Pruning = NEVER
    frontier: Frontier = field(default_factory=Frontier)
    on_epoch: Callable[[Claim, History], None] | None = None
    checkpoints: Path | None = None  # a folder: trials that were interrupted go on from there
    trials: int = 1  # of the whole search: whether a step is worth compiling goes by what is to come

    def __post_init__(self) -> None:
        self.made = {"code": code_version(), "device": machine(torch.device(self.device))["device"]}

    def __call__(self, claims: Iterable[Claim]) -> Iterator[tuple[Claim, dict[str, Any]]]:
        """Yield each claim with its result as it is done."""
        data = self.material.data
        by_name: dict[str, Claim] = {}
        self.histories: dict[str, History] = {}
        self.reasons: dict[str, str] = {}

        def members() -> Iterator[Member]:
            for claim in claims:
                config = self.plan.job(claim.params).config(self.device)
                by_name[str(claim.index)] = claim
                kept = None if self.checkpoints is None else self.checkpoints / f"{claim.index}.safetensors"
                yield Member(str(claim.index), lambda config=config: make_method(data, config), config.seed, kept)  # type: ignore[misc]

        def prune(member: Member, history: History) -> bool:
            self.histories[member.name] = history
            if self.on_epoch is not None:
                self.on_epoch(by_name[member.name], history)
            curves = _curves(history)
            reason = self.pruning.reason(curves["nll"], curves["accuracy"], self.frontier, data.task.classes)
            self.reasons[member.name] = reason
            return bool(reason)

        config = self.plan.job({}).config(self.device)
        protocol = protocol_of(data.task, config)
        steps = len(data.train) // self.plan.training["batch_size"] * protocol["epochs"]
        protocol = {"compiled": worth_compiling(max(1, self.trials // self.width) * steps), **protocol}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CollapseWarning)  # it is in the result
            for outcome in fit_population(
                members(),
                data.train,
                data.validation,
                width=self.width,
                batch_size=self.plan.training["batch_size"],
                device=self.device,
                augment=augmentation(data.task),
                prune=prune,
                checkpoint_every=_CHECKPOINT,
                **protocol,
            ):
                result = {**self._result(outcome), **self.made}
                yield by_name[outcome.member.name], result  # and comes back when it is written down
                if outcome.member.checkpoint is not None:
                    outcome.member.checkpoint.unlink(missing_ok=True)

    def _result(self, outcome: Outcome) -> dict[str, Any]:
        name = outcome.member.name
        if outcome.result is None or outcome.method is None:
            if "memory" in outcome.error:  # the machine's trouble and not the trial's
                raise StfsebError(f"{outcome.error}; lower --width, then start the same command again")
            return self._diverged(self.histories.get(name, []), outcome.error)
        fitted = outcome.result
        if not math.isfinite(fitted.best_validation_nll):
            return self._diverged(fitted.history, "the validation NLL was never finite")
        found: dict[str, Any] = {
            "outcome": "pruned" if fitted.stopped == "pruned" else "complete",
            "reason": self.reasons.get(name, "") if fitted.stopped == "pruned" else fitted.stopped,
            "nll": fitted.best_validation_nll,
            "best_epoch": fitted.best_epoch,
            "epochs": len(fitted.history),
            "seconds": round(fitted.seconds, 3),
            "collapsed": fitted.collapsed or self.reasons.get(name, "").startswith("collapsed"),
            "history": _curves(fitted.history),
        }
        if found["outcome"] == "complete":
            samples = self.plan.training["test_samples"]
            found["metrics"] = measure(outcome.method, self.material.data.validation, self.material.held_back, samples)
        return found

    @staticmethod
    def _diverged(history: History, reason: str) -> dict[str, Any]:
        seconds = round(sum(entry["seconds"] for entry in history), 3)
        curves = _curves(history)
        return {"outcome": "diverged", "reason": reason, "epochs": len(history), "seconds": seconds, "history": curves}


@torch.no_grad()
def measure(method: Method, validation: ImageSet, held_back: ImageSet | None, samples: int) -> dict[str, Any]:
    """Return NLL, accuracy, ECE and AUROC on validation (and held-back) images, before and after one temperature."""
    assert validation.labels is not None
    outputs = raw_outputs(method, validation, samples)
    labels = validation.labels.to(outputs.device)
    other = None if held_back is None else raw_outputs(method, held_back, samples)
    temperature = best_temperature(method, outputs, labels)
    found: dict[str, Any] = {"temperature": temperature}
    likelihood = method.likelihood
    for prefix, fitted in (("", {}), ("tempered_", {PROBABILITIES: {"temperature": temperature}})):
        scaled = tempered(fitted, likelihood, outputs)
        losses = -likelihood.log_predictive(scaled, labels)
        probs = likelihood.predict(scaled).cpu().numpy()
        found[f"{prefix}nll"] = float(losses.mean())
        found[f"{prefix}nll_se"] = float(losses.std()) / math.sqrt(len(losses)) if len(losses) > 1 else 0.0
        found[f"{prefix}accuracy"] = float((probs.argmax(1) == validation.labels.numpy()).mean())
        found[f"{prefix}ece"] = ece(probs, validation.labels.numpy())
        found[f"{prefix}auroc"] = None
        if other is not None:
            scores = (likelihood.uncertainty(v).cpu().numpy() for v in (scaled, tempered(fitted, likelihood, other)))
            found[f"{prefix}auroc"] = auroc(*scores)
    return found


def _curves(history: History) -> dict[str, list[float]]:
    """Return the validation curves; six decimals, as hundreds of trials are kept, and no value that JSON lacks."""
    return {
        "nll": [round(v, 6) if math.isfinite(v := entry["validation_nll"]) else _HUGE for entry in history],
        "accuracy": [round(entry["validation_accuracy"], 6) for entry in history],
    }
