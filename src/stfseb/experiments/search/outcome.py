"""What a search leaves behind: search.json (every trial) and preset.yaml (the choices as settings)."""

from __future__ import annotations

import glob
import json
import math
from typing import TYPE_CHECKING, Any

from stfseb.errors import StfsebError
from stfseb.experiments.search.finals import called
from stfseb.experiments.search.plan import written
from stfseb.experiments.search.rules import RULES, choose
from stfseb.experiments.search.store import difference
from stfseb.files import read_json, write_text
from stfseb.methods.chance import at_chance

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from stfseb.experiments.search.plan import Plan
    from stfseb.experiments.search.rules import Images, Trial

FORMAT = 1


def outcome_of(
    plan: Plan,
    trials: Sequence[Trial],
    total: int,
    *,
    title: str,
    classes: int,
    images: Images,
    notes: Sequence[str],
    more: dict[str, Any],
) -> dict[str, Any]:
    """Return a search as plain data: the plan, every finished trial and what the rules choose."""
    counts = {name: sum(t["outcome"] == name for t in trials) for name in ("complete", "pruned", "diverged", "failed")}
    return {
        "format": FORMAT,
        "study": plan.name,
        "task_title": title,
        "classes": classes,
        "plan": plan.identity,
        "asked": total,
        "counts": counts | {"repeats": sum(t.get("same_as") is not None for t in trials)},
        "notes": [*notes, *_at_chance(trials, classes)],
        "images": images._asdict(),
        "choices": {rule: _chosen(plan.base, trials, rule, images) for rule in RULES},
        **more,
        "trials": list(trials),
    }


def _at_chance(trials: Sequence[Trial], classes: int) -> list[str]:
    """Say so where no trial has learnt anything: the rules choose among them all the same."""
    whole = [trial for trial in trials if trial["outcome"] == "complete"]
    if not whole or not all(at_chance(float(trial["nll"]), classes) for trial in whole):
        return []
    said = f"no trial did better than chance (validation NLL of ln {classes} = {math.log(classes):.3f})"
    return [f"{said}: what the rules choose means nothing; give more --epochs, or another --space"]


def _chosen(base: dict[str, Any], trials: Sequence[Trial], rule: str, images: Images) -> dict[str, Any]:
    choice = choose(trials, rule, images)
    if choice.trial is None:
        return {"trial": None, "why": choice.why}
    return {"trial": choice.trial["index"], "why": choice.why, "settings": {**base, **choice.trial["params"]}}


def write_search(folder: Path, found: dict[str, Any]) -> tuple[Path, Path]:
    """Write search.json, a trial a line, and preset.yaml; return their paths."""
    head = json.dumps({k: v for k, v in found.items() if k != "trials"}, indent=2, allow_nan=False)
    rows = ",\n".join(f"    {json.dumps(trial, allow_nan=False)}" for trial in found["trials"])
    write_text(folder / "search.json", f'{head[:-2]},\n  "trials": [\n{rows}\n  ]\n}}\n')
    write_text(folder / "preset.yaml", preset(found))
    return folder / "search.json", folder / "preset.yaml"


def preset(found: dict[str, Any]) -> str:
    """Return the choices as the `presets` of a task, each with where it comes from."""
    method, task = found["plan"]["method"], found["plan"]["task"]
    listed = found["plan"].get("shortlist")
    count = f"by a search of {found['asked']} trials"
    if listed is not None:
        count = f"among {found['asked']} finalists of {listed['trials']} trials"
    lines = [
        f"# Found {count} of {method} on {task}: study {found['study']}.",
        "# Put the `presets` of one of these into the task's entry in tasks.yaml, or into your own task file:",
        "# of `level` for use, of `paper` to compare with the paper (docs/search.md has the rules).",
    ]
    for rule, choice in found["choices"].items():
        if choice["trial"] is None:
            lines.append(f"# {rule}: {choice['why']}")
            continue
        settings = ", ".join(f"{name}: {_yaml(value)}" for name, value in choice["settings"].items())
        lines += [
            f"{rule}:  # {called(found, choice['trial'])}: {choice['why']}",
            f"  presets: {{{method}: {{{settings}}}}}",
        ]
    return "\n".join(lines) + "\n"


