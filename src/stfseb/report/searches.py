"""What searches chose, in a table: the rules' choices, and where and how each search was made."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from stfseb.data.tasks import load_task, task_names
from stfseb.experiments.paper.plan import METHODS, label_of, task_label
from stfseb.experiments.search.finals import called, epochs
from stfseb.report.grid import Cell, Grid
from stfseb.report.results_words import code_words

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_RULES = {"paper": "the paper's", "ours": "ours", "level": "level"}
_NEARLY_ALL = 0.9995  # an AUROC above it is written with more digits


def search_grid(searches: Sequence[Mapping[str, Any]]) -> Grid | None:
    """Return what the rules chose in every search, and whether it is the preset now."""
    if not searches:
        return None
    ranked = in_order(searches)
    rows, cells = [], []
    for found in ranked:
        for rules, choice in _agreeing(found):
            rows.append((task_of(found), label_of(found["plan"]["method"]), rules))
            cells.append(_choice(found, choice))
    columns = (
        "Trials",
        "Chosen",
        "Settings",
        "Validation NLL, nats ↓",
        "NLL at one T, nats ↓",
        "Accuracy, % ↑",
        "AUROC, held-back context, % ↑",
        "Preset",
    )
    notes = (
        (
        "On validation images, and context images held back from training; no test image and no unfamiliar set was "
        "looked at. At one T: after the temperature fitted on the validation images; the AUROC is after it too. "
        "Preset: whether the task's preset has these settings now."
        ),
        *_older(ranked),
        *_level(ranked),
        *_grid_ends(ranked),
        *(f"{found['study']}: {trials_in_words(found)}; `{search_command(found)}`; "
          f"stfseb {code_words(found.get('code') or {})}." for found in ranked),
    )  # fmt: skip
    stubs = ("Task", "Method", "Rule")
    return Grid("searches", "Searches", stubs, columns, tuple(rows), tuple(cells), notes, sortable=True)


def _older(ranked: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Say which searches compared trials after a temperature of single samples, and not of their average."""
    names = [str(found["study"]) for found in ranked if "temperature" not in found["plan"]]
    if not names:
        return ()
    which = "" if len(names) == len(ranked) else f" ({', '.join(names)})"
    return (f"Made when T divided the outputs of every sample, before they are averaged{which}.",)


