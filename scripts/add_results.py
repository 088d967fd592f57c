"""Add finished runs and searches of another folder to results/: `python scripts/add_results.py FROM [--into results]`.

Copied are records and what was measured beside them (no models, no checkpoints), galleries (images.json) of the lowest
seed of each cell only, and searches (search.json, preset.yaml). A folder appears at once or not at all. A run that is
there already gets the parts that it lacks, also from the same run made again where every epoch and metric came out the
same (the record that is there stays); one that is there with other numbers is refused, before anything is copied.
A search may be replaced by one that has all its trials and more. Then: `make results`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from stfseb.errors import StfsebError
from stfseb.experiments.jobs import Job
from stfseb.experiments.records import IMAGES, RECORD
from stfseb.experiments.search.outcome import read_search
from stfseb.files import read_json, write_bytes
from stfseb.methods.registry import method_class
from stfseb.report.reading import PARTS

ROOT = Path(__file__).resolve().parents[1]
SEARCH = ("search.json", "preset.yaml")
# What two runs of one job may differ in and be the same.
CIRCUMSTANCES = ("code", "machine", "started", "seconds", "seconds_per_epoch", "peak_memory_mb", "together", "engine")


def check_run(folder: Path) -> dict[str, Any]:
    """Return a run's record whose name is the hash of what it says it is, or say what is wrong with it."""
    record = read_json(folder / RECORD, "record")
    try:
        name, called, _ = Job(**record["job"]).name, record["id"], record["task"]
    except (AttributeError, KeyError, TypeError) as error:
        raise StfsebError(f"{folder} is no run of 'stfseb paper' or a list of jobs: it cannot be traced") from error
    if not name == called == folder.name:
        raise StfsebError(f"{folder} says that it is {called}, and by its contents it is {name}: do not rename runs")
    for setting, was, planned in disagreements(record):
        raise StfsebError(f"{folder} was planned with {setting}={planned} and run with {setting}={was}: run it again")
    for part in files_of(folder):
        read_json(folder / part, part)  # a damaged file is refused before anything is copied
    return dict(record)


