"""How a folder of results stands: what is done, running, failed and left, with times.

Read from the plan, the records, the failures, the claims and the studies; nothing is written, and runs under way are
not disturbed.
"""

from __future__ import annotations

import json
import re
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from stfseb.errors import StfsebError
from stfseb.experiments import claims
from stfseb.experiments.executors.dask_held import QUEUED
from stfseb.experiments.executors.failures import read_failure
from stfseb.experiments.executors.log import read_log
from stfseb.experiments.executors.plan_file import read_plan
from stfseb.experiments.study_count import count_trials
from stfseb.files import read_json

STATES = ("done", "running", "failed", "left")
_LARGEST_HEADER = 1 << 26


@dataclass
class RunStatus:
    """One run: its state, and what there is to know in that state."""

    name: str
    task: str
    method: str
    seed: int | None
    state: str
    seconds: float | None = None  # that it took (by the record alone: its training), or since the claim
    epochs: int | None = None  # at most
    epoch: int | None = None  # complete ones in the checkpoint
    who: dict[str, Any] = field(default_factory=dict)  # holds the claim
    missing: list[str] = field(default_factory=list)  # parts that are asked for beside the record
    attempt: int = 0
    error: str = ""
    traceback: str = ""

    @property
    def label(self) -> str:
        """The run in a few words."""
        return f"{self.task} {self.method}" + ("" if self.seed is None else f" seed {self.seed}")


@dataclass
class SearchStatus:
    """One search: how many of its trials are finished, by its study and by what its workers wrote last."""

    study: str
    finished: int | None = None  # None: no worker has ended yet, and the study is not beside (PostgreSQL)
    asked: int | None = None

    @property
    def kind(self) -> str:
        """What is counted: the name of a study (`Plan.name`) says whether it is a final."""
        return "finalists" if re.search(r"-final\d+of\d+$", self.study) else "trials"


@dataclass
class Status:
    """All runs and searches of a results folder."""

    runs: list[RunStatus]
    searches: list[SearchStatus] = field(default_factory=list)

    def of(self, state: str) -> list[RunStatus]:
        """Return the runs in a state."""
        return [run for run in self.runs if run.state == state]

    @property
    def counts(self) -> dict[str, int]:
        """How many runs are in each state."""
        return {state: len(self.of(state)) for state in STATES}

    @property
    def queued(self) -> int:
        """How many of those that are left wait for a Dask worker."""
        return sum(bool(run.who) for run in self.of("left"))

    @property
    def seconds_left(self) -> float | None:
        """Time the rest will take as runs of its kind have taken, with as many at a time as now; None: no idea."""
        times: dict[tuple[str, str], list[float]] = {}
        for run in self.of("done"):
            times.setdefault((run.task, run.method), []).append(run.seconds or 0.0)
        if not times:
            return None
        means = {kind: fmean(found) for kind, found in times.items()}
        usual = fmean(means.values())
        rest = sum(means.get((run.task, run.method), usual) for run in self.of("left"))
        for run in self.of("running"):
            rest += max(0.0, means.get((run.task, run.method), usual) - (run.seconds or 0.0))
        return rest / max(1, len(self.of("running")))

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain data."""
        return {
            "counts": self.counts,
            "seconds_left": self.seconds_left,
            "runs": [asdict(run) for run in self.runs],
            "searches": [asdict(search) for search in self.searches],
        }


def status(results: Path) -> Status:
    """Look at a results folder."""
    if results.exists() and not results.is_dir():
        raise StfsebError(f"{results} is not a folder: give the one that 'paper' or 'search' wrote, --out")
    if not results.is_dir():
        raise StfsebError(
            f"results folder {results} does not exist: give the one that 'paper' or 'search' wrote, --out"
        )
    plan = read_plan(results)
    places = {name: results / str(entry["folder"]) for name, entry in plan.items()}
    for folder in sorted(results.glob("runs/*/*/")):
        places.setdefault(folder.name, folder)
    searches = [_search(folder) for folder in sorted(results.glob("searches/*/"))]
    if not places and not searches:
        raise StfsebError(f"nothing was planned or done in {results}: give the folder that holds 'runs' or 'searches'")
    took = {line["run"]: line["seconds"] for line in read_log(results) if line.get("seconds")}
    runs = [_look(name, folder, plan.get(name, {}), took.get(name)) for name, folder in places.items()]
    return Status(runs, searches)


def _search(folder: Path) -> SearchStatus:
    counts = [count_trials(folder / "study.db", folder.name)]
    if (folder / "search.json").exists():
        found = read_json(folder / "search.json", "search")
        counts.append((len(found.get("trials", ())), int(found.get("asked") or 0)))
    # What is finished stays so: of a study and a copy from another machine the one with more is newer.
    return SearchStatus(folder.name, *max((count for count in counts if count is not None), default=(None, None)))


def _look(name: str, folder: Path, planned: dict[str, Any], took: float | None) -> RunStatus:
    method, _, rest = name.partition("-seed")
    number = rest.partition("-")[0]
    run = RunStatus(
        name,
        task=folder.parent.name,
        method=method,
        seed=int(number) if number.isdecimal() else None,
        state="left",
        epochs=planned.get("training", {}).get("epochs"),
    )
    recorded = (folder / "record.json").exists()
    if recorded:
        record = read_json(folder / "record.json", "record")
        run.seconds = max(
            float(took or 0.0), float(record.get("seconds") or 0.0)
        )  # a resumed run took more than its end
        run.epoch = len(record.get("history", ()))
        run.missing = [part for part in planned.get("parts", ()) if not (folder / f"{part}.json").exists()]
        if not run.missing:
            run.state = "done"
            return run
    held = claims.holder(folder)
    failure = read_failure(folder)
    if failure is not None:
        run.attempt, run.error = int(failure.get("attempt", 1)), str(failure.get("error", ""))
        run.traceback = str(failure.get("traceback", ""))
    if held is not None:
        run.state, run.who = ("left" if held.get("state") == QUEUED else "running"), held
        run.seconds = max(0.0, time.time() - float(held.get("since", time.time())))
    elif failure is not None:
        run.state = "failed"
    if not recorded:
        # A Dask worker trains in a folder of its own, which may be on this machine too.
        run.epoch = _epochs_in(Path(run.who.get("checkpoint") or folder / "checkpoint"))
    return run


def _epochs_in(checkpoint: Path) -> int | None:
    """Return how many epochs a checkpoint holds, from the header of the file alone."""
    try:
        with checkpoint.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            if not 0 < size < _LARGEST_HEADER:
                return None
            said = json.loads(file.read(size))["__metadata__"]["stfseb checkpoint"]
        return int(json.loads(said)["state"]["epoch"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
