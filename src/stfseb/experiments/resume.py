"""A run of `stfseb train` that knows how it was started: its folder is enough to go on with it."""

from __future__ import annotations

import shlex
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stfseb.data.tasks import load_task, task_names
from stfseb.errors import StfsebError
from stfseb.experiments import claims
from stfseb.experiments.records import RECORD, new_folder, read_record
from stfseb.experiments.run import CHECKPOINT, RunConfig, make_method, train_and_evaluate
from stfseb.files import read_json, write_json
from stfseb.methods.registry import key_of
from stfseb.training.interrupts import Interrupted

if TYPE_CHECKING:
    from stfseb.data.tasks import TaskData

NAME = "run.json"
FORMAT = 1


@dataclass(frozen=True)
class ResumableRun:
    """A folder, the task and its context, and the run's settings; `run.json` in the folder holds the same."""

    folder: Path
    task: str
    context: str | None
    config: RunConfig
    data: TaskData

    @classmethod
    def new(cls, base: Path, task: str, config: RunConfig, context: str | None) -> ResumableRun:
        """Make a new folder below `base` for a run, once its settings have been found to be usable."""
        config = replace(config, method=key_of(config.method))
        data = load_task(task).load(context=context)
        make_method(data, config)
        folder = new_folder(base, f"{data.task.name}-{config.method}-seed{config.seed}")
        known = task if task in task_names() else str(Path(task).expanduser().absolute())
        given = {name: value for name, value in asdict(config).items() if name != "complete"}  # laid over the preset
        about = {"format": FORMAT, "task": known, "context": context, "config": _plain(given)}
        write_json(folder / NAME, about)
        return cls(folder, known, context, config, data)

    @classmethod
    def of(cls, folder: Path, device: str | None = None) -> ResumableRun:
        """Return the run in `folder`, on another device if one is given."""
        if not (folder / NAME).exists():
            raise StfsebError(
                f"{folder} holds no run to go on with ({NAME} is missing): give a folder of 'stfseb train'"
            )
        about = read_json(folder / NAME, "run file")
        try:
            if about["format"] > FORMAT:
                raise StfsebError(f"{folder / NAME} is of a newer format than this stfseb reads: upgrade stfseb")
            config = RunConfig(**about["config"])
            task, context = str(about["task"]), about["context"]
        except (KeyError, TypeError) as error:
            raise StfsebError(f"{folder / NAME} cannot be used ({error}): it is damaged or was edited") from error
        config = config if device is None else replace(config, device=device)
        return cls(folder, task, context, config, load_task(task).load(context=context))

    def go_on(self, *, progress: bool = True, checkpoint_every: float | None = None) -> dict[str, Any]:
        """Train from where the run is, evaluate and record it; a complete run's record is only read."""
        held = claims.claim(self.folder, seed=self.config.seed)
        if held is None:
            raise StfsebError(f"{self.folder} is being trained by another process: wait for it, or stop it first")
        with held:
            record = self.folder / RECORD
            if record.exists():
                (self.folder / CHECKPOINT).unlink(missing_ok=True)  # of a run that was stopped in between
                return read_record(record)
            return self._train(progress, checkpoint_every)

    def _train(self, progress: bool, checkpoint_every: float | None) -> dict[str, Any]:
        command = f"stfseb train --resume {shlex.quote(str(self.folder))}"
        try:
            _, record = train_and_evaluate(
                self.data, self.config, self.folder, progress=progress, checkpoint_every=checkpoint_every
            )
        except Interrupted as stop:
            said = stop.remedy.partition(";")[0] if stop.remedy.startswith("saved") else stop.remedy
            raise stop.with_remedy(f"{said}; to go on: {command}") from None
        except StfsebError as error:
            if (self.folder / CHECKPOINT).exists() and str(error).startswith("cannot write"):
                raise StfsebError(f"{error}; the training is kept, to go on: {command}") from error
            raise
        return record


def _plain(config: dict[str, Any]) -> dict[str, Any]:
    """Return the settings as JSON knows them: infinity is a word."""
    settings = {k: "inf" if v == float("inf") else v for k, v in config["settings"].items()}
    return {**config, "settings": settings}
