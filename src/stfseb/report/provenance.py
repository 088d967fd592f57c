"""What the page says of the runs behind its numbers: their data, settings and machines, and what makes them unlike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from stfseb.report.chance import learnt_nothing
from stfseb.report.paper import retold
from stfseb.report.records import Record, groups

if TYPE_CHECKING:
    from collections.abc import Sequence


# What null says in a record's settings: the method's own value, where that has a name of its own.
_DEFAULTS = {
    "dof_function": "as dof",
    "dof_weights": "as dof",
    "features": "the input of the last Linear",
    "prior_mean": "zero",
    "vectorise": "by device",
    "subset_classes": "none",
}


def data_rows(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Return every distinct split that runs were made from."""
    seen: dict[tuple[str, str], dict[str, Any]] = {}
    for record in records:
        for split, about in (record.get("data") or {}).items():
            about = about or {}
            key = (split, str(about.get("fingerprint")))
            row = {"split": split} | {k: about.get(k) for k in ("name", "count", "fingerprint", "note")}
            seen.setdefault(key, row | {"note": retold(str(about.get("note") or ""))})
    return list(seen.values())


def warnings_of(records: Sequence[Record]) -> list[str]:
    """Say what makes the runs of a task hard to compare."""
    found = []
    splits: dict[str, set[str]] = {}
    for row in data_rows(records):
        splits.setdefault(row["split"], set()).add(str(row["fingerprint"]))
    for split, prints in splits.items():
        if len(prints) > 1 and split != "context":
            found.append(f"Runs were made with {len(prints)} different versions of the {split} data; see Data below.")
    for group in groups(records):
        seeds = [r.get("seed", 0) for r in group.records]
        repeated = sorted({s for s in seeds if seeds.count(s) > 1})
        if repeated:
            numbers = ", ".join(map(str, repeated))
            found.append(f"{group.label}: more than one run with seed {numbers}; each counts in the mean.")
        if len({repr((r.get("settings"), r.get("training"))) for r in group.records}) > 1:
            found.append(f"{group.label}: its runs do not all have the same settings; see Runs below.")
        if len({repr(_context(r)) for r in group.records}) > 1:
            found.append(f"{group.label}: its runs do not all have the same context images; see Runs below.")
    devices = {str((r.get("machine") or {}).get("device")) for r in records}
    if len(devices) > 1:
        found.append(f"Runs were made on different devices ({', '.join(sorted(devices))}): do not compare their times.")
    return found


def _context(record: Record) -> dict[str, Any]:
    """Return which images a run had as context; nothing for methods without context."""
    if not (record.get("settings") or {}).get("num_context"):
        return {}
    about = (record.get("data") or {}).get("context")
    if not about:
        return {"set": "the training images"}
    return {"set": about.get("name"), "images": about.get("count"), "fingerprint": about.get("fingerprint")}


def run_details(record: Record) -> dict[str, Any]:
    """Return what the page shows of one run."""
    context = _context(record)
    return {
        "id": str(record.get("id", "")),
        "label": str(record.get("label") or record["method"]),
        "seed": record.get("seed", 0),
        "collapsed": _failure(record),
        "parts": {
            "Settings": {k: _or(v, _DEFAULTS.get(k, "the default")) for k, v in (record.get("settings") or {}).items()},
            "Training": {k: _or(v, "none") for k, v in (record.get("training") or {}).items()},
            **({"Context": context} if context else {}),
            "Code": {k: _or(v, "not known") for k, v in (record.get("code") or {}).items()},
            "Machine": {k: _or(v, "not known") for k, v in (record.get("machine") or {}).items()},
            "Outcome": {
                "epochs run": len(record.get("history") or []) or None,
                "best epoch": _measured(record, "best_epoch"),
                "seconds": _measured(record, "seconds"),
                "peak memory, MB": _measured(record, "peak_memory_mb"),
                "runs at a time on the device": _measured(record, "together"),
            },
        },
    }


def _or(value: Any, words: str) -> Any:
    return words if value is None else value


def _measured(record: Record, key: str) -> Any:
    """Return an outcome; what was written down as nothing was not measured, what is absent was not recorded."""
    return _or(record[key], "not measured") if key in record else None


def _failure(record: Record) -> str:
    """Say in words that a run learnt nothing, "" where it did learn."""
    if record.get("collapsed"):
        return "collapsed to a constant prediction"
    return "at chance" if learnt_nothing(record) else ""


def setting_in_words(value: Any) -> str:
    """Print a recorded value the way a person would write it."""
    if value is None:
        return "not recorded"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{k} {setting_in_words(v)}" for k, v in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(setting_in_words(v) for v in value)
    return str(value)
