"""Run records, as they lie on disk, sorted into what a table row or a curve stands for."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stfseb.errors import StfsebError
from stfseb.report.chance import learnt_nothing, mostly

Record = Mapping[str, Any]
FORMAT = 1
ORDER = ("stfseb", "fseb", "gfsvi", "mcdropout", "mfvi", "map")
REFERENCES = ("ensemble", "outlierexposure")  # rows beside the methods compared, which are not counted among them
OTHER_SCORES = ("entropy", "mutual_information")


SHARED = (
    "These runs were trained several at a time on one card or machine: a time depends on what ran beside it and is no "
    "measure of a method's cost. 'stfseb paper efficiency' measures that, one run after the other."
)


def shared(record: Record) -> bool:
    """Tell whether a run had its device with others.

    Older records do not say: of their runs on a card, those that were alone have a peak of memory.
    """
    if record.get("together") is not None:
        return int(record["together"]) > 1
    on_card = str((record.get("machine") or {}).get("device", "")).startswith("cuda")
    return on_card and record.get("peak_memory_mb") is None


def shared_device(records: Sequence[Record]) -> bool:
    """Tell whether any of the runs had its device with others."""
    return any(shared(record) for record in records)


def plain(key: str) -> str:
    """Return a method's key without case and punctuation: 'MC-Dropout' and 'mc_dropout' are one."""
    return "".join(c for c in key.lower() if c.isalnum())


@dataclass(frozen=True)
class Group:
    """The runs of one method on one task, one a seed."""

    task: str
    method: str
    label: str
    records: tuple[Record, ...]

    @property
    def ours(self) -> bool:
        """Whether this is the method the project is about."""
        return plain(self.method) == ORDER[0]

    @property
    def collapsed(self) -> list[int]:
        """The seeds whose run collapsed or is at chance for another reason."""
        return [r.get("seed", 0) for r in self.records if learnt_nothing(r)]

    @property
    def failed(self) -> bool:
        """Whether so many of its runs learnt nothing that the row is not ranked."""
        return mostly(len(self.collapsed), len(self.records))

    @property
    def reference(self) -> bool:
        """Whether this is a reference row: it is shown beside the methods compared."""
        return plain(self.method) in REFERENCES

    @property
    def shown(self) -> str:
        """The label, marked where a run learnt nothing."""
        return self.label + (" †" if self.collapsed else "")


@dataclass(frozen=True)
class Spread:
    """Mean and sample standard deviation (ddof = 1) over seeds; no deviation for a single one."""

    mean: float
    std: float | None
    count: int


def spread(values: Sequence[float | None]) -> Spread | None:
    """Return the spread of the values that exist, None when there are none."""
    found = [float(v) for v in values if v is not None]
    if not found:
        return None
    return Spread(statistics.fmean(found), statistics.stdev(found) if len(found) > 1 else None, len(found))


def check(records: Sequence[Record]) -> list[Record]:
    """Return the records, the last of those with the same id, or say in one line why they cannot be used."""
    if not records:
        raise StfsebError("no runs to report on; run `stfseb compare` first or name a folder that has records")
    unique: dict[str, Record] = {}
    for number, record in enumerate(records, start=1):
        name = str(record.get("id", f"number {number}"))
        version = record.get("format", FORMAT)
        if not isinstance(version, int) or version > FORMAT:
            raise StfsebError(f"run {name} has format {version}, newer than {FORMAT}; update stfseb to read it")
        missing = [key for key in ("task", "method", "metrics") if key not in record]
        if missing:
            raise StfsebError(f"run {name} has no '{missing[0]}'; it is not a complete run record")
        unique[name] = record
    return list(unique.values())


def by_task(records: Sequence[Record]) -> dict[str, list[Record]]:
    """Return the records of each task, tasks in the order of their first run."""
    tasks: dict[str, list[Record]] = {}
    for record in records:
        tasks.setdefault(record["task"], []).append(record)
    return tasks


def groups(records: Sequence[Record]) -> list[Group]:
    """Return the rows of a task's table: one a method and label, in the order of `ORDER`, others after."""
    found: dict[tuple[str, str, str], list[Record]] = {}
    for record in records:
        label = str(record.get("label") or record["method"])
        found.setdefault((record["task"], record["method"], label), []).append(record)
    rows = [Group(*key, tuple(sorted(members, key=lambda r: r.get("seed", 0)))) for key, members in found.items()]
    known = {name: place for place, name in enumerate(ORDER)}
    return sorted(rows, key=lambda g: known.get(plain(g.method), len(ORDER)))


def title_of(records: Sequence[Record]) -> str:
    """Return the task's title for people, its key where none is recorded."""
    return str(next((r["task_title"] for r in records if r.get("task_title")), records[0]["task"]))


def ood_sets(records: Sequence[Record]) -> list[str]:
    """Return the names of the unfamiliar sets that any record was evaluated on, in order."""
    names: dict[str, None] = {}
    for record in records:
        for key in record["metrics"]:
            kind, _, name = key.partition("/")
            if kind == "auroc" and name and name.rpartition("/")[2] not in OTHER_SCORES:
                names[name] = None
    return list(names)


def common_sets(names: Iterable[str], records: Sequence[Record]) -> tuple[str, ...]:
    """Return those of the unfamiliar sets that every run was evaluated on: means over others would not compare."""
    return tuple(name for name in names if records and all(f"auroc/{name}" in r["metrics"] for r in records))


def mean_auroc(record: Record, sets: Sequence[str]) -> float:
    """Return a run's AUROC as the mean over unfamiliar sets, all of which it was evaluated on."""
    return statistics.fmean(record["metrics"][f"auroc/{name}"] for name in sets)


def ood_families(records: Sequence[Record]) -> dict[str, list[str]]:
    """Return sets by the column they share: 'mnist-c/fog' and 'mnist-c/shear' are averaged as 'mnist-c'."""
    families: dict[str, list[str]] = {}
    for name in ood_sets(records):
        families.setdefault(name.partition("/")[0], []).append(name)
    return {
        (f"{family}, mean of {len(names)}" if len(names) > 1 else names[0]): names for family, names in families.items()
    }


def missing_sets(records: Sequence[Record]) -> dict[str, str]:
    """Return the unfamiliar sets that some run of the task should have been evaluated on and was not, and why.

    They are those a record lists under "missing" (names, or names with reasons), those under "data" that have
    no metrics, and those that other runs of the task have.
    """
    wanted: dict[str, str] = {}
    everything = ood_sets(records)
    for record in records:
        listed = record.get("missing") or {}
        for name in listed:
            wanted[name] = str(listed[name]) if isinstance(listed, Mapping) else ""
        for key, about in (record.get("data") or {}).items():
            name = key.removeprefix("ood/")
            if name != key and f"auroc/{name}" not in record["metrics"]:
                wanted.setdefault(name, str((about or {}).get("note") or ""))
        for name in everything:
            if f"auroc/{name}" not in record["metrics"] and name not in wanted:
                label = record.get("label") or record["method"]
                wanted[name] = f"not evaluated for {label}, seed {record.get('seed', 0)}"
    return wanted
