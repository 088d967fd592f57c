"""Put what searches chose into tasks.yaml: `python scripts/adopt_presets.py results/searches/STUDY [STUDY ...]`.

Each search must be finished. What our rule chose, or the one that --rule names, goes into its method's line of its
task's `presets`; settings that were not searched and comments stay as they are, so look whether the comments hold.
"""

from __future__ import annotations

import argparse
import re
import sys
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from stfseb.data.task_files import built_in
from stfseb.errors import StfsebError
from stfseb.experiments.search.outcome import read_search
from stfseb.experiments.search.rules import RULES
from stfseb.files import alone_in, write_text


def chosen(search: dict[str, Any], rule: str = "ours") -> dict[str, Any]:
    """Return the settings that a rule chose among the trials of a finished search."""
    if rule not in search["choices"]:
        remedy = "give its command again (it trains nothing)"
        if "temperature" not in search["plan"]:
            remedy = "it was made under an older temperature, so a new search is needed"
        raise StfsebError(f"{search['study']} has no choice by '{rule}': {remedy}")
    trial, done = search["choices"][rule]["trial"], len(search["trials"])
    if done != search["asked"]:
        raise StfsebError(f"{search['study']} has {done} of {search['asked']} trials: finish it first (stfseb search)")
    if trial is None:
        raise StfsebError(f"{search['study']} has chosen nothing: {search['choices'][rule]['why']}")
    return dict(next(one["params"] for one in search["trials"] if one["index"] == trial))


def with_preset(text: str, task: str, method: str, settings: dict[str, Any]) -> str:
    """Return tasks.yaml with these settings in a method's line of a task's presets."""
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
    whole = {**former, **settings}
    written = yaml.safe_dump(whole, default_flow_style=True, sort_keys=False, width=10**6).strip()
    place = slice(last + 1, last + 1) if there is None else slice(there, there + 1)
    lines[place] = [f"      {method}: {written}{comment}\n"]
    new = "".join(lines)
    if yaml.safe_load(new)["tasks"][task]["presets"][method] != whole:
        raise StfsebError(f"tasks.yaml: the line of '{method}' in '{task}' cannot be written: edit it by hand")
    return new


def adopt(studies: list[Path], file: Path | None = None, rule: str = "ours") -> list[str]:
    """Edit tasks.yaml (by default the package's own) and return a line for each search."""
    path = Path(str(resources.files("stfseb.data"))) / "tasks.yaml" if file is None else file
    with alone_in(path.parent):  # lists that are carried out side by side edit the same file
        return _adopted(studies, path, rule)


def _adopted(studies: list[Path], path: Path, rule: str) -> list[str]:
    text, said, took = path.read_text(encoding="utf-8"), [], dict[tuple[str, str], str]()
    for study in studies:
        search = read_search(study)
        settings, plan = chosen(search, rule), search["plan"]
        other = took.setdefault((plan["task"], plan["method"]), search["study"])
        if other != search["study"]:
            raise StfsebError(f"{search['study']} and {other} are of one method on one task: name the one that counts")
        presets = (yaml.safe_load(text)["tasks"].get(plan["task"]) or {}).get("presets") or {}
        had, has = (one.get("context_copies", 0) for one in (plan.get("base", {}), presets.get(plan["method"]) or {}))
        if had != has:
            raise StfsebError(
                f"{search['study']} had context_copies: {had}, the preset of '{plan['method']}' in '{plan['task']}' "
                f"has {has}: make them equal in tasks.yaml, then again"
            )
        text = with_preset(text, plan["task"], plan["method"], settings)
        former = {k: v for k, v in (presets.get(plan["method"]) or {}).items() if k in settings}
        was = "as it was" if former == settings else f"before {former or 'nothing'}"
        said.append(f"{plan['task']}, {plan['method']}: {settings}, {was} ({search['study']}, by {rule})")
    write_text(path, text)
    built_in.cache_clear()
    return [*said, f"written: {path}; runs at these settings and 'make results' come next"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("studies", metavar="STUDY", type=Path, nargs="+", help="the folder of a search")
    parser.add_argument("--rule", choices=RULES, default="ours")
    given = parser.parse_args()
    try:
        print("\n".join(adopt(given.studies, rule=given.rule)))
    except StfsebError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
