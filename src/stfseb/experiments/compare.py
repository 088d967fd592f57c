"""Several methods on one task, under one protocol, side by side."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from stfseb.errors import StfsebError
from stfseb.experiments.run import RunConfig, make_method, train_and_evaluate
from stfseb.methods.registry import key_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from stfseb.data.tasks import TaskData


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
    """Train and evaluate every run into a folder of its own below `folder`; return the records."""
    records = []
    for number, config in enumerate(runs, 1):
        label = f"{config.method} (seed {config.seed})"
        announce(f"[{number}/{len(runs)}] training {label}")
        target = folder / f"{data.task.name}-{config.method}-seed{config.seed}"
        _, record = train_and_evaluate(data, config, target, progress=progress)
        records.append(record)
        metrics = record["metrics"]
        announce(
            f"[{number}/{len(runs)}] {record['label']}: accuracy {100 * metrics['acc']:.2f} %, "
            f"NLL {metrics['nll']:.3f}, {len(record['history'])} epochs in {record['seconds']:.0f} s"
        )
    return records


def check(data: TaskData, runs: Sequence[RunConfig]) -> None:
    """Build every method once, so that a wrong setting of the last is found before the first trains."""
    seen = set()
    for config in runs:
        if config.method not in seen:
            seen.add(config.method)
            make_method(data, config)
