"""Put what searches chose into tasks.yaml: `python scripts/adopt_presets.py FOLDER TASK [METHOD ...] [--trials N]`.

FOLDER holds searches/ (results/, say). Of each method the final of a search counts where there is one, else the search
itself; it must be finished, and the only one of its kind (--trials 40: of those with forty trials). What our rule chose
goes into the method's line of the task's `presets`; settings that were not searched and comments stay as they are.
"""

from __future__ import annotations

import argparse
import re
import sys
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from stfseb.data.task_files import METHODS, built_in
from stfseb.errors import StfsebError
from stfseb.experiments.search.outcome import read_search


def of_trials(search: dict[str, Any]) -> int:
    """Return the number of trials of a search, or of the one whose final it is."""
    return int((search["plan"].get("shortlist") or {"trials": search["asked"]})["trials"])


def chosen(folder: Path, task: str, method: str, trials: int | None = None) -> dict[str, Any] | None:
    """Return the settings that our rule chose in the only search of a method, None where there is no search."""
    found = [read_search(path.parent) for path in sorted(folder.glob(f"searches/{task}-{method}-*/search.json"))]
    found = [one for one in found if trials is None or of_trials(one) == trials]
    counting = [one for one in found if one["plan"].get("shortlist")] or found
    if not counting:
        return None
    if len(counting) > 1:
        names = ", ".join(one["study"] for one in counting)
        raise StfsebError(f"{task}, {method}: {len(counting)} searches ({names}): say which with --trials, or move one")
    (search,) = counting
    trial = search["choices"]["ours"]["trial"]
    if trial is None or len(search["trials"]) != search["asked"]:
        done = f"{len(search['trials'])} of {search['asked']}"
        raise StfsebError(f"{search['study']} has {done} trials: finish it first (stfseb search)")
    return dict(next(one["params"] for one in search["trials"] if one["index"] == trial))


def written(value: Any) -> str:
    """Write a setting as YAML 1.1 reads it back."""
    text = repr(value) if isinstance(value, float) else str(value)
    return text.replace("e", ".0e", 1) if isinstance(value, float) and "e" in text and "." not in text else text


def with_preset(text: str, task: str, method: str, settings: dict[str, Any]) -> str:
    """Return tasks.yaml with a method's settings in a task's presets."""
    lines = text.splitlines(keepends=True)
    starts = [i for i, line in enumerate(lines) if re.match(rf"  {re.escape(task)}:\s*$", line)]
    if len(starts) != 1:
        raise StfsebError(f"tasks.yaml has no task '{task}' on a line of its own")
    end = next((i for i in range(starts[0] + 1, len(lines)) if re.match(r"  \S", lines[i])), len(lines))
    head = next((i for i in range(starts[0], end) if re.match(r"    presets:\s*(#.*)?$", lines[i])), None)
    if head is None:
        raise StfsebError(f"tasks.yaml: write the presets of '{task}' a method a line, then again")
    last = head
    while last + 1 < end and re.match(r"      \w+: \{", lines[last + 1]):
        last += 1
    there = next((i for i in range(head + 1, last + 1) if lines[i].startswith(f"      {method}: ")), None)
    former = {} if there is None else yaml.safe_load(lines[there])[method]
    comment = "" if there is None else lines[there].partition("}")[2].rstrip("\n")
    whole = ", ".join(f"{name}: {written(value)}" for name, value in {**former, **settings}.items())
    place = slice(last + 1, last + 1) if there is None else slice(there, there + 1)
    lines[place] = [f"      {method}: {{{whole}}}{comment}\n"]
    return "".join(lines)


def adopt(
    folder: Path, task: str, methods: tuple[str, ...] = (), trials: int | None = None, file: Path | None = None
) -> list[str]:
    """Edit tasks.yaml (the package's own) and return a line for each method that has a search."""
    path = Path(str(resources.files("stfseb.data"))) / "tasks.yaml" if file is None else file
    text, said = path.read_text(encoding="utf-8"), []
    for method in methods or METHODS:
        settings = chosen(folder, task, method, trials)
        if settings is not None:
            text = with_preset(text, task, method, settings)
            said.append(f"{task}, {method}: {settings}")
    if not said:
        raise StfsebError(f"{folder} has no search of {', '.join(methods or METHODS)} on {task}")
    path.write_text(text, encoding="utf-8")
    built_in.cache_clear()
    return said


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", metavar="FOLDER", type=Path)
    parser.add_argument("task", metavar="TASK")
    parser.add_argument("methods", metavar="METHOD", nargs="*")
    parser.add_argument("--trials", type=int, help="only searches of so many trials")
    given = parser.parse_args()
    try:
        print("\n".join(adopt(given.folder, given.task, tuple(given.methods), given.trials)))
    except StfsebError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
