"""One run: build a network, train a method on a task with a seed, evaluate it, write it down."""

from __future__ import annotations

import math
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from stfseb.errors import StfsebError, unknown
from stfseb.evaluation.evaluate import assess
from stfseb.evaluation.gallery import gallery
from stfseb.experiments.machine import PeakMemory, code_version, machine
from stfseb.experiments.records import write_record
from stfseb.experiments.stopping import run_stoppable
from stfseb.methods.decisions import HELD_OUT
from stfseb.methods.dropout_rates import dropout_rates
from stfseb.methods.ensemble import Ensemble
from stfseb.methods.registry import key_of, method_class
from stfseb.methods.saving import save
from stfseb.methods.settings import check_count
from stfseb.networks import own
from stfseb.networks.cnn import DeepCNN, SmallCNN
from stfseb.networks.registry import own_file, spec_of
from stfseb.training.fit import FitResult, fit

if TYPE_CHECKING:
    from pathlib import Path

    from stfseb.data.images import ImageSet
    from stfseb.data.tasks import Task, TaskData
    from stfseb.methods.base import Method

CHECKPOINT = "checkpoint"  # of a run in its folder, until its record is there
_NETWORKS = {"small": SmallCNN, "deep": DeepCNN}


@dataclass(frozen=True)
class RunConfig:
    """What defines a run: the same config on the same machine gives the same record."""

    method: str
    seed: int = 0
    settings: dict[str, Any] = field(default_factory=dict)  # over the task's preset
    training: dict[str, Any] = field(default_factory=dict)  # over the task's training
    device: str = "cpu"
    complete: bool = False  # the settings are all there are: what they leave out is at the method's default


def default_device() -> str:
    """Return "cuda" where there is one, else "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def usable_device(name: str) -> str:
    """Return the device's name, or raise where there is no such device here."""
    kind, _, number = name.partition(":")
    if kind not in ("cpu", "cuda", "mps"):
        raise StfsebError(f"device '{name}' cannot be used: give cpu, cuda or mps")
    cards = torch.cuda.device_count() if kind == "cuda" else 0
    if cards and (not number or number.isdecimal()):
        if int(number or 0) >= cards:
            raise StfsebError(f"device '{name}' is not there: the last one is cuda:{cards - 1}")
        return name  # without taking memory of it: runs may be done in other processes
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        why = str(error).splitlines()[0]
        raise StfsebError(f"device '{name}' cannot be used here ({why}): leave it out to take what is there") from error
    return name


def make_network(task: Task) -> torch.nn.Module:
    """Return the task's network, freshly initialised from torch's default generator."""
    offered: dict[str, Any] = {
        "in_channels": task.in_channels,
        "classes": task.classes,
        "image_size": task.image_size,
        **({} if task.dropout is None else {"dropout": task.dropout}),
    }
    if isinstance(task.network, str):
        return _NETWORKS[task.network](**{**offered, **task.network_settings})
    net = own.make_own(task.network, task.network_settings, offered)
    own.check_output(net, task.network, (task.in_channels, task.image_size, task.image_size), task.classes)
    return net


def make_method(data: TaskData, config: RunConfig) -> Method:
    """Return the method around a fresh network; weights, extractor and masks follow from the seed.

    An ensemble takes the settings `of` (a method, MAP by default), `members` (5) and `settings` (over the preset of
    `of`); each member has a seed of its own.
    """
    task, key = data.task, key_of(config.method)
    settings = {**({} if config.complete else task.presets.get(key, {})), **config.settings}
    settings = {k: math.inf if v == "inf" else v for k, v in settings.items()}  # as JSON knows it
    if key == "ensemble":
        one = replace(config, method=str(settings.pop("of", "map")), settings=settings.pop("settings", {}))
        count = settings.pop("members", 5)
        check_count(members=count)
        if settings:
            raise StfsebError(f"an ensemble has no setting '{min(settings)}': give 'of', 'members' and 'settings'")
        return Ensemble.of(lambda i: make_method(data, replace(one, seed=1000 * config.seed + i)), count)
    cls = method_class(key)
    names = cls.settings_type.names()
    torch.manual_seed(config.seed)
    if "samples" in names:
        settings.setdefault("samples", {**task.training, **config.training}["train_samples"])
    refuse_reserved(settings)
    for name in settings:
        if name not in names:
            raise unknown("setting", name, names)
    if "num_context" in names and settings.get("functional_scale") != 0:  # without the term no context is needed
        # All training images as they are: rows of a minibatch would be augmented, and could not be captured.
        settings["context"] = (data.train if data.context is None else data.context).images
    try:
        return cls(make_network(task), **settings)
    except TypeError as error:
        raise StfsebError(f"settings of {cls.label} cannot be used: {error}") from error


def own_network(method: Method) -> dict[str, Any] | None:
    """Return how a method's network (of an ensemble the first) was made from a user's file, None for any other."""
    spec = spec_of(method.net)
    return own_file(spec) if spec else None


def network_notes(method: Method) -> list[str]:
    """Say of a user's own network what it is and, where predictions depend on them, its dropout rates."""
    if (made := own_network(method)) is None:
        return []
    rates = sorted(set(dropout_rates(method).values()))
    said = f", dropout {', '.join(f'{rate:g}' for rate in rates)}" if rates else ""
    return [f"network: {made['make']} of {made['file']}{said}"]


def refuse_reserved(settings: dict[str, Any]) -> None:
    """Raise for arguments of a method that a run's settings cannot give."""
    if "context" in settings or "likelihood" in settings:
        raise StfsebError("context and likelihood are not settings of a run: choose the context with --context")