def _level(ranked: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Say what the rule `level` is, where some search has a choice by it, and why not all have."""
    having = [found for found in ranked if "level" in found["choices"]]
    if not having:
        return ()
    words = "Level: as ours, but of those whose AUROC plus its standard error reaches the highest the lowest NLL"
    others = "" if len(having) == len(ranked) else "; searches made before there was this rule have no choice by it"
    return (f"{words}{others}.",)


def in_order(searches: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return searches by task, method and name."""
    order = {name: place for place, name in enumerate(task_names())}
    known = {name: place for place, name in enumerate(METHODS)}

    def place(found: Mapping[str, Any]) -> tuple[int, int, str]:
        plan = found["plan"]
        return order.get(plan["task"], 99), known.get(plan["method"], 99), str(found["study"])

    return sorted(searches, key=place)


def task_of(found: Mapping[str, Any]) -> str:
    """Return the task of a search as tables call it."""
    task = str(found["plan"]["task"])
    return task_label(task) if task in task_names() else str(found.get("task_title") or task)


def _agreeing(found: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """Return what a search chose, rules that chose alike named together."""
    alike: dict[Any, tuple[list[str], Mapping[str, Any]]] = {}
    for rule, choice in found["choices"].items():
        alike.setdefault(choice["trial"], ([], choice))[0].append(_RULES.get(rule, rule))
    return [(", ".join(rules), choice) for rules, choice in alike.values()]


def kind_in_words(found: Mapping[str, Any]) -> str:
    """Return what tells a search from others of its task and method: trials, their length, copies of context images."""
    listed, copies = found["plan"].get("shortlist"), found["plan"]["base"].get("context_copies")
    kind, of = ("trial", "") if listed is None else ("finalist", f" of {listed['trials']}")
    words = f"{found['asked']} {kind}{'s' * (found['asked'] != 1)}{of}, {epochs_of(found)}"
    return words + (f", {copies} {'copy' if copies == 1 else 'copies'}" if copies else "")


def _choice(found: Mapping[str, Any], choice: Mapping[str, Any]) -> tuple[Cell, ...]:
    different, space = _different(found), str(found["plan"]["space"])
    repeated = (f"{different} different",) if different < len(found["trials"]) else ()
    listed = found["plan"].get("shortlist")
    final = () if listed is None else (f"finalist{'s' * (found['asked'] != 1)} of {listed['trials']} trials",)
    copies = found["plan"]["base"].get("context_copies")
    widened = (f"{copies} context {'copy' if copies == 1 else 'copies'}",) if copies else ()
    done, asked = len(found["trials"]), found["asked"]
    unfinished = ("not finished: chosen so far",) if done < asked else ()
    below = (*final, *unfinished, *repeated, f"{space} grid", epochs_of(found), *widened)
    count = Cell(str(done) if done == asked else f"{done} of {asked}", done, below=below)
    trial = next((t for t in found["trials"] if t["index"] == choice["trial"]), None)
    if trial is None:
        return (count, Cell("—", below=(str(choice["why"]),)), *[Cell("—")] * 6)
    m = trial["metrics"]
    auroc = m.get("tempered_auroc")
    settings = ", ".join(f"{k} {v:g}" if isinstance(v, float) else f"{k} {v}" for k, v in trial["params"].items())
    task = found["plan"]["task"]
    preset = "—"  # of a task of one's own the file is not known
    if task in task_names():
        preset = "yes" if load_task(task).presets.get(found["plan"]["method"]) == choice["settings"] else "no"
    return (
        count,
        Cell(called(found, trial["index"])),
        Cell(settings),
        Cell(f"{trial['nll']:.4f}", trial["nll"]),
        Cell(f"{m['tempered_nll']:.4f}", m["tempered_nll"]),
        Cell(f"{100 * m['accuracy']:.2f}", 100 * m["accuracy"]),
        Cell("—") if auroc is None else Cell(f"{100 * auroc:.{4 if auroc > _NEARLY_ALL else 2}f}", 100 * auroc),
        Cell(preset),
    )


def epochs_of(found: Mapping[str, Any]) -> str:
    """Return how long each trial was trained at most."""
    return epochs(found["plan"]["training"]["epochs"])


def _grid_ends(searches: Sequence[Mapping[str, Any]]) -> list[str]:
    """Name the chosen values that are the first or last of what could be drawn: a better one may lie beyond."""
    found: dict[str, list[str]] = {}
    for search in searches:
        for rules, choice in _agreeing(search):
            trial = next((t for t in search["trials"] if t["index"] == choice["trial"]), None)
            for name, value in (trial or {}).get("params", {}).items():
                drawn = [v for v in search["plan"].get("choices", {}).get(name, ()) if isinstance(v, float)]
                if drawn and value in (min(drawn), max(drawn)):
                    who = f"{task_of(search)}, {label_of(search['plan']['method'])}, {kind_in_words(search)}"
                    of_rules = found.setdefault(f"{who}, {rules}", [])
                    # Searches that differ in seed, space or source of the context are told apart by nothing here.
                    of_rules += [words] if (words := f"{name} {value:g}") not in of_rules else []
    words = "; ".join(f"{who}: {', '.join(values)}" for who, values in found.items())
    return [f"Chosen at an end of the grid: {words}."] if found else []


def trials_in_words(found: Mapping[str, Any]) -> str:
    """Return how many trials there are and how they ended."""
    counts = {name: n for name, n in found["counts"].items() if n and name != "repeats"}
    done, asked = len(found["trials"]), found["asked"]
    ends = ", ".join(f"{n} {name}" for name, n in counts.items())
    different = _different(found)
    drawn = f", {different} different settings" if different < done else ""  # a draw that came before is not trained
    listed = found["plan"].get("shortlist")
    kind = f"{'trial' if listed is None else 'finalist'}{'s' * (asked != 1)}"
    kind += "" if listed is None else f" of {listed['trials']} trials of {epochs(listed['epochs'])}"
    return f"{done if done == asked else f'{done} of {asked}'} {kind} ({ends or 'none ended'}{drawn})"


def _different(found: Mapping[str, Any]) -> int:
    return len({json.dumps(trial["params"], sort_keys=True) for trial in found["trials"]})


def search_command(found: Mapping[str, Any]) -> str:
    """Return the command that makes a search."""
    plan, listed = found["plan"], found["plan"].get("shortlist")
    trials, length = found["asked"], plan["training"]["epochs"]
    if listed is not None:
        trials, length = listed["trials"], listed["epochs"]
    words = ["stfseb search", plan["task"], "--method", plan["method"], "--trials", str(trials)]
    words += ["--space", plan["space"]] if plan["space"] != "paper" else []
    if listed is not None or (plan["task"] in task_names() and length != load_task(plan["task"]).training["epochs"]):
        words += ["--epochs", str(length)]
    words += [] if listed is None else ["--finalists", str(listed["asked"])]
    words += ["--seed", str(plan["seed"])] if plan["seed"] else []
    if plan["task"] in task_names():  # of a task of one's own the file is not known
        preset = {"context_copies": 0, **load_task(plan["task"]).presets.get(plan["method"], {})}
        base = {"context_copies": 0, **plan["base"]}
        words += [w for k, v in base.items() if preset.get(k) != v for w in ("--set", f"{k}={v}")]
    return " ".join([*words, *(["--context", plan["context"]] if plan["context"] else [])])