def disagreements(record: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """Return what a run had otherwise than its job says, settings and training, each as it was and should have been.

    What a job leaves out is judged only where it is left out at its default (`Settings.later`). Settings of ensembles
    are not judged.
    """
    job, trained = record["job"], record.get("training", record["job"]["training"])
    found = [(name, trained.get(name), value) for name, value in job["training"].items() if trained.get(name) != value]
    if job["method"] == "ensemble" or "settings" not in record:
        return found
    kind = method_class(job["method"]).settings_type
    had, planned = (
        {**kind.later(), **kind.plain({k: v for k, v in given.items() if k in kind.names()})}
        for given in (record["settings"], job["settings"])
    )
    return found + [(name, had.get(name), value) for name, value in planned.items() if had.get(name) != value]


def files_of(folder: Path) -> list[str]:
    """Return the names of a run's files that are kept, the record last."""
    names = (*(f"{part}.json" for part in PARTS), IMAGES, RECORD)
    return [name for name in names if (folder / name).is_file()]


def conflicts(source: Path, target: Path, names: list[str]) -> list[str]:
    """Return the files that are in both and differ; of records, in what was learnt."""
    both = [name for name in names if name != IMAGES and (target / name).exists()]
    differing = [name for name in both if (source / name).read_bytes() != (target / name).read_bytes()]
    if RECORD in differing and learnt(source) == learnt(target):
        differing.remove(RECORD)
    return differing


def learnt(folder: Path) -> dict[str, Any]:
    """Return what a run came to: all of its record but when, where, how fast and by which version it was made."""
    record = read_json(folder / RECORD, "record")
    epochs = [{key: value for key, value in epoch.items() if key != "seconds"} for epoch in record.get("history") or []]
    return {key: value for key, value in record.items() if key not in CIRCUMSTANCES} | {"history": epochs}


def copy(source: Path, target: Path, names: list[str], into: Path) -> bool:
    """Copy files into a folder that appears whole, or add what an existing one lacks; return whether it was new."""
    if target.exists():
        for name in names:
            if not (target / name).exists() or name in SEARCH:
                write_bytes(target / name, (source / name).read_bytes())
        return False
    target.parent.mkdir(parents=True, exist_ok=True)
    # Not below runs/ or searches/: what a killed command leaves there would be read as a run of its own.
    with tempfile.TemporaryDirectory(prefix=".adding-", dir=into) as beside:
        part = Path(beside) / target.name
        part.mkdir()
        for name in names:
            shutil.copyfile(source / name, part / name)
        part.rename(target)
    return True


def grown(source: Path, target: Path) -> bool:
    """Tell whether a search may take the place of the one that is there: it has all its trials, and more."""
    old, new = read_search(target), read_search(source)
    trials = {json.dumps(t, sort_keys=True) for t in new["trials"]}
    return old["plan"] == new["plan"] and all(json.dumps(t, sort_keys=True) in trials for t in old["trials"])


def thin_galleries(runs: Path) -> int:
    """Keep the gallery of the lowest seed that has one in each cell: runs that differ in nothing but the seed."""
    cells: dict[str, list[tuple[int, Path]]] = {}
    for path in sorted(runs.rglob(IMAGES)):
        if not path.with_name(RECORD).exists():  # a run under way, or broken off: its record is written after them
            continue
        job = read_json(path.with_name(RECORD), "record").get("job")
        if not job:
            continue
        key = json.dumps({k: v for k, v in job.items() if k != "seed"}, sort_keys=True)
        cells.setdefault(key, []).append((job["seed"], path))
    spare = [path for found in cells.values() for _, path in sorted(found)[1:]]
    for path in spare:
        path.unlink()
    return len(spare)


def add(source: Path, into: Path, keep: bool = False) -> str:
    """Add everything below `source` and return what was done; `keep` leaves out what is there otherwise."""
    runs = [(path.parent, check_run(path.parent)) for path in sorted(source.rglob(RECORD))]
    searches = [path.parent for path in sorted(source.rglob("search.json"))]
    if not runs and not searches:
        raise StfsebError(f"{source} holds no {RECORD} and no search.json: give a folder of results")
    planned: dict[Path, list[tuple[Path, list[str]]]] = {}
    differing = []
    for folder, record in runs:
        target, names = into / "runs" / record["task"] / folder.name, files_of(folder)
        others = [target, *(other for other, _ in planned.get(target, ()))]  # one run may lie below FROM twice
        if any(conflicts(folder, other, names) for other in others):
            differing.append(folder)
        else:
            planned.setdefault(target, []).append((folder, names))
    for folder in searches:
        target = into / "searches" / folder.name
        others = [*([target] if target.exists() else []), *(other for other, _ in planned.get(target, ()))]
        if not all(grown(folder, other) for other in others):
            differing.append(folder)
        else:
            planned[target] = [(folder, [name for name in SEARCH if (folder / name).is_file()])]
    if differing and not keep:
        raise StfsebError(
            f"{len(differing)} runs or searches are in {into}, or twice in {source}, with other contents (the first: "
            f"{differing[0]}): nothing was copied; remove one of the two, or keep what is there with --keep"
        )
    lent = sum(
        target.exists() and not (target / name).exists() and name != IMAGES
        for target, found in planned.items()
        for _, names in found
        for name in names
    )
    new = sum(copy(folder, target, names, into) for target, found in planned.items() for folder, names in found)
    thin_galleries(into / "runs")
    left = f", {len(differing)} that differ were left out" if differing else ""
    parts = f", {lent} part{'s' * (lent != 1)} came to runs that were there" if lent else ""
    return f"{new} of {len(planned)} runs and searches are new in {into}{parts}{left}. Now: make results"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", metavar="FROM", type=Path)
    parser.add_argument("--into", type=Path, default=ROOT / "results")
    parser.add_argument("--keep", action="store_true", help="leave out what is there already with other contents")
    given = parser.parse_args()
    try:
        print(add(given.source, given.into, given.keep))
    except StfsebError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