def _yaml(value: Any) -> str:
    """Write a setting as YAML reads it back: YAML takes 1e-05 for a word, 1.0e-05 for a number."""
    if isinstance(value, float):
        text = repr(value)
        return text.replace("e", ".0e") if "e" in text and "." not in text else text.replace("inf", ".inf")
    return json.dumps(value)


def check_folder(folder: Path, plan: Plan, data: dict[str, Any]) -> None:
    """Refuse a folder whose search.json is of another plan or of other images: it would be written over."""
    if not (folder / "search.json").exists():
        return
    found = read_search(folder)
    had, asked = ({k: v for k, v in one.items() if k != "shortlist"} for one in (found["plan"], plan.identity))
    for name, old, new in (("plan", had, json.loads(json.dumps(asked))), ("data", found.get("data"), data)):
        if old != new:
            raise StfsebError(
                f"{folder} holds a search with other {difference(old, new, name)}, which this one cannot go on with: "
                "move it away, or give another --out"
            )
    listed = None if plan.shortlist is None else {written(one["params"]) for one in plan.shortlist.finalists}
    if listed is not None and any(written(trial["params"]) not in listed for trial in found["trials"]):
        raise StfsebError(f"{folder} holds the final of another short list: move it away, or give another --out")


def finished_trials(folder: Path, plan: Plan, data: dict[str, Any]) -> list[Trial]:
    """Return what search.json in a folder has of this very search, on these images; none where it is of another.

    Of a final also what other finals of the same study have of its finalists, which are trained alike in all of them;
    one that was given up there, as workers died over it, is tried again here.
    """
    if plan.shortlist is None:
        found = _read_if(folder, plan.identity, data)
        return [] if found is None else list(found["trials"])
    done: dict[str, Trial] = {}
    for beside in [folder, *sorted(folder.parent.glob(f"{glob.escape(plan.shortlist.of)}-final*of*"))]:
        found = _read_if(beside, plan.identity, data, but=("shortlist",))
        for trial in [] if found is None else found["trials"]:
            if beside == folder or trial["outcome"] != "failed":
                done.setdefault(written(trial["params"]), trial)
    wanted = enumerate(written(one["params"]) for one in plan.shortlist.finalists)
    return [{**done[params], "index": index} for index, params in wanted if params in done]


def _read_if(folder: Path, identity: dict[str, Any], data: dict[str, Any], but: tuple[str, ...] = ()) -> Any:
    """Read the search in a folder if it is of this plan, up to some of its entries, and of these images."""
    if not (folder / "search.json").exists():
        return None
    found = read_search(folder)
    plans = [{name: value for name, value in one.items() if name not in but} for one in (found["plan"], identity)]
    return found if plans[0] == plans[1] and found.get("data") == data else None


def written_by(folder: Path, trials: Sequence[Trial]) -> dict[str, Any] | None:
    """Return the code that search.json in a folder names where it has these very trials: no newer one made any."""
    if not trials or not (folder / "search.json").exists():
        return None
    found = read_search(folder)
    return found.get("code") if found["trials"] == list(trials) else None


def read_search(path: Path) -> dict[str, Any]:
    """Read a search from its search.json or the folder that holds it."""
    file = path / "search.json" if path.is_dir() else path
    remedy = "give the folder that 'stfseb search' named (OUT/searches/NAME), or its search.json"
    if path.is_dir() and not file.exists():
        if (path / "study.db").exists():
            raise StfsebError(
                f"the search in {path.resolve()} has not ended, and was not stopped in order: its command goes on with "
                "it, 'stfseb status FOLDER' says how far it is"
            )
        inside = sorted(f.parent.name for f in path.glob("searches/*/search.json"))
        hint = f" (here searches/{inside[0]}{', ...' if len(inside) > 1 else ''})" if inside else ""
        raise StfsebError(f"folder {path.resolve()} holds no search.json: {remedy}{hint}")
    if not file.exists():
        raise StfsebError(f"search {path} does not exist: {remedy}")
    found = read_json(file, "search")
    if not isinstance(found, dict) or "trials" not in found or "choices" not in found:
        raise StfsebError(f"{file} is not a search: {remedy}")
    if found.get("format", 0) > FORMAT:
        raise StfsebError(f"{file} is of a newer format than this stfseb reads: upgrade stfseb")
    return found
