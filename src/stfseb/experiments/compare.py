"""Several methods on one task, under one protocol, side by side."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from stfseb.errors import StfsebError
from stfseb.experiments.records import RECORD, read_record
from stfseb.experiments.run import (
    CHECKPOINT,
    RunConfig,
    make_method,
    network_notes,
    own_network,
    train_and_evaluate,
    training_of,
)
from stfseb.methods.registry import key_of
from stfseb.training.interrupts import Interrupted
from stfseb.training.progress import in_epochs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from stfseb.data.tasks import TaskData

_OPTIONS = {"--epochs": "protocol epochs", "--batch-size": "batch_size"}  # and what checkpoints call them
_OF_NETWORKS = ("file", "make", "arguments", "sha256")  # what makes a run's own network


def plan(
    methods: Sequence[str], seeds: Sequence[int], settings: dict[str, dict[str, Any]], base: RunConfig
) -> list[RunConfig]:
    """Return the runs of a comparison, each method once, seeds inside methods."""
    keys = list(dict.fromkeys(key_of(name) for name in methods))
    if not keys or not seeds:
        raise StfsebError("nothing to run: give at least one method and one seed")
    strange = {key_of(name) for name in settings} - set(keys)
    if strange:
        raise StfsebError(f"settings were given for '{min(strange)}', which is not among the methods {', '.join(keys)}")
    chosen = {key_of(name): values for name, values in settings.items()}
    return [replace(base, method=key, seed=seed, settings=chosen.get(key, {})) for key in keys for seed in seeds]


def compare(
    data: TaskData, runs: Sequence[RunConfig], folder: Path, *, announce: Callable[[str], None], progress: bool = True
) -> list[dict[str, Any]]:
    """Train and evaluate every run into a folder of its own below `folder`; return the records.

    A run whose record is there is not made again, one that was interrupted goes on from its checkpoint.
    """
    records = []
    for number, config in enumerate(runs, 1):
        label = f"{config.method} (seed {config.seed})"
        target = folder / f"{data.task.name}-{config.method}-seed{config.seed}"
        if (target / RECORD).exists():
            records.append(_known(data, config, target))
            announce(f"[{number}/{len(runs)}] {label} is there already")
            continue
        announce(f"[{number}/{len(runs)}] training {label}")
        try:
            _, record = train_and_evaluate(data, config, target, progress=progress)
        except Interrupted as stop:
            remedy = f"start the same command with --resume {shlex.quote(str(folder))} to go on"
            raise stop.with_remedy(remedy) from None
        except StfsebError as error:
            raise _of_the_folder(error, target, folder) from error
        records.append(record)
        metrics = record["metrics"]
        announce(
            f"[{number}/{len(runs)}] {record['label']}: accuracy {100 * metrics['acc']:.2f} %, "
            f"NLL {metrics['nll']:.3f}, {in_epochs(len(record['history']))} in {record['seconds']:.0f} s"
        )
    return records


def _known(data: TaskData, config: RunConfig, folder: Path) -> dict[str, Any]:
    """Return the record of a run that is complete, if it is the run that is asked for."""
    record = read_record(folder / RECORD)
    method = make_method(data, config)
    asked, network = method.settings.as_dict(), own_network(method) or {}
    for name, wanted, had in (
        *((key, value, record["settings"].get(key)) for key, value in asked.items()),
        *((key, value, record["training"].get(key)) for key, value in training_of(data.task, config).items()),
        *((f"network {key}", network.get(key), (record.get("network") or {}).get(key)) for key in _OF_NETWORKS),
    ):
        if json.loads(json.dumps(wanted)) != had:
            raise StfsebError(
                f"{folder} was run with {name}={had}, not {wanted}: give the same options, or leave --resume out"
            )
    return record


def _of_the_folder(error: StfsebError, target: Path, folder: Path) -> StfsebError:
    """Return an error about another run's checkpoint as one about the comparison's options; others as they are."""
    found = re.match(rf"checkpoint {re.escape(str(target / CHECKPOINT))} is of another run \((.*)\): give", str(error))
    if found is None:
        return error
    said, again = (f"was begun with other options ({found[1]})", "the same options")
    for option, name in _OPTIONS.items():
        if (values := re.fullmatch(rf"{name} is (\d+) there and (\d+) here", found[1])) is not None:
            said, again = f"was begun with {option} {values[1]}, not {values[2]}", f"{option} {values[1]}"
    return StfsebError(f"{folder} {said}: give {again}, or leave --resume out to start a new comparison")


def check(data: TaskData, runs: Sequence[RunConfig]) -> list[str]:
    """Build every method once, so that a wrong setting of the last is found before the first trains.

    Return what is to be said of their networks.
    """
    seen, notes = set(), []
    for config in runs:
        if config.method not in seen:
            seen.add(config.method)
            notes += network_notes(make_method(data, config))
    return [note for note in sorted(set(notes)) if not any(other.startswith(f"{note},") for other in notes)]