def train_and_evaluate(
    data: TaskData,
    config: RunConfig,
    folder: Path,
    *,
    progress: bool = True,
    more: dict[str, Any] | None = None,
    checkpoint_every: float | None = None,
    together: int = 1,
) -> tuple[Method, dict[str, Any]]:
    """Train, evaluate and save one run into `folder`; return the method and its record.

    The run is kept in `folder/checkpoint` while it trains, every `checkpoint_every` seconds (see `fit`): called
    again with the same folder after whatever has ended it, it goes on from there. SIGTERM and Ctrl-C raise
    `Interrupted` in the evaluation, too, which is then done anew without training again.
    """
    started = time.time()
    with run_stoppable(folder / CHECKPOINT):
        method = make_method(data, config)
        device = torch.device(config.device)
        method.to(device)
        with PeakMemory(device) as memory:
            result = fit(
                method,
                data.train,
                data.validation,
                batch_size=training_of(data.task, config)["batch_size"],
                seed=config.seed,
                augment=augmentation(data.task),
                progress=progress,
                checkpoint=folder / CHECKPOINT,
                checkpoint_every=checkpoint_every,
                **protocol_of(data.task, config),
            )
        record = evaluate_and_record(
            data, config, method, result, folder, started=started, memory=memory.megabytes, together=together, more=more
        )
    return method, record


def evaluate_and_record(
    data: TaskData,
    config: RunConfig,
    method: Method,
    result: FitResult,
    folder: Path,
    *,
    started: float,
    memory: float | None,
    together: int = 1,
    more: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Evaluate a trained method, save it and, last, its record with the entries `more`; return the record.

    `together` is how many runs, this one among them, had the device at a time: above 1 its seconds are no cost.
    The run's checkpoint is removed once the record is written.
    """
    training = training_of(data.task, config)
    for set_rule, share in ((method.ood_threshold, 0.05), (method.abstain, 0.9)):
        with suppress(StfsebError):  # too few validation images to promise that
            set_rule(share)
    evaluation = assess(method, data.test, data.ood, samples=training["test_samples"])
    method.provenance.update(provenance(data))
    save(method, folder / "model")
    record = {
        "id": folder.name,
        "task": data.task.name,
        "task_title": data.task.title,
        "method": method.key,
        "label": method.label,
        "seed": config.seed,
        "settings": method.settings.as_dict(),
        **({"learnt": learnt} if (learnt := method.learnt()) else {}),
        **({"network": network} if (network := own_network(method)) else {}),
        "training": training,
        "classes": data.task.classes,
        "data": _described(data),
        "notes": [*data.notes, *network_notes(method), *_copies(method)],
        "code": code_version(),
        "machine": machine(method.like.device),
        "started": round(started),
        "history": [_short(entry) for entry in result.history],
        "best_epoch": result.best_epoch,
        "stopped": result.stopped,
        "collapsed": result.collapsed,
        "seconds": result.seconds,
        "engine": result.engine,
        "seconds_per_epoch": _seconds_per_epoch(result),
        "peak_memory_mb": memory,
        "together": together,
        "metrics": evaluation.metrics,
        "summary": evaluation.summary,
        "images": gallery(evaluation.summary, data.test, data.ood),
        # The scores of the held-out rows stay with the model alone.
        "calibration": {key: rule for key, rule in method.calibration.items() if key != HELD_OUT},
        **(more or {}),
    }
    write_record(folder, record)
    (folder / CHECKPOINT).unlink(missing_ok=True)
    return record


def training_of(task: Task, config: RunConfig) -> dict[str, Any]:
    """Return how a run is trained: the task's settings under the config's."""
    return {**task.training, **config.training}


def protocol_of(task: Task, config: RunConfig) -> dict[str, Any]:
    """Return the arguments of `fit` and `fit_population` that both take.

    A run's training may have the key `compiled`; without it a step is compiled where that is earned back.
    """
    training = training_of(task, config)
    named = ("epochs", "lr", "patience", *(("compiled",) if "compiled" in training else ()))
    return {name: training[name] for name in named} | {"validation_samples": training["test_samples"]}


def provenance(data: TaskData) -> dict[str, Any]:
    """Return what a saved model says about its data: task, class names, fingerprints, input shape."""
    return {
        "task": data.task.name,
        "class_names": list(data.class_names),
        "input": list(data.train.images.shape[1:]),
        "data": data.fingerprints(),
    }


def augmentation(task: Task) -> Any:
    """Return what is applied to the task's training minibatches, or None."""
    if not task.augment:
        return None
    from stfseb.data.augmentation import flip_and_crop

    return flip_and_crop


def _short(entry: dict[str, Any]) -> dict[str, Any]:
    """Return an epoch's entry with the digits that float32 has."""
    return {key: float(f"{value:.7g}") if isinstance(value, float) else value for key, value in entry.items()}


def _seconds_per_epoch(result: FitResult) -> float:
    """Return the mean training time of an epoch, the first (which warms up) left out where there are more."""
    times = [entry["seconds"] for entry in result.history]
    rest = times[1:] or times
    return float(sum(rest)) / len(rest)


def _copies(method: Method) -> list[str]:
    """Say that a method's context was widened."""
    copies = 0 if method.context is None else getattr(method.settings, "context_copies", 0)
    return [f"context: widened, {copies + 1} images for each: itself and {copies} distorted"] if copies else []


def _described(data: TaskData) -> dict[str, Any]:
    def entry(images: ImageSet) -> dict[str, Any]:
        return {"name": images.name, "count": len(images), "fingerprint": images.fingerprint, "note": images.note}

    parts = {"train": entry(data.train), "validation": entry(data.validation), "test": entry(data.test)}
    if data.context is not None:
        parts["context"] = entry(data.context)
    return parts | {f"ood/{name}": entry(images) for name, images in data.ood.items()}
